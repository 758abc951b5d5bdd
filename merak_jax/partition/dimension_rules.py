"""What each primitive does to dimensions: which run along each other, which it cannot work on in shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from merak_jax.partition.dimensions import CARRY, PARAMETER, Dimensions, Product, Value

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p
    logistic lt lt_to max min mul name ne neg nextafter not or polygamma population_count pow real
    reduce_precision rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta""".split()
)

# What makes its result from nothing, wherever it is wanted.
FRESH = frozenset({"iota", "random_bits", "random_rows", "random_microbatch"})


def _through(eqn) -> str:
    return f"goes through `{eqn.primitive.name}`"


def unknown(found: Dimensions, eqn, operands, outs) -> None:
    for value in (*operands, *outs):
        found.mark(value, range(len(value.shape)), _through(eqn))


def _bitcast(found: Dimensions, eqn, operands, outs) -> None:
    rule = elementwise if operands[0].shape == outs[0].shape else unknown
    rule(found, eqn, operands, outs)


def _fresh(found: Dimensions, eqn, operands, outs) -> None:
    """The output can be made in shards, whatever the operands."""


def elementwise(found: Dimensions, eqn, operands, outs) -> None:
    out = outs[0]
    for operand in operands:
        if operand.shape:
            found.unite(operand, out, [(d, d) for d in range(len(out.shape))])
        _broadcast_sums(found, operand, out, range(len(operand.shape)))


def _broadcast_sums(found: Dimensions, operand: Value, out: Value, kept) -> None:
    """A value repeated along a split dimension gets a gradient that is summed over it."""
    kept = {d for d, node in zip(kept, operand.nodes, strict=True) if node is not None}
    if operand.needs_gradient and operand.origin & (CARRY | PARAMETER):
        for d, node in enumerate(out.nodes):
            if d not in kept:
                found.add_sum(operand, node, "backward", of_product=False)


def _broadcast_in_dim(found: Dimensions, eqn, operands, outs) -> None:
    mapped = [int(d) for d in eqn.params["broadcast_dimensions"]]
    found.unite(operands[0], outs[0], list(enumerate(mapped)))
    _broadcast_sums(found, operands[0], outs[0], mapped)


def _transpose(found: Dimensions, eqn, operands, outs) -> None:
    found.unite(operands[0], outs[0], [(int(src), dst) for dst, src in enumerate(eqn.params["permutation"])])


def _squeeze(found: Dimensions, eqn, operands, outs) -> None:
    gone = {int(d) % len(operands[0].shape) for d in eqn.params["dimensions"]}
    left = [d for d in range(len(operands[0].shape)) if d not in gone]
    found.unite(operands[0], outs[0], [(src, dst) for dst, src in enumerate(left)])


def _reshape(found: Dimensions, eqn, operands, outs) -> None:
    operand, out = operands[0], outs[0]
    if math.prod(operand.shape) == 0:
        return unknown(found, eqn, operands, outs)
    for sources, targets in _reshape_groups(operand.shape, out.shape):
        # Equal contiguous blocks of a merged dimension are equal contiguous blocks of its major factor.
        found.unite(operand, out, [(sources[0], targets[0])])
        for value, dims in ((operand, sources), (out, targets)):
            major = value.shape[dims[0]]
            found.companions += [(value.nodes[dims[0]], value.nodes[d], i) for i, d in enumerate(dims[1:], start=1)]
            found.mark(value, dims[1:], f"reshaped together with a dimension of {major} in front of it", minor=True)


def _reshape_groups(before, after) -> list[tuple[list[int], list[int]]]:
    """Cut two shapes into the smallest runs of equal element count; dimensions of size 1 are left out."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    groups = []
    while left:
        sources, targets = [left.pop(0)], [right.pop(0)]
        a, b = before[sources[0]], after[targets[0]]
        while a != b:
            if a < b:
                sources.append(left.pop(0))
                a *= before[sources[-1]]
            else:
                targets.append(right.pop(0))
                b *= after[targets[-1]]
        groups.append((sources, targets))
    return groups


def _dot_general(found: Dimensions, eqn, operands, outs) -> None:
    lhs, rhs = operands
    out = outs[0]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    found.unite(lhs, rhs, list(zip([*lhs_contract, *lhs_batch], [*rhs_contract, *rhs_batch], strict=True)))
    lhs_free = [d for d in range(len(lhs.shape)) if d not in (*lhs_contract, *lhs_batch)]
    rhs_free = [d for d in range(len(rhs.shape)) if d not in (*rhs_contract, *rhs_batch)]
    for value, dims, start in (
        (lhs, lhs_batch, 0),
        (lhs, lhs_free, len(lhs_batch)),
        (rhs, rhs_free, len(lhs_batch) + len(lhs_free)),
    ):
        found.unite(value, out, [(d, start + i) for i, d in enumerate(dims)])

    flops = 2 * math.prod(out.shape) * math.prod(lhs.shape[d] for d in lhs_contract) * found.times
    found.products.append(Product(lhs, rhs, out, tuple(lhs.nodes[d] for d in lhs_contract), flops))
    for d in lhs_contract:
        found.add_sum(out, lhs.nodes[d], "forward", of_product=True)
    # The gradient of one operand contracts over the free dimensions of the other.
    for value, other, free in ((lhs, rhs, rhs_free), (rhs, lhs, lhs_free)):
        if value.needs_gradient:
            for d in free:
                found.add_sum(value, other.nodes[d], "backward", of_product=True)


def _reduce(found: Dimensions, eqn, operands, outs) -> None:
    axes = {int(d) for d in eqn.params["axes"]}
    left = [d for d in range(len(operands[0].shape)) if d not in axes]
    found.unite(operands[0], outs[0], [(src, dst) for dst, src in enumerate(left)])
    if eqn.primitive.name.startswith("arg"):
        found.mark(operands[0], axes, _through(eqn))
    for d in axes:
        found.add_sum(outs[0], operands[0].nodes[d], "forward", of_product=False)


def _along(*params: str) -> Callable:
    """Make a rule for operations that work along the axes named by `params` and keep all others."""

    def rule(found: Dimensions, eqn, operands, outs) -> None:
        axes: set[int] = set()
        for param in params:
            axis = eqn.params[param]
            axes.update(int(a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
        for value in (*operands, *outs):
            found.mark(value, [d for d in axes if d < len(value.shape)], _through(eqn))
        kept = [(d, d) for d in range(len(outs[0].shape)) if d not in axes]
        for a, b in itertools.pairwise((*operands, *outs)):
            found.unite(a, b, kept)

    return rule


def _windows(found: Dimensions, eqn, operands, outs) -> None:
    """Cut out, pad or overwrite a part: the dimensions that keep their size are kept, the others opaque."""
    big, small = operands[0], outs[0]
    if eqn.primitive.name == "dynamic_update_slice":
        small = operands[1]
        found.unite(big, outs[0], [(d, d) for d in range(len(big.shape))])
    kept = [d for d in range(len(big.shape)) if big.shape[d] == small.shape[d]]
    if eqn.primitive.name == "pad":
        # Padding at one end and cutting at the other also keeps the size.
        kept = [d for d in kept if tuple(eqn.params["padding_config"][d]) == (0, 0, 0)]
    found.unite(big, small, [(d, d) for d in kept])
    changed = [d for d in range(len(big.shape)) if d not in kept]
    for value in (big, small):
        found.mark(value, changed, _through(eqn))


def _stack(found: Dimensions, eqn, operands, outs) -> None:
    axis = int(eqn.params["axis"]) % len(outs[0].shape)
    found.mark(outs[0], (axis,), _through(eqn))
    for operand in operands:
        found.unite(operand, outs[0], [(d, d + (d >= axis)) for d in range(len(operand.shape))])


def _gather(found: Dimensions, eqn, operands, outs) -> None:
    operand, indices = operands
    out = outs[0]
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = iter(d for d in range(len(out.shape)) if d not in numbers.offset_dims)
    for index_dim in range(len(indices.shape) - 1):
        out_dim = next(batch)
        found.unite(indices, out, [(index_dim, out_dim)])
        if index_dim in numbers.start_indices_batching_dims:
            where = numbers.start_indices_batching_dims.index(index_dim)
            found.unite(operand, out, [(numbers.operand_batching_dims[where], out_dim)])
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(operand.shape)) if d not in removed]
    looked_up = list(numbers.collapsed_slice_dims)
    for d, out_dim in zip(windows, sorted(numbers.offset_dims), strict=True):
        if sizes[d] == operand.shape[d]:
            found.unite(operand, out, [(d, out_dim)])
        else:
            looked_up.append(d)
            found.mark(out, (out_dim,), _through(eqn))
    found.mark(operand, looked_up, _through(eqn))


def _barrier(found: Dimensions, eqn, operands, outs) -> None:
    for operand, out in zip(operands, outs, strict=True):
        found.unite(operand, out, [(d, d) for d in range(len(out.shape))])


RULES: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "argmax": _reduce,
    "argmin": _reduce,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "sort": _along("dimension"),
    "top_k": _along("axis"),
    "rev": _along("dimensions"),
    "stack": _stack,
    "gather": _gather,
    "optimization_barrier": _barrier,
    "bitcast_convert_type": _bitcast,
    **{"reduce_" + name: _reduce for name in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **{"cum" + name: _along("axis") for name in ("sum", "max", "min", "prod", "logsumexp")},
    **{name: _windows for name in ("slice", "dynamic_slice", "dynamic_update_slice", "pad")},
    **dict.fromkeys(FRESH, _fresh),
}
