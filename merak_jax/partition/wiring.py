"""Equal segments of a program as a chain of blocks: what each operand of a block is, compared over all segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.partition.chain import BATCH, BOTH, Chain, LaneSlot, PlacedChain
from merak_jax.partition.fingerprint import equation_shape, same_literal
from merak_jax.partition.outputs import block_number, collect, taken
from merak_jax.tracing.jaxprs import Atom, is_dropped, make_jaxpr


class MismatchError(Exception):
    """Two blocks are wired differently."""


class Wiring:
    """Segments of `program` with equal equations, up to renaming, and how the values in them belong together.

    `domain`: per variable what it depends on. `defined`: per variable the equation of `program` that makes it.
    """

    def __init__(
        self,
        program: Jaxpr,
        domain: Mapping[Var, int],
        defined: Mapping[Var, tuple[int, int]],
        segments: Sequence[Sequence[JaxprEqn]],
    ):
        self.program, self.domain, self.defined, self.segments = program, domain, defined, segments
        # Of a value made in a segment: the segment, the equation, the output.
        self.where: dict[Var, tuple[int, int, int]] = {
            v: (k, j, o)
            for k, segment in enumerate(segments)
            for j, e in enumerate(segment)
            for o, v in enumerate(e.outvars)
            if not is_dropped(v)
        }
        # A value of the carry is known by its (equation, output) in the block before, or, passed through, by its variable.
        self.carry_init: dict[Any, Atom] = {}
        self.carry_in: dict[Any, Var] = {}
        self.lanes: dict[tuple, tuple[Var, tuple[Atom, ...]]] = {}
        self.shared: dict[Var, None] = {}
        self.rows: dict[Var, None] = {}
        self.renamed: dict[Atom, Var] = {}
        self.made_inside: dict[tuple, Var] = {}
        self.body_eqns: list[JaxprEqn] = []

    def chain(self, later: Sequence[Atom]) -> PlacedChain:
        """The chain; MismatchError if the segments are wired differently. `later`: what is read behind the last segment."""
        for j, eqn in enumerate(self.segments[1]):
            operands = [self._operand(j, i) for i in range(len(eqn.invars))]
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            self.renamed.update((v, new) for v, new in zip(eqn.outvars, outvars) if not is_dropped(v))
            self.body_eqns.append(eqn.replace(invars=operands, outvars=outvars))
        if not any(isinstance(key, tuple) for key in self.carry_init):
            raise self._mismatch(0, "starts a block that reads nothing of the block before: they stand side by side")
        return self._placed([a for a in later if isinstance(a, Var)])

    # What an operand of the block is.

    def _operand(self, j: int, i: int) -> Atom:
        """Operand i of equation j of the block."""
        atoms = tuple(segment[j].invars[i] for segment in self.segments)
        places: list[Any] = [self.where.get(a) if isinstance(a, Var) else None for a in atoms]
        if all(p is not None and p[0] == k for k, p in enumerate(places)):
            if len({p[1:] for p in places}) != 1:
                raise self._mismatch(j, "reads another value of its own block than in other blocks")
            return self.renamed[atoms[1]]
        if all(p is not None and p[0] == k - 1 for k, p in enumerate(places) if k > 0):
            if len({p[1:] for p in places[1:]}) != 1 or places[0] is not None:
                raise self._mismatch(j, "reads another value of the block before than in other blocks")
            return self._carried(places[1][1:], atoms[0])
        if any(p is not None for p in places):
            raise self._mismatch(j, "reads a value of an earlier block in some blocks only, or of a block further back")
        first = atoms[0]
        if all(isinstance(a, Literal) for a in atoms):
            return first if all(same_literal(first, a) for a in atoms) else self._lane(atoms)
        if any(isinstance(a, Literal) for a in atoms):
            raise self._mismatch(j, "reads a constant in some blocks and a value in others")
        if all(a is first for a in atoms):
            return self._carried(first, first) if self.domain[first] == BOTH else self._same_for_all(first)
        if not any(self.domain[a] & BATCH for a in atoms):
            return self._lane(atoms)
        made = self._made_in_block(atoms)
        if made is None:
            raise self._mismatch(j, "reads a value made of the batch that differs from block to block")
        return made

    def _carried(self, key: Any, initial: Atom) -> Var:
        """A value that the block gets from the block before; `initial` is the first block's."""
        if self.carry_init.setdefault(key, initial) is not initial:
            raise MismatchError("the first block reads two values where later blocks read one")
        return self.carry_in.setdefault(key, _compat.new_var(initial.aval))

    def _same_for_all(self, var: Var) -> Var:
        (self.rows if self.domain[var] & BATCH else self.shared).setdefault(var)
        return var

    def _lane(self, atoms: tuple[Atom, ...]) -> Var:
        """An operand that differs from block to block."""
        key = tuple(a if isinstance(a, Var) else id(a) for a in atoms)
        if key not in self.lanes:
            self.lanes[key] = (_compat.new_var(atoms[0].aval), atoms)
        return self.lanes[key][0]

    def _made_in_block(self, atoms: tuple[Atom, ...]) -> Atom | None:
        """A value that each block makes of the batch in its own way (a dropout mask with the block's key), made in the block."""
        first = atoms[0]
        if all(isinstance(a, Literal) for a in atoms):
            return first if all(same_literal(first, a) for a in atoms) else self._lane(atoms)
        if any(isinstance(a, Literal) for a in atoms):
            return None
        if all(a is first for a in atoms):
            return None if self.domain[first] == BOTH else self._same_for_all(first)
        if not any(self.domain[a] & BATCH for a in atoms):
            return self._lane(atoms)
        if atoms in self.made_inside:
            return self.made_inside[atoms]
        places: list[Any] = [self.defined.get(a) for a in atoms]
        if any(p is None for p in places) or len({p[1] for p in places}) > 1:
            return None
        eqns = [self.program.eqns[p[0]] for p in places]
        alike = len({equation_shape(e) for e in eqns}) == 1 and not eqns[0].effects
        if not alike or any(self.domain[a] == BOTH for a in atoms):
            return None
        operands = [self._made_in_block(column) for column in zip(*(e.invars for e in eqns))]
        if any(o is None for o in operands):
            return None
        outvars = [_compat.new_var(v.aval) for v in eqns[0].outvars]
        self.body_eqns.append(eqns[0].replace(invars=operands, outvars=outvars))
        self.made_inside.update(zip(zip(*(e.outvars for e in eqns)), outvars))
        return self.made_inside[atoms]

    def _mismatch(self, j: int, what: str) -> MismatchError:
        eqn = self.segments[1][j]
        line = _compat.source_line(eqn)
        return MismatchError(f"of {len(self.segments)} equal blocks, `{eqn.primitive.name}` at {line} {what}")

    # The chain, and what is read of it later.

    def _placed(self, later: Sequence[Var]) -> PlacedChain:
        segments, last = self.segments, len(self.segments) - 1
        keys = list(self.carry_init)
        positions = {key: n for n, key in enumerate(keys)}
        invars = [self.carry_in[key] for key in keys]
        out = [self._made(key) if isinstance(key, tuple) else self.carry_in[key] for key in keys]
        initial: list[Any] = [self.carry_init[key] for key in keys]
        of_last = {v: self.where[v][1:] for v in later if v in self.where and self.where[v][0] == last}
        for key, v in {key: v for v, key in of_last.items() if key not in positions}.items():
            # Read after the last block only: its place in the carry starts as zeros.
            positions[key] = len(invars)
            invars.append(_compat.new_var(v.aval))
            out.append(self._made(key))
            initial.append(None)
        final: dict[Var, int] = {v: positions[key] for v, key in of_last.items()}
        after: list[JaxprEqn] = []
        for key, members in self._read_of_earlier_blocks(later).items():
            made = self._made(key)
            number = self._lane(tuple(block_number(k) for k in range(len(segments))))
            buffer, written, kept = collect(made.aval, made, number, len(segments))
            self.body_eqns += written
            final[kept] = len(invars)
            invars.append(buffer)
            out.append(written[-1].outvars[0])
            initial.append(None)
            for v in sorted(members, key=self.where.__getitem__):
                after += taken(kept, self.where[v][0], v)
        final.update((key, positions[key]) for key in keys if isinstance(key, Var))
        lane_vars = [v for v, _ in self.lanes.values()]
        slots = tuple(LaneSlot(values=atoms) for _, atoms in self.lanes.values())
        body = make_jaxpr([], [*invars, *lane_vars, *self.shared, *self.rows], out, self.body_eqns)
        identity = make_jaxpr([], [*lane_vars, *self.shared], lane_vars, [])
        chain = Chain(
            len(segments),
            body,
            len(invars),
            slots,
            identity,
            tuple(self.shared),
            tuple(self.rows),
            _compat.source_line(segments[0][0]),
        )
        return PlacedChain(chain, tuple(initial), final, tuple(e for s in segments for e in s), tuple(after))

    def _made(self, key: tuple[int, int]) -> Var:
        """Output o of equation j of the block."""
        j, o = key
        return self.renamed[self.segments[1][j].outvars[o]]

    def _read_of_earlier_blocks(self, later: Sequence[Var]) -> dict[tuple[int, int], set[Var]]:
        """Per (equation, output) of the block, the values that other blocks than the last one made and that are read later."""
        found: dict[tuple[int, int], set[Var]] = {}
        for v in later:
            k, *key = self.where.get(v, (len(self.segments),))
            if k < len(self.segments) - 1:
                found.setdefault((key[0], key[1]), set()).add(v)
        # A layer under remat is one equation too.
        if found and len(self.segments[0]) < 2 and not _compat.sub_jaxprs(self.segments[0][0]):
            raise self._mismatch(
                0, "is all there is of a block whose value is read later: products in a row, and no layers"
            )
        return found
