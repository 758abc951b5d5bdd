"""Time tracing and all passes against `jax.make_jaxpr` of the same train step, for models of 12 to 96 unrolled layers."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

# Run as a script, its folder is on the path and the project is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

EXAMPLE = """example:
  python benchmarks/trace_time.py --layers 12 24 --repeats 3 --json"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96], metavar="L", help="depths to time")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs; the median counts (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    import merak_jax

    merak_jax.emulate(8)
    rows = [measure(layers, options.repeats) for layers in options.layers]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Seconds of processor time, mesh 2·4·1, M=4, GPT-2 with AdamW and clipping")
    for name in ("layers", "parameter leaves", "make_jaxpr", "tracing and passes", "ratio", "lowering"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["layers"]),
            f"{row['leaves']:,}",
            f"{row['make_jaxpr']:.2f}",
            f"{row['passes']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['lowering']:.2f}",
        )
    Console().print(table)
    return 0


def measure(layers: int, repeats: int) -> dict:
    """Medians for one depth.

    `make_jaxpr`: the user's step traced once by JAX. `passes`: everything up to the plan: the step traced at both sizes,
    microbatches proved, blocks found, layouts chosen, the update re-rolled. `lowering`: from there to StableHLO. Caches are
    emptied before each.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax.training.train_state import TrainState

    from merak_jax import parallelize
    from tests.parity import make_batch, make_model, mesh_of, train_step

    model = make_model(layers, precision="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    state = jax.eval_shape(make_state)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch(0, dtype=jnp.float32)))
    found: dict[str, list[float]] = {"make_jaxpr": [], "passes": [], "lowering": []}

    def timed(name: str, function, *args):
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        result = function(*args)
        found[name].append(time.process_time() - start)
        return result

    for _ in range(repeats):
        timed("make_jaxpr", jax.make_jaxpr(train_step), state, batch)
        step = parallelize(train_step, mesh=mesh_of(2, 4, 1), num_microbatches=4)
        lowered = timed("passes", step.lower, state, batch)
        timed("lowering", getattr, lowered, "lowered")
    row = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = statistics.median(p / m for p, m in zip(found["passes"], found["make_jaxpr"]))
    return {"layers": layers, "leaves": len(jax.tree.leaves(state.params)), **row, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
