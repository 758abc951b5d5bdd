"""Compare equations up to renaming: the shape of an equation is its primitive, parameters and types, not its operands' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax.errors import NotSeparableError
from merak_jax.tracing import derivatives

_NOT_MEANING = frozenset({"debug_info", "name", "ctx_mesh", "compiler_options_kvs"})
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
# The functions of custom derivatives, compared by what they compute.
_RULES = frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"})


def parameter_shape(value: Any) -> Any:
    """A hashable form of an equation parameter; callables count by name, jaxprs by their equations."""
    if isinstance(value, ClosedJaxpr):
        return ("closed", parameter_shape(value.jaxpr), tuple(_constant(c) for c in value.consts))
    if isinstance(value, Jaxpr):
        return jaxpr_shape(value)
    if isinstance(value, (tuple, list)):
        return tuple(parameter_shape(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, parameter_shape(v)) for k, v in sorted(value.items(), key=lambda kv: str(kv[0])))
    if isinstance(value, np.ndarray):
        return _constant(value)
    if callable(value) and not isinstance(value, type):
        return ("callable", getattr(value, "__qualname__", None) or type(value).__qualname__)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _constant(value: Any) -> Any:
    plain = isinstance(value, np.ndarray | np.generic) or (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    )
    if plain and value.size <= 1 << 16:
        return (value.shape, str(value.dtype), np.asarray(value).tobytes())
    return ("constant", id(value))


def jaxpr_shape(jaxpr: Jaxpr) -> Any:
    """A jaxpr up to the names of its variables; literals count by value."""
    number: dict[Var, int] = {}

    def name(atom):
        if isinstance(atom, Literal):
            return ("literal", str(atom.aval), np.asarray(atom.val).tobytes())
        return number.setdefault(atom, len(number))

    inputs = tuple((name(v), str(v.aval)) for v in [*jaxpr.constvars, *jaxpr.invars])
    body = tuple(
        (equation_shape(e), tuple(name(a) for a in e.invars), tuple(name(v) for v in e.outvars)) for e in jaxpr.eqns
    )
    return (inputs, body, tuple(name(a) for a in jaxpr.outvars))


def equation_shape(eqn: JaxprEqn) -> Any:
    """Primitive, parameters and types of an equation: hashable, equal for equations that do the same work."""
    return (
        eqn.primitive.name,
        _parameters(eqn),
        tuple(_type(a) for a in eqn.invars),
        tuple(_type(v) for v in eqn.outvars),
    )


# Parameters by the identity of their dictionary, which an equation keeps when it is renamed.
_known: dict[int, tuple[dict, Any]] = {}


def _parameters(eqn: JaxprEqn) -> Any:
    known = _known.get(id(eqn.params))
    if known is not None and known[0] is eqn.params:
        return known[1]
    if len(_known) > 100_000:
        _known.clear()
    shape: Any = tuple((k, parameter_shape(v)) for k, v in sorted(eqn.params.items()) if k not in _NOT_MEANING | _RULES)
    if eqn.primitive.name in _CUSTOM:
        # Functions can't be compared, the programs that they trace to can.
        shape = (shape, _rule_shape(eqn))
    _known[id(eqn.params)] = (eqn.params, shape)
    return shape


def _rule_shape(eqn: JaxprEqn) -> Any:
    """What the custom derivative of an equation computes; unlike any other where it can't be traced."""
    try:
        if eqn.primitive.name == "custom_jvp_call":
            rule = derivatives.tangent_rule(eqn)
            return (parameter_shape(rule.program), rule.zeros, rule.out_zeros)
        back = derivatives.backward_rule(eqn)
        return (parameter_shape(back.forward), parameter_shape(back.backward), back.forwarded, back.places)
    except (NotSeparableError, NotImplementedError, TypeError, ValueError):
        return ("rule", id(eqn.params))


def different_rules(program: Jaxpr) -> tuple[JaxprEqn, ...]:
    """Two equations with custom derivatives that have the same types and compute different things, if there are two."""
    first: dict[Any, JaxprEqn] = {}
    for eqn in program.eqns:
        if eqn.primitive.name in _CUSTOM:
            types = (eqn.primitive.name, *map(_type, [*eqn.invars, *eqn.outvars]))
            other = first.setdefault(types, eqn)
            if equation_shape(other) != equation_shape(eqn):
                return other, eqn
    return ()


def _type(atom: Any) -> Any:
    return (atom.aval.shape, str(atom.aval.dtype)) if hasattr(atom.aval, "shape") else str(atom.aval)


def same_literal(a: Literal, b: Literal) -> bool:
    """Whether two literals have the same type and bits."""
    return a.aval == b.aval and np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()


def equation_numbers(eqns: Sequence[JaxprEqn], domain: Mapping[Var, int]) -> list[int]:
    """A number per equation, equal where the shapes are, and operands are literals, depend on the batch, or neither, alike."""
    numbers: dict[Any, int] = {}
    result = []
    for eqn in eqns:
        kinds = tuple(-1 if isinstance(a, Literal) else domain[a] & 2 for a in eqn.invars)
        result.append(numbers.setdefault((equation_shape(eqn), kinds), len(numbers)))
    return result
