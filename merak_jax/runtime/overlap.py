"""Collective matmuls: parts of a value go round the devices of `tensor` while matmuls work on those that are here.

`gather_products`: each device has a part of a value along its tokens, and multiplies the whole of it. It begins with its own
part, and sends it on while it works. `scatter_products`: a product is summed over the devices and dealt out along its tokens.
Each device adds its part of a sum to what arrives, and sends it on while it computes its part of the next one. (Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", section 5.)

Both are loops: XLA:GPU hides the sends of a loop, and merges the matmuls of an unrolled ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from merak_jax.partition.rings import GatherRing, RingProduct, ScatterRing
from merak_jax.runtime.stage import put, take

P = PartitionSpec
AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Rings:
    """How rings run: `size`, T; one direction (1 or -1) for each of the chunks that a device's part is cut into; whether sends are
    permutes.

    A collective-permute needs all devices of the program on XLA:CPU, and in loops that stages turn differently often it waits
    for ever; an all-to-all of which one part is filled needs those of one ring.
    """

    size: int
    directions: tuple[int, ...] = (1,)
    permutes: bool = True

    def chunks(self, length: int) -> tuple[int, ...]:
        """The directions of the chunks of a part of `length`: one chunk where it cannot be cut evenly."""
        return self.directions if length % len(self.directions) == 0 else self.directions[:1]

    def numbers(self) -> tuple[Any, PartitionSpec]:
        """The numbers of the devices, one each, and how they are split: an index over an axis may be refused, see TickRun."""
        return jnp.arange(self.size, dtype=jnp.int32), P(AXIS)

    def sent(self, x: Any, here: Any, direction: int) -> Any:
        """`x` of the device before, in a direction; `here`: the number of this one."""
        size = self.size
        if self.permutes:
            return lax.ppermute(x, AXIS, [(i, (i + direction) % size) for i in range(size)])
        parts = put(jnp.zeros((size, *x.shape), x.dtype), x, (here + direction) % size)
        parts = lax.all_to_all(parts, AXIS, 0, 0, tiled=True)
        return take(parts, (here - direction) % size)


def gather_products(
    rings: Rings, ring: GatherRing, value: Any, others: Sequence[Any], specs: Sequence[PartitionSpec]
) -> list[Any]:
    """The products of `value`, of which each device has a part, with `others`; `specs`: of the value, the others, the results."""

    def local(here, value, *others):
        here, length = here[0], value.shape[ring.dimension]
        directions = rings.chunks(length)
        chunk = length // len(directions)
        parts = [_cut(value, ring.dimension, r * chunk, chunk) for r in range(len(directions))]

        def turn(number, parts, results, arriving=()):
            """What the parts that are here give, and what arrives meanwhile."""
            starts = [((here - number * d) % rings.size) * length + r * chunk for r, d in enumerate(directions)]
            new = [
                [
                    _product(product, *product.placed(part, _beside(product, other, start, chunk)))
                    for product, other in zip(ring.products, others)
                ]
                for part, start in zip(parts, starts)
            ]
            # Nothing but these matmuls may be what the sends hide behind.
            arriving, new = lax.optimization_barrier((list(arriving), new))
            for start, own in zip(starts, new):
                results = [_with(product, result, x, start) for product, result, x in zip(ring.products, results, own)]
            return arriving, results

        def body(number, state):
            parts, results = state
            return turn(number, parts, results, [rings.sent(p, here, d) for p, d in zip(parts, directions)])

        results = [_empty(p, value, other, rings.size) for p, other in zip(ring.products, others)]
        parts, results = lax.fori_loop(0, rings.size - 1, body, (parts, results))
        _, results = turn(rings.size - 1, parts, results)
        return [x.astype(p.eqn.outvars[0].aval.dtype) for x, p in zip(results, ring.products)]

    count = 1 + len(others)
    numbers, spec = rings.numbers()
    return on_tensor(local, [spec, *specs[:count]], list(specs[count:]))(numbers, value, *others)


def scatter_products(rings: Rings, ring: ScatterRing, operands: Sequence[Any], specs: Sequence[PartitionSpec]) -> Any:
    """The sum of products, dealt out along a dimension. `operands`: two per product; `specs`: of the operands and of the result."""

    def local(here, *operands):
        here, first = here[0], ring.products[0]
        pairs = list(zip(operands[::2], operands[1::2]))
        length = pairs[0][first.side].shape[first.dimension] // rings.size
        directions = rings.chunks(length)
        chunk = length // len(directions)

        def terms(number, r):
            """This device's part of the sum of a chunk that is dealt out to another device."""
            start = ((here + directions[r] * (rings.size - 1 - number)) % rings.size) * length + r * chunk
            return [
                _product(p, *p.placed(_cut(pair[p.side], p.dimension, start, chunk), pair[1 - p.side]), wide=True)
                for p, pair in zip(ring.products, pairs)
            ]

        carried = jnp.result_type(*(p.eqn.outvars[0].aval.dtype for p in ring.products))

        def body(number, sums):
            sent = [rings.sent(x, here, d) for x, d in zip(sums, directions)]
            # Kept apart, or the sum that arrives is an addend of the matmul, which then waits for it.
            sent, own = lax.optimization_barrier((sent, [terms(number, r) for r in range(len(directions))]))
            return [(sum(new) + x.astype(new[0].dtype)).astype(carried) for x, new in zip(sent, own)]

        sums = [sum(terms(0, r)).astype(carried) for r in range(len(directions))]
        sums = lax.fori_loop(1, rings.size, body, sums)
        return jnp.concatenate(sums, ring.dimension).astype(ring.value.aval.dtype)

    numbers, spec = rings.numbers()
    return on_tensor(local, [spec, *specs[:-1]], specs[-1])(numbers, *operands)


def on_tensor(function, in_specs, out_specs):
    """`function` on the parts that the devices of `tensor` have, inside a shard_map over other axes."""
    return jax.shard_map(function, axis_names={AXIS}, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def _product(product: RingProduct, lhs: Any, rhs: Any, wide: bool = False) -> Any:
    """A `dot_general` of parts; as a term of a sum (`wide`) in float32 or wider."""
    params = product.eqn.params
    dtype = params["preferred_element_type"]
    if wide or product.result is None:
        dtype = jnp.promote_types(product.eqn.outvars[0].aval.dtype, jnp.float32)
    return lax.dot_general(
        lhs, rhs, params["dimension_numbers"], precision=params["precision"], preferred_element_type=dtype
    )


def _beside(product: RingProduct, other: Any, start: Any, length: int) -> Any:
    """What of the other operand belongs to a part of the value that begins at `start`."""
    if product.other_dimension is None:
        return other
    return _cut(other, product.other_dimension, start, length)


def _empty(product: RingProduct, value: Any, other: Any, size: int) -> Any:
    """Zeros for a product of the whole value, of which `value` is a part."""
    length = value.shape[product.dimension]
    part = jax.eval_shape(
        lambda a, b: _product(product, *product.placed(a, _beside(product, b, 0, length))), value, other
    )
    shape = list(part.shape)
    if product.result is not None:
        shape[product.result] *= size
    return jnp.zeros(shape, part.dtype)


def _with(product: RingProduct, result: Any, new: Any, start: Any) -> Any:
    """`result` with what the part of the value that begins at `start` gives."""
    if product.result is None:
        return result + new
    return lax.dynamic_update_slice_in_dim(result, new, jnp.asarray(start, jnp.int32), product.result)


def _cut(value: Any, axis: int, start: Any, length: int) -> Any:
    return lax.dynamic_slice_in_dim(value, jnp.asarray(start, jnp.int32), length, axis)
