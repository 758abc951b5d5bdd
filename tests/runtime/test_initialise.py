"""A state made on the mesh has the values that the user's initialiser gives on one device, whatever its keys."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.errors import StateError
from merak_jax.runtime.reroll import RerollWarning


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, param_dtype=jnp.float64)(x)
        for _ in range(3):
            x = x + nn.Dense(4, param_dtype=jnp.float64)(nn.tanh(x))
        return x


MODEL, OPTIMIZER = Model(), optax.adam(1e-2)


def create_state(key):
    params = MODEL.init(key, jnp.zeros((1, 4)))
    return {"params": params, "optimizer": OPTIMIZER.init(params), "average": params}


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: ((MODEL.apply(p, batch) - 1) ** 2).mean())(state["params"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
    return {"params": params, "optimizer": optimizer, "average": average}, loss


@pytest.fixture(scope="module")
def step():
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=2, pipe=2, tensor=2), num_microbatches=2)
    step.lower(jax.eval_shape(create_state, jax.random.key(0)), jax.ShapeDtypeStruct((8, 4), jnp.float64))
    return step


def test_values_are_those_of_one_device_and_no_block_is_made_alone(step):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        state = step.shard(step.init(create_state, jax.random.key(3)))
    expected = jax.jit(create_state)(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, step.unshard(state), expected)
    kernel = next(a for a in jax.tree.leaves(state) if a.ndim == 4)
    assert kernel.sharding.spec[0] == "pipe" and kernel.shape[:2] == (2, 2)


def test_keys_that_draw_otherwise_in_batches_are_drawn_one_by_one(step):
    key = jax.random.key(3, impl="rbg")
    with pytest.warns(RerollWarning, match="block by block"):
        state = step.shard(step.init(create_state, key))
    jax.tree.map(np.testing.assert_array_equal, step.unshard(state), jax.jit(create_state)(key))


def test_a_state_not_made_yet_reads_like_the_users(step):
    state = step.init(create_state, jax.random.key(0))
    assert "not made" in repr(state) or "to be made" in repr(state)
    np.testing.assert_array_equal(state["params"]["params"]["Dense_1"]["bias"], np.zeros(4))


def test_an_optimizer_made_anew_in_the_initialiser_is_no_other_structure():
    def create_state(key):
        params = MODEL.init(key, jnp.zeros((1, 4)))["params"]
        return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.sgd(0.1))

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: (state.apply_fn({"params": p}, batch) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=4, pipe=2), num_microbatches=1)
    batch = np.ones((8, 4))
    state, loss = step(step.init(create_state, jax.random.key(0)), batch)
    assert state.step == 1
    _, expected = jax.jit(train_step)(create_state(jax.random.key(0)), batch)
    assert abs(loss - expected) <= 1e-12 * abs(expected)
    with pytest.raises(StateError, match="static fields"):
        step.shard(create_state(jax.random.key(0)))


def test_another_structure_is_refused(step):
    with pytest.raises(StateError, match="another structure"):
        step.shard(step.init(lambda key: {"params": create_state(key)["params"]}, jax.random.key(0)))
