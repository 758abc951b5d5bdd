"""Lanes: block k of a chain is lane k, stored at `[stage, index]` of a packed array `[P, N, ...]`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from merak_jax.schedules.task import path_of


@dataclasses.dataclass(frozen=True)
class LaneLayout:
    """Where each block stands: the n-th visit of a microbatch's path runs the next `counts[n]` blocks; padding is zeros.

    Of several chunks a stage holds those of the first one first. N is the largest number of blocks of a stage.
    """

    counts: tuple[int, ...]
    num_chunks: int = 1
    folded: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.counts) // self.num_chunks

    @property
    def num_lanes(self) -> int:
        return sum(self.counts)

    @functools.cached_property
    def visits(self) -> np.ndarray:
        """int [P, V, 2]: index of the first block, and number of blocks, of each chunk of each stage."""
        found = np.zeros((self.num_stages, self.num_chunks, 2), np.int32)
        for (stage, chunk), count in zip(path_of(self.num_stages, self.num_chunks, self.folded), self.counts):
            found[stage, chunk, 1] = count
        found[:, :, 0] = np.cumsum(found[:, :, 1], axis=1) - found[:, :, 1]
        return found

    @property
    def per_stage(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(self.visits[:, :, 1].sum(1).tolist())

    @property
    def depth(self) -> int:
        return max(1, *self.per_stage)

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """`(stage, index)` of each lane."""
        path = path_of(self.num_stages, self.num_chunks, self.folded)
        starts = [int(self.visits[place][0]) for place in path]
        return tuple((stage, start + i) for (stage, _), start, n in zip(path, starts, self.counts) for i in range(n))

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """bool [P, N]: which places hold a block."""
        return np.arange(self.depth)[None, :] < np.asarray(self.per_stage)[:, None]

    @property
    def is_full(self) -> bool:
        return bool(self.valid.all())

    @property
    def is_stack(self) -> bool:
        """Whether `[P, N, ...]` is `[L, ...]` cut into stages."""
        return self.is_full and self.num_chunks == 1

    def mask(self, ndim: int) -> np.ndarray:
        """`valid` with trailing axes, to broadcast against a packed array of `ndim` dimensions."""
        return self.valid.reshape(self.valid.shape + (1,) * (ndim - 2))

    def pack(self, values: Sequence[Any]) -> Any:
        """Lane values `[...]`, one per block, as one array `[P, N, ...]`."""
        if all(isinstance(v, (np.ndarray, np.generic, bool, int, float)) for v in values):
            return self.pack_stack(np.stack([np.asarray(v) for v in values]))
        return self.pack_stack(jnp.stack(list(values)))

    def pack_stack(self, stack: Any) -> Any:
        """`[L, ...]` as `[P, N, ...]`."""
        shape = (self.num_stages, self.depth, *stack.shape[1:])
        if self.is_stack:
            return stack.reshape(shape)
        source = np.zeros(self.valid.shape, np.int32)
        for lane, place in enumerate(self.places):
            source[place] = lane
        taken = stack[source]
        if self.is_full or jnp.issubdtype(taken.dtype, jax.dtypes.prng_key):
            return taken
        return jnp.where(self.mask(taken.ndim), taken, jnp.zeros((), taken.dtype))

    def needs_shield(self, value: Any) -> bool:
        """Whether a cotangent of `value` can be spoilt by padding."""
        return not self.is_full and jnp.issubdtype(jnp.result_type(value), jnp.inexact)

    def shielded(self, packed: Any) -> Any:
        """The same packed value; its padding sends no cotangent back. Zeros there may become infinite, and 0 x infinity is NaN."""
        if not self.needs_shield(packed):
            return packed
        return jnp.where(self.mask(packed.ndim), packed, lax.stop_gradient(packed))

    def spread(self, value: Any) -> Any:
        """A value that all lanes share, as `[P, N, ...]`, shielded."""
        return self.shielded(jnp.broadcast_to(value, (self.num_stages, self.depth, *np.shape(value))))

    def unpack(self, packed: Any, lane: int) -> Any:
        """The value of one lane."""
        stage, index = self.places[lane]
        return packed[stage, index]

    def unpack_stack(self, packed: Any) -> Any:
        """`[P, N, ...]` as `[L, ...]`."""
        flat = packed.reshape((-1, *packed.shape[2:]))
        if self.is_stack:
            return flat
        return flat[np.array([s * self.depth + i for s, i in self.places])]


def even_counts(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, as equal as possible, the longer stages first."""
    base, rest = divmod(num_blocks, num_stages)
    return tuple(base + (s < rest) for s in range(num_stages))
