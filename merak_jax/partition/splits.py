"""Follow splits over `tensor` through the forward and backward of a block: where each value is, what has to move.

The layout says how parameters are split, the residual stream is split along its tokens or whole. From there every
equation either works on the parts that its operands have, or needs one of them whole. Its results are split like its
operands, or are sums over `tensor`: then the tokens are dealt out as they are summed (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2), or, where the sum is a gradient of a
parameter that is whole, every device keeps its own part of it until the end of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax.partition.follow import EquationClasses, equation_classes
from merak_jax.tracing.jaxprs import Atom


class Split(NamedTuple):
    """A value is split over `tensor` along a dimension: the tokens of the residual stream, or features of the layout."""

    dimension: int
    tokens: bool


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place that is no split."""

    name: str

    def __repr__(self) -> str:
        return self.name


WHOLE = _Place("WHOLE")
# Parts that no single dimension tells; the compiler follows them.
FREE = _Place("FREE")
# Each device has a part of a sum: the sum is what SUM stands for, and LOCAL a sum that is taken when the step ends.
SUM = _Place("SUM")
LOCAL = _Place("LOCAL")
Place = Split | _Place

# What makes a sum of which every device can make its own part; and what may be done to the parts before they are summed.
PRODUCTS = frozenset({"dot_general", "reduce_sum"})
CASTS = frozenset({"convert_element_type"})
ADDS = frozenset({"add", "add_any"})
# And to the parts of a gradient that is summed when the step ends: one value in another shape.
_VIEWS = CASTS | {"transpose", "reshape", "squeeze", "neg", "copy"}


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """Where the values of a program are.

    `place`: of each variable; SUM only between the products that are added up and the equation that settles the sum.
    `settled`: sums that are taken where they are made, and how the result is split. `operands`: of each equation that works
    on parts, by its id, how its operands are split for it. `grouped`: as in BlockLayout. `size`: T.
    """

    place: Mapping[Var, Place]
    settled: Mapping[Var, Place]
    operands: Mapping[int, tuple[Place, ...]]
    grouped: frozenset[tuple[int, int]]
    size: int

    def of(self, atom: Atom) -> Place:
        """The place of a variable where others read it; literals are whole."""
        if isinstance(atom, Literal):
            return WHOLE
        place = self.place.get(atom, FREE)
        return self.settled[atom] if place is SUM and atom in self.settled else place

    def needs_whole(self, eqn: JaxprEqn, operand: int) -> bool:
        """Whether an equation needs an operand whole, or split along another dimension, that is split."""
        place, taken = self.of(eqn.invars[operand]), self.operand(eqn, operand)
        return isinstance(place, Split) and not (isinstance(taken, Split) and taken.dimension == place.dimension)

    def operand(self, eqn: JaxprEqn, operand: int) -> Place:
        """How an equation takes an operand."""
        return self.operands[id(eqn)][operand] if id(eqn) in self.operands else WHOLE


# Of a program that one device along `tensor` runs.
NO_SPLITS = Splits({}, {}, {}, frozenset(), 1)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How the inputs of a block are split over `tensor`.

    `lanes`: per lane operand the dimension of its features that is split; `tokens`: per value of the carry the dimension of its
    tokens. `sequence`: whether the carry is split along them between blocks; `deals`: whether sums inside are dealt out along them.
    `grouped`: reshapes behind which both dimensions are split together, see TensorLayout. `size`: T.
    """

    lanes: tuple[int | None, ...]
    tokens: tuple[int | None, ...]
    sequence: bool
    deals: bool
    grouped: frozenset[tuple[int, int]]
    size: int

    def carry(self) -> list[Place]:
        """Where the carry is between blocks."""
        return [Split(d, True) if self.sequence and d is not None else WHOLE for d in self.tokens]

    def inputs(self, count: int, num_carry: int) -> tuple[list[Place], list[int | None]]:
        """Where the `count` operands of a block are, and their tokens: the carry, the lanes, and others that are whole."""
        lanes: list[Place] = [WHOLE if d is None else Split(d, False) for d in self.lanes]
        others = count - num_carry - len(lanes)
        return [*self.carry(), *lanes, *[WHOLE] * others], [*self.tokens, *[None] * (len(lanes) + others)]


def follow_splits(
    program: Jaxpr,
    places: Sequence[Place],
    tokens: Sequence[int | None],
    layout: BlockLayout,
    *,
    kept: Set[Var] = frozenset(),
    gradients: Set[Var] = frozenset(),
) -> Splits:
    """Walk over a program; with one device along `tensor` nothing is split.

    Args:
      places: of its inputs, WHOLE or a Split.
      tokens: of its inputs, the dimension along which the residual stream could be split.
      layout: of the block; whether sums are dealt out along their tokens.
      kept: variables that are stored: sums among them are taken.
      gradients: outputs that may stay LOCAL.
    """
    return NO_SPLITS if layout.size == 1 else _Walk(program, places, tokens, layout, kept, gradients).run()


class _Walk:
    def __init__(self, program, places, tokens, layout, kept, gradients):
        self.program, self.layout, self.kept, self.gradients = program, layout, kept, gradients
        self.size = layout.size
        self.place: dict[Var, Place] = dict(zip(program.invars, places))
        self.tokens: dict[Var, frozenset[int]] = {
            v: frozenset() if d is None else frozenset({d}) for v, d in zip(program.invars, tokens)
        }
        self.settled: dict[Var, Place] = {}
        self.operands: dict[int, tuple[Place, ...]] = {}
        self.uses: dict[Var, list[JaxprEqn | None]] = {}
        for eqn in program.eqns:
            for a in eqn.invars:
                if isinstance(a, Var):
                    self.uses.setdefault(a, []).append(eqn)
        for a in program.outvars:
            if isinstance(a, Var):
                self.uses.setdefault(a, []).append(None)

    def run(self) -> Splits:
        for eqn in self.program.eqns:
            self._equation(eqn)
        for a in self.program.outvars:
            if isinstance(a, Var) and self.place.get(a) is SUM:
                self._settle(a)
        return Splits(self.place, self.settled, self.operands, self.layout.grouped, self.size)

    def _of(self, atom: Atom) -> Place:
        return WHOLE if isinstance(atom, Literal) else self.settled.get(atom, self.place[atom])

    def _equation(self, eqn: JaxprEqn) -> None:
        name, found = eqn.primitive.name, equation_classes(eqn)
        own = [self._of(a) for a in eqn.invars]
        for v, dims in zip(eqn.outvars, found.outs):
            tokens_here = {
                found.operands[n][d]
                for n, a in enumerate(eqn.invars)
                if isinstance(a, Var)
                for d in self.tokens[a]
                if found.operands[n][d] is not None
            } - found.opaque
            self.tokens[v] = frozenset(d for d, c in enumerate(dims) if c in tokens_here)
        if any(p is LOCAL for p in own):
            # What a gradient goes through on its way out was looked at when it became one.
            self.place.update((v, LOCAL) for v in eqn.outvars)
            self.operands[id(eqn)] = tuple(own)
            return
        sums = [p is SUM for p in own]
        if any(sums):
            if name in CASTS or (name in ADDS and all(sums)):
                self.operands[id(eqn)] = tuple(own)
                self._sum(eqn.outvars[0], of_parts=True)
                return
            for a in eqn.invars:
                if isinstance(a, Var) and self.place[a] is SUM:
                    self._settle(a)
            own = [self._of(a) for a in eqn.invars]
        split = self._split(eqn, found, own)
        along, tokens = split or (None, False)
        taken: list[Place] = []
        for a, p, dims in zip(eqn.invars, own, found.operands):
            where = [d for d, c in enumerate(dims) if c == along] if split is not None else []
            if where and a.aval.shape[where[0]] % self.size == 0:
                taken.append(Split(where[0], tokens))
            else:
                taken.append(FREE if p is FREE else WHOLE)
        self.operands[id(eqn)] = tuple(taken)
        summed = split is not None and along in found.summed
        free = any(p is FREE for p in own)
        for v, dims in zip(eqn.outvars, found.outs):
            where = [d for d, c in enumerate(dims) if c == along] if split is not None else []
            if where:
                divides = v.aval.shape[where[0]] % self.size == 0
                self.place[v] = Split(where[0], tokens) if divides else FREE
            elif summed and _is_real(v) and not name.startswith(("reduce_max", "reduce_min", "reduce_prod")):
                self._sum(v, of_parts=name in PRODUCTS)
            else:
                self.place[v] = FREE if free and split is None else WHOLE

    def _split(self, eqn: JaxprEqn, found: EquationClasses, own: Sequence[Place]) -> tuple[int, bool] | None:
        """The class of dimensions along which an equation works on parts, features before tokens, and whether it is tokens."""
        candidates = []
        for n, p in enumerate(own):
            if not isinstance(p, Split):
                continue
            c = found.operands[n][p.dimension]
            if c is not None and self._can_be_split(eqn, found, c, p):
                candidates.append((p.tokens, -_elements(eqn.invars[n]), n, c))
        if not candidates:
            return None
        tokens, _, _, c = min(candidates)
        return c, tokens

    def _can_be_split(self, eqn: JaxprEqn, found: EquationClasses, c: int, p: Split) -> bool:
        if c in found.opaque:
            return False
        for v, dims in zip((*eqn.invars, *eqn.outvars), (*found.operands, *found.outs)):
            where = [d for d, k in enumerate(dims) if k == c]
            if len(where) > 1:
                return False
            # A head that is a group of heads: (8, 4) over 16 devices.
            if where and v.aval.shape[where[0]] % self.size and (p.tokens or eqn.primitive.name != "reshape"):
                return False
        return True

    def _sum(self, var: Var, of_parts: bool = False) -> None:
        """`var` is a sum over `tensor`."""
        if of_parts and self._leaves_as_gradient(var):
            self.place[var] = LOCAL
            return
        self.place[var] = SUM
        uses = self.uses.get(var, [])
        if not of_parts or var in self.kept or len(uses) != 1 or uses[0] is None:
            self._settle(var)
        elif not self._is_added(uses[0]):
            self._settle(var)

    def _is_added(self, eqn: JaxprEqn) -> bool:
        """Whether an equation adds up, or casts what is then added; a last cast is made of the sum: the narrow type travels."""
        if eqn.primitive.name in ADDS:
            return True
        uses = self.uses.get(eqn.outvars[0], [])
        return eqn.primitive.name in CASTS and len(uses) == 1 and uses[0] is not None and self._is_added(uses[0])

    def _leaves_as_gradient(self, var: Var) -> bool:
        """Whether the only thing that becomes of a value is a gradient of a parameter, summed when the step ends."""
        while var not in self.kept:
            uses = self.uses.get(var, [])
            if uses == [None]:
                return var in self.gradients
            if len(uses) != 1 or uses[0] is None or uses[0].primitive.name not in _VIEWS:
                return False
            var = uses[0].outvars[0]
        return False

    def _settle(self, var: Var) -> None:
        """Take the sum here: dealt out along the tokens where it has some."""
        shape = var.aval.shape
        fitting = [d for d in self.tokens[var] if shape[d] % self.size == 0] if self.layout.deals else []
        best = max(fitting, key=lambda d: (shape[d], -d), default=None)
        self.settled[var] = WHOLE if best is None else Split(best, True)


def _is_real(var: Var) -> bool:
    return jax.dtypes.issubdtype(var.aval.dtype, jnp.inexact)


def _elements(atom: Atom) -> int:
    return int(jnp.size(atom.val)) if isinstance(atom, Literal) else atom.aval.size
