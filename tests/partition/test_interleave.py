"""Two programs in one order: all steps once, each after what it reads, collectives beside matmuls that do not wait for them."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Literal

from merak_jax.partition.interleave import Join, interleave, steps_of
from merak_jax.partition.splits import WHOLE, BlockLayout, Split, follow_splits
from merak_jax.tracing.inline import inline

TOKENS, HIDDEN = 8, 16


def block(depth, gated):
    """Column- and row-parallel matmuls with something between them, `depth` times; and how their operands are split."""

    def function(x, *weights):
        for n in range(depth):
            up, down = weights[2 * n : 2 * n + 2]
            y = jnp.tanh(x) @ up
            x = x + (jax.nn.silu(y) * y if gated else jax.nn.gelu(y)) @ down
        return x

    shapes = [jax.ShapeDtypeStruct(s, jnp.float64) for s in [(HIDDEN, 64), (64, HIDDEN)] * depth]
    x = jax.ShapeDtypeStruct((2, TOKENS, HIDDEN), jnp.float64)
    program = inline(jax.make_jaxpr(function)(x, *shapes)).jaxpr
    return program, [Split(1, False), Split(0, False)] * depth


def steps(depth, gated, sequence, stream):
    program, lanes = block(depth, gated)
    carry = Split(1, True) if sequence else WHOLE
    layout = BlockLayout(tuple(s.dimension for s in lanes), (1,), sequence, sequence, frozenset(), 2)
    splits = follow_splits(program, [carry, *lanes], [1, *[None] * len(lanes)], layout)
    return steps_of(stream, program, splits)


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=2, max_size=2))
def test_every_step_runs_once_and_after_what_it_reads(kinds):
    all_steps = [s for n, kind in enumerate(kinds) for s in steps(*kind, n)]
    order = interleave(all_steps)
    flat = [s for entry in order for s in (entry if isinstance(entry, Join) else (entry,))]
    assert sorted(map(id, flat)) == sorted(map(id, all_steps))
    makers = {(s.stream, made) for s in all_steps for made in s.makes}
    done = set()
    for entry in order:
        together = entry if isinstance(entry, Join) else (entry,)
        for step in together:
            needed = {(step.stream, r) for r in step.reads if not isinstance(r, Literal)} & makers
            assert needed <= done, "neither step of a join may wait for the other"
        done |= {(s.stream, made) for s in together for made in s.makes}


def test_all_reduces_of_two_streams_stand_beside_matmuls():
    all_steps = steps(2, False, False, 0) + steps(3, True, False, 1)
    joins = [entry for entry in interleave(all_steps) if isinstance(entry, Join)]
    collectives = [s for s in all_steps if s.is_collective]
    assert len(collectives) == 5
    # Nothing is left behind the last one.
    assert len(joins) >= 4
    assert all(join.collective.is_collective and join.matmul.seconds > 0 for join in joins)
    assert len({id(join.matmul) for join in joins}) == len(joins)
