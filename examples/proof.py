"""Measures how far the parallel step is from the single-device step: one step, loss and raw gradients."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import numpy as np
import optax

import merak_jax

BARS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}


def gradient_keeper() -> optax.GradientTransformation:
    """SGD whose momentum (decay 0) is the raw gradient; `old - new` would carry the parameters' rounding."""
    return optax.sgd(1.0, momentum=0.0)


def compare(train_step, create_state, rng, batch, **parallel) -> dict:
    """One step on one device against one through `parallelize(train_step, **parallel)`, same `rng` and batch.

    `create_state` must use `gradient_keeper()`. Returns "difference", the worst of the loss and of all gradient
    leaves as max|difference| / max|value| of that leaf; "where", its name; and "rounding", the same number for the
    single-device step against itself with the rows of the batch reversed.
    """
    step = merak_jax.parallelize(train_step, **parallel)
    single = jax.jit(train_step)
    with jax.default_matmul_precision("highest"):
        start = jax.jit(create_state)(rng)
        expected = _loss_and_gradients(*single(start, batch))
        reordered = _loss_and_gradients(*single(start, jax.tree.map(lambda rows: rows[::-1], batch)))
        state, metrics = step(step.init(create_state, rng), batch)
        actual = _loss_and_gradients(step.unshard(state), metrics)
    difference, where = _worst(actual, expected)
    return {"difference": difference, "where": where, "rounding": _worst(reordered, expected)[0]}


def _loss_and_gradients(state, metrics) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree.flatten_with_path(state.opt_state[0].trace)
    gradients = {_name(path): np.asarray(leaf) for path, leaf in leaves}
    return {"loss": np.asarray(metrics["loss"]), **gradients}


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _worst(actual, expected) -> tuple[float, str]:
    return max((_relative(actual, expected, name), name) for name in expected)


def _relative(actual, expected, name) -> float:
    # A key bias adds the same to all scores of a query, which softmax ignores: its gradient is zero but for
    # rounding, so it's measured against that of the key kernel.
    scale = np.abs(expected[name.replace("/key/bias", "/key/kernel")]).max()
    difference = np.abs(actual[name] - expected[name]).max() / scale
    # max() would pass over a NaN.
    return float(difference) if np.isfinite(difference) else float("inf")


def run_in_subprocess(program: str, arguments: list[str], precision: str) -> dict:
    """The result of `compare` at `precision`, from `program --proof-only` in a process of its own.

    float64 is a setting of a whole JAX process. Raises RuntimeError with the last line of a failure.
    """
    command = [sys.executable, program, *arguments, "--dtype", precision, "--proof-only"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"the {precision} proof ended with code {result.returncode}: {last}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def prove(program: str, arguments: list[str], precisions: list[str]) -> tuple[str, bool]:
    """One line for people, and whether every precision is within its bar."""
    results = {name: run_in_subprocess(program, arguments, name) for name in precisions}
    passed = all(_is_within_bar(name, result) for name, result in results.items())
    numbers = ", ".join(f"{name} {r['difference']:.1e} (at {r['where']})" for name, r in results.items())
    verdict = "proof" if passed else "PROOF FAILED"
    what = "largest relative difference to the single-device step over loss and gradients"
    return f"{verdict}: {what}: {numbers}", passed


def _is_within_bar(precision: str, result: dict) -> bool:
    # In bfloat16 small leaves such as value biases move by some percent when rows merely change their order.
    return result["difference"] <= max(BARS[precision], 3 * result["rounding"])
