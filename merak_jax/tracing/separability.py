"""Per-primitive rules: what one equation does to the rows of the batch.

A value of the microbatch program stands for a value of the full-batch program in one of three ways (its
status): equal in every microbatch, the microbatch's rows of it, or one summand of it. A rule takes the
statuses of the operands of one equation and returns those of its results, or fails where no status is true.
`RULES` maps primitive names to rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
