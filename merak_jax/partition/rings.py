"""Find the matmuls of a program whose operand or result goes round the devices of `tensor` while they compute.

A matmul that needs a value whole of which every device has a part can begin with its own part, while the parts are on
their way; one whose results are summed and dealt out can send the sum of a part on while it computes the next one
(Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models").
Matmuls that read the same value share its way round; products that are added up share one sum.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence, Set
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Var

from merak_jax.partition.splits import ADDS, CASTS, SUM, Split, Splits
from merak_jax.tracing.jaxprs import defining_equations, make_jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class RingProduct:
    """One `dot_general` of a ring: its operand `side` is cut along `dimension`.

    `result`: the dimension of its output that is cut with it, None where it is contracted.
    """

    eqn: JaxprEqn
    side: int
    dimension: int
    result: int | None

    def placed(self, part: Any, other: Any) -> tuple[Any, Any]:
        """Left and right operand of the product, of the operand that is cut and the other one."""
        return (part, other) if self.side == 0 else (other, part)

    @property
    def other(self) -> Var:
        """The operand that stays where it is."""
        return self.eqn.invars[1 - self.side]

    @property
    def other_dimension(self) -> int | None:
        """The dimension of `other` that is contracted with `dimension`."""
        contracted, _ = self.eqn.params["dimension_numbers"]
        if self.dimension not in contracted[self.side]:
            return None
        return contracted[1 - self.side][contracted[self.side].index(self.dimension)]


@dataclasses.dataclass(frozen=True, eq=False)
class GatherRing:
    """Products that need `value` whole, which is split along `dimension`."""

    value: Var
    dimension: int
    products: tuple[RingProduct, ...]

    @property
    def invars(self) -> list[Var]:
        """What it reads."""
        return [self.value, *(p.other for p in self.products)]

    @property
    def outvars(self) -> list[Var]:
        """What it makes."""
        return [p.eqn.outvars[0] for p in self.products]


@dataclasses.dataclass(frozen=True, eq=False)
class ScatterRing:
    """Products whose sum over each other and over `tensor` is `value`, split along `dimension`."""

    value: Var
    dimension: int
    products: tuple[RingProduct, ...]
    covered: tuple[JaxprEqn, ...]

    @property
    def invars(self) -> list[Var]:
        """What it reads."""
        return [a for p in self.products for a in p.eqn.invars]

    @property
    def outvars(self) -> list[Var]:
        """What it makes."""
        return [self.value]


Item: TypeAlias = JaxprEqn | GatherRing | ScatterRing


def arrange(program: Jaxpr, splits: Splits) -> list[Item]:
    """The equations of a program in an order in which they can run, with rings in place of what they cover."""
    scatters = _scatters(program, splits)
    covered = {id(eqn) for ring in scatters for eqn in ring.covered}
    eqns = [eqn for eqn in program.eqns if id(eqn) not in covered]
    gathers = _gathers(program, eqns, splits)
    while True:
        ordered = _in_order(program, [*scatters, *gathers])
        if ordered is not None:
            return ordered
        # Two rings wait for each other.
        gathers.pop()


def _free_dimension(eqn: JaxprEqn, side: int, dimension: int) -> int | None:
    """The dimension of a product's output that is a dimension of one operand; None where it is contracted."""
    contracted, batch = eqn.params["dimension_numbers"]
    if dimension in batch[side]:
        return batch[side].index(dimension)
    if dimension in contracted[side]:
        return None
    free = [[d for d in range(a.aval.ndim) if d not in (*contracted[n], *batch[n])] for n, a in enumerate(eqn.invars)]
    return len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(dimension)


def _gathers(program: Jaxpr, eqns: Sequence[JaxprEqn], splits: Splits) -> list[GatherRing]:
    """Rings for values that only products need whole."""
    readers: dict[Var, list[tuple[JaxprEqn, int]]] = {}
    for eqn in eqns:
        for n, a in enumerate(eqn.invars):
            if splits.needs_whole(eqn, n):
                readers.setdefault(a, []).append((eqn, n))
    found = []
    for value, own in readers.items():
        place = splits.of(value)
        products = [_gathered(eqn, n, place, splits) for eqn, n in own]
        if not isinstance(place, Split) or any(p is None for p in products):
            continue
        rest = [p for p in products if p is not None]
        while rest:
            together: list[RingProduct] = []
            after: set[Var] = set()
            for product in rest:
                if not after & _reached(program, product.eqn):
                    together.append(product)
                    after.add(product.eqn.outvars[0])
            found.append(GatherRing(value, place.dimension, tuple(together)))
            rest = [p for p in rest if p not in together]
    return found


def _reached(program: Jaxpr, last: JaxprEqn) -> Set[Var]:
    """All variables that an equation depends on."""
    defined, found = defining_equations(program.eqns), set()
    pending = [a for a in last.invars if isinstance(a, Var)]
    while pending:
        var = pending.pop()
        if var not in found:
            found.add(var)
            if var in defined:
                pending += [a for a in program.eqns[defined[var][0]].invars if isinstance(a, Var)]
    return found


def _gathered(eqn: JaxprEqn, side: int, place, splits: Splits) -> RingProduct | None:
    if eqn.primitive.name != "dot_general" or not isinstance(place, Split) or not place.tokens:
        return None
    other = eqn.invars[1 - side]
    _, batch = eqn.params["dimension_numbers"]
    if other is eqn.invars[side] or not isinstance(other, Var) or place.dimension in batch[side]:
        return None
    # What is split is a dimension that the other operand leaves free: the result needs no sum.
    if not isinstance(splits.operand(eqn, 1 - side), Split) or not isinstance(splits.of(eqn.outvars[0]), Split):
        return None
    if splits.place[eqn.outvars[0]] is SUM:
        return None
    return RingProduct(eqn, side, place.dimension, _free_dimension(eqn, side, place.dimension))


def _scatters(program: Jaxpr, splits: Splits) -> list[ScatterRing]:
    """Rings for sums of products that are dealt out along their tokens."""
    defined = defining_equations(program.eqns)
    found = []
    for eqn in program.eqns:
        for var in eqn.outvars:
            place = splits.settled.get(var)
            if splits.place.get(var) is not SUM or not isinstance(place, Split):
                continue
            terms, covered = _terms(program, defined, var, splits)
            products = [_scattered(t, place.dimension, splits) for t in terms or ()]
            if products and all(p is not None for p in products):
                ring = ScatterRing(var, place.dimension, tuple(p for p in products if p is not None), tuple(covered))
                found.append(ring)
    return found


def _terms(program: Jaxpr, defined, var: Var, splits: Splits) -> tuple[list[JaxprEqn] | None, list[JaxprEqn]]:
    """The products that are added up to a variable, and all equations on the way; None where it is made of something else."""
    if var not in defined:
        return None, []
    eqn = program.eqns[defined[var][0]]
    if eqn.primitive.name == "dot_general":
        return [eqn], [eqn]
    if eqn.primitive.name not in CASTS | ADDS:
        return None, []
    terms, covered = [], [eqn]
    for a in eqn.invars:
        if not isinstance(a, Var) or splits.of(a) is not SUM:
            return None, []
        own, there = _terms(program, defined, a, splits)
        if own is None:
            return None, []
        terms += own
        covered += there
    return terms, covered


def _scattered(eqn: JaxprEqn, dimension: int, splits: Splits) -> RingProduct | None:
    """A product whose output is dealt out along a dimension, by the operand that has it."""
    if not all(isinstance(a, Var) and isinstance(splits.operand(eqn, n), Split) for n, a in enumerate(eqn.invars)):
        return None
    if any(splits.needs_whole(eqn, n) for n in (0, 1)):
        return None
    for side in (0, 1):
        _, batch = eqn.params["dimension_numbers"]
        for d in range(eqn.invars[side].aval.ndim):
            if d not in batch[side] and _free_dimension(eqn, side, d) == dimension:
                return RingProduct(eqn, side, d, dimension)
    return None


def _in_order(program: Jaxpr, rings: Sequence[GatherRing | ScatterRing]) -> list[Item] | None:
    """Equations and rings, each after what it reads; None where rings wait for each other."""
    ring_of: dict[int, GatherRing | ScatterRing] = {}
    for ring in rings:
        for eqn in ring.covered if isinstance(ring, ScatterRing) else [p.eqn for p in ring.products]:
            ring_of[id(eqn)] = ring
    items: dict[int, tuple[int, Item]] = {}
    for n, eqn in enumerate(program.eqns):
        item = ring_of.get(id(eqn), eqn)
        items[id(item)] = (n, item)
    made = {v: id(item) for _, item in items.values() for v in item.outvars}
    waits = {
        key: {made[a] for a in item.invars if isinstance(a, Var) and a in made} - {key}
        for key, (_, item) in items.items()
    }
    readers: dict[int, list[int]] = {}
    for key, needed in waits.items():
        for n in needed:
            readers.setdefault(n, []).append(key)
    ready = [(items[key][0], key) for key, needed in waits.items() if not needed]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, key = heapq.heappop(ready)
        ordered.append(items[key][1])
        for reader in readers.get(key, ()):
            waits[reader].discard(key)
            if not waits[reader]:
                heapq.heappush(ready, (items[reader][0], reader))
    return ordered if len(ordered) == len(items) else None


def without_repeats(program: Jaxpr) -> Jaxpr:
    """The program without casts of a value that was cast before: readers of either then read one value."""
    seen: dict[tuple, Var] = {}
    rename: dict[Var, Var] = {}
    eqns = []
    for eqn in program.eqns:
        eqn = eqn.replace(invars=[rename.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])
        if eqn.primitive.name in CASTS and isinstance(eqn.invars[0], Var):
            key = (eqn.invars[0], str(eqn.params["new_dtype"]), eqn.params["weak_type"])
            if key in seen:
                rename[eqn.outvars[0]] = seen[key]
                continue
            seen[key] = eqn.outvars[0]
        eqns.append(eqn)
    outvars = [rename.get(a, a) if isinstance(a, Var) else a for a in program.outvars]
    return make_jaxpr(program.constvars, program.invars, outvars, eqns)
