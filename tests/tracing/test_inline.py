"""An inlined jaxpr has the same values, no nested calls, fresh variables, and each constant once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal, Var

from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import constants_to_inputs, evaluate, function_of, last_uses, make_jaxpr, slice_program

TABLE = jnp.arange(6.0).reshape(2, 3)


def names(closed):
    return [e.primitive.name for e in closed.jaxpr.eqns]


def same_values(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    flat = inline(closed)
    for actual, expected in zip(function_of(flat)(*args), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_array_equal(actual, expected)
    return closed, flat


@jax.jit
def inner(x):
    return jax.jit(jnp.sin)(x) + 1


def test_nested_jits_disappear_and_the_values_stay():
    closed, flat = same_values(lambda x: inner(x) * inner(2 * x), 0.3)
    assert "jit" in names(closed)
    assert "jit" not in names(flat)
    assert names(flat).count("sin") == 2


KEPT = {
    "scan": lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c < 1, inner, x),
    "cond": lambda x: jax.lax.cond(x > 0, inner, jnp.cos, x),
    "custom_jvp_call": lambda x: jax.nn.relu(x),
    "custom_vjp_call": lambda x: doubled(x),
    "remat2": lambda x: jax.checkpoint(inner)(x),
}


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@pytest.mark.parametrize("kind", KEPT)
def test_loops_branches_custom_rules_and_remat_are_kept_whole(kind):
    _, flat = same_values(lambda x: jax.jit(KEPT[kind])(x), 0.3)
    assert any(name == kind or (kind == "remat2" and name in ("remat", "checkpoint", "remat2")) for name in names(flat))


def test_every_variable_is_fresh_and_is_defined_once():
    closed = jax.make_jaxpr(lambda x: inner(inner(x)) + TABLE)(0.3)
    flat = inline(closed).jaxpr
    defined = [*flat.constvars, *flat.invars, *(v for e in flat.eqns for v in e.outvars)]
    assert len(set(defined)) == len(defined)
    read = [a for e in flat.eqns for a in e.invars if isinstance(a, Var)]
    assert set(read) <= set(defined)
    before = {*closed.jaxpr.constvars, *closed.jaxpr.invars, *(v for e in closed.jaxpr.eqns for v in e.outvars)}
    assert not before & set(defined)


def test_inlining_twice_gives_two_programs_without_a_common_variable():
    closed = jax.make_jaxpr(inner)(0.3)
    first, second = inline(closed).jaxpr, inline(closed).jaxpr
    assert not set(first.invars) & set(second.invars)
    assert not {v for e in first.eqns for v in e.outvars} & {v for e in second.eqns for v in e.outvars}


def test_a_constant_that_several_calls_read_is_one_constant():
    add = jax.jit(lambda x: x + TABLE)
    times = jax.jit(lambda x: x * TABLE)
    _, flat = same_values(lambda x: add(times(x)) - TABLE, 2.0)
    assert len(flat.consts) == len(flat.jaxpr.constvars) == 1


def test_two_constants_of_equal_value_are_kept_apart_or_give_the_same_values():
    first, second = jnp.ones(3), jnp.ones(3)
    same_values(lambda x: jax.jit(lambda y: y + first)(x) + jax.jit(lambda y: y * second)(x), 2.0)


def test_outputs_that_are_inputs_literals_or_repeated_survive():
    def function(x, y):
        return jax.jit(lambda a: (a, 3.0, a))(y), x, x, 2

    _, flat = same_values(function, 1.0, 5.0)
    assert any(isinstance(a, Literal) for a in flat.jaxpr.outvars)


def test_a_jit_that_returns_its_argument_and_drops_a_result_is_inlined():
    same_values(lambda x: jax.jit(lambda a: (a, jnp.sin(a)))(x)[0] + 1, 1.0)


def test_effects_are_those_of_the_equations():
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda a: jax.debug.print("{}", a))(x))(1.0)
    assert inline(closed).jaxpr.effects == closed.jaxpr.effects != set()


def test_a_flax_optax_loss_gives_the_same_value_and_gradient_after_inlining():
    model = nn.Sequential([nn.Dense(5), nn.gelu, nn.LayerNorm(), nn.Dense(3)])
    x, labels = jnp.arange(8.0).reshape(2, 4), jnp.array([0, 2])
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels).mean()

    flat = inline(jax.make_jaxpr(loss)(params))
    assert "jit" not in names(flat)
    leaves, tree = jax.tree.flatten(params)
    value, grads = jax.jit(jax.value_and_grad(lambda xs: function_of(flat)(*xs)[0]))(leaves)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7), tree.unflatten(grads), expected_grads
    )


OPERATIONS = [
    jnp.sin,
    lambda x: x * 2,
    lambda x: x + TABLE.sum(),
    lambda x: jax.lax.scan(lambda c, _: (c + x, None), x, None, 2)[0],
]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 2)), min_size=1, max_size=5))
def test_random_nestings_keep_their_values(steps):
    def function(x):
        for operation, depth in steps:
            call = OPERATIONS[operation]
            for _ in range(depth):
                call = jax.jit(lambda y, call=call: call(y))
            x = call(x)
        return x

    _, flat = same_values(function, 0.4)
    assert "jit" not in names(flat)


# The tools on flat jaxprs.


def test_evaluate_frees_what_is_not_read_again_and_lets_an_equation_be_replaced():
    closed = inline(jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(1.0))
    replaced = evaluate(
        closed.jaxpr,
        closed.consts,
        1.0,
        special=lambda eqn, operands: [operands[0] * 10] if eqn.primitive.name == "sin" else None,
    )
    np.testing.assert_allclose(replaced[0], np.cos(10.0))
    last = last_uses(closed.jaxpr)
    assert [last[v] for v in (closed.jaxpr.invars[0], closed.jaxpr.eqns[0].outvars[0], closed.jaxpr.outvars[0])] == [
        0,
        1,
        2,
    ]


def test_slice_program_keeps_only_what_the_outputs_need():
    closed = inline(jax.make_jaxpr(lambda x, y: (jnp.sin(x) + 1, jnp.cos(y)))(1.0, 2.0))
    sliced = slice_program(closed.jaxpr.eqns, closed.jaxpr.invars[:1], closed.jaxpr.outvars[:1])
    assert [e.primitive.name for e in sliced.eqns] == ["sin", "add"]
    np.testing.assert_allclose(evaluate(sliced, [], 1.0)[0], np.sin(1.0) + 1)


def test_slice_program_refuses_a_free_variable():
    closed = inline(jax.make_jaxpr(lambda x, y: x * jnp.cos(y))(1.0, 2.0))
    with pytest.raises(KeyError, match="free variables"):
        slice_program(closed.jaxpr.eqns, closed.jaxpr.invars[:1], closed.jaxpr.outvars)


def test_constants_become_the_first_inputs():
    closed = inline(jax.make_jaxpr(lambda x: x + TABLE)(1.0))
    jaxpr, constants = constants_to_inputs(closed)
    assert not jaxpr.constvars
    np.testing.assert_array_equal(evaluate(jaxpr, [], *constants, 2.0)[0], 2.0 + TABLE)


def test_make_jaxpr_without_equations_hands_its_input_through():
    closed = jax.make_jaxpr(lambda x: x)(1.0)
    assert evaluate(make_jaxpr([], closed.jaxpr.invars, closed.jaxpr.invars, []), [], 7.0) == [7.0]
