"""Follow dimensions through the equations of a block, calls and scans included."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jax.extend import core as jex_core

from merak_jax.partition.dimension_rules import ELEMENTWISE, RULES, elementwise, unknown
from merak_jax.partition.dimensions import CARRY, Dimensions, Value

# Primitives whose output is its operand in another shape or dtype: their gradients are summed as one.
_SAME_VALUE = frozenset("convert_element_type copy copy_p name reshape squeeze transpose".split())
_CALLS = frozenset(
    """jit pjit closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr""".split()
)


def follow_dimensions(jaxpr, origins: Sequence[int]) -> Dimensions:
    """Walk over a block.

    Args:
      jaxpr: `jax.extend.core.ClosedJaxpr` or `Jaxpr` of one block. `jit`, `remat`, `custom_jvp`, `custom_vjp`
        and `scan` are entered; dimensions that meet `cond`, `while` or an unknown primitive are opaque.
      origins: for each input CARRY, PARAMETER or SIDE.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = Dimensions()
    found.inputs = [found.new_value(v.aval, origin) for v, origin in zip(jaxpr.invars, origins, strict=True)]
    found.outputs = _walk(found, jaxpr, found.inputs, top=True)
    return found


def opaque_dimensions(eqn, grouped: Collection[tuple[int, int]] = ()) -> tuple[list[list[int]], list[list[int]]]:
    """Per operand and per output of one equation: the dimensions along which it cannot work in shards.

    `grouped`: as in `TensorLayout`; a minor factor of a reshape is none of them where its sizes are among these.
    """
    found = Dimensions()
    operands = [found.new_value(a.aval, CARRY) for a in eqn.invars]
    outs = _equation(found, eqn, operands)
    find, sizes = found.classes.find, found.classes.sizes
    majors: dict[int, set[tuple[int, int]]] = {}
    for major, minor, _ in found.companions:
        majors.setdefault(find(minor), set()).add((sizes[major], sizes[minor]))

    def opaque(value: Value) -> list[int]:
        return [d for d, n in enumerate(value.nodes) if n is not None and is_opaque(n)]

    def is_opaque(node: int) -> bool:
        if found.classes.opaque_reason(node) is None or found.classes.is_cut(node):
            return found.classes.is_cut(node)
        return not majors[find(node)] <= set(grouped)

    return [opaque(v) for v in operands], [opaque(v) for v in outs]


class EquationClasses(NamedTuple):
    """How the dimensions of one equation run along each other.

    `operands`, `outs`: per value the class of each dimension, None for one of size 1. `opaque`: classes along which the
    equation cannot work in shards. `summed`: classes that it sums over.
    """

    operands: list[list[int | None]]
    outs: list[list[int | None]]
    opaque: frozenset[int]
    summed: frozenset[int]


def equation_classes(eqn) -> EquationClasses:
    """Classes of the dimensions of one equation, taken alone."""
    found = Dimensions()
    operands = [found.new_value(a.aval, CARRY) for a in eqn.invars]
    outs = _equation(found, eqn, operands)
    find = found.classes.find

    def classes(value: Value) -> list[int | None]:
        return [None if n is None else find(n) for n in value.nodes]

    nodes = [n for v in (*operands, *outs) for n in v.nodes if n is not None]
    return EquationClasses(
        [classes(v) for v in operands],
        [classes(v) for v in outs],
        frozenset(find(n) for n in nodes if found.classes.opaque_reason(n)),
        frozenset(find(s.node) for s in found.sums if s.direction == "forward"),
    )


def _walk(found: Dimensions, jaxpr, args, top: bool = False) -> list[Value]:
    # A fresh environment per call: the same inner jaxpr object may be called from several places.
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update((v, found.new_value(v.aval, 0)) for v in jaxpr.constvars)

    def read(atom):
        return found.new_value(atom.aval, 0) if isinstance(atom, jex_core.Literal) else env[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        outs = _equation(found, eqn, [read(a) for a in eqn.invars])
        if top and eqn.primitive.name == "dot_general":
            found.product_outputs[index] = outs[0]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(found: Dimensions, eqn, operands: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    inner = _inner(eqn) if name in _CALLS else None
    if inner is not None:
        return _walk(found, inner, operands)
    if name == "scan":
        return _scan(found, eqn, operands)
    source = operands[0].source if name in _SAME_VALUE else None
    outs = [found.new_value(v.aval, _origin(operands), source) for v in eqn.outvars]
    rule = elementwise if name in ELEMENTWISE else RULES.get(name, unknown)
    rule(found, eqn, operands, outs)
    return outs


def _origin(operands: Sequence[Value]) -> int:
    return functools.reduce(operator.or_, (operand.origin for operand in operands), 0)


def _inner(eqn):
    """Return the jaxpr of a call whose inner inputs are its operands, None otherwise."""
    inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if inner is None:
        return None
    inner = getattr(inner, "jaxpr", inner)
    same = [v.aval.shape for v in inner.invars] == [v.aval.shape for v in eqn.invars]
    return inner if same else None


def _scan(found: Dimensions, eqn, operands) -> list[Value]:
    num_consts, num_carry, length = (eqn.params[k] for k in ("num_consts", "num_carry", "length"))
    inner = eqn.params["jaxpr"].jaxpr
    origin = _origin(operands)

    end = num_consts + num_carry
    consts, init, xs = operands[:num_consts], operands[num_consts:end], operands[end:]
    carry = [found.new_value(v.aval, origin) for v in inner.invars[num_consts:end]]
    rows = [found.new_value(v.aval, x.origin) for v, x in zip(inner.invars[end:], xs, strict=True)]
    for x, row in zip(xs, rows, strict=True):
        found.mark(x, (0,), "scanned over")
        found.unite(x, row, [(d + 1, d) for d in range(len(row.shape))])

    times, found.times = found.times, found.times * length
    inner_outs = _walk(found, inner, [*consts, *carry, *rows])
    found.times = times

    outs = [found.new_value(v.aval, origin) for v in eqn.outvars]
    for position, (out, inner_out) in enumerate(zip(outs, inner_outs, strict=True)):
        if position < num_carry:
            same = [(d, d) for d in range(len(out.shape))]
            found.unite(out, inner_out, same)
            found.unite(carry[position], inner_out, same)
            found.unite(init[position], inner_out, same)
        else:
            found.mark(out, (0,), "stacked by a scan")
            found.unite(out, inner_out, [(d + 1, d) for d in range(len(inner_out.shape))])
    return outs
