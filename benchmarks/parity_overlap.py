"""The parity table of overlaps: one GPT-2 by every way to hide communication over `tensor`, on five meshes, in three precisions."""

from __future__ import annotations

from benchmarks.parity_models import KINDS, measurer, print_tables, share
from benchmarks.parity_schedules import by_row, largest_of

__all__ = ["KINDS", "cells", "measurer", "report", "share", "summary"]


def cells() -> list:
    """All cells of the table."""
    from tests.zoo import overlap_cells

    return overlap_cells()


def tables(results: list[dict]) -> dict[str, dict[str, dict[str, dict]]]:
    """The results by precision, row (overlap and carry) and column, in the order of `cells`."""
    precisions = dict.fromkeys(cell.precision for cell in cells())
    return {
        precision: by_row([c for c in cells() if c.precision == precision], results, lambda cell: cell.overlap_name)
        for precision in precisions
    }


def summary(results: list[dict]) -> dict:
    """What the JSON document says beside the cells: the tables, with the largest relative difference of each cell."""
    return {"table": {precision: largest_of(table) for precision, table in tables(results).items()}}


def report(results: list[dict], total: int, worst: dict) -> None:
    """A table per precision: rows are overlaps and how the carry is split, columns meshes (data·pipe·tensor) and microbatches."""
    print_tables("overlap", tables(results), cells(), results, total)
