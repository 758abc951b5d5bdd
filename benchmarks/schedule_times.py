"""Step times of schedules on four emulated devices, beside what the simulation of their ticks says.

    python benchmarks/schedule_times.py --json

The times of F, R, B, Bi and W are measured from one block on one device; `simulate` adds them up for the ticks that run. Emulated
devices share the machine's cores, each computing with one thread. With fewer cores than stages a tick lasts as long as its slowest
stage, or as all its tasks together on the cores there are, whichever is longer: `on_cores` counts that. Two schedules agree where
the measured order is the predicted one, or the predictions differ by less than 5 %. `cpu_s` is the processor time of a step. With
`--profile` it is said what for: matmuls, moving values into and out of buffers (updates, slices, copies), and all else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# One thread for each device's matmuls: else a single busy stage takes all cores, and idle stages cost nothing.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

STAGES, LAYERS = 4, 16
CASES = (
    ("1f1b", "merged"),
    ("interleaved", "merged"),
    ("shifted_critical_path", "switched"),
    ("1f1b", "switched"),
    ("zb_h1", "switched"),
)


# Predictions closer than this are taken as equal.
CLOSE = 0.05


def simulated(table, costs: dict) -> float:
    """The length of a step by the tick simulation, every stage on a core of its own."""
    from merak_jax.schedules.simulate import simulate

    whole = costs["Bi"] + costs["W"]
    return simulate(
        table, forward=costs["F"], backward=whole, weight_gradient=costs["W"], recompute=costs["R"]
    ).makespan


def on_cores(table, costs: dict, cores: int) -> float:
    """The same on fewer cores: each tick as long as its slowest stage, or as its tasks together on so many cores."""
    whole = {**costs, "B": costs["Bi"] + costs["W"]}
    total = 0.0
    for tick in range(table.num_ticks):
        busy = [
            sum(whole[str(task.kind)] for task in table.tasks(tick, stage))
            + costs["R"] * table.recomputes_inside(tick, stage)
            for stage in range(table.num_stages)
        ]
        total += max(*busy, sum(busy) / cores) / table.num_chunks
    return total


def disagreements(rows: list[dict], name: str) -> list[str]:
    """Pairs of schedules that the prediction `name` tells apart, and that were measured the other way round."""
    found = []
    for one, two in itertools.combinations(rows, 2):
        first, second = sorted((one, two), key=lambda row: row[name])
        if second[name] > first[name] * (1 + CLOSE) and second["measured_s"] < first["measured_s"]:
            found.append(f"{second['schedule']} {second['form']} before {first['schedule']} {first['form']}")
    return found


def make_step(width: int, rows: int, length: int, microbatches: int):
    """A residual MLP with one matmul before it and no head to speak of, so that the blocks are what counts."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(width)(x)
            for _ in range(LAYERS):
                x = Block()(x)
            return x

    model = Model()
    x = np.random.default_rng(0).normal(size=(rows * microbatches, length, width)).astype(np.float32)
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(x[:1]))["params"]

    def create():
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-3))

    def train_step(state, batch):
        def loss(params):
            return jnp.square(state.apply_fn({"params": params}, batch["x"])).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return create, train_step, {"x": x}


def task_costs(step, repetitions: int) -> dict[str, float]:
    """Seconds of F, R, B, Bi and W of one block, on one device, from the derivative that the pipeline runs."""
    import jax
    import jax.numpy as jnp

    from merak_jax.partition.derivative import BlockDerivative
    from merak_jax.tracing.jaxprs import evaluate

    graph = step._latest.program.pipeline.graph
    chain = graph.chains[0]
    derivative = BlockDerivative.of(
        chain, [True], [True] * len(chain.lane_prepare.outvars), [False] * len(chain.shared)
    )
    operands = [jnp.ones(v.aval.shape, v.aval.dtype) for v in chain.body.invars]
    cotangent = [operands[0]]

    def compiled(program):
        return jax.jit(lambda *values: evaluate(program, [], *derivative.constants, *values))

    residuals = compiled(derivative.recompute)(*operands)
    early = compiled(derivative.input_gradient)(*operands, *residuals, *cotangent)

    def seconds(function, *more) -> float:
        jax.block_until_ready(function(*operands, *more))
        found = []
        for _ in range(repetitions):
            start = time.perf_counter()
            jax.block_until_ready(function(*operands, *more))
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    costs = {
        "F": seconds(jax.jit(lambda *operands: evaluate(chain.body, [], *operands))),
        "R": seconds(compiled(derivative.recompute)),
        "B": seconds(compiled(derivative.backward), *residuals, *cotangent),
        "Bi": seconds(compiled(derivative.input_gradient), *residuals, *cotangent),
        "W": seconds(compiled(derivative.weight_gradient), *early[1:]),
    }
    return {kind: value * LAYERS / STAGES for kind, value in costs.items()}


def profile(step, state, batch) -> dict[str, float]:
    """Thread seconds of a step by what they are spent on, from JAX's profiler."""
    import jax

    found = {"matmul": 0.0, "moving": 0.0, "other": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(state, batch))
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    for event in (event for plane in data.planes for line in plane.lines for event in line.events):
        name = event.name
        # Python's own lines begin with $; loops, branches and collectives contain others' work or wait for it.
        if name.startswith("$") or not name[0].islower() or re.match("while|cond|call|all-|ppermute|collective", name):
            continue
        matmul = re.match(r"dot|ynn", name)
        kind = "matmul" if matmul else "moving" if re.search("dynamic|copy|slice", name) else "other"
        found[kind] += event.duration_ns / 1e9
    return found


def main() -> int:
    """Measure, print, and say whether the order of the times is the predicted one."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a microbatch (default 4)")
    parser.add_argument("--length", type=int, default=128, help="positions of a row (default 128)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")
    parser.add_argument("--repetitions", type=int, default=7, help="steps; the median counts (default 7)")
    parser.add_argument("--profile", action="store_true", help="also say what the processor time is spent on")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    import merak_jax

    merak_jax.emulate(STAGES)
    import jax

    sizes = (options.width, options.rows, options.length, options.microbatches)
    create, train_step, batch = make_step(*sizes)
    mesh = merak_jax.make_mesh(pipe=STAGES)
    cores = len(os.sched_getaffinity(0))
    runs = {}
    for schedule, form in CASES:
        step = merak_jax.parallelize(
            train_step, mesh=mesh, num_microbatches=options.microbatches, schedule=schedule, form=form
        )
        state, _ = step(create(), batch)
        runs[schedule, form] = step, state, [], []
    costs = task_costs(step, 4 * options.repetitions)
    for _ in range(options.repetitions):
        # In turn, so that a slow moment of the machine meets all of them.
        for key, (step, state, seconds, processor) in runs.items():
            start, work = time.perf_counter(), time.process_time()
            state, value = step(state, batch)
            jax.block_until_ready((state, value))
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - work)
            runs[key] = step, state, seconds, processor
    rows = [
        {
            "schedule": schedule,
            "form": form,
            "measured_s": statistics.median(seconds),
            "simulated_s": simulated(step.plan.table, costs),
            "on_cores_s": on_cores(step.plan.table, costs, cores),
            "cpu_s": statistics.median(processor),
            **({"profile_s": profile(step, state, batch)} if options.profile else {}),
        }
        for (schedule, form), (step, state, seconds, processor) in runs.items()
    ]
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {cores} cores, {STAGES} emulated devices",
        "task_s": costs,
        "rows": rows,
        "other_order_than_simulated": disagreements(rows, "simulated_s"),
        "other_order_than_on_cores": disagreements(rows, "on_cores_s"),
        "other_order_than_cpu": disagreements(rows, "cpu_s"),
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    print(result["machine"])
    print("tasks of a stage, s: " + ", ".join(f"{kind} {value:.4f}" for kind, value in costs.items()))
    base = rows[0]
    for row in rows:
        ratios = ", ".join(
            f"{name[:-2].replace('_', ' ')} {row[name]:.3f} s ({row[name] / base[name]:.2f})"
            for name in ("measured_s", "simulated_s", "on_cores_s", "cpu_s")
        )
        spent = ", ".join(f"{kind} {value:.2f}" for kind, value in row.get("profile_s", {}).items())
        print(f"{row['schedule']:24}{row['form']:10}{ratios}{spent and '; '}{spent}")
    for name in ("other_order_than_simulated", "other_order_than_on_cores", "other_order_than_cpu"):
        print(f"{name.replace('_', ' ')}: {', '.join(result[name]) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
