"""Simulated times of schedules and tick tables agree with the closed forms."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.merak import shifted_critical_path
from merak_jax.schedules.needs import divided
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.ticks import lower
from merak_jax.schedules.zero_bubble import zero_bubble_h1, zero_bubble_v


def parse(name: str, rows: list[str], num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """A Schedule from rows like `F0 F1 Bi0 W0`; a chunk other than 0 as `F0.1`."""
    orders = []
    for row in rows:
        tasks = []
        for word in row.split():
            kind = word.rstrip("0123456789.")
            microbatch, _, chunk = word[len(kind) :].partition(".")
            tasks.append(Task(TaskKind(kind), int(microbatch), int(chunk or 0)))
        orders.append(tuple(tasks))
    return Schedule(name, len(rows), num_microbatches, num_chunks, tuple(orders))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 16), st.integers(1, 64), st.sampled_from(["gpipe", "strict", "eager"]))
def test_a_free_running_schedule_has_the_makespan_of_1f1b(num_stages, num_microbatches, kind):
    if kind == "gpipe":
        schedule = gpipe(num_stages, num_microbatches)
    else:
        schedule = one_f_one_b(num_stages, num_microbatches, eager=kind == "eager")
    timeline = simulate(schedule, forward=1.0, backward=2.0)
    hops = num_stages - 1
    assert timeline.makespan == (num_microbatches + hops) * 3
    assert timeline.bubble_share == pytest.approx(hops / (num_microbatches + hops), abs=1e-12)
    assert len(timeline.intervals) == 2 * num_stages * num_microbatches


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 32), st.sampled_from([0.0, 1.0]))
def test_a_tick_table_takes_its_own_makespan(num_stages, num_microbatches, recompute):
    table = lower(one_f_one_b(num_stages, num_microbatches, eager=True))
    timeline = simulate(table, forward=1.0, backward=2.0, recompute=recompute)
    assert timeline.makespan == table.makespan(1.0, 2.0 + recompute)
    assert timeline.bubble_share == pytest.approx(table.bubble_share(1.0, 2.0 + recompute), abs=1e-12)
    tasks = [interval for interval in timeline.intervals if interval.task]
    assert len(tasks) == (3 if recompute else 2) * num_stages * num_microbatches


def test_no_stage_does_two_things_at_once():
    for schedule in (one_f_one_b(4, 8), lower(one_f_one_b(4, 8)), lower(gpipe(4, 8))):
        intervals = simulate(schedule).intervals
        pairs = [(a, b) for a, b in zip(intervals, intervals[1:]) if a.stage == b.stage]
        assert len(pairs) > 40
        assert all(before.stop <= after.start for before, after in pairs)


def test_explicit_recompute_and_split_backward_take_their_time():
    rows = ["F0 F1 R0 B0 R1 B1", "F0 B0 F1 B1"]
    # Stage 1 keeps its residuals; if it did not, each of its B would begin with a recomputation.
    early = parse("early", rows, 2)
    assert simulate(dataclasses.replace(early, keeps=(1,)), recompute=1.0).makespan == 9
    assert simulate(early, recompute=1.0).makespan == 11
    rows = ["F0 F1 Bi0 W0 Bi1 W1", "F0 Bi0 F1 Bi1 W0 W1"]
    assert simulate(parse("split", rows, 2)).makespan == 7


def test_a_chunk_follows_the_previous_chunk_of_the_last_stage():
    rows = ["F0 F0.1 B0.1 B0", "F0 F0.1 B0.1 B0"]
    timeline = simulate(parse("two chunks", rows, 1, num_chunks=2))
    # A cost is that of all chunks of a stage.
    assert timeline.makespan == 4 * 0.5 + 4 * 1
    assert str(timeline) == "two chunks: P=2, M=1, makespan 6, bubble 50.0 %"


def test_a_schedule_that_cannot_go_on_is_an_error():
    with pytest.raises(ScheduleError, match="stage 0 for B0, stage 1 for B0"):
        simulate(parse("stuck", ["B0 F0", "B0 F0"], 1))


@pytest.mark.parametrize("cost", [{"forward": 0.0}, {"backward": -1.0}, {"recompute": -1.0}])
def test_a_cost_that_is_not_positive_is_an_error(cost):
    with pytest.raises(ScheduleError, match="cost"):
        simulate(gpipe(1, 1), **cost)


def test_collectives_are_exposed_or_run_behind_computation():
    schedule = one_f_one_b(4, 8, eager=True)
    merged, paired = lower(schedule), lower(schedule, "paired")
    # F alone: 1 + 1; F and B: 3 + 2; B alone: 2 + 1. Paired, the collectives of one hide behind the other's computation.
    assert simulate(merged, tensor=1.0).makespan == 3 * 2 + 8 * 5 + 3 * 3
    assert simulate(paired, tensor=1.0).makespan == 4 * 2 + 7 * 3 + 4 * 3
    assert simulate(paired, tensor=4.0).makespan == 4 * 5 + 7 * 8 + 4 * 6
    assert simulate(merged, tensor=1.0, hidden=1.0).makespan == simulate(merged).makespan
    # A recomputation has as many collectives as the forward.
    assert simulate(merged, tensor=1.0, recompute=1.0).makespan == 3 * 2 + 8 * 7 + 3 * 5
    free = one_f_one_b(4, 8)
    assert simulate(free, tensor=0.5).makespan == simulate(free, forward=1.5, backward=2.5).makespan


def test_a_hop_takes_its_latency_and_its_bytes():
    schedule = one_f_one_b(3, 1)
    assert simulate(schedule, hop=0.5, boundary_bytes=8.0, bandwidth=4.0).makespan == 3 * 3 + 4 * 2.5
    # In ticks everybody waits for the hop.
    assert simulate(lower(schedule), hop=0.5).makespan == 9 + 0.5 * (lower(schedule).num_ticks - 1)


def test_what_is_held_over_time():
    timeline = simulate(one_f_one_b(2, 2))
    assert timeline.held(0) == [(0.0, 0), (0.0, 1), (1.0, 2), (6.0, 1), (9.0, 0)]
    assert timeline.in_flight() == [2, 1]
    assert timeline.peak_bytes(10.0) == [20.0, 10.0]
    assert timeline.peak_bytes([1.0, 5.0]) == [2.0, 5.0]
    split = simulate(zero_bubble_h1(4, 8))
    assert split.in_flight() == [4, 4, 4, 4]


def test_switched_ticks_of_equal_tasks_take_as_long_as_free_running_stages():
    for make in (one_f_one_b, shifted_critical_path, zero_bubble_h1, lambda p, m: zero_bubble_v(p, m, recompute=True)):
        schedule = divided(make(4, 8))
        assert (
            simulate(lower(schedule, "switched"), recompute=1.0).makespan == simulate(schedule, recompute=1.0).makespan
        )


def test_stage_costs_in_ticks_are_those_of_the_slowest():
    table = lower(one_f_one_b(2, 4, eager=True))
    assert simulate(table, forward=[1.0, 1.5], backward=[2.0, 2.0]).makespan == 1 + 4 * 3.5 + 2


def test_what_is_held_does_not_depend_on_rounding_or_on_how_other_stages_divide_b():
    table = lower(one_f_one_b(4, 8, eager=True))
    for forward, backward in ((0.1, 0.2), (0.3, 0.6), (1 / 3, 0.7)):
        assert simulate(table, forward=forward, backward=backward).in_flight() == table.in_flight()
    mixed = parse("mixed", ["F0 F1 B0 B1", "F0 Bi0 W0 F1 Bi1 W1"], 2)
    assert simulate(mixed).in_flight() == [2, 1]


def test_costs_may_be_numpy_s_and_their_sum_must_be_finite():
    assert simulate(gpipe(2, 2), forward=np.int64(1), backward=np.float32(2)).makespan == 9
    with pytest.raises(ScheduleError, match="the costs add up to inf"):
        simulate(gpipe(2, 2), forward=1e308, backward=1e308)
