"""A block's derivative cut into programs that run at different times: together they are what jax.vjp gives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from merak_jax.partition.chain import Chain
from merak_jax.partition.derivative import BlockDerivative
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import evaluate, make_jaxpr

ROWS, WIDTH = 3, 4


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1.0, 1.0)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(jnp.abs(x) <= 1.0, 2.0 * g, 0.0),))


def mlp(carry, lanes, shared, rows):
    (x,), (up, down), (scale,) = carry, lanes, shared
    return [x + nn.gelu(x @ up * scale) @ down * rows[0][:, None]]


def twice(carry, lanes, shared, rows):
    """One weight used forth and back."""
    (x,), (up, down), (scale,) = carry, lanes, shared
    return [x + jnp.tanh(jnp.tanh(x @ up) @ up.T * scale) @ (up @ down)]


def several_results(carry, lanes, shared, rows):
    """Equations with several results, one of which another part reads: a split, a sort with its places, a scan."""
    (x,), (up, down), (scale,) = carry, lanes, shared
    a, b = jnp.split(x @ up, 2, axis=1)
    order = jnp.argsort(a, axis=1)
    a = jnp.take_along_axis(a, order, axis=1) * b

    def body(state, weight):
        state = jnp.sin(state) * (1 + weight)
        return state, state.sum(1)

    last, sums = lax.scan(body, a, down)
    return [x + jnp.concatenate([last, b], axis=1) @ down * scale + sums.sum(0)[:, None]]


def wrapped(carry, lanes, shared, rows):
    """A remat in a remat, which are opened, and a custom derivative, which is kept whole."""
    (x,), (up, down), (scale,) = carry, lanes, shared
    inner = jax.checkpoint(lambda x, w: jnp.cos(x @ w))
    h = jax.checkpoint(lambda x, w: inner(x, w) * scale)(x, up)
    return [x + clipped(h @ down)]


def mixed(carry, lanes, shared, rows):
    """Two real values and an integer in the carry; one lane has no gradient."""
    (x, y, count), (up, down), (scale,) = carry, lanes, shared
    return [x + y @ up * count.astype(x.dtype), jnp.exp(-y) * scale + lax.stop_gradient(x) @ down, count + 1]


CASES = [mlp, twice, several_results, wrapped, mixed]


def setting(function):
    random = np.random.default_rng(0)
    lanes = [jnp.asarray(random.normal(size=(WIDTH, 2 * WIDTH if function is mlp else WIDTH)))]
    lanes.append(jnp.asarray(random.normal(size=(2 * WIDTH if function is mlp else WIDTH, WIDTH))))
    if function is several_results:
        lanes[1] = jnp.asarray(random.normal(size=(WIDTH,)))[:, None] * jnp.ones((WIDTH, 1))
    carry = [jnp.asarray(random.normal(size=(ROWS, WIDTH)))]
    if function is mixed:
        carry += [jnp.asarray(random.normal(size=(ROWS, WIDTH))), jnp.int32(3)]
    shared, rows = [jnp.float64(0.7)], [jnp.asarray(random.normal(size=ROWS))]
    lane_gradient = [True, function is not mixed]
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in carry]
    closed = inline(jax.make_jaxpr(lambda *args: function(*args))(carry, lanes, shared, rows))
    assert not closed.consts
    body = closed.jaxpr
    n = len(carry) + len(lanes) + len(shared)
    chain = Chain(1, body, len(carry), (), make_jaxpr([], [], [], []), (), tuple(body.invars[n:]), "test")
    derivative = BlockDerivative.of(chain, floats, lane_gradient, [True])
    cotangents = [jnp.asarray(random.normal(size=x.shape)) for x, yes in zip(carry, floats) if yes]
    return derivative, function, carry, lanes, shared, rows, lane_gradient, cotangents


def expected(function, carry, lanes, shared, rows, lane_gradient, cotangents):
    floats = [n for n, x in enumerate(carry) if jnp.issubdtype(x.dtype, jnp.inexact)]
    wanted = [n for n, yes in enumerate(lane_gradient) if yes]

    def block(some_carry, some_lanes, shared):
        c, w = list(carry), list(lanes)
        for n, x in zip(floats, some_carry):
            c[n] = x
        for n, x in zip(wanted, some_lanes):
            w[n] = x
        out = function(c, w, shared, rows)
        return [out[n] for n in floats], out

    _, pull, out = jax.vjp(block, [carry[n] for n in floats], [lanes[n] for n in wanted], shared, has_aux=True)
    return out, jax.tree.leaves(pull(cotangents))


def run(derivative, part, operands, *more):
    return evaluate(getattr(derivative, part), [], *derivative.constants, *operands, *more)


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_the_parts_together_are_the_derivative(case):
    derivative, function, carry, lanes, shared, rows, lane_gradient, cotangents = setting(case)
    operands = [*carry, *lanes, *shared, *rows]
    out, gradients = expected(function, carry, lanes, shared, rows, lane_gradient, cotangents)

    kept = run(derivative, "keep", operands)
    residuals = run(derivative, "recompute", operands)
    for a, b in zip(kept, [*out, *residuals], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
    whole = run(derivative, "backward", operands, *residuals, *cotangents)
    early = run(derivative, "input_gradient", operands, *residuals, *cotangents)
    n = len(cotangents)
    late = run(derivative, "weight_gradient", operands, *early[n:])
    for found in (whole, [*early[:n], *late]):
        for a, b in zip(found, gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


def dots(jaxpr) -> int:
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)


def test_no_matmul_is_done_twice_and_no_parameter_is_kept():
    derivative, *_ = setting(mlp)
    assert [dots(p) for p in (derivative.keep, derivative.recompute, derivative.backward)] == [2, 1, 4]
    assert [dots(p) for p in (derivative.input_gradient, derivative.weight_gradient)] == [2, 2]
    parameters = {(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)}
    kept = [v.aval.shape for v in (*derivative.residual_vars, *derivative.saved_vars)]
    assert not parameters & set(kept)
    # What is saved: the cotangent of the output; the hidden values, what `scale` is multiplied with, and the cotangents of both.
    assert sorted(v.aval.shape for v in derivative.saved_vars) == [(ROWS, WIDTH)] + [(ROWS, 2 * WIDTH)] * 4


def test_a_remat_is_opened_so_that_its_weight_gradients_can_wait():
    derivative, *_ = setting(wrapped)
    assert dots(derivative.input_gradient) == 2 and dots(derivative.weight_gradient) == 2
    assert (WIDTH, WIDTH) not in {v.aval.shape for v in (*derivative.residual_vars, *derivative.saved_vars)}
