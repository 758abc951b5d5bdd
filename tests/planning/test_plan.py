"""A plan is known before anything compiles, reads as text, picture and JSON, and can be used again."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.errors import PlanError


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, param_dtype=jnp.float64)(nn.tanh(nn.Dense(16, param_dtype=jnp.float64)(x)))


class Model(nn.Module):
    layers: int = 5

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 8, param_dtype=jnp.float64)(tokens)
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(24, use_bias=False, param_dtype=jnp.float64)(x)


MODEL = Model()


OPTIMIZER = optax.adam(1e-3)


def create_state(key):
    params = MODEL.init(key, jnp.zeros((1, 4), jnp.int32))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


SHAPES = {name: jax.ShapeDtypeStruct((16, 4), jnp.int32) for name in "xy"}


@pytest.fixture(scope="module")
def step():
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=2, pipe=2, tensor=2), num_microbatches=4)
    step.lower(jax.eval_shape(create_state, jax.random.key(0)), SHAPES)
    return step


def test_a_plan_needs_shapes_only_and_says_what_runs_where(step):
    plan = step.plan
    assert (plan.data, plan.pipe, plan.tensor, plan.num_microbatches, plan.rows) == (2, 2, 2, 4, 16)
    assert [s.blocks for s in plan.stages] == [3, 2]
    assert [s.in_flight for s in plan.stages] == [3, 1]
    # 1F1B in merged ticks, B = recompute + two forwards: idle (P-1)/(M+P-1).
    assert plan.bubble_share == pytest.approx(1 / 5)
    # The carry is split over `tensor`.
    assert plan.boundary_bytes == 2 * 4 * 8 * 8 // 2


def test_the_text_names_leaves_their_splits_and_the_users_line(step):
    text = str(step.plan)
    assert "data 2 · pipe 2 · tensor 2, 4 microbatches of 2 rows, 1f1b" in text
    assert "['Block_0']['Dense_1']['kernel'][8, 16] dimension 1 over tensor (and 4 like it)" in text
    assert "['Block_0']['Dense_0']['kernel'][16, 8] dimension 0 over tensor (and 4 like it)" in text
    assert "['Embed_0']['embedding'][24, 8] dimension 0 over ('pipe', 'tensor')" in text
    assert "test_plan.py" in text


def test_state_bytes_are_those_of_the_placed_state(step):
    state = step.shard(create_state(jax.random.key(0)))
    device = step.mesh.devices.flat[0]
    placed = sum(s.data.nbytes for a in jax.tree.leaves(state) for s in a.addressable_shards if s.device == device)
    assert step.plan.state_bytes == placed


def test_json_round_trip_and_use_of_the_plan_again(step):
    plan = merak_jax.Plan.from_json(step.plan.to_json())
    assert plan == step.plan
    again = merak_jax.parallelize(train_step, plan=plan)
    again.lower(jax.eval_shape(create_state, jax.random.key(0)), SHAPES)
    assert again.plan == plan


def test_pictures_are_written(step, tmp_path):
    svg, png = tmp_path / "timeline.svg", tmp_path / "timeline.png"
    assert step.plan.draw(str(svg)) == str(svg)
    step.plan.draw(str(png))
    assert svg.read_text().startswith("<svg") and "1f1b" in svg.read_text()
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_no_plan_before_shapes_are_known():
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=8))
    with pytest.raises(PlanError, match=r"step\.lower\(state, batch\)"):
        _ = step.plan
