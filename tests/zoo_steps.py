"""The train steps of the parity table, as people write them: each a function from a task to all that its runs need."""

from __future__ import annotations

import dataclasses
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

from tests.zoo_models import ObjectTask, Task

ADAM = optax.adam(1e-2, eps=1e-3)
SGD = optax.sgd(0.3)


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


def recorded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` behind a transformation that keeps the raw gradients in its state."""
    return optax.chain(optax.trace(decay=0.0), optimizer)


class KeyedState(TrainState):
    key: jax.Array


def make_keyed(task: Task, state_class: type[TrainState] = KeyedState, **fields) -> Callable:
    """`make_state(tx)` with a key; `fields` are those that a subclass adds."""
    fields = {"params": task.params, "key": jax.random.key(5), **fields}
    return lambda tx: state_class.create(apply_fn=task.model.apply, tx=tx, **fields)


def step_of(loss: Callable) -> Callable:
    """The train step of `loss(apply, params, batch, key)`; the key of dropout depends on the number of the step."""

    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        value, gradients = jax.value_and_grad(lambda p: loss(state.apply_fn, p, batch, key))(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value}

    return train_step


def plain(task: Task, optimizer=ADAM) -> Setting:
    return Setting(step_of(task.loss), make_keyed(task), task.make_batch, optimizer)


def dictionary_state(task: Task) -> Setting:
    """A state that is a dictionary; a raw key is split in the step and goes back with it; metrics are a tuple."""
    tx = recorded(ADAM)

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


def weight_penalty(task: Task) -> Setting:
    """A term of the loss does not depend on the batch; parameters are a FrozenDict."""

    def loss(apply, params, batch, key):
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return task.loss(apply, params, batch, key) + 1e-2 * penalty

    return Setting(step_of(loss), make_keyed(task, params=FrozenDict(task.params)), task.make_batch, SGD)


class AveragedState(KeyedState):
    average: Any


def averaged(task: Task) -> Setting:
    """An exponential moving average of the parameters, kept in the state."""
    plain_step = step_of(task.loss)

    def train_step(state, batch):
        new, metrics = plain_step(state, batch)
        decay = jnp.minimum(0.9, (1 + new.step) / (10 + new.step)).astype(metrics["loss"].dtype)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, new.params)
        return new.replace(average=average), {**metrics, "decay": decay}

    return Setting(train_step, make_keyed(task, AveragedState, average=task.params), task.make_batch)


def frozen_embeddings(task: Task) -> Setting:
    """Embeddings stay as they are, by labels of the optimizer."""

    def labels(params):
        def label(path, _):
            return "frozen" if "embedding" in path[0].key else "trained"

        return jax.tree_util.tree_map_with_path(label, params)

    return plain(task, optax.multi_transform({"trained": ADAM, "frozen": optax.set_to_zero()}, labels))


class AdaptedState(KeyedState):
    base: Any


def adapters(task: Task) -> Setting:
    """Low-rank additions to a kernel of each block are trained, the model itself is not (Hu et al., "LoRA", 2021)."""
    blocks = [name for name in task.params if name.startswith("h_")]
    random, rank = np.random.default_rng(1), 2
    width, hidden = task.params["h_0"]["mlp"]["up"]["kernel"].shape

    def factor(*shape):
        return jnp.asarray(0.2 * random.standard_normal(shape), task.params["norm_f"]["scale"].dtype)

    params = {block: {"a": factor(width, rank), "b": factor(rank, hidden)} for block in blocks}

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

    return Setting(train_step, make_keyed(task, AdaptedState, params=params, base=task.params), task.make_batch)


def _logits(state, params, batch):
    key = jax.random.fold_in(state.key, state.step)
    return state.apply_fn({"params": params}, batch["tokens"], deterministic=False, rngs={"dropout": key})


def several_losses(task: Task) -> Setting:
    """Three means over the batch, each with its own mask or weights, of a language model."""

    def make_batch(n, rows):
        batch, random = task.make_batch(n, rows), np.random.default_rng(n + 70)
        answers = batch["mask"] * random.integers(0, 2, (rows, 1))
        return {**batch, "answers": answers, "weights": random.random(rows).astype(batch["mask"].dtype)}

    def train_step(state, batch):
        def loss(params):
            tokens = optax.softmax_cross_entropy_with_integer_labels(_logits(state, params, batch), batch["targets"])
            parts = {
                "all": jnp.sum(tokens * batch["mask"]) / jnp.sum(batch["mask"]),
                "answers": jnp.sum(tokens * batch["answers"]) / jnp.maximum(jnp.sum(batch["answers"]), 1),
                "weighted": jnp.average((tokens * batch["mask"]).sum(-1), weights=batch["weights"]),
            }
            return parts["all"] + 0.5 * parts["answers"] + 0.1 * parts["weighted"], parts

        (value, parts), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, **parts}

    return Setting(train_step, make_keyed(task), make_batch)


def outputs_of_rows(task: Task) -> Setting:
    """What each row got comes back, in the order of rows, with counts and a perplexity."""

    def train_step(state, batch):
        def loss(params):
            logits = _logits(state, params, batch)
            tokens = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]) * batch["mask"]
            value = tokens.sum() / batch["mask"].sum()
            predictions = logits.argmax(-1)
            return value, {
                "rows": tokens.sum(-1),
                "predictions": predictions,
                "right": ((predictions == batch["targets"]) * batch["mask"]).sum(),
                "perplexity": jnp.exp(value),
                "largest": logits.max(),
            }

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, "norm": optax.tree.norm(gradients), **aux}

    return Setting(train_step, make_keyed(task), task.make_batch)


class ScaledState(KeyedState):
    scale: DynamicScale


def dynamic_scale(task: Task) -> Setting:
    """The loss is scaled by flax's DynamicScale, which grows in every step; it casts gradients to float32."""

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
    return Setting(train_step, make_keyed(task, ScaledState, scale=scale), task.make_batch)


def clipped_adamw(task: Task) -> Setting:
    """Clipping by the global norm, warm-up and cosine decay, no weight decay on biases and norms."""

    def decayed(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)

    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, warmup_steps=2, decay_steps=8)
    adamw = optax.adamw(schedule, eps=1e-3, weight_decay=0.1, mask=decayed)
    return plain(task, optax.chain(optax.clip_by_global_norm(0.5), adamw))


def lamb(task: Task) -> Setting:
    """The step of each leaf is scaled by its norm; weight decay, or a leaf without gradient would take a step of pure noise."""
    return plain(task, optax.lamb(1e-2, eps=1e-3, weight_decay=0.01))


# nnx.


def objects_of(task: ObjectTask, *others: Callable) -> Callable:
    """`make_objects(tx)`: the model, its optimizer and what `others` make."""

    def make(tx):
        model = task.make_model()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), *(other() for other in others)

    return make


def mutating(task: ObjectTask, optimizer=ADAM) -> Setting:
    """nnx's own style: model and optimizer change in place."""

    def train_step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(task.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    return Setting(train_step, objects_of(task), task.make_batch, optimizer, objects=True)


class Mean(nnx.Metric):
    """A running mean in the type of its values; nnx's own keeps float32."""

    def __init__(self, dtype):
        self.total = nnx.metrics.MetricState(jnp.zeros((), dtype))
        self.count = nnx.metrics.MetricState(jnp.zeros((), int))

    def update(self, *, loss, **_):
        self.total[...] += loss
        self.count[...] += 1

    def compute(self):
        return self.total[...] / self.count[...]


def metrics_object(task: ObjectTask) -> Setting:
    """A third object collects metrics."""

    def train_step(model, optimizer, metrics, batch):
        loss, gradients = nnx.value_and_grad(task.loss)(model, batch)
        optimizer.update(model, gradients)
        metrics.update(loss=loss)
        return loss

    def make_metrics():
        return nnx.MultiMetric(loss=Mean(task.make_batch(0, 1)["mask"].dtype))

    return Setting(train_step, objects_of(task, make_metrics), task.make_batch, objects=True)


class SplitState(TrainState):
    graphdef: Any = struct.field(pytree_node=False)
    rest: Any


def split_and_merged(task: ObjectTask) -> Setting:
    """nnx in functional style: a TrainState of parameters and the rest; the counts of dropout come back as auxiliary output."""

    def train_step(state, batch):
        def loss(params):
            model = nnx.merge(state.graphdef, params, state.rest, copy=True)
            value = task.loss(model, batch)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, rest=rest), value

    def make_state(tx):
        graphdef, params, rest = nnx.split(task.make_model(), nnx.Param, ...)
        return SplitState.create(apply_fn=None, params=params, tx=tx, graphdef=graphdef, rest=rest)

    return Setting(train_step, make_state, task.make_batch)
