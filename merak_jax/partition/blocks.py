"""Cut a loss into prologue, a chain of equal blocks, and epilogue, with what each reads besides the carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.partition.chains import BATCH, BOTH, Chain, PlacedChain, find_chains
from merak_jax.partition.fingerprint import equation_shape
from merak_jax.tracing.inline import make_jaxpr
from merak_jax.tracing.jaxprs import is_dropped


@dataclasses.dataclass(frozen=True)
class BlockGraph:
    """A loss cut into `prologue`, `chain`, `epilogue`.

    `prologue`: `[*prologue_shared, *rows_inputs]` -> the carry slots `prologue_slots` (the other slots start as zeros);
    `epilogue`: `[*carry, *epilogue_shared, *rows_inputs]` -> the loss's outputs numbered `epilogue_outputs`;
    `side`: `[*side_shared, *rows_inputs]` -> `chain.rows`. Shared values depend on parameters or constants only; rows inputs
    are the batch of one microbatch. Without a chain (`chain is None`) everything is epilogue.
    `program` is the loss itself, with equal equations merged. `obstacle`: without a chain, why the longest run of equal blocks
    is none.
    """

    program: Jaxpr
    rows_inputs: tuple[Var, ...]
    prologue: Jaxpr
    prologue_slots: tuple[int, ...]
    prologue_shared: tuple[Var, ...]
    chain: Chain | None
    side: Jaxpr
    side_shared: tuple[Var, ...]
    epilogue: Jaxpr
    epilogue_shared: tuple[Var, ...]
    epilogue_outputs: tuple[int, ...]
    obstacle: str = ""

    @property
    def blocks(self) -> Chain:
        """The chain, where there must be one."""
        assert self.chain is not None
        return self.chain

    def __str__(self) -> str:
        if self.chain is None:
            return f"no repeated blocks; {len(self.epilogue.eqns)} equations"
        carry = ", ".join(v.str_short() for v in self.chain.carry_avals)
        return (
            f"prologue ({len(self.prologue.eqns)} equations) -> {self.chain.length} blocks of "
            f"{len(self.chain.body.eqns)} equations, carry {carry} -> epilogue ({len(self.epilogue.eqns)} equations)"
        )


def find_blocks(program: Jaxpr, input_domain: Mapping[Var, int]) -> BlockGraph:
    """Cut `program` (flat, without constants) at its chain of equal blocks that covers most equations.

    `input_domain` says for each input whether it is PARAMETER, BATCH (one microbatch's rows) or neither (0).
    """
    program = _without_common_subexpressions(program, dependence(program, input_domain))
    domain = dependence(program, input_domain)
    obstacles: list[str] = []
    for placed in find_chains(program, domain, obstacles):
        graph = _assemble(program, domain, placed)
        if graph is not None:
            return graph
    return dataclasses.replace(_whole(program, domain), obstacle=obstacles[0] if obstacles else "")


def dependence(program: Jaxpr, input_domain: Mapping[Var, int]) -> dict[Var, int]:
    """For each variable the union of what its inputs depend on."""
    domain = dict(input_domain)
    for eqn in program.eqns:
        bits = 0
        for a in eqn.invars:
            if isinstance(a, Var):
                bits |= domain[a]
        domain.update((v, bits) for v in eqn.outvars)
    return domain


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


class _Slicer:
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


def _pipelined_outputs(program: Jaxpr, domain, rows_inputs) -> tuple[int, ...]:
    return tuple(
        i for i, a in enumerate(program.outvars) if isinstance(a, Var) and domain[a] & BATCH and a not in rows_inputs
    )


def whole(graph: BlockGraph, input_domain: Mapping[Var, int]) -> BlockGraph:
    """The same loss without a chain, for one stage: the user's own program."""
    return _whole(graph.program, dependence(graph.program, input_domain))


def _whole(program: Jaxpr, domain) -> BlockGraph:
    rows = tuple(v for v in program.invars if domain[v] & BATCH)
    outputs = _pipelined_outputs(program, domain, rows)
    epilogue, shared = _Slicer(program, program.eqns, domain).cut((), rows, [program.outvars[i] for i in outputs])
    empty = make_jaxpr([], rows, [], [])
    return BlockGraph(program, rows, empty, (), (), None, empty, (), epilogue, shared, outputs)


def _assemble(program: Jaxpr, domain: Mapping[Var, int], placed: PlacedChain) -> BlockGraph | None:
    """The pieces before, inside and after the chain; None if a value inside the chain is read elsewhere."""
    chain, initial, final = _with_free_inside(placed.chain, program), list(placed.initial), dict(placed.final)
    rows = tuple(v for v in program.invars if domain[v] & BATCH)
    outputs = _pipelined_outputs(program, domain, rows)
    covered = {id(e) for e in placed.covered}
    last = max(i for i, e in enumerate(program.eqns) if id(e) in covered)
    before = [e for e in program.eqns[:last] if id(e) not in covered]
    after = list(program.eqns[last + 1 :])
    # A value made before the chain and read after it travels with the carry.
    read_after = {a for e in after for a in e.invars if isinstance(a, Var)}
    read_after |= {program.outvars[i] for i in outputs}
    passing = [
        v
        for e in before
        for v in e.outvars
        if not is_dropped(v) and domain[v] == BOTH and v in read_after and v not in final
    ]
    final.update((v, chain.num_carry + n) for n, v in enumerate(passing))
    initial.extend(passing)
    if passing:
        chain = chain.with_passing([v.aval for v in passing])
    carry_out = [_compat.new_var(aval) for aval in chain.carry_avals]
    rename = {v: carry_out[n] for v, n in final.items()}

    def renamed(atom):
        return rename.get(atom, atom) if isinstance(atom, Var) else atom

    after = [e.replace(invars=[renamed(a) for a in e.invars]) for e in after]
    slots = tuple(n for n, a in enumerate(initial) if a is not None)
    try:
        epilogue, epilogue_shared = _Slicer(program, [*before, *after], domain).cut(
            carry_out, rows, [renamed(program.outvars[i]) for i in outputs]
        )
        slicer = _Slicer(program, before, domain)
        prologue, prologue_shared = slicer.cut((), rows, [initial[n] for n in slots])
        side, side_shared = slicer.cut((), rows, chain.rows)
    except KeyError:
        return None
    return BlockGraph(
        program, rows, prologue, slots, prologue_shared, chain, side, side_shared, epilogue, epilogue_shared, outputs
    )


def _without_common_subexpressions(program: Jaxpr, domain) -> Jaxpr:
    """Merge equal equations outside the pipelined part: one copy of a mask or rotary table instead of one per layer."""
    seen: dict[Any, tuple[Var, ...]] = {}
    rename: dict[Var, Var] = {}
    eqns = []
    for eqn in program.eqns:
        eqn = eqn.replace(invars=[rename.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])
        if eqn.effects or any(domain[v] == BOTH for v in eqn.outvars):
            eqns.append(eqn)
            continue
        key = (equation_shape(eqn), tuple(_identity(a) for a in eqn.invars))
        if key in seen:
            rename.update(zip(eqn.outvars, seen[key]))
        else:
            seen[key] = tuple(eqn.outvars)
            eqns.append(eqn)
    outvars = [rename.get(a, a) if isinstance(a, Var) else a for a in program.outvars]
    return make_jaxpr([], program.invars, outvars, eqns)


def _identity(atom: Any) -> Any:
    return (str(atom.aval), np.asarray(atom.val).tobytes()) if isinstance(atom, Literal) else atom
