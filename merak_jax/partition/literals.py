"""Numbers in loops, conditionals and remat that differ from block to block, made operands.

A drop rate that rises with depth is an operand of its equation, and blocks that differ in it are equal blocks. Inside a remat it
is part of the program, and would make them different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.partition.fingerprint import equation_shape, parameter_shape, same_literal
from merak_jax.tracing.jaxprs import make_jaxpr
from merak_jax.tracing.matching import open_jaxpr
from merak_jax.tracing.side_results import REMAT

# Per primitive, the parameters that hold its programs.
_PROGRAMS = {
    **dict.fromkeys(REMAT, ("jaxpr",)),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


def literals_outside(program: Jaxpr) -> Jaxpr:
    """The program with the literals inside equations as operands, where equations differ in nothing else."""
    groups: dict[Any, list[int]] = {}
    for n, eqn in enumerate(program.eqns):
        if eqn.primitive.name in _PROGRAMS:
            groups.setdefault(_shape(eqn), []).append(n)
    replaced: dict[int, JaxprEqn] = {}
    for numbers in groups.values():
        columns = list(zip(*(_literals(program.eqns[n]) for n in numbers)))
        differs = [not all(same_literal(column[0], other) for other in column) for column in columns]
        if any(differs):
            replaced.update((n, _hoisted(program.eqns[n], iter(differs), _array)) for n in numbers)
    if not replaced:
        return program
    eqns = [replaced.get(n, eqn) for n, eqn in enumerate(program.eqns)]
    return make_jaxpr(program.constvars, program.invars, program.outvars, eqns)


def _array(literal: Literal) -> Literal:
    return Literal(np.asarray(literal.val, literal.aval.dtype), literal.aval)


def _programs(eqn: JaxprEqn) -> list[Any]:
    """The programs of an equation, in order."""
    return [p for key in _PROGRAMS[eqn.primitive.name] for p in _several(eqn.params[key])]


def _several(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _shape(eqn: JaxprEqn) -> Any:
    """As `equation_shape`, but for the values of literals in the programs of the equation."""
    if eqn.primitive.name not in _PROGRAMS:
        return equation_shape(eqn)
    others = {k: v for k, v in eqn.params.items() if k not in _PROGRAMS[eqn.primitive.name]}
    consts = tuple(parameter_shape(tuple(p.consts)) for p in _programs(eqn) if isinstance(p, ClosedJaxpr))
    types = tuple(str(a.aval) for a in (*eqn.invars, *eqn.outvars))
    return (eqn.primitive.name, parameter_shape(others), consts, types, *map(_program_shape, _programs(eqn)))


def _program_shape(program: Any) -> Any:
    jaxpr = open_jaxpr(program)
    number: dict[Var, int] = {}

    def name(atom: Any, value: bool = False) -> Any:
        if isinstance(atom, Literal):
            return ("literal", str(atom.aval), np.asarray(atom.val).tobytes() if value else None)
        return number.setdefault(atom, len(number))

    inputs = tuple((name(v), str(v.aval)) for v in [*jaxpr.constvars, *jaxpr.invars])
    body = tuple((_shape(e), tuple(map(name, e.invars)), tuple(map(name, e.outvars))) for e in jaxpr.eqns)
    return (inputs, body, tuple(name(a, value=True) for a in jaxpr.outvars))


def _literals(eqn: JaxprEqn) -> Iterator[Literal]:
    """The literals that equations inside an equation read."""
    for program in _programs(eqn):
        for inner in open_jaxpr(program).eqns:
            yield from (a for a in inner.invars if isinstance(a, Literal))
            if inner.primitive.name in _PROGRAMS:
                yield from _literals(inner)


def _hoisted(eqn: JaxprEqn, wanted: Iterator[bool], operand: Callable[[Literal], Any]) -> JaxprEqn:
    """The equation with the wanted ones of its literals as operands, which `operand` makes of them."""
    name, params = eqn.primitive.name, dict(eqn.params)
    parts = [_Part.of(program, wanted) for program in _programs(eqn)]
    more = [[operand(literal) for literal in part.literals] for part in parts]
    operands = list(eqn.invars)
    if name == "while":
        test, body = parts
        first, second = params["cond_nconsts"], params["body_nconsts"]
        params.update(cond_jaxpr=test.program(first), body_jaxpr=body.program(second))
        params.update(cond_nconsts=first + len(more[0]), body_nconsts=second + len(more[1]))
        operands[first + second : first + second] = more[1]
        operands[first:first] = more[0]
    elif name == "scan":
        first = params["num_consts"]
        params.update(jaxpr=parts[0].program(first), num_consts=first + len(more[0]))
        operands[first:first] = more[0]
    elif name == "cond":
        # Every branch takes the operands of all.
        variables = [part.variables for part in parts]
        branches = []
        for n, part in enumerate(parts):
            others = [[_compat.new_var(v.aval) for v in own] if k != n else own for k, own in enumerate(variables)]
            branches.append(replace(part, variables=sum(others, [])).program())
        params["branches"] = tuple(branches)
        operands += sum(more, [])
    else:
        params["jaxpr"] = parts[0].program()
        operands += more[0]
    return eqn.replace(invars=operands, params=params)


@dataclass(frozen=True)
class _Part:
    """A program of an equation without some of its literals: `variables` stand for them."""

    original: Any
    eqns: list[JaxprEqn]
    variables: list[Var]
    literals: list[Literal]

    @classmethod
    def of(cls, program: Any, wanted: Iterator[bool]) -> _Part:
        part = cls(program, [], [], [])
        for eqn in open_jaxpr(program).eqns:
            invars = [part.outside(a) if isinstance(a, Literal) and next(wanted) else a for a in eqn.invars]
            eqn = eqn.replace(invars=invars)
            part.eqns.append(_hoisted(eqn, wanted, part.outside) if eqn.primitive.name in _PROGRAMS else eqn)
        return part

    def outside(self, literal: Literal) -> Var:
        """A variable for the literal."""
        self.variables.append(_compat.new_var(literal.aval))
        self.literals.append(literal)
        return self.variables[-1]

    def program(self, position: int | None = None) -> Any:
        """The program with the variables among its inputs, from `position` on; at the end if not given."""
        jaxpr = open_jaxpr(self.original)
        at = len(jaxpr.invars) if position is None else position
        invars = [*jaxpr.invars[:at], *self.variables, *jaxpr.invars[at:]]
        new = make_jaxpr(jaxpr.constvars, invars, jaxpr.outvars, self.eqns)
        return ClosedJaxpr(new, self.original.consts) if isinstance(self.original, ClosedJaxpr) else new
