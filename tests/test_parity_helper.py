"""The comparison itself: it sees a leaf that is dropped, doubled or of another type, and no noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helper import BARS, Differences, raw_gradients, worst_leaf
from tests.parity import make_batch, make_model, state_maker, train_step


@pytest.fixture(scope="module")
def gradients():
    make_state = state_maker(make_model())
    state, _ = jax.jit(train_step)(make_state(optax.sgd(1.0, momentum=0.0)), make_batch(0))
    return jax.device_get(raw_gradients(state))


@pytest.mark.parametrize("factor", [0.0, 2.0, 0.5, -1.0, 1 + 1e-8])
def test_every_leaf_that_is_not_zero_by_structure_is_seen_when_it_is_rescaled(gradients, factor):
    leaves, tree = jax.tree.flatten(gradients)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(gradients)[0]]
    for n, name in enumerate(names):
        if "['key']['bias']" in name:
            continue
        worst, leaf = worst_leaf(
            jax.tree.unflatten(tree, [*leaves[:n], factor * leaves[n], *leaves[n + 1 :]]), gradients
        )
        assert worst > BARS["float64"][0] and leaf == name


def test_a_gradient_that_is_zero_by_structure_may_be_any_noise(gradients):
    noisy = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            -leaf if path[-2:] == jax.tree_util.tree_flatten_with_path({"key": {"bias": 0}})[0][0][0] else leaf
        ),
        gradients,
    )
    worst, leaf = worst_leaf(noisy, gradients)
    assert 0 < worst < BARS["float64"][0] and "['key']['bias']" in leaf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_over_every_bar(bad):
    worst = worst_leaf({"a": np.array([1.0, bad])}, {"a": np.array([1.0, 2.0])})
    assert worst == (np.inf, "['a']")
    assert Differences(worst, (0.0, ""), (0.0, "")).over("bfloat16")


@pytest.mark.parametrize(
    "other",
    [{"a": jnp.ones(2, jnp.float32)}, {"a": jnp.ones(3)}, {"b": jnp.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}],
    ids=str,
)
def test_another_type_shape_or_structure_fails(other):
    with pytest.raises(AssertionError):
        worst_leaf(other, {"a": jnp.ones(2)})


def test_integers_must_be_equal():
    with pytest.raises(AssertionError):
        worst_leaf({"step": np.int32(3)}, {"step": np.int32(4)})
