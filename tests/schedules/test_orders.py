"""Schedules as data: the golden orders, what they print, and the errors of a wrong one."""

import re

import pytest

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind

STRICT_1F1B = """\
s0 F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
s1 F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
s2 F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
s3 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""

EAGER_1F1B = """\
s0 F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7
s1 F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7
s2 F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
s3 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""


def test_strict_1f1b_has_the_published_order():
    assert str(one_f_one_b(4, 8)) == STRICT_1F1B


def test_eager_1f1b_warms_up_with_two_forwards_for_each_later_stage():
    assert str(one_f_one_b(4, 8, eager=True)) == EAGER_1F1B


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert str(gpipe(2, 3)) == "s0 F0 F1 F2 B0 B1 B2\ns1 F0 F1 F2 B0 B1 B2"


def test_fewer_microbatches_than_stages_shorten_the_warm_up():
    assert str(one_f_one_b(3, 1)) == "s0 F0 B0\ns1 F0 B0\ns2 F0 B0"
    assert str(one_f_one_b(4, 2)) == "s0 F0 F1 B0 B1\ns1 F0 F1 B0 B1\ns2 F0 F1 B0 B1\ns3 F0 B0 F1 B1"


def test_every_kind_of_task_prints_as_in_the_literature():
    tasks = [str(Task(kind, 3)) for kind in TaskKind]
    assert tasks == ["F3", "R3", "B3", "Bi3", "W3"]
    assert str(Task(TaskKind.F, 3, chunk=1)) == "F3.1"


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches", "what"), [(0, 4, "stages"), (4, 0, "microbatches")])
def test_a_count_below_one_is_an_error(make, stages, microbatches, what):
    with pytest.raises(ScheduleError, match=f"at least 1 of its {what}, got 0"):
        make(stages, microbatches)


@pytest.mark.parametrize("task", [Task(TaskKind.F, 2), Task(TaskKind.B, -1), Task(TaskKind.W, 0, chunk=1)])
def test_a_task_outside_the_counts_is_an_error_that_names_it(task):
    message = re.escape(f"stage 1: task {task} of chunk {task.chunk} is outside the schedule's 2 microbatches")
    with pytest.raises(ScheduleError, match=message):
        Schedule("mine", 2, 2, 1, ((), (task,)))


def test_a_missing_order_is_an_error():
    with pytest.raises(ScheduleError, match="3 stages but 1 orders"):
        Schedule("mine", 3, 1, 1, ((),))


def test_a_schedule_cannot_be_changed():
    with pytest.raises(AttributeError):
        gpipe(1, 1).name = "other"
