"""nnx steps of many shapes against `nnx.jit`: sharing, rngs, partial training, graphs that change, and mistakes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training import train_state

import merak_jax
from merak_jax.errors import BatchError, NoRepeatedBlocksError, NotSeparableError, PlanError, TraceError
from tests.helper import worst_leaf

WIDTH, CLASSES, ROWS = 8, 4, 8
SGD = optax.sgd(0.1, momentum=0.9)


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.tanh(self.linear(x)))


class Model(nnx.Module):
    def __init__(self, seed=0, rate=0.0, blocks=3):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.layers = nnx.List([Block(rngs, rate) for _ in range(blocks)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_batch(n=0):
    random = np.random.default_rng(n)
    return {"x": jnp.asarray(random.normal(size=(ROWS, WIDTH))), "y": jnp.asarray(random.integers(0, CLASSES, ROWS))}


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def train_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def parallel(step, pipe=2, **options):
    mesh = merak_jax.make_mesh(data=1, pipe=pipe, tensor=1)
    return merak_jax.parallelize(step, mesh=mesh, num_microbatches=2, **options)


def make_objects(make_model=Model, tx=SGD, wrt=nnx.Param):
    model = make_model()
    return model, nnx.Optimizer(model, tx, wrt=wrt)


def assert_same(actual, expected, bar=1e-11):
    worst, leaf = worst_leaf(nnx.as_pure(actual), nnx.as_pure(expected))
    assert worst <= bar, f"{leaf} differs by {worst:.1e}"


def assert_same_as_nnx_jit(step, make=make_objects, steps=2, pipe=2, **options):
    """Objects and return values of some steps; returns both rows of objects and both last return values."""
    ours, theirs = make(), make()
    parallel_step, plain_step = parallel(step, pipe, **options), nnx.jit(step)
    for n in range(steps):
        actual, expected = parallel_step(*ours, make_batch(n)), plain_step(*theirs, make_batch(n))
        assert_same(
            jax.tree.map(as_state, actual, is_leaf=is_module), jax.tree.map(as_state, expected, is_leaf=is_module)
        )
    for a, e in zip(ours, theirs):
        assert_same(nnx.state(a), nnx.state(e))
    return ours, theirs, actual, expected


def is_module(x):
    return isinstance(x, nnx.Pytree)


def as_state(x):
    return nnx.state(x) if is_module(x) else x


pytestmark = [
    pytest.mark.filterwarnings("ignore:the mesh uses:UserWarning"),
    # nnx.metrics.Average keeps float32 totals of float64 losses.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]

# Rngs, and what is captured instead of passed.


def test_25_26_dropout_draws_the_masks_of_one_device_and_its_counts_advance():
    (model, _), (expected, _), *_ = assert_same_as_nnx_jit(train_step, lambda: make_objects(lambda: Model(rate=0.5)))
    assert int(model.layers[0].drop.rngs.count[...]) == int(expected.layers[0].drop.rngs.count[...]) == 2


def test_25_rngs_passed_as_an_argument_advance():
    def step(model, optimizer, rngs, batch):
        def loss_fn(model, rngs):
            keep = rngs.dropout.bernoulli(0.5, batch["x"].shape)
            return loss_of(model, {**batch, "x": batch["x"] * keep})

        loss, gradients = nnx.value_and_grad(loss_fn)(model, rngs)
        optimizer.update(model, gradients)
        return loss

    assert_same_as_nnx_jit(step, lambda: (*make_objects(), nnx.Rngs(dropout=1)))


def test_25_a_captured_dropout_is_refused():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def step(model, optimizer, batch):
        def loss_fn(model):
            return dropout(model(batch["x"])).mean()

        optimizer.update(model, nnx.grad(loss_fn)(model))

    objects = make_objects()
    with pytest.raises(
        TraceError, match=r"test_nnx_cases.py:\d+ \(loss_fn\) changes an nnx object that was not passed in"
    ):
        parallel(step)(*objects, make_batch())
    assert_same(nnx.state(objects[0]), nnx.state(make_objects()[0]), 0.0)


def test_a_captured_metric_is_refused():
    metric = nnx.metrics.Average()

    def step(model, optimizer, batch):
        metric.update(values=train_step(model, optimizer, batch))

    with pytest.raises(TraceError, match="pass the module, optimizer, metric or rngs that it belongs to"):
        parallel(step)(*make_objects(), make_batch())


def test_a_captured_teacher_that_nobody_changes_is_a_constant():
    teacher = Model(seed=5)

    def step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda m: ((m(batch["x"]) - teacher(batch["x"])) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    assert_same_as_nnx_jit(step, pipe=1)


def test_reading_the_object_outside_instead_of_the_argument_is_refused():
    objects = make_objects()

    def step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda _: loss_of(objects[0], batch))(model)
        optimizer.update(model, gradients)
        return loss

    with pytest.raises(TraceError, match=r"reads model\.first\.kernel of the object outside"):
        parallel(step)(*objects, make_batch())


# Sharing.


def test_05_a_param_shared_by_two_layers_is_one_leaf_and_stays_shared():
    def make_model():
        model = Model()
        model.head.bias = nnx.Param(jnp.zeros(CLASSES))
        model.first.kernel = model.layers[0].linear.kernel
        return model

    (model, optimizer), *_ = assert_same_as_nnx_jit(train_step, lambda: make_objects(make_model))
    assert model.first.kernel is model.layers[0].linear.kernel
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert ("first", "kernel") in paths and ("layers", 0, "linear", "kernel") not in paths
    nnx.update(model, nnx.state(model))
    assert model.first.kernel is model.layers[0].linear.kernel


def test_04_an_average_that_begins_as_the_same_arrays_is_its_own_leaf():
    def step(model, optimizer, average, batch):
        loss = train_step(model, optimizer, batch)
        old, new = nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)
        nnx.update(average, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new))
        return loss

    def make():
        model, optimizer = make_objects()
        average = nnx.clone(model)
        nnx.update(average, nnx.state(model))
        assert average.head.kernel[...] is model.head.kernel[...]
        return model, optimizer, average

    (model, _, average), *_ = assert_same_as_nnx_jit(step, make)
    assert np.abs(model.head.kernel[...] - average.head.kernel[...]).max() > 1e-4


# What is trained, and how.


def test_54_partition_by_path_trains_each_part_with_its_own_optimizer():
    def labels(params):
        def label(path, _):
            return "adam" if "kernel" in jax.tree_util.keystr(path) else "sgd"

        return jax.tree_util.tree_map_with_path(label, params)

    tx = optax.partition({"adam": optax.adam(1e-2, eps=1e-3), "sgd": optax.sgd(0.1)}, labels)
    assert_same_as_nnx_jit(train_step, lambda: make_objects(tx=tx))


def test_63_a_mask_by_path_sees_the_tree_of_nnx():
    seen = []

    def mask(params):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        seen.append("['layers'][0]['linear']['kernel']" in [path.removesuffix(".value") for path in paths])
        return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3, weight_decay=0.3, mask=mask))
    assert_same_as_nnx_jit(train_step, lambda: make_objects(tx=tx))
    assert all(seen)


def test_a_subset_is_trained_with_diff_state():
    def make_model():
        model, rngs = Model(), nnx.Rngs(7)
        for layer in model.layers:
            layer.linear = nnx.LoRA(WIDTH, 2, WIDTH, base_module=layer.linear, rngs=rngs, param_dtype=jnp.float64)
        return model

    def step(model, optimizer, batch):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, gradients = nnx.value_and_grad(loss_of, argnums=wrt)(model, batch)
        optimizer.update(model, gradients)
        return loss

    before = nnx.state(make_model())
    (model, _), *_ = assert_same_as_nnx_jit(step, lambda: make_objects(make_model, wrt=nnx.LoRAParam))
    assert_same(nnx.state(model)["head"], before["head"], 0.0)
    assert np.abs(model.layers[0].linear.lora_b[...]).max() > 0


def test_split_and_merge_inside_a_mutating_step():
    def step(model, optimizer, batch):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p, rest), batch))(params)
        optimizer.update(model, gradients)
        return loss

    assert_same_as_nnx_jit(step, pipe=1)


@pytest.mark.filterwarnings("error::merak_jax.runtime.reroll.RerollWarning")
class RematModel(Model):
    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        return self.head(x)


class ScanModel(nnx.Module):
    def __init__(self, rate):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: Block(rngs, rate)))(rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        scanned = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(scanned(self.first(x), self.layers))


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("make_model", [RematModel, ScanModel])
def test_25_dropout_inside_remat_and_scan_draws_the_masks_of_one_device_and_its_counts_advance(make_model, pipe):
    assert_same_as_nnx_jit(train_step, lambda: make_objects(lambda: make_model(rate=0.3)), pipe=pipe)


def test_blocks_under_remat_which_returns_them_whole():
    class Rematerialised(Model):
        def __call__(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = nnx.remat(lambda layer, x: layer(x))(layer, x)
            return self.head(x)

    assert_same_as_nnx_jit(train_step, lambda: make_objects(Rematerialised))


class TrainState(train_state.TrainState):
    graphdef: Any = struct.field(pytree_node=False)
    rest: Any = None


def test_a_functional_step_over_states_and_a_graphdef():
    def step(state, batch):
        def loss_fn(params):
            return loss_of(nnx.merge(state.graphdef, params, state.rest), batch)

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), loss

    def make():
        graphdef, params, rest = nnx.split(Model(), nnx.Param, ...)
        return TrainState.create(apply_fn=None, params=params, tx=SGD, graphdef=graphdef, rest=rest)

    ours, theirs, parallel_step = make(), make(), parallel(step)
    for n in range(2):
        ours, loss = parallel_step(ours, make_batch(n))
        theirs, expected = jax.jit(step)(theirs, make_batch(n))
        assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert ours.step == 2 and ours.params["layers"][1]["linear"]["kernel"].shape == (WIDTH, WIDTH)
    whole = parallel_step.unshard(ours)
    merged = nnx.merge(whole.graphdef, whole.params, whole.rest)
    assert_same(nnx.state(merged), nnx.state(nnx.merge(theirs.graphdef, theirs.params, theirs.rest)))


def test_batch_norm_is_refused_as_in_linen():
    class Normalised(Model):
        def __init__(self):
            super().__init__()
            self.head = nnx.Sequential(nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), self.head)

    with pytest.raises(NotSeparableError, match="num_microbatches=1"):
        parallel(train_step)(*make_objects(Normalised), make_batch())


# Graphs.


def test_objects_that_are_returned_are_the_users_own():
    def step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, gradients)
        return model, {
            "layer": model.layers[0],
            "gradients": gradients,
            "loss": nnx.Param(loss),
            "none": None,
            "lr": 0.1,
        }

    (model, _), _, (returned, rest), (_, expected) = assert_same_as_nnx_jit(step)
    assert returned is model and rest["layer"] is model.layers[0]
    assert type(rest["gradients"]) is nnx.State and type(rest["loss"]) is nnx.Param
    assert_same(rest["gradients"], expected["gradients"])


class Counting(Model):
    """A static counter, a variable that a call makes, an array that is no variable, and one that nobody changes."""

    def __init__(self):
        super().__init__()
        self.calls, self.total, self.table = 0, jnp.zeros(3), jnp.arange(3.0)

    def __call__(self, x):
        self.calls += 1
        self.total = self.total + self.table
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "size", jnp.float64(y.shape[1]))
        return y


def test_a_graph_that_changes_in_every_step_is_followed_with_one_warning():
    with pytest.warns(UserWarning, match=r"changes the static attributes \['calls'\]"):
        (model, _), (expected, _), *_ = assert_same_as_nnx_jit(train_step, lambda: make_objects(Counting), pipe=1)
    assert model.calls == expected.calls == 2
    np.testing.assert_array_equal(model.total, expected.total)
    assert len(model.size.get_value()) == 2


def test_containers_of_objects_and_scalars_beside_them():
    def step(objects, batch, scale):
        loss, gradients = nnx.value_and_grad(lambda m: loss_of(m, batch) * scale)(objects["model"])
        objects["optimizer"].update(objects["model"], gradients)
        return loss

    ours, theirs = ({"model": m, "optimizer": o, "shift": jnp.ones(2)} for m, o in (make_objects(), make_objects()))
    parallel_step = parallel(step, pipe=1)
    for scale in (1.0, 2.0):
        assert float(parallel_step(ours, make_batch(), scale)) == pytest.approx(
            float(nnx.jit(step)(theirs, make_batch(), scale)), rel=1e-12
        )
    assert_same(nnx.state(ours["model"]), nnx.state(theirs["model"]))


# Which argument is the batch.


def test_keyword_arguments_and_named_batches():
    def step(model, optimizer, x, y):
        return train_step(model, optimizer, {"x": x, "y": y})

    batch = make_batch()
    loss = parallel(step, pipe=1, batch_argnums=(2, 3))(*make_objects(), y=batch["y"], x=batch["x"])
    assert float(loss) == pytest.approx(float(loss_of(Model(), batch)), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"argument 1 \(optimizer\) is an nnx object; .*candidates: 2 \(x\), 3 \(y\)"),
        ({"batch_argnums": 0}, r"argument 0 \(model\) is an nnx object; .*candidates: 2 \(x\), 3 \(y\)"),
    ],
)
def test_a_batch_that_cannot_be_told_is_one_clear_error(options, message):
    def step(model, optimizer, x, y):
        return train_step(model, optimizer, {"x": x, "y": y})

    with pytest.raises(PlanError, match=message):
        parallel(step, **options)(*make_objects(), *make_batch().values())


def test_variables_of_other_kinds_are_refused():
    model = Model()
    model.extra = nnx.Param(jnp.zeros(3), ref=True)
    with pytest.raises(TraceError, match=r"model\.extra is made with ref=True"):
        parallel(train_step)(model, nnx.Optimizer(Model(), SGD, wrt=nnx.Param), make_batch())


class ScannedModel(nnx.Module):
    """`nnx.scan` over layers that `nnx.remat` recomputes, written in one of the ways its documentation shows."""

    def __init__(self, way, rate):
        rngs = nnx.Rngs(0, dropout=1)

        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs, rate)

        self.layers, self.way = make(rngs), way
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        def inside(x, layer):
            return nnx.remat(lambda layer, x: layer(x))(layer, x)

        def plain(x, layer):
            return layer(x)

        body = nnx.remat(plain) if self.way == "decorated" else inside
        return self.head(nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


@pytest.mark.parametrize("way", ["inside", "decorated"])
def test_remat_in_a_scan_over_layers(way):
    assert_same_as_nnx_jit(train_step, lambda: make_objects(lambda: ScannedModel(way, rate=0.3)))


def test_a_step_without_equal_layers_names_the_loss():
    with pytest.raises(NoRepeatedBlocksError, match=r"differentiated at .*test_nnx_cases.py:\d+ \(train_step\)"):
        parallel(train_step)(*make_objects(lambda: Model(blocks=0)), make_batch())


def test_a_batch_of_unequal_lengths_names_the_step():
    def step(model, batch, optimizer):
        optimizer.update(model, nnx.grad(loss_of)(model, batch))

    model, optimizer = make_objects()
    with pytest.raises(BatchError, match=r"train step at .*test_nnx_cases.py:\d+ \(step\)"):
        parallel(step)(model, {"x": jnp.ones((8, 8)), "y": jnp.ones(4)}, optimizer)
