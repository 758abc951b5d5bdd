"""Rules for equations that reduce, reshape, cut or multiply: what they do to the axis of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from merak_jax.tracing.separability import (
    Batched,
    Partial,
    Status,
    Uniform,
    elementwise,
    is_rows,
    jointly_linear,
    linear_in_each,
    linear_in_first,
    rule,
    same_rows,
)

# -- reductions


def _without(status: Any, axes: Sequence[int]) -> Status:
    return replace(status, axis=status.axis - sum(a < status.axis for a in axes))


@rule("reduce_sum")
@linear_in_first
def _reduce_sum(op):
    axes = op.params["axes"]
    return Partial() if op.status[0].axis in axes else _without(op.status[0], axes)


REDUCTIONS = {
    "reduce_max": "the maximum",
    "reduce_min": "the minimum",
    "reduce_prod": "the product",
    "reduce_and": "`all`",
    "reduce_or": "`any`",
    "reduce_xor": "the parity",
    "argmax": "the argmax",
    "argmin": "the argmin",
    "reduce": "a reduction",
}


@rule(*REDUCTIONS)
def _reduce(op):
    rows, axes = elementwise(op), op.params.get("axes", op.params.get("dimensions"))
    if rows.axis in axes:
        op.fail(f"{REDUCTIONS[op.name]} over the batch is not the sum of the microbatches' own")
    return _without(rows, axes)


@rule("cumsum")
@linear_in_first
def _cumsum(op):
    return _along(op, op.params["axis"])


@rule("cumlogsumexp", "cumprod", "cummax", "cummin")
def _cumulative(op):
    return _along(op, op.params["axis"])


@rule("sort")
def _sort(op):
    return _along(op, op.params["dimension"])


@rule("top_k")
def _top_k(op):
    return _along(op, op.params.get("axis", op.ndim(0) - 1))


@rule("approx_top_k")
def _approx_top_k(op):
    return _along(op, op.params["reduction_dimension"] % op.ndim(0))


def _along(op, axis: int) -> Status:
    rows = elementwise(op)
    if rows.axis == axis:
        op.fail(f"`{op.name}` runs along the batch")
    return rows


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
@rule("select_and_scatter_add", "select_and_gather_add")
def _reduce_window(op):
    op.refuse_partial()
    rows, p = same_rows(op, *op.status), op.params
    windows = ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    if any(p[k][rows.axis] != 1 for k in windows if k in p) or tuple(p["padding"][rows.axis]) != (0, 0):
        op.fail("a window spans several rows of the batch")
    return rows


@rule("fft")
@linear_in_first
def _fft(op):
    return _leading(op, len(op.params["fft_lengths"]))


@rule(
    "cholesky",
    "eig",
    "eigh",
    "householder_product",
    "lu",
    "qr",
    "schur",
    "svd",
    "symmetric_product",
    "triangular_solve",
)
def _matrix(op):
    return _leading(op, 2)


@rule("lu_pivots_to_permutation", "tridiagonal_solve")
def _vector(op):
    return _leading(op, 1)


def _leading(op, trailing: int) -> Status:
    rows = elementwise(op)
    if rows.axis >= op.ndim(0) - trailing:
        op.fail(f"`{op.name}` works across the batch")
    return rows


# -- shapes


@rule("transpose")
@linear_in_first
def _transpose(op):
    return replace(op.status[0], axis=op.params["permutation"].index(op.status[0].axis))


@rule("squeeze")
@linear_in_first
def _squeeze(op):
    return _without(op.status[0], op.params["dimensions"])


@rule("rev")
@linear_in_first
def _rev(op):
    if op.status[0].axis in op.params["dimensions"]:
        op.fail("the order of the rows is reversed")
    return op.status[0]


@rule("broadcast_in_dim")
@linear_in_first
def _broadcast(op):
    if is_rows(op.status[0]):
        return replace(op.status[0], axis=op.params["broadcast_dimensions"][op.status[0].axis])
    return Uniform(op.new_batch_axis())


@rule("iota")
def _iota(op):
    axis = op.new_batch_axis()
    if axis == op.params["dimension"]:
        op.fail("`iota` numbers the rows of the batch")
    return Uniform(axis)


@rule("reshape")
@linear_in_first
def _reshape(op):
    rows = op.layout(op.status[0])
    before, shape = rows.outer, op.full.outvars[0].aval.shape
    for size in op.full.invars[0].aval.shape[: rows.axis]:
        before *= size
    passed = 1
    for axis, size in enumerate(shape):
        outer, rest = divmod(before, passed) if passed else (0, 1)
        if rest == 0 and outer > 0 and size % (outer * op.rows_full) == 0:
            return Batched(axis, outer, size // (outer * op.rows_full))
        passed *= size
    return op.fail(f"the batch dimension is cut into pieces by a reshape to {list(shape)}")


@rule("concatenate")
def _concatenate(op):
    if jointly_linear(op, range(len(op.status))):
        return Partial()
    rows = elementwise(op)
    if rows.axis != op.params["dimension"]:
        return rows
    inner = rows.inner if isinstance(rows, Batched) else 1
    outer = 0
    for i, status in enumerate(op.status):
        if not is_rows(status):
            op.fail("rows that are not in the batch are concatenated to it")
        count, rest = divmod(op.full.invars[i].aval.shape[rows.axis], op.rows_full * inner)
        if rest or (isinstance(status, Batched) and status.inner != inner):
            op.fail("values whose rows are merged with other dimensions in different orders are concatenated")
        outer += count
    return Batched(rows.axis, outer, inner)


@rule("stack")
def _stack(op):
    if jointly_linear(op, range(len(op.status))):
        return Partial()
    rows = elementwise(op)
    return replace(rows, axis=rows.axis + (op.params["axis"] <= rows.axis))


@rule("unstack")
@linear_in_first
def _unstack(op):
    if op.status[0].axis == op.params["axis"]:
        op.fail("the batch is taken apart row by row")
    return _without(op.status[0], (op.params["axis"],))


@rule("tile")
@linear_in_first
def _tile(op):
    rows, reps = op.status[0], op.params["reps"]
    if isinstance(rows, Batched):
        return replace(rows, outer=rows.outer * reps[rows.axis])
    if is_rows(rows):
        return rows
    axis = op.new_batch_axis()
    # All copies are the same, so that they can be dealt out to the rows in order.
    share = op.full.outvars[0].aval.shape[axis] // op.rows_full
    return Uniform(axis) if op.full.invars[0].aval.shape[axis] == 1 else Batched(axis, 1, share)


@rule("split")
@linear_in_first
def _split(op):
    rows, axis = op.status[0], op.params["axis"]
    if not is_rows(rows) or rows.axis != axis:
        return rows
    pieces, start = [], 0
    for size in op.full.params["sizes"]:
        pieces.append(_piece(op, rows, start, start + size))
        start += size
    return pieces


@rule("slice")
@linear_in_first
def _slice(op):
    if not is_rows(op.status[0]):
        op.fail("a value that every row shares is sliced by the number of rows")
    axis, full = op.status[0].axis, op.full.params
    start, limit = full["start_indices"][axis], full["limit_indices"][axis]
    if full["strides"] is not None and full["strides"][axis] != 1:
        op.fail("some rows of the batch are left out by a slice")
    if (start, limit) == (0, op.full.invars[0].aval.shape[axis]):
        return op.status[0]
    return _piece(op, op.status[0], start, limit)


def _piece(op, status: Status, start: int, limit: int) -> Status:
    """Whole copies of the batch out of an axis that holds several (both halves of `concatenate([x, y])`)."""
    rows = op.layout(status)
    period = op.rows_full * rows.inner
    if start % period or limit % period or limit == start:
        op.fail("some rows of the batch are picked by a slice")
    return Batched(rows.axis, (limit - start) // period, rows.inner)


@rule("pad")
def _pad(op):
    if jointly_linear(op, (0, 1)):
        return Partial()
    op.refuse_partial()
    if tuple(op.params["padding_config"][op.status[0].axis]) != (0, 0, 0):
        op.fail("rows are padded to the batch")
    return op.status[0]


# -- products


@rule("dot_general")
def _dot_general(op):
    if linear_in_each(op):
        return Partial()
    (contracted, batch), (left, right) = op.params["dimension_numbers"], op.status
    free = [[d for d in range(op.ndim(i)) if d not in contracted[i] and d not in batch[i]] for i in (0, 1)]
    if is_rows(left) and is_rows(right):
        for pairs, dims in (("batch", batch), ("contracted", contracted)):
            if left.axis in dims[0] and right.axis == dims[1][dims[0].index(left.axis)]:
                rows = same_rows(op, left, right)
                return replace(rows, axis=dims[0].index(left.axis)) if pairs == "batch" else Partial()
        op.fail("every row of the batch is multiplied with every other one (two batch dimensions in one value)")
    if is_rows(left) and left.axis in free[0]:
        return replace(left, axis=len(batch[0]) + free[0].index(left.axis))
    if is_rows(right) and right.axis in free[1]:
        return replace(right, axis=len(batch[0]) + len(free[0]) + free[1].index(right.axis))
    return op.fail("the batch dimension is multiplied with a dimension of another value")


@rule("conv_general_dilated")
def _convolution(op):
    if linear_in_each(op):
        return Partial()
    spec = op.params["dimension_numbers"]
    if is_rows(op.status[1]) or op.status[0].axis != spec.lhs_spec[0] or op.params["batch_group_count"] != 1:
        op.fail("a convolution mixes rows of the batch")
    return replace(op.status[0], axis=spec.out_spec[0])
