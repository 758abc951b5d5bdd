"""Whatever a step returns, however it takes its gradient, and whatever else its state holds, it is what one device gives."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import value_and_grad

import merak_jax
from merak_jax.models.gpt2 import next_token_loss
from tests.helper import assert_same_as_single_device
from tests.parity import make_batch, make_model, mesh_of, state_maker, train_step


def check(step, mesh=(2, 2, 1), make_state=None, **options):
    return assert_same_as_single_device(
        step, make_state or state_maker(make_model()), make_batch, mesh_of(*mesh), **{"num_microbatches": 4, **options}
    )


def logits_of(state, params, batch):
    return state.apply_fn({"params": params}, batch["tokens"])


def row_losses(logits, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (each * batch["mask"]).sum(-1) / batch["mask"].sum(-1)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (1, 4, 1)], ids=str)
def test_metrics_are_those_of_one_device(mesh):
    schedule = optax.linear_schedule(0.1, 0.0, 10)

    def step(state, batch):
        def loss(params):
            logits = logits_of(state, params, batch)
            correct = (logits.argmax(-1) == batch["targets"]) * batch["mask"]
            aux = {
                "logits": logits,
                "row_loss": row_losses(logits, batch),
                "num_correct": correct.sum(),
                "accuracy": correct.sum() / batch["mask"].sum(),
                "mean_logit": logits.mean(),
                "spread": logits.std(),
                "doubled": 2 * jnp.sort(row_losses(logits, batch)),
                "nothing": None,
                "constant": jnp.float32(3),
                "length": batch["tokens"].shape[1],
                "rows": batch["tokens"].shape[0],
                "row_weights": jnp.ones((logits.shape[0],)),
                "row_numbers": jnp.arange(logits.shape[0]),
                "row_pairs": jnp.tile(jnp.arange(2), logits.shape[0]),
                "row_steps": jnp.full((logits.shape[0], 2), state.step),
                "row_scales": jnp.full((logits.shape[0],), jax.tree.leaves(params)[0].ravel()[0]),
                "sizes": jnp.array(logits.shape),
            }
            return next_token_loss(logits, batch["targets"], batch["mask"]), aux

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        metrics = {
            **aux,
            "loss": value,
            "perplexity": jnp.exp(value),
            "grad_norm": optax.global_norm(gradients),
            "param_norm": optax.global_norm(state.params),
            "learning_rate": schedule(state.step),
            "last_row": aux["row_loss"][-1],
            "num_tokens": batch["mask"].sum(),
            "pair": (1, [2.5, None]),
        }
        return state.apply_gradients(grads=gradients), metrics

    check(step, mesh)


def test_a_gradient_for_several_arguments_with_keywords():
    def step(state, batch):
        def loss(embedding, rest, *, batch, scale):
            logits = logits_of(state, {**rest, "token_embedding": embedding}, batch)
            return scale * next_token_loss(logits, batch["targets"], batch["mask"])

        rest = {name: value for name, value in state.params.items() if name != "token_embedding"}
        value, (first, second) = value_and_grad(loss, argnums=(0, 1))(
            state.params["token_embedding"], rest, batch=batch, scale=2.0
        )
        return state.apply_gradients(grads={**second, "token_embedding": first}), {"loss": value}

    check(step)


def test_a_gradient_for_some_parameters_leaves_the_others():
    def step(state, batch):
        def loss(blocks):
            logits = logits_of(state, {**state.params, **blocks}, batch)
            return next_token_loss(logits, batch["targets"], batch["mask"])

        blocks = {name: value for name, value in state.params.items() if name.startswith("h_")}
        others = {
            name: jax.tree.map(jnp.zeros_like, value) for name, value in state.params.items() if name not in blocks
        }
        return state.apply_gradients(grads={**others, **jax.grad(loss)(blocks)}), {}

    check(step)


def test_grad_with_the_loss_computed_apart():
    def step(state, batch):
        def loss(params):
            return next_token_loss(logits_of(state, params, batch), batch["targets"], batch["mask"])

        gradients = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": loss(state.params)}

    check(step)


def test_a_jitted_step_that_already_ran():
    step = jax.jit(train_step)
    make_state = state_maker(make_model())
    step(make_state(optax.sgd(1.0)), make_batch(0))
    check(step, make_state=make_state)


def test_the_norm_of_the_gradients_does_not_depend_on_the_number_of_microbatches():
    make_state = state_maker(make_model())
    expected = jax.jit(train_step)(make_state(optax.sgd(1.0)), make_batch(0))[1]["grad_norm"]
    norms = []
    for num_microbatches in (1, 8):
        step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 2, 1), num_microbatches=num_microbatches)
        norms.append(float(step(make_state(optax.sgd(1.0)), make_batch(0))[1]["grad_norm"]))
    np.testing.assert_allclose(norms, float(expected), rtol=1e-13)


class RichState(TrainState):
    """A state with more in it than Flax's own."""

    frozen: Any
    average: Any
    raw_key: Any
    key: Any
    history: tuple = ()
    label: str = flax.struct.field(pytree_node=False, default="run 1")


def rich_state_maker():
    plain = state_maker(make_model())

    def make(tx):
        base = plain(tx)
        params = {**base.params, "unused": {"kernel": jnp.ones((3, 5)), "bias": jnp.arange(5.0)}}
        frozen = {"table": jnp.arange(32.0), "flags": jnp.array([True, False]), "sizes": np.arange(4, dtype=np.int8)}
        return RichState.create(
            apply_fn=base.apply_fn,
            params=params,
            tx=tx,
            frozen=frozen,
            average=params,
            raw_key=jax.random.PRNGKey(3),
            key=jax.random.key(3),
            history=(jnp.zeros(()), None),
        )

    return make


def test_other_fields_of_the_state_live_on_and_unused_parameters_get_zero_gradients():
    def step(state, batch):
        def loss(params):
            logits = logits_of(state, params, batch) + state.frozen["table"]
            return next_token_loss(logits, batch["targets"], batch["mask"])

        value, gradients = jax.value_and_grad(loss)(state.params)
        metrics = {"loss": value, "unused": optax.global_norm(gradients["unused"])}
        state = state.apply_gradients(grads=gradients)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
        raw_key, key = (jax.random.split(key)[0] for key in (state.raw_key, state.key))
        return state.replace(average=average, raw_key=raw_key, key=key, history=(value, None)), metrics

    make_state = rich_state_maker()
    assert isinstance(make_state(optax.sgd(1.0)).step, int)
    check(step, (1, 2, 2), make_state)


def test_a_state_that_is_not_donated_can_be_used_again():
    make_state = state_maker(make_model())
    step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 2, 1), num_microbatches=2, donate=False)
    first, _ = step(make_state(optax.sgd(0.1)), make_batch(0))
    runs = [step(first, make_batch(1)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *[(step.unshard(state), metrics) for state, metrics in runs])
    assert int(first.step) == 1


def test_a_donated_state_is_gone_and_reuses_its_memory():
    make_state = state_maker(make_model())
    step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 2, 1), num_microbatches=2)
    first, _ = step(make_state(optax.adam(0.1)), make_batch(0))
    second, _ = step(first, make_batch(1))
    assert all(array.is_deleted() for array in jax.tree.leaves(first))
    assert not any(array.is_deleted() for array in jax.tree.leaves(second))
    memory = step.lower(make_state(optax.adam(0.1)), make_batch(0)).compile().memory
    state_bytes = step.plan.state_bytes
    assert memory.alias_size_in_bytes >= 0.9 * state_bytes


def test_sizes_that_the_mesh_does_not_divide():
    model = make_model(depth=3, vocab_size=33, num_heads=3, width=9, max_length=13)
    check(train_step, (1, 2, 4), state_maker(model), num_microbatches=2)


@pytest.mark.parametrize(
    "loss_dtype, mesh",
    [(jnp.bfloat16, (2, 1, 1)), (jnp.bfloat16, (2, 2, 2)), (jnp.float16, (2, 2, 2)), (jnp.float32, (2, 1, 1))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_sums_of_16_bits_over_the_data_shards_are_those_of_one_device(loss_dtype, mesh):
    # XLA:CPU aborts on an all-reduce of 16 bits inside shard_map.
    def step(state, batch):
        def loss(params):
            logits = logits_of(state, params, batch)
            aux = {
                "half": logits.mean().astype(jnp.float16),
                "count": batch["mask"].astype(jnp.int16).sum(dtype=jnp.int16),
                "small": (batch["tokens"] % 3).astype(jnp.uint8).sum(dtype=jnp.uint8),
            }
            return next_token_loss(logits, batch["targets"], batch["mask"]).astype(loss_dtype), aux

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, **aux}

    check(step, mesh, precision="bfloat16", optimizer=optax.sgd(0.1))
