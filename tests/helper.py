"""One question for every test of the runtime: does the parallel step give the numbers of the single-device step?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, keystr, tree_flatten_with_path

import merak_jax
from merak_jax.runtime import tick_run

# Largest relative difference allowed for one step, and for the state after three optimizer steps.
BARS = {"float64": (1e-12, 1e-9), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)}
# A leaf smaller than this share of the largest one of its kind is measured against that share.
FLOOR = 1e-3
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """A few steps of training: metrics of every step, gradients of the first, the state after the last, all whole."""

    metrics: tuple[Any, ...]
    gradients: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class Differences:
    """The worst relative difference of each kind, with the leaf that has it."""

    metrics: tuple[float, str]
    gradients: tuple[float, str]
    trained: tuple[float, str]

    def over(self, precision: str) -> list[str]:
        """What is above the bar of `precision`, one line each; empty when the runs are the same."""
        one_step, trained = BARS[precision]
        lines = []
        for name, bar in (("metrics", one_step), ("gradients", one_step), ("trained", trained)):
            worst, leaf = getattr(self, name)
            if not worst <= bar:
                lines.append(f"{name}: {leaf} differs by {worst:.2e}, allowed {bar:.0e}")
        return lines


def assert_same_as_single_device(
    train_step: Callable,
    make_state: Callable,
    make_batch: Callable,
    mesh,
    *,
    optimizer: optax.GradientTransformation | None = None,
    precision: str = "float64",
    rest: tuple = (),
    steps: int = STEPS,
    expected: Run | None = None,
    **options: Any,
) -> Differences:
    """Assert that `merak_jax.parallelize(train_step, mesh=mesh, **options)` computes what `jax.jit(train_step)` does.

    The same three batches go through both. Compared are all metrics and the raw gradients of the first step, and metrics
    and the whole state after three steps of `optimizer`; also tree structure, shapes, types, and integers exactly.

    `make_state(tx)` makes the user's state with an optimizer, `make_batch(n)` the batch of step n; the step is
    `train_step(state, batch, *rest)` and returns `(state, metrics)`. `make_state` gets `optimizer` behind
    `optax.trace(decay=0)`, which keeps the raw gradients in the state: a factor on a gradient that Adam or clipping would
    hide is seen, and no digits are lost as they would be in a difference of parameters.

    The default optimizer is Adam with eps 1e-3. The bias of the keys in attention has a gradient of zero (softmax does not
    see it), so that on any device only rounding noise is left of it; with a tiny eps Adam would blow that noise up to a full
    step. With a large one, noise stays noise, and everything else still trains.

    `expected`: the single-device run, when several tests share it. Returns the differences found.
    """
    optimizer = optax.adam(1e-2, eps=1e-3) if optimizer is None else optimizer
    if expected is None:
        expected = run_on_one_device(train_step, make_state, make_batch, optimizer, rest=rest, steps=steps)
    actual = run_on_mesh(train_step, make_state, make_batch, mesh, optimizer, rest=rest, steps=steps, **options)
    found = differences(actual, expected)
    assert not found.over(precision), "\n".join(found.over(precision))
    return found


def run_on_one_device(train_step, make_state, make_batch, optimizer, *, rest=(), steps=STEPS) -> Run:
    """The reference: the unwrapped step under `jax.jit` on one device."""
    return _run(jax.jit(train_step), lambda state: state, make_state, make_batch, optimizer, rest, steps)


def run_on_mesh(train_step, make_state, make_batch, mesh, optimizer, *, rest=(), steps=STEPS, **options) -> Run:
    """The parallel step; the state that the user passed in must stay readable."""
    step = merak_jax.parallelize(train_step, mesh=mesh, **options)
    return _run(step, step.unshard, make_state, make_batch, optimizer, rest, steps)


def _run(step, unshard, make_state, make_batch, optimizer, rest, steps) -> Run:
    first = make_state(_recording(optimizer))
    before = jax.device_get(first)
    state, metrics, gradients = first, [], None
    for n in range(steps):
        state, m = step(state, make_batch(n), *rest)
        metrics.append(jax.device_get(m))
        if n == 0:
            gradients = jax.device_get(raw_gradients(unshard(state)))
    assert worst_leaf(first, before)[0] == 0, "the step changed the state that the user passed in"
    return Run(tuple(metrics), gradients, jax.device_get(unshard(state)))


@functools.cache
def _recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` behind a transformation that keeps the gradients; equal ones are one object, for the cache of `jax.jit`."""
    return optax.chain(optax.trace(decay=0.0), optimizer)


@contextlib.contextmanager
def polluted_buffers() -> Iterator[None]:
    """Steps built inside find NaN, or 113, where the pipeline has written nothing: in bubbles and in unused slots."""
    made, empty_buffer = [], tick_run.empty_buffer

    def polluted(shape, dtype):
        made.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 113, dtype)

    tick_run.empty_buffer = polluted
    try:
        yield
    finally:
        tick_run.empty_buffer = empty_buffer
    assert made, "the pipeline made no buffer by empty_buffer"


def raw_gradients(state: Any) -> Any:
    """The gradients of the latest step, kept by the `optax.trace(decay=0)` in the state."""

    def is_trace(x):
        return isinstance(x, optax.TraceState)

    return next(x for x in jax.tree.leaves(state, is_leaf=is_trace) if is_trace(x)).trace


def differences(actual: Run, expected: Run) -> Differences:
    """The worst leaf of each kind; AssertionError for another structure, shape or type, or for an unequal integer."""
    return Differences(
        metrics=worst_leaf(actual.metrics[0], expected.metrics[0], floor=0.0),
        gradients=worst_leaf(actual.gradients, expected.gradients),
        trained=max(worst_leaf(actual.state, expected.state), worst_leaf(actual.metrics, expected.metrics, floor=0.0)),
    )


def worst_leaf(actual: Any, expected: Any, floor: float = FLOOR) -> tuple[float, str]:
    """The largest max|Δ| / max|value| over the leaves of two trees, and the path of that leaf.

    The denominator of a leaf is at least `floor` times the largest value among the leaves of its kind (all parameters, all
    first moments, ...): a gradient that is zero by the structure of the model is rounding noise in the reference too, and its
    quotient says nothing. What could be wrong is still seen: a leaf that was dropped, doubled or rescaled differs by its own
    size, so unless that size is below bar * floor of the largest leaf (1e-15 of it in float64, that is, noise) the quotient
    is above the bar.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected), (
        f"another tree structure: {jax.tree.structure(actual)}, expected {jax.tree.structure(expected)}"
    )
    pairs = [
        (path, _array(a), _array(e))
        for (path, a), e in zip(tree_flatten_with_path(actual)[0], jax.tree.leaves(expected))
    ]
    largest: dict[str, float] = {}
    for path, _, e in pairs:
        largest[_kind(path)] = max(largest.get(_kind(path), 0.0), _largest(e))
    worst = (0.0, "")
    for path, a, e in pairs:
        assert (a.shape, a.dtype) == (e.shape, e.dtype), (
            f"{keystr(path)} is {a.dtype}{list(a.shape)}, expected {e.dtype}{list(e.shape)}"
        )
        if not _is_inexact(e):
            np.testing.assert_array_equal(a, e, err_msg=keystr(path))
            continue
        wide = np.promote_types(np.float64, e.dtype) if e.dtype.kind == "c" else np.float64
        delta = _largest(a.astype(wide) - e.astype(wide))
        scale = max(_largest(e), floor * largest[_kind(path)])
        quotient = 0.0 if delta == 0 else delta / scale if scale else np.inf
        # NaN is worse than anything, and compares as nothing.
        worst = max(worst, (np.inf if np.isnan(quotient) else float(quotient), keystr(path)))
    return worst


def _array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _is_inexact(array: np.ndarray) -> bool:
    return jax.dtypes.issubdtype(array.dtype, np.inexact)


def _largest(array: np.ndarray) -> float:
    return (
        float(np.max(np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))))
        if array.size
        else 0.0
    )


def _kind(path: tuple) -> str:
    """What a leaf is one of: its path without the names of the parameter (the dictionary keys at its end)."""
    end = len(path)
    while end and isinstance(path[end - 1], DictKey):
        end -= 1
    return keystr(path[:end])
