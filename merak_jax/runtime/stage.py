"""What one stage does in a tick: F runs its blocks and stashes their inputs, B recomputes each block and pulls back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from merak_jax.partition.chains import Chain
from merak_jax.tracing.jaxprs import evaluate


def is_differentiable(aval: Any) -> bool:
    """Whether gradients flow through values of this type."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def accumulator_dtype(dtype: Any) -> Any:
    """Gradients are accumulated in float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The blocks of a stage. `lane_gradient`, `shared_gradient`: which operands of `chain.body` gradients are wanted for."""

    chain: Chain
    lane_gradient: tuple[bool, ...]
    shared_gradient: tuple[bool, ...]
    constrain_lanes: Callable[[Sequence[Any]], list[Any]]

    @property
    def carry_float(self) -> tuple[bool, ...]:
        return tuple(is_differentiable(aval) for aval in self.chain.carry_avals)

    def block(self, carry, lanes, shared, rows) -> list[Any]:
        """One block: the next carry."""
        return evaluate(self.chain.body, [], *carry, *lanes, *shared, *rows)

    def forward(self, carry, lanes, shared, rows, stash, slot, count):
        """Run `count` blocks from `carry`; `(last carry, stash with each block's input at [slot, block])`.

        `lanes`: `[N, ...]` each; `stash`: one `[slots, N, ...]` per carry value. `count` may differ per stage, also be 0.
        """

        def body(i, state):
            carry, stash = state
            stash = [put(s, c, slot, i) for s, c in zip(stash, carry)]
            return self.block(carry, [take(lane, i) for lane in lanes], shared, rows), stash

        return lax.fori_loop(0, count, body, (list(carry), list(stash)))

    def backward(self, cotangent, lanes, shared, rows, stash, slot, count, lane_sums, shared_sums):
        """Pull `cotangent` (of the float carry values) back through `count` blocks, the last first.

        Returns `(cotangent of the first block's carry, lane_sums, shared_sums)`, sums with this microbatch's gradients added.
        """

        def body(step, state):
            cotangent, lane_sums, shared_sums = state
            i = count - 1 - step
            carry = [take(s, slot, i) for s in stash]
            lane = [take(x, i) for x in lanes]
            d_carry, d_lanes, d_shared = self.pull_back(carry, lane, shared, rows, cotangent)
            lane_sums = self.constrain_lanes(
                [put(a, take(a, i) + g.astype(a.dtype), i) for a, g in zip(lane_sums, d_lanes)]
            )
            shared_sums = [a + g.astype(a.dtype) for a, g in zip(shared_sums, d_shared)]
            return d_carry, lane_sums, shared_sums

        return lax.fori_loop(0, count, body, (list(cotangent), list(lane_sums), list(shared_sums)))

    def pull_back(self, carry, lane, shared, rows, cotangent):
        """Recompute one block and pull `cotangent` back: gradients of the float carry, wanted lanes and wanted shared."""
        floats = self.carry_float

        def block(carry_part, lane_part, shared_part):
            out = self.block(
                merge(floats, carry_part, carry),
                merge(self.lane_gradient, lane_part, lane),
                merge(self.shared_gradient, shared_part, shared),
                rows,
            )
            return select(floats, out)

        _, pull = jax.vjp(
            block, select(floats, carry), select(self.lane_gradient, lane), select(self.shared_gradient, shared)
        )
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
