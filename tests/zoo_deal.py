"""The cells of the two parity tables that the suite runs: few, in which every row, schedule and pair of columns occurs."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

from tests import zoo_steps
from tests.zoo import DEEP, ROWS, ZooCell, all_cells, row_of, schedule_cells

# Two chains, experts, values that differ per block, objects, remat, scanned layers: what a schedule may stumble over.
PINNED = (
    ZooCell("T5, label smoothing, z-loss", (1, 4, 2), 4, "float64", "interleaved", "merged", 2),
    ZooCell("T5 1.1, scanned, gated, untied", (2, 2, 2), 4, "float64", "shifted_critical_path", "switched"),
    ZooCell("Mixtral, router z-loss", (1, 4, 1), 4, "float64", "zb_h1", "merged"),
    ZooCell("Mixtral, every second block dense", (1, 2, 1), 8, "float64", "zb_v", "switched"),
    ZooCell("ViT, stochastic depth", (2, 2, 2), 4, "float64", "zb_v", "switched"),
    ZooCell("ViT, scanned", (1, 2, 2), 4, "float64", "interleaved", "switched", 2),
    ZooCell("Llama, blocks recomputed", (1, 4, 1), 4, "float64", "zb_h1", "switched"),
    ZooCell("Llama in nnx", (2, 2, 2), 4, "float64", "interleaved", "merged", 2),
    ZooCell("GPT-2, outputs of every row", (1, 2, 1), 2, "float64", "last_no_recompute", "merged"),
)

NARROW = (
    ZooCell("GPT-2, dynamic loss scale", (2, 2, 2), 8, "float32"),
    ZooCell("Mixtral, router z-loss", (1, 4, 2), 2, "float32"),
    ZooCell("ViT, stochastic depth", (2, 4, 1), 8, "float32"),
    ZooCell("GPT-2", (2, 2, 2), 2, "bfloat16"),
    ZooCell("BERT, masked tokens", (1, 8, 1), 8, "bfloat16"),
)


def demands(cell: ZooCell) -> set:
    """What a cell covers: its row, its schedule in its form, and each two of form, mesh and number of microbatches."""
    found = {cell.row, *itertools.combinations((cell.form, cell.mesh, f"M={cell.num_microbatches}"), 2)}
    # Paired ticks are merged ticks with another table, and "auto" is one of the schedules.
    if cell.form in ("merged", "switched"):
        found.add((cell.schedule_name, cell.form))
    if cell.chunks > 1 and cell.mesh[1] == 4:
        found.add((cell.schedule_name, "four stages"))
    return found


def wanted() -> set:
    """What the float64 cells cover: all that any float64 cell of the two tables does."""
    cells = [cell for cell in (*all_cells(), *schedule_cells()) if cell.precision == "float64"]
    return set().union(*map(demands, cells)) - {DEEP.name}


@functools.cache
def dealt() -> tuple[ZooCell, ...]:
    """The float64 cells: the pinned ones, then greedily those that cover most of what is missing, in the order of the rows."""
    found, missing = list(PINNED), wanted().difference(*map(demands, PINNED))
    candidates = [(cell, demands(cell), row_of(cell.row).num_blocks) for cell in _candidates()]
    while missing:
        often = Counter(value for cell in found for value in _values(cell))
        # Of equals several chunks, while deep rows are left; then what was dealt least, in no deeper a row than needed.
        worth = [
            (len(missing & new), cell.chunks > 1, -often[mesh] - often[count], -often[row], -often[schedule], -depth)
            for cell, new, depth in candidates
            for row, mesh, count, schedule in [_values(cell)]
        ]
        found.append(candidates[worth.index(max(worth))][0])
        missing -= demands(found[-1])
    rows = [*ROWS, DEEP.name]
    return tuple(sorted(found, key=lambda cell: (rows.index(cell.row), cell.rows)))


def _values(cell: ZooCell) -> tuple:
    return cell.row, cell.mesh, f"M={cell.num_microbatches}", cell.schedule


def _candidates() -> list[ZooCell]:
    """Every row that is not pinned, on any column of the two tables, by any schedule that suits both."""
    tables = [*all_cells(), *schedule_cells()]
    rows = [row.name for row in (*ROWS.values(), DEEP) if "float64" in row.precisions]
    free = [row for row in rows if all(row != cell.row for cell in PINNED)]
    columns = dict.fromkeys((cell.mesh, cell.num_microbatches) for cell in tables)
    schedules = dict.fromkeys((cell.schedule, cell.form, cell.num_chunks) for cell in tables)
    product = itertools.product(free, columns, schedules)
    return [cell for row, column, own in product if _is_suited(cell := ZooCell(row, *column, "float64", *own))]


def _is_suited(cell: ZooCell) -> bool:
    """A microbatch for each stage, which some schedules need, and at least two blocks for three chunks."""
    if cell.schedule != "auto" and cell.num_microbatches < cell.mesh[1]:
        return False
    return cell.chunks == 1 or 3 * row_of(cell.row).num_blocks >= 2 * cell.chunks * cell.mesh[1]


# A file of tests each, so that no worker is left with one long file.
FAMILIES = ("GPT-2", "Llama", "encoder", "train step")


def family(cell: ZooCell) -> str:
    """Which of `FAMILIES` a cell belongs to."""
    row = row_of(cell.row)
    if "nnx" not in row.name and row.make_setting is not zoo_steps.plain:
        return "train step"
    if row.name.startswith(("Llama", "Mixtral")):
        return "Llama"
    return "GPT-2" if row.name.startswith("GPT-2") else "encoder"


def is_polluted(cell: ZooCell) -> bool:
    """Whether bubbles and unused slots hold NaN when the suite runs a cell: in paired ticks, and in the pinned cells."""
    return cell in PINNED or cell.form == "paired"


def cells_of(name: str, *, polluted: bool) -> list[ZooCell]:
    """The cells of a family, in all precisions."""
    return [cell for cell in (*dealt(), *NARROW) if family(cell) == name and is_polluted(cell) == polluted]
