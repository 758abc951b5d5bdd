"""What one stage does in a tick: F runs blocks and stashes their inputs, R makes residuals of them, B, Bi and W pull back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from merak_jax.partition.chain import Chain
from merak_jax.runtime.loops import Block, Loop, Loops

if TYPE_CHECKING:
    from merak_jax.runtime.placement import Placement


def is_differentiable(aval: Any) -> bool:
    """Whether gradients flow through values of this type."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def accumulator_dtype(dtype: Any) -> Any:
    """Gradients are accumulated in float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


class Given(NamedTuple):
    """What a task reads besides its buffers.

    `lanes`: per chain `[N, ...]` each; `shared`, `side`: values of the stage's variables; `visit`: int `[chains, 2]`, the first
    lane and the number of blocks of each chain in this visit, 0 where the stage idles.
    """

    lanes: Sequence[Sequence[Any]]
    shared: Sequence[Any]
    side: Sequence[Any]
    visit: Any


class Pool(NamedTuple):
    """Buffers per chain, `[slots, n, ...]` each, and the slot of the task; negative where it uses none."""

    buffers: Sequence[Sequence[Any]]
    slot: Any


NO_POOL = Pool((), -1)
# What profiles and compiled programs call the work of a block.
BLOCK = "block"
# The part of a block that B is, by whether it reads residuals and whether it leaves W for later.
_BACKWARD = {
    (True, False): "backward",
    (False, False): "pull_back",
    (True, True): "input_gradient",
    (False, True): "pull_input",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The blocks of a stage: of each chain some, one chain after the other.

    `lane_gradient`: per chain, which lane operands of its body gradients are wanted for. `shared`, `side`: the variables of the
    shared values and of the rows that are given; `shared_gradient`: which of the shared ones gradients are wanted for.
    `once`: which values of the carry are stashed once and not per block. `placement`: how values are split over
    `tensor`. `blocks`: the BlockDerivative of each chain, in an evaluation its BlockForward.
    """

    chains: tuple[Chain, ...]
    lane_gradient: tuple[tuple[bool, ...], ...]
    shared: tuple[Any, ...]
    shared_gradient: tuple[bool, ...]
    side: tuple[Any, ...]
    once: tuple[bool, ...]
    placement: Placement
    blocks: tuple[Any, ...]

    @functools.cached_property
    def carry_float(self) -> tuple[bool, ...]:
        return tuple(is_differentiable(aval) for aval in self.chains[0].carry_avals)

    def _own(self, number: int, given: Given) -> tuple[list[Any], list[Any]]:
        """What the blocks of a chain read, of all shared values and rows that are given."""
        chain = self.chains[number]
        by_shared, by_side = dict(zip(self.shared, given.shared)), dict(zip(self.side, given.side))
        return [by_shared[v] for v in chain.shared], [by_side[v] for v in chain.rows]

    def _visits(self, given: Given) -> list[tuple[int, Any, Any, Any]]:
        """`(chain, first lane, blocks, blocks of the chains before)` of each chain."""
        found, before = [], jnp.int32(0)
        for number in range(len(self.chains)):
            first, count = given.visit[number, 0], given.visit[number, 1]
            found.append((number, first, count, before))
            before = before + count
        return found

    def forward_loops(
        self, carry, given: Given, stash, slot, active, keep: Pool = NO_POOL, always_keeps: bool = False
    ) -> Loops:
        """Loops that run the visit's blocks from `carry`: `(last carry, stash with each block's input, buffers of what is kept)`.

        `stash`: per carry value `[slots, n, ...]`, or `[slots, ...]` where it is stashed once. Counts may differ per stage, also
        be 0. Where `active` is false the stage idles, and no slot is touched. `keep`: where residuals go, on stages whose slot
        is not negative; on all of them if it `always_keeps`.
        """
        stash = [
            put(s, jnp.where(active, c, take(s, slot)), slot) if same else s
            for s, c, same in zip(stash, carry, self.once)
        ]
        loops = []
        for number, first, count, before in self._visits(given):
            own_shared, rows = self._own(number, given)

            def body(i, state, keeps, number=number, first=first, before=before, own_shared=own_shared, rows=rows):
                carry, stash, kept = state
                changing = [put(s, c, slot, before + i) for s, c in zip(self._changing(stash), self._changing(carry))]
                stash = merge([not same for same in self.once], changing, stash)
                lanes = [take(x, first + i) for x in given.lanes[number]]
                operands = self.placement.operands([*carry, *lanes, *own_shared, *rows], number)
                out = yield Block(number, "keep" if keeps else "forward", operands)
                if keeps:
                    residuals = self.placement.stored(out[len(carry) :], self.blocks[number].residual_vars, number)
                    new = [put(b, x, jnp.maximum(keep.slot, 0), i) for b, x in zip(kept[number], residuals)]
                    kept = [*kept[:number], new, *kept[number + 1 :]]
                return self.placement.carry(out[: len(carry)]), stash, kept

            if not always_keeps:
                plain = count if keep is NO_POOL else jnp.where(keep.slot < 0, count, 0)
                loops.append(Loop(number, plain, functools.partial(body, keeps=False)))
            if keep is not NO_POOL:
                some = count if always_keeps else jnp.where(keep.slot >= 0, count, 0)
                loops.append(Loop(number, some, functools.partial(body, keeps=True)))
        return Loops(loops, (list(carry), stash, [list(b) for b in keep.buffers]))

    def _changing(self, values) -> list[Any]:
        return select([not same for same in self.once], values)

    def _stashed(self, stash, slot) -> Callable[[Any], list[Any]]:
        """A function from a block's position to its carry."""
        constant = [take(s, slot) for s in select(self.once, stash)]
        changing, blank = self._changing(stash), [None] * len(stash)
        varies = [not same for same in self.once]

        def at(i):
            return merge(varies, [take(s, slot, i) for s in changing], merge(self.once, constant, blank))

        return at

    def _operands(self, given: Given, stash, slot) -> list[tuple[Any, Callable[[Any], list[Any]]]]:
        """Of each chain its blocks, and the operands of block i."""
        carry_at = self._stashed(stash, slot)
        found: list[tuple[Any, Callable[[Any], list[Any]]]] = []
        for number, first, count, before in self._visits(given):
            own_shared, rows = self._own(number, given)

            def at(i, number=number, first=first, before=before, own_shared=own_shared, rows=rows):
                lanes = [take(x, first + i) for x in given.lanes[number]]
                return self.placement.operands([*carry_at(before + i), *lanes, *own_shared, *rows], number)

            found.append((count, at))
        return found

    def recompute(self, given: Given, stash, slot, keep: Pool):
        """Make the residuals of the visit's blocks again, from their stashed inputs; the buffers that they are kept in."""
        kept = [list(b) for b in keep.buffers]
        for number, (count, operands) in enumerate(self._operands(given, stash, slot)):

            def body(i, buffers, number=number, operands=operands):
                made = self.block(Block(number, "recompute", operands(i)))
                made = self.placement.stored(made, self.blocks[number].residual_vars, number)
                return [put(b, x, jnp.maximum(keep.slot, 0), i) for b, x in zip(buffers, made)]

            kept[number] = lax.fori_loop(0, count, body, kept[number])
        return kept

    def backward_loops(
        self,
        cotangent,
        given: Given,
        slot,
        lane_sums,
        shared_sums,
        residual_slot: Any = -1,
        saved: Pool = NO_POOL,
        modes: Sequence[tuple[bool, bool]] = ((False, False),),
    ) -> Loops:
        """Loops that pull `cotangent` (of the float carry values) back through the visit's blocks, the last first.

        `modes`: the ways in which stages do it in this tick, each `(reads residuals, leaves W for later)`; which one a stage
        takes, `residual_slot` and the slot of `saved` say. They read the stash and the buffers of residuals.

        Their state is `(cotangent of the first block's carry, lane_sums, shared_sums, saved buffers)`, sums with this microbatch's
        gradients added where W is not left for later.
        """
        place = {v: n for n, v in enumerate(self._wanted_shared)}
        loops = []
        for number, _, count, _ in reversed(self._visits(given)):
            for reads, splits in modes:
                own = count
                if len(modes) > 1:
                    here = (jnp.asarray(residual_slot) >= 0) == reads
                    if saved is not NO_POOL:
                        here &= (saved.slot >= 0) == splits
                    own = jnp.where(here, count, 0)

                def body(step, state, stash, kept, number=number, own=own, reads=reads, splits=splits):
                    cotangent, lane_sums, shared_sums, later = state
                    i = own - 1 - step
                    operands = self._operands(given, stash, slot)[number][1](i)
                    residuals = [take(b, jnp.maximum(residual_slot, 0), i) for b in kept[number]] if reads else []
                    part = _BACKWARD[reads, splits]
                    out = yield Block(number, part, [*operands, *residuals, *cotangent])
                    n = len(cotangent)
                    cotangent, out = self.placement.cotangents(out[:n]), out[n:]
                    if splits:
                        out = self.placement.stored(out, self.blocks[number].saved_vars, number)
                        new = [put(b, x, jnp.maximum(saved.slot, 0), i) for b, x in zip(later[number], out)]
                        return cotangent, lane_sums, shared_sums, [*later[:number], new, *later[number + 1 :]]
                    names = [place[v] for v in self.chains[number].shared if v in place]
                    own_sums = [shared_sums[n] for n in names]
                    new, own_sums = self._add(number, i, given, lane_sums[number], own_sums, out)
                    shared_sums = list(shared_sums)
                    for n, total in zip(names, own_sums):
                        shared_sums[n] = total
                    return cotangent, [*lane_sums[:number], new, *lane_sums[number + 1 :]], shared_sums, later

                loops.append(Loop(number, own, body))
        state = (
            self.placement.cotangents(cotangent),
            [list(sums) for sums in lane_sums],
            list(shared_sums),
            [list(b) for b in saved.buffers],
        )
        return Loops(loops, state)

    def weights(self, given: Given, stash, slot, lane_sums, shared_sums, saved: Pool):
        """The gradients of the visit's parameters, from what Bi saved: `(lane_sums, shared_sums)` with them added."""
        lane_sums, sums = list(lane_sums), dict(zip(self._wanted_shared, shared_sums))
        for number, (count, operands) in enumerate(self._operands(given, stash, slot)):
            names = [v for v in self.chains[number].shared if v in sums]

            def body(i, state, number=number, operands=operands):
                lane_sums, shared_sums = state
                made = [take(b, jnp.maximum(saved.slot, 0), i) for b in saved.buffers[number]]
                out = self.block(Block(number, "weight_gradient", [*operands(i), *made]))
                return self._add(number, i, given, lane_sums, shared_sums, out)

            state = (list(lane_sums[number]), [sums[v] for v in names])
            lane_sums[number], total = lax.fori_loop(0, count, body, state)
            sums.update(zip(names, total))
        return lane_sums, list(sums.values())

    def _add(self, number: int, i, given: Given, lane_sums, shared_sums, gradients):
        """Sums with the gradients of block i added: of its lanes, then of shared values."""
        at = given.visit[number, 0] + i
        lane_sums = [put(a, take(a, at) + g.astype(a.dtype), at) for a, g in zip(lane_sums, gradients)]
        shared_sums = [a + g.astype(a.dtype) for a, g in zip(shared_sums, gradients[len(lane_sums) :])]
        return self.placement.lane_sums(lane_sums, number), shared_sums

    @functools.cached_property
    def _wanted_shared(self) -> list[Any]:
        return select(self.shared_gradient, self.shared)

    def block(self, block: Block) -> list[Any]:
        """The outputs of a part of a chain's block."""
        with jax.named_scope(BLOCK):
            return self.placement.evaluate(*self._program(block))

    def both(self, first: Block, second: Block) -> tuple[list[Any], list[Any]]:
        """The outputs of two blocks, the collectives of each beside the matmuls of the other."""
        with jax.named_scope(BLOCK), jax.named_scope("both"):
            one, two = self.placement.evaluate_both([self._program(first), self._program(second)])
        return one, two

    def _program(self, block: Block) -> tuple[Any, list[Any], int]:
        own = self.blocks[block.chain]
        return getattr(own, block.part), [*own.constants, *block.operands], block.chain


def select(wanted: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """The values that are wanted."""
    return [v for yes, v in zip(wanted, values) if yes]


def merge(wanted: Sequence[bool], chosen: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """`values` with the wanted ones replaced by `chosen`, in order."""
    feed = iter(chosen)
    return [next(feed) if yes else v for yes, v in zip(wanted, values)]


def take(value: Any, *at: Any) -> Any:
    """`value[at]` for traced, non-negative indices of the leading dimensions."""
    start = _start(value, at)
    sizes = (*(1,) * len(at), *value.shape[len(at) :])
    return lax.dynamic_slice(value, start, sizes).reshape(value.shape[len(at) :])


def put(value: Any, new: Any, *at: Any) -> Any:
    """`value` with `value[at] = new`, for traced, non-negative indices of the leading dimensions."""
    return lax.dynamic_update_slice(value, new.reshape((*(1,) * len(at), *new.shape)), _start(value, at))


def _start(value: Any, at: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(i, jnp.int32) for i in (*at, *(0,) * (value.ndim - len(at)))]
