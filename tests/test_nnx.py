"""nnx in its mutating style: the numbers of `nnx.jit` on one device, and objects that stay valid without being gathered."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import merak_jax
from merak_jax import _compat
from merak_jax.errors import BatchError, PlanError, StateError
from merak_jax.objects import values
from merak_jax.runtime.reroll import RerollWarning
from tests.helper import BARS, STEPS, worst_leaf

WIDTH, VOCABULARY, ROWS, LENGTH = 16, 32, 8, 6

pytestmark = [
    # nnx.metrics.Average keeps float32 totals of float64 losses.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
    pytest.mark.filterwarnings("ignore:the mesh uses:UserWarning"),
    pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning"),
]


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs, param_dtype=jnp.float64)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, param_dtype=jnp.float64)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Head(nnx.Module):
    def __init__(self, table):
        self.table = table

    def __call__(self, x):
        return x @ self.table.T


class Model(nnx.Module):
    """Token and head table are one Param."""

    def __init__(self, rngs, blocks=4, width=WIDTH):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs, param_dtype=jnp.float64)
        self.layers = nnx.List([Block(width, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs, param_dtype=jnp.float64)
        self.head = Head(self.embed.embedding)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_batch(n, rows=ROWS, length=LENGTH):
    tokens = np.random.default_rng(n).integers(0, VOCABULARY, (rows, length + 1))
    return {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def train_step(model, optimizer, metrics, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    metrics.update(loss=loss)
    return loss


OPTIMIZERS = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(1e-2, eps=1e-3)}
STEP_ON_ONE_DEVICE = nnx.jit(train_step)


def make_objects(optimizer="adamw"):
    model = Model(nnx.Rngs(0))
    tx = OPTIMIZERS[optimizer]
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def assert_same(actual, expected, bar):
    """Every value of two rows of nnx objects, structure, shapes and types too."""
    for a, e in zip(actual, expected, strict=True):
        worst, leaf = worst_leaf(nnx.as_pure(nnx.state(a)), nnx.as_pure(nnx.state(e)))
        # nnx.metrics.Average keeps a float32 total.
        allowed = max(bar, BARS["float32"][0]) if isinstance(e, nnx.MultiMetric) else bar
        assert worst <= allowed, f"{type(e).__name__}{leaf} differs by {worst:.1e}"


@functools.cache
def on_one_device(optimizer, steps=STEPS):
    objects = make_objects(optimizer)
    return objects, [float(STEP_ON_ONE_DEVICE(*objects, make_batch(n))) for n in range(steps)]


@pytest.mark.parametrize(("optimizer", "mesh"), [("adamw", (2, 2, 2)), ("sgd", (1, 4, 2)), ("adamw", (2, 4, 1))])
@pytest.mark.filterwarnings(f"error::{RerollWarning.__module__}.RerollWarning")
def test_three_steps_give_the_numbers_of_nnx_jit(optimizer, mesh):
    data, pipe, tensor = mesh
    step = merak_jax.parallelize(
        nnx.jit(train_step), mesh=merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor), num_microbatches=2
    )
    objects = make_objects(optimizer)
    losses = [float(step(*objects, make_batch(n))) for n in range(STEPS)]
    expected, expected_losses = on_one_device(optimizer)
    np.testing.assert_allclose(losses, expected_losses, rtol=BARS["float64"][0])
    assert_same(objects, expected, BARS["float64"][optimizer == "adamw"])
    assert objects[0].head.table is objects[0].embed.embedding
    assert int(objects[1].step[...]) == STEPS


# One step for all tests below: equal objects don't compile again.
@pytest.fixture(scope="module")
def step():
    return merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(data=1, pipe=2, tensor=1), num_microbatches=2)


@pytest.fixture
def trained(step):
    """Objects after two steps on the mesh, and the same on one device."""
    objects, expected = make_objects(), make_objects()
    for n in range(2):
        step(*objects, make_batch(n))
        STEP_ON_ONE_DEVICE(*expected, make_batch(n))
    return objects, expected


@pytest.fixture
def gathered(monkeypatch):
    """How many leaves have been gathered."""
    count = []

    def counting(*args, original=values.gathered, **kwargs):
        count.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(values, "gathered", counting)
    return count


def forbid_placing(monkeypatch):
    def shard(self, tree):
        raise AssertionError(f"placed anew: {self.paths}")

    monkeypatch.setattr("merak_jax.runtime.state.StateLayout.shard", shard)


def test_a_step_gathers_nothing_and_places_nothing_where_nobody_changed_anything(step, trained, gathered, monkeypatch):
    objects, expected = trained
    forbid_placing(monkeypatch)
    step(*objects, make_batch(2))
    assert not gathered
    STEP_ON_ONE_DEVICE(*expected, make_batch(2))
    assert_same(objects, expected, 1e-9)


def test_one_read_gathers_one_leaf_once_and_does_not_hold_up_the_next_step(step, trained, gathered, monkeypatch):
    (model, optimizer, metrics), expected = trained
    value = model.layers[1].up.kernel[...]
    assert len(gathered) == 1
    assert model.layers[1].up.kernel[...] is value and model.layers[1].up.kernel.shape == (WIDTH, 4 * WIDTH)
    assert len(gathered) == 1
    forbid_placing(monkeypatch)
    step(model, optimizer, metrics, make_batch(2))
    assert len(gathered) == 1
    # The arrays on the mesh were donated; what was read is a copy.
    np.testing.assert_allclose(value, expected[0].layers[1].up.kernel[...], rtol=1e-9, atol=1e-12)


def logits_on_host(model, optimizer, metrics):
    return model(make_batch(9)["x"])


READS = {
    "[...]": lambda m, o, _: m.layers[2].down.kernel[...],
    ".value": lambda m, o, _: m.layers[2].down.kernel.value,
    "get_value": lambda m, o, _: m.layers[2].down.kernel.get_value(),
    "arithmetic": lambda m, o, _: m.norm.scale * 2 + m.norm.bias,
    "jnp function": lambda m, o, _: jnp.linalg.norm(m.embed.embedding),
    "numpy": lambda m, o, _: np.asarray(m.embed.embedding[...]),
    "attribute": lambda m, o, _: m.embed.embedding.mean(),
    "nnx.state": lambda m, o, _: nnx.as_pure(nnx.state(m)),
    "tree.map over the state": lambda m, o, _: nnx.as_pure(jax.tree.map(jnp.sum, nnx.state(m))),
    "tree.map over the model": lambda m, o, _: nnx.as_pure(nnx.state(jax.tree.map(lambda x: x * 2, m))),
    "nnx.split and merge": lambda m, o, _: nnx.merge(*nnx.split(m))(make_batch(9)["x"]),
    "nnx.clone": lambda m, o, _: nnx.as_pure(nnx.state(nnx.clone(m))),
    "pickle": lambda m, o, _: nnx.as_pure(pickle.loads(pickle.dumps(nnx.state(m)))),
    "call": logits_on_host,
    "call under nnx.jit": lambda m, o, _: nnx.jit(lambda m, x: m(x))(m, make_batch(9)["x"]),
    "captured by jit": lambda m, o, _: jax.jit(lambda x: m(x))(make_batch(9)["x"]),
    "optax on the state": lambda m, o, _: optax.global_norm(nnx.state(m)),
    "moments": lambda m, o, _: o.opt_state[0].mu["layers"][1]["up"]["kernel"][...],
    "step count": lambda m, o, _: o.step[...],
    "metrics": lambda m, o, metrics: metrics.compute(),
    "device_get": lambda m, o, _: nnx.as_pure(jax.device_get(nnx.state(m))),
}


def one_step(step):
    objects, expected = make_objects(), make_objects()
    step(*objects, make_batch(0))
    STEP_ON_ONE_DEVICE(*expected, make_batch(0))
    return objects, expected


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_sees_the_new_values(step, read):
    objects, expected = one_step(step)
    worst, leaf = worst_leaf(READS[read](*objects), READS[read](*expected))
    assert worst <= 1e-9, leaf


def test_what_is_read_is_an_ordinary_array_on_the_default_device(trained):
    (model, *_), _ = trained
    value = model.embed.embedding.get_raw_value()
    assert isinstance(value, jax.Array) and not value.committed and value.devices() == {jax.devices()[0]}
    assert isinstance(model.embed.embedding, nnx.Param) and type(model.embed.embedding) is nnx.Param


def test_a_value_set_between_steps_is_used(step, trained):
    for objects in trained:
        model, optimizer, metrics = objects
        model.layers[1].up.kernel[...] = model.layers[1].up.kernel[...] * 2
        model.norm.scale.value = model.norm.scale.value * 3
        nnx.update(optimizer, jax.tree.map(lambda x: x * 2, nnx.state(optimizer)))
        metrics.reset()
    objects, expected = trained
    assert float(step(*objects, make_batch(2))) == pytest.approx(float(STEP_ON_ONE_DEVICE(*expected, make_batch(2))))
    assert_same(objects, expected, 1e-9)


def test_a_restored_state_is_used_and_the_old_optimizer_goes_on(step, trained):
    for objects in trained:
        nnx.update(objects[0], nnx.state(make_objects()[0]))
    objects, expected = trained
    step(*objects, make_batch(2))
    STEP_ON_ONE_DEVICE(*expected, make_batch(2))
    assert_same(objects, expected, 1e-9)


def test_a_step_that_fails_leaves_the_objects_as_they_were(step, trained):
    objects, expected = trained
    with pytest.raises(BatchError, match="7 rows"):
        step(*objects, make_batch(0, rows=7))
    with pytest.raises(KeyError, match="y"):
        step(*objects, {"x": make_batch(0)["x"]})
    assert_same(objects, expected, 1e-9)
    step(*objects, make_batch(2))
    STEP_ON_ONE_DEVICE(*expected, make_batch(2))
    assert_same(objects, expected, 1e-9)


def test_a_value_that_went_with_a_failed_run_says_so(trained):
    (model, *_), _ = trained
    with _compat.unread_variables():
        deferred = model.norm.scale.get_raw_value()
    deferred.leaves[0].stored.array.delete()
    with pytest.raises(StateError, match=r"\['model'\]\['norm'\]\['scale'\].*donate=False"):
        model.norm.scale[...]


def test_lower_takes_abstract_objects_and_plan_names_their_paths(step):
    objects = nnx.eval_shape(make_objects)
    step.lower(*objects, jax.eval_shape(lambda: make_batch(0)))
    assert "['model']['embed']['embedding'][32, 16]" in str(step.plan)


def test_unshard_reads_everything_and_shard_is_not_needed(step, trained, gathered):
    objects, expected = trained
    assert step.unshard(objects) is objects
    count = len(gathered)
    assert_same(objects, expected, 1e-9)
    assert len(gathered) == count
    with pytest.raises(PlanError, match="placed on the mesh by the step itself"):
        step.shard(objects[0])


def create(key):
    model = Model(nnx.Rngs(key))
    return model, nnx.Optimizer(model, OPTIMIZERS["adamw"], wrt=nnx.Param)


@pytest.mark.filterwarnings("ignore::merak_jax.runtime.reroll.RerollWarning")
def test_init_makes_the_values_on_the_mesh_at_the_first_step(step, monkeypatch):
    objects = step.init(create, jax.random.key(3))
    assert isinstance(objects[0], Model) and objects[0].head.table is objects[0].embed.embedding
    expected = nnx.jit(create)(jax.random.key(3))
    monkeypatch.setattr(values.Creation, "make", lambda self: pytest.fail("made on one device"))
    metrics, expected_metrics = make_objects()[2], make_objects()[2]
    step(*objects, metrics, make_batch(0))
    STEP_ON_ONE_DEVICE(*expected, expected_metrics, make_batch(0))
    assert_same((*objects, metrics), (*expected, expected_metrics), 1e-9)


def test_init_can_be_read_before_the_first_step(step):
    objects, expected = step.init(create, jax.random.key(3)), nnx.jit(create)(jax.random.key(3))
    assert_same(objects, expected, 0.0)


def test_init_advances_the_rngs_it_is_given(step):
    def layer(rngs):
        return nnx.Linear(2, 3, rngs=rngs)

    ours, theirs = nnx.Rngs(5), nnx.Rngs(5)
    assert_same((step.init(layer, ours), ours), (nnx.jit(layer)(theirs), theirs), 0.0)


def evaluate(model, metrics, batch):
    logits = model(batch["x"])
    metrics.update(loss=optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean())
    return logits


def test_an_evaluation_reads_the_model_where_the_train_step_left_it(step, trained, gathered):
    (model, optimizer, metrics), (expected, expected_optimizer, expected_metrics) = trained
    evaluation = merak_jax.parallelize(evaluate, mesh=step.mesh, num_microbatches=2)
    kernel = model.layers[0].up.kernel[...]
    for n in range(2):
        logits = evaluation(model, metrics, make_batch(n))
        np.testing.assert_allclose(logits, nnx.jit(evaluate)(expected, expected_metrics, make_batch(n)), rtol=1e-9)
    assert len(gathered) == 1 and model.layers[0].up.kernel[...] is kernel
    step(model, optimizer, metrics, make_batch(2))
    STEP_ON_ONE_DEVICE(expected, expected_optimizer, expected_metrics, make_batch(2))
    assert len(gathered) == 1
    assert_same((model, optimizer, metrics), (expected, expected_optimizer, expected_metrics), 1e-9)


def test_a_deferred_value_is_read_where_a_variable_is_read():
    class Later:
        reads = 0

        def read(self):
            Later.reads += 1
            return jnp.arange(3.0)

    _compat.allow_deferred_values(values.Deferred)
    door = vars(nnx.Variable)["_raw_value"]
    variable, later = nnx.Param(jnp.zeros(3)), values.Deferred(jax.tree.structure(0), [Later()])
    _compat.set_variable(variable, later)
    with _compat.unread_variables():
        assert variable.get_raw_value() is later
    assert Later.reads == 0
    np.testing.assert_array_equal(variable[...], [0, 1, 2])
    assert jax.tree.leaves(variable)[0] is variable.get_raw_value() and Later.reads == 1
    variable[...] = jnp.ones(3)
    with _compat.unread_variables():
        assert isinstance(variable.get_raw_value(), jax.Array)

    class Refused(Exception):
        pass

    def refuse():
        raise Refused

    with _compat.guarded_variables({id(variable): refuse}), pytest.raises(Refused):
        variable[...]
    assert vars(nnx.Variable)["_raw_value"] is door
