"""Blocks that cut and join values along dimensions that XLA likes to split: no device waits for one of another stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import merak_jax
from benchmarks.hlo import Program
from tests.parity import mesh_of

WIDTH, ROWS, LENGTH = 8, 8, 4


@jax.custom_vjp
def gate(x):
    a, b = jnp.split(x, 2, axis=-1)
    return a * jnp.tanh(b)


def gate_forward(x):
    return gate(x), x


def gate_backward(x, cotangent):
    a, b = jnp.split(x, 2, axis=-1)
    return (jnp.concatenate([cotangent * jnp.tanh(b), cotangent * a * (1 - jnp.tanh(b) ** 2)], axis=-1),)


gate.defvjp(gate_forward, gate_backward)


class CuttingBlock(nn.Module):
    """A weight used twice, and what is made of its product cut in halves, shifted, sorted, summed and scanned over."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.3), (WIDTH, WIDTH), x.dtype)
        y = jnp.tanh(x @ kernel) @ kernel.T
        a, b = jnp.split(nn.Dense(2 * WIDTH, param_dtype=x.dtype)(y), 2, axis=-1)
        y = a * nn.sigmoid(b) + gate(nn.Dense(2 * WIDTH, param_dtype=x.dtype)(y))
        y = y + jnp.roll(y, 1, axis=-1) + jnp.cumsum(y, axis=-1) + lax.top_k(y, 4)[0].sum(-1, keepdims=True)
        left, right = jnp.split(y, 2, axis=-1)
        y = jnp.concatenate([-right, left], axis=-1)
        y = jax.checkpoint(lambda y: jnp.flip(jnp.sin(y), axis=-1) + jnp.pad(y, [(0, 0), (0, 0), (1, 0)])[..., :-1])(y)
        y = lax.cond(kernel.sum() > 0, lambda y: jnp.roll(y, 2, axis=-1), lambda y: 2 * y, y)

        def turn(state, row):
            state = jnp.tanh(jnp.roll(state, 1, axis=-1) + row @ kernel)
            return state, state

        _, rows = lax.scan(turn, jnp.zeros_like(y[:, 0]), jnp.swapaxes(y, 0, 1))
        return x + 0.1 * (y + jnp.swapaxes(rows, 0, 1))


class CuttingModel(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(16, WIDTH, param_dtype=jnp.float64)
        x = table(tokens)
        for n in range(self.layers):
            x = CuttingBlock(name=f"block_{n}")(x)
        return table.attend(x)


def setting(layers):
    model = CuttingModel(layers)
    tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH), 0, 16)
    params = jax.jit(model.init)(jax.random.key(1), tokens)["params"]

    def train_step(params, tokens):
        def loss(params):
            logits = nn.log_softmax(model.apply({"params": params}, tokens)[:, :-1])
            return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    return train_step, params, tokens


@pytest.mark.parametrize(
    "schedule, form", [("1f1b", "merged"), ("shifted_critical_path", "switched"), ("zb_h1", "merged")]
)
def test_blocks_move_parts_only_by_sums_within_their_stage(schedule, form):
    train_step, params, tokens = setting(5)
    mesh = mesh_of(1, 2, 2)
    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=4, schedule=schedule, form=form)
    program = Program(step.lower(params, tokens).compile().as_text())
    stages = [{int(device.id) for device in mesh.devices[0, stage]} for stage in range(2)]
    inside = [c for c in program.collectives if c.loops > 1]
    assert {c.kind for c in inside} >= {"all-reduce"}
    for collective in inside:
        assert collective.kind != "collective-permute", collective.text
        assert all(set(group) in stages for group in collective.groups), collective.text


def test_such_blocks_give_the_numbers_of_one_device():
    train_step, params, tokens = setting(5)
    step = merak_jax.parallelize(train_step, mesh=mesh_of(2, 2, 2), num_microbatches=4)
    expected = params
    state = params
    for _ in range(2):
        expected, loss = jax.jit(train_step)(expected, tokens)
        state, found = step(state, tokens)
        assert abs(found - loss) <= 1e-12 * abs(loss)
    for a, b in zip(jax.tree.leaves(step.unshard(state)), jax.tree.leaves(expected)):
        assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max()
