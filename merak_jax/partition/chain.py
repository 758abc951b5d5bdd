"""A chain of equal blocks: the program of one block, and what differs from block to block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from merak_jax import _compat
from merak_jax.tracing.jaxprs import Atom, make_jaxpr

# What a value of the program depends on.
PARAMETER, BATCH, BOTH = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class LaneSlot:
    """One operand that differs per block: `values[k]` for block k, or `stack` with block k at `stack[k]`."""

    values: tuple[Atom, ...] = ()
    stack: Var | None = None


@dataclasses.dataclass(frozen=True)
class Chain:
    """`length` equal blocks; `body` maps `[*carry, *lanes, *shared, *rows]` to the next carry.

    `lane_prepare` maps the raw lane slots and `shared` to the lane operands of `body`: what depends on parameters only.
    """

    length: int
    body: Jaxpr
    num_carry: int
    slots: tuple[LaneSlot, ...]
    lane_prepare: Jaxpr
    shared: tuple[Var, ...]
    rows: tuple[Var, ...]
    source: str

    @property
    def carry_avals(self) -> list:
        return [v.aval for v in self.body.invars[: self.num_carry]]

    def in_slots(self, slots: Sequence[int], avals: Sequence[Any]) -> Chain:
        """The chain on a wider carry: value n of the own carry is value `slots[n]` of it, the others go through unchanged."""
        n, body = self.num_carry, self.body
        invars = [_compat.new_var(aval) for aval in avals]
        outvars: list[Atom] = list(invars)
        for slot, var, out in zip(slots, body.invars, body.outvars):
            invars[slot], outvars[slot] = var, out
        body = make_jaxpr([], [*invars, *body.invars[n:]], outvars, body.eqns)
        return dataclasses.replace(self, body=body, num_carry=len(invars))

    @property
    def unchanged(self) -> tuple[bool, ...]:
        """Which values of the carry go through every block unchanged."""
        return tuple(a is b for a, b in zip(self.body.invars, self.body.outvars))

    @functools.cached_property
    def unread(self) -> tuple[bool, ...]:
        """Which values of the carry no derivative of a block depends on: unchanged and unread, added to, or written into."""
        uses: dict[Var, list[tuple[JaxprEqn, int]]] = {}
        for eqn in self.body.eqns:
            for i, a in enumerate(eqn.invars):
                if isinstance(a, Var):
                    uses.setdefault(a, []).append((eqn, i))

        def only_collects(var: Var, out: Any) -> bool:
            if len(uses.get(var, ())) != 1:
                return not uses.get(var) and out is var
            eqn, i = uses[var][0]
            collects = eqn.primitive.name in ("add", "add_any") or (
                eqn.primitive.name == "dynamic_update_slice" and i == 0
            )
            return collects and out is eqn.outvars[0] and not uses.get(out)

        return tuple(map(only_collects, self.body.invars[: self.num_carry], self.body.outvars))


def stashed_once(chains: Sequence[Chain]) -> tuple[bool, ...]:
    """Which values of the carry a backward pass over all blocks needs once: no block changes them, or no derivative reads them."""
    return tuple(
        all(c.unchanged[n] for c in chains) or all(c.unread[n] for c in chains) for n in range(chains[0].num_carry)
    )


@dataclasses.dataclass(frozen=True)
class PlacedChain:
    """A chain and its place in the program: the carry's first values (None: zeros), where each value that is read
    later stands in the last carry, the equations that the chain covers, and equations that make more of the last carry:
    values of single blocks, taken out of an array that all blocks wrote to."""

    chain: Chain
    initial: tuple[Atom | None, ...]
    final: dict[Var, int]
    covered: tuple[JaxprEqn, ...]
    after: tuple[JaxprEqn, ...] = ()
