"""What a block communicates over `tensor`: which collective where, how many bytes, and what hides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from merak_jax import _compat
from merak_jax.partition.interleave import Gathered, Join, Step, interleave, steps_of
from merak_jax.partition.rings import GatherRing, arrange
from merak_jax.partition.splits import WHOLE, Place, Split, Splits
from merak_jax.tracing.jaxprs import defining_equations


@dataclasses.dataclass(frozen=True)
class BlockCollective:
    """One collective over `tensor` of one block and microbatch.

    `kind`: "all-gather", "reduce-scatter" or "all-reduce"; `shape`, `dtype`: of the whole value; `nbytes`: what each device
    sends, `(T - 1) / T` of the value, twice for an all-reduce; `direction`: "forward" or "backward"; `source`: the user's line;
    `hidden_by`: the matmuls that it is beside, empty where nothing but the compiler hides it.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    direction: str
    source: str
    hidden_by: str = ""

    def __str__(self) -> str:
        hidden = f", behind {self.hidden_by}" if self.hidden_by else ""
        return f"{self.direction}: {self.kind} of {self.dtype}{list(self.shape)}, {self.nbytes} bytes, at {self.source}{hidden}"


def block_collectives(
    forward: Jaxpr, backward: Jaxpr | None, splits: Splits, carry: Sequence[Place], *, rings: bool, paired: bool
) -> tuple[BlockCollective, ...]:
    """The collectives of the two programs of a block.

    `carry`: where its carry is between blocks; `rings`, `paired`: how it is run.
    """
    programs = [("forward", forward)] + ([] if backward is None else [("backward", backward)])
    steps = [steps_of(n, program, splits) for n, (_, program) in enumerate(programs)]
    beside: dict[tuple[int, object], str] = {}
    if paired and backward is not None:
        for entry in interleave(sum(steps, [])):
            if isinstance(entry, Join):
                stream = programs[entry.matmul.stream][0]
                own = entry.matmul.stream == entry.collective.stream
                beside[entry.collective.stream, entry.collective.item] = (
                    f"a matmul of {'the same' if own else 'the other'} microbatch's {stream}, at {_source(entry.matmul.item)}"
                )
    found: list[BlockCollective] = []
    for n, (direction, program) in enumerate(programs):
        covered: set = set()
        if rings:
            covered, in_rings = _rings(program, splits, direction)
            found += in_rings
        found += [
            _collective(step, splits, direction, beside.get((n, step.item), ""))
            for step in steps[n]
            if step.is_collective and step.item not in covered
        ]
        made = defining_equations(program.eqns)
        for var, place in zip(program.outvars, carry):
            if place is WHOLE and var in made and isinstance(splits.of(var), Split):
                eqn = program.eqns[made[var][0]]
                found.append(_made("all-gather", var.aval.shape, var.aval.dtype, splits.size, direction, eqn, ""))
    return tuple(found)


def _rings(program: Jaxpr, splits: Splits, direction: str) -> tuple[set, list[BlockCollective]]:
    """The collectives that rings replace, and the rings."""
    covered: set = set()
    found = []
    for item in arrange(program, splits):
        if isinstance(item, JaxprEqn):
            continue
        products = [p.eqn for p in item.products]
        hidden = f"{len(products)} matmul{'s' * (len(products) > 1)} of its own, in a ring"
        kind = "all-gather" if isinstance(item, GatherRing) else "reduce-scatter"
        aval = item.value.aval if isinstance(item, GatherRing) else products[0].outvars[0].aval
        found.append(_made(kind, item.value.aval.shape, aval.dtype, splits.size, direction, products[0], hidden))
        if isinstance(item, GatherRing):
            covered.add(Gathered(item.value))
        else:
            covered |= {
                step.item for step in steps_of(0, program, splits) if step.reads == (item.value,) and step.is_collective
            }
    return covered, found


def _collective(step: Step, splits: Splits, direction: str, hidden: str) -> BlockCollective:
    item = step.item
    assert not isinstance(item, JaxprEqn)
    if isinstance(item, Gathered):
        kind = "all-gather"
    else:
        kind = "all-reduce" if splits.settled[item.var] is WHOLE else "reduce-scatter"
    aval = item.var.aval
    return _made(kind, aval.shape, aval.dtype, splits.size, direction, step.near, hidden)


def _made(kind: str, shape: Sequence[int], dtype, size: int, direction: str, eqn, hidden: str) -> BlockCollective:
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    sent = (2 if kind == "all-reduce" else 1) * nbytes * (size - 1) // size
    return BlockCollective(kind, tuple(shape), str(dtype), sent, direction, _source(eqn), hidden)


def _source(eqn: JaxprEqn) -> str:
    return _compat.source_line(eqn).split(", through ")[0]
