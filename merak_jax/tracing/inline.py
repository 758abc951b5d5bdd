"""Flatten a jaxpr: `jit` and `closed_call` are inlined, custom rules, loops and remat are kept whole."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.tracing.jaxprs import like, make_jaxpr
from merak_jax.tracing.side_results import REMAT, keys_outside, only_used, passed_on

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
# Programs inside these are flattened too; functions with custom derivatives stay as they are.
_NESTING = frozenset({"scan", "while", "cond", "remat2", "checkpoint"})


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function without nested calls; every variable is fresh and defined once, at top level."""
    constvars = list(closed.jaxpr.constvars)
    consts = list(closed.consts)
    env: dict[Var, Var | Literal] = {}

    def rename(var: Var) -> Var:
        env[var] = new = _compat.new_var(var.aval)
        return new

    new_constvars = [rename(v) for v in constvars]
    const_of_id: dict[int, Var] = {id(c): v for c, v in zip(consts, new_constvars)}
    invars = [rename(v) for v in closed.jaxpr.invars]
    eqns: list[JaxprEqn] = []

    def emit(jaxpr: Jaxpr, env: dict[Var, Var | Literal], call: JaxprEqn | None = None) -> None:
        def read(atom):
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            if call is not None and not _compat.has_source(eqn):
                # A jit whose trace was cached kept no lines; its call knows the user's.
                eqn = eqn.replace(source_info=call.source_info)
            operands = [read(a) for a in eqn.invars]
            if eqn.primitive.name in _CALLS:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                inner_jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                inner_consts = inner.consts if isinstance(inner, ClosedJaxpr) else []
                inner_env: dict[Var, Var | Literal] = dict(zip(inner_jaxpr.invars, operands))
                for var, value in zip(inner_jaxpr.constvars, inner_consts):
                    if id(value) not in const_of_id:
                        const_of_id[id(value)] = new = _compat.new_var(var.aval)
                        new_constvars.append(new)
                        consts.append(value)
                    inner_env[var] = const_of_id[id(value)]
                emit(inner_jaxpr, inner_env, eqn)
                for outer, result in zip(eqn.outvars, inner_jaxpr.outvars):
                    env[outer] = result if isinstance(result, Literal) else inner_env[result]
                continue
            if eqn.primitive.name in _NESTING:
                eqn = _flat_inside(eqn)
            env.update((eqn.outvars[n], operands[i]) for n, i in passed_on(eqn).items())
            if eqn.primitive.name in REMAT:
                derived, eqn, operands = keys_outside(eqn, operands)
                eqns.extend(derived)
                eqn, operands = only_used(eqn, operands)
            outvars = []
            for var in eqn.outvars:
                if var in env:
                    # What a scan passes on: later equations read the operand itself.
                    outvars.append(_compat.new_var(var.aval))
                    continue
                new = _compat.new_var(var.aval)
                env[var] = new
                outvars.append(new)
            eqns.append(eqn.replace(invars=operands, outvars=outvars))

    emit(closed.jaxpr, env)
    outvars = [a if isinstance(a, Literal) else env[a] for a in closed.jaxpr.outvars]
    return ClosedJaxpr(make_jaxpr(new_constvars, invars, outvars, eqns), consts)


def opened(program: Jaxpr) -> Jaxpr:
    """The program with what stands in remats in their place."""
    while any(eqn.primitive.name in REMAT for eqn in program.eqns):
        rename: dict[Var, Var | Literal] = {}
        eqns: list[JaxprEqn] = []

        def read(atom, rename=rename):
            return rename.get(atom, atom) if isinstance(atom, Var) else atom

        for eqn in program.eqns:
            eqn = eqn.replace(invars=[read(a) for a in eqn.invars])
            if eqn.primitive.name not in REMAT:
                eqns.append(eqn)
                continue
            inner = eqn.params["jaxpr"]
            own: dict[Var, Var | Literal] = dict(zip(inner.invars, eqn.invars))
            for e in inner.eqns:
                outvars = [_compat.new_var(v.aval) for v in e.outvars]
                invars = [own.get(a, a) if isinstance(a, Var) else a for a in e.invars]
                eqns.append(e.replace(invars=invars, outvars=outvars))
                own.update(zip(e.outvars, outvars))
            rename.update((v, own.get(a, a) if isinstance(a, Var) else a) for v, a in zip(eqn.outvars, inner.outvars))
        program = make_jaxpr(program.constvars, program.invars, [read(a) for a in program.outvars], eqns)
    return program


def _flat_inside(eqn: JaxprEqn) -> JaxprEqn:
    """The equation with the programs in its parameters flattened."""

    def flat(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr) and _has_calls(value.jaxpr):
            return inline(value)
        if isinstance(value, Jaxpr) and _has_calls(value):
            new = inline(ClosedJaxpr(value, []))
            # An open program has no place for arrays that a call held.
            return value if new.consts else new.jaxpr
        if isinstance(value, tuple) and any(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
            return like(value, map(flat, value))
        return value

    params = {key: flat(value) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[key] is not v for key, v in eqn.params.items()) else eqn


def _has_calls(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in _CALLS | REMAT
        or (eqn.primitive.name in _NESTING and any(_has_calls(inner) for inner in _compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
