"""The gradient call is found in every spelling, becomes one equation, and JAX works as before afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import grad, value_and_grad, vjp

from merak_jax.errors import GradientCallError
from merak_jax.tracing.gradient import captured_gradient_calls, loss_and_grad_avals
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import evaluate, function_of

WEIGHTS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, -1.0])}
X = jnp.array([0.5, 0.25])


def loss(weights, x, power=2):
    return jnp.sum((weights["a"] * x + weights["b"]) ** power)


def loss_with_aux(weights, x):
    return loss(weights, x), {"sum": x.sum(), "doubled": 2 * x}


def by_hand(weights, x):
    value, pull_back = vjp(lambda w: loss(w, x), weights)
    return value, pull_back(jnp.ones_like(value))[0]


@jax.jit
def already_jitted(weights, x):
    return value_and_grad(loss)(weights, x)


SPELLINGS = {
    "jax.grad": lambda w, x: jax.grad(loss)(w, x),
    "from jax import grad": lambda w, x: grad(loss)(w, x),
    "jax.value_and_grad": lambda w, x: jax.value_and_grad(loss)(w, x),
    "from jax import value_and_grad": lambda w, x: value_and_grad(loss)(w, x),
    "jax.vjp": lambda w, x: jax.vjp(lambda v: loss(v, x), w)[1](1.0)[0],
    "keyword arguments": lambda w, x: value_and_grad(loss)(w, x=x, power=3),
    "closed over": lambda w, x: value_and_grad(lambda v: loss(v, x))(w),
    "has_aux": lambda w, x: value_and_grad(loss_with_aux, has_aux=True)(w, x),
    "argnums": lambda w, x: value_and_grad(lambda a, v: loss(v, a), argnums=1)(x, w),
    "argnums tuple": lambda w, x: value_and_grad(loss, argnums=(0, 1))(w, x),
    "inner jit": lambda w, x: jax.jit(value_and_grad(loss))(w, x),
    "inner jit that already ran": lambda w, x: already_jitted(w, x),
    "remat around the loss": lambda w, x: value_and_grad(jax.checkpoint(lambda v: loss(v, x)))(w),
    "nnx.value_and_grad": lambda w, x: nnx.value_and_grad(loss)(w, x),
    "nnx.grad with aux": lambda w, x: nnx.grad(loss_with_aux, has_aux=True)(w, x),
}


def captured(function, *args):
    with captured_gradient_calls():
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return inline(closed), jax.tree.structure(shapes)


def gradient_calls(closed):
    return [e for e in closed.jaxpr.eqns if e.primitive.name == "loss_and_grad"]


def run_call(eqn, operands):
    """What a `loss_and_grad` equation stands for, by plain JAX."""
    if eqn.primitive.name != "loss_and_grad":
        return None
    closed, count = eqn.params["jaxpr"], eqn.params["num_constants"]
    call = function_of(closed)
    outputs = call(*operands)
    inexact = [i for i in range(count, len(operands)) if jnp.issubdtype(jnp.result_type(operands[i]), jnp.inexact)]
    grads = jax.grad(lambda *args: call(*args)[0], argnums=inexact)(*operands)
    found = dict(zip(inexact, grads))
    return [*outputs, *(found.get(i, jnp.zeros_like(operands[i])) for i in range(count, len(operands)))]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_equation_with_the_same_results(spelling):
    function = SPELLINGS[spelling]
    already_jitted(WEIGHTS, X)
    expected, tree = jax.tree.flatten(function(WEIGHTS, X))
    closed, found_tree = captured(function, WEIGHTS, X)
    assert found_tree == tree
    assert len(gradient_calls(closed)) == 1
    actual = evaluate(closed.jaxpr, closed.consts, *jax.tree.leaves((WEIGHTS, X)), special=run_call)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_the_equations_results_are_loss_aux_and_gradients():
    closed, _ = captured(SPELLINGS["has_aux"], WEIGHTS, X)
    (eqn,) = gradient_calls(closed)
    avals = loss_and_grad_avals(eqn.params["jaxpr"], eqn.params["num_constants"])
    assert [a.shape for a in avals] == [(), (2,), (), (2,), (2,)]
    assert [v.aval.shape for v in eqn.outvars] == [a.shape for a in avals]
    assert eqn.params["jaxpr"].consts == []


def test_everything_the_loss_closes_over_is_an_operand():
    closed, _ = captured(lambda w, x: grad(lambda v: loss(v, x * 2))(w), WEIGHTS, X)
    (eqn,) = gradient_calls(closed)
    assert eqn.params["num_constants"] >= 1
    assert len(eqn.invars) == eqn.params["num_constants"] + 2


def test_a_gradient_penalty_inside_the_loss_is_left_alone():
    def penalised(weights, x):
        slope = jax.grad(lambda y: loss(weights, y))(x)
        return loss(weights, x) + jnp.sum(slope**2)

    function = lambda w, x: jax.value_and_grad(penalised)(w, x)  # noqa: E731
    closed, _ = captured(function, WEIGHTS, X)
    assert len(gradient_calls(closed)) == 1
    inside = [e.primitive.name for e in inline(gradient_calls(closed)[0].params["jaxpr"]).jaxpr.eqns]
    assert "loss_and_grad" not in inside
    actual = evaluate(closed.jaxpr, closed.consts, *jax.tree.leaves((WEIGHTS, X)), special=run_call)
    for a, e in zip(actual, jax.tree.leaves(function(WEIGHTS, X)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_a_cotangent_other_than_one_scales_the_gradient():
    function = lambda w, x: jax.vjp(lambda v: loss(v, x), w)[1](3.0)[0]  # noqa: E731
    closed, _ = captured(function, WEIGHTS, X)
    actual = evaluate(closed.jaxpr, closed.consts, *jax.tree.leaves((WEIGHTS, X)), special=run_call)
    for a, e in zip(actual, jax.tree.leaves(function(WEIGHTS, X)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_two_calls_are_two_equations():
    closed, _ = captured(lambda w, x: (grad(loss)(w, x), value_and_grad(loss)(w, x + 1)), WEIGHTS, X)
    assert len(gradient_calls(closed)) == 2


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_afterwards_the_users_functions_work_under_plain_jit(spelling):
    function = SPELLINGS[spelling]
    before = jax.tree.leaves(function(WEIGHTS, X))
    captured(function, WEIGHTS, X)
    assert "loss_and_grad" not in str(jax.make_jaxpr(function)(WEIGHTS, X))
    for a, e in zip(jax.tree.leaves(jax.jit(function)(WEIGHTS, X)), before, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_a_jit_that_first_ran_while_captured_works_afterwards():
    @jax.jit
    def fresh(weights, x):
        return jax.value_and_grad(loss)(weights, x)

    captured(lambda w, x: fresh(w, x), WEIGHTS, X)
    value, grads = fresh(WEIGHTS, X)
    np.testing.assert_allclose(value, loss(WEIGHTS, X), rtol=1e-6)
    np.testing.assert_allclose(grads["b"], by_hand(WEIGHTS, X)[1]["b"], rtol=1e-6)


def test_capture_ends_when_the_loss_raises():
    def broken(weights):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        captured(lambda w: grad(broken)(w), WEIGHTS)
    np.testing.assert_allclose(grad(loss)(WEIGHTS, X)["b"], by_hand(WEIGHTS, X)[1]["b"])
    assert len(gradient_calls(captured(SPELLINGS["jax.grad"], WEIGHTS, X)[0])) == 1


@pytest.mark.parametrize(
    "function, hint",
    [
        (lambda w, x: jax.vjp(lambda v: v["a"] * x, w)[1](x), "mean or its sum"),
        (lambda w, x: value_and_grad(loss_with_aux)(w, x), "has_aux=True"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused_with_the_users_line(function, hint):
    with pytest.raises(GradientCallError, match=hint) as raised:
        captured(function, WEIGHTS, X)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(raised.value)
