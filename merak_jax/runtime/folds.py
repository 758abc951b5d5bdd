"""Operations of the update that keep the axis over blocks, and those that fold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

ELEMENTWISE = frozenset(
    """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh
xor""".split()
)

FOLDS: dict[str, Callable] = {
    "add": jnp.sum,
    "add_any": jnp.sum,
    "mul": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}
STACK_FOLDS: dict[str, Callable] = {
    "reduce_sum": jnp.sum,
    "reduce_prod": jnp.prod,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}


def is_fold(name: str, dtype: Any) -> bool:
    """Whether an operation on this type is the fold of the table: `and` and `or` of integers work bit by bit."""
    return name not in ("and", "or") or dtype == jnp.bool_
