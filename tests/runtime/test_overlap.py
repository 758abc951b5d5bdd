"""Rings of matmuls give the products and sums of whole values, in both directions, in chunks, by permutes and by all-to-alls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from merak_jax.partition.rings import GatherRing, RingProduct, ScatterRing
from merak_jax.runtime.overlap import Rings, gather_products, scatter_products
from tests.parity import mesh_of

BATCH, TOKENS, HIDDEN, FEATURES = 2, 16, 8, 24


def equation(function, *shapes, dtype=jnp.float64):
    """The one `dot_general` of a function."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn


def rows_times(features=FEATURES, dtype=jnp.float64):
    """`x @ w` for `[batch, tokens, hidden]`."""
    return equation(lambda x, w: x @ w, (BATCH, TOKENS, HIDDEN), (HIDDEN, features), dtype=dtype)


def weight_gradient(dtype=jnp.float64):
    """`x^T dy`, contracted over batch and tokens."""
    shapes = (BATCH, TOKENS, HIDDEN), (BATCH, TOKENS, FEATURES)
    return equation(lambda x, dy: jnp.einsum("bsh,bsf->hf", x, dy), *shapes, dtype=dtype)


def draw(*shapes, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def run(function, size, *args, specs):
    mesh = mesh_of(1, 1, size)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs)]
    with jax.set_mesh(mesh):
        return jax.jit(function)(*placed)


WAYS = [
    Rings(2),
    Rings(4),
    Rings(4, (-1,)),
    Rings(4, (1, -1)),
    Rings(4, (1, 1), permutes=False),
    Rings(2, (-1, 1, 1, -1), permutes=False),
    # Parts of four tokens are not cut in three.
    Rings(4, (1, -1, 1)),
]


@pytest.mark.parametrize("rings", WAYS, ids=str)
def test_products_of_a_gathered_value_share_its_way_round(rings):
    x, w, v, dy = draw((BATCH, TOKENS, HIDDEN), (HIDDEN, FEATURES), (HIDDEN, 2 * FEATURES), (BATCH, TOKENS, FEATURES))
    gradient = weight_gradient()
    ring = GatherRing(
        gradient.invars[0],
        1,
        (
            RingProduct(rows_times(), 0, 1, 1),
            RingProduct(gradient, 0, 1, None),
            RingProduct(rows_times(2 * FEATURES), 0, 1, 1),
        ),
    )
    column, after = P(None, "tensor"), P(None, None, "tensor")
    specs = [P(None, "tensor"), column, after, column, after, column, after]

    found = run(
        lambda x, w, dy, v: gather_products(rings, ring, x, [w, dy, v], specs), rings.size, x, w, dy, v, specs=specs[:4]
    )
    for got, wanted in zip(found, (x @ w, jnp.einsum("bsh,bsf->hf", x, dy), x @ v)):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rings", WAYS, ids=str)
def test_sums_of_products_are_dealt_out(rings):
    y, w, z, v = draw(
        (BATCH, TOKENS, FEATURES), (FEATURES, HIDDEN), (BATCH, TOKENS, 2 * FEATURES), (2 * FEATURES, HIDDEN)
    )
    eqns = [equation(lambda y, w: y @ w, (BATCH, TOKENS, n), (n, HIDDEN)) for n in (FEATURES, 2 * FEATURES)]
    ring = ScatterRing(eqns[0].outvars[0], 1, tuple(RingProduct(e, 0, 1, 1) for e in eqns), tuple(eqns))
    specs = [P(None, None, "tensor"), P("tensor")] * 2
    after = P(None, "tensor")

    found = run(lambda *args: scatter_products(rings, ring, args, [*specs, after]), rings.size, y, w, z, v, specs=specs)
    assert found.sharding.spec == after
    np.testing.assert_allclose(found, y @ w + z @ v, rtol=0, atol=1e-12)


def test_sixteen_bits_are_summed_in_thirty_two():
    rings = Rings(4, permutes=False)
    y, w = draw((BATCH, TOKENS, 256), (256, HIDDEN), dtype=jnp.bfloat16)
    eqn = equation(lambda y, w: y @ w, y.shape, w.shape, dtype=jnp.bfloat16)
    ring = ScatterRing(eqn.outvars[0], 1, (RingProduct(eqn, 0, 1, 1),), (eqn,))
    specs = [P(None, None, "tensor"), P("tensor")]

    def function(y, w):
        return scatter_products(rings, ring, [y, w], [*specs, P(None, "tensor")])

    found = run(function, 4, y, w, specs=specs)
    exact = y.astype(jnp.float64) @ w.astype(jnp.float64)
    assert found.dtype == jnp.bfloat16
    # Rounded once per device that a sum passes: four times half a unit in the last place of eight bits.
    assert np.abs(np.asarray(found, np.float64) - exact).max() <= 4 * 2**-9 * np.abs(exact).max()
    # Products are float32 inside.
    with jax.set_mesh(mesh_of(1, 1, 4)):
        assert "preferred_element_type=float32" in str(jax.make_jaxpr(function)(y, w))
