"""Lowering to tick tables: the closed forms of GPipe and 1F1B, bounds, slots, and orders that cannot run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.interleaved import interleaved
from merak_jax.schedules.merak import early_recompute, last_no_recompute, shifted_critical_path
from merak_jax.schedules.needs import divided
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.search import in_flight
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_table import PARTS
from merak_jax.schedules.ticks import FORMS, NONE, Phase, TickTable, check, lower
from merak_jax.schedules.zero_bubble import zero_bubble_h1, zero_bubble_v

NUM_STAGES = st.integers(1, 16)
NUM_MICROBATCHES = st.integers(1, 64)

EAGER_2_3 = """\
eager_1f1b: 2 stages, 3 microbatches, 5 ticks, 3 stash slots, 1 cotangent slots
tick  phase    s0           s1           epilogue
0     {F}      F0@0         .            .
1     {F,E,B}  F1@1         F0@0 B0@0,0  E0@0
2     {F,E,B}  F2@2 B0@0,0  F1@0 B1@0,0  E1@0
3     {F,E,B}  B1@1,0       F2@0 B2@0,0  E2@0
4     {B}      B2@2,0       .            ."""


def ticks_of(values: np.ndarray, num_microbatches: int) -> list[list[int]]:
    """`[stages][microbatches]` the tick of each task; fails where one is missing or repeated."""
    ticks = []
    for column in values.T:
        found = [np.flatnonzero(column == microbatch) for microbatch in range(num_microbatches)]
        assert all(len(where) == 1 for where in found)
        ticks.append([int(where[0]) for where in found])
    return ticks


def occupancy(first: np.ndarray, last: np.ndarray, num_ticks: int) -> int:
    """The most microbatches held at once when each is held from tick `first` to `last`, both included."""
    ticks = np.arange(num_ticks)[:, None]
    return int(((first <= ticks) & (ticks <= last)).sum(1).max())


def fewest_slots(table: TickTable) -> tuple[int, int]:
    """Lower bounds for the stash and the cotangent inbox, counted from the ticks of the tasks alone."""
    forward = np.array(ticks_of(table.forward, table.num_microbatches))
    backward = np.array(ticks_of(table.backward, table.num_microbatches))
    stash, inbox = [], []
    for stage in range(table.num_stages):
        # What arrives at the end of a tick is held from the next tick on.
        arrival = forward[0] if stage == 0 else forward[stage - 1] + 1
        stash.append(occupancy(arrival, backward[stage], table.num_ticks))
        last_stage = stage == table.num_stages - 1
        cotangent = forward[stage] if last_stage else backward[stage + 1] + 1
        inbox.append(occupancy(cotangent, backward[stage], table.num_ticks))
    return max(stash), max(inbox)


@st.composite
def legal_schedules(draw) -> Schedule:
    """Any order that one global sequence of F and B allows, hence one that cannot deadlock."""
    num_stages, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    pending = {
        (kind, stage, microbatch)
        for kind in (TaskKind.F, TaskKind.B)
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
    }
    orders: list[list[Task]] = [[] for _ in range(num_stages)]
    while pending:
        possible = []
        for kind, stage, microbatch in sorted(pending, key=lambda entry: (entry[0].value, *entry[1:])):
            if kind is TaskKind.F:
                needs = (kind, stage - 1, microbatch)
            elif (TaskKind.F, stage, microbatch) in pending:
                continue
            else:
                needs = (kind, stage + 1, microbatch)
            if needs not in pending:
                possible.append((kind, stage, microbatch))
        kind, stage, microbatch = chosen = draw(st.sampled_from(possible))
        pending.remove(chosen)
        orders[stage].append(Task(kind, microbatch))
    return Schedule("any", num_stages, num_microbatches, 1, tuple(map(tuple, orders)))


def test_a_small_eager_table_prints_as_expected():
    assert str(lower(one_f_one_b(2, 3, eager=True))) == EAGER_2_3


@settings(deadline=None, max_examples=60)
@given(NUM_STAGES, NUM_MICROBATCHES)
def test_eager_1f1b_meets_its_closed_form(num_stages, num_microbatches):
    table = lower(one_f_one_b(num_stages, num_microbatches, eager=True))
    check(table)
    last = num_stages - 1
    assert ticks_of(table.forward, num_microbatches) == [
        [microbatch + stage for microbatch in range(num_microbatches)] for stage in range(num_stages)
    ]
    assert ticks_of(table.backward, num_microbatches) == [
        [microbatch + 2 * last - stage for microbatch in range(num_microbatches)] for stage in range(num_stages)
    ]
    steady = Phase(last, last + num_microbatches, frozenset("FEB"))
    before = Phase(0, last, frozenset("F"))
    after = Phase(last + num_microbatches, 2 * last + num_microbatches, frozenset("B"))
    assert table.phases == ((before, steady, after) if last else (steady,))
    assert table.in_flight() == [min(num_microbatches, 2 * (last - stage) + 1) for stage in range(num_stages)]
    assert table.num_stash_slots == min(num_microbatches, 2 * last + 1)
    assert table.num_cotangent_slots == 1


@settings(deadline=None, max_examples=60)
@given(NUM_STAGES, st.integers(2, 64))
def test_gpipe_meets_its_closed_form(num_stages, num_microbatches):
    table = lower(gpipe(num_stages, num_microbatches))
    check(table)
    last, half = num_stages - 1, num_stages - 1 + num_microbatches
    before = Phase(0, last, frozenset("F"))
    steady = Phase(last, half, frozenset("FE"))
    after = Phase(half, 2 * half, frozenset("B"))
    assert table.phases == ((before, steady, after) if last else (steady, after))
    assert table.num_ticks == 2 * half
    assert table.in_flight() == [num_microbatches] * num_stages
    assert table.num_stash_slots == table.num_cotangent_slots == num_microbatches


@settings(deadline=None, max_examples=60)
@given(NUM_STAGES, NUM_MICROBATCHES, st.sampled_from(["gpipe", "eager"]))
def test_makespan_and_bubble_are_those_of_1f1b(num_stages, num_microbatches, kind):
    schedule = (
        gpipe(num_stages, num_microbatches)
        if kind == "gpipe"
        else one_f_one_b(num_stages, num_microbatches, eager=True)
    )
    table = lower(schedule)
    hops = num_stages - 1
    assert table.makespan(1.0, 2.5) == (num_microbatches + hops) * 3.5
    assert table.bubble_share(1.0, 2.5) == pytest.approx(hops / (num_microbatches + hops), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(NUM_STAGES, NUM_MICROBATCHES)
def test_strict_1f1b_keeps_its_bound_in_flight(num_stages, num_microbatches):
    table = lower(one_f_one_b(num_stages, num_microbatches))
    check(table)
    assert table.in_flight() == [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]


def test_one_microbatch_makes_gpipe_and_1f1b_the_same():
    assert str(lower(gpipe(3, 1))).split(":")[1] == str(lower(one_f_one_b(3, 1, eager=True))).split(":")[1]


@settings(deadline=None, max_examples=100)
@given(legal_schedules())
def test_any_legal_order_lowers_to_a_checked_table_in_the_order_of_its_lists(schedule):
    table = lower(schedule)
    check(table)
    for stage, order in enumerate(schedule.orders):
        ran = []
        for tick in range(table.num_ticks):
            for kind, values in ((TaskKind.F, table.forward), (TaskKind.B, table.backward)):
                if values[tick, stage] != NONE:
                    ran.append(Task(kind, int(values[tick, stage])))
        assert tuple(ran) == order


@settings(deadline=None, max_examples=100)
@given(legal_schedules())
def test_no_table_uses_more_slots_than_are_held_at_once(schedule):
    table = lower(schedule)
    assert (table.num_stash_slots, table.num_cotangent_slots) == fewest_slots(table)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "make", [one_f_one_b, gpipe, shifted_critical_path, interleaved, zero_bubble_h1, zero_bubble_v]
)
def test_phases_cover_every_tick_and_do_not_grow_with_the_microbatches(make, form):
    counts = []
    for microbatches in (8, 16, 32):
        table = lower(make(4, microbatches), form)
        assert table.phases[0].start == 0 and table.phases[-1].stop == table.num_ticks
        for before, after in zip(table.phases, table.phases[1:]):
            assert before.stop == after.start and before.parts != after.parts
        for phase in table.phases:
            for part in PARTS:
                assert part in phase.parts or not table.where(part)[phase.start : phase.stop].any()
        counts.append(len(table.phases))
    assert len(set(counts)) == 1


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 8), st.integers(1, 4), st.sampled_from([0, 1, 3]), st.sampled_from(FORMS))
def test_every_schedule_lowers_to_checked_tables_that_run_its_tasks(stages, times, more, form):
    microbatches = stages * times + more
    for make in (
        early_recompute,
        last_no_recompute,
        shifted_critical_path,
        interleaved,
        zero_bubble_h1,
        zero_bubble_v,
        lambda p, m: interleaved(p, m, 3),
    ):
        if make is shifted_critical_path and microbatches < 4:
            continue
        schedule = make(stages, microbatches)
        table = lower(schedule, form)
        check(table)
        expected = divided(schedule) if form == "switched" else schedule
        for stage, order in enumerate(expected.orders):
            ran = table.order(stage)
            assert sorted(map(str, ran)) == sorted(map(str, order))
            if form != "paired":
                assert ran == order
        if form == "switched":
            assert table.in_flight() == in_flight(schedule)


def test_paired_eager_1f1b_runs_B_one_tick_later():
    for stages, microbatches in ((2, 4), (4, 8), (4, 4)):
        schedule = one_f_one_b(stages, microbatches, eager=True)
        merged, paired = lower(schedule), lower(schedule, "paired")
        check(paired)
        assert [phase.num_ticks for phase in paired.phases if "F" in phase.parts and "B" in phase.parts] == [
            microbatches - 1
        ]
        assert paired.num_ticks == merged.num_ticks + 1
        assert paired.makespan(1.0, 2.0) == merged.makespan(1.0, 2.0)
        assert paired.in_flight() == [min(microbatches, n + 1) for n in merged.in_flight()]


def test_switched_ticks_run_merak_s_shifted_order_with_its_microbatches_in_flight():
    table = lower(shifted_critical_path(4, 8), "switched")
    assert table.in_flight() == [4, 3, 3, 1]
    # Of equal tasks: a hop costs one of them, as B is divided.
    assert simulate(table, recompute=1.0).makespan == 36
    assert simulate(divided(shifted_critical_path(4, 8)), recompute=1.0).makespan == 36


def test_tables_are_read_only_int32():
    table = lower(gpipe(2, 2))
    assert table.forward.dtype == table.epilogue_slot.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        table.forward[0, 0] = 1


def test_stages_that_wait_for_each_other_are_an_error_that_names_both():
    forward, backward = [[Task(kind, m) for m in range(2)] for kind in (TaskKind.F, TaskKind.B)]
    orders = (
        (forward[0], backward[0], forward[1], backward[1]),
        (forward[0], forward[1], backward[0], backward[1]),
    )
    with pytest.raises(ScheduleError, match="wait for each other: stage 0 for B0, stage 1 for F1"):
        lower(Schedule("stuck", 2, 2, 1, orders))


F0, B0, BI0, R0 = (Task(kind, 0) for kind in (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.R))


@pytest.mark.parametrize(
    ("schedule", "form", "message"),
    [
        (Schedule("mine", 2, 1, 1, ((F0, B0), (F0,))), "merged", "stage 1: B0 occurs 0 times"),
        (Schedule("mine", 1, 1, 1, ((F0, F0, B0),)), "merged", "stage 0: F0 occurs 2 times"),
        (Schedule("mine", 1, 1, 1, ((F0, R0, B0),), keeps=(0,)), "merged", "R0 occurs 1 times; the stage keeps"),
        (Schedule("mine", 1, 1, 1, ((F0, B0, R0),)), "switched", "B0 comes before R0"),
        (Schedule("mine", 1, 1, 1, ((F0, BI0),)), "switched", "Bi0 1, W0 0"),
        (Schedule("mine", 1, 1, 2, ((F0, B0),)), "merged", "F0.1 occurs 0 times"),
        (Schedule("mine", 1, 1, 1, ((F0, B0),)), "spiral", "form 'spiral'; known: 'merged'"),
    ],
)
def test_what_cannot_run_is_an_error(schedule, form, message):
    with pytest.raises(ScheduleError, match=message):
        lower(schedule, form)
