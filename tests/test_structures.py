"""Models with blocks in unusual shapes give the single-device numbers on a 2·2·2 mesh, or one clear error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merak_jax
from merak_jax.errors import NotSeparableError, StateError

LAYERS = 4
random = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(random.normal(size=shape) / 3)


PARAMS = {
    "in": array(5, 6),
    "out": array(6, 3),
    "blocks": [{"up": array(6, 8), "down": array(8, 6)} for _ in range(LAYERS)],
    "scale": jnp.asarray(1.3),
}
STACKED = {**PARAMS, "blocks": jax.tree.map(lambda *x: jnp.stack(x), *PARAMS["blocks"])}


@jax.custom_jvp
def tanh_with_another_slope(x):
    return jnp.tanh(x)


tanh_with_another_slope.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0] * 0.7))


@jax.custom_vjp
def block_with_another_gradient(block, h):
    return h + jnp.sin(h @ block["up"]) @ block["down"]


def _pull_back(residuals, cotangent):
    _, pull = jax.vjp(lambda block, h: h + jnp.sin(h @ block["up"]) @ block["down"], *residuals)
    d_block, d_h = pull(cotangent)
    return d_block, 2.0 * d_h


block_with_another_gradient.defvjp(lambda *operands: (block_with_another_gradient(*operands), operands), _pull_back)


def tanh_block(block, h):
    return h + jnp.tanh(h @ block["up"]) @ block["down"]


def relu_block(block, h):
    return h + jax.nn.relu(h @ block["up"]) @ block["down"]


def first(params, batch):
    return batch["x"] @ params["in"]


def last(params, h, batch):
    return ((h @ params["out"] - batch["y"]) ** 2).mean()


def blocks_in_a_row(params, batch, block):
    h = first(params, batch)
    for layer in params["blocks"]:
        h = block(layer, h)
    return last(params, h, batch)


def two_kinds_in_turn(params, batch):
    h = first(params, batch)
    for i, layer in enumerate(params["blocks"]):
        h = tanh_block(layer, h) if i % 2 == 0 else relu_block(layer, h)
    return last(params, h, batch)


def a_value_of_the_first_block_read_by_all_later_ones(params, batch):
    h, value = first(params, batch), None
    for layer in params["blocks"]:
        up = h @ layer["up"]
        value = up if value is None else value
        h = h + jnp.tanh(up + 0.5 * value) @ layer["down"]
    return last(params, h, batch)


def two_rows_of_blocks_side_by_side(params, batch):
    h = other = first(params, batch)
    for layer in params["blocks"][:2]:
        h = tanh_block(layer, h)
    for layer in params["blocks"][2:]:
        other = tanh_block(layer, other)
    return last(params, h + other, batch)


def the_embedding_and_a_learned_scale_read_by_every_block(params, batch):
    h = start = first(params, batch)
    for layer in params["blocks"]:
        h = tanh_block(layer, h) + params["scale"] * start
    return last(params, h, batch)


def a_last_block_of_another_kind(params, batch):
    h = first(params, batch)
    for layer in params["blocks"][:-1]:
        h = tanh_block(layer, h)
    return last(params, relu_block(params["blocks"][-1], 0.5 * h), batch)


def constants_that_differ_per_block(params, batch):
    h = first(params, batch)
    for i, layer in enumerate(params["blocks"]):
        h = h + 0.1 * (i + 1) * jnp.tanh(h @ layer["up"]) @ layer["down"]
    return last(params, h, batch)


def a_weight_penalty_and_a_cube_of_one_leaf(params, batch):
    penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    cube = jnp.sum(params["blocks"][1]["up"] ** 3)
    return blocks_in_a_row(params, batch, relu_block) + 0.01 * penalty + 0.3 * cube


def a_custom_jvp_in_every_block(params, batch):
    def block(layer, h):
        return h + tanh_with_another_slope(h @ layer["up"]) @ layer["down"]

    return blocks_in_a_row(params, batch, block)


def a_custom_vjp_around_every_block(params, batch):
    return blocks_in_a_row(params, batch, block_with_another_gradient)


def rematerialised_blocks(params, batch):
    return blocks_in_a_row(params, batch, jax.checkpoint(relu_block))


def a_scan_that_closes_over_the_embedding(params, batch):
    start = first(params, batch)
    h, _ = jax.lax.scan(
        lambda h, layer: (tanh_block(layer, h) + 0.3 * start * params["scale"], None), start, params["blocks"]
    )
    return last(params, h + start, batch)


def step_of(loss):
    def train_step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        params = jax.tree.map(lambda p, g: p - g, params, grads)
        return params, {"loss": value, "gradient": optax.global_norm(grads)}

    return train_step


def batch_of(rows):
    return {"x": random.normal(size=(rows, 5)), "y": random.normal(size=(rows, 3))}


def a_value_of_every_block_read_at_the_end(params, batch):
    h, outputs = first(params, batch), []
    for layer in params["blocks"]:
        h = tanh_block(layer, h)
        outputs.append(h)
    return last(params, sum(outputs), batch)


def a_scan_whose_per_layer_values_are_read(params, batch):
    h, sums = jax.lax.scan(lambda h, layer: (tanh_block(layer, h), h.sum()), first(params, batch), params["blocks"])
    return last(params, h, batch) + sums.sum()


def an_input_read_by_every_block_and_after_them(params, batch):
    start = first(params, batch)
    h = start
    for layer in params["blocks"]:
        h = tanh_block(layer, h) * start
    return last(params, h * start, batch)


def a_scan_that_returns_the_norm_of_every_layer(params, batch):
    h, norms = jax.lax.scan(
        lambda h, layer: (tanh_block(layer, h), jnp.sum(layer["up"] ** 2)), first(params, batch), params["blocks"]
    )
    return last(params, h, batch) + 0.1 * norms.max()


def sorted_values_of_a_head_that_does_not_divide(params, batch):
    h = first(params, batch)
    for layer in params["blocks"]:
        h = tanh_block(layer, h)
    logits = h @ params["wide"]
    largest = jax.lax.top_k(logits, 3)[0].sum(-1)
    return (jnp.sort(jax.nn.softmax(logits), -1) * jnp.arange(31.0)).mean() + largest.mean()


@pytest.mark.parametrize(
    "loss, params",
    [
        (two_kinds_in_turn, PARAMS),
        (a_value_of_the_first_block_read_by_all_later_ones, PARAMS),
        (two_rows_of_blocks_side_by_side, PARAMS),
        (the_embedding_and_a_learned_scale_read_by_every_block, PARAMS),
        (a_last_block_of_another_kind, PARAMS),
        (constants_that_differ_per_block, PARAMS),
        (a_weight_penalty_and_a_cube_of_one_leaf, PARAMS),
        (a_custom_jvp_in_every_block, PARAMS),
        (a_custom_vjp_around_every_block, PARAMS),
        (rematerialised_blocks, PARAMS),
        (a_scan_that_closes_over_the_embedding, STACKED),
        (a_value_of_every_block_read_at_the_end, PARAMS),
        (a_scan_whose_per_layer_values_are_read, STACKED),
        (an_input_read_by_every_block_and_after_them, PARAMS),
        (a_scan_that_returns_the_norm_of_every_layer, STACKED),
        (sorted_values_of_a_head_that_does_not_divide, {**PARAMS, "wide": array(6, 31)}),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_numbers_are_those_of_one_device(loss, params):
    train_step = step_of(loss)
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=2, pipe=2, tensor=2), num_microbatches=2)
    batch = batch_of(8)
    new, metrics = step(params, batch)
    expected = jax.jit(train_step)(params, batch)
    for actual, wanted in zip(jax.tree.leaves((step.unshard(new), metrics)), jax.tree.leaves(expected), strict=True):
        assert np.abs(actual - wanted).max() <= 1e-12 * np.abs(wanted).max()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_value_that_no_block_changes_survives_ticks_in_which_a_stage_idles(schedule):
    train_step = step_of(an_input_read_by_every_block_and_after_them)
    mesh = merak_jax.make_mesh(pipe=4, devices=jax.devices()[:4])
    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=8, schedule=schedule)
    batch = batch_of(16)
    actual, expected = step(PARAMS, batch), jax.jit(train_step)(PARAMS, batch)
    for a, e in zip(jax.tree.leaves((step.unshard(actual[0]), actual[1])), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - e).max() <= 1e-12 * np.abs(e).max()


def frozen_step(trained):
    """A step that trains the blocks in `trained` only; the others are closed over."""

    def train_step(params, batch):
        def loss(blocks):
            everything = [blocks.get(str(i), block) for i, block in enumerate(params["blocks"])]
            return blocks_in_a_row({**params, "blocks": everything}, batch, relu_block)

        value, grads = jax.value_and_grad(loss)({str(i): params["blocks"][i] for i in trained})
        blocks = [
            jax.tree.map(lambda p, g: p - g, block, grads[str(i)]) if str(i) in grads else block
            for i, block in enumerate(params["blocks"])
        ]
        return {**params, "blocks": blocks}, value

    return train_step


@pytest.mark.filterwarnings("ignore::merak_jax.runtime.reroll.RerollWarning")
@pytest.mark.parametrize("trained", [(2, 3), (0, 1), (1, 3), (3,), (0,)], ids=str)
def test_frozen_and_trained_blocks_in_one_chain(trained):
    train_step = frozen_step(trained)
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=4, pipe=2), num_microbatches=1)
    batch = batch_of(8)
    new, value = step(PARAMS, batch)
    expected, wanted = jax.jit(train_step)(PARAMS, batch)
    for a, e in zip(jax.tree.leaves((step.unshard(new), value)), jax.tree.leaves((expected, wanted)), strict=True):
        assert np.abs(a - e).max() <= 1e-12 * np.abs(e).max()


@pytest.mark.filterwarnings("ignore::merak_jax.runtime.reroll.RerollWarning")
@pytest.mark.parametrize("layer", [0, 2])
def test_a_constant_in_one_block_where_the_others_have_a_parameter(layer):
    def loss(params, batch):
        h = first(params, batch)
        for i, block in enumerate(params["blocks"]):
            down = jnp.asarray(np.linspace(-1, 1, 48).reshape(8, 6)) if i == layer else block["down"]
            h = tanh_block({**block, "down": down}, h)
        return last(params, h, batch)

    train_step = step_of(loss)
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=4, pipe=2), num_microbatches=1)
    batch = batch_of(8)
    new, metrics = step(PARAMS, batch)
    expected = jax.jit(train_step)(PARAMS, batch)
    for a, e in zip(jax.tree.leaves((step.unshard(new), metrics)), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - e).max() <= 1e-12 * np.abs(e).max()


def test_a_donated_state_given_again_is_refused():
    step = merak_jax.parallelize(
        step_of(two_kinds_in_turn), mesh=merak_jax.make_mesh(data=4, pipe=2), num_microbatches=1
    )
    batch = batch_of(8)
    state, _ = step(PARAMS, batch)
    step(state, batch)
    for use in (lambda: step(state, batch), lambda: step.unshard(state), lambda: state["out"]):
        with pytest.raises(StateError, match="donated"):
            use()


def refused(loss, params, error, match, **sizes):
    step = merak_jax.parallelize(step_of(loss), mesh=merak_jax.make_mesh(**sizes), num_microbatches=2)
    with pytest.raises(error, match=match):
        step(params, batch_of(8))


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "pipe": 4}], ids=str)
def test_a_gradient_with_respect_to_the_batch_is_refused(sizes):
    def train_step(params, batch):
        loss = lambda params, x: blocks_in_a_row(params, {**batch, "x": x}, tanh_block)  # noqa: E731
        value, (grads, d_x) = jax.value_and_grad(loss, argnums=(0, 1))(params, batch["x"])
        return jax.tree.map(lambda p, g: p - g, params, grads), (value, d_x)

    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(**sizes), num_microbatches=1)
    with pytest.raises(NotSeparableError, match=r"test_structures.py:\d+.*depends on the batch"):
        step(PARAMS, batch_of(8))


def test_a_gradient_with_respect_to_parameters_scaled_by_the_batch_is_refused():
    def train_step(params, batch):
        scaled = jax.tree.map(lambda p: p * (1 + 0.1 * batch["y"].mean()), params)
        value, grads = jax.value_and_grad(lambda p: blocks_in_a_row(p, batch, tanh_block))(scaled)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=2, pipe=2, tensor=2), num_microbatches=2)
    with pytest.raises(NotSeparableError, match="depends on the batch"):
        step(PARAMS, batch_of(8))
