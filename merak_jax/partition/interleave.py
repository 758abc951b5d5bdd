"""Put two programs into one order in which the collectives of each run beside matmuls of the other.

Merak overlaps the communication of one half of a microbatch with the computation of the other half (Lai et al. 2023).
Here the two streams are any two programs. Collectives are steps of their own; a list scheduler with one compute engine
and one channel, both in order, says which matmul runs beside which collective.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.partition.splits import SUM, WHOLE, Split, Splits

# Of one device: what decides which matmul is beside which collective, not whether the numbers are right.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 600e12, 360e9


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A variable, whole on every device."""

    var: Var


@dataclasses.dataclass(frozen=True)
class Settled:
    """A variable that was a sum over devices, taken."""

    var: Var


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation, or a collective, of one of two programs. `reads`, `makes`: variables, Gathered or Settled.

    `near`: the equation that a collective stands at.
    """

    stream: int
    item: JaxprEqn | Gathered | Settled
    reads: tuple
    makes: tuple
    seconds: float
    near: JaxprEqn

    @property
    def is_collective(self) -> bool:
        """Whether it moves data between devices."""
        return not isinstance(self.item, JaxprEqn)


def steps_of(stream: int, program: Jaxpr, splits: Splits) -> list[Step]:
    """A program in steps, each after what it reads."""
    found: list[Step] = []
    gathered: set[Var] = set()
    for eqn in program.eqns:
        reads: list = []
        for n, a in enumerate(eqn.invars):
            if not isinstance(a, Var):
                reads.append(a)
            elif splits.needs_whole(eqn, n):
                if a not in gathered:
                    gathered.add(a)
                    found.append(_collective(stream, Gathered(a), splits, eqn))
                reads.append(Gathered(a))
            else:
                reads.append(read_as(a, splits))
        found.append(Step(stream, eqn, tuple(reads), tuple(eqn.outvars), _seconds(eqn, splits), eqn))
        found += [_collective(stream, Settled(v), splits, eqn) for v in eqn.outvars if is_settled(v, splits)]
    return found


def is_settled(var: Var, splits: Splits) -> bool:
    """Whether a sum is taken where this variable is made."""
    return splits.place.get(var) is SUM and var in splits.settled


def read_as(var: Var, splits: Splits) -> Var | Settled:
    """What a reader of a variable waits for."""
    return Settled(var) if is_settled(var, splits) else var


def _collective(stream: int, item: Gathered | Settled, splits: Splits, near: JaxprEqn) -> Step:
    aval = item.var.aval
    share = (splits.size - 1) / splits.size
    both = isinstance(item, Settled) and splits.settled[item.var] is WHOLE
    seconds = (2 if both else 1) * share * aval.size * aval.dtype.itemsize / BYTES_PER_SECOND
    reads = item.var if isinstance(item, Settled) else read_as(item.var, splits)
    return Step(stream, item, (reads,), (item,), seconds, near)


def _seconds(eqn: JaxprEqn, splits: Splits) -> float:
    """The time of the matmuls in an equation."""
    if eqn.primitive.name != "dot_general":
        return sum(_seconds(e, splits) for inner in _compat.sub_jaxprs(eqn) for e in inner.eqns)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval
    flops = 2 * eqn.outvars[0].aval.size * math.prod(lhs.shape[d] for d in contracted)
    places = [splits.of(a) for a in (*eqn.invars, *eqn.outvars)]
    return flops / (splits.size if any(isinstance(p, Split) for p in places) else 1) / FLOPS_PER_SECOND


class Join(NamedTuple):
    """A collective and a matmul that runs beside it: what reads either waits for both."""

    collective: Step
    matmul: Step


def interleave(steps: Sequence[Step]) -> list[Step | Join]:
    """All steps in one order: collectives as early as they can start, the matmuls with the longest way to the end first."""
    maker = {(s.stream, made): n for n, s in enumerate(steps) for made in s.makes}
    waits = [
        {maker[s.stream, r] for r in s.reads if not isinstance(r, Literal) and (s.stream, r) in maker} for s in steps
    ]
    readers: list[list[int]] = [[] for _ in steps]
    for n, needed in enumerate(waits):
        for m in needed:
            readers[m].append(n)
    way = [0.0] * len(steps)
    for n in reversed(range(len(steps))):
        way[n] = steps[n].seconds + max((way[m] for m in readers[n]), default=0.0)

    order: list[Step | Join] = []
    begun: set[int] = set()
    ended: set[int] = set()
    running: dict[bool, tuple[float, int]] = {}  # the collective (True) and the matmul that run, and when they end
    joined: set[int] = set()
    now = 0.0

    def begin(n: int) -> None:
        begun.add(n)
        order.append(steps[n])
        kind = steps[n].is_collective
        running[kind] = (now + steps[n].seconds, n)
        if len(running) == 2:
            collective, matmul = running[True][1], running[False][1]
            if not {collective, matmul} & joined:
                joined.update((collective, matmul))
                # Nothing that was begun since reads the one that was begun first: it still runs.
                for number in (collective, matmul):
                    order.remove(steps[number])
                order.append(Join(steps[collective], steps[matmul]))

    while len(ended) < len(steps):
        ready = [n for n in range(len(steps)) if n not in begun and waits[n] <= ended]
        free = [n for n in ready if not steps[n].is_collective and not steps[n].seconds]
        if free:
            begun.update(free)
            ended.update(free)
            order += [steps[n] for n in free]
            continue
        for kind in (True, False):
            own = [n for n in ready if steps[n].is_collective == kind]
            if own and kind not in running:
                begin(max(own, key=lambda n: (way[n], -n)))
        kind = min(running, key=lambda kind: running[kind])
        if kind and len(running) == 2 and running[True][1] not in joined:
            # The matmul beside it hides another collective: the next one may hide this.
            kind = False
        end, n = running.pop(kind)
        now = max(now, end)
        ended.add(n)
    return order
