"""Random chains of optax on random trees of layers: the re-rolled update gives the numbers of the update as written."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.tree_util import SequenceKey, keystr, tree_flatten_with_path

from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.reroll import Rerolled, RerollWarning
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import constants_to_inputs, evaluate

EXAMPLES, STACKED_EXAMPLES = 25, 12
# Blocks per stage of a chain of layers: full, padded, with a stage that has none, and three layers on one stage.
COUNTS = [(2, 2), (2, 1), (1, 2), (2, 1, 0), (3,)]
SHAPES = [(), (3,), (2, 3), (2, 1, 3)]
NAMES = ["bias", "kernel", "scale"]
always_the_same = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)


# The tree.


@dataclasses.dataclass(frozen=True)
class Tree:
    """`{chain: [a tree per layer], "other": ...}`: the counts of each chain, and the shape of each name in it.

    `odd_one`: the first layer has one leaf of another shape, so that this leaf is no leaf of each layer.
    `poison`: a value that is not finite, put into one gradient, or None.
    """

    chains: dict[str, tuple[int, ...]]
    shapes: dict[str, dict[str, tuple[int, ...]]]
    odd_one: bool
    poison: float | None
    seed: int

    def values(self, seed: int):
        random = np.random.default_rng(self.seed + seed)
        tree: dict[str, Any] = {
            chain: [
                {name: random.normal(size=shape) for name, shape in self.shapes[chain].items()}
                for _ in range(sum(counts))
            ]
            for chain, counts in self.chains.items()
        }
        if self.odd_one:
            tree["first"][0]["kernel"] = random.normal(size=(4, 2))
        tree["other"] = {"embed": random.normal(size=(5, 3)), "bias": random.normal(size=3)}
        return tree

    @property
    def layouts(self) -> dict[str, LaneLayout]:
        return {chain: LaneLayout(counts) for chain, counts in self.chains.items()}


@st.composite
def trees(draw):
    names = draw(st.sampled_from([["first"], ["first", "second"]]))
    shapes = {
        chain: {
            name: draw(st.sampled_from(SHAPES))
            for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
        }
        for chain in names
    }
    return Tree(
        chains={chain: draw(st.sampled_from(COUNTS)) for chain in names},
        shapes=shapes,
        odd_one=draw(st.booleans()) and draw(st.booleans()),
        poison=draw(st.sampled_from([None, None, None, np.nan, np.inf])),
        seed=draw(st.integers(0, 10)),
    )


# The optimizer.


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which leaves a transformation is for: those with some names, some layers, or all but one leaf."""

    kind: str
    chosen: Any

    @property
    def is_even(self) -> bool:
        """Whether all layers of a chain are treated alike."""
        return self.kind == "names"

    def __call__(self, params):
        def includes(path, _):
            if self.kind == "names":
                return path[-1].key in self.chosen
            layer = path[1].idx if isinstance(path[1], SequenceKey) else -1
            if self.kind == "layers":
                return layer in self.chosen
            return (path[0].key, layer, path[-1].key) != self.chosen

        return jax.tree_util.tree_map_with_path(includes, params)


masks = st.one_of(
    st.builds(Mask, st.just("names"), st.sets(st.sampled_from([*NAMES, "embed"])).map(frozenset)),
    st.builds(Mask, st.just("layers"), st.sets(st.integers(-1, 3)).map(frozenset)),
    st.builds(Mask, st.just("all but one"), st.tuples(st.just("first"), st.integers(0, 2), st.sampled_from(NAMES))),
)

PLAIN = {
    "clip by global norm": lambda: optax.clip_by_global_norm(0.3),
    "clip": lambda: optax.clip(0.2),
    "clip by block rms": lambda: optax.clip_by_block_rms(0.5),
    "adaptive clip": lambda: optax.adaptive_grad_clip(0.1),
    "adam": lambda: optax.scale_by_adam(),
    "nadam": lambda: optax.scale_by_adam(b1=0.5, nesterov=True),
    "amsgrad": lambda: optax.scale_by_amsgrad(),
    "lion": lambda: optax.scale_by_lion(),
    "rms": lambda: optax.scale_by_rms(),
    "belief": lambda: optax.scale_by_belief(),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "trace": lambda: optax.trace(0.9),
    "nesterov": lambda: optax.trace(0.9, nesterov=True),
    "ema": lambda: optax.ema(0.9),
    "decay": lambda: optax.add_decayed_weights(0.1),
    "schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 3)),
    "scale": lambda: optax.scale(-0.1),
    "noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(3)),
    "trust ratio": lambda: optax.scale_by_trust_ratio(),
    "update norm": lambda: optax.normalize_by_update_norm(),
    "parameter norm": lambda: optax.scale_by_param_block_norm(),
    "centralize": lambda: optax.centralize(),
    "zero nans": lambda: optax.zero_nans(),
    "every second": lambda: optax.apply_every(2),
    "sm3": lambda: optax.scale_by_sm3(),
    "injected": lambda: optax.inject_hyperparams(optax.scale)(optax.linear_schedule(1.0, 0.1, 3)),
}


@dataclasses.dataclass(frozen=True)
class Link:
    """One transformation of a chain. `how`: for all leaves, `masked`, or `partition`ed from plain momentum."""

    name: str
    how: str
    mask: Mask | None

    @property
    def is_even(self) -> bool:
        return self.mask is None or self.mask.is_even

    def make(self) -> optax.GradientTransformation:
        inner = PLAIN[self.name]()
        if self.mask is None:
            return inner
        if self.how == "masked":
            return optax.masked(inner, self.mask)
        return optax.partition(
            {"inside": inner, "outside": optax.trace(0.5)},
            lambda params: jax.tree.map(lambda m: "inside" if m else "outside", self.mask(params)),
        )


links = st.one_of(
    st.builds(Link, st.sampled_from(sorted(PLAIN)), st.just("all"), st.none()),
    st.builds(Link, st.sampled_from(sorted(PLAIN)), st.sampled_from(["masked", "partition"]), masks),
)


# The two ways to compute an update.


def step(optimizer):
    """A step on one dictionary: parameters, gradients, optimizer state, and counters of the positive gradients."""

    def function(state):
        updates, opt = optimizer.update(state["grads"], state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        counters = jax.tree.map(
            lambda count, g: count + jnp.sum(g > 0, dtype=jnp.int32), state["counters"], state["grads"]
        )
        return {"params": params, "opt": opt, "counters": counters, "norm": optax.tree.norm(updates)}

    return function


def start(tree: Tree, optimizer):
    """A state in the middle of training: moments are those of two updates."""
    params = jax.tree.map(jnp.asarray, tree.values(0))
    opt = optimizer.init(params)
    for n in (1, 2):
        _, opt = optimizer.update(jax.tree.map(jnp.asarray, tree.values(n)), opt, params)
    grads = tree.values(3)
    if tree.poison is not None:
        name = sorted(grads["first"][-1])[0]
        grads["first"][-1][name] = np.full_like(grads["first"][-1][name], tree.poison)
    counters = jax.tree.map(lambda p: jnp.int32(p.size), params)
    return {"params": params, "grads": jax.tree.map(jnp.asarray, grads), "opt": opt, "counters": counters}


def group_by_layer(tree: Any, leaves, layouts: dict[str, LaneLayout]):
    """`(groups of one leaf per layer with their layouts, all other leaves)`: leaves whose paths differ in the layer alone."""
    by_path: dict[tuple, dict[int, Any]] = {}
    others = []
    for (path, _), leaf in zip(tree_flatten_with_path(tree)[0], leaves, strict=True):
        names = [getattr(key, "key", None) for key in path]
        at = next((i for i, name in enumerate(names) if name in layouts), None)
        if at is None:
            others.append(leaf)
        else:
            rest = (keystr(path[: at + 1]), keystr(path[at + 2 :]))
            by_path.setdefault((names[at], rest), {})[path[at + 1].idx] = leaf
    groups = {}
    for (chain, _), members in by_path.items():
        values = [members[k] for k in sorted(members)]
        alike = len({(v.aval.shape, v.aval.dtype) for v in values}) == 1
        if alike and len(values) == layouts[chain].num_lanes and len(set(values)) == len(values):
            groups[tuple(values)] = layouts[chain]
        else:
            others += values
    return groups, others


def polluted(packed, layout: LaneLayout):
    """`packed` with padding that shows wherever it is used."""
    if layout.is_full:
        return packed
    garbage = np.nan if jnp.issubdtype(packed.dtype, jnp.inexact) else 113
    return jnp.where(layout.mask(packed.ndim), packed, jnp.asarray(garbage, packed.dtype))


def compare(tree: Tree, optimizer) -> bool:
    """Both ways, operation by operation; returns whether the re-rolled one warned."""
    state, layouts = start(tree, optimizer), tree.layouts
    closed, out = jax.make_jaxpr(step(optimizer), return_shape=True)(state)
    jaxpr, constants = constants_to_inputs(inline(closed))
    inputs = dict(zip(jaxpr.invars, [*constants, *jax.tree.leaves(state)], strict=True))
    groups, _ = group_by_layer(state, jaxpr.invars[len(constants) :], layouts)
    packed = [polluted(layout.pack([inputs[v] for v in group]), layout) for group, layout in groups.items()]
    grouped = {v for group in groups for v in group}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = Rerolled(jaxpr, groups, {}).start(packed, [], {v: x for v, x in inputs.items() if v not in grouped})
        out_groups, out_others = group_by_layer(out, jaxpr.outvars, layouts)
        results = {v: program.whole(v) for v in out_others}
        for group, layout in out_groups.items():
            values = program.packed(group, layout)
            results.update((v, layout.unpack(values, k)) for k, v in enumerate(group))
    expected = evaluate(jaxpr, [], *inputs.values())
    for (path, _), var, value in zip(tree_flatten_with_path(out)[0], jaxpr.outvars, expected, strict=True):
        assert_same(results[var], value, keystr(path))
    found = [w for w in caught if issubclass(w.category, RerollWarning)]
    assert len(found) <= 1
    return bool(found)


def assert_same(actual, expected, path):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), path
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    if jnp.issubdtype(expected.dtype, jnp.inexact):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-15, err_msg=path)
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=path)


@settings(always_the_same, max_examples=EXAMPLES)
@given(trees(), st.lists(links, min_size=1, max_size=4))
def test_a_random_chain_gives_the_same_numbers_and_warns_only_when_layers_are_treated_differently(tree, chain):
    warned = compare(tree, optax.chain(*(link.make() for link in chain)))
    if all(link.is_even for link in chain) and not tree.odd_one:
        assert not warned


# Scanned layers: one leaf [L, ...] for all of them.


def stacked(tree: Any, layouts: dict[str, LaneLayout]):
    """The lists of layers as one tree of stacks `[L, ...]`."""
    return {k: jax.tree.map(lambda *x: jnp.stack(x), *v) if k in layouts else v for k, v in tree.items()}


def stacks_of(tree: Any, leaves, layouts: dict[str, LaneLayout]) -> dict[Any, LaneLayout]:
    """The leaves that are stacks, by their paths."""
    found = {}
    for (path, _), leaf in zip(tree_flatten_with_path(tree)[0], leaves, strict=True):
        chain = next((key.key for key in path if getattr(key, "key", None) in layouts), None)
        if chain is not None and leaf.aval.shape[:1] == (layouts[chain].num_lanes,):
            found[leaf] = layouts[chain]
    return found


def compare_stacked(tree: Tree, optimizer) -> bool:
    """As `compare`, for scanned layers."""
    layouts = tree.layouts
    values = [stacked(jax.tree.map(jnp.asarray, tree.values(n)), layouts) for n in range(3)]
    opt = optimizer.update(values[1], optimizer.init(values[0]), values[0])[1]
    counters = jax.tree.map(lambda p: jnp.int32(p.size), values[0])
    state = {"params": values[0], "grads": values[2], "opt": opt, "counters": counters}
    closed, out = jax.make_jaxpr(step(optimizer), return_shape=True)(state)
    jaxpr, constants = constants_to_inputs(inline(closed))
    inputs = dict(zip(jaxpr.invars, [*constants, *jax.tree.leaves(state)], strict=True))
    stacks = stacks_of(state, jaxpr.invars[len(constants) :], layouts)
    packed = [polluted(layout.pack_stack(inputs[v]), layout) for v, layout in stacks.items()]
    out_stacks = stacks_of(out, jaxpr.outvars, layouts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = Rerolled(jaxpr, {}, stacks).start([], packed, {v: x for v, x in inputs.items() if v not in stacks})
        results = [
            out_stacks[v].unpack_stack(program.packed_stack(v, out_stacks[v])) if v in out_stacks else program.whole(v)
            for v in jaxpr.outvars
        ]
    expected = evaluate(jaxpr, [], *inputs.values())
    for (path, _), actual, value in zip(tree_flatten_with_path(out)[0], results, expected, strict=True):
        assert_same(actual, value, keystr(path))
    return any(issubclass(w.category, RerollWarning) for w in caught)


SCANNED = Tree({"first": (2, 1)}, {"first": {"kernel": (2, 3), "bias": (3,), "scale": ()}}, False, None, 0)


@settings(always_the_same, max_examples=STACKED_EXAMPLES)
@given(trees(), st.lists(links.filter(lambda link: link.is_even), min_size=1, max_size=4))
def test_a_random_chain_gives_the_same_numbers_on_scanned_layers(tree, chain):
    tree = dataclasses.replace(tree, odd_one=False, poison=None)
    compare_stacked(tree, optax.chain(*(link.make() for link in chain)))


@pytest.mark.parametrize(
    "optimizer", [optax.lamb(0.1), optax.lars(0.1), optax.adamw(0.1)], ids=["lamb", "lars", "adamw"]
)
def test_norms_of_scanned_layers_are_computed_on_their_stages(optimizer):
    assert not compare_stacked(SCANNED, optimizer)


def test_work_across_scanned_layers_is_computed_whole_with_a_warning():
    assert compare_stacked(SCANNED, optax.chain(optax.centralize(), optax.scale(-0.1)))
