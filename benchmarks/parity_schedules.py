"""The parity table of schedules: one GPT-2 by every schedule in every form of ticks, on three meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.parity_models import KINDS, column, largest, measurer, print_tables, share

__all__ = ["KINDS", "cells", "measurer", "report", "share", "summary"]


def cells() -> list:
    """All cells of the table, in float64."""
    from tests.zoo import schedule_cells

    return schedule_cells()


def by_row(cells: list, results: list[dict], name: Callable[[Any], str]) -> dict[str, dict[str, dict]]:
    """The results by row, as a cell's row is called, and column, in the order of `cells`."""
    measured = {result["cell"]: result for result in results}
    found: dict[str, dict[str, dict]] = {}
    for cell in cells:
        if str(cell) in measured:
            heading = column({"mesh": cell.mesh, "num_microbatches": cell.num_microbatches})
            found.setdefault(name(cell), {})[heading] = measured[str(cell)]
    return found


def largest_of(table: dict[str, dict[str, dict]]) -> dict[str, dict]:
    """A table with the largest relative difference of each cell."""
    return {row: {name: largest(r) for name, r in line.items()} for row, line in table.items()}


def table(results: list[dict]) -> dict[str, dict[str, dict]]:
    """The results by row (schedule and form) and column."""
    return by_row(cells(), results, lambda cell: f"{cell.schedule_name}, {cell.form}")


def summary(results: list[dict]) -> dict:
    """What the JSON document says beside the cells: the table, with the largest relative difference of each cell."""
    return {"table": largest_of(table(results))}


def report(results: list[dict], total: int, worst: dict) -> None:
    """One table: rows are schedules and forms of ticks, columns meshes (data·pipe·tensor) and microbatches."""
    print_tables("schedule, ticks", {"float64": table(results)}, cells(), results, total)
