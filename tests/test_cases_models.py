"""Cases of model structure with several chains, skips, sown losses and random draws; the number is that of the case."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.errors import NoRepeatedBlocksError, NotSeparableError
from merak_jax.models.t5 import T5, T5Config, sequence_loss, shift_right
from tests.helper import assert_same_as_single_device

W, T, V, ROWS = 8, 4, 16, 8
SGD = optax.sgd(0.1)
Dense = functools.partial(nn.Dense, param_dtype=jnp.float64)


class KeyedState(TrainState):
    """A TrainState with a random key."""

    key: jax.Array


def mesh_of(data=1, pipe=1, tensor=1):
    return merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor, devices=jax.devices()[: data * pipe * tensor])


def make_batch(n, rows=ROWS):
    random = np.random.default_rng(n)
    return {
        "x": random.normal(size=(rows, W)),
        "y": random.normal(size=(rows, W)),
        "tokens": random.integers(1, V, (rows, T)),
        "targets": random.integers(1, V, (rows, T)),
        "mask": np.arange(T) < random.integers(1, T + 1, (rows, 1)),
    }


def same(model, loss, mesh, *, optimizer=SGD, init=None, num_microbatches=2, **options):
    """Assert parity for `loss(apply, params, batch, key)` of a model."""
    init = {"x": jnp.zeros((1, W))} if init is None else init
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, **init)["params"]

    def step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        value, gradients = jax.value_and_grad(lambda p: loss(state.apply_fn, p, batch, key))(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value}

    return assert_same_as_single_device(
        step,
        lambda tx: KeyedState.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(3)),
        make_batch,
        mesh,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        **options,
    )


def mean_square(apply, params, batch, key):
    return jnp.mean((apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def dropout_loss(apply, params, batch, key):
    return jnp.mean((apply({"params": params}, batch["x"], rngs={"dropout": key}) - batch["y"]) ** 2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_case_7_an_encoder_decoder_shares_its_position_bias_and_its_encoder_output(dropout):
    config = T5Config(
        vocab_size=V, num_layers=2, num_heads=2, width=W, head_dim=4, mlp_width=W, num_buckets=4, max_distance=8,
        dropout=dropout, param_dtype=jnp.float64,
    )  # fmt: skip

    def loss(apply, params, batch, key):
        tokens, targets = batch["tokens"], batch["targets"]
        logits = apply(
            {"params": params}, tokens, shift_right(targets), batch["mask"], deterministic=False, rngs={"dropout": key}
        )
        return sequence_loss(logits, targets, batch["mask"], label_smoothing=0.1)

    tokens = jnp.ones((1, T), jnp.int32)
    same(T5(config), loss, mesh_of(pipe=4), init={"tokens": tokens, "decoder_tokens": tokens})


class UNet(nn.Module):
    """Four layers down and four up, each narrower or wider than the last, skips between."""

    @nn.compact
    def __call__(self, x):
        skips = []
        for n in range(4):
            x = nn.tanh(Dense(W - n)(x))
            skips.append(x)
        for skip in reversed(skips):
            x = nn.tanh(Dense(W)(jnp.concatenate([x, skip], -1)))
        return x


def test_case_10_a_u_net_of_unequal_layers_has_no_equal_blocks_and_runs_on_one_stage():
    with pytest.raises(NoRepeatedBlocksError, match="use pipe=1"):
        same(UNet(), mean_square, mesh_of(pipe=4))
    same(UNet(), mean_square, mesh_of(data=2, tensor=2))


@pytest.mark.parametrize("use_bias", [False, True])
def test_case_14_a_scan_whose_carry_starts_from_zeros(use_bias):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            x, total = carry
            x = x + nn.tanh(Dense(W, use_bias=use_bias)(x))
            return (x, total + jnp.sum(x**2, -1)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            (x, total), _ = scan()(
                (x * self.param("in", nn.initializers.ones, (W,), jnp.float64), jnp.zeros(len(x))), None
            )
            return x * total[:, None]

    same(Model(), mean_square, mesh_of(pipe=4))


@pytest.mark.parametrize("split", [True, False])
def test_case_15_dropout_in_a_scan_whether_its_rngs_are_split_or_not(split):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dropout(0.5, deterministic=False)(nn.tanh(Dense(W)(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            rngs = {"params": True, "dropout": split}
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs=rngs, length=4)
            return Dense(W)(scan()(Dense(W)(x), None)[0])

    same(Model(), dropout_loss, mesh_of(data=2, pipe=2))


class Experts(nn.Module):
    """Equal blocks of a router and four experts of which each row takes one; the routers' numbers are sown."""

    @nn.compact
    def __call__(self, x):
        x = Dense(W)(x)
        for n in range(4):
            logits = Dense(4, name=f"router_{n}")(x)
            chosen = jax.nn.one_hot(logits.argmax(-1), 4) * jax.nn.softmax(logits)
            kernel = self.param(f"experts_{n}", nn.initializers.lecun_normal(), (4, W, W), jnp.float64)
            self.sow("losses", "z", jax.nn.logsumexp(logits, -1) ** 2)
            self.sow("losses", "balance", (jax.nn.softmax(logits), chosen))
            x = x + jnp.einsum("bi,eij,be->bj", x, kernel, chosen)
        return x


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_case_17_a_load_balance_product_over_the_batch_is_refused(num_microbatches):
    def loss(apply, params, batch, key):
        out, sown = apply({"params": params}, batch["x"], mutable=["losses"])
        balance = sum(4 * jnp.sum(p[0].mean(0) * p[1].mean(0)) for p in sown["losses"]["balance"])
        return jnp.mean((out - batch["y"]) ** 2) + balance

    with pytest.raises(NotSeparableError, match="test_cases_models.py"):
        same(Experts(), loss, mesh_of(pipe=2), num_microbatches=num_microbatches)


def test_case_18_sown_losses_of_every_block_reach_their_routers():
    def loss(apply, params, batch, key):
        out, sown = apply({"params": params}, batch["x"], mutable=["losses"])
        return jnp.mean((out - batch["y"]) ** 2) + 0.01 * sum(jnp.mean(z) for z in sown["losses"]["z"])

    same(Experts(), loss, mesh_of(data=2, pipe=2))


def test_case_21_batch_norm_with_an_axis_name_is_refused():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, axis_name="batch")(Dense(W)(x))

    model = Model()
    variables = jax.vmap(lambda x: model.init(jax.random.key(0), x), axis_name="batch")(jnp.zeros((2, 1, W)))
    params = jax.tree.map(lambda x: x[0], variables["params"])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=SGD)

    def step(state, batch):
        def loss(p):
            out, _ = state.apply_fn({"params": p, "batch_stats": {}}, batch["x"], mutable=["batch_stats"])
            return out.mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    with pytest.raises(merak_jax.errors.TraceError, match=r"batch.*axis_name="):
        merak_jax.parallelize(step, mesh=mesh_of(pipe=2))(state, make_batch(0))


class Dropped(nn.Module):
    """Dropout on the input, inside equal blocks, and before the head."""

    rate: float = 0.5
    broadcast_dims: tuple = ()

    @nn.compact
    def __call__(self, x):
        drop = nn.Dropout(self.rate, broadcast_dims=self.broadcast_dims, deterministic=False)
        x = drop(Dense(W)(x))
        for _ in range(4):
            x = x + drop(nn.tanh(Dense(W)(x)))
        return Dense(W)(drop(x))


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (1, 4, 2), (1, 1, 2)])
def test_case_22_23_dropout_draws_the_masks_of_one_device(sizes):
    same(Dropped(), dropout_loss, mesh_of(*sizes))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1)])
def test_case_23_noise_is_bitwise_that_of_one_device(sizes):
    """The mask itself is returned, and compared bit for bit."""
    model = Dropped()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, W)))["params"]

    def step(state, batch):
        def loss(p):
            first, second = jax.random.split(jax.random.fold_in(state.key, state.step))
            x = batch["x"]
            mask = jax.random.bernoulli(first, 0.5, x.shape)
            noise = jax.random.normal(second, x.shape)
            out = state.apply_fn({"params": p}, x * mask + noise, rngs={"dropout": first})
            return out.mean(), (mask, noise, jax.random.uniform(second, (len(x), 3), jnp.float32))

        (_, drawn), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), drawn

    state = KeyedState.create(apply_fn=model.apply, params=params, tx=SGD, key=jax.random.key(7))
    expected = jax.jit(step)(state, make_batch(0))[1]
    actual = merak_jax.parallelize(step, mesh=mesh_of(*sizes), num_microbatches=2)(state, make_batch(0))[1]
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)


def test_case_26_dropout_that_all_rows_share():
    same(Dropped(broadcast_dims=(0,)), dropout_loss, mesh_of(data=2, pipe=2))


@pytest.mark.parametrize("stages", [2, 4])
def test_case_28_one_scale_and_one_temperature_in_every_stage(stages):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.LayerNorm(param_dtype=jnp.float64)
            temperature = self.param("temperature", nn.initializers.ones, (), jnp.float64)
            x = Dense(W)(x)
            for _ in range(4):
                x = x + nn.tanh(Dense(W)(norm(x)) / temperature)
            return x

    same(Model(), mean_square, mesh_of(pipe=stages))


def test_case_73_stages_that_differ_do_not_hang():
    """An embedding, convolutions and a head, where no two layers are equal: refused for several stages, right on one."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(V, W, param_dtype=jnp.float64)(tokens)
            x = nn.Conv(W, (3,), param_dtype=jnp.float64)(x)
            return Dense(V)(nn.relu(x))

    def loss(apply, params, batch, key):
        logits = apply({"params": params}, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    init = {"tokens": jnp.ones((1, T), jnp.int32)}
    with pytest.raises(NoRepeatedBlocksError, match="use pipe=1"):
        same(Model(), loss, mesh_of(pipe=3, tensor=2), init=init)
    same(Model(), loss, mesh_of(tensor=2), init=init)
