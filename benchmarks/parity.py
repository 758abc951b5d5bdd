"""How far parallel training is from one device: models x meshes x microbatches, `python benchmarks/parity.py --workers 2`.

By default, the table of models: rows are models and train steps, columns are meshes (data·pipe·tensor) and numbers of
microbatches M, a cell is the largest relative difference. `--full` is the product of all options of one GPT-2, `--grid` a part
of it, `--schedules` has every schedule, `--overlap` every way to hide communication. A cell passes if metrics, raw gradients and
the state after three steps are at the bar of its precision; for GPT-2 there is also `through_sgd`, the parameters after one SGD
step with those gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import parity_cells, parity_gpt2, parity_models, parity_overlap, parity_schedules  # noqa: E402

EXAMPLE = """examples:
  python benchmarks/parity.py --workers 2
  python benchmarks/parity.py --only "nnx, 2x2x2" --json > nnx.json
  python benchmarks/parity.py --grid --workers 2 --json > grid.json
  python benchmarks/parity.py --full --only 2x2x2 --sample 10 --seed 1"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suite = parser.add_mutually_exclusive_group()
    suite.add_argument(
        "--grid",
        action="store_true",
        help="one GPT-2: every mesh x microbatches x depth x layers x head once; schedule, mask and optimizer take turns",
    )
    suite.add_argument("--full", action="store_true", help="one GPT-2: the product of all these options")
    suite.add_argument("--schedules", action="store_true", help="one GPT-2: every schedule in every form of ticks")
    suite.add_argument(
        "--overlap", action="store_true", help="one GPT-2: every way to hide communication, the carry split and whole"
    )
    parser.add_argument("--only", metavar="SUBSTRING", help="only cells whose name contains this")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N cells")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cells, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample (default 0)")
    parser.add_argument("--minutes", type=float, help="start no batch of cells after this time")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="most cells per subprocess (default 32)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="subprocesses at a time (default 1)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile without most optimisations of the machine code, in two thirds of the time",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document with every cell")
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = make_parser().parse_args()
    suite = suite_of(options)
    if options.worker:
        return work(suite, options.quick)
    cells = choose(options)
    if options.list:
        print("\n".join(map(str, cells)))
        return 0
    batches = [[{"cell": str(c), **dataclasses.asdict(c)} for c in batch] for batch in batches_of(cells, options)]
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    if suite is parity_gpt2:
        command.append("--full")
    if options.quick:
        command.append("--quick")
    results = parity_cells.run_all(batches, command, workers=options.workers, minutes=options.minutes)
    failed = [r for r in results if not r["passed"]]
    if options.json:
        print(json.dumps(document(suite, results, len(cells)), indent=1))
    else:
        from rich.console import Console

        suite.report(results, len(cells), worst(results, suite.KINDS))
        for result in failed:
            Console().print(f"{result['cell']}: {result['error']}", highlight=False, markup=False)
    return 1 if failed else 0


def suite_of(options: argparse.Namespace) -> ModuleType:
    """The module with the cells that the options ask for."""
    if options.schedules:
        return parity_schedules
    if options.overlap:
        return parity_overlap
    return parity_gpt2 if options.grid or options.full else parity_models


def choose(options: argparse.Namespace) -> list:
    """The cells that the options ask for."""
    import numpy as np

    suite = suite_of(options)
    cells = parity_gpt2.cells(options.grid) if suite is parity_gpt2 else suite.cells()
    cells = [cell for cell in cells if options.only is None or options.only in str(cell)]
    if options.sample is not None:
        # In the order drawn: a run that stops early has seen a bit of everything.
        order = np.random.default_rng(options.seed).permutation(len(cells))
        cells = [cells[n] for n in order[: options.sample]]
    return cells[: options.limit]


def batches_of(cells: list, options: argparse.Namespace) -> list[list]:
    """Cells that can share single-device runs go to one subprocess, in batches; a sample keeps its order."""
    groups = [cells]
    if options.sample is None:
        share, together = suite_of(options).share, {}
        for cell in cells:
            together.setdefault(share(cell), []).append(cell)
        groups = list(together.values())
    return [group[n : n + options.batch] for group in groups for n in range(0, len(group), options.batch)]


def work(suite: ModuleType, quick: bool) -> int:
    """In the subprocess: measure the cells that come on stdin."""
    import jax

    import merak_jax

    merak_jax.emulate(8)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", quick)
    measure = suite.measurer()
    return parity_cells.serve(lambda fields: measure({k: v for k, v in fields.items() if k != "cell"}))


def document(suite: ModuleType, results: list[dict], total: int) -> dict:
    """What `--json` prints."""
    failed = sum(not r["passed"] for r in results)
    return {
        "cells": results,
        "passed": len(results) - failed,
        "failed": failed,
        "not_run": total - len(results),
        **suite.summary(results),
        "worst": worst(results, suite.KINDS),
    }


def worst(results: list[dict], kinds: tuple[str, ...]) -> dict:
    """Per precision and kind, the largest difference and its cell."""
    found: dict = {}
    for result in results:
        of_precision = found.setdefault(result["precision"], {})
        for kind in kinds:
            if kind in result and result[kind] >= of_precision.get(kind, (-1.0, ""))[0]:
                of_precision[kind] = (result[kind], result["cell"])
    return found


if __name__ == "__main__":
    sys.exit(main())
