"""Cases of model structure and mesh shape that people met elsewhere; the number is that of the case."""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import merak_jax
from tests.helper import assert_same_as_single_device, run_on_one_device

VOCABULARY, WIDTH, TOKENS = 32, 8, 3
SGD = optax.sgd(0.1)
DEFAULT_OPTIMIZER = optax.adam(1e-2, eps=1e-3)


class LanguageModel(nn.Module):
    """Embedding, equal residual blocks, norm, head; `head` is "tied", "table" (a second [V, W] leaf) or "dense"."""

    layers: int = 2
    head: str = "dense"

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, name="embed")
        x = embed(tokens)
        for i in range(self.layers):
            x = x + nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64, name=f"block_{i}")(x))
        x = nn.LayerNorm(param_dtype=jnp.float64, name="norm")(x)
        if self.head == "tied":
            return embed.attend(x)
        if self.head == "table":
            return x @ self.param("head", nn.initializers.normal(), (VOCABULARY, WIDTH), jnp.float64).T
        return nn.Dense(VOCABULARY, param_dtype=jnp.float64, name="head")(x)


def state_maker(model, change=lambda params: params):
    def make_state(tx):
        params = change(model.init(jax.random.key(0), jnp.zeros((1, TOKENS), jnp.int32))["params"])
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return make_state


def make_batch(n, rows=8):
    random = np.random.default_rng(n)
    return {"x": random.integers(0, VOCABULARY, (rows, TOKENS)), "y": random.integers(0, VOCABULARY, (rows, TOKENS))}


def train_step(state, batch):
    def loss(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value, "grad_norm": optax.tree.norm(grads)}


def mesh_of(data=1, pipe=1, tensor=1):
    return merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor, devices=jax.devices()[: data * pipe * tensor])


def test_case_1_a_tied_embedding_gets_both_gradients_on_data_and_pipe():
    assert_same_as_single_device(
        train_step,
        state_maker(LanguageModel(head="tied")),
        make_batch,
        mesh_of(data=2, pipe=2),
        optimizer=SGD,
        num_microbatches=2,
    )


def test_case_2_a_tied_table_is_one_leaf_and_does_not_drift_in_five_steps():
    make_state = state_maker(LanguageModel(layers=4, head="tied"))
    adamw = optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)
    assert_same_as_single_device(
        train_step, make_state, make_batch, mesh_of(pipe=4), optimizer=adamw, steps=5, num_microbatches=4
    )
    tables = [x for x in jax.tree.leaves(make_state(SGD).params) if VOCABULARY in x.shape]
    assert len(tables) == 1


def test_case_4_two_leaves_made_from_one_array_stay_two_and_are_not_donated_twice():
    def shared(params):
        return {**params, "head": params["embed"]["embedding"]}

    make_state = state_maker(LanguageModel(head="table"), shared)
    before = make_state(SGD)
    assert before.params["head"] is before.params["embed"]["embedding"]
    step = merak_jax.parallelize(train_step, mesh=mesh_of(pipe=2), num_microbatches=2, donate=True)
    after, _ = step(before, make_batch(0))
    after, _ = step(after, make_batch(1))
    expected, _ = jax.jit(train_step)(before, make_batch(0))
    expected, _ = jax.jit(train_step)(expected, make_batch(1))
    params = step.unshard(after).params
    for path in ("head", "embed"):
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=1e-14), params[path], expected.params[path]
        )
    assert np.abs(params["head"] - params["embed"]["embedding"]).max() > 1e-4


@pytest.mark.parametrize("layers, stages", [(7, 2), (5, 4), (3, 4)])
def test_case_11_no_layer_is_lost_when_the_stages_are_uneven(layers, stages):
    make_state = state_maker(LanguageModel(layers))
    step = merak_jax.parallelize(train_step, mesh=mesh_of(pipe=stages), num_microbatches=4)
    before = make_state(SGD)
    after, _ = step(before, make_batch(0))
    expected, _ = jax.jit(train_step)(before, make_batch(0))
    assert sum(stage.blocks for stage in step.plan.stages) == layers
    moved = step.unshard(after).params
    for i in range(layers):
        name = f"block_{i}"
        assert np.abs(moved[name]["kernel"] - before.params[name]["kernel"]).max() > 1e-6, name
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-15), moved, expected.params)


def test_case_12_leaves_outside_the_blocks_are_equal_and_are_never_split_over_pipe_as_blocks_are():
    make_state = state_maker(LanguageModel(layers=5))
    assert_same_as_single_device(train_step, make_state, make_batch, mesh_of(pipe=2), num_microbatches=2)
    step = merak_jax.parallelize(train_step, mesh=mesh_of(pipe=2), num_microbatches=2)
    state = make_state(SGD)
    step.lower(state, make_batch(0))
    assert tuple(stage.blocks for stage in step.plan.stages) == (3, 2)
    named = " ".join(step.plan.other_leaves)
    for leaf in (
        "['embed']['embedding']",
        "['norm']['scale']",
        "['norm']['bias']",
        "['head']['kernel']",
        "['head']['bias']",
    ):
        assert leaf in named
    assert "block_" not in named


@pytest.fixture(scope="module")
def reference():
    """Two layers with a tied head and an equal state on every mesh."""
    make_state = state_maker(LanguageModel(layers=2, head="tied"))
    return make_state, run_on_one_device(train_step, make_state, make_batch, DEFAULT_OPTIMIZER)


@pytest.mark.parametrize("data, pipe, tensor", list(itertools.product((1, 2), repeat=3)))
def test_case_69_axes_of_size_one_and_two_in_every_combination(reference, data, pipe, tensor):
    make_state, expected = reference
    assert_same_as_single_device(
        train_step,
        make_state,
        make_batch,
        mesh_of(data, pipe, tensor),
        optimizer=DEFAULT_OPTIMIZER,
        expected=expected,
        num_microbatches=2,
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (5, 0, 7, 2)], ids=["in order", "permuted"])
def test_case_70_stage_i_stands_on_row_i_of_the_users_mesh(order):
    devices = [jax.devices()[i] for i in order]
    make_state = state_maker(LanguageModel(layers=4))
    before = make_state(SGD)
    step = merak_jax.parallelize(train_step, mesh=Mesh(np.array(devices), ("pipe",)), num_microbatches=4)
    after, metrics = step(before, make_batch(0))
    expected, expected_metrics = jax.jit(train_step)(before, make_batch(0))
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-12)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-15),
        step.unshard(after).params,
        expected.params,
    )
    (kernels,) = [x for x in jax.tree.leaves(after) if x.shape == (4, 1, WIDTH, WIDTH)]
    for shard in kernels.addressable_shards:
        stage = shard.index[0].start
        assert shard.device == devices[stage]
        np.testing.assert_allclose(
            shard.data[0, 0], expected.params[f"block_{stage}"]["kernel"], rtol=1e-12, atol=1e-15
        )


def test_case_96_the_program_has_the_same_operations_for_any_depth_and_any_number_of_microbatches():
    def operations(layers, num_microbatches):
        step = merak_jax.parallelize(train_step, mesh=mesh_of(pipe=2), num_microbatches=num_microbatches)
        text = step.lower(state_maker(LanguageModel(layers))(DEFAULT_OPTIMIZER), make_batch(0, 16)).as_text()
        return len(re.findall(r"stablehlo\.|call @", text))

    counts = {(n, m): operations(n, m) for n, m in ((4, 4), (8, 4), (16, 4), (32, 4), (4, 8))}
    assert len(set(counts.values())) == 1, counts
    assert 100 < counts[4, 4] < 3000


def test_one_row_per_microbatch_is_enough():
    make_state = state_maker(LanguageModel())
    assert_same_as_single_device(
        train_step, make_state, make_batch, mesh_of(data=2, pipe=2), optimizer=SGD, num_microbatches=4
    )


def test_the_metrics_of_all_devices_are_the_same_number():
    step = merak_jax.parallelize(train_step, mesh=mesh_of(2, 2, 2), num_microbatches=2)
    _, metrics = step(state_maker(LanguageModel())(SGD), make_batch(0))
    for value in jax.tree.leaves(metrics):
        assert len({float(shard.data) for shard in value.addressable_shards}) == 1
        assert len(value.addressable_shards) == 8
