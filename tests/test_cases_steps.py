"""Cases of train steps, optimizers and outputs that people met elsewhere; the number is that of the case."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.errors import MerakError, PlanError
from tests.helper import assert_same_as_single_device, run_on_mesh, run_on_one_device, worst_leaf

W, V, ROWS = 8, 6, 8
SGD = optax.sgd(0.1)


class Tower(nn.Module):
    """A first layer, equal residual blocks, a head of V classes."""

    layers: int = 4
    dtype: object = jnp.float64
    width: int = W

    @nn.compact
    def __call__(self, x):
        def dense(features):
            return nn.Dense(features, dtype=self.dtype, param_dtype=self.dtype)

        x = dense(self.width)(x)
        for _ in range(self.layers):
            x = x + nn.tanh(dense(self.width)(x))
        return dense(V)(x)


TOWER = Tower()


def mesh_of(data=1, pipe=1, tensor=1):
    return merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor, devices=jax.devices()[: data * pipe * tensor])


def state_maker(model=TOWER, change=lambda params: params, state_class=TrainState, **fields):
    params = change(model.init(jax.random.key(0), jnp.zeros((1, W), model.dtype))["params"])
    return lambda tx: state_class.create(apply_fn=model.apply, params=params, tx=tx, **fields)


def make_batch(n, rows=ROWS, dtype=np.float64):
    random = np.random.default_rng(n)
    return {"x": random.normal(size=(rows, W)).astype(dtype), "y": random.integers(0, V, rows)}


def losses_per_row(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def train_step(state, batch):
    value, gradients = jax.value_and_grad(lambda p: losses_per_row(state, p, batch).mean())(state.params)
    return state.apply_gradients(grads=gradients), {"loss": value}


def same(step, mesh, *, make_state=None, optimizer=SGD, num_microbatches=2, **options):
    return assert_same_as_single_device(
        step,
        state_maker() if make_state is None else make_state,
        options.pop("make_batch", make_batch),
        mesh,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        **options,
    )


def test_case_9_batch_values_that_are_returned_untouched_come_back_bitwise():
    def step(state, batch):
        new, metrics = train_step(state, batch)
        return new, {**metrics, "y": batch["y"], "x": batch["x"]}

    batch = make_batch(0)
    parallel = merak_jax.parallelize(step, mesh=mesh_of(data=2, pipe=2), num_microbatches=2)
    _, metrics = parallel(state_maker()(SGD), batch)
    np.testing.assert_array_equal(metrics["y"], batch["y"])
    np.testing.assert_array_equal(metrics["x"], batch["x"])


def test_case_35_a_head_that_is_split_over_tensor_shifts_no_loss():
    same(train_step, mesh_of(tensor=2, pipe=2))


def test_case_38_loss_learning_rate_and_norms_are_returned():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)

    def step(state, batch):
        value, gradients = jax.value_and_grad(lambda p: losses_per_row(state, p, batch).mean())(state.params)
        norms = {"grad_norm": optax.tree.norm(gradients), "param_norm": optax.tree.norm(state.params)}
        return state.apply_gradients(grads=gradients), {"loss": value, "lr": schedule(state.step), **norms}

    same(step, mesh_of(data=2, pipe=2, tensor=2), optimizer=optax.sgd(schedule))


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1), (1, 4, 1)])
def test_case_39_auxiliary_outputs_of_every_kind(sizes):
    def step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            rows = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            right = logits.argmax(-1) == batch["y"]
            aux = {
                "logits": logits,
                "rows": rows,
                "accuracy": right.mean(),
                "n_correct": right.sum(),
                "max": logits.max(),
                "perplexity": jnp.exp(rows.mean()),
                "constant": jnp.arange(3),
                "step": state.step,
                "none": None,
            }
            return rows.mean(), aux

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, **aux}

    same(step, mesh_of(*sizes))


def test_case_40_the_loss_is_the_same_on_every_device():
    parallel = merak_jax.parallelize(train_step, mesh=mesh_of(data=2, pipe=2, tensor=2), num_microbatches=2)
    _, metrics = parallel(state_maker()(SGD), make_batch(0))
    expected = jax.jit(train_step)(state_maker()(SGD), make_batch(0))[1]["loss"]
    shards = [np.asarray(s.data) for s in metrics["loss"].addressable_shards]
    assert len(shards) == 8 and all(s == shards[0] for s in shards)
    np.testing.assert_allclose(shards[0], expected, rtol=1e-12)


def test_case_43_a_loss_with_a_shard_map_of_the_users_own_is_one_clear_error():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("own",))

    def step(state, batch):
        def loss(params):
            def part(x):
                return jax.lax.psum(
                    losses_per_row(state, params, {**batch, "x": x, "y": batch["y"][: len(x)]}).sum(), "own"
                )

            spec = jax.sharding.PartitionSpec
            return jax.shard_map(part, mesh=mesh, in_specs=spec("own"), out_specs=spec(), check_vma=False)(batch["x"])

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    parallel = merak_jax.parallelize(step, mesh=mesh_of(pipe=2), num_microbatches=2)
    with pytest.raises(MerakError, match="shard_map"):
        parallel(state_maker()(SGD), make_batch(0))


@pytest.mark.filterwarnings("ignore::merak_jax.runtime.reroll.RerollWarning")
def test_case_44_multi_steps_take_one_step_in_three():
    same(train_step, mesh_of(pipe=2), optimizer=optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 3), steps=7)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_case_46_the_global_norm_is_one_number(sizes):
    def step(state, batch):
        value, gradients = jax.value_and_grad(lambda p: losses_per_row(state, p, batch).mean())(state.params)
        return state.apply_gradients(grads=gradients), {"norm": optax.tree.norm(gradients)}

    same(step, mesh_of(*sizes))


def test_case_48_copies_of_a_leaf_are_bitwise_the_same_on_all_devices_after_three_steps():
    parallel = merak_jax.parallelize(train_step, mesh=mesh_of(data=2, pipe=2, tensor=2), num_microbatches=2)
    state = state_maker()(optax.adam(1e-2))
    for n in range(3):
        state, _ = parallel(state, make_batch(n))
    for array in state._arrays:
        copies = {}
        for shard in array.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            for other in others:
                np.testing.assert_array_equal(first, other)


class ScaledState(TrainState):
    """A TrainState with flax's loss scale."""

    scale: DynamicScale


def scaled_step(state, batch):
    gradient = state.scale.value_and_grad(lambda p: losses_per_row(state, p, batch).mean())
    scale, is_finite, value, gradients = gradient(state.params)
    new = state.apply_gradients(grads=gradients)
    keep = jax.tree.map(
        lambda a, b: jnp.where(is_finite, a, b), (new.params, new.opt_state), (state.params, state.opt_state)
    )
    return new.replace(params=keep[0], opt_state=keep[1], scale=scale), {"loss": value, "scale": scale.scale}


def test_case_50_a_dynamic_loss_scale_grows_as_on_one_device():
    scale = DynamicScale(growth_interval=1, scale=jnp.float32(2.0**15))
    same(
        scaled_step,
        mesh_of(data=2, pipe=2),
        make_state=state_maker(Tower(dtype=jnp.float32), state_class=ScaledState, scale=scale),
        make_batch=lambda n: make_batch(n, dtype=np.float32),
        precision="float32",
        steps=4,
    )


def test_case_51_an_infinite_gradient_makes_the_same_nans():
    def step(state, batch):
        value, gradients = jax.value_and_grad(lambda p: losses_per_row(state, p, batch).mean())(state.params)
        gradients = jax.tree.map(lambda g: jnp.where(g == g.max(), jnp.inf, g), gradients)
        return state.apply_gradients(grads=gradients), {"loss": value}

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    expected = run_on_one_device(step, state_maker(), make_batch, optimizer, steps=1).state
    actual = run_on_mesh(step, state_maker(), make_batch, mesh_of(pipe=2), optimizer, steps=1, num_microbatches=2).state
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(e))
        np.testing.assert_array_equal(np.isposinf(a), np.isposinf(e))
    assert any(np.isnan(x).any() for x in jax.tree.leaves(expected))


@pytest.mark.parametrize("freeze", [False, True])
def test_case_52_masks_as_dicts_and_frozen_dicts(freeze):
    change = FrozenDict if freeze else (lambda params: params)
    make_state = state_maker(change=change)
    mask = jax.tree.map(lambda x: x.ndim > 1, make_state(SGD).params)
    same(train_step, mesh_of(pipe=2), make_state=make_state, optimizer=optax.adamw(1e-2, eps=1e-3, mask=mask))


def test_case_58_a_schedule_counts_calls_and_not_microbatches():
    optimizer = optax.adam(optax.linear_schedule(0.0, 1e-2, 10), eps=1e-3)
    parallel = merak_jax.parallelize(train_step, mesh=mesh_of(pipe=2), num_microbatches=4)
    state = state_maker()(optimizer)
    for n in range(3):
        state, _ = parallel(state, make_batch(n))
        assert int(state.opt_state[0].count) == n + 1
    same(train_step, mesh_of(pipe=2), optimizer=optimizer, num_microbatches=4)


@pytest.mark.parametrize("loss_dtype", [jnp.float32, jnp.bfloat16])
def test_case_59_bfloat16_parameters_on_pipe_and_tensor_end_without_an_abort(loss_dtype):
    def step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["x"]).astype(loss_dtype)
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros_like(batch["y"])).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value}

    same(
        step,
        mesh_of(pipe=2, tensor=2),
        make_state=state_maker(Tower(dtype=jnp.bfloat16)),
        make_batch=lambda n: make_batch(n, 4, jnp.bfloat16),
        precision="bfloat16",
        steps=1,
    )


def test_case_61_batches_of_other_shapes_compile_once_each_and_stay_exact():
    traces = []

    def step(state, batch):
        traces.append(batch["x"].shape)
        return train_step(state, batch)

    parallel = merak_jax.parallelize(step, mesh=mesh_of(data=2, pipe=2), num_microbatches=2)
    state, expected = state_maker()(SGD), state_maker()(SGD)
    for n, rows in enumerate([8, 16, 8, 16]):
        state, metrics = parallel(state, make_batch(n, rows))
        expected, truth = jax.jit(train_step)(expected, make_batch(n, rows))
        np.testing.assert_allclose(metrics["loss"], truth["loss"], rtol=1e-12)
    assert worst_leaf(jax.device_get(parallel.unshard(state).params), jax.device_get(expected.params))[0] <= 1e-12
    # Two sizes, each traced whole and as one microbatch.
    assert len(traces) == 4


def test_case_106_a_number_of_microbatches_that_does_not_fit_says_what_to_change():
    parallel = merak_jax.parallelize(train_step, mesh=mesh_of(pipe=4), num_microbatches=3)
    with pytest.raises(MerakError, match=r"num_microbatches=3.*batch of (6|9)"):
        parallel(state_maker()(SGD), make_batch(0))


def test_case_110_a_dimension_that_tensor_does_not_divide_stays_whole():
    make_state = state_maker(Tower(width=10))
    same(train_step, mesh_of(tensor=4), make_state=make_state)


def test_case_111_more_stages_than_layers_is_no_error_and_bad_options_are_raised_by_parallelize():
    same(train_step, mesh_of(pipe=8))
    with pytest.raises(PlanError, match="num_microbatches"):
        merak_jax.parallelize(train_step, mesh=mesh_of(pipe=2), num_microbatches=0)
