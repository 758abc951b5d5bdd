"""Every row of the parity table once, meshes and numbers of microbatches dealt out; `benchmarks/parity.py` has all cells."""

import itertools

import pytest

from tests import zoo
from tests.zoo import MESHES, MICROBATCHES, ROWS, ZooCell

# Every update here is computed for all blocks at once.
pytestmark = pytest.mark.filterwarnings("error::merak_jax.runtime.reroll.RerollWarning")


def dealt() -> list[ZooCell]:
    """Each row in float64 on one mesh: all meshes and numbers of microbatches in turn."""
    columns = itertools.cycle([(mesh, count) for count in MICROBATCHES for mesh in MESHES])
    return [ZooCell(row.name, *column) for row, column in zip(ROWS.values(), columns) if "float64" in row.precisions]


NARROW = [
    ZooCell("GPT-2, dynamic loss scale", (2, 2, 2), 8, "float32"),
    ZooCell("Mixtral, router z-loss", (1, 4, 2), 2, "float32"),
    ZooCell("ViT, stochastic depth", (2, 4, 1), 8, "float32"),
    ZooCell("GPT-2", (2, 2, 2), 2, "bfloat16"),
    ZooCell("BERT, masked tokens", (1, 8, 1), 8, "bfloat16"),
]


@pytest.mark.parametrize("cell", dealt() + NARROW, ids=str)
def test_a_row_of_the_parity_table_gives_the_numbers_of_one_device(cell):
    zoo.check(cell)


def test_all_rows_meshes_and_numbers_of_microbatches_occur():
    cells = dealt()
    assert len(cells) >= 24
    assert {cell.row for cell in [*cells, *NARROW]} == set(ROWS)
    assert {(cell.mesh, cell.num_microbatches) for cell in cells} == set(itertools.product(MESHES, MICROBATCHES))


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_dropout_is_on(row):
    task = row.make_task(row.precisions[0], **row.options)
    model = task.model if hasattr(task, "model") else task.make_model()
    assert model.config.dropout > 0
