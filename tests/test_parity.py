"""Loss, gradients and trained state on every mesh are those of one device."""

import dataclasses

import jax
import numpy as np
import pytest

from merak_jax.runtime import pipeline
from tests.parity import Cell, all_cells, check, covering_cells, make_model, state_maker

CELLS = covering_cells(all_cells())
NARROW_MESHES = [(2, 2, 2), (1, 4, 2), (2, 4, 1)]


@pytest.fixture
def quick_compile():
    """Fewer optimisations of the machine code: the program and its partitioning stay, compiling takes two thirds of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_the_cells_cover_every_mesh_and_every_pair_of_options():
    wanted = {demand for cell in all_cells() for demand in cell.demands}
    assert {demand for cell in CELLS for demand in cell.demands} == wanted
    assert len(CELLS) <= 24


@pytest.mark.parametrize("precision, expected", [
    ("float64", {"float64"}), ("float32", {"float32"}), ("bfloat16", {"float32"}), ("all bfloat16", {"bfloat16"})])
def test_a_model_keeps_its_precision_under_x64(precision, expected):
    model = make_model(precision=precision)
    state = state_maker(model)(__import__("optax").sgd(1.0))
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == expected
    logits = jax.eval_shape(state.apply_fn, {"params": state.params}, np.zeros((2, 8), np.int32))
    assert str(logits.dtype) == precision.removeprefix("all ")


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_float64_is_the_same_to_the_last_digits(cell):
    check(cell)


@pytest.mark.parametrize("mesh", NARROW_MESHES, ids=str)
def test_float32_is_the_same(mesh):
    check(Cell(mesh, "P", 5, "unrolled", "tied", "1f1b", "ragged", "adamw", "float32"))
