"""Find chains of equal blocks: tandem repeats of unrolled layers, and scans over layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from merak_jax.partition.chain import BOTH, PlacedChain
from merak_jax.partition.fingerprint import equation_numbers
from merak_jax.partition.scans import scan_as_chain
from merak_jax.partition.wiring import MismatchError, Wiring
from merak_jax.partition.work import products
from merak_jax.tracing.jaxprs import defining_equations, is_dropped


def pipelined(program: Jaxpr, domain: Mapping[Var, int]) -> list[JaxprEqn]:
    """The equations that depend on parameters and on the batch."""
    return [e for e in program.eqns if any(domain[v] == BOTH for v in e.outvars if not is_dropped(v))]


def find_chains(
    program: Jaxpr, domain: Mapping[Var, int], obstacles: list[str], within: tuple[int, int] | None = None
) -> Iterator[PlacedChain]:
    """Chains in the pipelined part of `program`, the one that covers most equations first.

    `obstacles` gets, in words, why equal segments were no chain. `within`: only among these of the pipelined equations.
    """
    both = pipelined(program, domain)
    low, high = (0, len(both)) if within is None else within
    used = {a for e in program.eqns for a in e.invars if isinstance(a, Var)}
    used |= {a for a in program.outvars if isinstance(a, Var)}
    search = _Search(program, both, domain, obstacles)
    found: list[tuple[int, Any]] = []
    for eqn in both[low:high]:
        if eqn.primitive.name == "scan":
            placed = scan_as_chain(eqn, domain, used, obstacles)
            if placed is not None and placed.chain.length >= 2:
                found.append((placed.chain.length * len(placed.chain.body.eqns), lambda placed=placed: iter([placed])))
    for start, period, repeats, slack in _tandem_repeats(both[low:high], domain):
        found.append((repeats * period, lambda a=(low + start, period, repeats, slack): _cuts_of_repeat(search, *a)))
    for _, make in sorted(found, key=lambda f: -f[0]):
        yield from make()


def _tandem_repeats(both: Sequence[JaxprEqn], domain) -> Iterator[tuple[int, int, int, int]]:
    """`(start, period, repeats, slack)` of runs of equations that equal those one period later, up to renaming."""
    shape = np.array(equation_numbers(both, domain), dtype=np.int64)
    n = len(shape)
    best = 0
    for period in range(1, n // 2 + 1):
        equal = shape[:-period] == shape[period:]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.view(np.int8), [0]])))
        for first, stop in zip(edges[::2], edges[1::2]):
            length = int(stop - first) + period
            repeats = length // period
            # Small repeats inside a block are not worth a look once a longer chain is known.
            if repeats >= 2 and repeats * period * 4 >= best:
                best = max(best, repeats * period)
                yield int(first), period, repeats, length - repeats * period


@dataclasses.dataclass(frozen=True)
class _Search:
    """What looking for a chain among the pipelined equations `both` needs, and what stood in its way."""

    program: Jaxpr
    both: list[JaxprEqn]
    domain: Mapping[Var, int]
    obstacles: list[str]

    @functools.cached_property
    def defined(self) -> dict[Var, tuple[int, int]]:
        return defining_equations(self.program.eqns)


def _cuts_of_repeat(search: _Search, start, period, repeats, slack) -> Iterator[PlacedChain]:
    """The cut points of a tandem repeat, those with the fewest live bytes first; then parts of it, the longest first."""
    program, both = search.program, search.both
    uses: dict[Var, int] = {a: i for i, e in enumerate(both) for a in e.invars if isinstance(a, Var)}
    uses.update({a: len(both) for a in program.outvars if isinstance(a, Var)})

    def live_bytes(phase: int) -> int:
        cut = start + phase + period
        return sum(
            _bytes(v)
            for e in both[start + phase : cut]
            for v in e.outvars
            if not is_dropped(v) and uses.get(v, -1) >= cut
        )

    phases = sorted(range(slack + 1), key=lambda p: (live_bytes(p), p))
    for phase in phases:
        placed = _repeat_as_chain(search, start + phase, period, repeats)
        if placed is not None:
            yield placed
    # The first or last blocks may be wired differently from the rest (they make a value that all others read).
    parts: list[PlacedChain] = []
    for phase in phases[:4]:
        parts.extend(_parts_of_repeat(search, start + phase, period, repeats))
    yield from sorted(parts, key=lambda part: -part.chain.length)


def _parts_of_repeat(search: _Search, start, period, repeats) -> Iterator[PlacedChain]:
    """Runs of blocks that do form chains, found from the left, each as long as possible."""
    first = 0
    while first < repeats - 1:
        longest, low, high = None, 2, repeats - first
        while low <= high:
            length = (low + high) // 2
            placed = _repeat_as_chain(search, start + first * period, period, length)
            if placed is None:
                high = length - 1
            else:
                longest, low = placed, length + 1
        if longest is not None:
            yield longest
        first += longest.chain.length if longest is not None else 1


def _bytes(var: Var) -> int:
    return int(np.prod(var.aval.shape)) * getattr(var.aval.dtype, "itemsize", 8)


def _repeat_as_chain(search: _Search, start, period, repeats) -> PlacedChain | None:
    """The chain made of equal segments, or None if their wiring differs."""
    both = search.both
    segments = [both[start + k * period : start + (k + 1) * period] for k in range(repeats)]
    later = [a for e in both[start + repeats * period :] for a in e.invars] + list(search.program.outvars)
    try:
        return Wiring(search.program, search.domain, search.defined, segments).chain(later)
    except MismatchError as mismatch:
        # Two layer norms or two projections of one layer are no layers that differ.
        if len(search.obstacles) < 50 and sum(map(products, segments[0])) >= 2:
            search.obstacles.append(str(mismatch))
        return None
