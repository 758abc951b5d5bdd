"""The choice of the classes to split is the best there is, and what the user gives comes first."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.partition.candidates import Candidates, choose, residual_stream
from merak_jax.partition.dimensions import CARRY, PARAMETER
from merak_jax.partition.follow import follow_dimensions
from merak_jax.partition.tensor import tensor_layout
from tests.partition.tensor_blocks import (
    ATTENTION,
    BATCH,
    COLUMN,
    HIDDEN,
    MLP,
    ROW,
    SEQUENCE,
    Attention,
    Block,
    GatedMlp,
    Mlp,
    layout_of,
    layout_of_linen,
)


def candidates_of(block, parameters, ways=2):
    leaves, tree = jax.tree.flatten(parameters)
    x = jnp.zeros((BATCH, SEQUENCE, HIDDEN))
    jaxpr = jax.make_jaxpr(lambda x, *p: block(tree.unflatten(p), x))(x, *leaves)
    found = follow_dimensions(jaxpr, [CARRY] + [PARAMETER] * len(leaves))
    stream = residual_stream(found, found.inputs[:1])
    return Candidates(found, stream, found.inputs[1:], ways)


def check_optimal(candidates, given=()):
    """The choice has the largest gain of all sets without conflicts."""
    possible = [c for c in candidates.order if c not in candidates.why_not]
    best = max(
        candidates.gain(chosen)
        for count in range(len(possible) + 1)
        for chosen in itertools.combinations(possible, count)
        if set(given) <= set(chosen)
        and not any(b in candidates.conflicts[a] for a, b in itertools.combinations(chosen, 2))
    )
    chosen = choose(candidates, given)
    assert set(given) <= chosen <= set(possible)
    assert not any(b in candidates.conflicts[a] for a, b in itertools.combinations(chosen, 2))
    assert candidates.gain(chosen) == best
    return possible


def random_block(seed):
    """A block of random projections, gates, sums and residual branches, with the parameters it reads."""
    random = np.random.default_rng(seed)
    sizes = [int(n) for n in random.choice([4, 8, 12, 32], 4)]
    shapes, program = {}, []
    widths = [HIDDEN]
    for n in range(int(random.integers(3, 9))):
        source = int(random.integers(len(widths)))
        size = int(random.choice(sizes))
        same = [i for i, w in enumerate(widths) if w == widths[source] and i != source]
        if same and random.random() < 0.4:
            program.append((str(random.choice(["add", "gate"])), source, int(random.choice(same))))
            widths.append(widths[source])
        else:
            shapes[f"w{n}"] = (widths[source], size)
            program.append((f"w{n}", source, None))
            widths.append(size)
    for i, width in enumerate(widths[1:], start=1):
        if random.random() < 0.4 or i == len(widths) - 1:
            shapes[f"out{i}"] = (width, HIDDEN)

    def block(p, x):
        values = [x]
        for operation, source, other in program:
            if operation == "add":
                values.append(jnp.tanh(values[source] + values[other]))
            elif operation == "gate":
                values.append(values[source] * values[other])
            else:
                values.append(jnp.tanh(values[source] @ p[operation]))
        return x + sum(values[int(n[3:])] @ p[n] for n in shapes if n.startswith("out"))

    return block, {n: jnp.zeros(s) for n, s in shapes.items()}


def test_branch_and_bound_finds_the_optimum_of_random_blocks():
    rivals = 0
    for seed in range(60):
        candidates = candidates_of(*random_block(seed))
        possible = check_optimal(candidates)
        rivals += any(candidates.conflicts[c] & set(possible) for c in possible)
        for given in possible:
            check_optimal(candidates, [given])
    assert rivals > 30


def test_a_sum_that_another_split_causes_anyhow_costs_nothing_more():
    # "up" and "down" are two rivals of equal flops and bytes; splitting "up" sums the gradient of x.
    shapes = {"down": (32, HIDDEN), "middle": (32, 32), "up": (HIDDEN, 32)}
    beside = {"wide": (HIDDEN, 64), "narrow": (64, HIDDEN)}

    def block(p, x):
        y = x + jnp.tanh(jnp.tanh(x @ p["up"]) @ p["middle"]) @ p["down"]
        return y + jnp.tanh(x @ p["wide"]) @ p["narrow"] if "wide" in p else y

    alone, both = ({n: jnp.zeros(s) for n, s in given.items()} for given in (shapes, {**shapes, **beside}))
    assert layout_of(block, alone)[1] == {"down": 0, "middle": 1, "up": -1}
    assert layout_of(block, both)[1] == {"down": -1, "middle": 0, "up": 1, "wide": 1, "narrow": 0}
    check_optimal(candidates_of(block, both))


def test_flops_come_before_bytes():
    def block(p, x):
        return x + jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    shapes = {"a": (16, 8), "b": (8, 10), "c": (10, 16)}
    layout, splits, _ = layout_of(block, {n: jnp.zeros(s) for n, s in shapes.items()})
    # The class of 8 would sum fewer bytes backward.
    assert splits == {"a": -1, "b": 1, "c": 0}
    assert layout.split_flops == 2 * BATCH * SEQUENCE * (8 * 10 + 10 * 16)


@pytest.mark.parametrize("size", [16, 48])
def test_many_equal_rivals_are_searched_quickly(size):
    def block(p, x):
        for branch in range(6):
            h = x @ p["in"][branch]
            for w in p["mid"][branch * 7 : branch * 7 + 7]:
                h = jnp.tanh(h @ w)
            x = x + h @ p["out"][branch]
        return x

    parameters = {
        "in": [jnp.zeros((HIDDEN, size))] * 6,
        "mid": [jnp.zeros((size, size))] * 42,
        "out": [jnp.zeros((size, HIDDEN))] * 6,
    }
    start = time.process_time()
    layout = layout_of(block, parameters)[0]
    assert time.process_time() - start < 5
    # Every second class of a branch, which leaves one of its nine matrices.
    assert layout.flops - layout.split_flops == 6 * 2 * BATCH * SEQUENCE * HIDDEN * size


def test_a_given_dimension_takes_its_class_along():
    _, splits, reasons = layout_of_linen(Mlp(), fixed=[("up/kernel", 1)])
    assert splits == MLP
    assert reasons["up"]["kernel"] == "given by the user" and "class" in reasons["down"]["kernel"]


def test_a_given_class_wins_over_larger_matmuls():
    def block(p, x):
        return x + jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    parameters = {"a": jnp.zeros((16, 32)), "b": jnp.zeros((32, 64)), "c": jnp.zeros((64, 16))}
    _, splits, reasons = layout_of(block, parameters, fixed=[("a", 1)])
    assert splits == {"a": 1, "b": 0, "c": -1}
    assert "not together with class" in reasons["c"]


def test_a_given_dimension_is_split_also_where_nothing_else_can_be():
    _, splits, reasons = layout_of_linen(Block(Attention(), Mlp()), fixed=[("mlp/up/kernel", 0), ("norm1/scale", 0)])
    assert splits["mlp"] == {"up": {"kernel": 0, "bias": -1}, "down": {"kernel": -1, "bias": -1}}
    assert splits["norm1"] == {"scale": 0, "bias": -1} and splits["attention"] == ATTENTION
    assert reasons["norm1"]["scale"] == "given by the user"
    assert "is split along dimension 0 by the user" in reasons["mlp"]["down"]["kernel"]


def test_two_given_dimensions_in_conflict_are_both_done():
    def block(p, x):
        return x + jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    parameters = {"a": jnp.zeros((16, 32)), "b": jnp.zeros((32, 64)), "c": jnp.zeros((64, 16))}
    assert layout_of(block, parameters, fixed=[("a", 1), ("b", 1)])[1] == {"a": 1, "b": 1, "c": -1}


def test_a_parameter_kept_whole_keeps_its_classes_whole():
    layout, splits, reasons = layout_of_linen(Block(Attention(), Mlp()), fixed=[("mlp/up/bias", None)])
    assert set(jax.tree.leaves(splits["mlp"])) == {-1} and splits["attention"] == ATTENTION
    assert reasons["mlp"]["up"]["bias"] == "given by the user"
    assert "kept whole by the user" in reasons["mlp"]["down"]["kernel"]
    assert layout.count("forward") == 1


def test_given_features_of_keys_that_are_whole_anyhow_leave_the_rest_as_it_is():
    _, splits, _ = layout_of_linen(Attention(kv_heads=2), ways=4, fixed=[("k/kernel", 2)])
    assert splits["k"] == {"kernel": 2, "bias": -1}
    assert splits["q"] == COLUMN and splits["out"] == ROW


def test_a_tensor_axis_of_one_splits_nothing_that_is_given_either():
    assert set(jax.tree.leaves(layout_of_linen(GatedMlp(), ways=1, fixed=[("up/kernel", 1)])[1])) == {-1}


def test_impossible_wishes_are_named():
    jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.zeros((4, 6)), jnp.zeros((6, 6)))
    with pytest.raises(
        ValueError, match=r"dimension 1 of parameter 0, but its size 6 is not divisible by tensor_size 4"
    ):
        tensor_layout(jaxpr, [1], 4, fixed={0: 1})
    with pytest.raises(ValueError, match="parameter 1, but there are 1"):
        tensor_layout(jaxpr, [1], 2, fixed={1: 0})
    with pytest.raises(ValueError, match=r"dimension 2 of parameter 0, which has the shape \(6, 6\)"):
        tensor_layout(jaxpr, [1], 2, fixed={0: 2})
