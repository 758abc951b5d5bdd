"""Step time and temporary memory against a hand-written pipeline and plain gradient accumulation, on emulated devices."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SAME_LOSS = 1e-5
# name -> (mesh or None for the plain step, microbatches, target ratio)
TIMES = {
    "pipeline 2·4·1": ((2, 4, 1), 8, 0.85),
    "pipeline 2·2·2": ((2, 2, 2), 8, 0.95),
    "plain 1·1·1": (None, 8, 1.05),
}
BYTES = {"temporary bytes 2·4·1, M=32": ((2, 4, 1), 32, 0.5)}


def machine() -> str:
    """Processor, cores and JAX version."""
    import jax

    names = (
        [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        if os.path.exists("/proc/cpuinfo")
        else ["unknown processor"]
    )
    return f"{names[0]}, {os.cpu_count()} cores, jax {jax.__version__}, emulated CPU devices"


class Case:
    """Both sides of one comparison: the model, the optimizer, the mesh and the data."""

    def __init__(self, mesh: tuple[int, int, int] | None, num_microbatches: int, head: str, layers: int = 8):
        import merak_jax

        data, pipe, tensor = mesh or (1, 1, 1)
        merak_jax.emulate(data * pipe * tensor)
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        from flax.training.train_state import TrainState

        from benchmarks import baseline_pipeline
        from merak_jax.models.gpt2 import GPT2, GPT2Config, next_token_loss

        self.jax = jax
        config = GPT2Config(vocab_size=4096, max_length=128, num_layers=layers, num_heads=8, width=256)
        model, tx = GPT2(config), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        rng = np.random.default_rng(0)
        shape = (data * num_microbatches * 4, config.max_length)
        tokens = rng.integers(0, config.vocab_size, (2, *shape)).astype(np.int32)
        self.batch = {"tokens": tokens[0], "targets": tokens[1]}
        self.params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]

        def create(params):
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        def train_step(state, batch):
            def loss(params):
                return next_token_loss(state.apply_fn({"params": params}, batch["tokens"]), batch["targets"])

            value, gradients = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=gradients), value

        self.create = create
        devices = merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor)
        self.ours = merak_jax.parallelize(train_step, mesh=devices, num_microbatches=num_microbatches)
        options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
        if mesh is None:
            # One device has no collectives to keep in order: both sides run with XLA's own scheduler.
            self.theirs = jax.jit(baseline_pipeline.accumulated_step(model, num_microbatches), donate_argnums=0)
            self.place = lambda params: jax.tree.map(jnp.copy, create(params))
        else:
            self.place, self.theirs = baseline_pipeline.pipelined_step(
                config, devices, num_microbatches, tx, head, options
            )

    def same_loss(self, ours, theirs) -> None:
        """Raise unless two losses are the same number."""
        ours, theirs = float(ours), float(theirs)
        if not abs(ours - theirs) <= SAME_LOSS * abs(theirs):
            raise SystemExit(f"the two sides compute different losses: {ours} and {theirs}")

    def times(self, repetitions: int) -> tuple[list[float], list[float], float]:
        """Seconds a step of both sides, alternating, and the ratio of their processor time; every loss is compared."""
        states = [self.create(self.params), self.place(self.params)]
        sides = [self.ours, self.theirs]
        seconds: list[list[float]] = [[], []]
        processor: list[list[float]] = [[], []]
        for _ in range(repetitions + 1):
            losses = []
            for side in (0, 1):
                start, used = time.perf_counter(), time.process_time()
                states[side], loss = sides[side](states[side], self.batch)
                self.jax.block_until_ready((self.jax.tree.leaves(states[side]), loss))
                seconds[side].append(time.perf_counter() - start)
                processor[side].append(time.process_time() - used)
                losses.append(loss)
            self.same_loss(*losses)
        ratio = statistics.median(processor[0][1:]) / statistics.median(processor[1][1:])
        return seconds[0][1:], seconds[1][1:], ratio

    def temporary_bytes(self) -> tuple[int, int]:
        """Temporary bytes per device of both compiled steps."""
        jax = self.jax
        shapes = jax.eval_shape(self.create, self.params)
        ours = self.ours.lower(shapes, self.batch).memory
        placed = jax.eval_shape(self.place, self.params)
        theirs = self.theirs.lower(placed, self.batch).compile().memory_analysis()
        return ours.temp_size_in_bytes, theirs.temp_size_in_bytes


def measure(name: str, repetitions: int, head: str) -> dict:
    """One comparison, in this process."""
    mesh, num_microbatches, target = (TIMES | BYTES)[name]
    case = Case(mesh, num_microbatches, head)
    result = {"case": name, "target": target, "machine": machine()}
    if name in BYTES:
        ours, theirs = case.temporary_bytes()
        return result | {"ours_bytes": ours, "baseline_bytes": theirs, "ratio": ours / theirs}
    ours, theirs, processor_ratio = case.times(repetitions)
    medians = statistics.median(ours), statistics.median(theirs)
    return result | {
        "ours_s": medians[0],
        "baseline_s": medians[1],
        "ratio": medians[0] / medians[1],
        "processor_ratio": processor_ratio,
        "all_ours_s": ours,
        "all_baseline_s": theirs,
    }


def measure_apart(name: str, repetitions: int, head: str, timeout: float) -> dict:
    """`measure` in a process of its own: a hanging or crashing case fails alone."""
    root = Path(__file__).resolve().parent.parent
    command = [
        sys.executable,
        "-m",
        "benchmarks.step_time",
        "--json",
        "--case",
        name,
        "--head",
        head,
        "--repetitions",
        str(repetitions),
    ]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"case": name, "error": f"no result within {timeout:.0f} s"}
    if done.returncode:
        return {"case": name, "error": (done.stderr or done.stdout).strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--case", choices=[*TIMES, *BYTES], help="measure one case, in this process")
    parser.add_argument("--repetitions", type=int, default=5, help="measured steps of each side (default 5)")
    parser.add_argument(
        "--head",
        default="last",
        choices=("last", "split", "replicated"),
        help="where the baseline computes norm, logits and loss (default: on the last stage)",
    )
    options = parser.parse_args()
    if options.case:
        results = iter([measure(options.case, options.repetitions, options.head)])
    else:
        results = (measure_apart(name, options.repetitions, options.head, 240) for name in [*TIMES, *BYTES])
    failed = False
    for result in results:
        failed |= "error" in result
        if options.json:
            print(json.dumps(result), flush=True)
        elif "error" in result:
            print(f"{result['case']}: {result['error']}", flush=True)
        elif "ours_bytes" in result:
            print(
                f"{result['case']}: {result['ours_bytes']:,} / {result['baseline_bytes']:,} bytes = "
                f"{result['ratio']:.2f} (target {result['target']})  [{result['machine']}]",
                flush=True,
            )
        else:
            print(
                f"{result['case']}: {result['ours_s']:.2f} / {result['baseline_s']:.2f} s = {result['ratio']:.2f} "
                f"(target {result['target']}), {result['processor_ratio']:.2f} in processor time  [{result['machine']}]",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
