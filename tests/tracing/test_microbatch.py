"""A loss that is accepted gives the full-batch numbers by microbatches; every other one is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from merak_jax.errors import NotSeparableError
from merak_jax.tracing.jaxprs import function_of
from merak_jax.tracing.microbatch import (
    Batched,
    Domain,
    Partial,
    Shared,
)
from tests.tracing.microbatch_check import (
    MASK,
    B,
    T,
    V,
    W,
    X,
    check,
    close,
    joined_rows,
    randn,
    refuse,
    rows_of,
    split,
    token_losses,
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_mean_keeps_the_full_batch_divisor():
    result = check(lambda p, b: jnp.mean((b["x"] @ p["w"]) ** 2), W, X, count=4)
    assert not result.precompute.jaxpr.eqns


def test_one_microbatch_is_the_loss_itself():
    def loss(p, b):
        h = b["x"] @ p["w"]
        return ((h - h.mean(0)) ** 2 / (h.var(0) + 1e-3)).sum(), h

    result = check(loss, W, X, count=1)
    assert result.out_status == (Shared(), Shared()) and not result.precompute.jaxpr.eqns


def test_masked_mean_is_exact_case_29():
    losses = np.asarray([[1.0, 1, 1, 1], [5, 0, 0, 0]])
    batch = {"l": losses, "m": np.asarray([[1.0, 1, 1, 1], [1, 0, 0, 0]])}
    result = check(lambda p, b: (p * b["l"] * b["m"]).sum() / b["m"].sum(), np.asarray(1.0), batch)
    assert len(result.precomputed_status) == 1 and result.precomputed_status[0] == Shared()

    def loss(p, b):
        return jnp.sum(token_losses(p, b) * b["m"]) / b["m"].sum()

    check(loss, W, {**X, "m": MASK.astype(float)})


@pytest.mark.parametrize("floor", [True, False])
def test_microbatch_without_tokens_is_finite_case_30(floor):
    def loss(p, b):
        count = b["m"].sum()
        return jnp.where(b["m"], token_losses(p, b), 0.0).sum() / (jnp.maximum(count, 1) if floor else count)

    check(loss, W, {**X, "m": MASK}, count=4)


def test_mean_with_where_is_exact():
    check(lambda p, b: jnp.mean(token_losses(p, b), where=b["m"]), W, {**X, "m": MASK})


def test_mean_of_each_rows_own_mean_is_exact():
    check(
        lambda p, b: jnp.mean((token_losses(p, b) * b["m"]).sum(1) / b["m"].sum(1).clip(1)),
        W,
        {**X, "m": MASK},
    )


@pytest.mark.parametrize(
    "loss, match",
    [
        (lambda h: -jnp.diag(jax.nn.log_softmax(h @ h.T)).mean(), "two batch dimensions"),
        (lambda h: jax.nn.logsumexp(h), "maximum over the batch"),
        (lambda h: jnp.log(jnp.exp(h).sum()), "`log` of a sum"),
        (lambda h: h.max(), "maximum over the batch"),
        (lambda h: jnp.sqrt((h**2).sum()), "`sqrt` of a sum"),
        (lambda h: h.mean(0) @ h.mean(0), "two sums"),
        (lambda h: (h - h.mean(0)).sum(), "batch normalization"),
        (lambda h: h[::-1].sum(), "reversed"),
        (lambda h: h[0].sum(), "slice"),
        (lambda h: jnp.cumsum(h, 0)[:, 0].sum(), "runs along the batch"),
        (lambda h: jnp.sort(h, 0)[:, 0].sum(), "runs along the batch"),
        (lambda h: h.reshape(B // 2 if h.shape[0] == B else B // 4, 2, V).prod(1).sum(), "cut into pieces"),
        (
            lambda h: lax.scan(lambda c, x: (jnp.tanh(c + x), None), jnp.zeros(V), h)[0].sum(),
            "scan goes over",
        ),
        (lambda h: lax.cond(h.sum() > 0, jnp.sum, lambda x: -x.sum(), h), "sum over the batch"),
        (lambda h: 1 / h.sum(), "mixes|`div`"),
        (lambda h: h.sum(1), "one value per row"),
        (lambda h: jnp.take(h, jnp.array([0, 1]), 0).sum(), "picked by index"),
    ],
)
def test_coupled_rows_are_refused_case_32(loss, match):
    message = refuse(lambda p, b: loss(b["x"] @ p["w"]), W, X, match)
    if "one value per row" not in message:
        assert "test_microbatch.py" in message and "rewrite the loss" in message and "num_microbatches=1" in message


def test_batch_norm_is_refused_case_20():
    def norm(x):
        return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)

    model = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=False)])
    variables = model.init(jax.random.key(0), X["x"])

    def loss(p, b):
        return (model.apply({**variables, "params": p}, b["x"], mutable=["batch_stats"])[0] ** 2).sum()

    refuse(loss, variables["params"], X, "sum over the batch")
    # Statistics of the data itself depend on no parameter: they are made on the full batch.
    check(lambda p, b: ((norm(b["x"]) @ p["w"]) ** 2).mean(), W, X)


def moe_balance(p, b):
    probs = jax.nn.softmax(b["x"] @ p["w"])
    chosen = jax.nn.one_hot(probs.argmax(-1), V)
    return V * jnp.sum(chosen.mean(0) * probs.mean(0))


def test_moe_balance_product_is_refused_case_17():
    refuse(moe_balance, W, X, "two sums over the batch")


def test_router_z_loss_is_accepted_case_18():
    check(lambda p, b: 0.01 * jnp.mean(jax.nn.logsumexp(b["x"] @ p["w"], -1) ** 2), W, X)


def test_expert_counts_by_scatter_are_sums():
    def loss(p, b):
        logits = b["x"] @ p["w"]
        load = jnp.zeros(V).at[logits.argmax(-1)].add(logits.max(-1))
        return (load * jnp.arange(V)).sum(), jnp.bincount(b["y"], length=V), load

    assert check(loss, W, X).out_status[2] == Partial()


def test_weight_penalty_counts_once():
    def loss(p, b):
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
        return 0.1 * penalty + token_losses(p, b).mean() - 3.0, penalty

    result = check(loss, W, X, count=4)
    assert result.out_status[1] == Shared() and result.out_domain[1] == Domain.PARAMETER


def test_loss_of_parameters_only_counts_once():
    check(lambda p, b: jnp.sum(p["w"] ** 2), W, X)


def test_penalty_chosen_by_where_counts_once():
    def loss(p, b):
        data = (b["x"] @ p["w"]).sum()
        return jnp.where(p["e"].sum() > 0, data, p["w"].sum()) + jnp.where(p["e"].sum() > 0, p["w"].sum(), data)

    check(loss, W, X)


def test_label_smoothing():
    def loss(p, b):
        targets = optax.smooth_labels(jax.nn.one_hot(b["y"], V), 0.1)
        return optax.softmax_cross_entropy(b["x"] @ p["w"], targets).mean()

    check(loss, W, X)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_flattened_tokens(time_major, masked):
    def loss(p, b):
        t, m = (b["t"].T, b["m"].T) if time_major else (b["t"], b["m"])
        logits = (p["e"][t] @ p["w"]).reshape(-1, V)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, t.reshape(-1))
        back = losses.reshape(t.shape)
        if masked:
            return (losses * m.reshape(-1)).sum() / m.sum(), back, losses
        return losses.mean(), back, losses

    result = check(loss, W, {**X, "m": MASK}, count=4)
    assert result.out_status[2] == (Batched(0, outer=T) if time_major else Batched(0, inner=T))


def test_aux_outputs_case_39():
    def loss(p, b):
        logits = b["x"] @ p["w"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, b["y"])
        correct = logits.argmax(-1) == b["y"]
        aux = {"logits": logits, "losses": losses, "accuracy": correct.mean(), "n": correct.sum(), "c": 3.0,
               "y": b["y"], "count": (b["y"] > 1).sum(), "none": None, "most": b["x"].max()}  # fmt: skip
        return losses.mean(), aux

    check(loss, W, X, count=4)


def test_batch_only_values_are_made_on_the_full_batch():
    def loss(p, b):
        order = jnp.argsort(b["y"])
        ranks = jax.nn.softmax(b["x"][:, 0]) + jnp.cumsum(b["x"][:, 1]) + order + jnp.arange(b["y"].shape[0])
        same = (b["y"][:, None] == b["y"][None]).sum(1)
        normal = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
        return ((normal @ p["w"]).sum(1) * ranks * same / b["y"].max()).sum(), order

    result = check(loss, W, X, count=4)
    assert Batched(0) in result.precomputed_status
    assert all(d != Domain.PARAMETER for d in result.pipeline_domain[-1:])


def test_row_local_batch_only_values_stay_in_the_pipeline():
    result = check(lambda p, b: (jnp.tanh(b["x"]) @ p["w"]).sum(), W, X)
    assert not result.precomputed_status


def test_each_row_picks_its_own_entry():
    def loss(p, b):
        logits = b["x"] @ p["w"]
        rows = jnp.arange(b["y"].shape[0])
        hidden = p["e"][b["t"]]
        last = hidden[rows, b["t"].argmax(-1)]
        put = logits.at[rows, b["y"]].set(0.0).at[rows, 0].add(1.0)
        return (logits[rows, b["y"]].sum() + (last**2).sum() + (put**3).sum()) / rows.shape[0], put

    check(loss, W, X, count=4)
    check(lambda p, b: jnp.take_along_axis(b["x"] @ p["w"], b["y"][:, None], 1).sum(), W, X)


def test_what_is_only_reported_may_be_any_function_of_sums_and_rows():
    """Case 39."""

    def loss(p, b):
        rows = ((b["x"] @ p["w"]) ** 2).sum(1)
        value = rows.mean()
        return value, jnp.exp(value), rows.max(), jnp.sort(rows), rows / rows.sum(), b["x"]

    params, batch = jax.tree.map(jnp.asarray, (W, X))
    result, args, b = split(loss, params, batch, (), 2)
    pieces = []
    for m in range(2):
        inputs = [
            rows_of(v, s, b * 2, m * b, b) if isinstance(s, Batched) else v
            for v, s in zip(args, result.pipeline_status)
        ]
        pieces.append(function_of(result.pipeline)(*inputs, jnp.arange(m * b, (m + 1) * b, dtype=jnp.uint32)))
    whole = [
        sum(values) if isinstance(s, Partial) else joined_rows(values, s, b) if isinstance(s, Batched) else values[0]
        for values, s in zip(zip(*pieces), result.out_status)
    ]
    for actual, expected in zip(function_of(result.postcompute)(*args, *whole), loss(params, batch), strict=True):
        close(actual, expected)


def test_layers_after_a_sum_over_the_batch_are_refused_even_if_only_reported():
    def loss(p, b):
        h = b["x"] @ p["w"]
        return h.sum(), ((h - h.mean(0)) @ p["w"].T).sum()

    refuse(loss, W, X, "mixes a sum over the batch with the rows")


def test_dead_equations_are_neither_judged_nor_kept():
    def loss(p, b):
        h = b["x"] @ p["w"]
        jnp.log(jnp.var(h, 0)).sum()
        return h.sum()

    result = check(loss, W, X)
    assert [e.primitive.name for e in result.pipeline.jaxpr.eqns] == ["dot_general", "reduce_sum"]


def test_array_constants_with_the_batch_size():
    def loss(p, b):
        n = b["x"].shape[0]
        return ((b["x"] @ p["w"]).sum(1) * np.arange(n) + np.ones((n, 2)).sum()).sum() + jnp.zeros(n).sum()

    check(loss, W, X)


def test_programs_that_depend_on_the_batch_size_are_refused():
    def more_equations(p, b):
        h = b["x"] @ p["w"]
        return sum(h.sum() for _ in range(b["x"].shape[0]))

    def other_parameter(p, b):
        return ((b["x"] @ p["w"]) ** b["x"].shape[0]).sum()

    refuse(more_equations, W, X, "two different programs.*equations")
    refuse(other_parameter, W, X, "two different programs.*integer_pow")
    refuse(
        lambda p, b: lax.fori_loop(0, b["x"].shape[0], lambda i, c: c + p["w"].sum(), 0.0),
        W,
        X,
        "one turn per row",
    )


def test_unknown_primitive_is_named():
    def loss(p, b):
        return jnp.sum(jax.pure_callback(np.sin, jax.eval_shape(lambda: b["x"] @ p["w"]), b["x"] @ p["w"]))

    assert "test_microbatch.py" in refuse(loss, W, X, "`pure_callback`")


# -- random programs

OPS = [
    ("tanh", 1, jnp.tanh),
    ("square", 1, jnp.square),
    ("neg", 1, lambda a: -a),
    ("half", 1, lambda a: a / 2),
    ("add", 2, jnp.add),
    ("mul", 2, jnp.multiply),
    ("sub", 2, jnp.subtract),
    ("max", 2, jnp.maximum),
    ("where", 2, lambda a, b: jnp.where(jnp.arange(a.shape[-1]) > 1 if a.ndim else True, a, b)),
    ("sum0", 1, lambda a: a.sum(0) if a.ndim else a),
    ("mean", 1, jnp.mean),
    ("sum-1", 1, lambda a: a.sum(-1) if a.ndim else a),
    ("max-1", 1, lambda a: a.max(-1) if a.ndim else a),
    ("T", 1, jnp.transpose),
    ("flat", 1, lambda a: a.reshape(-1)),
    ("unflat", 1, lambda a: a.reshape(-1, 3) if a.size % 3 == 0 else a),
    ("split", 1, lambda a: a.reshape(3, -1) if a.size % 3 == 0 else a),
    ("expand", 1, lambda a: a[..., None] if a.ndim < 3 else a),
    ("cumsum", 1, lambda a: jnp.cumsum(a, -1) if a.ndim else a),
    ("softmax", 1, lambda a: jax.nn.softmax(a) if a.ndim else a),
    ("rev", 1, lambda a: a[..., ::-1] if a.ndim else a),
    ("cat", 2, lambda a, b: jnp.concatenate([a, b], 0)),
    ("cat-1", 2, lambda a, b: jnp.concatenate([a, b], -1)),
    ("half0", 1, lambda a: a[: a.shape[0] // 2] if a.ndim else a),
    ("matmul", 2, jnp.matmul),
    ("outer", 2, lambda a, b: jnp.einsum("...i,...j->...ij", a, b)),
    ("sort", 1, lambda a: jnp.sort(a, -1) if a.ndim else a),
    ("zeros", 1, jnp.zeros_like),
    ("iota", 1, lambda a: a + jnp.arange(a.shape[0])[(...,) + (None,) * (a.ndim - 1)] if a.ndim else a),
    ("stop", 1, lax.stop_gradient),
    ("logsumexp", 1, lambda a: jax.nn.logsumexp(a, -1) if a.ndim else a),
    ("take", 1, lambda a: a[..., 0] if a.ndim else a),
    ("stack", 2, lambda a, b: jnp.stack([a, b], 0)),
]


def run_program(program, params, batch):
    """Apply the steps that fit to a growing pool of values; which ones fit depends on shapes only."""
    pool = [params["a"], params["s"], batch["x"], batch["y"], batch["x"] @ params["a"]]
    for op, i, j in program:
        name, arity, function = OPS[op % len(OPS)]
        operands = [pool[i % len(pool)], pool[j % len(pool)]][:arity]
        if any(v.size > 4000 or v.ndim > 3 for v in operands):
            continue
        try:
            pool.append(function(*operands))
        except (TypeError, ValueError):
            continue
    return [jnp.sum(pool[-1] * 0.5), *pool[4:]]


STEPS = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 40), st.integers(0, 40))
PROGRAMS = st.lists(STEPS, min_size=3, max_size=7)


def test_random_programs_are_refused_or_exact():
    params = {"a": randn(3, 3), "s": randn(3, seed=1)}
    batch = {"x": randn(6, 3, seed=2), "y": randn(6, seed=3)}
    accepted, refused = [], []

    slow = list(HealthCheck)

    @settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=slow)
    @given(PROGRAMS, st.sampled_from([2, 3, 6]))
    def run(program, count):
        def loss(p, b):
            return run_program(program, p, b)

        gradients = len(accepted) % 4 == 0
        try:
            check(loss, params, batch, count=count, gradients=gradients, compiled=False)
        except NotSeparableError:
            refused.append(program)
        else:
            accepted.append(program)

    run()
    assert len(accepted) > 30 and len(refused) > 5, (len(accepted), len(refused))
