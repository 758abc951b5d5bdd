"""Cases of loss semantics and optimizers that people met elsewhere; the number is that of the case."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import merak_jax
from tests.helper import assert_same_as_single_device, run_on_one_device

WIDTH, TOKENS, CLASSES, ROWS = 4, 4, 3, 8
SGD = optax.sgd(0.1)


class MLP(nn.Module):
    """Equal blocks `h -> combine(h, tanh(Dense(h)))` after a first layer, and a head."""

    layers: int = 2

    def combine(self, x, change):
        return x + change

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, param_dtype=jnp.float64, name="first")(x)
        for i in range(self.layers):
            x = self.combine(x, nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64, name=f"layer_{i}")(x)))
        return nn.Dense(CLASSES, param_dtype=jnp.float64, name="head")(x)


TWO_LAYERS = MLP()


def state_maker(model=TWO_LAYERS, change=lambda params: params):
    def make_state(tx):
        params = change(model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"])
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return make_state


def make_batch(n, rows=ROWS):
    random = np.random.default_rng(n)
    return {
        "x": random.normal(size=(rows, TOKENS, WIDTH)),
        "y": random.integers(0, CLASSES, (rows, TOKENS)),
        "mask": (random.random((rows, TOKENS)) < 0.6).astype(np.float64),
    }


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def step_with(loss):
    """A train step on `loss(logits, batch)` that returns loss and gradient norm."""

    def train_step(state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(state.apply_fn({"params": p}, batch["x"]), batch))(
            state.params
        )
        return state.apply_gradients(grads=grads), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return train_step


def mean_loss(logits, batch):
    return cross_entropy(logits, batch).mean()


def mesh_of(data=1, pipe=1, tensor=1):
    return merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor, devices=jax.devices()[: data * pipe * tensor])


# Token counts.


def masked_mean(logits, batch):
    return jnp.sum(cross_entropy(logits, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def masked_mean_at_least_one(logits, batch):
    return jnp.sum(cross_entropy(logits, batch) * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def mean_where(logits, batch):
    return jnp.mean(cross_entropy(logits, batch), where=batch["mask"] > 0)


def test_case_29_five_tokens_in_two_microbatches_weigh_the_same():
    def squared_errors(logits, batch):
        return jnp.sum(batch["mask"] * (logits[..., 0] - batch["target"]) ** 2) / jnp.sum(batch["mask"])

    def zero_head(params):
        return {**params, "head": jax.tree.map(jnp.zeros_like, params["head"])}

    batch = {
        "x": make_batch(0, rows=2)["x"],
        "target": np.array([[1.0, 1, 1, 1], [5**0.5, 9, 9, 9]]),
        "mask": np.array([[1.0, 1, 1, 1], [1, 0, 0, 0]]),
    }
    step = merak_jax.parallelize(step_with(squared_errors), mesh=mesh_of(pipe=2), num_microbatches=2)
    before = state_maker(change=zero_head)(SGD)
    after, metrics = step(before, batch)
    np.testing.assert_allclose(metrics["loss"], 1.8, rtol=1e-15)
    expected, expected_metrics = jax.jit(step_with(squared_errors))(before, batch)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-12)
    np.testing.assert_allclose(step.unshard(after).params["head"]["bias"][0], 0.1 * 2 * (4 + 5**0.5) / 5, rtol=1e-14)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-15),
        step.unshard(after).params,
        expected.params,
    )


def few_and_many_tokens(n):
    """The first half of the batch has 1 token a row, the other half all of them, but one."""
    batch = make_batch(n)
    mask = np.zeros((ROWS, TOKENS))
    mask[: ROWS // 2, 0] = 1
    mask[ROWS // 2 :] = 1
    mask[-1, -1] = 0
    return batch | {"mask": mask}


@pytest.mark.parametrize("loss, data", [(masked_mean, 2), (mean_where, 1)])
def test_case_29_few_tokens_in_one_microbatch_and_many_in_the_other(loss, data):
    assert_same_as_single_device(
        step_with(loss),
        state_maker(),
        few_and_many_tokens,
        mesh_of(data=data, pipe=2),
        optimizer=SGD,
        num_microbatches=2,
    )


def padded_half(n):
    batch = make_batch(n)
    batch["mask"][ROWS // 2 :] = 0
    return batch


@pytest.mark.parametrize("loss, data", [(masked_mean, 1), (masked_mean_at_least_one, 2)])
def test_case_30_microbatches_that_are_all_padding(loss, data):
    assert_same_as_single_device(
        step_with(loss),
        state_maker(),
        padded_half,
        mesh_of(data=data, pipe=2),
        optimizer=SGD,
        num_microbatches=4 // data,
    )


def test_case_30_a_batch_that_is_all_padding_has_loss_and_gradient_zero():
    step = merak_jax.parallelize(step_with(masked_mean_at_least_one), mesh=mesh_of(pipe=2), num_microbatches=2)
    _, metrics = step(state_maker()(SGD), make_batch(0) | {"mask": np.zeros((ROWS, TOKENS))})
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0


# The scale of the gradient.


@pytest.fixture(scope="module")
def mean_loss_reference():
    return run_on_one_device(step_with(mean_loss), state_maker(), make_batch, SGD)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_case_33_the_gradient_norm_is_the_same_for_every_number_of_microbatches(mean_loss_reference, num_microbatches):
    found = assert_same_as_single_device(
        step_with(mean_loss),
        state_maker(),
        make_batch,
        mesh_of(pipe=2),
        optimizer=SGD,
        expected=mean_loss_reference,
        num_microbatches=num_microbatches,
    )
    assert found.metrics[0] < 1e-13


def summed_over_root(logits, batch):
    return cross_entropy(logits, batch).sum() / np.sqrt(len(batch["y"]))


def test_case_33_a_divisor_made_of_the_batch_size_is_that_of_the_full_batch():
    assert_same_as_single_device(
        step_with(summed_over_root),
        state_maker(),
        make_batch,
        mesh_of(data=2, pipe=2),
        optimizer=SGD,
        num_microbatches=2,
    )


# Bubbles.


class UnitNorm(MLP):
    def combine(self, x, change):
        x = x + change
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Logarithm(MLP):
    def combine(self, x, change):
        return jnp.log(jnp.abs(x)) + change


class NoEpsilon(MLP):
    def combine(self, x, change):
        x = x + change
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True))


@pytest.mark.parametrize(
    "model, stages", [(UnitNorm(4), 4), (Logarithm(2), 2), (NoEpsilon(3), 2)], ids=["norm", "log", "sqrt"]
)
def test_case_42_blocks_that_are_not_finite_on_zeros_stay_finite(model, stages):
    assert_same_as_single_device(
        step_with(mean_loss), state_maker(model), make_batch, mesh_of(pipe=stages), optimizer=SGD, num_microbatches=4
    )


def test_case_42_jax_debug_nans_finds_nothing_in_the_bubbles():
    step = merak_jax.parallelize(step_with(mean_loss), mesh=mesh_of(pipe=2), num_microbatches=2)
    before = state_maker(UnitNorm(2))(SGD)
    with jax.debug_nans(True):
        state, metrics = step(before, make_batch(0))
    assert np.isfinite(metrics["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(step.unshard(state).params))


# Optimizers.


def large_loss(logits, batch):
    return 40 * mean_loss(logits, batch)


def test_case_45_clipping_by_the_global_norm_on_pipe_and_tensor():
    make_state, step = state_maker(), step_with(large_loss)
    _, metrics = jax.jit(step)(make_state(SGD), make_batch(0))
    assert metrics["grad_norm"] > 5
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert_same_as_single_device(
        step, make_state, make_batch, mesh_of(pipe=2, tensor=2), optimizer=clipped, num_microbatches=2
    )
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))
    assert_same_as_single_device(
        step, make_state, make_batch, mesh_of(pipe=2, tensor=2), optimizer=clipped, num_microbatches=2
    )


def test_case_63_a_weight_decay_mask_by_path_sees_the_users_tree():
    seen = []

    def kernels_of_even_layers(params):
        seen.append(jax.tree.structure(params))
        decayed = {("layer_0", "kernel"), ("head", "kernel")}
        return jax.tree_util.tree_map_with_path(lambda path, _: tuple(k.key for k in path) in decayed, params)

    make_state = state_maker()
    optimizer = optax.adamw(1e-2, eps=1e-3, weight_decay=0.3, mask=kernels_of_even_layers)
    assert_same_as_single_device(
        step_with(mean_loss), make_state, make_batch, mesh_of(pipe=2), optimizer=optimizer, num_microbatches=2
    )
    assert set(seen) == {jax.tree.structure(make_state(SGD).params)}
