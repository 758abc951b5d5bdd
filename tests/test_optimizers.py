"""Every optimizer of optax goes through the re-rolled update with the numbers of one device, its whole state included.

Compiling costs most here, so several optimizers share one step, a committee: the gradient is taken at the parameters of the
first member, and every member updates parameters of its own with it; all but the first have some leaves of each layer only
(of every rank, and split over `tensor` in different dimensions). All members are compared after the first step and after
the last, at the bar of one step and of a few.

Rounding noise of one device has to stay noise for that. The loss therefore has a small penalty on every weight. Without it
the bias of the keys (softmax does not see it), positions beyond the sequence, and tokens that the batch lacks have gradients
that are zero by the structure of the model, so that on one device too they are nothing but rounding; the sign of such a
gradient (lion, signum, rprop) and its quotient by its own size (adam with its usual eps, adafactor, adagrad) would be chance.
With the penalty they are the weight itself, times a constant, and every optimizer is compared with its usual constants.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from optax import contrib

import merak_jax
from merak_jax.models.gpt2 import next_token_loss
from merak_jax.runtime.reroll import RerollWarning
from tests.helper import BARS, assert_same_as_single_device, differences, run_on_mesh, run_on_one_device, worst_leaf
from tests.parity import make_batch, make_model, mesh_of, state_maker, train_step

STEPS = 4
PENALTY = 0.05
ONE_STEP, TRAINED = BARS["float64"]
SGD = optax.sgd(0.1)


def by_path(function: Callable[[tuple[str, ...]], Any]) -> Callable[[Any], Any]:
    """A tree of `function(names on the path)`, as masks and labels are made."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: function(tuple(k.key for k in path)), params)


def is_kernel(names):
    return names[-1] in ("kernel", "embedding")


def layer_of(names):
    """The number of the layer that a parameter is in; -1 outside of all."""
    return int(names[0].removeprefix("h_")) if names[0].startswith("h_") else -1


def is_adapter(names):
    """What low-rank adapters usually sit on: the kernels of query and value."""
    return names[-2:] in (("query", "kernel"), ("value", "kernel"))


def layerwise(optimizer: Callable[[float], optax.GradientTransformation], depth: int):
    """A rate of its own for every layer, falling towards the first one."""
    labels = by_path(lambda names: f"rate_{layer_of(names)}")
    return optax.partition({f"rate_{k}": optimizer(0.1 * 0.5 ** (depth - k)) for k in range(-1, depth)}, labels)


@dataclasses.dataclass(frozen=True)
class Committee:
    """Optimizers that share one step. `needs_value`: those whose update gets the loss as well."""

    members: Mapping[str, Any]
    mesh: tuple[int, int, int] = (1, 2, 1)
    depth: int = 3
    layers: str = "unrolled"
    needs_value: tuple[str, ...] = ()
    warns: bool = False
    not_finite_at: int | None = None


COMMITTEES = {
    "moments": Committee(
        {
            "adam": optax.adam(1e-2),
            "amsgrad with a schedule": optax.amsgrad(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 8)),
            "lion": optax.lion(1e-2),
            "radam": optax.radam(1e-2),
            "nadam": optax.nadamw(1e-2),
            "adabelief": optax.adabelief(1e-2),
            "adagrad": optax.adagrad(1e-2),
            "adadelta": optax.adadelta(10.0),
            "adamax": optax.adamax(1e-2),
            "adan": optax.adan(1e-2),
            "rmsprop": optax.rmsprop(1e-2, momentum=0.5, centered=True, nesterov=True),
            "rprop": optax.rprop(1e-2),
            "sm3": optax.sm3(1e-2),
            "yogi": optax.yogi(1e-2),
            "adopt": contrib.adopt(1e-2),
            "ademamix": contrib.ademamix(1e-2),
        }
    ),
    "norms": Committee(
        {
            "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4, weight_decay_rate=1e-3, momentum=0.5),
            "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
            "lamb": optax.lamb(1e-2, weight_decay=0.1, mask=by_path(is_kernel)),
            "lars": optax.lars(1.0, weight_decay=0.1, weight_decay_mask=by_path(is_kernel)),
            "fromage": optax.fromage(1e-2),
            "muon": contrib.muon(1e-2),
            "clip by global norm": optax.chain(optax.clip_by_global_norm(0.1), SGD),
            "clip by block rms": optax.chain(optax.clip_by_block_rms(0.02), SGD),
            "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), SGD),
            "parameter norms": optax.chain(optax.scale_by_param_block_norm(), optax.scale_by_param_block_rms(), SGD),
            "update norm": optax.chain(optax.normalize_by_update_norm(), SGD),
            "centralize": optax.chain(optax.centralize(), SGD),
            "distance over gradients": contrib.dog(1.0, init_step=("distance", 0.1)),
        },
        mesh=(2, 2, 2),
        depth=4,
    ),
    "wrappers": Committee(
        {
            "schedule-free adamw": contrib.schedule_free_adamw(1e-2, warmup_steps=2),
            "schedule-free sgd": contrib.schedule_free_sgd(0.1),
            "prodigy": contrib.prodigy(0.1, estim_lr0=0.1),
            "dadapt adamw": contrib.dadapt_adamw(0.1, estim_lr0=0.1),
            "polyak sgd": optax.polyak_sgd(0.1),
            "momo": contrib.momo_adam(0.1),
            "reduce on plateau": optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, rtol=0.5)),
            "lookahead": optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5),
            "sharpness aware": contrib.sam(SGD, optax.chain(contrib.normalize(), optax.sgd(0.05))),
            "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(
                optax.linear_schedule(1e-2, 1e-3, 3), weight_decay=0.1
            ),
            "moving average of updates": optax.chain(optax.ema(0.9), SGD),
            "zero nans": optax.chain(optax.zero_nans(), SGD),
            "nonnegative parameters": optax.chain(SGD, optax.keep_params_nonnegative()),
            "gradient noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), SGD),
            "every second step": optax.chain(optax.apply_every(2), SGD),
        },
        needs_value=("polyak sgd", "momo", "reduce on plateau"),
    ),
    "by path": Committee(
        {
            "multi_transform": optax.multi_transform(
                {"kernels": optax.adamw(1e-2, weight_decay=0.1), "others": optax.lion(1e-2)},
                by_path(lambda names: "kernels" if is_kernel(names) else "others"),
            ),
            "adapters": optax.partition(
                {"adapters": optax.adam(1e-2), "frozen": optax.set_to_zero()},
                by_path(lambda names: "adapters" if is_adapter(names) else "frozen"),
            ),
            "masked": optax.chain(
                optax.masked(optax.scale_by_adam(), by_path(is_adapter)),
                optax.masked(optax.add_decayed_weights(0.1), by_path(is_kernel)),
                SGD,
            ),
            "a rate per layer": layerwise(optax.sgd, 4),
        },
        mesh=(2, 2, 2),
        depth=4,
    ),
    "not re-rolled": Committee(
        {
            "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
            "apply_if_finite": optax.apply_if_finite(optax.lion(1e-2), 2),
            "novograd": optax.novograd(1e-2),
            "mechanize": contrib.mechanize(optax.adam(1e-2), s_init=0.1),
            "l-bfgs": optax.lbfgs(0.1, memory_size=2, linesearch=None),
            "galore": contrib.galore(1e-2, rank=2, update_proj_gap=2),
            "rates and moments per layer": layerwise(lambda rate: optax.adam(0.1 * rate), 3),
            "decay in two layers": optax.adamw(
                1e-2, weight_decay=0.3, mask=by_path(lambda names: is_kernel(names) and layer_of(names) in (1, 2))
            ),
        },
        warns=True,
    ),
    "scanned": Committee(
        {
            "lamb": optax.lamb(1e-2, weight_decay=0.1),
            "lion": optax.lion(1e-2),
            "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=3),
            "novograd": optax.novograd(1e-2),
            "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), SGD),
            "clip by block rms": optax.chain(optax.clip_by_block_rms(0.02), SGD),
            "gradient noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), SGD),
            "sm3": optax.sm3(1e-2),
            "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
            "schedule-free adamw": contrib.schedule_free_adamw(1e-2),
        },
        layers="scanned",
        warns=True,
    ),
    "a step that is not finite": Committee(
        {
            "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 2),
            "zero nans": optax.chain(optax.zero_nans(), optax.adam(1e-2)),
            "MultiSteps that skips": optax.MultiSteps(optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite),
        },
        warns=True,
        not_finite_at=1,
    ),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """States and metrics of every step of a committee, and the warnings of the parallel step by the number of the step."""

    states: list[Any]
    metrics: list[Any]
    warnings: list[tuple[int, str]]


LEAVES = ("norm_1/scale", "query/kernel", "output/kernel", "up/bias", "down/kernel")


def some_leaves(params):
    """Of each layer only `LEAVES`, and everything outside of the layers."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({k: v for k, v in flat.items() if k[:1] != "h" or k.endswith(LEAVES)}, sep="/")


def committee_step(committee: Committee):
    """`(train_step, first state)`; the state is `{member: {"params": ..., "opt": its state}}` and the latest gradients."""
    model = make_model(committee.depth, committee.layers)
    params = state_maker(model)(SGD).params
    transforms = {
        name: tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
        for name, tx in committee.members.items()
    }
    leader = next(iter(transforms))

    def committee_train_step(state, batch):
        def loss(params):
            logits = model.apply({"params": params}, batch["tokens"])
            penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
            return next_token_loss(logits, batch["targets"], batch["mask"]) + PENALTY * penalty

        value, gradients = jax.value_and_grad(loss)(state["members"][leader]["params"])
        members = {}
        for name, tx in transforms.items():
            own, given = state["members"][name], gradients if name == leader else some_leaves(gradients)
            extra = {"value": value} if name in committee.needs_value else {}
            updates, opt = optax.with_extra_args_support(tx).update(given, own["opt"], own["params"], **extra)
            members[name] = {"params": optax.apply_updates(own["params"], updates), "opt": opt}
        return {"gradients": gradients, "members": members}, {"loss": value}

    members = {}
    for name, tx in transforms.items():
        own = params if name == leader else some_leaves(params)
        own = optax.LookaheadParams.init_synced(own) if name == "lookahead" else own
        members[name] = {"params": own, "opt": tx.init(own)}
    return committee_train_step, jax.tree.map(jnp.asarray, {"gradients": params, "members": members})


def batches(committee: Committee, n: int):
    """The batch of step n; an infinite weight on one token makes the loss and every gradient of a step NaN."""
    batch = make_batch(n, rows=8)
    if n == committee.not_finite_at:
        batch["mask"][3, 0] = np.inf
    return batch


def run(committee: Committee, step, unshard, state) -> Result:
    states, metrics, found = [], [], []
    for n in range(STEPS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, reported = step(state, batches(committee, n))
        found += [(n, str(w.message)) for w in caught if issubclass(w.category, RerollWarning)]
        states.append(jax.device_get(unshard(state)))
        metrics.append(jax.device_get(reported))
    return Result(states, metrics, found)


@functools.cache
def runs(name: str) -> tuple[Result, Result]:
    """`(on the mesh, on one device)`."""
    committee = COMMITTEES[name]
    step, state = committee_step(committee)
    expected = run(committee, jax.jit(step), lambda state: state, state)
    step = merak_jax.parallelize(step, mesh=mesh_of(*committee.mesh), num_microbatches=2)
    return run(committee, step, step.unshard, state), expected


def assert_close(actual, expected, bar):
    worst, leaf = worst_leaf(actual, expected)
    assert worst <= bar, f"{leaf} differs by {worst:.2e}, allowed {bar:.0e}"


@pytest.mark.parametrize("committee", COMMITTEES)
def test_losses_and_gradients_are_those_of_one_device(committee):
    actual, expected = runs(committee)
    assert_close(actual.states[0]["gradients"], expected.states[0]["gradients"], ONE_STEP)
    assert_close(actual.states[-1]["gradients"], expected.states[-1]["gradients"], TRAINED)
    for n, (a, e) in enumerate(zip(actual.metrics, expected.metrics, strict=True)):
        np.testing.assert_allclose(a["loss"], e["loss"], rtol=TRAINED if n else ONE_STEP)
        assert np.isfinite(e["loss"]) == (n != COMMITTEES[committee].not_finite_at)


@pytest.mark.parametrize(
    "committee, name", [(committee, name) for committee, c in COMMITTEES.items() for name in c.members]
)
def test_an_optimizer_trains_as_on_one_device(committee, name):
    actual, expected = ([s["members"][name] for s in result.states] for result in runs(committee))
    assert_close(actual[0], expected[0], ONE_STEP)
    assert_close(actual[-1], expected[-1], TRAINED)
    moved = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), expected[-1]["params"], expected[0]["params"])
    assert max(jax.tree.leaves(moved)) > 1e-3, "the optimizer does nothing, so that nothing was compared"


@pytest.mark.parametrize("committee", COMMITTEES)
def test_only_what_is_not_re_rolled_warns_and_only_in_the_first_step(committee):
    found = runs(committee)[0].warnings
    assert len(found) == COMMITTEES[committee].warns, found
    for n, message in found:
        assert n == 0
        assert "state leaf ['members']['" in message and "['h" in message, message


# Steps that do more with the state than to apply an update.


class ScaledState(TrainState):
    """A state for half precision: the scale of the loss, and a moving average of the parameters."""

    dynamic_scale: DynamicScale
    average: Any


def scaled_step(state, batch):
    """The step of flax's guide: a step with a gradient that is not finite changes nothing but the scale of the loss."""

    def loss(params):
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["targets"], batch["mask"])

    scale, is_finite, value, gradients = state.dynamic_scale.value_and_grad(loss)(state.params)
    new = state.apply_gradients(grads=gradients)
    params, opt_state = jax.tree.map(
        functools.partial(jnp.where, is_finite), (new.params, new.opt_state), (state.params, state.opt_state)
    )
    average = optax.incremental_update(params, state.average, 0.1)
    metrics = {"is_finite": is_finite, "scale": scale.scale, "loss": jnp.where(is_finite, value, 0.0)}
    return new.replace(params=params, opt_state=opt_state, dynamic_scale=scale, average=average), metrics


@pytest.mark.parametrize("layers, mesh", [("unrolled", (2, 2, 2)), ("scanned", (1, 2, 1))], ids=["unrolled", "scanned"])
def test_a_dynamic_scale_and_a_moving_average_of_the_parameters_are_those_of_one_device(layers, mesh):
    """A loss that is not finite in step 1; the scale grows after two finite steps."""
    fields = {"dynamic_scale": DynamicScale(growth_interval=2, scale=np.float32(2.0**10)), "average": None}
    make_scaled = state_maker(make_model(3, layers), ScaledState, **fields)

    def make_state(tx):
        state = make_scaled(tx)
        return state.replace(average=jax.tree.map(jnp.copy, state.params))

    def make_batches(n):
        return batches(COMMITTEES["a step that is not finite"], n)

    setting = dict(make_state=make_state, make_batch=make_batches, optimizer=optax.adam(1e-2, eps=1e-3), steps=5)
    expected = run_on_one_device(scaled_step, **setting)
    actual = run_on_mesh(scaled_step, mesh=mesh_of(*mesh), num_microbatches=2, **setting)
    assert [bool(m["is_finite"]) for m in expected.metrics] == [True, False, True, True, True]
    assert len({float(m["scale"]) for m in expected.metrics}) > 1
    assert not differences(actual, expected).over("float64")


def test_a_warning_names_the_leaf_that_is_not_re_rolled_and_does_not_come_again():
    """Layers of which one has no momentum: its gradient is used as it is, those of the others are not."""

    def label(names):
        return "plain" if layer_of(names) == 1 and names[-2:] == ("up", "kernel") else "momentum"

    optimizer = optax.partition({"plain": SGD, "momentum": optax.sgd(0.1, momentum=0.9)}, by_path(label))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_as_single_device(
            train_step,
            state_maker(make_model(2)),
            functools.partial(make_batch, rows=4),
            mesh_of(1, 2, 1),
            optimizer=optimizer,
            num_microbatches=2,
        )
    (message,) = [str(w.message) for w in caught if issubclass(w.category, RerollWarning)]
    assert "float64[16,64]" in message and "['mlp']['up']['kernel']" in message, message
