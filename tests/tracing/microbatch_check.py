"""Check a loss cut into microbatches against the loss of the full batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import check_jaxpr

from merak_jax.errors import NotSeparableError
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import function_of
from merak_jax.tracing.microbatch import (
    Batched,
    Domain,
    MicrobatchedLoss,
    Partial,
    Shared,
    microbatch,
    rows_to_trace,
)

B, T, V, H = 8, 3, 5, 4


def rows_of(value, status: Batched, rows: int, start: int, count: int):
    """The rows `start … start+count` of a value whose axis is outer*rows*inner."""
    shape, axis = value.shape, status.axis
    split = (*shape[:axis], status.outer, rows, status.inner, *shape[axis + 1 :])
    picked = value.reshape(split)[(slice(None),) * (axis + 1) + (slice(start, start + count),)]
    return picked.reshape(*shape[:axis], status.outer * count * status.inner, *shape[axis + 1 :])


def joined_rows(values, status: Batched, rows: int):
    """The inverse of `rows_of`: the values of all microbatches as one."""
    axis, parts = status.axis, []
    for value in values:
        shape = value.shape
        parts.append(value.reshape(*shape[:axis], status.outer, rows, status.inner, *shape[axis + 1 :]))
    whole = jnp.concatenate(parts, axis + 1)
    return whole.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def split(loss, params, batch, extra=(), count=2) -> tuple[MicrobatchedLoss, list, int]:
    """Trace `loss(params, batch, *extra)` at both sizes, inline, split; also its flat arguments and b."""
    params, batch = jax.tree.map(jnp.asarray, (params, batch))
    full_rows = jax.tree.leaves(batch)[0].shape[0]
    rows = full_rows // count

    def traced(n):
        cut = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), batch)
        return inline(jax.make_jaxpr(lambda *a: jax.tree.leaves(loss(*a)))(params, cut, *extra))

    kinds = [(Shared(), Domain.PARAMETER)] * len(jax.tree.leaves(params))
    kinds += [(Batched(0), Domain.BATCH)] * len(jax.tree.leaves(batch))
    kinds += [(Shared(), Domain.CONSTANT)] * len(jax.tree.leaves(extra))
    traced_rows = rows_to_trace(full_rows, rows)
    result = microbatch(
        traced(full_rows),
        traced(traced_rows),
        [s for s, _ in kinds],
        [d for _, d in kinds],
        rows_full=full_rows,
        rows_micro=rows,
        rows_traced=traced_rows,
    )
    check_jaxpr(result.pipeline.jaxpr)
    check_jaxpr(result.precompute.jaxpr)
    return result, jax.tree.leaves((params, batch, *extra)), rows


def close(actual, expected, tolerance=1e-12):
    if jnp.issubdtype(jnp.asarray(expected).dtype, jnp.inexact):
        scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=tolerance * scale)
    else:
        np.testing.assert_array_equal(actual, expected)


def value_and_gradients(function, num_params, compiled):
    """`(outputs, gradients of output 0 by the first `num_params` arguments)` of a flat function."""

    def run(*args):
        def of_params(*params):
            outs = function(*params, *args[num_params:])
            return outs[0], outs

        if num_params == 0:
            return function(*args), ()
        grads, outs = jax.grad(of_params, tuple(range(num_params)), has_aux=True)(*args[:num_params])
        return outs, grads

    return jax.jit(run) if compiled else run


def check(loss, params, batch, extra=(), count=2, gradients=True, compiled=True) -> MicrobatchedLoss:
    """Split the loss, run every microbatch, combine, compare values and gradients with the full batch."""
    params, batch = jax.tree.map(jnp.asarray, (params, batch))
    result, args, b = split(loss, params, batch, extra, count)
    pre = function_of(result.precompute)(*args)
    assert len(pre) == len(result.precomputed_status)
    tree = jax.tree.structure((params, batch, *extra))
    num_params = len(jax.tree.leaves(params)) if gradients else 0
    pipeline = value_and_gradients(function_of(result.pipeline), num_params, compiled)
    whole = value_and_gradients(
        lambda *flat: jax.tree.leaves(loss(*jax.tree.unflatten(tree, flat))), num_params, compiled
    )

    def inputs(m):
        values = [
            rows_of(v, s, b * count, m * b, b) if isinstance(s, Batched) else v
            for v, s in zip([*args, *pre], result.pipeline_status)
        ]
        return [*values, jnp.arange(m * b, (m + 1) * b, dtype=jnp.uint32)]

    for value, aval in zip(inputs(0), result.pipeline.in_avals):
        assert value.shape == aval.shape and value.dtype == aval.dtype
    outs, grads = zip(*(pipeline(*inputs(m)) for m in range(count)))
    expected, expected_grads = whole(*args)
    assert len(expected) == len(result.out_status)
    for i, (status, truth) in enumerate(zip(result.out_status, expected)):
        values = [o[i] for o in outs]
        if isinstance(status, Partial):
            close(sum(values[1:], values[0]), truth)
        elif isinstance(status, Batched):
            close(joined_rows(values, status, b), truth)
        else:
            for value in values:
                close(value, truth)
    for parts, truth in zip(zip(*grads), expected_grads):
        close(sum(parts[1:], parts[0]), truth)
    assert count == 1 or result.out_status[0] == Partial()
    assert set(result.status) == set(result.domain)
    return result


def refuse(loss, params, batch, match, extra=()):
    with pytest.raises(NotSeparableError, match=match) as caught:
        split(loss, params, batch, extra)
    return str(caught.value)


def randn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


W = {"w": randn(H, V), "e": randn(V, H, seed=1)}
X = {"x": randn(B, H, seed=2), "y": np.arange(B) % V, "t": (np.arange(B * T).reshape(B, T) * 7) % V}
MASK = (np.arange(B * T).reshape(B, T) % 4 != 0) & (np.arange(B) < 4)[:, None]


def token_losses(p, b):
    """[B, T] losses of a tiny language model."""
    h = p["e"][b["t"]]
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["w"], (b["t"] + 1) % V)
