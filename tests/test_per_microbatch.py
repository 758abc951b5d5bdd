"""`semantics="per_microbatch"`: every microbatch is a batch of its own, and the step takes the means."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import merak_jax
from merak_jax.errors import NotSeparableError, PlanError
from tests.helper import worst_leaf

W, CLASSES, ROWS = 8, 3, 16


class Normalised(nn.Module):
    """Equal blocks with batch normalization and dropout."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(W, param_dtype=jnp.float64)(x)
        for _ in range(4):
            h = nn.Dense(W, param_dtype=jnp.float64)(x)
            h = nn.BatchNorm(use_running_average=not train, dtype=jnp.float64, param_dtype=jnp.float64)(h)
            x = x + nn.Dropout(0.3, deterministic=not train)(nn.relu(h))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(x)


MODEL = Normalised()


class StatsState(TrainState):
    """A TrainState with running averages and a random key."""

    batch_stats: dict
    key: jax.Array


def make_state():
    variables = MODEL.init({"params": jax.random.key(0)}, jnp.zeros((4, 5)), train=False)
    params, stats = jax.tree.map(lambda x: x.astype(jnp.float64), (variables["params"], variables["batch_stats"]))
    return StatsState.create(
        apply_fn=MODEL.apply, params=params, tx=optax.sgd(0.1), batch_stats=stats, key=jax.random.key(1)
    )


def make_batch(n=0):
    random = np.random.default_rng(n)
    return {"x": random.normal(size=(ROWS, 5)), "y": random.integers(0, CLASSES, ROWS)}


def loss_of(params, state, batch, key):
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": key})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    penalty = 1e-2 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    return loss + penalty, (updates["batch_stats"], logits, (logits.argmax(-1) == batch["y"]).sum())


def train_step(state, batch):
    key = jax.random.fold_in(state.key, state.step)
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, (stats, logits, right)), gradients = gradient(state.params, state, batch, key)
    return state.apply_gradients(grads=gradients, batch_stats=stats), {"loss": loss, "logits": logits, "right": right}


def by_hand(state, batch, count, monkeypatch):
    """The means over `count` microbatches, whose dropout masks are their rows of the whole batch's mask."""
    rows, whole = ROWS // count, jax.random.bernoulli
    key, found = jax.random.fold_in(state.key, state.step), []
    for n in range(count):
        own = slice(n * rows, (n + 1) * rows)

        def bernoulli(key, p, shape, own=own):
            return whole(key, p, (ROWS, *shape[1:]))[own]

        with monkeypatch.context() as patch:
            patch.setattr(jax.random, "bernoulli", bernoulli)
            part = jax.tree.map(lambda x, own=own: x[own], batch)
            found.append(jax.value_and_grad(loss_of, has_aux=True)(state.params, state, part, key))
    mean = lambda *xs: sum(xs) / count  # noqa: E731
    gradients = jax.tree.map(mean, *(g for _, g in found))
    stats = jax.tree.map(mean, *(aux[0] for (_, aux), _ in found))
    metrics = {
        "loss": mean(*(loss for (loss, _), _ in found)),
        "logits": jnp.concatenate([aux[1] for (_, aux), _ in found]),
        "right": sum(aux[2] for (_, aux), _ in found),
    }
    return state.apply_gradients(grads=gradients, batch_stats=stats), metrics


@pytest.mark.parametrize("sizes, count", [((1, 4, 1), 2), ((2, 2, 2), 2), ((4, 1, 1), 1), ((1, 1, 2), 4)])
def test_batch_norm_and_running_averages_are_the_means_over_microbatches(sizes, count, monkeypatch):
    mesh = merak_jax.make_mesh(
        data=sizes[0], pipe=sizes[1], tensor=sizes[2], devices=jax.devices()[: int(np.prod(sizes))]
    )
    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=count, semantics="per_microbatch")
    state, metrics = step(make_state(), make_batch())
    expected, wanted = by_hand(make_state(), make_batch(), sizes[0] * count, monkeypatch)
    whole = step.unshard(state)
    for actual, truth in (
        (whole.params, expected.params),
        (whole.batch_stats, expected.batch_stats),
        (metrics, wanted),
    ):
        assert worst_leaf(jax.device_get(actual), jax.device_get(truth))[0] <= 1e-12
    assert int(state.step) == 1


def test_a_contrastive_loss_is_refused_unless_it_is_asked_for():
    def step(state, batch):
        def loss(params):
            logits, _ = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, batch["x"], train=False, mutable=["batch_stats"]
            )
            scores = logits @ logits.T
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    mesh = merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2])
    with pytest.raises(NotSeparableError, match=r"test_per_microbatch.py:\d+.*semantics='per_microbatch'"):
        merak_jax.parallelize(step, mesh=mesh, num_microbatches=2)(make_state(), make_batch())
    own = merak_jax.parallelize(step, mesh=mesh, num_microbatches=2, semantics="per_microbatch")
    _, value = own(make_state(), make_batch())
    halves = [jax.jit(step)(make_state(), jax.tree.map(lambda x, n=n: x[n : n + 8], make_batch()))[1] for n in (0, 8)]
    np.testing.assert_allclose(value, sum(halves) / 2, rtol=1e-12)


def test_integers_that_follow_the_number_of_rows_are_summed_and_other_constants_are_not():
    def step(state, batch):
        def loss(params):
            logits, _ = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, batch["x"], train=False, mutable=["batch_stats"]
            )
            scores = logits @ logits.T
            rows = scores.shape[0]
            counts = {"rows": jnp.int32(rows), "more": jnp.asarray(rows) * 2 + 1, "python": rows}
            counts |= {"real": jnp.float64(rows), "real pair": jnp.full((1, 2), float(rows))}
            counts |= {"pair": jnp.full((2,), rows), "two": jnp.asarray(rows) * jnp.ones(2, int)}
            counts |= {"later": state.step + rows, "ones": jnp.ones((rows,)), "each": jnp.full((rows, 2), rows)}
            right = (scores.argmax(-1) == jnp.arange(rows)).sum()
            positive = (jax.nn.relu(jax.tree.leaves(params)[-1]) > 0).sum()
            aux = {**counts, "three": 3, "right": right, "step": state.step, "positive": positive}
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores))), aux

        (_, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), aux

    mesh = merak_jax.make_mesh(data=2, pipe=2, devices=jax.devices()[:4])
    own = merak_jax.parallelize(step, mesh=mesh, num_microbatches=2, semantics="per_microbatch")
    _, aux = own(make_state().replace(step=5), make_batch())
    parts = [jax.tree.map(lambda x, n=n: x[n : n + 4], make_batch()) for n in range(0, ROWS, 4)]
    each = [jax.jit(step)(make_state(), part)[1] for part in parts]
    summed = {name: int(sum(e[name] for e in each)) for name in ("rows", "python", "right")}
    pairs = [aux.pop(name).tolist() for name in ("pair", "two", "real pair")]
    assert pairs == [[ROWS, ROWS], [ROWS, ROWS], [[4.0, 4.0]]]
    # What each row says is put together.
    assert aux.pop("ones").tolist() == [1.0] * ROWS and aux.pop("each").tolist() == [[4, 4]] * ROWS
    # Terms that do not follow the batch count once.
    assert int(aux.pop("later")) == 5 + ROWS and int(aux.pop("more")) == 2 * ROWS + 1
    assert int(aux.pop("positive")) == int(each[0]["positive"]) > 0
    assert {name: float(x) for name, x in aux.items()} == {**summed, "real": 4.0, "three": 3, "step": 5}
    assert summed["rows"] == ROWS


def counting_step(counts):
    """A train step whose state counts what it has seen: `counts(old counts, batch)`."""

    def step(state, batch):
        def loss(params):
            h = batch["x"]
            for layer in params:
                h = h + jnp.tanh(h @ layer)
            return (h**2).mean(), counts(state["counts"], batch)

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients), "counts": new}, value

    state = {
        "params": [jnp.eye(5) * 0.1 * n for n in range(1, 5)],
        "counts": {
            "seen": jnp.int32(7),
            "classes": jnp.array([3, 1, 4], jnp.int32),
            "share": jnp.array([3.0, 1.0, 4.0]),
            "byte": jnp.uint8(250),
            "real": jnp.int32(9),
            "all": jnp.bool_(True),
            "any": jnp.bool_(False),
        },
    }
    return step, state


def test_running_counts_grow_by_the_sum_of_what_microbatches_add():
    def counts(old, batch):
        labels, rows = batch["y"], batch["x"].shape[0]
        return {
            "seen": jnp.where(old["seen"] > 0, old["seen"] + rows + (labels > 0).sum(), old["seen"]).astype(jnp.int32),
            "classes": old["classes"].at[labels].add(1)
            + jax.nn.one_hot(labels, 3, dtype=jnp.int32).sum(0, dtype=jnp.int32),
            "share": old["share"].at[labels].add(1.0),
            "byte": old["byte"] + jnp.uint8(rows),
            "real": (1 + old["real"] + (labels > 0).astype(float).sum()).astype(jnp.int32),
            "all": old["all"] & (batch["x"] < 1.9).all(),
            "any": old["any"] | ~(batch["x"] < 1).all(),
        }

    step, state = counting_step(counts)
    for sizes in ({"data": 2, "pipe": 2}, {"pipe": 2}, {"data": 2}):
        mesh = merak_jax.make_mesh(**sizes, devices=jax.devices()[: np.prod(list(sizes.values()))])
        own = merak_jax.parallelize(step, mesh=mesh, num_microbatches=2, semantics="per_microbatch", donate=False)
        found = state
        for n in range(2):
            found, _ = own(found, make_batch(n))
        labels = np.concatenate([make_batch(n)["y"] for n in range(2)])
        classes = np.bincount(labels, minlength=3)
        assert int(found["counts"]["seen"]) == 7 + 2 * ROWS + (labels > 0).sum()
        assert found["counts"]["classes"].tolist() == ([3, 1, 4] + 2 * classes).tolist()
        assert int(found["counts"]["byte"]) == (250 + 2 * ROWS) % 256
        assert int(found["counts"]["real"]) == 9 + 2 + (labels > 0).sum()
        inputs = np.concatenate([make_batch(n)["x"] for n in range(2)])
        assert (
            bool(found["counts"]["all"]) == (inputs < 1.9).all() and bool(found["counts"]["any"]) == (inputs >= 1).any()
        )
        # Real numbers are means of what the microbatches say.
        parts = 2 * sizes.get("data", 1)
        np.testing.assert_allclose(found["counts"]["share"], [3, 1, 4] + classes / parts, rtol=1e-12)


@pytest.mark.parametrize(
    "name, mixed",
    [
        ("max", lambda seen, labels: jnp.maximum(seen, labels.max())),
        ("rem", lambda seen, labels: lax.rem(seen + labels.sum().astype(jnp.int32), jnp.int32(5))),
        ("cond", lambda seen, labels: lax.cond(labels.sum() > 3, lambda n: n + 1, lambda n: n, seen)),
        ("select_n", lambda seen, labels: jnp.where(labels.sum() > 3, seen + 1, seen)),
        ("mul", lambda seen, labels: (seen + labels.sum().astype(jnp.int32)) * labels.max().astype(jnp.int32)),
        ("add", lambda seen, labels: seen / 2 + labels.sum()),
        ("remat2", lambda seen, labels: jax.checkpoint(lambda n, x: n + x.sum())(seen.astype(jnp.uint8), labels)),
        ("reduce_max", lambda seen, labels: (jnp.stack([seen, seen + 1]) + labels.sum()).max()),
        ("gt", lambda seen, labels: labels.sum() > 3),
    ],
)
def test_a_running_count_that_is_no_sum_is_refused(name, mixed):
    def counts(old, batch):
        new = mixed(old["seen"], batch["y"])
        return {**old, "all": new} if new.dtype == bool else {**old, "seen": new.astype(jnp.int32)}

    step, state = counting_step(counts)
    mesh = merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2])
    own = merak_jax.parallelize(step, mesh=mesh, num_microbatches=2, semantics="per_microbatch")
    with pytest.raises(NotSeparableError, match=rf"`{name}` at .*test_per_microbatch.py:\d+"):
        own(state, make_batch())


@pytest.mark.parametrize(
    "made",
    [
        np.arange,
        lambda rows: np.array([rows, 1]),
        lambda rows: jnp.array([1.0 * rows]),
        lambda rows: np.eye(rows)[:, 0],
    ],
)
def test_an_array_that_python_made_from_the_number_of_rows_is_refused(made):
    def step(state, batch):
        def loss(params):
            logits, _ = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, batch["x"], train=False, mutable=["batch_stats"]
            )
            return jnp.mean(logits**2) * jnp.asarray(made(logits.shape[0]))[0]

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    mesh = merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2])
    own = merak_jax.parallelize(step, mesh=mesh, num_microbatches=2, semantics="per_microbatch")
    with pytest.raises(NotSeparableError, match="test_per_microbatch.py:.*made from the number of rows"):
        own(make_state(), make_batch())


def test_the_whole_batch_as_one_microbatch_is_what_one_device_computes():
    mesh = merak_jax.make_mesh(pipe=4, devices=jax.devices()[:4])
    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=1)
    state, metrics = step(make_state(), make_batch())
    expected, wanted = jax.jit(train_step)(make_state(), make_batch())
    for actual, truth in ((step.unshard(state).batch_stats, expected.batch_stats), (metrics, wanted)):
        assert worst_leaf(jax.device_get(actual), jax.device_get(truth))[0] <= 1e-12


def test_microbatches_of_one_row_and_unknown_semantics_are_refused():
    mesh = merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2])
    with pytest.raises(NotSeparableError, match="at least two rows"):
        merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=ROWS, semantics="per_microbatch")(
            make_state(), make_batch()
        )
    with pytest.raises(PlanError, match="semantics='mean' is unknown"):
        merak_jax.parallelize(train_step, mesh=mesh, semantics="mean")
