"""Loss, gradients and trained state on every mesh are those of one device."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.parity_cells import ROOT, run_batch
from merak_jax.runtime import tick_run
from tests.helper import BARS
from tests.parity import Cell, all_cells, check, covering_cells, make_model, reordering_noise, state_maker

CELLS = covering_cells(all_cells())
NARROW_MESHES = [(2, 2, 2), (1, 4, 2), (2, 4, 1)]


def test_the_cells_cover_every_mesh_and_every_pair_of_options():
    wanted = {demand for cell in all_cells() for demand in cell.demands}
    assert {demand for cell in CELLS for demand in cell.demands} == wanted
    assert len(CELLS) <= 24


@pytest.mark.parametrize(
    "precision, parameters",
    [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("all bfloat16", "bfloat16")],
)
def test_a_model_keeps_its_precision_although_float64_is_enabled(precision, parameters):
    state = state_maker(make_model(precision=precision))(optax.sgd(1.0))
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == {parameters}
    logits = jax.eval_shape(state.apply_fn, {"params": state.params}, np.zeros((2, 8), np.int32))
    assert str(logits.dtype) == precision.removeprefix("all ")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_float64_is_the_same_to_the_last_digits(cell):
    check(cell)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_bubbles_and_unused_slots_hold_does_not_matter(schedule, monkeypatch):
    made = []

    def polluted(shape, dtype):
        made.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 113, dtype)

    monkeypatch.setattr(tick_run, "empty_buffer", polluted)
    check(Cell((2, 4, 1), "P-1", 5, "unrolled", "tied", schedule, "one microbatch masked", "sgd"))
    assert made, "the pipeline made no buffer by empty_buffer"


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("mesh", NARROW_MESHES, ids=str)
def test_float32_is_the_same(mesh):
    check(Cell(mesh, "P", 5, "unrolled", "tied", "1f1b", "ragged", "adamw", "float32"))


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("precision", ["bfloat16", "all bfloat16"])
def test_bfloat16_is_the_same_within_its_rounding_and_does_not_abort(precision):
    cells = [
        Cell(mesh, rule, 4, "unrolled", "tied", "1f1b", "ragged", "sgd", precision)
        for mesh, rule in (((2, 2, 2), "P"), ((1, 4, 2), "P"), ((2, 4, 1), "P-1"))
    ]
    noise = max(reordering_noise(cell) for cell in cells)
    assert noise < BARS["bfloat16"][0], (
        f"one device differs from itself by {noise:.1e}: the comparison would mean nothing"
    )
    # A collective that gets stuck kills its process: another one than this.
    command = [sys.executable, str(ROOT / "benchmarks" / "parity.py"), "--full", "--worker"]
    results = [r for cell in cells for r in run_batch([{"cell": str(cell), **dataclasses.asdict(cell)}], command)]
    assert all(result["passed"] for result in results), [result for result in results if not result["passed"]]
