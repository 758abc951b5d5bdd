"""Random draws of a microbatch: exactly its rows of the draw that one device makes for the whole batch.

Under partitionable threefry, bits number i of a draw are a hash of the key and i (`jax.random`, "partitionable threefry"), so
the rows of a microbatch can be drawn alone. Other key types have no such form: every microbatch then draws with its own key.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.random import threefry2x32_p
from jax.interpreters import batching, mlir


class RandomKeyWarning(UserWarning):
    """Keys whose draws can't be cut into rows: microbatches draw other numbers than the whole batch on one device."""


def _register(primitive: Primitive, function, aval) -> None:
    """Make `primitive` run `function`, on devices and under `vmap`."""
    primitive.def_impl(lambda *args, **params: jax.jit(lambda *a: function(*a, **params))(*args))
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))

    def batched(args, dims, **params):
        return jax.vmap(lambda *a: function(*a, **params), in_axes=tuple(dims))(*args), 0

    batching.primitive_batchers[primitive] = batched


# Along the dimension of the batch the place of a number is one word; a larger draw is made on the full batch.
MOST_NUMBERS = 1 << 32


# -- counters: the place of each number in the draw for the whole batch, as two words of 32 bits


def _times(index: Any, stride: int) -> tuple[Any, Any]:
    """`index * stride` as (high, low) words; `index` uint32, `stride` below 2^64."""
    if stride == 1:
        return jnp.zeros_like(index), index
    high, low = divmod(stride, 1 << 32)
    words = [jnp.uint32(w) for w in (low >> 16, low & 0xFFFF)]
    upper, lower = index >> 16, index & 0xFFFF
    middle = lower * words[0] + ((lower * words[1]) >> 16)
    crossed = upper * words[1] + (middle & 0xFFFF)
    carried = upper * words[0] + (middle >> 16) + (crossed >> 16)
    return carried + index * jnp.uint32(high), index * jnp.uint32(low)


def _plus(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def row_counters(numbers: Any, shape: Sequence[int], axis: int, outer: int, rows_full: int) -> tuple[Any, Any]:
    """The counters of the rows `numbers` (uint32 [b]) of a draw of `shape` whose `axis` holds outer * b * inner."""
    inner = shape[axis] // (outer * len(numbers))
    size = outer * rows_full * inner
    assert size < MOST_NUMBERS, "such a draw is made on the full batch"
    at = (
        jnp.arange(outer, dtype=jnp.uint32)[:, None, None] * jnp.uint32(rows_full * inner)
        + numbers[None, :, None] * jnp.uint32(inner)
        + jnp.arange(inner, dtype=jnp.uint32)
    ).reshape(-1)
    full = [size if d == axis else n for d, n in enumerate(shape)]
    total = (jnp.zeros(shape, jnp.uint32),) * 2
    for d in range(len(shape)):
        index = lax.broadcast_in_dim(at, shape, (axis,)) if d == axis else lax.broadcasted_iota(jnp.uint32, shape, d)
        total = _plus(total, _times(index, math.prod(full[d + 1 :])))
    return total


def _hash(key: Any, counters: tuple[Any, Any]) -> tuple[Any, Any]:
    words = jax.random.key_data(key)
    shape = counters[0].shape
    return tuple(threefry2x32_p.bind(*(jnp.broadcast_to(w, shape) for w in words), *counters))  # type: ignore[return-value]


def _over_keys(function, key: Any) -> Any:
    """`function` of one key, for an array of keys in front."""
    for _ in range(key.ndim):
        function = jax.vmap(function)
    return function(key)


# -- draws


def draw_rows(key: Any, numbers: Any, *, shape, axis: int, outer: int, rows_full: int, bit_width: int) -> Any:
    """The rows `numbers` of `random_bits(key, bit_width, shape of the whole batch)`; `shape` is that of the result, per key."""
    counters = row_counters(numbers, shape, axis, outer, rows_full)

    def one(key):
        high, low = _hash(key, counters)
        dtype = jnp.dtype(f"uint{bit_width}")
        if bit_width == 64:
            return (high.astype(dtype) << jnp.asarray(32, dtype)) | low.astype(dtype)
        return (high ^ low).astype(dtype)

    return _over_keys(one, key)


def split_rows(key: Any, numbers: Any, *, shape, axis: int, outer: int, rows_full: int) -> Any:
    """The rows `numbers` of `random.split(key, shape of the whole batch)`."""
    counters = row_counters(numbers, shape, axis, outer, rows_full)

    def one(key):
        words = jnp.stack(_hash(key, counters), axis=-1)
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    return _over_keys(one, key)


def draw_per_microbatch(key: Any, numbers: Any, *, shape, bit_width: int) -> Any:
    """A draw with a key of the microbatch's own, for keys whose draws have no rows."""

    def one(key):
        return jax.random.bits(jax.random.fold_in(key, numbers[0]), shape, jnp.dtype(f"uint{bit_width}"))

    return _over_keys(one, key)


def split_per_microbatch(key: Any, numbers: Any, *, shape) -> Any:
    """Keys split from a key of the microbatch's own."""
    return _over_keys(lambda key: jax.random.split(jax.random.fold_in(key, numbers[0]), shape), key)


def _bits_aval(key, numbers, *, shape, bit_width, **_):
    return ShapedArray((*key.shape, *shape), jnp.dtype(f"uint{bit_width}"))


def _keys_aval(key, numbers, *, shape, **_):
    return ShapedArray((*key.shape, *shape), key.dtype)


random_rows_p = Primitive("random_rows")
split_rows_p = Primitive("split_rows")
random_microbatch_p = Primitive("random_microbatch")
split_microbatch_p = Primitive("split_microbatch")
_register(random_rows_p, draw_rows, _bits_aval)
_register(split_rows_p, split_rows, _keys_aval)
_register(random_microbatch_p, draw_per_microbatch, _bits_aval)
_register(split_microbatch_p, split_per_microbatch, _keys_aval)


def has_rows(key_dtype: Any) -> bool:
    """Whether the draws of such keys can be cut into rows."""
    return str(key_dtype) == "key<fry>" and jax.config.jax_threefry_partitionable


def warn_about_keys(key_dtype: Any, place: str) -> None:
    """Say once per line that draws are not those of one device."""
    threefry = str(key_dtype) == "key<fry>"
    what = "with jax_threefry_partitionable=False" if threefry else f"with keys of type {key_dtype}"
    way_out = "that option's default, True, gives those" if threefry else "threefry keys (the default) give those"
    warnings.warn(
        f"draws {what} can't be cut into the rows of microbatches: each microbatch draws with its own key, so that the numbers "
        f"are as random but not those of one device; {way_out}. {place}",
        RandomKeyWarning,
        stacklevel=2,
    )
