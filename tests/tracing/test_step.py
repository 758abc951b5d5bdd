"""A traced step is one flat jaxpr with one gradient call, and evaluating it gives what the step gives."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState

from merak_jax.errors import BatchError, GradientCallError, TraceError
from merak_jax.tracing.jaxprs import evaluate
from merak_jax.tracing.step import abstract, batch_rows, trace, unwrap
from tests.tracing.test_gradient import run_call

ROWS = 4
MODEL = nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(3)])
OPTIMIZER = optax.adam(1e-2)


class StateWithKey(TrainState):
    """A user's own subclass, with a random key and a plain Python number."""

    key: jax.Array = None
    scale: float = struct.field(default=0.5)


def make_state():
    params = jax.jit(MODEL.init)(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    return StateWithKey.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER, key=jax.random.key(1))


def make_batch(rows=ROWS):
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(rows, 4)), "y": random.integers(0, 3, rows)}


def train_step(state, batch):
    def loss(params):
        logits = state.apply_fn({"params": params}, batch["x"] * state.scale)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value, "rows": batch["x"].shape[0]}


def popping_step(state, batch):
    return train_step(state, {"y": batch.pop("y"), "x": batch.pop("x")})


def switched_step(state, batch, train=True):
    return train_step(state, batch) if train else (state, None)


STEPS = {
    "plain": train_step,
    "jit": jax.jit(train_step),
    "jit with donation": jax.jit(train_step, donate_argnums=0),
    "jit of jit": jax.jit(jax.jit(train_step)),
    "jit with a static argument": jax.jit(switched_step, static_argnames="train"),
    "partial": functools.partial(switched_step, train=True),
    "jit inside": lambda state, batch: jax.jit(train_step)(state, batch),
    "pops keys from its batch": popping_step,
}


def leaves_of(*trees):
    return [jnp.asarray(x) for x in jax.tree.leaves(trees)]


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        if jax.dtypes.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("spelling", STEPS)
def test_evaluating_the_trace_gives_what_the_step_gives(spelling):
    state, batch = make_state(), make_batch()
    if spelling.startswith("jit"):
        train_step_that_ran, _ = jax.jit(train_step)(state, batch)
        assert train_step_that_ran.step == 1
    traced = trace(STEPS[spelling], (state, batch), (1,))
    assert traced.equation.primitive.name == "loss_and_grad"
    assert all(e.primitive.name not in ("jit", "pjit") for e in traced.jaxpr.jaxpr.eqns)
    actual = evaluate(traced.jaxpr.jaxpr, traced.jaxpr.consts, *leaves_of(state, batch), special=run_call)
    expected, tree = jax.tree.flatten(jax.jit(train_step)(state, make_batch()))
    assert traced.out_tree == tree
    assert_close(actual, map(jnp.asarray, expected))


def test_abstract_values_trace_as_arrays_do():
    state, batch = make_state(), make_batch()
    concrete, shapes = (
        trace(train_step, (state, batch), (1,)),
        trace(train_step, (abstract(state), abstract(batch)), (1,)),
    )
    assert str(concrete.jaxpr.jaxpr) == str(shapes.jaxpr.jaxpr)


def test_leaves_know_their_argument_path_and_rows():
    traced = trace(train_step, (make_state(), make_batch()), (1,))
    by_path = {
        path: (argument, rows) for path, argument, rows in zip(traced.leaf_path, traced.leaf_argument, traced.leaf_rows)
    }
    assert by_path[".params['layers_0']['kernel']"] == (0, False)
    assert by_path[".key"] == by_path[".scale"] == by_path[".step"] == (0, False)
    assert by_path["['x']"] == by_path["['y']"] == (1, True)
    assert traced.rows == ROWS
    assert len(traced.jaxpr.jaxpr.invars) == len(traced.leaf_path)


def test_another_number_of_rows_changes_only_the_batch():
    full, micro = (trace(train_step, (make_state(), make_batch()), (1,), rows=rows) for rows in (None, 2))
    assert (full.rows, micro.rows) == (ROWS, 2)
    for rows, a, b in zip(full.leaf_rows, full.jaxpr.in_avals, micro.jaxpr.in_avals):
        assert b.shape == ((2, *a.shape[1:]) if rows else a.shape)


def test_scalars_and_keys_in_the_batch_carry_no_rows():
    leaves = [
        ("x", jnp.zeros((8, 2))),
        ("temperature", jnp.zeros(())),
        ("key", jax.random.key(0)),
        ("keys", jax.random.split(jax.random.key(0), 3)),
        ("raw key", jax.random.PRNGKey(0)),
    ]
    assert batch_rows(leaves) == (8, [True, False, False, False, False])


def test_leaves_that_disagree_are_listed():
    with pytest.raises(BatchError) as raised:
        batch_rows([("x", jnp.zeros(8)), ("y", jnp.zeros(6))])
    assert "x: 8" in str(raised.value) and "y: 6" in str(raised.value)


def test_abstract_keeps_weak_types_and_keys():
    found = abstract(
        {"step": 0, "rate": 0.1, "flag": True, "key": jax.random.key(0), "x": np.zeros((2, 3), np.float32)}
    )
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(found))
    assert found["step"].weak_type and found["rate"].weak_type
    assert not found["x"].weak_type
    assert (found["x"].shape, found["x"].dtype) == ((2, 3), np.float32)
    assert jax.dtypes.issubdtype(found["key"].dtype, jax.dtypes.prng_key)
    assert abstract(found) == found


def test_unwrap_finds_the_function_below_every_jit_but_not_below_other_wrappers():
    assert unwrap(jax.jit(jax.jit(train_step))) is train_step
    assert unwrap(train_step) is train_step

    @functools.wraps(train_step)
    def logged(state, batch):
        return train_step(state, batch)

    assert unwrap(logged) is logged


def test_a_gradient_call_whose_results_are_dropped_goes_with_them():
    def step(state, batch):
        jax.grad(lambda p: jnp.sum(p["layers_0"]["bias"]))(state.params)
        return train_step(state, batch)

    traced = trace(step, (make_state(), make_batch()), (1,))
    assert [e.primitive.name for e in traced.jaxpr.jaxpr.eqns].count("loss_and_grad") == 1


@pytest.mark.parametrize("rows", [None, 2])
def test_tracing_calls_the_step_once_and_leaves_the_callers_batch_alone(rows):
    calls = []

    def step(state, batch):
        calls.append(None)
        return popping_step(state, batch)

    batch = make_batch()
    trace(step, (make_state(), batch), (1,), rows=rows)
    assert len(calls) == 1
    assert set(batch) == {"x", "y"}


def test_after_tracing_the_step_works_under_plain_jit_and_gives_the_same():
    state, batch = make_state(), make_batch()
    jitted = jax.jit(train_step)
    before = jax.tree.leaves(jitted(state, batch))
    trace(jitted, (state, batch), (1,))
    trace(train_step, (state, batch), (1,))
    assert_close(jax.tree.leaves(jitted(state, batch)), before)
    assert_close(jax.tree.leaves(jax.jit(lambda s, b: train_step(s, b))(state, batch)), before)


@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_a_gradient_inside_a_loop_or_branch_is_refused(loop):
    def step(state, batch):
        def update(params):
            grads = jax.grad(lambda p: MODEL.apply({"params": p}, batch["x"]).mean())(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        params = state.params
        if loop == "scan":
            params, _ = jax.lax.scan(lambda p, _: (update(p), None), params, None, length=2)
        elif loop == "while":
            params = jax.lax.fori_loop(0, state.step + 2, lambda _, p: update(p), params)
        else:
            params = jax.lax.cond(state.step > 0, update, lambda p: p, params)
        return state.replace(params=params), None

    with pytest.raises(GradientCallError, match=f"inside a `{loop}`.*num_microbatches"):
        trace(step, (make_state(), make_batch()), (1,))


def test_a_step_without_a_gradient_is_an_evaluation_and_returns_its_state_untouched():
    traced = trace(
        lambda state, batch: (state, MODEL.apply({"params": state.params}, batch["x"]).mean()),
        (make_state(), make_batch()),
        (1,),
    )
    assert traced.is_evaluation
    jaxpr = traced.jaxpr.jaxpr
    assert len(jaxpr.eqns) == 1 and len(traced.equation.outvars) == 1
    states = [v for v, n in zip(jaxpr.invars, traced.leaf_argument) if n == 0]
    assert list(jaxpr.outvars[: len(states)]) == states


def test_a_step_that_changes_its_state_without_a_gradient_is_refused():
    def step(state, batch):
        return state.replace(params=jax.tree.map(lambda p: p * batch["x"].mean(), state.params))

    with pytest.raises(GradientCallError, match="takes no gradient"):
        trace(step, (make_state(), make_batch()), (1,))


def test_a_debug_print_is_left_out_with_a_warning_and_a_callback_is_refused():
    from jax.experimental import io_callback

    def step_with(effect):
        def train_step(params, batch):
            def loss(params):
                effect(batch.sum())
                return ((batch @ params) ** 2).mean()

            return params - jax.grad(loss)(params)

        return train_step

    args = (jnp.ones(3), jnp.ones((4, 3)))
    with pytest.warns(UserWarning, match=r"leaves out the debug print .*test_step.py:\d+"):
        trace(step_with(lambda x: jax.debug.print("{}", x)), args, (1,))
    with pytest.raises(TraceError, match=r"test_step.py:\d+.*side effects"):
        trace(step_with(lambda x: io_callback(lambda y: None, None, x)), args, (1,))
