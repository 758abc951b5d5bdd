"""Layers in remats, loops and conditionals, counts of the batch in them, linear algebra: the single-device numbers on 2·2·2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import merak_jax
from merak_jax.errors import NoRepeatedBlocksError

LAYERS, LENGTH, WIDTH, ROWS = 4, 5, 6, 8
random = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(random.normal(size=shape) / 3)


PARAMS = {
    "in": array(3, WIDTH),
    "out": array(WIDTH, 2),
    "bias": array(LENGTH, LENGTH),
    "blocks": [{"up": array(WIDTH, WIDTH), "down": array(WIDTH, WIDTH)} for _ in range(LAYERS)],
}
STACKED = {**PARAMS, "blocks": jax.tree.map(lambda *x: jnp.stack(x), *PARAMS["blocks"])}


def make_batch():
    mask = (random.random((ROWS, LENGTH)) < 0.6).astype(float)
    return {"x": random.normal(size=(ROWS, LENGTH, 3)), "y": random.normal(size=(ROWS, LENGTH, 2)), "mask": mask}


def block(layer, h):
    return h + jnp.tanh(h @ layer["up"]) @ layer["down"]


def masked_mean(params, h, batch):
    errors = ((h @ params["out"] - batch["y"]) ** 2).sum(-1) * batch["mask"]
    return errors.sum() / jnp.maximum(batch["mask"].sum(), 1.0)


def plain(params, batch):
    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        h = block(layer, h)
    return masked_mean(params, h, batch)


def remat_around_the_whole_loss(params, batch):
    return jax.checkpoint(plain)(params, batch)


def remat_around_the_layers_in_a_remat_around_all(params, batch):
    def layers(params, h):
        for layer in params["blocks"]:
            h = jax.checkpoint(block)(layer, h)
        return h

    def loss(params, batch):
        h = jax.checkpoint(layers)(params, batch["x"] @ params["in"])
        return masked_mean(params, h, batch)

    return jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)(params, batch)


def remat_around_the_head(params, batch):
    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        h = block(layer, h)
    return jax.checkpoint(masked_mean)(params, h, batch)


def remats_of_two_layers_that_are_given_all_parameters(params, batch):
    h = batch["x"] @ params["in"]
    for first in range(0, LAYERS, 2):

        def pair(params, h, first=first):
            for layer in params["blocks"][first : first + 2]:
                h = block(layer, h)
            return h

        h = jax.checkpoint(pair)(params, h)
    return masked_mean(params, h, batch)


def a_masked_mean_in_a_branch(params, batch):
    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        h = block(layer, h)
    return jax.lax.cond(
        params["out"][0, 0] > 0, lambda h: masked_mean(params, h, batch), lambda h: 2 * (h**2).mean(), h
    )


def a_count_made_again_in_every_layer(params, batch):
    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        share = batch["mask"] / batch["mask"].sum()
        h = block(layer, h) * (1 + share[..., None])
    return masked_mean(params, h, batch)


def a_count_made_in_every_remat(params, batch):
    def counted(layer, h):
        return block(layer, h) * (1 + batch["mask"].mean())

    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        h = jax.checkpoint(counted)(layer, h)
    return masked_mean(params, h, batch)


def a_count_made_in_every_turn_of_a_scan(params, batch):
    def turn(h, layer):
        return block(layer, h) * (1 + batch["mask"][..., None] / batch["mask"].sum()), None

    h, _ = jax.lax.scan(jax.checkpoint(turn), batch["x"] @ params["in"], params["blocks"])
    return masked_mean(params, h, batch)


def systems_of_equations_in_every_layer(params, batch):
    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        h = block(layer, h)
        matrix = jnp.einsum("bsd,btd->bst", h, h) + 2 * jnp.eye(LENGTH)
        h = h + 0.3 * jnp.linalg.solve(matrix, h) + 0.1 * jnp.linalg.inv(matrix) @ h
        h = h + 0.1 * jnp.linalg.slogdet(layer["up"] @ layer["up"].T + jnp.eye(WIDTH))[1]
    return masked_mean(params, h, batch)


def products_whose_order_depends_on_the_number_of_rows(params, batch):
    h = batch["x"] @ params["in"]
    for layer in params["blocks"]:
        # (h up) down has fewer operations for two rows, h (up down) for eight.
        first = jnp.einsum("bi,ij,jk->bk", h[:, 0], layer["up"], layer["down"])
        h = block(layer, h) + first[:, None]
    return masked_mean(params, h, batch)


def attention(layer, h, bias):
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", h @ layer["up"], h) + bias)
    return h + jnp.einsum("bst,btd->bsd", scores, h) @ layer["down"]


def a_bias_with_the_mask_in_it_made_in_the_first_layer(params, batch):
    h, bias = batch["x"] @ params["in"], None
    for layer in params["blocks"]:
        keys = h @ layer["down"]
        if bias is None:
            bias = params["bias"] + jnp.where(batch["mask"] > 0, 0.0, -1e9)[:, None, :]
        h = attention(layer, h, bias) + 0.1 * keys
    return masked_mean(params, h, batch)


def numbers_of_each_layer_in_a_remat(params, batch):
    h = batch["x"] @ params["in"]
    for n, layer in enumerate(params["blocks"]):
        # A remat keeps what differs inside it: the rate, and what a conditional and loops in it read.
        def scaled(layer, h, rate=0.9 - 0.1 * n):
            h, _ = jax.lax.scan(lambda h, _: (h + rate * block(layer, h), None), h, None, length=2)
            h = jax.lax.cond(layer["up"][0, 0] > rate - 0.9, lambda h: h * (1 - rate), lambda h: h / rate + 1, h)
            return jax.lax.fori_loop(0, 2, lambda _, h: h * (rate + 0.2), h)

        h = jax.checkpoint(scaled)(layer, h)
    return masked_mean(params, h, batch)


def step_of(loss):
    def train_step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def planned(loss, params, **sizes):
    step = merak_jax.parallelize(step_of(loss), mesh=merak_jax.make_mesh(**sizes), num_microbatches=2)
    step.lower(params, make_batch())
    return str(step.plan)


@pytest.mark.parametrize(
    "loss, params",
    [
        (remat_around_the_whole_loss, PARAMS),
        (remat_around_the_layers_in_a_remat_around_all, PARAMS),
        (remat_around_the_head, PARAMS),
        (remats_of_two_layers_that_are_given_all_parameters, PARAMS),
        (a_masked_mean_in_a_branch, PARAMS),
        (a_count_made_again_in_every_layer, PARAMS),
        (a_count_made_in_every_remat, PARAMS),
        (a_count_made_in_every_turn_of_a_scan, STACKED),
        (systems_of_equations_in_every_layer, PARAMS),
        (products_whose_order_depends_on_the_number_of_rows, PARAMS),
        (a_bias_with_the_mask_in_it_made_in_the_first_layer, PARAMS),
        (numbers_of_each_layer_in_a_remat, PARAMS),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_numbers_are_those_of_one_device(loss, params):
    train_step, batch = step_of(loss), make_batch()
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=2, pipe=2, tensor=2), num_microbatches=2)
    new, value = step(params, batch)
    expected = jax.jit(train_step)(params, batch)
    for actual, wanted in zip(jax.tree.leaves((step.unshard(new), value)), jax.tree.leaves(expected), strict=True):
        assert np.abs(actual - wanted).max() <= 1e-12 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "loss, blocks",
    [
        (remat_around_the_whole_loss, "4 blocks"),
        (remats_of_two_layers_that_are_given_all_parameters, "2 blocks"),
        (a_bias_with_the_mask_in_it_made_in_the_first_layer, "4 blocks"),
        (numbers_of_each_layer_in_a_remat, "4 blocks"),
    ],
)
def test_all_layers_are_blocks(loss, blocks):
    assert blocks in planned(loss, PARAMS, pipe=2, devices=jax.devices()[:2])


def test_a_model_in_a_branch_is_refused_with_its_line():
    def loss(params, batch):
        return jax.lax.cond(params["out"][0, 0] > 0, plain, lambda p, b: 2 * plain(p, b), params, batch)

    with pytest.raises(NoRepeatedBlocksError, match=r"one `cond` at .*test_wrapped_layers.py:\d+.*differentiated at"):
        planned(loss, PARAMS, pipe=2, devices=jax.devices()[:2])


def test_one_layer_is_not_said_to_have_layers_that_differ():
    def loss(params, batch):
        h = batch["x"] @ params["in"]
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        h = attention(params["blocks"][0], h, params["bias"])
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        return masked_mean(params, h, batch)

    with pytest.raises(NoRepeatedBlocksError, match=r"no chain of equal blocks was found.*test_wrapped_layers.py:\d+"):
        planned(loss, PARAMS, pipe=2, devices=jax.devices()[:2])


def test_a_custom_derivative_that_differs_by_layer_is_named():
    def scaled(n):
        def times(layer, h):
            return block(layer, h) * (1 + n)

        custom = jax.custom_vjp(times)
        custom.defvjp(lambda layer, h: jax.vjp(times, layer, h), lambda pull, g: pull(g))
        return custom

    def loss(params, batch):
        h = batch["x"] @ params["in"]
        for n, layer in enumerate(params["blocks"]):
            h = scaled(n)(layer, h)
        return masked_mean(params, h, batch)

    message = r"`custom_vjp_call` at .*test_wrapped_layers.py:\d+.* give it what differs between layers as an argument"
    with pytest.raises(NoRepeatedBlocksError, match=message):
        planned(loss, PARAMS, pipe=2, devices=jax.devices()[:2])


def test_one_stage_keeps_the_remat_around_the_whole_loss():
    step = merak_jax.parallelize(
        step_of(remat_around_the_whole_loss),
        mesh=merak_jax.make_mesh(data=2, devices=jax.devices()[:2]),
        num_microbatches=2,
    )
    step.lower(PARAMS, make_batch())
    names = [e.primitive.name for e in step._latest.program.loss.graph.program.eqns]
    assert "remat2" in names or "checkpoint" in names, names


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"data": 2}], ids=str)
def test_counters_of_the_batch_leave_a_remat(sizes):
    def layer(params, count, h, mask):
        tokens = mask.sum()
        return block(params, h) * (1 + mask[..., None] / tokens), (count + tokens, 2 * tokens + 1)

    def train_step(state, batch):
        def loss(params):
            h, counts = batch["x"] @ params["in"], []
            for own, count in zip(params["blocks"], state["counts"]):
                h, made = jax.checkpoint(layer)(own, count, h, batch["mask"])
                counts.append(made)
            return masked_mean(params, h, batch), counts

        (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "counts": [c for c, _ in counts]}, (value, [n for _, n in counts])

    state, batch = {"params": PARAMS, "counts": [jnp.zeros(()) for _ in range(LAYERS)]}, make_batch()
    mesh = merak_jax.make_mesh(**sizes, devices=jax.devices()[:2])
    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=2)
    new, metrics = step(state, batch)
    expected = jax.jit(train_step)(state, batch)
    for actual, wanted in zip(jax.tree.leaves((step.unshard(new), metrics)), jax.tree.leaves(expected), strict=True):
        assert np.abs(actual - wanted).max() <= 1e-12 * np.abs(wanted).max()
