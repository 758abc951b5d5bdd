"""Loops over blocks whose trip counts differ per stage, one after the other or two of them in one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax


class Block(NamedTuple):
    """A part of a chain's block to be run on operands."""

    chain: int
    part: str
    operands: list[Any]


# A body yields the Block that it wants run, is sent its outputs, and returns the new state.
Body = Callable[..., Generator[Block, list[Any], Any]]


class Loop(NamedTuple):
    """`count` turns of `body(turn, state, *read)` over the blocks of a chain."""

    chain: int
    count: Any
    body: Body


class Loops(NamedTuple):
    """Loops that change one state, one after the other."""

    loops: list[Loop]
    state: Any


class Runner(Protocol):
    """What runs blocks."""

    def block(self, block: Block) -> list[Any]:
        """The outputs of a block."""

    def both(self, first: Block, second: Block) -> tuple[list[Any], list[Any]]:
        """The outputs of two blocks that are run together."""


def run_loops(runner: Runner, loops: Loops, *read: Any) -> Any:
    """The state after all loops; `read`: what they read besides."""
    state = loops.state
    for loop in loops.loops:
        state = _alone(runner, loop, 0, loop.count, state, *read)
    return state


def run_paired(
    runner: Runner, first: Loops, second: Loops, layers: set[int], read: Callable[[Any], tuple]
) -> tuple[Any, Any]:
    """Both states after all loops of both, turn by turn in one loop where both have turns left.

    The collectives of one then hide behind the matmuls of the other. `layers`: the chains that are worth it, of which the others
    run alone. `read(state of first)`: what the loops of `second` read.
    """
    state, other = first.state, second.state
    done = [jnp.int32(0)] * len(second.loops)
    for loop in first.loops:
        turned = jnp.int32(0)
        for n, beside in enumerate(second.loops):
            # The loops of `second` keep their order too.
            ready = jnp.bool_(True)
            for number, earlier in zip(done[:n], second.loops):
                ready &= number >= earlier.count
            left = jnp.where(ready, beside.count - done[n], 0)
            if loop.chain in layers and beside.chain in layers:
                turns = jnp.minimum(loop.count - turned, left)

                def body(i, states, loop=loop, beside=beside, turned=turned, begun=done[n]):
                    one, two = states
                    # Both read before either writes: buffers stay in place.
                    bodies = beside.body(begun + i, two, *read(one)), loop.body(turned + i, one)
                    asked, wanted = (next(body) for body in bodies)
                    made, got = runner.both(asked, wanted)
                    two, one = (_result(body, out) for body, out in zip(bodies, (made, got)))
                    return one, two

                state, other = lax.fori_loop(0, turns, body, (state, other))
                turned = turned + turns
            elif beside.chain not in layers:
                turns = left
                other = _alone(runner, beside, done[n], turns, other, *read(state))
            else:
                continue
            done[n] = done[n] + turns
        state = _alone(runner, loop, turned, loop.count - turned, state)
    for n, beside in enumerate(second.loops):
        other = _alone(runner, beside, done[n], beside.count - done[n], other, *read(state))
    return state, other


def _alone(runner: Runner, loop: Loop, begun: Any, turns: Any, state: Any, *read: Any) -> Any:
    def turn(i, state):
        body = loop.body(begun + i, state, *read)
        return _result(body, runner.block(next(body)))

    return lax.fori_loop(0, turns, turn, state)


def _result(body: Generator[Block, list[Any], Any], outputs: list[Any]) -> Any:
    """What a body returns when it gets the outputs that it asked for."""
    try:
        body.send(outputs)
    except StopIteration as end:
        return end.value
    raise AssertionError("a body asks for one block")
