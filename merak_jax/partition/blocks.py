"""Cut a loss into prologue, a chain of equal blocks, and epilogue, with what each reads besides the carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax.partition.assemble import Slicer, assemble, pipelined_outputs
from merak_jax.partition.chain import BATCH, BOTH, Chain, PlacedChain
from merak_jax.partition.chains import find_chains, pipelined
from merak_jax.partition.fingerprint import equation_shape
from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.literals import literals_outside
from merak_jax.partition.work import equation_flops, flops, products
from merak_jax.tracing.jaxprs import make_jaxpr
from merak_jax.tracing.side_results import REMAT


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


def find_blocks(program: Jaxpr, input_domain: Mapping[Var, int], stored: Sequence[tuple[Var, ...]] = ()) -> BlockGraph:
    """Cut `program` (flat, without constants) at its chain of equal blocks that covers most equations, and at further ones.

    `input_domain` says for each input whether it is PARAMETER, BATCH (one microbatch's rows) or neither (0). A remat that does
    most of the work, around all layers, is opened where the layers are found in it. Of several ways to cut the same layers, the
    one is taken that leaves together what is stored together: `stored` has groups of inputs, one for each block.
    """
    graph = _cut(program, input_domain, stored)
    early = _shared_values_first(program, dependence(program, input_domain))
    if early is not program:
        graph = max(graph, _cut(early, input_domain, stored), key=_chain_work)
    opened = early
    while (eqn := dominant_equation(opened)) is not None and eqn.primitive.name in REMAT:
        if _chain_work(graph) > equation_flops(eqn):
            break
        opened = _opened(opened, eqn)
        graph = max(graph, _cut(opened, input_domain, stored), key=_chain_work)
    return graph


def _shared_values_first(program: Jaxpr, domain: Mapping[Var, int]) -> Jaxpr:
    """The program with what several layers read of parameters and batch made before them, also where the first layer makes it.

    Such a value (a position bias with the padding mask in it) is made of no layer's product, stands behind one, and is read
    both before and after others.
    """
    own = pipelined(program, domain)
    made_by = {v: n for n, e in enumerate(own) for v in e.outvars}
    start = next((n for n, e in enumerate(own) if products(e)), len(own))
    operands = [[made_by[a] for a in e.invars if isinstance(a, Var) and a in made_by] for e in own]
    behind: list[bool] = []  # a product, or made of one
    for n, e in enumerate(own):
        behind.append(products(e) > 0 or any(behind[k] for k in operands[n]))
    wanted = [n for n in range(start, len(own)) if not behind[n] and _spans_a_product(n, own, operands)]
    moved = set(wanted)
    for n in range(len(own) - 1, -1, -1):
        if n in moved:
            moved.update(operands[n])
    if not wanted or any(e.effects for e in program.eqns):
        return program
    pipelined_ids = {id(e) for e in own}
    before = [e for e in program.eqns if id(e) not in pipelined_ids]
    first = [e for n, e in enumerate(own) if n in moved]
    after = [e for n, e in enumerate(own) if n not in moved]
    return make_jaxpr([], program.invars, program.outvars, [*before, *first, *after])


def _spans_a_product(n: int, own: Sequence[JaxprEqn], operands: Sequence[Sequence[int]]) -> bool:
    """Whether a result of equation n is read again by one that depends, through a product, on another that reads it."""
    reach: dict[int, bool] = {}  # what depends on a reader: whether through a product
    for m in range(n + 1, len(own)):
        reads = n in operands[m]
        found = [reach[k] for k in operands[m] if k in reach]
        if reads and any(found):
            return True
        if reads or found:
            reach[m] = any(found) or products(own[m]) > 0
    return False


def dominant_equation(program: Jaxpr) -> JaxprEqn | None:
    """The equation that does more than half of the work, if there is one."""
    largest = max(program.eqns, key=equation_flops, default=None)
    return largest if largest is not None and 2 * equation_flops(largest) > flops(program) else None


def _opened(program: Jaxpr, remat: JaxprEqn) -> Jaxpr:
    """The program with what stands in `remat` in its place."""
    inner = remat.params["jaxpr"]
    rename: dict[Var, Any] = dict(zip(inner.invars, remat.invars))
    results = dict(zip(remat.outvars, inner.outvars))
    eqns = []
    for eqn in program.eqns:
        for e in inner.eqns if eqn is remat else (eqn,):
            eqns.append(e.replace(invars=[_renamed(rename, a) for a in e.invars]))
        if eqn is remat:
            rename.update((v, _renamed(rename, a)) for v, a in results.items())
    return make_jaxpr([], program.invars, [_renamed(rename, a) for a in program.outvars], eqns)


def _renamed(rename: Mapping[Var, Any], atom: Any) -> Any:
    return rename.get(atom, atom) if isinstance(atom, Var) else atom


def _chain_work(graph: BlockGraph) -> int:
    return sum(c.length * flops(c.body) for c in graph.chains)


def _cut(program: Jaxpr, input_domain: Mapping[Var, int], stored: Sequence[tuple[Var, ...]]) -> BlockGraph:
    program = literals_outside(_without_common_subexpressions(program, dependence(program, input_domain)))
    domain = dependence(program, input_domain)
    obstacles: list[str] = []
    group_of = {v: group for group in stored for v in group}
    best: tuple[PlacedChain, BlockGraph] | None = None
    for placed in find_chains(program, domain, obstacles):
        if best is not None and len(placed.covered) != len(best[0].covered):
            break
        graph = assemble(program, domain, [placed])
        if graph is None:
            continue
        if best is None:
            best = placed, graph
        groups = (
            lane_leaves(program, [slot.values for slot in placed.chain.slots if slot.stack is None]) if stored else []
        )
        if all(_stored_together(group, group_of) for group in groups):
            best = placed, graph
            break
    if best is not None:
        return _with_further_chains(program, domain, *best)
    return dataclasses.replace(_whole(program, domain), obstacle=obstacles[0] if obstacles else "")


def _stored_together(values: Sequence[Var], group_of: Mapping[Var, tuple[Var, ...]]) -> bool:
    known = {group_of[v] for v in values if v in group_of}
    return not known or known == {tuple(values)}


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


def whole(program: Jaxpr, input_domain: Mapping[Var, int]) -> BlockGraph:
    """The loss without a chain, for one stage: the user's own program."""
    program = _without_common_subexpressions(program, dependence(program, input_domain))
    return _whole(program, dependence(program, input_domain))


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
