"""The re-rolled update gives the numbers of the update as written, with a number of equations that depth does not change."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.reroll import Rerolled, RerollWarning
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import constants_to_inputs, evaluate

W = 3
# Blocks per stage: full, and padded in two ways.
LAYOUTS = {"full": (2, 2), "padded": (2, 1), "empty stage": (2, 2, 0)}


class Case:
    """A function of a tree `{block_0, block_1, ..., other}`, flat and re-rolled over its blocks."""

    def __init__(self, function, blocks, *rest, counts=(2, 2)):
        """Arguments that are lists hold one tree per block, all others are whole."""
        self.layout = LaneLayout(counts)
        assert len(blocks) == self.layout.num_lanes
        self.args = ([*blocks], *rest)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*self.args)
        self.out_tree = jax.tree.structure(shapes)
        self.jaxpr, self.constants = constants_to_inputs(inline(closed))
        self.inputs = [*self.constants, *map(jnp.asarray, jax.tree.leaves(self.args))]
        skipped = len(self.constants)
        numbers = iter(range(skipped, len(self.inputs)))
        tree = jax.tree.map(lambda _: next(numbers), self.args)
        self.groups = []
        for part in tree:
            if isinstance(part, list):
                self.groups += [
                    tuple(self.jaxpr.invars[n] for n in leaves)
                    for leaves in zip(*(jax.tree.leaves(block) for block in part))
                ]
        self.program = Rerolled(self.jaxpr, dict.fromkeys(self.groups, self.layout), {})

    def packed_inputs(self):
        """The inputs of the re-rolled program: a packed array for each group, and the other values."""
        by_var = dict(zip(self.jaxpr.invars, self.inputs))
        packed = [self.layout.pack([by_var.pop(v) for v in group]) for group in self.groups]
        self.others = list(by_var)
        return packed, list(by_var.values())

    def rerolled(self, packed, others):
        """All outputs; lists of one tree per block are computed packed."""
        evaluation = self.program.start(packed, [], dict(zip(self.others, others)))
        outputs = jax.tree.unflatten(self.out_tree, self.jaxpr.outvars)
        return [self._part(evaluation, part) for part in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def _part(self, evaluation, part):
        if not isinstance(part, list):
            return jax.tree.map(evaluation.whole, part)
        groups = zip(*(jax.tree.leaves(block) for block in part))
        return [evaluation.packed(group, self.layout) for group in groups]

    def check(self, rtol=1e-13, warns=False):
        """The re-rolled values, compiled, are those of the program as written."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = jax.jit(self.rerolled)(*self.packed_inputs())
        assert any(issubclass(w.category, RerollWarning) for w in caught) == warns, [str(w.message) for w in caught]
        expected = jax.tree.unflatten(self.out_tree, evaluate(self.jaxpr, [], *self.inputs))
        for a, e in zip(actual, expected if isinstance(expected, tuple) else (expected,), strict=True):
            if isinstance(e, list):
                e = [np.stack(leaves) for leaves in zip(*(jax.tree.leaves(block) for block in e))]
                a = [self.layout.unpack_stack(x) for x in a]
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(e), strict=True):
                assert np.shape(x) == np.shape(y)
                np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-15)
        return self

    def count(self):
        """Equations of the re-rolled program, with those inside nested calls."""
        return len(inline(jax.make_jaxpr(self.rerolled)(*self.packed_inputs())).jaxpr.eqns)


def blocks(count, seed=0):
    random = np.random.default_rng(seed)
    return [{"bias": random.normal(size=W), "kernel": random.normal(size=(W, W))} for _ in range(count)]


def other(seed=1):
    return {"embed": np.random.default_rng(seed).normal(size=(5, W))}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw with a mask by path": lambda: optax.adamw(1e-2, weight_decay=0.3, mask=only_kernels),
    "clip and adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "lion": lambda: optax.lion(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.5),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)),
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "lamb": lambda: optax.lamb(1e-2),
    "norm per leaf": lambda: optax.chain(optax.clip_by_block_rms(0.3), optax.sgd(0.1)),
    "adabelief": lambda: optax.adabelief(1e-2),
}


def only_kernels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", None) == "kernel", params)


def update_case(optimizer, counts=(2, 2)):
    """One optimizer update on blocks and other leaves; moments are per block as the parameters are."""
    length = sum(counts)
    params = {"blocks": blocks(length), "other": other()}
    state, tree = jax.tree.flatten(optimizer.init(jax.tree.map(jnp.asarray, params)))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree.unflatten(state))[0]]
    block_of = [block_number(path) for path in paths]

    def moments_of(k):
        random = np.random.default_rng(k)
        return [np.abs(random.normal(size=np.shape(x))) for x, at in zip(state, block_of) if at == k]

    def split(leaves):
        return (
            [[x for x, at in zip(leaves, block_of) if at == k] for k in range(length)],
            tuple(x for x, at in zip(leaves, block_of) if at is None),
        )

    def update(params_blocks, grad_blocks, moments, params_other, grad_other, rest):
        feeds = {None: iter(rest), **{k: iter(block) for k, block in enumerate(moments)}}
        params = {"blocks": params_blocks, "other": params_other}
        updates, new_state = optimizer.update(
            {"blocks": grad_blocks, "other": grad_other}, tree.unflatten([next(feeds[at]) for at in block_of]), params
        )
        new = optax.apply_updates(params, updates)
        new_moments, new_rest = split(jax.tree.leaves(new_state))
        return new["blocks"], new["other"], new_moments, new_rest

    return Case(
        update,
        params["blocks"],
        blocks(length, 5),
        [moments_of(k) for k in range(length)],
        params["other"],
        other(6),
        split(state)[1],
        counts=counts,
    )


def block_number(path):
    """The number after the key "blocks" in a path, if it is there."""
    names = [getattr(key, "key", None) for key in path]
    return path[names.index("blocks") + 1].idx if "blocks" in names else None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gives_the_same_numbers_with_padding(name):
    update_case(OPTIMIZERS[name](), counts=(2, 1)).check(rtol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_same_number_of_equations_for_every_depth(name):
    shallow, deep = (update_case(OPTIMIZERS[name](), counts=(n, n)).count() for n in (2, 6))
    assert shallow == deep


CHAINS = [
    optax.clip_by_global_norm(0.3),
    optax.scale_by_adam(),
    optax.trace(0.9),
    optax.add_decayed_weights(0.1),
    optax.clip(0.2),
    optax.scale_by_rms(),
    optax.scale(-0.1),
    optax.normalize_by_update_norm(),
    optax.clip_by_block_rms(0.5),
    optax.scale_by_trust_ratio(),
    optax.zero_nans(),
    optax.scale_by_sign(),
]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, len(CHAINS) - 1), min_size=1, max_size=3, unique=True), st.sampled_from(sorted(LAYOUTS)))
def test_random_chains_of_optax_give_the_same_numbers(numbers, layout):
    update_case(optax.chain(*(CHAINS[n] for n in numbers)), counts=LAYOUTS[layout]).check(rtol=1e-11)


# Sums over blocks.


FOLDS = {
    "sum": lambda values: sum(values),
    "sum from the right": lambda values: values[0] + (values[1] + values[2]),
    "product": lambda values: values[0] * values[1] * values[2],
    "largest": lambda values: jnp.maximum(jnp.maximum(values[0], values[1]), values[2]),
    "smallest": lambda values: jnp.minimum(jnp.minimum(values[0], values[1]), values[2]),
    "all finite": lambda values: jnp.isfinite(values[0]) & jnp.isfinite(values[1]) & jnp.isfinite(values[2]),
    "any above": lambda values: (values[0] > 9) | (values[1] > 9) | (values[2] > 9),
}


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_fold_over_blocks_ignores_the_padding(name, sign):
    def function(layers):
        return FOLDS[name]([jnp.sum(sign * jnp.abs(block["kernel"])) for block in layers]), None

    Case(function, blocks(3), counts=(2, 1)).check()


def test_a_fold_that_uses_a_value_twice_or_returns_a_partial_sum_is_right():
    def function(layers):
        a, b, c = (jnp.sum(block["bias"]) for block in layers)
        part = a + b
        return part + c, part * 2, (a + a) + (b + c)

    Case(function, blocks(3), counts=(2, 1)).check()


def test_a_fold_with_terms_that_are_no_blocks_adds_them():
    def function(layers, rest):
        total = jnp.sum(rest["embed"])
        for block in layers:
            total = total + jnp.sum(block["kernel"] ** 2)
        return total + 3.0, None

    Case(function, blocks(3), other(), counts=(2, 1)).check()


@pytest.mark.parametrize("first", ["blocks", "other"])
def test_the_global_norm_has_the_same_number_of_equations_wherever_the_blocks_stand_in_the_tree(first):
    def count(length):
        def function(layers, rest):
            trees = [layers, rest] if first == "blocks" else [rest, layers]
            return optax.tree.norm(trees), None

        return Case(function, blocks(length), other(), counts=(length // 2,) * 2).check(rtol=1e-12).count()

    assert count(4) == count(12)


# Values that differ per block.


def test_numbers_that_differ_per_block_become_data():
    def function(layers):
        return [{"kernel": block["kernel"] * (0.5 ** (len(layers) - k))} for k, block in enumerate(layers)], None

    assert Case(function, blocks(4)).check().count() == Case(function, blocks(8), counts=(4, 4)).check().count()


def test_a_value_made_of_another_block_is_not_mixed_up():
    def function(layers):
        return [
            {"kernel": block["kernel"] + layers[(k + 1) % len(layers)]["bias"]} for k, block in enumerate(layers)
        ], None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        case = Case(function, blocks(3), counts=(2, 1))
        (packed,), _ = jax.jit(case.rerolled)(*case.packed_inputs())
    expected, _ = function([jax.tree.map(jnp.asarray, b) for b in blocks(3)])
    np.testing.assert_allclose(case.layout.unpack_stack(packed), np.stack([b["kernel"] for b in expected]), rtol=1e-14)


def test_a_block_that_is_treated_differently_runs_block_by_block_with_one_warning():
    def function(layers):
        return [
            {"kernel": jnp.sin(b["kernel"]) if k == 1 else jnp.cos(b["kernel"])} for k, b in enumerate(layers)
        ], None

    Case(function, blocks(3), counts=(2, 1)).check(warns=True)


def test_a_block_that_is_returned_unchanged_is_its_input():
    def function(layers):
        return layers, layers[1]["kernel"]

    case = Case(function, blocks(3), counts=(2, 1)).check()
    assert case.count() <= 5


def test_an_output_that_is_the_same_for_all_blocks_is_spread():
    def function(layers, rest):
        return [{"mean": jnp.mean(rest["embed"]), "zero": 0.0} for _ in layers], None

    Case(function, blocks(3), other(), counts=(2, 1)).check()


def test_random_keys_split_per_block_draw_what_the_single_device_draws():
    def function(layers, key):
        noise = [jax.random.normal(jax.random.fold_in(key, k), (W,)) for k in range(len(layers))]
        return [{"noise": n + b["bias"]} for n, b in zip(noise, layers)], None

    Case(function, blocks(3), jax.random.key(0), counts=(2, 1)).check()


@pytest.mark.parametrize("depth", [3000])
def test_a_value_behind_thousands_of_equations_is_reached(depth):
    def function(layers):
        x = layers[0]["bias"]
        for _ in range(depth):
            x = jnp.sin(x)
        return x.sum(), None

    case = Case(function, blocks(2), counts=(1, 1))
    result = jax.make_jaxpr(case.rerolled)(*case.packed_inputs())
    assert len(result.jaxpr.eqns) >= depth


# Stacks [L, ...].


def stack_case(function, counts):
    layout = LaneLayout(counts)
    stack = np.random.default_rng(0).normal(size=(layout.num_lanes, W, W)) - 3
    closed = inline(jax.make_jaxpr(function)(stack))
    jaxpr, constants = constants_to_inputs(closed)
    assert not constants
    program = Rerolled(jaxpr, {}, dict.fromkeys(jaxpr.invars, layout))

    def run(stack):
        evaluation = program.start([], [layout.pack_stack(stack)], {})
        return [
            layout.unpack_stack(evaluation.packed_stack(a, layout))
            if a.aval.shape[:1] == stack.shape[:1]
            else evaluation.whole(a)
            for a in jaxpr.outvars
        ]

    for actual, expected in zip(jax.jit(run)(stack), jax.tree.leaves(function(stack)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-13)
    return run, stack


STACK_FUNCTIONS = {
    "elementwise": lambda x: 0.1 * jnp.exp(x) + x * x - 1,
    "sum": lambda x: jnp.sum(x**2),
    "largest": lambda x: jnp.max(x),
    "smallest": lambda x: jnp.min(-x),
    "product": lambda x: jnp.prod(jnp.abs(x) / 3),
    "all": lambda x: jnp.all(x < 0),
    "any": lambda x: jnp.any(x > 0),
    "norm per block": lambda x: x / jnp.sqrt(jnp.sum(x**2, axis=(1, 2), keepdims=True)),
    "clip by the global norm": lambda x: x * jnp.minimum(1.0, 1 / jnp.sqrt(jnp.sum(x**2))),
    "sum over blocks": lambda x: jnp.sum(x, axis=0),
    "mean over an inner axis": lambda x: x.mean(axis=2),
    "select": lambda x: jnp.where(x > -3, x, 0.0),
    "transposed": lambda x: jnp.swapaxes(x, 1, 2) + 1,
    "reversed": lambda x: x[::-1] * 2,
    "running sum": lambda x: jnp.cumsum(x, axis=0),
}


@pytest.mark.parametrize("name", STACK_FUNCTIONS)
@pytest.mark.parametrize("counts", [(2, 2), (2, 1)], ids=["full", "padded"])
def test_a_stack_gives_the_same_numbers(name, counts):
    stack_case(STACK_FUNCTIONS[name], counts)


# Following values back to the inputs.


def test_lane_leaves_are_found_through_equal_work_and_not_through_different_work():
    def function(layers):
        same = [jnp.tanh(b["kernel"].T) * 2 for b in layers]
        different = [jnp.sin(b["bias"]) if k else jnp.cos(b["bias"]) for k, b in enumerate(layers)]
        return [{"same": s, "different": d} for s, d in zip(same, different)], None

    case = Case(function, blocks(3), counts=(2, 1))
    outputs, _ = jax.tree.unflatten(case.out_tree, case.jaxpr.outvars)
    found = lane_leaves(case.jaxpr, [tuple(b[name] for b in outputs) for name in ("same", "different")])
    kernels = case.groups[1]
    assert found == [kernels]


def test_lane_leaves_of_one_shared_value_are_none():
    def function(layers, rest):
        return [{"x": rest["embed"] * 2} for _ in layers], None

    case = Case(function, blocks(3), other(), counts=(2, 1))
    outputs, _ = jax.tree.unflatten(case.out_tree, case.jaxpr.outvars)
    assert lane_leaves(case.jaxpr, [tuple(b["x"] for b in outputs)]) in ([], [(case.jaxpr.invars[-1],)])
