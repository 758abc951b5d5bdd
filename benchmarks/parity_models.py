"""The parity table of models: every row of tests/zoo.py on every mesh and number of microbatches, in each of its precisions."""

from __future__ import annotations

from collections.abc import Callable

KINDS = ("metrics", "gradients", "trained")


def cells() -> list:
    """All cells of the table: float64 and float32 for all rows, where the step allows it, and bfloat16 for some."""
    from tests.zoo import all_cells

    order = ("float64", "float32", "bfloat16")
    return sorted(all_cells(), key=lambda cell: order.index(cell.precision))


def share(cell) -> tuple:
    """Cells of which this is the same share single-device runs."""
    return (cell.precision, cell.row)


def measurer() -> Callable[[dict], tuple[dict, list[str]]]:
    """What a subprocess does with the fields of a cell."""
    from tests.zoo import ZooCell, compare

    def measure(fields: dict) -> tuple[dict, list[str]]:
        cell = ZooCell(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})
        found = compare(cell)
        return {kind: getattr(found, kind)[0] for kind in KINDS}, found.over(cell.precision)

    return measure


def column(result: dict) -> str:
    """The heading over a result: its mesh and number of microbatches."""
    return f"{'·'.join(map(str, result['mesh']))} M={result['num_microbatches']}"


def largest(result: dict) -> float | None:
    """The largest relative difference of a result; None if the run ended without numbers."""
    return max(result[kind] for kind in KINDS) if all(kind in result for kind in KINDS) else None


def table(results: list[dict]) -> dict[str, dict[str, dict[str, dict]]]:
    """The results by precision, row and column, in the order of `cells`."""
    found: dict = {}
    for cell in cells():
        fields = {"mesh": cell.mesh, "num_microbatches": cell.num_microbatches}
        found.setdefault(cell.precision, {}).setdefault(cell.row, {})[column(fields)] = None
    for result in results:
        found[result["precision"]][result["row"]][column(result)] = result
    filled = {
        precision: {row: {name: r for name, r in line.items() if r} for row, line in rows.items() if any(line.values())}
        for precision, rows in found.items()
    }
    return {precision: rows for precision, rows in filled.items() if rows}


def summary(results: list[dict]) -> dict:
    """What the JSON document says beside the cells: the table, with the largest relative difference of each cell."""
    numbers = {
        precision: {row: {name: largest(r) for name, r in line.items()} for row, line in rows.items()}
        for precision, rows in table(results).items()
    }
    return {"table": numbers}


def text_of(result: dict | None) -> str:
    """A cell as it is printed: its largest relative difference; marked and red where it failed, a dash where it was not run."""
    if result is None:
        return "-"
    value = largest(result)
    text = "error" if value is None else f"{value:.0e}"
    return text if result["passed"] else f"[bold red]{text} ✗[/]"


def report(results: list[dict], total: int, worst: dict) -> None:
    """One table per precision: rows are models and train steps, columns meshes (data·pipe·tensor) and microbatches."""
    print_tables("model and train step", table(results), cells(), results, total)


def print_tables(heading: str, tables: dict[str, dict], cells: list, results: list[dict], total: int) -> None:
    """A table of rows for each precision, with all columns that `cells` have, then how many cells there are."""
    from rich.console import Console
    from rich.table import Table

    # A row is one line, also where the output is no terminal.
    console = Console(width=max(Console().width, 132))
    names = list(dict.fromkeys(column({"mesh": c.mesh, "num_microbatches": c.num_microbatches}) for c in cells))
    for precision, rows in tables.items():
        output = Table(title=f"largest relative difference to one device, {precision}")
        output.add_column(heading, no_wrap=True)
        for name in names:
            output.add_column(name.replace(" ", "\n"), justify="right")
        for row, line in rows.items():
            output.add_row(row, *(text_of(line.get(name)) for name in names))
        console.print(output)
    failed = sum(not r["passed"] for r in results)
    console.print(f"{len(results)} of {total} cells, {failed} failed", highlight=False)
