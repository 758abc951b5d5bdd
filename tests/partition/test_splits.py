"""Where the values of a block are over `tensor`, what its equations need whole, and which of its matmuls go in rings."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn

from merak_jax.partition.rings import GatherRing, ScatterRing, arrange, without_repeats
from merak_jax.partition.splits import LOCAL, SUM, WHOLE, BlockLayout, Split, follow_splits
from merak_jax.tracing.inline import inline

BATCH, TOKENS, HIDDEN, FEATURES = 2, 8, 16, 64
CARRY = (BATCH, TOKENS, HIDDEN)
LAYOUT = BlockLayout((), (1,), True, True, frozenset(), 2)
TOKEN, COLUMN, ROW = Split(1, True), Split(1, False), Split(0, False)


def program_of(function, *shapes, dtype=jnp.float64):
    return without_repeats(inline(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).jaxpr)


def splits_of(program, *places, layout=LAYOUT, gradients=()):
    tokens = [1 if p == TOKEN or v.aval.shape == CARRY else None for p, v in zip(places, program.invars)]
    return follow_splits(program, places, tokens, layout, gradients=set(gradients))


def equations(program, name):
    return [eqn for eqn in program.eqns if eqn.primitive.name == name]


def mlp(x, up, down):
    return x + jax.nn.gelu(jnp.tanh(x) @ up) @ down


MLP = CARRY, (HIDDEN, FEATURES), (FEATURES, HIDDEN)


def test_a_column_matmul_needs_its_input_whole_and_a_row_matmul_deals_out_its_sum():
    program = program_of(mlp, *MLP)
    splits = splits_of(program, TOKEN, COLUMN, ROW)
    column, row = equations(program, "dot_general")
    assert splits.needs_whole(column, 0) and not splits.needs_whole(column, 1)
    assert splits.of(column.outvars[0]) == Split(2, False)
    assert splits.place[row.outvars[0]] is SUM and splits.settled[row.outvars[0]] == TOKEN
    assert splits.of(program.outvars[0]) == TOKEN


def test_with_a_whole_carry_a_sum_is_whole_and_nothing_is_gathered():
    program = program_of(mlp, *MLP)
    layout = dataclasses.replace(LAYOUT, sequence=False, deals=False)
    splits = splits_of(program, WHOLE, COLUMN, ROW, layout=layout)
    column, row = equations(program, "dot_general")
    assert not splits.needs_whole(column, 0)
    assert splits.settled[row.outvars[0]] is WHOLE


def test_products_that_are_added_share_one_sum():
    def function(x, up, gate, down, other):
        return (x @ up) @ down + (x @ gate) @ other

    program = program_of(function, CARRY, *[(HIDDEN, FEATURES)] * 2, *[(FEATURES, HIDDEN)] * 2)
    splits = splits_of(program, TOKEN, COLUMN, COLUMN, ROW, ROW)
    assert list(splits.settled) == [program.outvars[0]]
    gather, scatter = [item for item in arrange(program, splits) if not isinstance(item, JaxprEqn)]
    assert isinstance(gather, GatherRing) and len(gather.products) == 2
    assert isinstance(scatter, ScatterRing) and len(scatter.products) == 2


def test_the_narrow_type_travels():
    """A sum that is cast at its end is taken before, one that is cast on its way to others after."""

    def function(x, up, down, other):
        y = x @ up
        return (y @ down).astype(jnp.float64), (y @ down).astype(jnp.float64) + (y @ other).astype(jnp.float64)

    weights = [(HIDDEN, FEATURES), (FEATURES, HIDDEN), (FEATURES, HIDDEN)]
    program = program_of(function, CARRY, *weights, dtype=jnp.float32)
    splits = splits_of(program, TOKEN, COLUMN, ROW, ROW)
    assert sorted(str(v.aval.dtype) for v in splits.settled) == ["float32", "float64"]


def test_heads_win_over_tokens_and_what_has_tokens_is_gathered():
    def function(q, k):
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    program = program_of(function, (BATCH, TOKENS, 4, 4), (BATCH, TOKENS, 4, 4))
    (eqn,) = equations(program, "dot_general")
    splits = splits_of(program, Split(2, False), TOKEN)
    assert [splits.needs_whole(eqn, n) for n in (0, 1)] == [False, True]
    assert splits.of(eqn.outvars[0]) == Split(1, False)
    # Attention that is not split over heads works on its own queries, and the keys go round.
    splits = splits_of(program, TOKEN, TOKEN)
    assert [splits.needs_whole(eqn, n) for n in (0, 1)] == [False, True]
    (ring,) = arrange(program, splits)
    assert isinstance(ring, GatherRing) and ring.products[0].side == 1 and ring.products[0].result == 3


def test_gradients_of_whole_parameters_stay_where_they_are():
    def backward(dy, x):
        return (dy * x).sum((0, 1)), jnp.einsum("bsh,bsf->hf", x, dy), dy.sum((0, 1))

    program = program_of(backward, CARRY, CARRY)
    scale, kernel, bias = program.outvars
    splits = splits_of(program, TOKEN, TOKEN, gradients=[scale, kernel])
    assert splits.of(scale) is LOCAL and splits.of(kernel) is LOCAL
    # One that somebody else reads, or that must be stored, is summed at once.
    assert splits.settled[bias] is WHOLE


def test_a_value_that_goes_through_what_cannot_work_in_shards_is_whole_there():
    program = program_of(lambda x: jnp.cumsum(x, 1) + x, CARRY)
    (eqn,) = equations(program, "cumsum")
    splits = splits_of(program, TOKEN)
    assert splits.needs_whole(eqn, 0)
    assert splits.of(program.outvars[0]) == TOKEN


def test_a_product_that_needs_a_sum_gathers_in_no_ring():
    """Its other operand is split where it is contracted: a ring would give parts of sums."""

    def function(x, w):
        return jnp.einsum("bsf,fh->bsh", x, w)

    program = program_of(function, (BATCH, TOKENS, FEATURES), (FEATURES, HIDDEN))
    (eqn,) = program.eqns
    splits = splits_of(program, TOKEN, ROW)
    assert splits.needs_whole(eqn, 0) and splits.place[eqn.outvars[0]] is SUM
    assert arrange(program, splits) == [eqn]


def test_rings_of_one_value_share_its_way_round_unless_one_waits_for_another():
    def function(x, a, b, c):
        y = x @ a
        return y, x @ b, jnp.einsum("bsh,bsf->hf", x, y) @ c

    program = program_of(function, CARRY, *[(HIDDEN, FEATURES)] * 2, (FEATURES, HIDDEN))
    splits = splits_of(program, TOKEN, COLUMN, COLUMN, WHOLE)
    rings = [item for item in arrange(program, splits) if not isinstance(item, JaxprEqn)]
    assert sorted(len(ring.products) for ring in rings) == [1, 2]
    assert [p.result for ring in rings if len(ring.products) == 1 for p in ring.products] == [None]


@pytest.mark.parametrize("size, expected", [(2, Split(1, False)), (3, WHOLE), (4, Split(1, False))])
def test_what_does_not_divide_is_whole(size, expected):
    program = program_of(lambda x: jnp.tanh(x), (BATCH, 8))
    splits = follow_splits(program, [expected], [None], dataclasses.replace(LAYOUT, tokens=(None,), size=size))
    assert splits.of(program.outvars[0]) == expected


def test_casts_of_one_value_are_one():
    def function(x):
        return x.astype(jnp.float32) @ x.astype(jnp.float32).T + x.astype(jnp.bfloat16).astype(jnp.float32).sum()

    program = program_of(function, (4, 4))
    casts = equations(program, "convert_element_type")
    assert len(casts) == 3 and len({(e.invars[0], str(e.params["new_dtype"])) for e in casts}) == 3
