"""What one stage does in a tick: F runs its blocks and stashes their inputs, B recomputes each block and pulls back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from merak_jax.partition.chain import Chain
from merak_jax.tracing.jaxprs import evaluate


def is_differentiable(aval: Any) -> bool:
    """Whether gradients flow through values of this type."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def accumulator_dtype(dtype: Any) -> Any:
    """Gradients are accumulated in float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The blocks of a stage: of each chain some, one chain after the other.

    `lane_gradient`: per chain, which lane operands of its body gradients are wanted for. `shared`, `side`: the variables of the
    shared values and of the rows that are given; `shared_gradient`: which of the shared ones gradients are wanted for.
    `once`: which values of the carry are stashed once and not per block. `constrain_lanes(sums, chain)` keeps accumulators of
    lane gradients where they belong.
    """

    chains: tuple[Chain, ...]
    lane_gradient: tuple[tuple[bool, ...], ...]
    shared: tuple[Any, ...]
    shared_gradient: tuple[bool, ...]
    side: tuple[Any, ...]
    once: tuple[bool, ...]
    constrain_lanes: Callable[[Sequence[Any], int], list[Any]]

    @functools.cached_property
    def carry_float(self) -> tuple[bool, ...]:
        return tuple(is_differentiable(aval) for aval in self.chains[0].carry_avals)

    def _given(self, chain: Chain, shared, side) -> tuple[list[Any], list[Any]]:
        """What the blocks of a chain read, of all that is given."""
        by_shared, by_side = dict(zip(self.shared, shared)), dict(zip(self.side, side))
        return [by_shared[v] for v in chain.shared], [by_side[v] for v in chain.rows]

    def forward(self, carry, lanes, shared, side, stash, slot, counts, active):
        """Run `counts[c]` blocks of each chain c from `carry`; `(last carry, stash with each block's input)`.

        `lanes`: per chain `[N, ...]` each; `stash`: per carry value `[slots, N, ...]`, or `[slots, ...]` where it is stashed once.
        Counts may differ per stage, also be 0. Where `active` is false the stage idles, and no slot is touched.
        """
        carry, stash = list(carry), list(stash)
        stash = [
            put(s, jnp.where(active, c, take(s, slot)), slot) if same else s
            for s, c, same in zip(stash, carry, self.once)
        ]
        start: Any = 0
        for number, chain in enumerate(self.chains):
            own_shared, rows = self._given(chain, shared, side)

            def body(i, state, chain=chain, number=number, start=start, own_shared=own_shared, rows=rows):
                carry, stash = state
                changing = [put(s, c, slot, start + i) for s, c in zip(stash, self._changing(carry))]
                return evaluate(
                    chain.body, [], *carry, *(take(x, i) for x in lanes[number]), *own_shared, *rows
                ), changing

            changing = self._changing(stash)
            carry, changing = lax.fori_loop(0, counts[number], body, (carry, changing))
            stash = merge([not same for same in self.once], changing, stash)
            start = start + counts[number]
        return carry, stash

    def _changing(self, values) -> list[Any]:
        return select([not same for same in self.once], values)

    def backward(self, cotangent, lanes, shared, side, stash, slot, counts, lane_sums, shared_sums):
        """Pull `cotangent` (of the float carry values) back through the stage's blocks, the last first.

        Returns `(cotangent of the first block's carry, lane_sums, shared_sums)`, sums with this microbatch's gradients added.
        """
        cotangent, lane_sums, sums = list(cotangent), list(lane_sums), dict(zip(self._wanted_shared, shared_sums))
        constant = [take(s, slot) for s in select(self.once, stash)]
        changing = self._changing(stash)
        start = sum(counts[number] for number in range(len(self.chains)))
        for number in reversed(range(len(self.chains))):
            chain, count = self.chains[number], counts[number]
            start = start - count
            own_shared, rows = self._given(chain, shared, side)
            names = [v for v in chain.shared if v in sums]

            def body(
                step, state, chain=chain, number=number, count=count, start=start, own_shared=own_shared, rows=rows
            ):
                cotangent, lane_sums, shared_sums = state
                i = count - 1 - step
                carry = merge(self.once, constant, [None] * len(stash))
                carry = merge([not same for same in self.once], [take(s, slot, start + i) for s in changing], carry)
                lane = [take(x, i) for x in lanes[number]]
                d_carry, d_lanes, d_shared = self.pull_back(number, carry, lane, own_shared, rows, cotangent)
                lane_sums = self.constrain_lanes(
                    [put(a, take(a, i) + g.astype(a.dtype), i) for a, g in zip(lane_sums, d_lanes)], number
                )
                return d_carry, lane_sums, [a + g.astype(a.dtype) for a, g in zip(shared_sums, d_shared)]

            state = (cotangent, list(lane_sums[number]), [sums[v] for v in names])
            cotangent, lane_sums[number], own = lax.fori_loop(0, count, body, state)
            sums.update(zip(names, own))
        return cotangent, lane_sums, list(sums.values())

    @functools.cached_property
    def _wanted_shared(self) -> list[Any]:
        return select(self.shared_gradient, self.shared)

    def pull_back(self, number: int, carry, lane, shared, rows, cotangent):
        """Recompute one block of a chain and pull `cotangent` back: gradients of float carry, wanted lanes, wanted shared."""
        floats, chain, lane_gradient = self.carry_float, self.chains[number], self.lane_gradient[number]
        wanted = set(self._wanted_shared)
        shared_gradient = [v in wanted for v in chain.shared]

        def block(carry_part, lane_part, shared_part):
            out = evaluate(
                chain.body,
                [],
                *merge(floats, carry_part, carry),
                *merge(lane_gradient, lane_part, lane),
                *merge(shared_gradient, shared_part, shared),
                *rows,
            )
            return select(floats, out)

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
