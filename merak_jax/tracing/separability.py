"""Per-primitive rules: what one equation does to the rows of the batch.

A value of the microbatch program stands for a value of the full-batch program in one of three ways (its
status): equal in every microbatch, the microbatch's rows of it, or one summand of it. A rule takes the
statuses of the operands of one equation and returns those of its results, or fails where no status is true.
`RULES` maps primitive names to rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax.numpy as jnp


@dataclass(frozen=True)
class Shared:
    """The same for all microbatches."""


@dataclass(frozen=True)
class Batched:
    """A microbatch holds its rows. `axis` has size outer*rows*inner, C order: reshapes may have merged it."""

    axis: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Partial:
    """The sum over all microbatches is the truth."""


@dataclass(frozen=True)
class Uniform:
    """Batched along `axis` with all rows the same, so any outer and inner are true. Never leaves the pass."""

    axis: int


Status = Shared | Batched | Partial | Uniform


Rule = Callable[[Any], "Status | list[Status]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the primitives called `names`; it gets an `Equation` of microbatch.py."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def is_rows(status: Status | None) -> TypeGuard[Batched | Uniform]:
    """Whether the value has a batch dimension."""
    return isinstance(status, Batched | Uniform)


def same_rows(op, *statuses: Status) -> Any:
    """The order of rows that all batched `statuses` have, at the axis of the first; fails if they differ."""
    rows = [s for s in statuses if is_rows(s)]
    if not rows:
        return Shared()
    layouts = {(s.outer, s.inner) for s in rows if isinstance(s, Batched)}
    if len(layouts) > 1:
        op.fail(f"`{op.name}` combines values whose rows are merged with other dimensions in different orders")
    return Batched(rows[0].axis, *layouts.pop()) if layouts else rows[0]


def elementwise(op) -> Any:
    """Row by row: batched operands must have their rows in the same place."""
    op.refuse_partial()
    if len({s.axis for s in op.status if is_rows(s)}) > 1:
        op.fail(f"`{op.name}` combines every row of the batch with every other one (two batch dimensions in one value)")
    return same_rows(op, *op.status)


def jointly_linear(op, data: Sequence[int]) -> bool:
    """Whether an operand in `data` is a sum over the batch, the result then being one.

    The equation is linear in the operands `data` together, so a shared one among them has to count once.
    """
    if not any(isinstance(op.status[i], Partial) for i in data):
        return False
    for i, status in enumerate(op.status):
        if is_rows(status) or (i not in data and not isinstance(status, Shared)):
            op.refuse_partial()
        elif i in data and isinstance(status, Shared):
            op.count_once(i)
    return True


def linear_in_each(op) -> bool:
    """Whether one operand is a sum over the batch and the others are shared: then the result is a sum too."""
    if not any(isinstance(s, Partial) for s in op.status):
        return False
    if sum(not isinstance(s, Shared) for s in op.status) > 1:
        op.refuse_partial()
    return True


def linear_in_first(function: Rule) -> Rule:
    """A rule that keeps a sum over the batch in operand 0 when all other operands are shared."""

    def with_partial(op):
        if isinstance(op.status[0], Partial) and all(isinstance(s, Shared) for s in op.status[1:]):
            return Partial()
        op.refuse_partial()
        return function(op)

    return with_partial


ELEMENTWISE = (
    "sign nextafter floor ceil round is_finite exp exp2 log expm1 log1p tanh logistic sin cos tan asin "
    "acos atan atan2 sinh cosh asinh acosh atanh abs sqrt rsqrt cbrt square pow integer_pow not and or "
    "xor population_count clz mulhi rem max min shift_left shift_right_arithmetic shift_right_logical eq "
    "ne ge gt le lt eq_to le_to lt_to clamp bitcast_convert_type regularized_incomplete_beta lgamma "
    "digamma polygamma igamma igamma_grad_a igammac zeta bessel_i0e bessel_i1e erf erfc erf_inv complex "
    "threefry2x32 random_seed random_wrap random_unwrap random_clone random_fold_in "
).split()
rule(*ELEMENTWISE)(elementwise)


@rule(
    "neg",
    "real",
    "imag",
    "conj",
    "copy",
    "copy_p",
    "stop_gradient",
    "name",
    "reduce_precision",
    "sharding_constraint",
)
@linear_in_first
def _unary_linear(op):
    return op.status[0]


@rule("optimization_barrier")
def _barrier(op):
    return list(op.status)


@rule("debug_callback", "debug_print")
def _debug(op):
    return []


@rule("convert_element_type")
def _convert(op):
    if isinstance(op.status[0], Partial):
        old, new = op.micro.invars[0].aval.dtype, op.params["new_dtype"]
        if new == jnp.bool_ or (jnp.issubdtype(old, jnp.inexact) and not jnp.issubdtype(new, jnp.inexact)):
            op.fail(f"a sum over the batch is rounded to {new}")
    return op.status[0]


@rule("add", "sub", "add_any")
def _add(op):
    return Partial() if jointly_linear(op, (0, 1)) else elementwise(op)


@rule("mul")
def _mul(op):
    return Partial() if linear_in_each(op) else elementwise(op)


@rule("div")
def _div(op):
    numerator, denominator = op.status
    if isinstance(numerator, Partial) and isinstance(denominator, Shared):
        if not jnp.issubdtype(op.micro.outvars[0].aval.dtype, jnp.inexact):
            op.fail("a sum over the batch is divided as an integer, which rounds every microbatch's share")
        return Partial()
    return elementwise(op)


@rule("select_n")
def _select(op):
    return Partial() if jointly_linear(op, range(1, len(op.status))) else elementwise(op)


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


def _along(op, axis: int) -> Status:
    rows = elementwise(op)
    if rows.axis == axis:
        op.fail(f"`{op.name}` runs along the batch")
    return rows


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
def _reduce_window(op):
    op.refuse_partial()
    rows, p = same_rows(op, *op.status), op.params
    trivial = all(
        p[k][rows.axis] == 1 for k in ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    )
    if not trivial or tuple(p["padding"][rows.axis]) != (0, 0):
        op.fail("a window spans several rows of the batch")
    return rows


@rule("fft")
@linear_in_first
def _fft(op):
    return _leading(op, len(op.params["fft_lengths"]))


@rule("cholesky", "eigh", "qr", "svd", "lu", "triangular_solve")
def _matrix(op):
    return _leading(op, 2)


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
    rows = op.status[0]
    if isinstance(rows, Batched):
        return replace(rows, outer=rows.outer * op.params["reps"][rows.axis])
    return rows


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
