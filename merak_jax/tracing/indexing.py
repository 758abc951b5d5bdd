"""Rules for equations that pick, write or draw: gather, scatter, dynamic slices, random bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jax.lax import GatherScatterMode

from merak_jax.tracing import randomness
from merak_jax.tracing.separability import (
    Batched,
    Partial,
    Shared,
    is_rows,
    jointly_linear,
    linear_in_first,
    rule,
    same_rows,
)


@rule("dynamic_slice")
@linear_in_first
def _dynamic_slice(op):
    rows = op.status[0]
    if not is_rows(rows) or op.full.params["slice_sizes"][rows.axis] != op.full.invars[0].aval.shape[rows.axis]:
        op.fail("some rows of the batch are picked by a dynamic slice")
    return rows


@rule("dynamic_update_slice")
def _dynamic_update_slice(op):
    if jointly_linear(op, (0, 1)):
        return Partial()
    op.refuse_partial()
    rows, update = op.status[0], op.status[1]
    sizes = [op.full.invars[i].aval.shape for i in (0, 1)]
    if not (
        is_rows(rows) and is_rows(update) and rows.axis == update.axis and sizes[0][rows.axis] == sizes[1][rows.axis]
    ):
        op.fail("some rows of the batch are overwritten")
    return same_rows(op, rows, update)


@rule("gather")
def _gather(op):
    filled = op.params["mode"] == GatherScatterMode.FILL_OR_DROP and op.params["fill_value"] is not None
    if isinstance(op.status[0], Partial) and filled and np.nan_to_num(op.params["fill_value"]) != 0:
        op.fail("out-of-range picks from a sum over the batch give a value that would count in every microbatch")
    return _picked(op)


@linear_in_first
def _picked(op):
    operand, indices, numbers = op.status[0], op.status[1], op.params["dimension_numbers"]
    places = [d for d in range(op.micro.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    if is_rows(indices) and indices.axis == op.ndim(1) - 1:
        op.fail("one index is made from several rows of the batch")
    if not is_rows(operand):
        if not is_rows(indices):
            op.fail("a value that every row shares is sliced by the number of rows")
        return replace(indices, axis=places[indices.axis])
    axis = operand.axis
    if axis in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        if is_rows(indices) and indices.axis == paired:
            return replace(same_rows(op, operand, indices), axis=places[paired])
    elif axis in numbers.start_index_map:
        rows = op.own_rows(1, operand, numbers.start_index_map.index(axis))
        if axis in numbers.collapsed_slice_dims and rows is not None:
            return replace(rows, axis=places[rows.axis])
    elif not is_rows(indices) and op.full.params["slice_sizes"][axis] == op.full.invars[0].aval.shape[axis]:
        fixed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [d for d in range(op.ndim(0)) if d not in fixed]
        return replace(operand, axis=numbers.offset_dims[kept.index(axis)])
    return op.fail("rows of the batch are picked by index")


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(op):
    operand, indices, updates = op.status
    numbers, adds = op.params["dimension_numbers"], op.name in ("scatter-add", "scatter-sub")
    places = [d for d in range(op.ndim(2)) if d not in numbers.update_window_dims]
    paired = is_rows(indices) and indices.axis < op.ndim(1) - 1 and is_rows(updates)
    paired = paired and updates.axis == places[indices.axis]
    if adds and not is_rows(operand) and paired:
        same_rows(op, indices, updates)
        if isinstance(operand, Shared):
            op.count_once(0)
        return Partial()
    if (adds or op.name == "scatter") and jointly_linear(op, (0, 2)):
        return Partial()
    op.refuse_partial()
    if not is_rows(operand):
        op.fail(f"rows of the batch are collected by `{op.name}`")
    axis, rows = operand.axis, same_rows(op, operand, updates)
    if axis in numbers.operand_batching_dims:
        place = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        if paired and indices.axis == place:
            return same_rows(op, operand, indices, updates)
    elif axis in numbers.scatter_dims_to_operand_dims:
        own = op.own_rows(1, operand, numbers.scatter_dims_to_operand_dims.index(axis))
        if axis in numbers.inserted_window_dims and own is not None and updates.axis == places[own.axis]:
            return same_rows(op, operand, updates)
    elif not is_rows(indices) and is_rows(updates):
        fixed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [d for d in range(op.ndim(0)) if d not in fixed]
        sizes = [op.full.invars[i].aval.shape for i in (0, 2)]
        if updates.axis == numbers.update_window_dims[kept.index(axis)] and sizes[0][axis] == sizes[1][updates.axis]:
            return rows
    return op.fail("rows of the batch are written by index")


# -- random numbers


@rule("random_split")
def _random_split(op):
    if is_rows(op.status[0]):
        return op.status[0]
    rows, layout = _drawn_rows(op)
    if randomness.has_rows(op.micro.invars[0].aval.dtype):
        op.draw(randomness.split_rows_p, **layout)
    else:
        op.draw(randomness.split_microbatch_p, shape=layout["shape"])
    return rows


@rule("random_bits")
def _random_bits(op):
    if is_rows(op.status[0]):
        return op.status[0]
    rows, layout = _drawn_rows(op)
    width = op.params["bit_width"]
    if randomness.has_rows(op.micro.invars[0].aval.dtype):
        op.draw(randomness.random_rows_p, **layout, bit_width=width)
    else:
        op.draw(randomness.random_microbatch_p, shape=layout["shape"], bit_width=width)
    return rows


def _drawn_rows(op) -> tuple[Batched, dict]:
    """The rows of a draw with one key (or an array of keys that all rows share), and where they lie in it."""
    axis, keys = op.new_batch_axis(), op.micro.invars[0].aval
    sizes = [e.outvars[0].aval.shape[axis] for e in (op.full, op.micro)]
    share, rest = divmod(sizes[0], op.rows_full)
    if rest or sizes[1] != share * op.walker.rows_micro:
        op.fail("random numbers are drawn for a number of rows that is not a multiple of the batch")
    if sizes[0] >= randomness.MOST_NUMBERS:
        op.fail(
            f"a draw has {sizes[0]} random numbers along the dimension of the batch; draw fewer, or in several dimensions"
        )
    if not randomness.has_rows(keys.dtype):
        randomness.warn_about_keys(keys.dtype, op.walker.place(op.full))
    rows = Batched(axis, 1, share)
    shape = op.micro.outvars[0].aval.shape[keys.ndim :]
    return rows, dict(shape=shape, axis=axis - keys.ndim, outer=1, rows_full=op.rows_full)
