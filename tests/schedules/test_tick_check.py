"""The linter of tick tables: every corruption is caught, with the task and the rule in the message."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from merak_jax.schedules.forward_only import forward_only
from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.interleaved import interleaved
from merak_jax.schedules.merak import shifted_critical_path
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.task import ScheduleError
from merak_jax.schedules.ticks import NONE, TickTable, check, lower
from merak_jax.schedules.zero_bubble import zero_bubble_v

TABLES = {
    "eager": lower(one_f_one_b(4, 8, eager=True)),
    "strict": lower(one_f_one_b(3, 4)),
    "gpipe": lower(gpipe(3, 4)),
    "one stage": lower(gpipe(1, 3)),
    "shifted": lower(shifted_critical_path(3, 4), "switched"),
    "paired": lower(interleaved(2, 3), "paired"),
    "zb_v": lower(zero_bubble_v(2, 3)),
    "evaluation": forward_only(2, 3, 2, True),
}
ARRAYS = sorted(TABLES["eager"].arrays())


def changed(table: TickTable, **cells: dict) -> TickTable:
    """A copy of `table` with the given cells of its tables replaced."""
    arrays = {}
    for name, values in cells.items():
        arrays[name] = getattr(table, name).copy()
        for where, value in values.items():
            arrays[name][where] = value
    return dataclasses.replace(table, **arrays)


@pytest.mark.parametrize("name", TABLES)
def test_lowered_tables_pass(name):
    check(TABLES[name])


def is_another_free_slot(table: TickTable, name: str, where: tuple, value: int) -> bool:
    """Whether the change leaves a legal table: an evaluation's first stage fills and empties its slot in one tick, whichever."""
    own = not table.differentiated and name == "forward_slot" and where[1] == 0 and table.forward_chunk[where] == 0
    return bool(own and 0 <= value < table.num_stash_slots)


def test_an_evaluations_first_stage_may_take_any_free_slot():
    table = TABLES["evaluation"]
    first = np.argwhere((table.forward[:, :1] >= 0) & (table.forward_chunk[:, :1] == 0)).tolist()
    others = [(tuple(at), 1 - int(table.forward_slot[tuple(at)])) for at in first]
    assert len(others) == 3 and table.num_stash_slots == 2
    for where, slot in others:
        assert is_another_free_slot(table, "forward_slot", where, slot)
        check(changed(table, forward_slot={where: slot}))


@settings(deadline=None, max_examples=1000)
@given(st.data())
def test_every_change_of_one_cell_is_caught(data):
    table = TABLES[data.draw(st.sampled_from(sorted(TABLES)))]
    name = data.draw(st.sampled_from(ARRAYS))
    values = getattr(table, name)
    where = tuple(data.draw(st.integers(0, size - 1)) for size in values.shape)
    sizes = [table.num_microbatches, table.num_stash_slots, table.num_cotangent_slots, table.num_saved_slots]
    value = data.draw(st.integers(NONE - 1, max(sizes)).filter(lambda other: other != values[where]))
    assume(not is_another_free_slot(table, name, where, value))
    with pytest.raises(ScheduleError, match=table.name):
        check(changed(table, **{name: {where: value}}))


def swapped(name: str, slots: tuple[str, ...], first: tuple, second: tuple) -> dict:
    """The cells that exchange two tasks together with their slots."""
    table = TABLES["eager"]
    return {
        array: {first: getattr(table, array)[second], second: getattr(table, array)[first]} for array in (name, *slots)
    }


# The eager table of 4 stages and 8 microbatches: F of m on s at tick m+s, B of m at tick m+6-s.
@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            swapped("forward", ("forward_slot", "forward_chunk"), (1, 1), (0, 1)),
            "tick 0, stage 1: F0 is too early, stage 0 runs F0",
        ),
        (
            swapped("backward", ("backward_slot", "cotangent_slot", "backward_chunk"), (6, 0), (5, 0)),
            "tick 5, stage 0: B0 is too early, stage 1 runs B0 in tick 5 and a hop takes a tick",
        ),
        (
            swapped("backward", ("backward_slot", "cotangent_slot", "backward_chunk"), (3, 3), (2, 3)),
            "tick 2, stage 3: B0 is too early, its F0 is in tick 3",
        ),
        ({"forward": {(0, 0): 1}}, "stage 0: F0 occurs 0 times"),
        ({"backward": {(13, 0): 6}}, "stage 0: B6 occurs 2 times"),
        ({"epilogue": {3: 1}}, "the epilogue is of microbatch 1 and the F of microbatch 0"),
        (
            {"forward_slot": {(1, 0): 0}},
            "tick 1, stage 0: F1 writes stash slot 0, still occupied by microbatch 0",
        ),
        ({"forward_slot": {(2, 1): 0}}, "tick 2, stage 1: F1 reads stash slot 0, which holds microbatch 0"),
        ({"backward_slot": {(6, 0): 5}}, "stage 0: B0 reads stash slot 5, which holds microbatch 5"),
        (
            {"receive_forward_slot": {(1, 1): 0}},
            "the output of F1 of stage 0 writes stash slot 0, still occupied",
        ),
        ({"receive_forward_slot": {(1, 1): NONE}}, "stage 1: has no slot for the output of F1 of stage 0"),
        ({"receive_forward_slot": {(1, 0): 3}}, "tick 1, stage 0: receives into slot 3, but nothing is sent"),
        ({"receive_backward_slot": {(4, 1): NONE}}, "stage 1: has no slot for the output of B0 of stage 2"),
        ({"forward_slot": {(0, 0): NONE}}, "tick 0, stage 0: F0 without a forward_slot"),
        ({"cotangent_slot": {(0, 2): 0}}, "tick 0, stage 2: no B, yet a cotangent_slot"),
        ({"epilogue_slot": {3: NONE}}, "tick 3, stage 3: E0 without a epilogue_slot"),
        ({"forward": {(0, 0): 8}}, r"forward\[0, 0\] is 8, outside -1 to 7"),
        ({"backward_slot": {(6, 0): 7}}, r"backward_slot\[6, 0\] is 7, outside -1 to 6"),
        ({"epilogue_slot": {3: 1}}, r"epilogue_slot\[3\] is 1, outside -1 to 0"),
    ],
)
def test_the_error_names_the_task_and_the_rule(cells, message):
    with pytest.raises(ScheduleError, match=message):
        check(changed(TABLES["eager"], **cells))


def test_a_cotangent_that_is_overwritten_before_it_is_read_is_caught():
    with pytest.raises(ScheduleError, match="tick 3, stage 2: E1 writes cotangent slot 0, still occupied"):
        check(changed(TABLES["gpipe"], epilogue_slot={3: 0}))


def test_a_table_of_another_shape_is_caught():
    table = TABLES["eager"]
    with pytest.raises(ScheduleError, match=r"cotangent_slot has shape \(13, 4\), expected \(14, 4\)"):
        check(dataclasses.replace(table, cotangent_slot=table.cotangent_slot[:-1]))


def test_too_few_slots_are_caught():
    table = TABLES["eager"]
    with pytest.raises(ScheduleError, match="outside -1 to 5"):
        check(dataclasses.replace(table, num_stash_slots=table.num_stash_slots - 1))
