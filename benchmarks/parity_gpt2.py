"""The parity cells of GPT-2: the product of all options, and a grid that has each mesh, number of microbatches and model once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

KINDS = ("metrics", "gradients", "through_sgd", "trained")
# The meshes of the cells in float32 and bfloat16.
NARROW = ((2, 2, 2), (1, 4, 2), (2, 4, 1))


def cells(is_grid: bool) -> list:
    """The grid or the full product: float64 on all meshes, float32 and bfloat16 on three."""
    from tests.parity import all_cells

    wide = grid() if is_grid else all_cells()
    narrow = [dataclasses.replace(c, precision="float32") for c in wide if c.mesh in NARROW]
    if is_grid:
        # The grid has each point once: the two ways to use bfloat16 take turns.
        plain = [dataclasses.replace(c, mask="ragged", optimizer="sgd") for c in wide if c.mesh in NARROW]
        halves = [dataclasses.replace(c, precision=("bfloat16", "all bfloat16")[n % 2]) for n, c in enumerate(plain)]
    else:
        plain = [c for c in narrow if c.mask == "ragged" and c.optimizer == "sgd"]
        halves = [dataclasses.replace(c, precision=p) for p in ("bfloat16", "all bfloat16") for c in plain]
    return wide + narrow + halves


def grid(seed: int = 0) -> list:
    """Each mesh, number of microbatches, depth, kind of layers and head once, in float64.

    For each mesh and number of microbatches the eight combinations of schedule, mask and optimizer are dealt to the sixteen
    models, each twice.
    """
    import numpy as np

    from tests.parity import DEPTHS, HEADS, LAYERS, MASKS, MESHES, MICROBATCHES, OPTIMIZERS, SCHEDULES, Cell

    rng, chosen = np.random.default_rng(seed), []
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
            chosen += [c if c.is_valid else dataclasses.replace(c, mask="ragged") for c in group]
    return chosen


def share(cell) -> tuple:
    """Cells of which this is the same can share single-device runs."""
    return (cell.precision, cell.depth, cell.layers, cell.head)


def measurer() -> Callable[[dict], tuple[dict, list[str]]]:
    """What a subprocess does with the fields of a cell."""
    from tests.helper import BARS, differences
    from tests.parity import Cell, parallel, reference, through_sgd

    def measure(fields: dict) -> tuple[dict, list[str]]:
        cell = Cell(**{**fields, "mesh": tuple(fields["mesh"])})
        run, expected = parallel(cell), reference(cell)
        found = differences(run, expected)
        numbers: dict = {kind: getattr(found, kind)[0] for kind in KINDS if kind != "through_sgd"}
        numbers["through_sgd"] = through_sgd(cell, run, expected)[0]
        numbers["passed_through_sgd"] = max(numbers["metrics"], numbers["through_sgd"]) <= BARS[cell.bar][0]
        return numbers, found.over(cell.bar)

    return measure


def summary(results: list[dict]) -> dict:
    """What the JSON document says beside the cells."""
    return {"failed_through_sgd": sum(not r.get("passed_through_sgd", False) for r in results)}


def report(results: list[dict], total: int, worst: dict) -> None:
    """The worst differences as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(results)} of {total} cells, {sum(not r['passed'] for r in results)} failed")
    for name in ("precision", "kind", "worst", "cell"):
        table.add_column(name)
    for precision, kinds in worst.items():
        for kind, (value, cell) in kinds.items():
            table.add_row(precision, kind, f"{value:.1e}", cell)
    Console().print(table)
