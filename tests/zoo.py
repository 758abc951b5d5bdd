"""The rows of the parity table: models and train steps as people write them, each with all that a run needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import merak_jax
from tests import zoo_models as models
from tests.helper import STEPS, Differences, Run, differences, raw_gradients, run_on_mesh, run_on_one_device
from tests.parity import mesh_of
from tests.zoo_models import ObjectTask, Task

MESHES = ((2, 2, 2), (1, 4, 2), (2, 4, 1), (1, 8, 1))
MICROBATCHES = (2, 8)
ADAM = optax.adam(1e-2, eps=1e-3)
SGD = optax.sgd(0.3)
PLAIN, WIDE = ("float64", "float32"), ("float64", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the runs of a row need, in one precision: `make_state(tx)` and `make_batch(n, rows)` as in the parity helper.

    With `objects`, `make_state(tx)` returns nnx objects, the optimizer second, and `train_step(*objects, batch)` changes them.
    """

    train_step: Callable
    make_state: Callable[[optax.GradientTransformation], Any]
    make_batch: Callable[[int, int], Any]
    optimizer: optax.GradientTransformation = ADAM
    objects: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One model with one train step: `build(precision)`, for each of `precisions`."""

    name: str
    build: Callable[[str], Setting]
    precisions: tuple[str, ...] = PLAIN


@dataclasses.dataclass(frozen=True)
class ZooCell:
    """One row on one mesh (sizes of data, pipe, tensor) with one number of microbatches, in one precision."""

    row: str
    mesh: tuple[int, int, int]
    num_microbatches: int
    precision: str = "float64"

    def __str__(self) -> str:
        return f"{self.row}, {self.column}, {self.precision}"

    @property
    def column(self) -> str:
        return f"{'x'.join(map(str, self.mesh))} M={self.num_microbatches}"

    @property
    def rows(self) -> int:
        """B: 16; in bfloat16 as few as possible, at least 4, since every further row adds rounding noise."""
        step = self.mesh[0] * self.num_microbatches
        return step * math.ceil(4 / step) if self.precision == "bfloat16" else 16

    @property
    def steps(self) -> int:
        # Rounding in bfloat16 makes the parameters after one step differ, and the next gradients are taken elsewhere.
        return 1 if self.precision == "bfloat16" else STEPS


ROWS: dict[str, Row] = {}


def row(name: str, precisions: tuple[str, ...] = PLAIN) -> Callable:
    """Register a function from a precision to a `Setting` as the row `name`."""

    def register(build):
        ROWS[name] = Row(name, build, precisions)
        return build

    return register


def all_cells() -> list[ZooCell]:
    """Every row on every mesh with every number of microbatches, in each of its precisions."""
    return [
        ZooCell(r.name, mesh, count, precision)
        for r in ROWS.values()
        for precision in r.precisions
        for mesh, count in itertools.product(MESHES, MICROBATCHES)
    ]


@functools.cache
def _setting(name: str, precision: str) -> Setting:
    return ROWS[name].build(precision)


@functools.lru_cache(maxsize=8)
def _reference(name: str, precision: str, rows: int, steps: int) -> Run:
    setting = _setting(name, precision)
    batches = functools.partial(_batch, setting, rows)
    if setting.objects:
        return _run_objects(nnx.jit(setting.train_step), setting, batches, steps)
    return run_on_one_device(setting.train_step, setting.make_state, batches, setting.optimizer, steps=steps)


def _batch(setting: Setting, rows: int, n: int):
    return setting.make_batch(n, rows)


def reference(cell: ZooCell) -> Run:
    """The single-device run of a cell; cells of one row and precision share it."""
    return _reference(cell.row, cell.precision, cell.rows, cell.steps)


def parallel(cell: ZooCell) -> Run:
    """The parallel run of a cell."""
    setting = _setting(cell.row, cell.precision)
    batches = functools.partial(_batch, setting, cell.rows)
    mesh, count = mesh_of(*cell.mesh), cell.num_microbatches
    if setting.objects:
        step = merak_jax.parallelize(setting.train_step, mesh=mesh, num_microbatches=count)
        return _run_objects(step, setting, batches, cell.steps)
    return run_on_mesh(
        setting.train_step, setting.make_state, batches, mesh, setting.optimizer, steps=cell.steps,
        num_microbatches=count,
    )  # fmt: skip


def compare(cell: ZooCell) -> Differences:
    """How far the parallel run of a cell is from the single-device run."""
    return differences(parallel(cell), reference(cell))


def check(cell: ZooCell) -> None:
    """Assert parity for a cell."""
    lines = compare(cell).over(cell.precision)
    assert not lines, "\n".join(lines)


def _recorded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` behind a transformation that keeps the raw gradients in its state."""
    return optax.chain(optax.trace(decay=0.0), optimizer)


def _run_objects(step, setting: Setting, make_batch, steps: int) -> Run:
    objects = setting.make_state(_recorded(setting.optimizer))
    metrics, gradients = [], None
    for n in range(steps):
        metrics.append(jax.device_get(nnx.as_pure(step(*objects, make_batch(n)))))
        if n == 0:
            gradients = jax.device_get(nnx.as_pure(raw_gradients(objects[1].opt_state)))
    # The optimizer's own tree tells moments from counts; its state as an object is one dictionary.
    state = [nnx.as_pure(x.opt_state if isinstance(x, nnx.Optimizer) else nnx.state(x)) for x in objects]
    return Run(tuple(metrics), gradients, jax.device_get(state))


# Models, each with a TrainState that holds a key, and a key of dropout that depends on the step.


class KeyedState(TrainState):
    key: jax.Array


def keyed(task: Task, state_class: type[TrainState] = KeyedState, **fields) -> Callable:
    """`make_state(tx)` with a key; `fields` are those that a subclass adds."""
    fields = {"params": task.params, "key": jax.random.key(5), **fields}
    return lambda tx: state_class.create(apply_fn=task.model.apply, tx=tx, **fields)


def step_of(loss: Callable) -> Callable:
    """The train step of `loss(apply, params, batch, key)`."""

    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        value, gradients = jax.value_and_grad(lambda p: loss(state.apply_fn, p, batch, key))(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value}

    return train_step


def plain(name: str, make_task: Callable, precisions: tuple[str, ...] = PLAIN, **changes) -> None:
    """Register the row of a model with the usual train step."""

    @row(name, precisions)
    def _(precision):
        task = make_task(precision, **changes)
        return Setting(step_of(task.loss), keyed(task), task.make_batch)


plain("GPT-2", models.gpt2_task, WIDE)
plain("GPT-2, untied head", models.gpt2_task, WIDE, tie_head=False, num_layers=3)
plain("GPT-2, scanned", models.gpt2_task, WIDE, scan_layers=True, num_layers=8)
plain("Llama, grouped heads", models.llama_task, WIDE)
plain("Llama, scanned, tied, slow rotation", models.llama_task, scan_layers=True, tie_head=True, rotary_scale=8.0)
plain("Llama, blocks recomputed", models.llama_task, model=models.RematLlama)
plain("Llama, every second block local", models.llama_task, model=models.LocalLlama)
plain("Mixtral, router z-loss", models.mixtral_task)
plain("Mixtral, every second block dense", models.mixtral_task, model=models.SparseMixtral)
plain("BERT, masked tokens", models.bert_task, WIDE)
plain("BERT, scanned, sentence pairs", models.pair_task, scan_layers=True)
plain("ViT, stochastic depth", models.vit_task)
plain("ViT, scanned", models.vit_task, scan_layers=True, num_layers=8)
plain("T5, label smoothing, z-loss", models.t5_task)
plain("T5 1.1, scanned, gated, untied", models.t5_task, scan_layers=True, gated=True, tie_head=False)


# Train steps, on GPT-2.


@row("GPT-2, key split and returned, dictionary state")
def _(precision):
    task = models.gpt2_task(precision)
    tx = _recorded(ADAM)

    def train_step(state, batch):
        rng, key = jax.random.split(state["rng"])

        def loss(params):
            return task.loss(task.model.apply, params, batch, key)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = tx.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "rng": rng}, (value, optax.tree.norm(updates))

    def make_state(_):
        return {"params": task.params, "opt_state": tx.init(task.params), "rng": jax.random.PRNGKey(3)}

    return Setting(train_step, make_state, task.make_batch)


@row("GPT-2, frozen dictionary, weight penalty")
def _(precision):
    task = models.gpt2_task(precision)

    def loss(apply, params, batch, key):
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return task.loss(apply, params, batch, key) + 1e-3 * penalty

    return Setting(step_of(loss), keyed(task, params=FrozenDict(task.params)), task.make_batch, SGD)


class AveragedState(KeyedState):
    average: Any


@row("GPT-2, average of parameters in the step")
def _(precision):
    task = models.gpt2_task(precision)
    plain_step = step_of(task.loss)

    def train_step(state, batch):
        new, metrics = plain_step(state, batch)
        decay = jnp.minimum(0.9, (1 + new.step) / (10 + new.step)).astype(metrics["loss"].dtype)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, new.params)
        return new.replace(average=average), {**metrics, "decay": decay}

    return Setting(train_step, keyed(task, AveragedState, average=task.params), task.make_batch)


@row("GPT-2, embeddings frozen by labels")
def _(precision):
    task = models.gpt2_task(precision)

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if "embedding" in path[0].key else "trained", params
        )

    optimizer = optax.multi_transform({"trained": ADAM, "frozen": optax.set_to_zero()}, labels)
    return Setting(step_of(task.loss), keyed(task), task.make_batch, optimizer)


class AdaptedState(KeyedState):
    base: Any


@row("GPT-2, low-rank adapters")
def _(precision):
    task = models.gpt2_task(precision)
    blocks = [name for name in task.params if name.startswith("h_")]
    rank, width, random = 2, 16, np.random.default_rng(1)

    def factor(*shape):
        return jnp.asarray(0.2 * random.standard_normal(shape), task.params["norm_f"]["scale"].dtype)

    adapters = {b: {"a": factor(width, rank), "b": factor(rank, 4 * width)} for b in blocks}

    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)

        def loss(adapters):
            params = dict(state.base)
            for name, adapter in adapters.items():
                mlp = params[name]["mlp"]
                up = {**mlp["up"], "kernel": mlp["up"]["kernel"] + adapter["a"] @ adapter["b"]}
                params[name] = {**params[name], "mlp": {**mlp, "up": up}}
            return task.loss(state.apply_fn, params, batch, key)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value}

    return Setting(train_step, keyed(task, AdaptedState, params=adapters, base=task.params), task.make_batch)


@row("GPT-2, several losses with their own masks")
def _(precision):
    task = models.gpt2_task(precision)

    def make_batch(n, rows):
        batch = task.make_batch(n, rows)
        random = np.random.default_rng(n + 70)
        kind = random.integers(0, 2, (rows, 1))
        return {**batch, "answers": batch["mask"] * kind, "weights": random.random(rows).astype(batch["mask"].dtype)}

    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)

        def loss(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], deterministic=False, rngs={"dropout": key})
            tokens = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            parts = {
                "all": jnp.sum(tokens * batch["mask"]) / jnp.sum(batch["mask"]),
                "answers": jnp.sum(tokens * batch["answers"]) / jnp.maximum(jnp.sum(batch["answers"]), 1),
                "weighted": jnp.average((tokens * batch["mask"]).sum(-1), weights=batch["weights"]),
            }
            return parts["all"] + 0.5 * parts["answers"] + 0.1 * parts["weighted"], parts

        (value, parts), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, **parts}

    return Setting(train_step, keyed(task), make_batch)


@row("GPT-2, losses and predictions of every row returned")
def _(precision):
    task = models.gpt2_task(precision)

    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)

        def loss(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], deterministic=False, rngs={"dropout": key})
            tokens = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]) * batch["mask"]
            value = tokens.sum() / batch["mask"].sum()
            predictions = logits.argmax(-1)
            is_right = (predictions == batch["targets"]) * batch["mask"]
            return value, {
                "rows": tokens.sum(-1),
                "predictions": predictions,
                "right": is_right.sum(),
                "perplexity": jnp.exp(value),
                "largest": logits.max(),
            }

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, "norm": optax.tree.norm(gradients), **aux}

    return Setting(train_step, keyed(task), task.make_batch)


class ScaledState(KeyedState):
    scale: DynamicScale


# flax casts the gradients to float32 in there, so there is no float64.
@row("GPT-2, dynamic loss scale", ("float32",))
def _(precision):
    task = models.gpt2_task(precision)

    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        scaled = state.scale.value_and_grad(lambda p: task.loss(state.apply_fn, p, batch, key))
        scale, is_finite, value, gradients = scaled(state.params)
        new = state.apply_gradients(grads=gradients)

        def kept(new, old):
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        new = new.replace(params=kept(new.params, state.params), opt_state=kept(new.opt_state, state.opt_state))
        return new.replace(scale=scale), {"loss": value, "scale": scale.scale}

    scale = DynamicScale(growth_interval=1, scale=jnp.float32(2.0**15))
    return Setting(train_step, keyed(task, ScaledState, scale=scale), task.make_batch)


@row("GPT-2, clipped AdamW with decay mask and warm-up")
def _(precision):
    task = models.gpt2_task(precision)

    def decayed(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)

    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, warmup_steps=2, decay_steps=8)
    adamw = optax.adamw(schedule, eps=1e-3, weight_decay=0.1, mask=decayed)
    return Setting(step_of(task.loss), keyed(task), task.make_batch, optax.chain(optax.clip_by_global_norm(0.5), adamw))


@row("GPT-2, LAMB")
def _(precision):
    task = models.gpt2_task(precision)
    return Setting(step_of(task.loss), keyed(task), task.make_batch, optax.lamb(1e-2, eps=1e-3))


# nnx.


def objects_of(task: ObjectTask, *others: Callable) -> Callable:
    """`make_objects(tx)`: the model, its optimizer and what `others` make."""

    def make(tx):
        model = task.make_model()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), *(other() for other in others)

    return make


def mutating(task: ObjectTask, optimizer=ADAM) -> Setting:
    def train_step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(task.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    return Setting(train_step, objects_of(task), task.make_batch, optimizer, objects=True)


@row("GPT-2 in nnx", WIDE)
def _(precision):
    return mutating(models.gpt2_nnx_task(precision))


@row("Llama in nnx")
def _(precision):
    return mutating(models.llama_nnx_task(precision), SGD)


class Mean(nnx.Metric):
    """A running mean in the type of its values; nnx's own keeps float32."""

    def __init__(self, dtype):
        self.total, self.count = (
            nnx.metrics.MetricState(jnp.zeros((), dtype)),
            nnx.metrics.MetricState(jnp.zeros((), int)),
        )

    def update(self, *, loss, **_):
        self.total[...] += loss
        self.count[...] += 1

    def compute(self):
        return self.total[...] / self.count[...]


@row("Llama in nnx, metrics object")
def _(precision):
    task = models.llama_nnx_task(precision)

    def train_step(model, optimizer, metrics, batch):
        loss, gradients = nnx.value_and_grad(task.loss)(model, batch)
        optimizer.update(model, gradients)
        metrics.update(loss=loss)
        return loss

    def make_metrics():
        return nnx.MultiMetric(loss=Mean(models.types(precision)["param_dtype"]))

    return Setting(train_step, objects_of(task, make_metrics), task.make_batch, objects=True)


class SplitState(TrainState):
    graphdef: Any = struct.field(pytree_node=False)
    rest: Any


@row("GPT-2 in nnx, split and merged")
def _(precision):
    task = models.gpt2_nnx_task(precision)

    def train_step(state, batch):
        def loss(params):
            model = nnx.merge(state.graphdef, params, state.rest)
            value = task.loss(model, batch)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, rest=rest), value

    def make_state(tx):
        graphdef, params, rest = nnx.split(task.make_model(), nnx.Param, ...)
        return SplitState.create(apply_fn=None, params=params, tx=tx, graphdef=graphdef, rest=rest)

    return Setting(train_step, make_state, task.make_batch)
