"""Stages with fewer blocks than others have padding in their lanes: nothing of it reaches a number, not even by 0 x infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merak_jax

LENGTH, WIDTH, ROWS = 4, 6, 8
random = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(random.normal(size=shape) / 2)


def params_of(layers, stacked):
    blocks = [{"w": array(WIDTH, WIDTH), "t": array() + 2.0, "g": array(WIDTH)} for _ in range(layers)]
    return {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks) if stacked else blocks, "s": array(WIDTH)}


BATCH = {"x": array(ROWS, LENGTH, WIDTH), "mask": jnp.asarray((random.random((ROWS, LENGTH)) < 0.7) * 1.0)}

# What a layer makes of a shared parameter and of something that is zero in the padding: infinite there, or with an infinite slope.
FACTORS = {
    "shared over a count of the batch": lambda s, layer, batch: s.sum() / batch["mask"].sum(),
    "shared over a parameter of the layer": lambda s, layer, batch: s / layer["t"],
    "shared times the direction of a vector": lambda s, layer, batch: s * layer["g"] / jnp.linalg.norm(layer["g"]),
    "shared times a logarithm": lambda s, layer, batch: s.sum() * jnp.log(layer["t"] ** 2),
    "shared under a power": lambda s, layer, batch: jnp.tanh(s) * layer["t"] ** 0.5 + 1.0 / (layer["t"] * s.sum() ** 2),
}


def loss_of(factor, stacked):
    def block(params, layer, h, batch):
        return h + jnp.tanh(h @ layer["w"]) * FACTORS[factor](params["s"], layer, batch)

    def loss(params, batch):
        if stacked:
            h, _ = jax.lax.scan(lambda h, layer: (block(params, layer, h, batch), None), batch["x"], params["blocks"])
        else:
            h = batch["x"]
            for layer in params["blocks"]:
                h = block(params, layer, h, batch)
        penalty = sum(jnp.log(layer["t"]) for layer in params["blocks"]) if not stacked else 0.0
        return (h**2 * batch["mask"][..., None]).sum() / batch["mask"].sum() + 0.01 * penalty

    return loss


@pytest.mark.filterwarnings("ignore::merak_jax.runtime.reroll.RerollWarning")
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    "stacked, layers, sizes", [(False, 3, {"pipe": 2}), (False, 5, {"pipe": 4}), (True, 5, {"pipe": 2})]
)
def test_gradients_of_shared_values_are_those_of_one_device(factor, stacked, layers, sizes):
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))
    loss, params = loss_of(factor, stacked), params_of(layers, stacked)

    def train_step(state, batch):
        params, rest = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, rest = transform.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest), (value, grads["s"], optax.tree.norm(grads))

    step = merak_jax.parallelize(
        train_step, mesh=merak_jax.make_mesh(**sizes, devices=jax.devices()[: sizes["pipe"]]), num_microbatches=2
    )
    ours = expected = (params, transform.init(params))
    single = jax.jit(train_step)
    for _ in range(2):
        ours, metrics = step(ours, BATCH)
        expected, wanted = single(expected, BATCH)
        pairs = zip(jax.tree.leaves((step.unshard(ours), metrics)), jax.tree.leaves((expected, wanted)), strict=True)
        for a, e in pairs:
            assert np.abs(a - e).max() <= 1e-11 * np.abs(e).max()
