"""What a step brings along from elsewhere: axis names of pmap, its own accumulation, a jit around it, Python randomness."""

import functools
import inspect
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import merak_jax
from merak_jax import _compat, errors
from merak_jax.tracing.step import static_arguments
from tests.helper import assert_same_as_single_device, run_on_mesh, run_on_one_device, worst_leaf

ROWS, WIDTH = 8, 4
SGD = optax.sgd(0.1)


def apply(params, x):
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params["head"]


def make_state(tx=SGD):
    draw = np.random.default_rng(0).normal
    layers = [{"kernel": draw(size=(WIDTH, WIDTH)) / 2, "bias": draw(size=WIDTH)} for _ in range(4)]
    params = jax.tree.map(jnp.asarray, {"layers": layers, "head": draw(size=WIDTH)})
    return TrainState.create(apply_fn=apply, params=params, tx=tx)


def make_batch(n=0):
    draw = np.random.default_rng(n + 1).normal
    return {"x": draw(size=(ROWS, WIDTH)), "y": draw(size=ROWS)}


def squares(params, batch):
    """[B]."""
    return (apply(params, batch["x"]) - batch["y"]) ** 2


def mean_of_squares(params, batch):
    return squares(params, batch).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: squares(p, batch).mean())(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def pipelined():
    return merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2])


def plan(step, *rest):
    parallel = merak_jax.parallelize(step, mesh=pipelined(), num_microbatches=2)
    parallel.lower(make_state(), make_batch(), *rest)
    return parallel.plan


def line_of(function, text):
    """The `file:line` of the only line of `function` that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + n for n, line in enumerate(lines) if text in line]
    return f"{__file__}:{number}"


def assert_same(step, **options):
    assert_same_as_single_device(
        step, make_state, make_batch, pipelined(), optimizer=SGD, num_microbatches=2, **options
    )


# Axis names.


def step_with_averaged_gradients(state, batch):
    loss, grads = jax.value_and_grad(lambda p: squares(p, batch).mean())(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    return state.apply_gradients(grads=grads), loss


def step_with_averaged_loss(state, batch):
    def loss(params):
        return jax.lax.psum(squares(params, batch).mean(), "data")

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def step_with_a_key_per_device(state, batch):
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("batch"))
    loss, grads = jax.value_and_grad(lambda p: (squares(p, batch) * jax.random.uniform(key)).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (step_with_averaged_gradients, "jax.lax.pmean"),
        (step_with_averaged_loss, "jax.lax.psum"),
        (step_with_a_key_per_device, "jax.lax.axis_index"),
    ],
)
@pytest.mark.parametrize("wrapper", [lambda step: step, jax.jit], ids=["plain", "jit"])
def test_an_axis_name_left_from_pmap_names_the_line(step, text, wrapper):
    """An axis that the mesh of the parallel step happens to have is no exception: the step sees the whole batch."""
    with pytest.raises(errors.TraceError, match="mesh axis.*remove lax.pmean") as raised:
        plan(wrapper(step))
    assert line_of(step, text) in str(raised.value)


def test_the_line_where_an_exception_was_raised_is_the_users():
    def fails():
        jnp.zeros(2).reshape(3)

    try:
        fails()
    except TypeError as error:
        assert line_of(fails, "reshape") in _compat.failing_line(error)


# Accumulation.


def rows_of(batch, i):
    return jax.tree.map(lambda x: x[2 * i : 2 * i + 2], batch)


def accumulated_in_python(state, batch):
    total = jax.tree.map(jnp.zeros_like, state.params)
    for i in range(4):
        grads = jax.grad(mean_of_squares)(state.params, rows_of(batch, i))
        total = jax.tree.map(jnp.add, total, grads)
    return state.apply_gradients(grads=jax.tree.map(lambda g: g / 4, total)), None


def accumulated_by_scan(state, batch):
    def add(total, rows):
        grads = jax.grad(lambda p: squares(p, rows).mean())(state.params)
        return jax.tree.map(jnp.add, total, grads), None

    microbatches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), microbatches)
    return state.apply_gradients(grads=jax.tree.map(lambda g: g / 4, total)), None


def accumulated_by_fori_loop(state, batch):
    def add(i, total):
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, 2 * i, 2), batch)
        grads = jax.grad(lambda p: squares(p, rows).mean())(state.params)
        return jax.tree.map(jnp.add, total, grads)

    total = jax.lax.fori_loop(0, 4, add, jax.tree.map(jnp.zeros_like, state.params))
    return state.apply_gradients(grads=jax.tree.map(lambda g: g / 4, total)), None


def accumulated_by_vmap(state, batch):
    microbatches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    grads = jax.vmap(lambda rows: jax.grad(lambda p: squares(p, rows).mean())(state.params))(microbatches)
    return state.apply_gradients(grads=jax.tree.map(lambda g: g.mean(0), grads)), None


@pytest.mark.parametrize(
    ("step", "text", "what"),
    [
        (accumulated_in_python, "jax.grad", "takes 4 gradients.*num_microbatches="),
        (accumulated_by_scan, "jax.lax.scan", "inside a `scan`.*num_microbatches="),
        (accumulated_by_fori_loop, "jax.lax.fori_loop", "inside a `scan`.*num_microbatches="),
        (accumulated_by_vmap, "jax.grad", "under jax.vmap.*with the whole batch"),
    ],
)
def test_a_loop_over_microbatches_around_the_gradient_names_its_line_once(step, text, what):
    with pytest.raises(errors.GradientCallError, match=what) as raised:
        plan(step)
    assert str(raised.value).count(line_of(step, text)) == 1


def test_a_derivative_of_the_gradient_is_refused():
    def step(state, batch):
        gradient = jax.grad(lambda p: squares(p, batch).mean())
        _, product = jax.jvp(gradient, (state.params,), (state.params,))
        return state.apply_gradients(grads=product), None

    with pytest.raises(errors.GradientCallError, match="jax.jvp"):
        plan(step)


@pytest.mark.parametrize("kind", ["map", "python"])
def test_a_loop_over_microbatches_inside_the_loss_is_refused(kind):
    def loss(params, batch):
        if kind == "python":
            return sum(squares(params, rows_of(batch, i)).mean() for i in range(4)) / 4
        microbatches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        return jax.lax.map(lambda rows: squares(params, rows).mean(), microbatches).mean()

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    with pytest.raises(errors.MerakError, match=__file__):
        plan(step)


def test_accumulation_over_steps_by_optax_has_the_numbers_of_one_device():
    assert_same_as_single_device(
        train_step,
        make_state,
        make_batch,
        pipelined(),
        optimizer=optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
        num_microbatches=2,
    )


# A jit around the step.


def powers_step(state, batch, power=2):
    loss, grads = jax.value_and_grad(lambda p: (squares(p, batch) ** power).mean())(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@pytest.mark.parametrize(
    "step",
    [
        jax.jit(train_step, donate_argnums=(0, 1)),
        jax.jit(jax.jit(powers_step), donate_argnames="state"),
        jax.jit(powers_step, static_argnames="power"),
        functools.partial(jax.jit(powers_step, static_argnums=2), power=1),
        nnx.jit(powers_step, static_argnums=2, donate_argnums=0),
    ],
    ids=["donated", "twice", "static default", "static bound", "nnx"],
)
def test_a_jitted_step_has_the_numbers_of_one_device(step):
    def plain(state, batch):
        # A step that donates what it is given gets a copy of it.
        return step(*jax.tree.map(jnp.array, (state, batch)))

    expected = plain(make_state(), make_batch())
    parallel = merak_jax.parallelize(step, mesh=pipelined(), num_microbatches=2)
    state, metrics = parallel(make_state(), make_batch())
    assert worst_leaf(parallel.unshard(state), jax.device_get(expected[0]))[0] <= 1e-12
    assert worst_leaf(jax.device_get(metrics), jax.device_get(expected[1]))[0] <= 1e-12


@pytest.mark.parametrize(
    "step", [jax.jit(powers_step, static_argnames="power"), jax.jit(nnx.jit(powers_step, static_argnums=2))]
)
def test_a_static_argument_is_told_to_be_bound_first(step):
    for pass_it in (lambda parallel, *args: parallel(*args, 3), lambda parallel, *args: parallel(*args, power=3)):
        parallel = merak_jax.parallelize(step, mesh=pipelined(), num_microbatches=2)
        with pytest.raises(errors.PlanError, match=r"argument 2 .*static.*functools\.partial"):
            pass_it(parallel, make_state(), make_batch())


def test_static_arguments_of_all_jits_around_a_step_are_found():
    def step(a, b, c, d):
        return a

    assert static_arguments(step) == _compat.static_arguments(step) == ()
    assert _compat.static_arguments(jax.jit(step, static_argnames="c")) == (2,)
    assert _compat.static_arguments(nnx.jit(step, static_argnums=3)) == (3,)
    assert static_arguments(jax.jit(jax.jit(step, static_argnums=(1, 3)), static_argnames="c")) == (1, 2, 3)


# Python randomness while the step is traced.


@pytest.mark.parametrize("kind", ["number", "features", "rows", "order of rows", "seed"])
def test_what_python_draws_while_tracing_is_one_draw_for_the_whole_step(kind):
    """As under `jax.jit`: the numbers of the first trace, whatever the other trace drew."""
    drawn = []

    def step_that_draws(next_draw):
        def step(state, batch):
            def loss(params):
                value, x = next_draw(len(batch["x"])), batch["x"]
                if kind == "order of rows":
                    return squares(params, {"x": x[value], "y": batch["y"]}).mean()
                if kind == "seed":
                    value = jax.random.uniform(jax.random.key(value), x.shape)
                return squares(params, {"x": x * value, "y": batch["y"]}).mean()

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), {"loss": value}

        return step

    def draw(rows):
        rng = np.random.default_rng(len(drawn))
        draws = {
            "number": rng.random(),
            "features": rng.random(WIDTH),
            "rows": rng.random((rows, 1)),
            "order of rows": rng.permutation(rows),
            "seed": rng.integers(10**6),
        }
        drawn.append(draws[kind])
        return drawn[-1]

    actual = run_on_mesh(step_that_draws(draw), make_state, make_batch, pipelined(), SGD, steps=1, num_microbatches=2)
    assert len(drawn) == 2
    expected, metrics = jax.jit(step_that_draws(lambda rows: drawn[0]))(make_state(), make_batch())
    assert worst_leaf(actual.metrics[0], jax.device_get(metrics))[0] <= 1e-12
    assert worst_leaf(actual.state.params, jax.device_get(expected.params))[0] <= 1e-12


@pytest.mark.parametrize("drop", ["layer", "term"])
def test_a_program_that_python_randomness_changes_is_explained(drop):
    """Stochastic depth by Python's own random numbers: two traces, two programs."""
    random.seed(3)
    first, second = (random.random() < 0.5 for _ in range(2))
    assert first != second
    random.seed(3)

    def step(state, batch):
        keep = random.random() < 0.5

        def loss(params):
            if drop == "layer" and not keep:
                params = {**params, "layers": params["layers"][:-1]}
            return squares(params, batch).mean() + (jnp.sin(params["head"]).sum() if drop == "term" and keep else 0.0)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    with pytest.raises(errors.NotSeparableError, match=r"two different programs.*Python or numpy random.*jax\.random"):
        plan(step)


def test_placement_in_the_step_is_left_out_with_a_warning():
    own = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("own",))
    split = jax.sharding.NamedSharding(own, jax.sharding.PartitionSpec("own"))

    def step(state, batch):
        @jax.checkpoint
        def block(layer, x):
            return jax.device_put(x + jnp.tanh(x @ layer["kernel"] + layer["bias"]), jax.devices()[0])

        def loss(params):
            x = jax.lax.with_sharding_constraint(batch["x"], split)
            for layer in params["layers"]:
                x = block(layer, x)
            return ((jax.device_put(x) @ params["head"] - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    expected = run_on_one_device(train_step, make_state, make_batch, SGD)
    with pytest.warns(UserWarning, match=r"left out of the parallel step") as caught:
        assert_same(step, expected=expected)
    messages = [str(w.message) for w in caught]
    for text, name in (("with_sharding_constraint", "with_sharding_constraint"), ("jnp.tanh", "device_put")):
        assert any(line_of(step, text) in m and f"`{name}`" in m for m in messages), messages


def test_a_mask_drawn_before_the_loss_is_cut_into_rows():
    key = jax.random.key(3)

    def step(state, batch):
        drawn = jax.random.bernoulli(jax.random.fold_in(key, state.step), 0.5, batch["y"].shape)

        def loss(params):
            return (squares(params, batch) * drawn).sum() / drawn.sum()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value, "drawn": drawn}

    assert_same(step)


@pytest.mark.parametrize("around", [jax.jit, lambda f: lambda *a: jax.eval_shape(f, *a)], ids=["jit", "eval_shape"])
def test_the_parallel_step_under_a_transformation_is_refused(around):
    parallel = merak_jax.parallelize(train_step, mesh=pipelined(), num_microbatches=2)
    with pytest.raises(errors.TraceError, match="called under jax.jit or another transformation; call it directly"):
        around(parallel)(make_state(), make_batch())


def test_a_step_that_returns_no_state_is_named_with_what_it_returns():
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: squares(p, batch).mean())(state.params)
        return state.apply_gradients(grads=grads).params, loss

    with pytest.raises(errors.PlanError, match=r"it returns \(dict, float64\[\]\); return \(new_state") as raised:
        plan(step)
    assert line_of(step, "def step") in str(raised.value)
