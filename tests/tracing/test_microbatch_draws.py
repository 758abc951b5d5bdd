"""Random draws by microbatches: the rows of the draw for the full batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from merak_jax.tracing.microbatch import Batched
from merak_jax.tracing.randomness import RandomKeyWarning
from tests.tracing.microbatch_check import V, W, X, check, randn, split


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_a_draw_with_too_many_numbers_along_the_batch_is_made_on_the_full_batch():
    def loss(p, b):
        n = b["x"].shape[0]
        noise = jax.random.bits(jax.random.key(0), (n << 32,), "uint8").reshape(n, -1)[:, :V]
        return (noise * (b["x"] @ p["w"])).sum()

    # Traced only: nothing of this size is made.
    result, _, _ = split(loss, {"w": randn(V, V)}, {"x": randn(4, V)})
    assert "random_bits" in [e.primitive.name for e in result.precompute.jaxpr.eqns]
    assert not [e for e in result.pipeline.jaxpr.eqns if e.primitive.name.startswith("random_")]


def test_random_draws():
    key = jax.random.key(3)

    def shared_mask(p, b, key):
        return (jax.random.bernoulli(key, 0.5, (V,)) * (b["x"] @ p["w"])).sum()

    def own_keys(p, b, key):
        keys = jax.random.split(key, b["x"].shape[0])
        return jax.vmap(lambda k, x: jax.random.normal(jax.random.fold_in(k, 1), (V,)) @ x)(keys, b["x"] @ p["w"]).sum()

    def dropout(p, b, key):
        return nn.Dropout(0.5, deterministic=False).apply({}, b["x"] @ p["w"], rngs={"dropout": key}).sum()

    check(shared_mask, W, X, extra=(key,))
    check(own_keys, W, X, extra=(key,))
    check(dropout, W, X, extra=(key,))


@pytest.mark.parametrize(
    "shape", ["rows first", "rows second", "merged", "keys", "float64", "bfloat16", "scan", "remat"]
)
@pytest.mark.parametrize("count", [2, 4])
def test_draws_along_the_batch_are_the_rows_of_the_whole_draw(shape, count):
    """Cases 22, 23: bit for bit; the aux output is the mask itself."""

    def mask(key, x):
        n = x.shape[0]
        if shape == "rows second":
            return jax.random.bernoulli(key, 0.5, (3, n, V))[1]
        if shape == "merged":
            return jax.random.uniform(key, (n * 3, V)).reshape(n, 3, V)[:, 2]
        if shape == "keys":
            return jax.vmap(lambda k: jax.random.normal(k, (V,)))(jax.random.split(key, n))
        if shape == "scan":
            return lax.scan(
                lambda c, k: (c + jax.random.uniform(k, (n, V)), None), jnp.zeros((n, V)), jax.random.split(key, 3)
            )[0]
        if shape == "remat":
            return jax.checkpoint(lambda key: jax.random.normal(key, (n, V)))(key)
        return jax.random.normal(key, (n, V), jnp.float64 if shape == "float64" else jnp.bfloat16).astype(float)

    def loss(p, b, key):
        drawn = mask(key, b["x"])
        return (drawn * (b["x"] @ p["w"])).sum(), drawn

    result = check(loss, W, X, extra=(jax.random.key(3),), count=count)
    assert isinstance(result.out_status[1], Batched)


def test_keys_whose_draws_have_no_rows_warn_once_and_draw_per_microbatch():
    def loss(p, b, key):
        return (jax.random.normal(key, (b["x"].shape[0], V)) * (b["x"] @ p["w"])).sum()

    with pytest.warns(RandomKeyWarning, match="test_microbatch_draws.py"):
        split(loss, W, X, (jax.random.key(3, impl="rbg"),))
    with jax.threefry_partitionable(False), pytest.warns(RandomKeyWarning, match="jax_threefry_partitionable=False"):
        split(loss, W, X, (jax.random.key(3),))
