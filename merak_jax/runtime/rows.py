"""Rows of a value: bring the batch to the front, cut microbatches out, put the batch axis back."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from merak_jax.tracing.microbatch import Batched


def rows_first(value: Any, status: Batched, rows: int) -> Any:
    """`value`, whose axis `status.axis` holds `outer * rows * inner`, as `[rows, ...]`."""
    shape = value.shape
    split = (*shape[: status.axis], status.outer, rows, status.inner, *shape[status.axis + 1 :])
    return jnp.moveaxis(value.reshape(split), status.axis + 1, 0) if not _plain(status) else value


def rows_back(value: Any, status: Batched) -> Any:
    """The inverse of `rows_first`, for any number of rows."""
    if _plain(status):
        return value
    moved = jnp.moveaxis(value, 0, status.axis + 1)
    shape = moved.shape
    axis = status.axis
    return moved.reshape((*shape[:axis], shape[axis] * shape[axis + 1] * shape[axis + 2], *shape[axis + 3 :]))


def _plain(status: Batched) -> bool:
    return status.axis == 0 and status.outer == 1 and status.inner == 1
