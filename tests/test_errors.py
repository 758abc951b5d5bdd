"""Every mistake that a user can make raises one clear error: its class, the place, the numbers and the change that fixes it."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

import merak_jax
from merak_jax import errors

ROWS, WIDTH, CLASSES = 8, 4, 3


class MLP(nn.Module):
    """A residual chain of equal layers and a head."""

    layers: int = 4

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = x + nn.tanh(nn.Dense(WIDTH, name=f"layer_{i}")(x))
        return nn.Dense(CLASSES, name="head")(x)


def make_state(model=None, tx=None):
    model = MLP() if model is None else model
    params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or optax.sgd(0.1))


def make_batch(rows=ROWS):
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(rows, WIDTH)).astype(np.float32), "y": random.integers(0, CLASSES, rows)}


def losses_per_row(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def step_with(loss):
    """A train step that differentiates `loss(state, params, batch)`."""

    def train_step(state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(state, p, batch))(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return train_step


train_step = step_with(lambda state, params, batch: losses_per_row(state, params, batch).mean())


def line_of(function, text):
    """The `file:line` of the only line of `function` that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + n for n, line in enumerate(lines) if text in line]
    return f"{__file__}:{number}"


def run(step, state=None, batch=None, *, num_microbatches=2, pipe=2, **options):
    """Run a step on a small mesh."""
    mesh = merak_jax.make_mesh(pipe=pipe, devices=jax.devices()[:pipe])
    parallel = merak_jax.parallelize(step, mesh=mesh, num_microbatches=num_microbatches, **options)
    return parallel(make_state() if state is None else state, make_batch() if batch is None else batch)


def messages(raised):
    return str(raised.value)


# The mesh.


def test_a_mesh_bigger_than_the_devices_names_both_numbers_and_the_fix():
    with pytest.raises(
        errors.MeshError, match=r"data=4 x pipe=2 x tensor=2 needs 16 devices, but there are 8"
    ) as raised:
        merak_jax.make_mesh(data=4, pipe=2, tensor=2)
    assert "merak_jax.emulate(16)" in messages(raised)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_a_mesh_size_that_is_no_positive_integer_is_named(size):
    with pytest.raises(errors.MeshError, match=r"pipe=.* must be a positive integer") as raised:
        merak_jax.make_mesh(pipe=size)
    assert f"pipe={size!r}" in messages(raised)


def test_unknown_axis_names_are_listed_with_the_right_ones():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    with pytest.raises(errors.MeshError, match=r"\['model'\] are unknown: use data, pipe and tensor"):
        merak_jax.parallelize(train_step, mesh=mesh)


def test_case_71_explicit_axes_are_refused_with_the_argument_to_pass():
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(errors.MeshError, match=r"Explicit.*axis_types=\(AxisType.Auto,\) \* n"):
        merak_jax.parallelize(train_step, mesh=mesh)


@pytest.mark.parametrize("mesh", [(2, 2), "2x2", {"data": 2}])
def test_a_mesh_of_another_type_is_refused(mesh):
    with pytest.raises(errors.MeshError, match=rf"make_mesh\), got {type(mesh).__name__}"):
        merak_jax.parallelize(train_step, mesh=mesh)


# Arguments of parallelize.


@pytest.mark.parametrize("number", [0, -1, 2.5, True, "4"])
def test_num_microbatches_must_be_a_positive_integer(number):
    with pytest.raises(errors.PlanError, match=r"num_microbatches=.* must be a positive integer") as raised:
        merak_jax.parallelize(train_step, num_microbatches=number)
    assert f"num_microbatches={number!r}" in messages(raised)


def test_an_unknown_schedule_is_answered_with_the_known_ones():
    with pytest.raises(errors.PlanError, match="schedule '1F1B' is unknown; known: 1f1b, .*gpipe"):
        merak_jax.parallelize(train_step, schedule="1F1B")


@pytest.mark.parametrize("option", [{"remat": "full"}, {"zero": 3}, {"offload": "params"}, {"hardware": "h100"}])
def test_an_option_that_is_not_supported_is_named(option):
    ((name, value),) = option.items()
    with pytest.raises(errors.PlanError, match=f"{name}={value!r} is not supported yet"):
        merak_jax.parallelize(train_step, **option)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="microbatches"):
        merak_jax.parallelize(train_step, microbatches=4)


@pytest.mark.parametrize("not_callable", ["train_step", 3, ("state", "metrics")])
def test_a_train_step_that_is_not_callable_is_refused(not_callable):
    with pytest.raises(errors.PlanError, match=rf"train_step must be callable, got {type(not_callable).__name__}"):
        merak_jax.parallelize(not_callable)


@pytest.mark.parametrize("plan", ["plan.json", {"data": 2}])
def test_a_plan_that_is_no_plan_is_answered_with_from_json(plan):
    with pytest.raises(errors.PlanError, match=rf"got {type(plan).__name__}; Plan.from_json"):
        merak_jax.parallelize(train_step, plan=plan)


def test_batch_argnums_beyond_the_arguments_is_named():
    with pytest.raises(
        errors.PlanError, match=r"got 2 arguments, but its batch is argument 2 \(batch_argnums=\(2,\)\)"
    ):
        run(train_step, batch_argnums=2)


@pytest.mark.parametrize("argnums", [-1, "batch", (), (1, -2), 1.0, (True,)])
def test_batch_argnums_that_are_no_positions_are_named(argnums):
    with pytest.raises(errors.PlanError, match=r"batch_argnums=.* must be the position of the batch"):
        run(train_step, batch_argnums=argnums)


def test_a_call_without_a_batch_says_how_many_arguments_came():
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(devices=jax.devices()[:1]))
    with pytest.raises(
        errors.PlanError, match=r"test_errors.py:\d+ \(train_step\) got 1 argument, but its batch is argument 1"
    ):
        step(make_state())


@pytest.mark.parametrize(
    "count, error", [(lambda rows: rows // 2, errors.NotSeparableError), (lambda rows: 8, errors.TraceError)]
)
def test_a_top_k_over_the_batch_is_said_to_couple_its_rows(count, error):
    def loss(state, params, batch):
        each = losses_per_row(state, params, batch)
        return jax.lax.top_k(each, count(each.shape[0]))[0].mean()

    with pytest.raises(error, match=r"test_errors.py:\d+ .*couples.*num_microbatches=1 on a mesh with data=1"):
        run(step_with(loss))


def test_reading_the_plan_before_a_batch_says_how_to_get_one():
    step = merak_jax.parallelize(train_step)
    with pytest.raises(errors.PlanError, match=r"no plan before.*step\.lower\(state, batch\)"):
        step.plan  # noqa: B018


def test_sharding_a_state_before_a_batch_says_how_to_do_it():
    with pytest.raises(errors.PlanError, match=r"step\.lower\(state, batch\) first"):
        merak_jax.parallelize(train_step).shard(make_state())


# The batch.


@pytest.mark.parametrize(
    "data, num_microbatches, rows, near",
    [(4, 1, 10, "8 or 12"), (1, 4, 6, "4 or 8"), (2, 8, 8, "16"), (2, 3, 20, "18 or 24"), (1, 2, 0, "2")],
)
def test_case_66_a_batch_that_does_not_divide_names_leaf_numbers_and_the_nearest_valid_batch(
    data, num_microbatches, rows, near
):
    step = merak_jax.parallelize(
        train_step, mesh=merak_jax.make_mesh(data=data, devices=jax.devices()[:data]), num_microbatches=num_microbatches
    )
    with pytest.raises(errors.BatchError) as raised:
        step(make_state(), make_batch(rows))
    for part in (
        "argument 1['x']",
        f"{rows} rows",
        f"data={data}",
        f"num_microbatches={num_microbatches}",
        f"use a batch of {near} rows",
    ):
        assert part in messages(raised)


def test_leaves_that_disagree_on_the_rows_are_listed_with_their_sizes():
    batch = make_batch() | {"weights": np.ones(6)}
    with pytest.raises(errors.BatchError, match="disagree.*batch_argnums") as raised:
        run(train_step, batch=batch)
    assert "['weights']: 6" in messages(raised)
    assert "['x']: 8" in messages(raised)


@pytest.mark.parametrize("batch", [{}, {"temperature": 1.0}])
def test_a_batch_without_rows_says_what_a_batch_is(batch):
    with pytest.raises(errors.BatchError, match=r"no array with a leading batch dimension"):
        run(train_step, batch=batch)


def test_case_67_a_later_batch_of_another_size_is_checked_too():
    step = merak_jax.parallelize(train_step, mesh=merak_jax.make_mesh(devices=jax.devices()[:1]), num_microbatches=4)
    step.lower(make_state(), make_batch(8))
    with pytest.raises(errors.BatchError, match=r"5 rows.*4 or 8 rows"):
        step(make_state(), make_batch(5))


def test_an_argument_with_as_many_rows_as_the_batch_is_named_with_the_option_that_makes_it_part_of_it():
    def step(state, images, labels):
        return train_step(state, {"x": images, "y": labels})

    batch, options = make_batch(), {"mesh": merak_jax.make_mesh(devices=jax.devices()[:1]), "num_microbatches": 2}
    with pytest.raises(errors.TraceError, match=r"argument `labels` has 8 rows too.*batch_argnums=\(1, 2\)"):
        merak_jax.parallelize(step, **options)(make_state(), batch["x"], batch["y"])
    parallel = merak_jax.parallelize(step, batch_argnums=(1, 2), **options)
    _, metrics = parallel(make_state(), batch["x"], batch["y"])
    np.testing.assert_allclose(metrics["loss"], jax.jit(train_step)(make_state(), batch)[1]["loss"], rtol=1e-6)


@pytest.mark.parametrize("leaf", [np.array(["a"] * ROWS), ["a"] * ROWS], ids=["array", "list"])
def test_text_in_the_batch_names_its_leaf(leaf):
    with pytest.raises(errors.TraceError, match=r"\['names'\].* is a .*, not an array of numbers or a number"):
        run(train_step, batch=make_batch() | {"names": leaf})


# The gradient call.


def step_with_two_gradients(state, batch):
    def loss(params, power):
        return (losses_per_row(state, params, batch) ** power).mean()

    first, grads = jax.value_and_grad(loss)(state.params, 1)
    more_grads = jax.grad(loss)(state.params, 2)
    return state.apply_gradients(grads=jax.tree.map(jnp.add, grads, more_grads)), first


def test_two_gradient_calls_name_both_source_lines():
    with pytest.raises(errors.GradientCallError, match="takes 2 gradients.*exactly one") as raised:
        run(step_with_two_gradients)
    assert line_of(step_with_two_gradients, "jax.value_and_grad(loss)") in messages(raised)
    assert line_of(step_with_two_gradients, "jax.grad(loss)") in messages(raised)


def step_with_its_own_accumulation(state, batch):
    def accumulate(total, rows):
        grads = jax.grad(lambda p: losses_per_row(state, p, rows).mean())(state.params)
        return jax.tree.map(jnp.add, total, grads), None

    microbatches = jax.tree.map(lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:]), batch)
    total, _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, state.params), microbatches)
    return state.apply_gradients(grads=total), 0.0


def test_a_gradient_inside_the_users_scan_names_the_loop_and_num_microbatches():
    with pytest.raises(errors.GradientCallError, match=r"inside a `scan`.*num_microbatches=") as raised:
        run(step_with_its_own_accumulation)
    assert line_of(step_with_its_own_accumulation, "jax.lax.scan") in messages(raised)


def test_a_step_without_a_gradient_call_says_so():
    def step(state, batch):
        decayed = jax.tree.map(lambda p: 0.9 * p, state.params)
        return state.replace(params=decayed), losses_per_row(state, state.params, batch).mean()

    with pytest.raises(errors.GradientCallError, match="takes no gradient"):
        run(step)


def test_a_gradient_whose_results_are_all_dropped_is_no_gradient_call():
    def step(state, batch):
        train_step(state, batch)
        return state, losses_per_row(state, state.params, batch).mean()

    with pytest.raises(errors.GradientCallError, match="does not reach what the step returns"):
        run(step)


def test_a_loss_per_row_is_refused_and_told_to_be_reduced():
    with pytest.raises(
        errors.GradientCallError, match=r"must return one scalar, but returns \(8,\); return its mean"
    ) as raised:
        run(step_with(losses_per_row))
    assert line_of(step_with, "jax.value_and_grad") in messages(raised)


def test_a_loss_with_aux_and_no_has_aux_is_told_about_has_aux():
    def loss(state, params, batch):
        losses = losses_per_row(state, params, batch)
        return losses.mean(), losses

    with pytest.raises(errors.GradientCallError, match="has_aux=True"):
        run(step_with(loss))


# The model.


def test_a_model_without_repeated_blocks_on_two_stages_names_the_way_out():
    class Funnel(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (7, 6, 5):
                x = nn.tanh(nn.Dense(width)(x))
            return nn.Dense(CLASSES)(x)

    with pytest.raises(errors.NoRepeatedBlocksError, match=r"pipe=2 needs a model with repeated blocks.*use pipe=1"):
        run(train_step, make_state(Funnel()))


def test_a_loss_that_does_not_read_the_batch_says_so():
    batch = make_batch()
    with pytest.raises(errors.MerakError, match="does not (read|depend on).*batch"):
        run(step_with(lambda state, params, _: losses_per_row(state, params, batch).mean()))


def test_a_loss_that_does_not_read_the_parameters_says_so():
    frozen = make_state().params
    with pytest.raises(errors.MerakError, match="does not (read|depend on).*parameters"):
        run(step_with(lambda state, params, batch: losses_per_row(state, frozen, batch).mean()))


# Losses that microbatches would change.


def log_of_mean(state, params, batch):
    return jnp.log(losses_per_row(state, params, batch).mean())  # here


def largest(state, params, batch):
    return jnp.max(losses_per_row(state, params, batch))  # here


def log_sum_exp(state, params, batch):
    return jax.nn.logsumexp(losses_per_row(state, params, batch))  # here


def info_nce(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["x"])
    similarity = logits @ logits.T  # here
    return optax.softmax_cross_entropy_with_integer_labels(similarity, jnp.arange(len(similarity))).mean()


def deviation(state, params, batch):
    return losses_per_row(state, params, batch).std()  # here


@pytest.mark.parametrize("loss", [log_of_mean, largest, log_sum_exp, info_nce, deviation])
@pytest.mark.parametrize("data, num_microbatches", [(1, 2), (2, 1)], ids=["microbatches", "data"])
def test_case_32_a_loss_that_is_no_sum_over_rows_names_the_users_line_and_the_ways_out(loss, data, num_microbatches):
    mesh = merak_jax.make_mesh(data=data, pipe=2, devices=jax.devices()[: 2 * data])
    step = merak_jax.parallelize(step_with(loss), mesh=mesh, num_microbatches=num_microbatches)
    with pytest.raises(errors.NotSeparableError, match="num_microbatches=1 on a mesh with data=1") as raised:
        step(make_state(), make_batch())
    assert line_of(loss, "# here") in messages(raised)


def test_case_20_batch_normalisation_names_a_line_of_the_users_model():
    class Normalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.tanh(nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x)))  # here
            return nn.Dense(CLASSES)(x)

    model = Normalised()
    variables = model.init(jax.random.key(0), jnp.zeros((2, WIDTH)))

    def step(state, batch):
        def loss(params):
            logits, changed = model.apply({"params": params, **state["rest"]}, batch["x"], mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), changed

        grads, changed = jax.grad(loss, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "rest": changed}, None

    state = {"params": variables["params"], "rest": {"batch_stats": variables["batch_stats"]}}
    with pytest.raises(errors.NotSeparableError) as raised:
        run(step, state)
    assert line_of(Normalised.__call__, "# here") in messages(raised)


def test_every_option_that_a_message_offers_exists():
    with pytest.raises(errors.NotSeparableError) as raised:
        run(step_with(log_of_mean))
    offered = [word.split("=")[0].strip("(),`") for word in messages(raised).split() if "=" in word]
    known = {*inspect.signature(merak_jax.parallelize).parameters, "data", "pipe", "tensor"}
    assert set(offered) <= known, f"{set(offered) - known} is offered, but parallelize doesn't take it"


def test_a_batch_size_written_into_the_loss_is_explained_by_the_microbatch():
    def loss(state, params, batch):
        logits = state.apply_fn({"params": params}, batch["x"]).reshape(ROWS, CLASSES)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    with pytest.raises(errors.MerakError, match=r"4 rows.*test_errors.py:\d+"):
        run(step_with(loss))


# The state.


def test_a_step_that_returns_only_metrics_is_told_to_return_the_state():
    with pytest.raises(errors.PlanError, match=r"does not return a new state.*return \(new_state, metrics\)"):
        run(lambda state, batch: train_step(state, batch)[1])


def test_a_step_that_returns_another_type_names_the_leaf():
    def step(state, batch):
        state, metrics = train_step(state, batch)
        half = jax.tree.map(lambda x: x.astype(jnp.float16), state.params)
        return state.replace(params=half), metrics

    with pytest.raises(errors.PlanError, match=r"does not return a new state.*\.params\['head'\]\['bias'\]"):
        run(step)


@pytest.fixture(scope="module")
def small_step():
    """A step that has seen a batch, with its state."""
    step = merak_jax.parallelize(
        train_step, mesh=merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2]), num_microbatches=2
    )
    state = make_state()
    step.lower(state, make_batch())
    return step, state


def test_a_state_with_another_structure_shows_both(small_step):
    step, state = small_step
    with pytest.raises(errors.StateError, match=r"another structure.*planned") as raised:
        step.shard({"params": state.params})
    assert "TrainState" in messages(raised)


def test_a_state_with_another_shape_names_the_leaf_and_both_shapes(small_step):
    step, state = small_step
    params = {**state.params, "head": {**state.params["head"], "bias": jnp.zeros(5)}}
    with pytest.raises(errors.StateError, match=r"\.params\['head'\]\['bias'\] has shape \(5,\), planned for \(3,\)"):
        step.shard(state.replace(params=params))


def test_the_sharded_state_is_read_only_and_says_how_to_change_it(small_step):
    step, state = small_step
    with pytest.raises(AttributeError, match=r"read-only; use step\.unshard\(state\), change 'step', and step\.shard"):
        step.shard(state).step = 3


def test_an_initialiser_of_another_state_is_refused(small_step):
    step, _ = small_step
    with pytest.raises(errors.StateError, match="initialiser makes another structure"):
        step.shard(step.init(lambda: {"weights": jnp.zeros(3)}))


# What the user's own code raises comes through.


def test_an_error_of_the_users_own_code_comes_through_untouched():
    with pytest.raises(KeyError, match="image"):
        run(step_with(lambda state, params, batch: losses_per_row(state, params, {"x": batch["image"]}).mean()))


def test_reading_a_value_while_tracing_is_jax_own_error():
    def step(state, batch):
        state, metrics = train_step(state, batch)
        return state, float(metrics["loss"])

    with pytest.raises(jax.errors.ConcretizationTypeError):
        run(step)


# pmap leftovers.


def test_case_108_a_pmean_left_from_pmap_is_told_to_go():
    def step(state, batch):
        value, grads = jax.value_and_grad(lambda p: losses_per_row(state, p, batch).mean())(state.params)
        return state.apply_gradients(grads=jax.lax.pmean(grads, "batch")), value

    with pytest.raises(errors.TraceError, match=r"pmean|psum|axis.*batch"):
        run(step)


def test_a_pmapped_step_is_refused():
    with pytest.raises(errors.MerakError, match="pmap"):
        run(jax.pmap(train_step, axis_name="batch"))


# The classes, and errors that need a process of their own.


def test_every_error_is_a_merak_error_and_the_built_in_class_that_fits():
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert len(classes) == 10
    for error in classes:
        assert issubclass(error, errors.MerakError)
        assert error.__doc__
    assert issubclass(errors.BatchError, ValueError)
    assert issubclass(errors.EmulationError, RuntimeError)
    assert issubclass(errors.GradientCallError, errors.TraceError)


LATE = """
import json, jax
assert len(jax.devices()) == 1
import merak_jax
found = {}
for name, call in {"emulate": lambda: merak_jax.emulate(8), "mesh": lambda: merak_jax.make_mesh(data=2, pipe=2, tensor=2)}.items():
    try:
        call()
    except merak_jax.errors.MerakError as error:
        found[name] = [type(error).__name__, str(error)]
merak_jax.emulate(1)
print(json.dumps(found))
"""


def test_case_65_emulate_after_the_backend_started_says_what_there_is_and_what_to_do():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", LATE],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
        env={**clean, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kind, text = found["emulate"]
    assert kind == "EmulationError"
    assert "1 cpu device" in text and "merak_jax.emulate(8) must come before" in text
    kind, text = found["mesh"]
    assert kind == "MeshError"
    assert "needs 8 devices, but there are 1" in text and "merak_jax.emulate(8) before the first use of JAX" in text


def test_leaves_of_a_sharded_state_may_be_mapped_to_anything_and_printed(small_step):
    step, state = small_step
    assert "sharded over mesh" in repr(jax.tree.map(lambda x: x.shape, step.shard(state)))


def test_jax_own_error_names_the_function_that_is_differentiated():
    def my_loss(state, params, batch):
        value = losses_per_row(state, params, batch).mean()
        return value if value > 0 else 2 * value

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"function <lambda> at .*test_errors.py:\d+"):
        run(step_with(my_loss))


def test_rows_picked_before_the_gradient_call_name_the_line():
    def train_step(state, batch):
        half = jax.tree.map(lambda x: x[: ROWS // 2], batch)
        grads = jax.grad(lambda p: losses_per_row(state, p, half).mean())(state.params)
        return state.apply_gradients(grads=grads), {}

    with pytest.raises(
        errors.NotSeparableError, match=r"at .*test_errors.py:\d+.*gradient call at .*test_errors.py:\d+"
    ):
        run(train_step, num_microbatches=4)


def test_swapped_arguments_name_the_step_and_the_argument_taken_as_the_batch():
    def train_step(batch, state):
        grads = jax.grad(lambda p: losses_per_row(state, p, batch).mean())(state.params)
        return state.apply_gradients(grads=grads), {}

    step = merak_jax.parallelize(
        train_step, mesh=merak_jax.make_mesh(data=2, devices=jax.devices()[:2]), num_microbatches=2
    )
    with pytest.raises(errors.BatchError, match=r"argument 1 of the train step at .*test_errors.py:\d+.*batch_argnums"):
        step(make_batch(), make_state())


def test_a_state_leaf_with_a_value_per_row_is_named():
    def train_step(state, batch):
        def loss(params):
            return (losses_per_row(state["train"], params, batch) + state["offset"]).mean()

        grads = jax.grad(loss)(state["train"].params)
        return {**state, "train": state["train"].apply_gradients(grads=grads)}

    with pytest.raises(errors.TraceError, match=r"argument 0\['offset'\] holds a value per row"):
        run(train_step, {"train": make_state(), "offset": jnp.ones(ROWS)})
