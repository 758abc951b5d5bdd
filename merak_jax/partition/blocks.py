"""Cut a loss into prologue, a chain of equal blocks, and epilogue, with what each reads besides the carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from merak_jax.partition.assemble import Slicer, assemble, pipelined_outputs
from merak_jax.partition.chain import BATCH, BOTH, Chain, PlacedChain
from merak_jax.partition.chains import find_chains, pipelined
from merak_jax.partition.fingerprint import equation_shape
from merak_jax.partition.work import flops
from merak_jax.tracing.jaxprs import make_jaxpr


@dataclasses.dataclass(frozen=True)
class BlockGraph:
    """A loss cut into `prologue`, `chains` that run one after the other, `epilogue`.

    `prologue`: `[*prologue_shared, *rows_inputs]` -> the carry slots `prologue_slots` (the other slots start as zeros);
    `epilogue`: `[*carry, *epilogue_shared, *rows_inputs]` -> the loss's outputs numbered `epilogue_outputs`;
    `side`: `[*side_shared, *rows_inputs]` -> `side_rows`, what the chains read of the batch. Shared values depend on
    parameters or constants only; rows inputs are the batch of one microbatch. All chains have the same carry; what stands
    between two chains is a chain of one block. Without a chain everything is epilogue.
    `program` is the loss itself, with equal equations merged. `obstacle`: without a chain, why the longest run of equal blocks
    is none.
    """

    program: Jaxpr
    rows_inputs: tuple[Var, ...]
    prologue: Jaxpr
    prologue_slots: tuple[int, ...]
    prologue_shared: tuple[Var, ...]
    chains: tuple[Chain, ...]
    side: Jaxpr
    side_shared: tuple[Var, ...]
    epilogue: Jaxpr
    epilogue_shared: tuple[Var, ...]
    epilogue_outputs: tuple[int, ...]
    obstacle: str = ""

    @property
    def chain(self) -> Chain | None:
        """The chain with most work, if there is one."""
        return max(self.chains, key=lambda c: c.length * flops(c.body), default=None)

    @property
    def side_rows(self) -> tuple[Var, ...]:
        return tuple(dict.fromkeys(v for c in self.chains for v in c.rows))

    @property
    def carry_avals(self) -> list:
        return self.chains[0].carry_avals

    @property
    def chain_shared(self) -> tuple[Var, ...]:
        """The shared values that blocks read."""
        return tuple(dict.fromkeys(v for c in self.chains for v in c.shared))

    def __str__(self) -> str:
        if not self.chains:
            return f"no repeated blocks; {len(self.epilogue.eqns)} equations"
        carry = ", ".join(v.str_short() for v in self.carry_avals)
        chains = " -> ".join(
            f"{c.length} blocks of {len(c.body.eqns)} equations" if c.length > 1 else f"{len(c.body.eqns)} equations"
            for c in self.chains
        )
        return (
            f"prologue ({len(self.prologue.eqns)} equations) -> {chains}, "
            f"carry {carry} -> epilogue ({len(self.epilogue.eqns)} equations)"
        )


# A further chain is worth a loop of its own when it does at least this share of the work of the first one.
_WORTH = 0.05


def find_blocks(program: Jaxpr, input_domain: Mapping[Var, int]) -> BlockGraph:
    """Cut `program` (flat, without constants) at its chain of equal blocks that covers most equations, and at further ones.

    `input_domain` says for each input whether it is PARAMETER, BATCH (one microbatch's rows) or neither (0).
    """
    program = _without_common_subexpressions(program, dependence(program, input_domain))
    domain = dependence(program, input_domain)
    obstacles: list[str] = []
    for placed in find_chains(program, domain, obstacles):
        graph = assemble(program, domain, [placed])
        if graph is not None:
            return _with_further_chains(program, domain, placed, graph)
    return dataclasses.replace(_whole(program, domain), obstacle=obstacles[0] if obstacles else "")


def _with_further_chains(program: Jaxpr, domain, main: PlacedChain, graph: BlockGraph) -> BlockGraph:
    """The graph with the chains before and after the main one (encoder and decoder, dense layers and expert layers)."""
    position = {id(e): n for n, e in enumerate(pipelined(program, domain))}
    parts = [main]

    def span(part: PlacedChain) -> tuple[int, int]:
        places = [position[id(e)] for e in part.covered if id(e) in position]
        return min(places), max(places) + 1

    def work(part: PlacedChain) -> int:
        return part.chain.length * flops(part.chain.body)

    gaps = [(0, span(main)[0]), (span(main)[1], len(position))]
    while gaps:
        low, high = gaps.pop()
        for candidate in find_chains(program, domain, [], (low, high)):
            if work(candidate) < _WORTH * work(main):
                continue
            wider = assemble(program, domain, sorted([*parts, candidate], key=span))
            if wider is not None:
                parts, graph = sorted([*parts, candidate], key=span), wider
                start, stop = span(candidate)
                gaps += [(low, start), (stop, high)]
                break
    return graph


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


def whole(graph: BlockGraph, input_domain: Mapping[Var, int]) -> BlockGraph:
    """The same loss without a chain, for one stage: the user's own program."""
    return _whole(graph.program, dependence(graph.program, input_domain))


def _whole(program: Jaxpr, domain) -> BlockGraph:
    rows = tuple(v for v in program.invars if domain[v] & BATCH)
    outputs = pipelined_outputs(program, domain, rows)
    epilogue, shared = Slicer(program, program.eqns, domain).cut((), rows, [program.outvars[i] for i in outputs])
    empty = make_jaxpr([], rows, [], [])
    return BlockGraph(program, rows, empty, (), (), (), empty, (), epilogue, shared, outputs)


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
