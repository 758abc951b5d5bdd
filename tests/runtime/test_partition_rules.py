"""The user's own split over `tensor` wins over the plan's, gives the same numbers, and is refused where it cannot be."""

import optax
import pytest
from jax.sharding import PartitionSpec as P

import merak_jax
from merak_jax.errors import PlanError
from merak_jax.runtime.partition_rules import PartitionRules, with_slashes
from tests.helper import assert_same_as_single_device
from tests.parity import make_batch, make_model, mesh_of, state_maker, train_step


def step_of(rules, layers="unrolled", **options):
    maker = state_maker(make_model(4, layers))
    step = merak_jax.parallelize(
        train_step, mesh=mesh_of(1, 2, 2), num_microbatches=4, partition_rules=rules, **options
    )
    step.lower(maker(optax.sgd(0.1)), make_batch(0))
    return step


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_a_rule_wins_over_the_plan(layers):
    mlp = "params/h_[0-9]+/mlp/" if layers == "unrolled" else "params/h/.*mlp/"
    lead = () if layers == "unrolled" else (None,)
    usual, given = (str(step_of(rules, layers).plan) for rules in (None, {f"{mlp}.*": P()}))
    assert "['mlp']['up']['kernel']" in usual.split("split over tensor", 1)[1]
    assert not [line for line in given.splitlines() if line.startswith("split over tensor") and "mlp" in line]
    # The rest is the plan's.
    assert [line for line in given.splitlines() if line.startswith("split over tensor") and "query" in line]
    other = str(step_of({f"{mlp}down/kernel": P(*lead, None, "tensor")}, layers).plan)
    dimension = 1 + len(lead)
    assert [x for x in other.splitlines() if "['down']['kernel']" in x and f"dimension {dimension} over tensor" in x]


@pytest.mark.parametrize(
    "rules",
    [
        {"mlp/(up|down)/kernel": P(None, "tensor"), "attention/query/kernel": P("tensor")},
        {"attention": P(), "mlp/up/bias": P()},
    ],
    ids=["other dimensions", "whole attention"],
)
def test_the_numbers_are_those_of_one_device(rules):
    for overlap in ("none", "collective"):
        assert_same_as_single_device(
            train_step,
            state_maker(make_model(4)),
            make_batch,
            mesh_of(1, 2, 2),
            num_microbatches=2,
            partition_rules=rules,
            overlap=overlap,
        )


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"mlp/up/kernel": ("tensor",)}, "maps patterns to PartitionSpecs"),
        ({"mlp/up/kernel": P("pipe")}, "split along one dimension, over 'tensor'"),
        ({"mlp/up/kernel": P("tensor", "tensor")}, "split along one dimension, over 'tensor'"),
        ({"mlp/(up/kernel": P("tensor")}, "is no regular expression"),
        (
            {"mlp/up/bias": P(None, "tensor")},
            "is longer than .params\\['h_0'\\]\\['mlp'\\]\\['up'\\]\\['bias'\\]\\[64\\]",
        ),
        ({"mlp/upp": P()}, "'mlp/upp' is found in no path of a block's parameter; they are like params/h_0/"),
        ({"token_embedding": P("tensor")}, "params/token_embedding/embedding, which is no parameter of a block"),
        ({"h_1/mlp/up/kernel": P()}, "say something else for .*h_0.* than for .*h_1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rules, message):
    with pytest.raises(PlanError, match=message):
        step_of(rules)


def test_a_dimension_that_tensor_does_not_divide_is_named():
    rules = PartitionRules({"kernel": P(None, "tensor")})
    with pytest.raises(PlanError, match="dimension 1 of .params\\['kernel'\\]\\[4, 10\\] is not divisible by tensor=4"):
        rules.dimension(".params['kernel']", (4, 10), 4)


def test_a_stack_is_not_split_along_its_layers():
    with pytest.raises(PlanError, match="along its layers, which the stages are"):
        PartitionRules({"kernel": P("tensor")}).of_blocks([".kernel"], (4, 8), True, 2)


def test_paths_have_slashes():
    assert with_slashes(".params['h_0']['mlp'][2].kernel") == "params/h_0/mlp/2/kernel"
