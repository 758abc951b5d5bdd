"""Losses of every structure by microbatches: shape operations, models, loops, backward rules of the user's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from merak_jax.tracing.microbatch import Batched
from tests.tracing.microbatch_check import MASK, B, H, T, V, W, X, check, randn, refuse


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_both_halves_of_two_concatenated_views():
    def loss(p, b):
        z = jnp.concatenate([b["x"], 2 * b["x"]]) @ p["w"]
        one, two = jnp.split(z, 2)
        n = b["x"].shape[0]
        return jnp.sum(jnp.tanh(one) * two) + jnp.sum(z[:n] * z[n:] ** 2), z

    assert check(loss, W, X).out_status[1] == Batched(0, outer=2)


def test_many_shape_operations():
    def loss(p, b):
        h = p["e"][b["t"]]  # [B, T, H]
        h = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1] + jnp.roll(h, 1, 1) + h[:, ::-1]
        h = jnp.stack([h, h[:, :1] * h], 2).sum(2)
        h = jnp.concatenate([h, jnp.broadcast_to(p["w"][:, 0], (h.shape[0], 1, H))], 1)
        h = jnp.squeeze(jnp.expand_dims(h, 0), 0).transpose(1, 0, 2).swapaxes(0, 1)
        h = h.at[:, 0].set(1.0).at[:, 1].add(h[:, 2])
        h = lax.dynamic_update_slice_in_dim(h, h[:, :1] * 2, 1, axis=1)
        h = (
            h
            + lax.dynamic_slice_in_dim(h, 1, 1, axis=1)
            + lax.cumsum(h, 1)
            + jnp.sort(h, 1)
            + lax.top_k(h, 2)[0][..., :1]
        )
        h = jnp.tile(h, (1, 1, 2)) + jnp.clip(jnp.repeat(h, 2, axis=2), -1, 1)
        h = jnp.einsum("bth,bsh->bts", h, h) + jnp.einsum("bth->tbh", h).max(0).sum(-1)[:, None, None]
        a, c = jnp.split(h, 2, axis=2)
        return (a * c).sum() + h.prod(1).sum(), h

    check(loss, W, X, count=4)


def test_parameter_gradients_of_a_product_over_the_batch():
    def loss(p, b):
        return jnp.sum(jnp.einsum("bi,bj->ij", b["x"], b["x"] @ p["w"]) * p["w"])

    check(loss, W, X)


def test_convolution_and_pooling():
    layers = [
        nn.Conv(4, (3, 3), param_dtype=float),
        nn.relu,
        lambda x: nn.max_pool(x, (2, 2), (2, 2)),
        lambda x: nn.avg_pool(x, (2, 2)),
        lambda x: x.reshape(x.shape[0], -1),
        nn.Dense(3, param_dtype=float),
    ]
    model = nn.Sequential(layers)
    image = randn(B, 6, 6, 2)
    params = model.init(jax.random.key(0), image)
    check(lambda p, b: jnp.mean(model.apply(p, b) ** 2), params, image, count=4)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm(param_dtype=jnp.float64)(x)
        x = x + nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64)(y, mask=mask)
        y = nn.LayerNorm(param_dtype=jnp.float64)(x)
        return x + nn.Dense(H, param_dtype=jnp.float64)(nn.gelu(nn.Dense(2 * H, param_dtype=jnp.float64)(y)))


class Transformer(nn.Module):
    kind: str = "plain"

    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(V, H, param_dtype=jnp.float64)(tokens)
        x = x + self.param("positions", nn.initializers.normal(1.0), (T, H), jnp.float64)
        bias = nn.combine_masks(nn.make_causal_mask(tokens), mask[:, None, None, :])
        if self.kind == "scan":
            loop = nn.scan(
                lambda block, x, _: (block(x, bias), jnp.mean(x**2)), variable_axes={"params": 0},
                split_rngs={"params": True}, length=3,
            )  # fmt: skip
            x, penalties = loop(Block(), x, None)
            self.sow("losses", "size", penalties.sum())
        else:
            block = nn.remat(Block) if self.kind == "remat" else Block
            for _ in range(2):
                x = block()(x, bias)
        return nn.Dense(V, param_dtype=jnp.float64)(nn.LayerNorm(param_dtype=jnp.float64)(x))


@pytest.mark.parametrize(
    "kind, masked, count", [("plain", False, 4), ("plain", True, 8), ("remat", True, 2), ("scan", True, 2)]
)
def test_transformer(kind, masked, count):
    model = Transformer(kind)
    batch = {"t": X["t"], "m": MASK | (np.arange(T) == 0)}
    params = jax.jit(model.init)(jax.random.key(0), batch["t"], batch["m"])["params"]

    def loss(p, b):
        logits, state = model.apply({"params": p}, b["t"], b["m"], mutable="losses")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, b["t"])
        extra = sum(jax.tree.leaves(state), 0.0)
        if masked:
            return (losses * b["m"]).sum() / b["m"].sum() + extra, logits
        return losses.mean() + extra, losses.mean(1)

    check(loss, params, batch, count=count)


def test_loops_with_sums_and_terms_that_count_once():
    def loss(p, b):
        def body(c, w):
            h, total = c
            h = jnp.tanh(h * w.sum())
            return (h, total + h.mean() + (w**2).sum()), h.sum(1)

        (h, total), sums = lax.scan(body, (b["x"] @ p["e"].T, 1.0), p["w"])
        i, doubled = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, lax.stop_gradient(h)))
        chosen = lax.cond(p["w"].sum() > 0, lambda h: h.sum() + p["w"].sum(), lambda h: p["e"].sum(), h)
        return total + chosen + 0 * doubled.sum(), sums, doubled

    assert check(loss, W, X, count=4).out_status[1] == Batched(1)


def test_terms_that_count_once_inside_remat():
    def loss(p, b):
        return jax.checkpoint(lambda p: (b["x"] @ p["w"]).sum() + (p["e"] ** 2).sum())(p)

    check(loss, W, X)


@jax.custom_vjp
def clipped(x):
    return x


def _clip(_, g):
    return (jnp.clip(g, -0.1, 0.1),)


clipped.defvjp(lambda x: (x, None), _clip)


@jax.custom_vjp
def scaled_by_norm(x):
    return x


scaled_by_norm.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


@jax.custom_vjp
def own_mean(x):
    return x.mean()


own_mean.defvjp(lambda x: (x.mean(), x.shape), lambda shape, g: (jnp.full(shape, g / np.prod(shape)),))


@jax.custom_vjp
def own_matmul(x, w):
    return x @ w


own_matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def test_backward_rules_are_proved_too():
    check(lambda p, b: clipped(own_matmul(b["x"], p["w"])).sum(), W, X)
    refuse(lambda p, b: (b["x"] @ clipped(p["w"])).sum(), W, X, "sum over the batch|batch")
    refuse(lambda p, b: scaled_by_norm(b["x"] @ p["w"]).sum(), W, X, "sum over the batch")
    refuse(lambda p, b: own_mean(b["x"] @ p["w"]), W, X, "custom derivative")


def test_custom_jvp_functions():
    @jax.custom_jvp
    def f(x, w):
        return jnp.sin(x) * w

    f.defjvp(lambda p, t: (f(*p), jnp.cos(p[0]) * t[0] * p[1] + jnp.sin(p[0]) * t[1]))
    check(
        lambda p, b: f(jax.nn.silu(b["x"] @ p["w"]), p["w"][0]).sum() + jax.nn.relu(b["x"] @ p["w"]).sum(),
        W,
        X,
    )

    @jax.custom_jvp
    def coupled(x):
        return x

    coupled.defjvp(lambda p, t: (p[0], t[0] - t[0].sum(0)))
    refuse(lambda p, b: coupled(b["x"] @ p["w"]).sum(), W, X, "sum over the batch")
    coupled.defjvp(lambda p, t: (p[0], t[0] / t[0].shape[0]))
    refuse(lambda p, b: coupled(b["x"] @ p["w"]).sum(), W, X, "a number that depends on the batch size")


@pytest.mark.parametrize("rows", [2, 8])
def test_microbatches_of_one_row(rows):
    def loss(p, b):
        logits = p["e"][b["t"]] @ p["w"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, b["t"])
        picked = jnp.take_along_axis(clipped(own_matmul(b["x"], p["w"])), b["y"][:, None], 1)
        n = b["y"].shape[0]
        halves = jnp.split(jnp.concatenate([b["x"], b["x"] ** 2]) @ p["w"], 2)
        out = jax.checkpoint(jax.nn.silu)(logits).reshape(n * T, V)
        return (losses * b["m"]).sum() / b["m"].sum() + picked.mean() + (halves[0] * halves[1]).sum() / n, out

    check(loss, W, jax.tree.map(lambda x: x[:rows], {**X, "m": MASK}), count=rows)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_values_tiled_to_the_rows_of_the_batch(count):
    def loss(p, b):
        n = b["x"].shape[0]
        first = jnp.tile(p["e"][:1][None], (n, 1, 1))
        # Two rows' worth at a time; a microbatch of one row has no half of it.
        pairs = jnp.tile(p["w"].T[:2, None], (n // 2, 3, 1)).sum(1) if count < 8 else 0.0
        several = jnp.tile(p["e"][:2], (2 * n, 1)).reshape(n, 4, -1)
        tokens = jnp.concatenate([first, several, b["x"][:, None], jnp.tile(b["x"][:, None], (1, 2, 1))], 1)
        logits = jnp.tanh(tokens) @ p["w"]
        penalty = ((b["x"] * pairs) ** 2).sum() / n
        return (logits[:, 0, 0] * logits[:, -1, 1]).mean() + (logits**2).mean() + penalty, tokens

    check(loss, W, X, count=count)


def test_an_equation_with_another_number_of_operands_is_named_with_both_numbers():
    def loss(p, b):
        return (jnp.concatenate([p["w"]] * b["x"].shape[0]).sum() * b["x"]).sum()

    refuse(loss, W, X, "`concatenate` has 8 operands and 1 results in one, 4 operands")
