"""Loss, gradients and trained state on every mesh are those of one device."""

import dataclasses
import sys

import jax
import numpy as np
import optax
import pytest

from benchmarks.parity_cells import ROOT, run_batch
from tests.helper import BARS, polluted_buffers
from tests.parity import DEPTHS, Cell, all_cells, check, covering_cells, make_model, reordering_noise, state_maker

CELLS = covering_cells(all_cells())
# Bubbles and unused slots hold NaN in these.
POLLUTED = [cell for cell in CELLS if cell.mesh[1] > 1 and cell.mask == "one microbatch masked"]


def test_the_cells_cover_every_mesh_and_every_pair_of_options():
    wanted = {demand for cell in all_cells() for demand in cell.demands}
    assert {demand for cell in CELLS for demand in cell.demands} == wanted
    assert len(CELLS) <= 16
    assert {cell.schedule for cell in POLLUTED} == {"gpipe", "1f1b"}
    assert any(cell.num_microbatches < cell.mesh[1] for cell in POLLUTED)
    assert {cell.depth for cell in CELLS} == set(DEPTHS) and {cell.precision for cell in CELLS} == {"float64"}


@pytest.mark.parametrize(
    "precision, parameters",
    [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("all bfloat16", "bfloat16")],
)
def test_a_model_keeps_its_precision_although_float64_is_enabled(precision, parameters):
    state = state_maker(make_model(precision=precision))(optax.sgd(1.0))
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == {parameters}
    logits = jax.eval_shape(state.apply_fn, {"params": state.params}, np.zeros((2, 8), np.int32))
    assert str(logits.dtype) == precision.removeprefix("all ")


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in POLLUTED], ids=str)
def test_float64_is_the_same_to_the_last_digits(cell):
    check(cell)


@pytest.mark.parametrize("cell", POLLUTED, ids=str)
def test_float64_is_the_same_whatever_bubbles_and_unused_slots_hold(cell):
    with polluted_buffers():
        check(cell)


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 2)], ids=str)
def test_float32_is_the_same(mesh):
    check(Cell(mesh, "P", 5, "unrolled", "tied", "1f1b", "ragged", "adamw", "float32"))


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize(
    "precision, meshes",
    [("bfloat16", {(2, 2, 2): "P", (2, 4, 1): "P-1"}), ("all bfloat16", {(1, 4, 2): "P"})],
    ids=["bfloat16", "all bfloat16"],
)
def test_bfloat16_is_the_same_within_its_rounding_and_does_not_abort(precision, meshes):
    cells = [
        Cell(mesh, rule, 4, "unrolled", "tied", "1f1b", "ragged", "sgd", precision) for mesh, rule in meshes.items()
    ]
    noise = max(reordering_noise(cell) for cell in cells)
    assert noise < BARS["bfloat16"][0], (
        f"one device differs from itself by {noise:.1e}: the comparison would mean nothing"
    )
    # A collective that gets stuck kills its process: another one than this.
    command = [sys.executable, str(ROOT / "benchmarks" / "parity.py"), "--full", "--worker"]
    results = [r for cell in cells for r in run_batch([{"cell": str(cell), **dataclasses.asdict(cell)}], command)]
    assert len(results) == len(cells)
    assert all(result["passed"] for result in results), [result for result in results if not result["passed"]]
