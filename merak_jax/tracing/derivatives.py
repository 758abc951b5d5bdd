"""The rules inside a custom_jvp or custom_vjp equation as jaxprs, and equations made from such jaxprs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError
from merak_jax.tracing.jaxprs import function_of, like, make_jaxpr
from merak_jax.tracing.matching import open_jaxpr

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})


@dataclass(frozen=True)
class TangentRule:
    """`program`: [primals, tangents not in `zeros`] -> [outputs, tangents not in `out_zeros`]."""

    program: ClosedJaxpr
    zeros: tuple[bool, ...]
    out_zeros: tuple[bool, ...]


@dataclass(frozen=True)
class BackwardRule:
    """`forward`: primals -> [new residuals, outputs]; `backward`: [residuals, cotangents] -> cotangents.

    `places`: the operands (constants not counted) whose cotangents `backward` returns, the others are zero.
    `forwarded`: per residual the operand that it is, or None for the next new one.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    forwarded: tuple[int | None, ...]
    places: tuple[int, ...]

    @property
    def num_new(self) -> int:
        """How many residuals the forward program makes."""
        return sum(f is None for f in self.forwarded)

    def residuals(self, new: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """All residuals, from the new ones and the operands of the equation."""
        remaining = iter(new)
        return [next(remaining) if f is None else operands[f] for f in self.forwarded]


def _is_float(aval) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def tangent_rule(eqn: JaxprEqn) -> TangentRule:
    """The rule of a `custom_jvp_call`."""
    primals = eqn.invars[eqn.params["num_consts"] :]
    zeros = tuple(not _is_float(v.aval) for v in primals)
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return TangentRule(_written_out(ClosedJaxpr(jaxpr, consts)), zeros, tuple(out_zeros))


def backward_rule(eqn: JaxprEqn) -> BackwardRule:
    """The rule of a `custom_vjp_call`."""
    primals = eqn.invars[eqn.params["num_consts"] :]
    nonzero = [_is_float(v.aval) for v in primals]
    forward = _written_out(ClosedJaxpr(*eqn.params["fwd_jaxpr_thunk"].call_wrapped(*nonzero)))
    forwarded = tuple(eqn.params["out_trees"]()[2])
    made = BackwardRule(forward, forward, forwarded, ())
    places: list[int] = []

    def run(*args):
        results = enumerate(eqn.params["bwd"].call_wrapped(*args))
        kept = [(i, r) for i, r in results if isinstance(r, jax.Array | np.ndarray) and r.dtype != float0]
        places[:] = [i for i, _ in kept]
        return [r for _, r in kept]

    avals = made.residuals(forward.out_avals[: made.num_new], [v.aval for v in eqn.invars])
    avals += [v.aval.to_ct_aval() for v in eqn.outvars]
    backward = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return BackwardRule(forward, _written_out(backward), forwarded, tuple(places))


def _written_out(program: ClosedJaxpr) -> ClosedJaxpr:
    """A derivative rule with its calls written out: nobody takes the derivative of the functions it calls."""
    flat = ClosedJaxpr(_without_calls(program.jaxpr), program.consts)
    # Tracing drops equations that do nothing; a rebuilt rule has been traced once more than the user's.
    return jax.make_jaxpr(function_of(flat))(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in flat.in_avals))


def _without_calls(jaxpr: Jaxpr) -> Jaxpr:
    eqns: list[JaxprEqn] = []

    def emit(inner: Jaxpr, env: dict[Var, Any]) -> list[Any]:
        def read(atom):
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in inner.eqns:
            operands = [read(a) for a in eqn.invars]
            called = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr")) if eqn.primitive.name in _CALLS else None
            if called is not None and not (isinstance(called, ClosedJaxpr) and called.consts):
                results = emit(open_jaxpr(called), dict(zip(open_jaxpr(called).invars, operands)))
            else:
                results = [_compat.new_var(v.aval) for v in eqn.outvars]
                params = {key: _nested_without_calls(value) for key, value in eqn.params.items()}
                eqns.append(eqn.replace(invars=operands, outvars=results, params=params))
            env.update(zip(eqn.outvars, results))
        return [read(a) for a in inner.outvars]

    outputs = emit(jaxpr, {v: v for v in (*jaxpr.constvars, *jaxpr.invars)})
    return make_jaxpr(jaxpr.constvars, jaxpr.invars, outputs, eqns)


def _nested_without_calls(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(_without_calls(value.jaxpr), value.consts)
    if isinstance(value, Jaxpr):
        return _without_calls(value)
    if isinstance(value, tuple) and any(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
        return like(value, map(_nested_without_calls, value))
    return value


def custom_jvp_equation(call: ClosedJaxpr, rule: TangentRule) -> JaxprEqn:
    """A `custom_jvp_call` equation without constants that computes `call` and differentiates by `rule`."""

    @jax.custom_jvp
    def function(*primals):
        return function_of(call)(*primals)

    @function.defjvp
    def tangents(primals, tangents_in):
        given = [t for t, zero in zip(tangents_in, rule.zeros) if not zero]
        results = function_of(rule.program)(*primals, *given)
        outputs, found = results[: len(rule.out_zeros)], iter(results[len(rule.out_zeros) :])
        return outputs, [_no_tangent(o) if z else next(found) for o, z in zip(outputs, rule.out_zeros)]

    return _only_equation(function, call)


def custom_vjp_equation(call: ClosedJaxpr, rule: BackwardRule) -> JaxprEqn:
    """A `custom_vjp_call` equation without constants that computes `call` and differentiates by `rule`."""
    count = len(call.in_avals)

    @jax.custom_vjp
    def function(*primals):
        return function_of(call)(*primals)

    def forward(*primals):
        results = function_of(rule.forward)(*primals)
        return results[rule.num_new :], rule.residuals(results[: rule.num_new], primals)

    def backward(residuals, cotangents):
        found: list[Any] = [None] * count
        for place, value in zip(rule.places, function_of(rule.backward)(*residuals, *cotangents)):
            found[place] = value
        return tuple(found)

    function.defvjp(forward, backward)
    return _only_equation(function, call)


def _no_tangent(value):
    return jnp.zeros(value.shape, value.dtype) if _is_float(value) else np.zeros(value.shape, float0)


def _only_equation(function, call: ClosedJaxpr) -> JaxprEqn:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in call.in_avals]
    eqns = jax.make_jaxpr(function)(*shapes).jaxpr.eqns
    if len(eqns) != 1 or len(eqns[0].invars) != len(call.in_avals):
        raise NotSeparableError("a function with a custom derivative that closes over traced values can't be resized")
    return eqns[0]
