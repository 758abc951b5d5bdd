"""The full parity matrix: every combination of options against one device, `python benchmarks/parity.py --sample 20`.

A cell passes if metrics, raw gradients and the state after three steps are at the bar of its precision. Beside them stands
`through_sgd`: the parameters after one SGD step with those gradients.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EXAMPLE = """example:
  python benchmarks/parity.py --only 2x2x2 --sample 10 --seed 1 --json > parity.json
  python benchmarks/parity.py --grid --workers 2 --json > grid.json"""
KINDS = ("metrics", "gradients", "through_sgd", "trained")
# The meshes of the cells in float32 and bfloat16.
NARROW = ((2, 2, 2), (1, 4, 2), (2, 4, 1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="SUBSTRING", help="only cells whose name contains this")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N cells")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cells, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --sample (default 0)")
    parser.add_argument("--minutes", type=float, help="start no batch of cells after this time")
    parser.add_argument(
        "--grid",
        action="store_true",
        help="every mesh x microbatches x depth x layers x head once; schedule, mask and optimizer take turns",
    )
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="most cells per subprocess (default 32)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="subprocesses at a time (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document with every cell")
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    cells = choose(options)
    if options.list:
        print("\n".join(map(str, cells)))
        return 0
    results = run_all(cells, options)
    failed = [r for r in results if not r["passed"]]
    if options.json:
        print(
            json.dumps(
                {
                    "cells": results,
                    "passed": len(results) - len(failed),
                    "failed": len(failed),
                    "failed_through_sgd": sum(not r.get("passed_through_sgd", False) for r in results),
                    "not_run": len(cells) - len(results),
                    "worst": worst(results),
                },
                indent=1,
            )
        )
    else:
        report(results, len(cells))
    return 1 if failed else 0


def choose(options: argparse.Namespace) -> list:
    """The cells that the options ask for: float64 in full, float32 and bfloat16 on three meshes."""
    import numpy as np

    from tests.parity import all_cells

    wide = grid() if options.grid else all_cells()
    narrow = [dataclasses.replace(c, precision="float32") for c in wide if c.mesh in NARROW]
    if options.grid:
        # The grid has each point once: the two ways to use bfloat16 take turns.
        plain = [dataclasses.replace(c, mask="ragged", optimizer="sgd") for c in wide if c.mesh in NARROW]
        halves = [dataclasses.replace(c, precision=("bfloat16", "all bfloat16")[n % 2]) for n, c in enumerate(plain)]
    else:
        plain = [c for c in narrow if c.mask == "ragged" and c.optimizer == "sgd"]
        halves = [dataclasses.replace(c, precision=p) for p in ("bfloat16", "all bfloat16") for c in plain]
    cells = [cell for cell in wide + narrow + halves if options.only is None or options.only in str(cell)]
    if options.sample is not None:
        # In the order drawn: a run that stops early has seen a bit of everything.
        order = np.random.default_rng(options.seed).permutation(len(cells))
        cells = [cells[n] for n in order[: options.sample]]
    return cells[: options.limit]


def grid(seed: int = 0) -> list:
    """Each mesh, number of microbatches, depth, kind of layers and head once, in float64.

    For each mesh and number of microbatches the eight combinations of schedule, mask and optimizer are dealt to the sixteen
    models, each twice.
    """
    import numpy as np

    from tests.parity import DEPTHS, HEADS, LAYERS, MASKS, MESHES, MICROBATCHES, OPTIMIZERS, SCHEDULES, Cell

    rng, cells = np.random.default_rng(seed), []
    models = list(itertools.product(DEPTHS, LAYERS, HEADS))
    others = list(itertools.product(SCHEDULES, MASKS, OPTIMIZERS))
    for mesh in MESHES:
        counts: set[int] = set()
        for microbatches in MICROBATCHES:
            deal = rng.permutation(len(models)) % len(others)
            group = [Cell(mesh, microbatches, *model, *others[n]) for model, n in zip(models, deal)]
            count = group[0].num_microbatches
            if count in counts or count < 1:
                continue
            counts.add(count)
            cells += [c if c.is_valid else dataclasses.replace(c, mask="ragged") for c in group]
    return cells


def batches_of(cells: list, options: argparse.Namespace) -> list[list]:
    """Cells that can share single-device runs go to one subprocess, in batches; a sample keeps its order."""

    def model(cell) -> tuple:
        return (cell.precision, cell.depth, cell.layers, cell.head)

    groups = [cells]
    if options.sample is None:
        groups = [list(members) for _, members in itertools.groupby(sorted(cells, key=model), key=model)]
    return [group[n : n + options.batch] for group in groups for n in range(0, len(group), options.batch)]


def run_all(cells: list, options: argparse.Namespace) -> list[dict]:
    """Run the cells in subprocesses of a few cells each; a cell at which a process dies failed, the next process goes on."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results: list[dict] = []
    start = time.monotonic()

    def run_group(group: list) -> None:
        while group:
            if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
                return
            done = 0
            for result in run_batch(group):
                done += 1
                results.append(result)
                progress.advance(task)
                if not result["passed"]:
                    progress.console.print(f"{result['cell']}: {result['error']}", style="red", highlight=False)
            group = group[done:]

    with (
        Progress(*columns, console=console) as progress,
        concurrent.futures.ThreadPoolExecutor(options.workers) as pool,
    ):
        task = progress.add_task("cells", total=len(cells))
        for future in [pool.submit(run_group, group) for group in batches_of(cells, options)]:
            future.result()
    return results


def run_batch(cells: list) -> Iterator[dict]:
    """Yield a result per cell; when the process dies or hangs, its current cell failed and the later ones are not run."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    request = json.dumps([dataclasses.asdict(cell) for cell in cells])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(request)
        process.stdin.close()
        done = 0
        for line in process.stdout:
            done += 1
            yield json.loads(line)
        last = process.stderr.read().strip().splitlines()
    if done < len(cells):
        reason = next((line for line in last if "Termination timeout" in line), last[-1] if last else "")
        yield {
            "cell": str(cells[done]),
            "passed": False,
            "error": f"process ended with {process.returncode}: {reason[:300]}",
        }


def work() -> int:
    """In the subprocess: cells as JSON on stdin, one result per line on stdout."""
    import jax

    import merak_jax

    merak_jax.emulate(8)
    jax.config.update("jax_enable_x64", True)
    from tests.helper import BARS, differences
    from tests.parity import Cell, parallel, reference, through_sgd

    for fields in json.load(sys.stdin):
        cell = Cell(**{**fields, "mesh": tuple(fields["mesh"])})
        start = time.monotonic()
        result: dict = {"cell": str(cell), "passed": True}
        try:
            run, expected = parallel(cell), reference(cell)
            found = differences(run, expected)
            result.update({kind: getattr(found, kind)[0] for kind in KINDS if kind != "through_sgd"})
            result["through_sgd"] = through_sgd(cell, run, expected)[0]
            result["passed_through_sgd"] = max(result["metrics"], result["through_sgd"]) <= BARS[cell.bar][0]
            lines = found.over(cell.bar)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        if lines:
            result.update(passed=False, error="; ".join(lines))
        result["seconds"] = round(time.monotonic() - start, 1)
        print(json.dumps(result), flush=True)
    return 0


def worst(results: list[dict]) -> dict:
    """Per precision and kind, the largest difference and its cell."""
    found: dict = {}
    for result in results:
        precision = result["cell"].rsplit("-", 1)[1]
        for kind in KINDS:
            if kind in result and result[kind] >= found.get(precision, {}).get(kind, (-1.0, ""))[0]:
                found.setdefault(precision, {})[kind] = (result[kind], result["cell"])
    return found


def report(results: list[dict], total: int) -> None:
    """The worst differences as a table, then the failures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(results)} of {total} cells, {sum(not r['passed'] for r in results)} failed")
    for name in ("precision", "kind", "worst", "cell"):
        table.add_column(name)
    for precision, kinds in worst(results).items():
        for kind, (value, cell) in kinds.items():
            table.add_row(precision, kind, f"{value:.1e}", cell)
    console = Console()
    console.print(table)
    for result in results:
        if not result["passed"]:
            console.print(f"{result['cell']}: {result['error']}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
