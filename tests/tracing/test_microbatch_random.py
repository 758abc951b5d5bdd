"""Random losses are refused, or their microbatches put together are the whole batch: values, sums, rows, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax import lax

from merak_jax.errors import NotSeparableError
from merak_jax.tracing.jaxprs import function_of
from merak_jax.tracing.microbatch import Batched, Partial
from tests.tracing.microbatch_check import close, joined_rows, rows_of, split, value_and_gradients

B, T, H, V = 6, 3, 4, 5
EXAMPLES = 75


def data(length=T):
    """`(params, batch)` with B rows of `length` tokens."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(H, H)), "e": rng.normal(size=(V, H)), "s": rng.normal(size=H)}
    valid = rng.random((B, length)) < 0.6
    valid[:, 0], valid[1] = True, False
    tokens = rng.integers(0, V, (B, length)).astype(np.int32)
    return params, {"m": valid, "t": tokens, "x": rng.normal(size=(B, length, H)), "y": tokens[:, -1]}


def whole_batch_and_microbatches(loss, params, batch, count, gradients=False):
    """Pairs of what one device has and what the programs of the pass give, run on real microbatches, put together."""
    params, batch = jax.tree.map(jnp.asarray, (params, batch))
    result, args, b = split(loss, params, batch, (), count)
    num_params = len(jax.tree.leaves(params)) if gradients else 0
    tree = jax.tree.structure((params, batch))
    whole = value_and_gradients(
        lambda *flat: jax.tree.leaves(loss(*jax.tree.unflatten(tree, flat))), num_params, compiled=False
    )
    pipeline = value_and_gradients(function_of(result.pipeline), num_params, compiled=False)
    pre = function_of(result.precompute)(*args)
    outs, grads = [], []
    for m in range(count):
        inputs = [
            rows_of(v, s, B, m * b, b) if isinstance(s, Batched) else v
            for v, s in zip([*args, *pre], result.pipeline_status[:-1], strict=True)
        ]
        found = pipeline(*inputs, jnp.arange(m * b, (m + 1) * b, dtype=jnp.uint32))
        outs.append(found[0])
        grads.append(found[1])
    together = []
    for status, values in zip(result.out_status, zip(*outs), strict=True):
        if isinstance(status, Partial):
            together.append(sum(values[1:], values[0]))
        elif isinstance(status, Batched):
            together.append(joined_rows(values, status, b))
        else:
            assert all(np.array_equal(v, values[0], equal_nan=True) for v in values), (
                "not the same for all microbatches"
            )
            together.append(values[0])
    expected, expected_grads = whole(*args)
    final = function_of(result.postcompute)(*args, *together)
    found_grads = [sum(parts[1:], parts[0]) for parts in zip(*grads)]
    return [*zip(expected, final, strict=True), *zip(expected_grads, found_grads, strict=True)]


def per_row(mask, a):
    """`mask` [B, T] or [B], with the dimensions that `a` has more."""
    mask = mask[(..., *(None,) * (a.ndim - mask.ndim))]
    return jnp.broadcast_to(mask, a.shape)


def scan_over(a, axis):
    def turn(c, x):
        c = jnp.tanh(0.5 * c + x)
        return c, c * x

    last, all_of_them = lax.scan(turn, jnp.zeros_like(jnp.take(a, 0, axis)), jnp.moveaxis(a, axis, 0))
    return last + all_of_them[-1]


# name: (number of float operands, function of operands, the batch, an axis, and the number of rows). The rows are the axis
# 0 of most values, so that of the operations along an axis about a third couple rows.
OPERATIONS = {
    "sin": (1, lambda a, b, k, n: jnp.sin(a)),
    "relu": (1, lambda a, b, k, n: jax.nn.relu(a)),
    "half": (1, lambda a, b, k, n: a / 2 - 1),
    "remat": (1, lambda a, b, k, n: jax.checkpoint(lambda x: jnp.tanh(x) * 2)(a)),
    "add": (2, lambda a, c, b, k, n: a + c),
    "sub": (2, lambda a, c, b, k, n: a - c),
    "mul": (2, lambda a, c, b, k, n: a * c),
    "maximum": (2, lambda a, c, b, k, n: jnp.maximum(a, c)),
    "ratio": (2, lambda a, c, b, k, n: a / (1 + c**2)),
    "sum": (1, lambda a, b, k, n: a.sum(k)),
    "mean": (1, lambda a, b, k, n: a.mean(k)),
    "mean of all": (1, lambda a, b, k, n: a.mean()),
    "max": (1, lambda a, b, k, n: a.max(k)),
    "norm": (1, lambda a, b, k, n: (a - a.mean(k, keepdims=True)) / jnp.sqrt(a.var(k, keepdims=True) + 0.1)),
    "centred": (1, lambda a, b, k, n: a - a.mean(0)),
    "softmax": (1, lambda a, b, k, n: jax.nn.softmax(a, k)),
    "logsumexp": (1, lambda a, b, k, n: jax.nn.logsumexp(a, k)),
    "cumsum": (1, lambda a, b, k, n: jnp.cumsum(a, k)),
    "sort": (1, lambda a, b, k, n: jnp.sort(a, k)),
    "argmax": (1, lambda a, b, k, n: jax.nn.one_hot(a.argmax(k), a.shape[k])),
    "argsort": (1, lambda a, b, k, n: jnp.argsort(a, k) * 0.5),
    "top": (1, lambda a, b, k, n: lax.top_k(a, 2)[0]),
    "scan": (1, lambda a, b, k, n: scan_over(a, k)),
    "flip": (1, lambda a, b, k, n: jnp.flip(a, k)),
    "roll": (1, lambda a, b, k, n: jnp.roll(a, 1, k)),
    "transpose": (1, lambda a, b, k, n: jnp.moveaxis(a, 0, k)),
    "flatten": (1, lambda a, b, k, n: a.reshape(-1)),
    "tokens": (1, lambda a, b, k, n: a.reshape(-1, a.shape[-1])),
    "rows": (1, lambda a, b, k, n: a.reshape(n, -1)),
    "mixed": (1, lambda a, b, k, n: a.reshape(a.shape[1], a.shape[0], -1)),
    "halves": (1, lambda a, b, k, n: a.reshape(2, a.shape[0] // 2, -1).sum(0)),
    "expand": (1, lambda a, b, k, n: jnp.expand_dims(a, k)),
    "first": (1, lambda a, b, k, n: jnp.take(a, 0, k)),
    "others": (1, lambda a, b, k, n: lax.slice_in_dim(a, 1, a.shape[k], axis=k)),
    "every second": (1, lambda a, b, k, n: lax.slice_in_dim(a, 0, a.shape[k], stride=2, axis=k)),
    "one by rows": (1, lambda a, b, k, n: lax.index_in_dim(a, n % 2, k)),
    "concatenate": (2, lambda a, c, b, k, n: jnp.concatenate([a, c], k)),
    "first half": (1, lambda a, b, k, n: jnp.split(a, 2, k)[0]),
    "stack": (2, lambda a, c, b, k, n: jnp.stack([a, c], k)),
    "pad": (1, lambda a, b, k, n: jnp.pad(a, [(0, int(d == k)) for d in range(a.ndim)])),
    "repeat": (1, lambda a, b, k, n: jnp.repeat(a, 2, k)),
    "tile": (1, lambda a, b, k, n: jnp.tile(a, 2)),
    "for every row": (1, lambda a, b, k, n: jnp.broadcast_to(a, (n, *a.shape))),
    "matmul": (2, lambda a, c, b, k, n: a @ c),
    "turned matmul": (2, lambda a, c, b, k, n: jnp.tensordot(a, c, ((0,), (0,)))),
    "per row matmul": (2, lambda a, c, b, k, n: jnp.einsum("b...i,b...j->b...ij", a, c)),
    "scores": (2, lambda a, c, b, k, n: jnp.einsum("bth,bsh->bts", a, c)),
    "masked": (1, lambda a, b, k, n: jnp.where(per_row(b["m"], a), a, 0.0)),
    "masked mean": (1, lambda a, b, k, n: (a * per_row(b["m"], a)).sum() / b["m"].sum()),
    "mean of means": (1, lambda a, b, k, n: (a * per_row(b["m"], a)).sum(1) / (b["m"].sum(1) + 1.0)[:, None]),
    "masked by row": (2, lambda a, c, b, k, n: jnp.where(per_row(b["y"] > 2, a), a, c)),
    "count": (1, lambda a, b, k, n: a * b["m"].sum() / n),
    "embed": (1, lambda a, b, k, n: a[b["t"] % a.shape[0]]),
    "labels": (1, lambda a, b, k, n: a * jax.nn.one_hot(b["y"], a.shape[-1])[(slice(None), *(None,) * (a.ndim - 2))]),
    "pick": (1, lambda a, b, k, n: jnp.take_along_axis(a, (b["t"] % a.shape[-1])[..., None], -1)),
    "own entry": (1, lambda a, b, k, n: a[jnp.arange(n), b["y"] % a.shape[1]]),
    "rows by index": (1, lambda a, b, k, n: a[b["y"] % a.shape[0]]),
    "segments": (1, lambda a, b, k, n: jnp.zeros((V, *a.shape[1:])).at[b["y"]].add(a)),
    "segments on top": (2, lambda a, c, b, k, n: c.at[b["y"] % c.shape[0]].add(a)),
    "set": (1, lambda a, b, k, n: a.at[(slice(None),) * k + (0,)].set(0.5)),
    "numbered": (1, lambda a, b, k, n: a * jnp.arange(a.shape[k])[(..., *(None,) * (a.ndim - 1 - k))]),
    "by rows": (1, lambda a, b, k, n: a * n),
    "branch": (1, lambda a, b, k, n: lax.cond(b["y"].sum() > 3, jnp.sin, lambda x: x * 2, a)),
    "own branch": (1, lambda a, b, k, n: lax.cond(a.sum() > 0, jnp.sin, lambda x: x * 2, a)),
    "loop": (1, lambda a, b, k, n: lax.fori_loop(0, 2, lambda i, c: c + 0.1 * a * i, a)),
}
NAMES = sorted(OPERATIONS)
OUTPUTS = ("sum", "mean", "masked mean")


def run_program(steps, output, reported, params, batch):
    """Apply the steps that fit to a growing pool of values; which ones fit depends on shapes only."""
    n = batch["x"].shape[0]
    pool = [params["w"], params["e"], params["s"], params["e"][batch["t"]], batch["x"], batch["x"] @ params["w"]]
    made = len(pool)
    for name, i, j, axis in steps:
        arity, function = OPERATIONS[name]
        operands = [pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]][:arity]
        try:
            value = function(*operands, batch, axis % max(1, operands[0].ndim), n)
        except (TypeError, ValueError, IndexError):
            continue
        if value.size <= 4000 and value.ndim <= 4:
            pool.append(value)
    total = {"sum": lambda a: a.sum() / 3, "mean": jnp.mean, "masked mean": None}[output]
    if total is None:
        try:
            value = OPERATIONS["masked mean"][1](pool[-1], batch, 0, n)
        except ValueError:
            value = pool[-1].sum()
    else:
        value = total(pool[-1])
    return [value, *pool[made:][-reported:]] if reported else [value]


STEP = st.tuples(st.sampled_from(NAMES), st.integers(0, 5), st.integers(0, 6), st.integers(0, 2))
PROGRAM = st.lists(STEP, min_size=2, max_size=6)


@pytest.mark.parametrize("length", [T, B])
def test_random_losses_are_refused_or_have_the_numbers_of_the_whole_batch(length):
    """With as many tokens as rows, sizes alone do not tell what the batch is."""
    params, batch = data(length)
    accepted, refused, used = [], [], set()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @example([("one by rows", 0, 0, 2)], "sum", 1, 2)
    @example([("sum", 0, 0, 0), ("one by rows", 0, 0, 1)], "mean", 0, 2)
    @given(PROGRAM, st.sampled_from(OUTPUTS), st.integers(0, 3), st.sampled_from([2, 3, 6]))
    def run(steps, output, reported, count):
        def loss(p, b):
            return run_program(steps, output, reported, p, b)

        try:
            pairs = whole_batch_and_microbatches(loss, params, batch, count, gradients=len(accepted) % 5 == 0)
        except NotSeparableError:
            refused.append(steps)
            return
        accepted.append(steps)
        used.update(name for name, *_ in steps)
        for expected, found in pairs:
            close(found, expected)

    run()
    assert len(accepted) > 0.3 * (len(accepted) + len(refused)), (len(accepted), len(refused))
    assert len(refused) > 5
    assert len(used) > len(OPERATIONS) / 2, sorted(OPERATIONS.keys() - used)
