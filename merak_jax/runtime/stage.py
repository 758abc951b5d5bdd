"""What one stage does in a tick: F runs blocks and stashes their inputs, R makes residuals of them, B, Bi and W pull back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from merak_jax.partition.chain import Chain
from merak_jax.partition.derivative import BlockDerivative

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


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The blocks of a stage: of each chain some, one chain after the other.

    `lane_gradient`: per chain, which lane operands of its body gradients are wanted for. `shared`, `side`: the variables of the
    shared values and of the rows that are given; `shared_gradient`: which of the shared ones gradients are wanted for.
    `once`: which values of the carry are stashed once and not per block. `placement`: how values are split over
    `tensor`. `derivatives`: of each chain's block, where R, Bi, W or kept residuals occur.
    """

    chains: tuple[Chain, ...]
    lane_gradient: tuple[tuple[bool, ...], ...]
    shared: tuple[Any, ...]
    shared_gradient: tuple[bool, ...]
    side: tuple[Any, ...]
    once: tuple[bool, ...]
    placement: Placement
    derivatives: tuple[BlockDerivative, ...] = ()

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

    def forward(self, carry, given: Given, stash, slot, active, keep: Pool = NO_POOL, always_keeps: bool = False):
        """Run the visit's blocks from `carry`; `(last carry, stash with each block's input, buffers of what is kept)`.

        `stash`: per carry value `[slots, n, ...]`, or `[slots, ...]` where it is stashed once. Counts may differ per stage, also
        be 0. Where `active` is false the stage idles, and no slot is touched. `keep`: where residuals go, on stages whose slot
        is not negative; on all of them if it `always_keeps`.
        """
        carry, stash = list(carry), list(stash)
        stash = [
            put(s, jnp.where(active, c, take(s, slot)), slot) if same else s
            for s, c, same in zip(stash, carry, self.once)
        ]
        kept = [list(b) for b in keep.buffers]
        for number, first, count, before in self._visits(given):
            chain = self.chains[number]
            own_shared, rows = self._own(number, given)

            def operands(i, carry, number=number, first=first, own_shared=own_shared, rows=rows):
                lanes = [take(x, first + i) for x in given.lanes[number]]
                return self.placement.operands([*carry, *lanes, *own_shared, *rows], number)

            def body(i, state, chain=chain, before=before, operands=operands):
                carry, stash = state
                changing = [put(s, c, slot, before + i) for s, c in zip(stash, self._changing(carry))]
                return self.placement.whole(self.placement.evaluate(chain.body, operands(i, carry))), changing

            def keeping(i, state, number=number, before=before, operands=operands):
                carry, stash, kept = state
                changing = [put(s, c, slot, before + i) for s, c in zip(stash, self._changing(carry))]
                out = self.derived(number, "keep", operands(i, carry))
                new = [put(b, x, jnp.maximum(keep.slot, 0), i) for b, x in zip(kept, out[len(carry) :])]
                return self.placement.whole(out[: len(carry)]), changing, new

            changing = self._changing(stash)
            if not always_keeps:
                plain = count if keep is NO_POOL else jnp.where(keep.slot < 0, count, 0)
                carry, changing = lax.fori_loop(0, plain, body, (carry, changing))
            if keep is not NO_POOL:
                some = count if always_keeps else jnp.where(keep.slot >= 0, count, 0)
                carry, changing, kept[number] = lax.fori_loop(0, some, keeping, (carry, changing, kept[number]))
            stash = merge([not same for same in self.once], changing, stash)
        return carry, stash, kept

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

    def _operands(self, given: Given, stash, slot) -> Iterator[tuple[int, Any, Callable[[Any], list[Any]]]]:
        """Of each chain its number, its blocks, and the operands of block i."""
        carry_at = self._stashed(stash, slot)
        for number, first, count, before in self._visits(given):
            own_shared, rows = self._own(number, given)

            def at(i, number=number, first=first, before=before, own_shared=own_shared, rows=rows):
                lanes = [take(x, first + i) for x in given.lanes[number]]
                return self.placement.operands([*carry_at(before + i), *lanes, *own_shared, *rows], number)

            yield number, count, at

    def recompute(self, given: Given, stash, slot, keep: Pool):
        """Make the residuals of the visit's blocks again, from their stashed inputs; the buffers that they are kept in."""
        kept = [list(b) for b in keep.buffers]
        for number, count, operands in self._operands(given, stash, slot):

            def body(i, buffers, number=number, operands=operands):
                made = self.derived(number, "recompute", operands(i))
                return [put(b, x, jnp.maximum(keep.slot, 0), i) for b, x in zip(buffers, made)]

            kept[number] = lax.fori_loop(0, count, body, kept[number])
        return kept

    def backward(
        self,
        cotangent,
        given: Given,
        stash,
        slot,
        lane_sums,
        shared_sums,
        residuals: Pool = NO_POOL,
        saved: Pool = NO_POOL,
        modes: Sequence[tuple[bool, bool]] = ((False, False),),
    ):
        """Pull `cotangent` (of the float carry values) back through the visit's blocks, the last first.

        `modes`: the ways in which stages do it in this tick, each `(reads residuals, leaves W for later)`; which one a stage
        takes, the slots of `residuals` and `saved` say.

        Returns `(cotangent of the first block's carry, lane_sums, shared_sums, saved buffers)`, sums with this microbatch's
        gradients added where W is not left for later.
        """
        cotangent, lane_sums = self.placement.whole(cotangent), list(lane_sums)
        sums = dict(zip(self._wanted_shared, shared_sums))
        later = [list(b) for b in saved.buffers]
        for number, count, operands in reversed(list(self._operands(given, stash, slot))):
            names = [v for v in self.chains[number].shared if v in sums]
            for reads, splits in modes:
                own = count
                if len(modes) > 1:
                    here = jnp.bool_(True)
                    if residuals is not NO_POOL:
                        here &= (residuals.slot >= 0) == reads
                    if saved is not NO_POOL:
                        here &= (saved.slot >= 0) == splits
                    own = jnp.where(here, count, 0)

                def body(step, state, number=number, own=own, operands=operands, reads=reads, splits=splits):
                    cotangent, lane_sums, shared_sums, later = state
                    i = own - 1 - step
                    kept = (
                        [take(b, jnp.maximum(residuals.slot, 0), i) for b in residuals.buffers[number]]
                        if reads
                        else None
                    )
                    if splits:
                        if kept is None:
                            kept = self.derived(number, "recompute", operands(i))
                        out = self.derived(number, "input_gradient", operands(i), *kept, *cotangent)
                        cotangent, new = self.placement.whole(out[: len(cotangent)]), out[len(cotangent) :]
                        later = [put(b, x, jnp.maximum(saved.slot, 0), i) for b, x in zip(later, new)]
                        return cotangent, lane_sums, shared_sums, later
                    cotangent, d_lanes, d_shared = self.pull_back(number, operands(i), cotangent, kept)
                    cotangent = self.placement.whole(cotangent)
                    return cotangent, *self._add(number, i, given, lane_sums, d_lanes, shared_sums, d_shared), later

                state = (cotangent, list(lane_sums[number]), [sums[v] for v in names], later[number] if splits else [])
                cotangent, lane_sums[number], total, new = lax.fori_loop(0, own, body, state)
                sums.update(zip(names, total))
                if splits:
                    later[number] = new
        return cotangent, lane_sums, list(sums.values()), later

    def weights(self, given: Given, stash, slot, lane_sums, shared_sums, saved: Pool):
        """The gradients of the visit's parameters, from what Bi saved: `(lane_sums, shared_sums)` with them added."""
        lane_sums, sums = list(lane_sums), dict(zip(self._wanted_shared, shared_sums))
        for number, count, operands in self._operands(given, stash, slot):
            names = [v for v in self.chains[number].shared if v in sums]

            def body(i, state, number=number, operands=operands):
                lane_sums, shared_sums = state
                made = [take(b, jnp.maximum(saved.slot, 0), i) for b in saved.buffers[number]]
                out = self.derived(number, "weight_gradient", operands(i), *made)
                n = len(lane_sums)
                return self._add(number, i, given, lane_sums, out[:n], shared_sums, out[n:])

            state = (list(lane_sums[number]), [sums[v] for v in names])
            lane_sums[number], total = lax.fori_loop(0, count, body, state)
            sums.update(zip(names, total))
        return lane_sums, list(sums.values())

    def _add(self, number: int, i, given: Given, lane_sums, d_lanes, shared_sums, d_shared):
        """Sums with the gradients of block i added."""
        at = given.visit[number, 0] + i
        lane_sums = [put(a, take(a, at) + g.astype(a.dtype), at) for a, g in zip(lane_sums, d_lanes)]
        shared_sums = [a + g.astype(a.dtype) for a, g in zip(shared_sums, d_shared)]
        return self.placement.lane_sums(lane_sums, number), shared_sums

    @functools.cached_property
    def _wanted_shared(self) -> list[Any]:
        return select(self.shared_gradient, self.shared)

    def derived(self, number: int, part: str, operands: Sequence[Any], *more: Any) -> list[Any]:
        """The outputs of a slice of the derivative of a chain's block, by its name."""
        derivative = self.derivatives[number]
        return self.placement.evaluate(getattr(derivative, part), [*derivative.constants, *operands, *more])

    def pull_back(self, number: int, operands, cotangent, kept=None):
        """Pull `cotangent` back through one block of a chain: gradients of float carry, wanted lanes, wanted shared.

        `kept`: the block's residuals; without them its forward is run again.
        """
        floats, chain, lane_gradient = self.carry_float, self.chains[number], self.lane_gradient[number]
        lanes_wanted = sum(lane_gradient)
        if kept is not None:
            out = self.derived(number, "backward", operands, *kept, *cotangent)
            n = len(cotangent)
            return out[:n], out[n : n + lanes_wanted], out[n + lanes_wanted :]
        wanted = set(self._wanted_shared)
        shared_gradient = [v in wanted for v in chain.shared]
        at = [len(floats), len(floats) + len(lane_gradient), len(floats) + len(lane_gradient) + len(shared_gradient)]
        carry, lane, shared, rows = (
            operands[: at[0]],
            operands[at[0] : at[1]],
            operands[at[1] : at[2]],
            operands[at[2] :],
        )

        def block(carry_part, lane_part, shared_part):
            operands = [
                *merge(floats, carry_part, carry),
                *merge(lane_gradient, lane_part, lane),
                *merge(shared_gradient, shared_part, shared),
                *rows,
            ]
            return select(floats, self.placement.evaluate(chain.body, operands))

        _, pull = jax.vjp(block, select(floats, carry), select(lane_gradient, lane), select(shared_gradient, shared))
        return pull(list(cotangent))


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
