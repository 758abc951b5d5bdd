"""Simulated times of schedules and tick tables agree with the closed forms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.ticks import lower


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
    assert simulate(parse("early", rows, 2), recompute=1.0).makespan == 9
    rows = ["F0 F1 Bi0 W0 Bi1 W1", "F0 Bi0 F1 Bi1 W0 W1"]
    assert simulate(parse("split", rows, 2)).makespan == 7


def test_a_chunk_follows_the_previous_chunk_of_the_last_stage():
    rows = ["F0 F0.1 B0.1 B0", "F0 F0.1 B0.1 B0"]
    timeline = simulate(parse("two chunks", rows, 1, num_chunks=2))
    assert timeline.makespan == 4 * 1 + 4 * 2
    assert str(timeline) == "two chunks: P=2, M=1, makespan 12, bubble 50.0 %"


def test_a_schedule_that_cannot_go_on_is_an_error():
    with pytest.raises(ScheduleError, match="stage 0 for B0, stage 1 for B0"):
        simulate(parse("stuck", ["B0 F0", "B0 F0"], 1))


@pytest.mark.parametrize("cost", [{"forward": 0.0}, {"backward": -1.0}, {"recompute": -1.0}])
def test_a_cost_that_is_not_positive_is_an_error(cost):
    with pytest.raises(ScheduleError, match="costs must be above 0"):
        simulate(gpipe(1, 1), **cost)
