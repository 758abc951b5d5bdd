"""Random chains: the blocks are found, and prologue, blocks, epilogue run one after another are the plain function."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.partition.test_blocks import cut, run

W, ROWS, LENGTH = 4, 3, 2


def attention(x, w, extra):
    q, k = x @ w["a"], x @ w["b"]
    scores = jnp.where(extra["mask"][:, None, :], q @ k.swapaxes(1, 2), -1e9)
    return x + jax.nn.softmax(scores) @ x @ w["b"].T


def norm(x, w, extra):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * w["s"]


# One operation of a block: (x [ROWS, LENGTH, W], the block's weights, what all blocks read) -> x.
OPERATIONS = {
    "residual": lambda x, w, e: x + jnp.tanh(x @ w["a"] + w["s"]),
    "dense": lambda x, w, e: jnp.tanh(x @ w["a"]) @ w["b"],
    "gate": lambda x, w, e: x * jax.nn.sigmoid(x @ w["b"].T) + 0.5,
    "norm": norm,
    "attention": attention,
    "mask": lambda x, w, e: jnp.where(e["mask"][..., None], x, x @ w["a"]),
    "shared weight": lambda x, w, e: jnp.sin(x @ e["shared"] + w["s"]),
    "table made once": lambda x, w, e: x * e["cos"] + x[..., ::-1] * e["sin"],
    "value made once": lambda x, w, e: x + e["made"] * w["s"],
    "first value": lambda x, w, e: jnp.tanh(x) + e["first"] @ w["a"],
    "number": lambda x, w, e: x * (1 + 0.1 * e["number"]) + w["s"],
    "frozen": lambda x, w, e: x + jax.lax.stop_gradient(w["a"]).sum(0),
    "remat": lambda x, w, e: jax.checkpoint(lambda x, a: x + jnp.sin(x @ a))(x, w["a"]),
    "dropout": lambda x, w, e: jnp.where(jax.random.bernoulli(e["key"], 0.8, x.shape), x, 0.0) @ w["b"],
    "time": lambda x, w, e: x + jnp.cumsum(x, 1) * w["s"],
    "relu": lambda x, w, e: jax.nn.relu(x @ w["a"]) + x,
}
NAMES = sorted(OPERATIONS)
# An operation that reads no weights of its own repeats itself inside a block; a block must have one of its own.
OWN = [n for n in NAMES if n != "table made once"]
BODY = st.lists(st.sampled_from(NAMES), max_size=3).flatmap(
    lambda names: st.sampled_from(OWN).map(lambda own: [*names, own])
)
FEW = st.lists(st.sampled_from(NAMES), max_size=2)


def weights(count):
    rng = np.random.default_rng(1)

    def one():
        return {"a": rng.normal(size=(W, W)) / 2, "b": rng.normal(size=(W, W)) / 2, "s": rng.normal(size=W)}

    return {
        "in": rng.normal(size=(W, W)),
        "shared": rng.normal(size=(W, W)),
        "rate": rng.normal(size=W),
        "out": rng.normal(size=(W, 3)),
        "layers": [one() for _ in range(count)],
    }


def make_batch():
    rng = np.random.default_rng(2)
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[:, 0] = True
    return {"x": rng.normal(size=(ROWS, LENGTH, W)), "mask": mask, "y": rng.integers(0, 3, (ROWS, LENGTH))}


def model(before, body, depth, after, skip, collect):
    """`loss(params, batch)` of `depth` equal blocks; `before` and `after` are operations of a first and a last block.

    `skip`: what is carried past blocks: nothing, the first value to the end, or a running sum of what every block made.
    `collect`: what is returned besides: nothing, the value of one block in the middle, or those of all blocks.
    """

    def loss(params, batch):
        position = jnp.arange(LENGTH)[:, None] / (1.0 + jnp.arange(W))
        key = jax.random.key(7)
        x = batch["x"] @ params["in"]
        shared = {
            "mask": batch["mask"],
            "shared": params["shared"] * 0.5,
            "cos": jnp.cos(position),
            "sin": jnp.sin(position),
            "made": jnp.tanh(batch["x"] * params["rate"]),
            "first": x,
        }
        layers, first, total, seen = iter(params["layers"]), x, 0.0, []

        def block(x, names, n):
            own = next(layers)
            for i, name in enumerate(names):
                extra = {**shared, "number": n, "key": jax.random.fold_in(key, 10 * n + i)}
                x = OPERATIONS[name](x, own, extra)
            return x

        x = block(x, before, 97)
        for n in range(depth):
            x = block(x, body, n)
            seen.append(x)
            if skip == "sum":
                total = total + (x**2).mean(-1).sum() / ROWS
        x = block(x, after, 98)
        if skip == "first":
            x = x + jnp.cos(first)
        logits = x @ params["out"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)[..., 0]
        value = -(picked * batch["mask"]).sum() + total
        return value, {"none": (), "middle": seen[depth // 2], "all": seen}[collect], batch["mask"].sum()

    return loss


@settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    before=FEW,
    body=BODY,
    depth=st.integers(2, 9),
    after=FEW,
    skip=st.sampled_from(["nothing", "first", "sum"]),
    collect=st.sampled_from(["none", "none", "middle", "all"]),
)
def test_random_chains_are_found_and_keep_their_values(before, body, depth, after, skip, collect):
    params, batch = weights(depth + 2), make_batch()
    loss = model(before, body, depth, after, skip, collect)
    graph, inputs = cut(loss, params, batch)
    # The first block adds to the number 0, which is another equation: it is peeled, and of two blocks no chain is left.
    wanted = depth - (skip == "sum")
    found = sum(c.length for c in graph.chains if c.length > 1)
    assert found >= (wanted if wanted > 1 else 0), f"{found} of {depth} blocks: {graph}; {graph.obstacle}"
    for actual, expected in zip(run(graph, inputs), jax.tree.leaves(loss(params, batch)), strict=True):
        expected = np.asarray(expected)
        scale = max(1.0, float(np.max(np.abs(expected))))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * scale)
