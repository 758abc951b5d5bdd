"""Put chains together: what runs before, between and after them, and which slot of the carry every value has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from merak_jax import _compat
from merak_jax.partition.chain import BATCH, BOTH, Chain, PlacedChain
from merak_jax.tracing.jaxprs import Atom, make_jaxpr

if TYPE_CHECKING:
    from merak_jax.partition.blocks import BlockGraph


def is_free(eqn: JaxprEqn) -> bool:
    """Whether an equation costs nothing where it is read, so that its result is not worth keeping in memory.

    It makes a large value of a small one, or turns a matrix, which XLA folds into the product that reads it.
    """
    return eqn.primitive.name in ("iota", "transpose") or (
        eqn.primitive.name == "broadcast_in_dim"
        and _size(eqn.outvars[0]) > max((_size(a) for a in eqn.invars), default=0)
    )


def _size(atom: Any) -> int:
    return int(np.prod(atom.aval.shape))


def _with_free_inside(chain: Chain, program: Jaxpr) -> Chain:
    """The chain with what is free to make of shared values made inside the block."""
    free = {e.outvars[0]: e for e in program.eqns if is_free(e)}
    prepared = {a for e in chain.lane_prepare.eqns for a in e.invars if isinstance(a, Var)}
    shared, eqns = list(chain.shared), list(chain.body.eqns)
    while inside := [v for v in shared if v in free and v not in prepared]:
        shared.remove(inside[0])
        eqn = free[inside[0]]
        eqns.insert(0, eqn)
        shared.extend(a for a in eqn.invars if isinstance(a, Var) and a not in shared)
    body, prepare = chain.body, chain.lane_prepare
    lanes = len(prepare.outvars)
    invars = [*body.invars[: chain.num_carry + lanes], *shared, *chain.rows]
    raw = prepare.invars[: len(chain.slots)]
    return dataclasses.replace(
        chain,
        body=make_jaxpr([], invars, body.outvars, eqns),
        lane_prepare=make_jaxpr([], [*raw, *shared], prepare.outvars, prepare.eqns),
        shared=tuple(shared),
    )


class Slicer:
    """Cuts the programs of prologue, side inputs and epilogue out of the equations that the chain does not cover."""

    def __init__(self, program: Jaxpr, eqns: Sequence[JaxprEqn], domain: Mapping[Var, int]):
        self.eqns, self.domain = eqns, domain
        self.free = {v for e in eqns if is_free(e) for v in e.outvars}
        self.order = {v: n for n, v in enumerate([*program.invars, *(v for e in program.eqns for v in e.outvars)])}

    def cut(self, carry: Sequence[Var], rows: Sequence[Var], outputs) -> tuple[Jaxpr, tuple[Var, ...]]:
        """`[*carry, *shared, *rows] -> outputs` and the shared values it reads; KeyError if it reads inside the chain."""
        inputs = {*carry, *rows}
        shared: set[Var] = set()
        wanted: set[Var] = set()

        def want(atom):
            if isinstance(atom, Var) and atom not in inputs:
                (wanted if self.domain[atom] & BATCH or atom in self.free else shared).add(atom)

        for atom in outputs:
            want(atom)
        kept = []
        for eqn in reversed(self.eqns):
            if any(v in wanted for v in eqn.outvars):
                kept.append(eqn)
                wanted.difference_update(eqn.outvars)
                for atom in eqn.invars:
                    want(atom)
        if wanted:
            raise KeyError("a value inside the chain is read outside it")
        ordered = tuple(sorted(shared, key=self.order.__getitem__))
        return make_jaxpr([], [*carry, *ordered, *rows], list(outputs), kept[::-1]), ordered


def pipelined_outputs(program: Jaxpr, domain, rows_inputs) -> tuple[int, ...]:
    return tuple(
        i for i, a in enumerate(program.outvars) if isinstance(a, Var) and domain[a] & BATCH and a not in rows_inputs
    )


def assemble(program: Jaxpr, domain: Mapping[Var, int], parts: Sequence[PlacedChain]) -> BlockGraph | None:
    """The graph with these chains, in program order; None if a value inside a chain is read elsewhere."""
    from merak_jax.partition.blocks import BlockGraph

    rows = tuple(v for v in program.invars if domain[v] & BATCH)
    outputs = pipelined_outputs(program, domain, rows)
    parts = [dataclasses.replace(p, chain=_with_free_inside(p.chain, program)) for p in parts]
    try:
        plan = _Assembly(program, domain, parts, rows, [program.outvars[i] for i in outputs])
        prologue_slots = tuple(slot for slot, _ in plan.writes[0])
        prologue, prologue_shared = plan.slicer.cut((), rows, [atom for _, atom in plan.writes[0]])
        chains = plan.chains()
        last = plan.occupants[len(parts)]
        epilogue, epilogue_shared = plan.slicer.cut(last, rows, plan.outputs)
        side, side_shared = plan.slicer.cut((), rows, tuple(dict.fromkeys(v for c in chains for v in c.rows)))
    except KeyError:
        return None
    return BlockGraph(
        program,
        rows,
        prologue,
        prologue_slots,
        prologue_shared,
        tuple(chains),
        side,
        side_shared,
        epilogue,
        epilogue_shared,
        outputs,
    )


class _Assembly:
    """Decides which values cross each cut, and in which slot of the carry.

    A value has a level: 0 if it is made before the first chain or could be, k if it depends on what chain k returns (and on no
    later one). After chain k runs what of level k later chains need. `writes[k]`: `(slot, atom)` pairs that are written after
    chain k, for k = 0 by the prologue. `occupants[k]`: the variable in each slot when chain k is done.
    """

    def __init__(self, program: Jaxpr, domain, parts: Sequence[PlacedChain], rows, outputs: Sequence[Atom]):
        self.program, self.parts, self.rows, self.outputs = program, parts, rows, list(outputs)
        covered = {id(e) for part in parts for e in part.covered}
        last = {id(part.covered[-1]): part for part in parts}
        self.loose: list[JaxprEqn] = []
        for eqn in program.eqns:
            if id(eqn) in last:
                self.loose += last[id(eqn)].after
            elif id(eqn) not in covered:
                self.loose.append(eqn)
        new = {v: BOTH for part in parts for v in (*part.final, *(v for e in part.after for v in e.outvars))}
        self.domain = domain = {**new, **domain}
        self.slicer = Slicer(program, self.loose, domain)
        self.made_by = {v: e for e in self.loose for v in e.outvars}
        self.level: dict[Var, int] = dict.fromkeys(program.invars, 0)
        self.finals: list[set[Var]] = [set()]
        for k, part in enumerate(parts, 1):
            self.finals.append(set(part.final) - {a for a in part.initial if isinstance(a, Var)})
            self.level.update((v, k) for v in self.finals[k])
        for eqn in self.loose:
            below = [self.level.get(a) for a in eqn.invars if isinstance(a, Var)]
            # What reads a value inside a chain has no level: nothing outside the chain may need it.
            if None not in below:
                self.level.update((v, max((n for n in below if n is not None), default=0)) for v in eqn.outvars)
        self._needs()
        self._slots()

    def _leaves(self, atoms: Iterable[Atom], stop) -> dict[Var, None]:
        """The values, of parameters and batch both, that `atoms` are made of, down to where `stop(v)` holds."""
        found: dict[Var, None] = {}
        pending, seen = list(atoms), set()
        while pending:
            atom = pending.pop()
            if not isinstance(atom, Var) or atom in seen or self.domain[atom] != BOTH:
                continue
            seen.add(atom)
            if stop(atom):
                found[atom] = None
            else:
                pending.extend(self.made_by[atom].invars)
        return found

    def _needs(self) -> None:
        """`between[k]`: values that are there when chain k is done; `after[k]`: those that must be there for chain k + 1."""
        count = len(self.parts)
        need = self._leaves(self.outputs, lambda v: self.level[v] == 0 or v in self.finals[self.level[v]])
        self.between: list[dict[Var, None]] = [{}] * (count + 1)
        self.after: list[dict[Var, None]] = [{}] * (count + 1)
        for k in range(count, 0, -1):
            self.after[k] = need
            made = [v for v in need if self.level[v] == k and v not in self.finals[k]]
            here = {v: None for v in need if v not in made}
            here.update(self._leaves(made, lambda v, k=k: self.level[v] < k or v in self.finals[k]))
            self.between[k] = here
            initial = [a for a in self.parts[k - 1].initial if isinstance(a, Var) and self.domain[a] == BOTH]
            need = {**{v: None for v in here if self.level[v] < k}, **dict.fromkeys(initial)}
            if any(self.level[v] >= k for v in need):
                raise KeyError("a chain starts from a value that is made after it")
        self.after[0] = need

    def _slots(self) -> None:
        self.avals: list[Any] = []
        self.writes: list[list[tuple[int, Atom]]] = [[] for _ in range(len(self.parts) + 1)]
        self.occupants: list[list[Var]] = [[] for _ in self.writes]
        self.slots_of_chain: list[list[int]] = []
        slot_of: dict[Var, int] = {}

        def fresh(aval: Any, taken: Iterable[int]) -> int:
            used = {*slot_of.values(), *taken}
            for slot, own in enumerate(self.avals):
                if slot not in used and (own.shape, own.dtype) == (aval.shape, aval.dtype):
                    return slot
            self.avals.append(aval)
            return len(self.avals) - 1

        for v in self.after[0]:
            slot_of[v] = fresh(v.aval, ())
            self.writes[0].append((slot_of[v], v))
        for k, part in enumerate(self.parts, 1):
            slots: list[int] = []
            for a, aval, same in zip(part.initial, part.chain.carry_avals, part.chain.unchanged):
                own = slot_of.get(a) if isinstance(a, Var) else None
                # A chain may overwrite its first value where nobody needs it any more.
                if own is not None and own not in slots and (same or a not in self.between[k]):
                    slots.append(own)
                    continue
                slots.append(fresh(aval, slots))
                if a is not None:
                    self.writes[k - 1].append((slots[-1], a))
            self.slots_of_chain.append(slots)
            for v, place in part.final.items():
                if v in self.between[k]:
                    slot_of[v] = slots[place]
            slot_of = {v: s for v, s in slot_of.items() if v in self.between[k]}
            self.occupants[k] = self._occupants(slot_of)
            for v in self.after[k]:
                if v not in slot_of:
                    slot_of[v] = fresh(v.aval, ())
                    self.writes[k].append((slot_of[v], v))
            slot_of = {v: s for v, s in slot_of.items() if v in self.after[k]}
        for occupants in self.occupants:
            occupants.extend(_compat.new_var(aval) for aval in self.avals[len(occupants) :])

    def _occupants(self, slot_of: Mapping[Var, int]) -> list[Var]:
        found = [_compat.new_var(aval) for aval in self.avals]
        for v, slot in slot_of.items():
            found[slot] = v
        return found

    def chains(self) -> list[Chain]:
        """The chains on the common carry, and what stands between them."""
        found = []
        for k, (part, slots) in enumerate(zip(self.parts, self.slots_of_chain), 1):
            if k > 1 and self.writes[k - 1]:
                found.append(self._between_chains(k - 1))
            found.append(part.chain.in_slots(slots, self.avals))
        return found

    def _between_chains(self, k: int) -> Chain:
        """A chain of one block: what runs between chain k and the next one."""
        before: list[Any] = list(self.occupants[k])
        after: list[Any] = list(before)
        for slot, atom in self.writes[k]:
            after[slot] = atom
        changed = [slot for slot, _ in self.writes[k]]
        body, shared = self.slicer.cut(before, self.rows, [after[slot] for slot in changed])
        read = {a for e in body.eqns for a in e.invars if isinstance(a, Var)} | {
            a for a in body.outvars if isinstance(a, Var)
        }
        rows = tuple(v for v in self.rows if v in read)
        made = dict(zip(changed, body.outvars))
        outvars = [made.get(slot, v) for slot, v in enumerate(before)]
        jaxpr = make_jaxpr([], [*before, *shared, *rows], outvars, body.eqns)
        source = _compat.source_line(body.eqns[0]) if body.eqns else ""
        return Chain(1, jaxpr, len(before), (), make_jaxpr([], shared, [], []), shared, rows, source)
