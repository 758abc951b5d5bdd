"""Two rows of loops in one: every turn of both, each row in its order, side by side where both have turns left."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak_jax.runtime.loops import Block, Loop, Loops, run_loops, run_paired

ROOM = 64


class Recorder:
    """A runner whose blocks are one number."""

    def block(self, block):
        return [jnp.int32(block.operands[0]), jnp.int32(0)]

    def both(self, first, second):
        return [jnp.int32(first.operands[0]), jnp.int32(1)], [jnp.int32(second.operands[0]), jnp.int32(1)]


def loops(counts):
    """Loops that write down, turn by turn, `100 * loop + turn` and whether it ran beside another."""

    def body(n):
        def turn(i, state, *read):
            log, beside, at = state
            number, together = yield Block(n, "any", [100 * n + i])
            return log.at[at].set(number), beside.at[at].set(together), at + 1

        return turn

    state = (jnp.full(ROOM, -1, jnp.int32), jnp.zeros(ROOM, jnp.int32), jnp.int32(0))
    return Loops([Loop(n, jnp.int32(count), body(n)) for n, count in enumerate(counts)], state)


def wanted(counts):
    return [100 * n + i for n, count in enumerate(counts) for i in range(count)]


@pytest.fixture(autouse=True, scope="module")
def as_python():
    """Loops as Python runs them: compiled, each example would be another program."""
    with jax.disable_jit():
        yield


COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@given(COUNTS)
def test_loops_turn_as_often_as_they_say(counts):
    log, _, at = run_loops(Recorder(), loops(counts))
    assert log[: int(at)].tolist() == wanted(counts)


@given(COUNTS, COUNTS, st.sets(st.integers(0, 2)))
def test_paired_loops_turn_as_often_and_in_the_same_order(first, second, layers):
    found = run_paired(Recorder(), loops(first), loops(second), layers, lambda state: (state,))
    for (log, beside, at), counts in zip(found, (first, second)):
        assert log[: int(at)].tolist() == wanted(counts)
        for number, together in zip(log[: int(at)].tolist(), beside.tolist()):
            assert not together or number // 100 in layers
    assert int(found[0][1].sum()) == int(found[1][1].sum())


@given(st.integers(0, 4), st.integers(0, 4))
def test_two_loops_run_side_by_side_as_long_as_both_have_turns(first, second):
    found = run_paired(Recorder(), loops([first]), loops([second]), {0}, lambda state: (state,))
    assert int(found[0][1].sum()) == min(first, second)


@given(st.integers(0, 3), st.integers(0, 3))
def test_a_stage_of_one_chain_pairs_it_with_itself(first, second):
    """The other chain has no block here, forward and backward, which goes the other way."""
    for counts in ([first, 0], [0, first]):
        found = run_paired(Recorder(), loops(counts), loops(counts[::-1]), {0, 1}, lambda state: (state,))
        assert int(found[0][1].sum()) == first
