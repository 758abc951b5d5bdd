"""What a remat or scan computes without the batch is computed beside it, at any depth, and nothing changes its value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import function_of
from merak_jax.tracing.side_results import without_side_results

W, X = np.random.default_rng(0).standard_normal((4, 3, 3)), np.random.default_rng(1).standard_normal((2, 3))


def remat(weights, count, x):
    def layer(w, count, x):
        return jnp.tanh(x @ w), count + 1, jnp.sum(w**2)

    y, count, norm = jax.checkpoint(layer)(weights[0], count, x)
    return y.sum(), count, norm


def scan(weights, count, x):
    def layer(carry, w):
        x, count = carry
        return (jnp.tanh(x @ w) * count, count + 1), (jnp.sum(w**2), x.sum())

    (y, count), (norms, sums) = jax.lax.scan(layer, (x, count), weights)
    return y.sum() + sums.sum(), count, norms


def reversed_scan(weights, count, x):
    def layer(x, w):
        return jnp.tanh(x @ w), w * 2

    y, doubled = jax.lax.scan(layer, x, weights, reverse=True)
    return y.sum(), count, doubled


def a_carry_that_becomes_a_constant(weights, count, x):
    def layer(carry, w):
        x, n = carry
        return (jnp.tanh(x @ w), 5), n + count

    (y, last), counts = jax.lax.scan(layer, (x, count), weights)
    return y.sum(), last, counts


def remat_in_scan(weights, count, x):
    @jax.checkpoint
    def body(w, count, x):
        return jnp.tanh(x @ w), count + 2

    def layer(carry, w):
        x, count = carry
        return body(w, count, x), count * 3

    (y, count), counts = jax.lax.scan(layer, (x, count), weights)
    return y.sum(), count, counts


def scan_in_remat(weights, count, x):
    return jax.checkpoint(scan)(weights, count, x)


def reads_it_later(weights, count, x):
    value, count, norm = remat(weights, count, x)
    return value * norm + count, count, jax.checkpoint(lambda n: n * 2)(norm)


@pytest.mark.parametrize(
    "function",
    [
        remat,
        scan,
        reversed_scan,
        a_carry_that_becomes_a_constant,
        remat_in_scan,
        scan_in_remat,
        reads_it_later,
    ],
)
def test_values_and_gradients_stay_and_what_needs_no_batch_depends_on_nothing_of_it(function):
    args = (W, 3, X)
    closed = inline(jax.make_jaxpr(function)(*args))
    new = without_side_results(closed, [False] * len(closed.jaxpr.constvars) + [False, False, True])

    def run(program, *args):
        return function_of(program)(*args)

    for a, b in zip(run(new, *args), run(closed, *args)):
        np.testing.assert_array_equal(a, b)
    gradients = [jax.grad(lambda w, p=p: run(p, w, 3, X)[0])(W) for p in (new, closed)]
    np.testing.assert_allclose(*gradients, rtol=1e-14)
    depends = {new.jaxpr.invars[2]}
    for eqn in new.jaxpr.eqns:
        if any(a in depends for a in eqn.invars if not hasattr(a, "val")):
            depends.update(eqn.outvars)
    assert [v in depends for v in new.jaxpr.outvars] == [True, False, False]
    old = {closed.jaxpr.invars[2]}
    for eqn in closed.jaxpr.eqns:
        if any(a in old for a in eqn.invars if not hasattr(a, "val")):
            old.update(eqn.outvars)
    assert closed.jaxpr.outvars[2] in old, "the case shows nothing"


def test_a_program_without_such_results_is_kept():
    closed = inline(jax.make_jaxpr(lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x).sum())(W[0], X))
    assert without_side_results(closed, [False, True]).jaxpr is closed.jaxpr
