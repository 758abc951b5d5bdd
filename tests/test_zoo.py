"""The cells of the parity tables that the suite runs cover what the tables do; `benchmarks/parity.py` runs all cells."""

import itertools

import pytest

from merak_jax.schedules.registry import SCHEDULES
from tests.zoo import (
    CHUNKS,
    MESHES,
    MICROBATCHES,
    ROWS,
    SCHEDULE_MESHES,
    SCHEDULE_MICROBATCHES,
    all_cells,
    row_of,
    schedule_cells,
)
from tests.zoo_deal import FAMILIES, NARROW, PINNED, cells_of, dealt, is_polluted


def pairs(cells, first, second):
    return {(first(cell), second(cell)) for cell in cells}


def form(cell):
    return cell.form


def mesh(cell):
    return cell.mesh


def microbatches(cell):
    return cell.num_microbatches


def test_every_row_occurs_and_few_more_than_once():
    assert {cell.row for cell in (*dealt(), *NARROW)} == set(ROWS) | {"GPT-2, eight layers"}
    assert len(ROWS) - 1 <= len(dealt()) <= 36
    assert {cell.precision for cell in dealt()} == {"float64"}
    assert len(set(map(str, dealt()))) == len(dealt())


def test_every_schedule_occurs_in_merged_and_in_switched_ticks():
    named = {f"{name} V={n}" if n else name for name in SCHEDULES for n in CHUNKS.get(name, (None,))}
    assert len(named) == 12
    assert pairs(dealt(), lambda cell: cell.schedule_name, form) >= set(
        itertools.product(named, ("merged", "switched"))
    )


def test_every_schedule_of_several_chunks_occurs_on_four_stages():
    deep = {cell.schedule_name for cell in dealt() if cell.mesh[1] == 4 and cell.chunks > 1}
    assert deep == {"interleaved V=2", "interleaved V=3", "zb_v", "search V=2"}
    assert sum(cell.chunks * cell.mesh[1] <= row_of(cell.row).num_blocks for cell in dealt() if cell.chunks > 1) >= 6


def test_forms_meshes_and_numbers_of_microbatches_meet_as_in_the_tables():
    cells, tables = dealt(), [cell for cell in (*all_cells(), *schedule_cells()) if cell.precision == "float64"]
    for first, second in itertools.combinations((form, mesh, microbatches), 2):
        assert pairs(cells, first, second) >= pairs(tables, first, second)
    columns = set(itertools.product(MESHES, MICROBATCHES))
    columns |= set(itertools.product(SCHEDULE_MESHES, SCHEDULE_MICROBATCHES))
    assert pairs(cells, mesh, microbatches) >= columns
    assert {cell.mesh for cell in cells if cell.form == "paired"} == set(SCHEDULE_MESHES)


def test_the_default_schedule_occurs_with_several_rows_on_every_mesh():
    default = [cell for cell in dealt() if cell.schedule == "auto"]
    assert len({cell.row for cell in default}) >= 4
    assert {cell.mesh for cell in default} == set(MESHES)


def test_the_pinned_cells_are_dealt_and_every_cell_runs_in_one_file():
    assert set(PINNED) <= set(dealt())
    files = [cell for name in FAMILIES for polluted in (False, True) for cell in cells_of(name, polluted=polluted)]
    assert len(files) == len(set(files)) == len({*dealt(), *NARROW})


def test_bubbles_and_unused_slots_hold_nan_in_every_kind_of_schedule_and_form():
    polluted = [cell for cell in dealt() if is_polluted(cell)]
    assert {cell.form for cell in polluted} == {"merged", "paired", "switched"}
    kinds = {(cell.schedule, cell.form) for cell in polluted}
    assert kinds >= {
        ("shifted_critical_path", "switched"),
        ("last_no_recompute", "merged"),
        ("zb_h1", "merged"),
        ("zb_h1", "switched"),
        ("zb_v", "switched"),
        ("zb_v", "paired"),
        ("interleaved", "merged"),
        ("interleaved", "switched"),
    }


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_dropout_is_on(row):
    task = row.make_task(row.precisions[0], **row.options)
    model = task.model if hasattr(task, "model") else task.make_model()
    assert model.config.dropout > 0
    assert model.config.num_layers == row.num_blocks
