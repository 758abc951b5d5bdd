"""The parity grid has every mesh, number of microbatches and model once, and deals the other options out evenly."""

import argparse
import importlib.util
import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.parity import DEPTHS, HEADS, LAYERS, MASKS, MESHES, MICROBATCHES, OPTIMIZERS, SCHEDULES, all_cells

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "parity.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_parity", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(**changes):
    return argparse.Namespace(**{**dict(grid=True, only=None, sample=None, seed=0, limit=None, batch=32), **changes})


def point(cell):
    return (cell.mesh, cell.num_microbatches, cell.depth, cell.layers, cell.head)


def test_the_grid_has_each_point_once_and_is_part_of_the_full_product(benchmark):
    grid = benchmark.grid()
    wanted = {point(cell) for cell in all_cells()}
    assert Counter(map(point, grid)) == Counter(wanted)
    assert set(grid) <= set(all_cells())
    sizes = (MESHES, MICROBATCHES, DEPTHS, LAYERS, HEADS)
    assert wanted == {
        (mesh, count, *model)
        for mesh, rule in itertools.product(*sizes[:2])
        if (count := {"1": 1, "P-1": mesh[1] - 1, "P": mesh[1], "8": 8}[rule]) > 0
        for model in itertools.product(*sizes[2:])
    }


def test_every_mesh_and_number_of_microbatches_sees_every_schedule_mask_and_optimizer(benchmark):
    seen = {}
    for cell in benchmark.grid():
        seen.setdefault((cell.mesh, cell.num_microbatches), Counter()).update(
            [(cell.schedule, cell.mask, cell.optimizer)]
        )
    for (mesh, count), others in seen.items():
        masks = MASKS if count * mesh[0] > 1 else ("ragged",)
        assert set(others) == set(itertools.product(SCHEDULES, masks, OPTIMIZERS))
        assert len(set(others.values())) == 1


def test_the_narrow_precisions_run_on_three_meshes(benchmark):
    cells = benchmark.choose(options())
    assert len(cells) == len(set(cells))
    by_precision = {p: [c for c in cells if c.bar == p] for p in ("float64", "float32", "bfloat16")}
    on_narrow = {point(c) for c in by_precision["float64"] if c.mesh in benchmark.NARROW}
    assert {point(c) for c in by_precision["float32"]} == on_narrow
    assert {point(c) for c in by_precision["bfloat16"]} == on_narrow
    assert Counter(c.precision for c in by_precision["bfloat16"])["all bfloat16"] * 2 == len(by_precision["bfloat16"])


def test_batches_keep_cells_of_one_model_together_and_lose_none(benchmark):
    cells = benchmark.choose(options())
    batches = benchmark.batches_of(cells, options())
    assert Counter(itertools.chain(*batches)) == Counter(cells)
    assert all(len({(c.precision, c.depth, c.layers, c.head) for c in batch}) == 1 for batch in batches)
    assert benchmark.batches_of(cells[:40], options(sample=40)) == [cells[:32], cells[32:40]]
