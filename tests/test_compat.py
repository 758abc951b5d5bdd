"""Each use of private JAX still does what the package relies on; nothing outside `_compat.py` imports `jax._src`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import value_and_grad

from merak_jax import _compat
from merak_jax.tracing.jaxprs import evaluate, make_jaxpr

PACKAGE = Path(_compat.__file__).parent


def test_only_one_file_imports_private_jax():
    private = re.compile(r"^\s*(?:from|import) jax\._src", re.MULTILINE)
    found = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if private.search(path.read_text())]
    assert found == ["_compat.py"]


SPELLINGS = {
    "jax.grad": lambda f, x: jax.grad(f)(x),
    "jax.value_and_grad": lambda f, x: jax.value_and_grad(f)(x)[1],
    "from jax import value_and_grad": lambda f, x: value_and_grad(f)(x)[1],
    "jax.vjp": lambda f, x: jax.vjp(f, x)[1](1.0)[0],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_replaced_vjp_sees_every_spelling_and_restores_jax(spelling):
    calls = []

    def replacement(original, fun, *primals, has_aux):
        calls.append((len(primals), has_aux))
        return original(fun, *primals, has_aux=has_aux)

    public, private = jax.vjp, sys.modules["jax._src.api"].vjp
    with _compat.replaced_vjp(replacement):
        assert SPELLINGS[spelling](jnp.square, 3.0) == 6.0
    assert calls == [(1, False)]
    assert jax.vjp is public and sys.modules["jax._src.api"].vjp is private
    assert SPELLINGS[spelling](jnp.square, 3.0) == 6.0
    assert len(calls) == 1


def test_replaced_vjp_hands_on_has_aux():
    calls = []

    def replacement(original, fun, *primals, has_aux):
        calls.append(has_aux)
        return original(fun, *primals, has_aux=has_aux)

    with _compat.replaced_vjp(replacement):
        (value, aux), grad = jax.value_and_grad(lambda x: (x * x, "aux"), has_aux=True)(3.0)
    assert (value, aux, grad, calls) == (9.0, "aux", 6.0, [True])


def test_replaced_vjp_restores_jax_after_an_error():
    public = jax.vjp
    with pytest.raises(ZeroDivisionError), _compat.replaced_vjp(lambda *_, **__: 1 / 0):
        jax.grad(jnp.square)(3.0)
    assert jax.vjp is public
    assert jax.grad(jnp.square)(3.0) == 6.0


def test_source_line_is_the_users_file_and_line():
    def user_function(x):
        return x * 2

    (eqn,) = jax.make_jaxpr(user_function)(1.0).eqns
    line = user_function.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in _compat.source_line(eqn)
    assert "user_function" in _compat.source_line(eqn)


def test_an_equation_that_is_evaluated_again_keeps_its_line_and_so_does_its_derivative():
    def user_function(x):
        return jnp.sin(x) * x

    program = jax.make_jaxpr(user_function)(1.0).jaxpr
    lines = [_compat.source_line(eqn) for eqn in program.eqns]
    again = jax.make_jaxpr(lambda x: evaluate(program, [], x)[0])(1.0)
    assert [_compat.source_line(eqn) for eqn in again.eqns] == lines
    derivative = jax.make_jaxpr(jax.grad(lambda x: evaluate(program, [], x)[0]))(1.0)
    assert {_compat.source_line(eqn) for eqn in derivative.eqns} == set(lines)


def test_new_var_is_fresh_and_has_the_type_asked_for():
    aval = jax.core.ShapedArray((2, 3), jnp.float32)
    first, second = _compat.new_var(aval), _compat.new_var(aval)
    assert first is not second and first != second
    assert first.aval == aval
    assert len({first: 0, second: 1}) == 2


def test_remove_dead_equations_keeps_inputs_and_says_which_are_used():
    closed = jax.make_jaxpr(lambda a, b: (jnp.sin(a), jnp.cos(b)))(1.0, 2.0)
    jaxpr, used = _compat.remove_dead_equations(closed.jaxpr, [False, True])
    assert [e.primitive.name for e in jaxpr.eqns] == ["cos"]
    assert len(jaxpr.outvars) == 1
    assert len(jaxpr.invars) == 2
    assert list(used) == [True, True]


def test_backend_initialised_is_true_here():
    jax.devices()
    assert _compat.backend_initialised() is True


def test_backend_initialised_is_false_before_the_first_device():
    code = (
        "import json, jax; from merak_jax import _compat; before = _compat.backend_initialised(); jax.devices(); "
        "print(json.dumps([before, _compat.backend_initialised()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PACKAGE.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [False, True]


def test_a_jaxpr_with_no_debug_info_evaluates_prints_and_compiles():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    jaxpr = make_jaxpr([], closed.jaxpr.invars, closed.jaxpr.outvars, closed.jaxpr.eqns)
    assert jaxpr.debug_info == _compat.no_debug_info()
    assert "sin" in str(jaxpr)
    value = jax.jit(lambda x: evaluate(jaxpr, [], x)[0])(0.5)
    np.testing.assert_allclose(value, 2 * np.sin(0.5), rtol=1e-6)


def test_separate_trace_cache_traces_a_jit_that_already_ran_and_leaves_its_cache_alone():
    traces = []

    @jax.jit
    def inner(x):
        traces.append(None)
        return x + 1

    inner(1.0)
    assert len(traces) == 1
    with _compat.separate_trace_cache():
        jax.make_jaxpr(lambda x: inner(x))(1.0)
    assert len(traces) == 2
    jax.make_jaxpr(lambda x: inner(x))(1.0)
    assert inner(1.0) == 2.0
    assert len(traces) == 2


BODIES = {
    "scan": (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0], 1),
    "while": (lambda x: jax.lax.while_loop(lambda c: c < 1, jnp.sin, x), 2),
    "cond": (lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 2),
    "jit": (lambda x: jax.jit(jnp.sin)(x), 1),
    "custom_jvp_call": (lambda x: jax.nn.relu(x), 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_sub_jaxprs_finds_the_programs_inside_an_equation(name):
    function, count = BODIES[name]
    eqns = jax.make_jaxpr(function)(0.5).eqns
    (eqn,) = [e for e in eqns if e.primitive.name == name] or eqns[-1:]
    found = _compat.sub_jaxprs(eqn)
    assert len(found) == count
    assert all(inner.eqns for inner in found)


def test_sub_jaxprs_of_a_plain_equation_is_empty():
    assert _compat.sub_jaxprs(jax.make_jaxpr(jnp.sin)(0.5).eqns[0]) == []


def test_placement_of_traced_values_does_nothing_and_is_told_and_jax_is_restored():
    device, told = jax.devices()[0], []

    def function(x):
        return jax.lax.with_sharding_constraint(jax.device_put(x, device), jax.sharding.SingleDeviceSharding(device))

    with _compat.without_placement(lambda name, line: told.append((name, line))):
        inside = jax.make_jaxpr(lambda x: function(x))(1.0)
        assert jax.device_put(np.ones(2), device).sum() == 2
    assert not inside.eqns
    assert [name for name, _ in told] == ["device_put", "with_sharding_constraint"]
    assert all(f"{__file__}:{function.__code__.co_firstlineno + 1}" in line for _, line in told)
    assert [e.primitive.name for e in jax.make_jaxpr(function)(1.0).eqns] == ["device_put", "sharding_constraint"]
