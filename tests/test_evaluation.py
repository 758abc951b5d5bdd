"""Evaluation steps: forward only, the numbers of one device in row order, on the state as the train step stores it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.errors import NoRepeatedBlocksError
from tests.helper import worst_leaf
from tests.parity import make_batch, make_model, mesh_of, next_token_loss, state_maker, train_step

ADAM = optax.adam(1e-2, eps=1e-3)


def evaluate(state, batch):
    """Sums, rows, functions of both, and what does not depend on the model or the batch."""
    logits = state.apply_fn({"params": state.params}, batch["tokens"])
    loss = next_token_loss(logits, batch["targets"], batch["mask"])
    right = (logits.argmax(-1) == batch["targets"]) * batch["mask"]
    return {
        "loss": loss,
        "perplexity": jnp.exp(loss),
        "accuracy": right.sum() / batch["mask"].sum(),
        "logits": logits,
        "largest": logits.max(),
        "lengths": batch["mask"].sum(1),
        "tokens": batch["tokens"],
        "step": state.step,
        "none": None,
        "three": 3,
        "rows": logits.shape[0],
        "sizes": jnp.array(logits.shape),
        "row_weights": jnp.ones(logits.shape[0]),
        "row_numbers": jnp.arange(logits.shape[0]),
    }


single_evaluation = jax.jit(evaluate)


def assert_equal(actual, expected):
    assert worst_leaf(jax.device_get(actual), jax.device_get(expected), floor=0.0)[0] <= 1e-12


@functools.cache
def maker_of(layers):
    """One maker, so that the meshes share a single-device evaluation."""
    return state_maker(make_model(5, layers, "tied"))


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 2), (2, 1, 1)])
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_an_evaluation_between_train_steps_reads_the_state_where_it_is(layers, sizes):
    make_state, mesh = maker_of(layers), mesh_of(*sizes)
    train = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=2)
    evaluation = merak_jax.parallelize(evaluate, mesh=mesh, num_microbatches=2)
    state = make_state(ADAM)
    for n in range(2):
        state, _ = train(state, make_batch(n))
    expected = single_evaluation(jax.device_get(train.unshard(state)), make_batch(7))
    assert_equal(evaluation(state, make_batch(7)), expected)
    (layout,) = evaluation._latest.layouts.values()
    assert layout == state._layout
    # The state was not donated, and trains on.
    state, _ = train(state, make_batch(3))
    assert int(state.step) == 3


def test_an_evaluation_of_a_state_that_is_not_on_the_mesh():
    state = state_maker(make_model(4))(ADAM)
    evaluation = merak_jax.parallelize(evaluate, mesh=mesh_of(2, 2, 1), num_microbatches=4)
    assert_equal(evaluation(state, make_batch(0)), jax.jit(evaluate)(state, make_batch(0)))
    assert evaluation.plan.schedule == "forward"
    # M = 4 on P = 2: five ticks, four of them busy on each stage.
    assert evaluation.plan.bubble_share == pytest.approx(0.2)
    assert type(evaluation.plan).from_json(evaluation.plan.to_json()) == evaluation.plan


def test_a_forward_pipeline_keeps_nothing_per_block_and_has_no_backward_pass():
    state = state_maker(make_model(8))(ADAM)
    evaluation = merak_jax.parallelize(evaluate, mesh=mesh_of(1, 4, 1), num_microbatches=4)
    text = evaluation.lower(state, make_batch(0)).compile().as_text()
    assert "conditional" not in text
    table = evaluation._latest.program.table
    assert (table.backward == -1).all() and table.num_stash_slots == 1


def test_parameters_alone_are_enough_and_further_arguments_are_passed_on():
    model = make_model(4)
    params = state_maker(model)(ADAM).params

    def scores(params, batch, temperature, key):
        logits = model.apply({"params": params}, batch["tokens"]) / temperature
        return jax.random.categorical(key, logits), jnp.sort(logits.max((1, 2)))

    evaluation = merak_jax.parallelize(scores, mesh=mesh_of(2, 2, 1), num_microbatches=2)
    args = (params, make_batch(0), 0.7, jax.random.key(5))
    actual, expected = evaluation(*args), jax.jit(scores)(*args)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-12)


def test_a_model_without_equal_blocks_needs_one_stage():
    def step(weights, batch):
        return jnp.tanh(batch["x"] @ weights).sum(1)

    batch = {"x": np.ones((8, 3))}
    with pytest.raises(NoRepeatedBlocksError, match="use pipe=1"):
        merak_jax.parallelize(step, mesh=mesh_of(1, 2, 1), num_microbatches=2)(jnp.ones((3, 2)), batch)
    actual = merak_jax.parallelize(step, mesh=mesh_of(4, 1, 2), num_microbatches=2)(jnp.ones((3, 2)), batch)
    np.testing.assert_allclose(actual, step(jnp.ones((3, 2)), batch), rtol=1e-12)


class PostNorm(nn.Module):
    """Norm behind every layer and behind the embedding, dropout between: without dropout a block could start at either."""

    @nn.compact
    def __call__(self, x, train):
        def norm(h, name):
            h = nn.LayerNorm(param_dtype=jnp.float64, name=name)(h)
            return nn.Dropout(0.3, deterministic=not train)(h)

        h = norm(nn.Dense(8, param_dtype=jnp.float64, name="embedding")(x), "norm_embedding")
        for i in range(4):
            h = norm(h + nn.tanh(nn.Dense(8, param_dtype=jnp.float64, name=f"dense_{i}")(h)), f"norm_{i}")
        return nn.Dense(3, param_dtype=jnp.float64, name="head")(h)


@pytest.mark.filterwarnings("error::merak_jax.runtime.reroll.RerollWarning")
def test_an_evaluation_without_dropout_takes_the_blocks_of_the_train_step():
    model, mesh = PostNorm(), mesh_of(1, 2, 1)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 6)), "y": np.arange(8) % 3}
    params = model.init(jax.random.key(0), batch["x"], False)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)

    def step(state, batch, key):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["x"], True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def logits(state, batch):
        return state.apply_fn({"params": state.params}, batch["x"], False)

    train = merak_jax.parallelize(step, mesh=mesh, num_microbatches=2)
    evaluation = merak_jax.parallelize(logits, mesh=mesh, num_microbatches=2)
    key = jax.random.key(1)
    assert_equal(evaluation(train(state, batch, key), batch), jax.jit(logits)(jax.jit(step)(state, batch, key), batch))
