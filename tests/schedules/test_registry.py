"""Schedules by name, and the user's own: legal, or one clear error when they are made."""

from dataclasses import replace

import pytest

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.greedy import Times
from merak_jax.schedules.interleaved import interleaved
from merak_jax.schedules.registry import SCHEDULES, make_schedule, make_table, register_schedule
from merak_jax.schedules.search import search
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_table import TickTable
from merak_jax.schedules.ticks import FORMS, check


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_makes_a_table_in_every_form(name, form):
    for recompute in (True, False):
        table = make_table(name, form, None, 4, 8, recompute=recompute)
        check(table)
        assert table.form == (SCHEDULES[name].form if form == "auto" else form)
        if not recompute:
            assert not any(task.kind.value == "R" for stage in range(4) for task in table.order(stage))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_has_nothing_to_schedule(name):
    table = make_table(name, "auto", None, 1, 4)
    assert (table.num_chunks, table.num_ticks) == (1, 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("zigzag", 4, 8), "'zigzag' is unknown; known: 1f1b, early_recompute"),
        (("1f1b", 4, 8, 2), "has one chunk per stage, got num_chunks=2"),
        (("zb_v", 4, 8, 3), "has two chunks per stage, got num_chunks=3"),
        (("interleaved", 4, 8, 0), "needs at least 1 of its chunks, got 0"),
        (("shifted_critical_path", 4, 3), "needs at least 4 microbatches here, got 3"),
    ],
)
def test_what_a_schedule_does_not_allow_is_an_error(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*arguments)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("form", ["free", *FORMS])
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (4, 6), (4, 8)])
def test_search_by_name_is_never_worse_than_another_name(stages, microbatches, form, recompute):
    def makespan(name):
        times, again = Times(recompute=recompute), recompute > 0
        if form == "free":
            made = make_schedule(name, stages, microbatches, recompute=again, times=times)
        else:
            made = make_table(name, form, None, stages, microbatches, recompute=again, times=times)
        return simulate(made, recompute=recompute).makespan

    found = {name: makespan(name) for name in SCHEDULES}
    assert found["search"] <= min(found.values()) + 1e-9


def test_search_looks_for_the_times_it_is_given():
    """With a long hop more microbatches in flight pay."""
    found = make_schedule("search", 4, 8, times=Times(recompute=1.0, hop=2.0))
    usual = make_schedule("search", 4, 8)
    assert simulate(found, recompute=1.0, hop=2.0).makespan < simulate(usual, recompute=1.0, hop=2.0).makespan
    assert found.name.startswith("search")


@pytest.fixture
def own():
    """Registers a schedule and forgets it afterwards."""

    def register(tasks, **options):
        register_schedule("own", tasks, **options)
        return "own"

    yield register
    SCHEDULES.pop("own", None)


def test_an_own_schedule_is_known_by_its_name(own):
    name = own(lambda p, m: ["F0 F1 R0 B0 B1", ["F0", "Bi0", "W0", "F1", "Bi1", "W1"]], form="switched")
    table = make_table(name, "auto", None, 2, 2)
    check(table)
    assert isinstance(table, TickTable) and table.form == "switched"
    assert str(make_schedule(name, 2, 2)).splitlines()[0] == "s0 f0 F1 R0 B0 B1"


@pytest.mark.parametrize(
    "rows, message",
    [
        (["F0 F1 B0", "F0 B0 F1 B1"], "stage 0: B1 occurs 0 times"),
        (["B0 F0 F1 B1", "F0 B0 F1 B1"], "stage 0: B0 comes before F0"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "never ends: .*B0 of stage 0 waits for B0 of stage 1"),
        (["F0 F1 B0 B1"], "has 2 stages but 1 orders"),
        (["F0 F1 B0 B1", "F0 F1 B0 B2"], "stage 1: task B2 .*outside the schedule's 2 microbatches"),
        (["F0 F1 B0 B1", "F0 Fx B0 B1"], "stage 1: 'Fx' is no task"),
        (["F0 F1 Bi0 B0 B1", "F0 F1 B0 B1"], "stage 0: B0 occurs 1 times, Bi0 1, W0 0"),
    ],
)
def test_an_own_schedule_that_cannot_run_is_one_clear_error(own, rows, message):
    with pytest.raises(ScheduleError, match=message):
        make_table(own(lambda p, m: rows), "auto", None, 2, 2)


@pytest.mark.parametrize(
    "tasks, message",
    [
        (lambda p, m: "F0 F1 B0 B1", "its function returned 'F0 F1 B0 B1'; return one row of tasks per stage"),
        (lambda p, m: ["F0 F01 B0 B1"] * 2, "stage 0: 'F01' is no task"),
        (lambda p, m: 1 // 0, "its function failed with ZeroDivisionError"),
        (lambda p: [], "its function failed with TypeError: .*positional argument"),
    ],
)
def test_an_own_schedule_that_is_none_is_one_clear_error(own, tasks, message):
    with pytest.raises(ScheduleError, match=f"schedule 'own'.*{message}"):
        make_table(own(tasks), "auto", None, 2, 2)


def test_names_of_built_in_schedules_and_forms_are_protected():
    with pytest.raises(ScheduleError, match="'1f1b' is built in"):
        register_schedule("1f1b", lambda p, m: [])
    for name in ("auto", "forward", "", 3, ["a"], None):
        with pytest.raises(ScheduleError, match="a schedule's name must be text, and none of 'auto', 'forward'; got"):
            register_schedule(name, lambda p, m: [])
    with pytest.raises(ScheduleError, match="form 'spiral' is unknown"):
        register_schedule("own", lambda p, m: [], form="spiral")


def test_an_own_schedule_may_be_a_schedule_with_chunks_and_stages_that_keep_their_residuals(own):
    name = own(lambda p, m: replace(interleaved(p, m, 2), keeps=(p - 1,)), form="merged")
    made = make_schedule(name, 4, 8)
    assert (made.name, made.num_chunks, made.keeps) == ("own", 2, (3,))
    check(make_table(name, "auto", None, 4, 8))
    with pytest.raises(ScheduleError, match="asked for 4 stages and 8 microbatches and made a Schedule of 2 and 2"):
        make_schedule(own(lambda p, m: gpipe(2, 2)), 4, 8)


@pytest.mark.parametrize(
    "made, message",
    [
        (None, "its function returned None; return one row of tasks per stage"),
        ([0, 1], "returned \\[0, 1\\]; return one row"),
        (["F0 F1", "F0 F1"], "'own' has no B"),
        (["f0 B0 F1 B1", "F0 B0 F1 B1"], "stage 0: f0 is an F with an R later, and there is no R"),
        ([["F0", 3], ["F0"]], "stage 0: 3 is no task"),
        (["F0 R0 R0 B0 F1 B1", "F0 B0 F1 B1"], "R0 occurs 2 times"),
        ([[Task(TaskKind.F, 0.0)], []], "is no Task with a microbatch and a chunk, both integers"),
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", [True, False])
def test_what_an_own_function_may_not_return(own, made, message, recompute):
    name = own(lambda p, m: made)
    with pytest.raises(ScheduleError, match=message):
        make_schedule(name, 2, 2, recompute=recompute)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"form": "nonsense"}, "form 'nonsense' is unknown; known: 'merged', 'paired', 'switched'"),
        ({"form": 3}, "form 3 is unknown"),
        ({"form": "free"}, "form 'free' has no ticks"),
        ({"num_chunks": 2.0}, "needs a number of chunks, got 2.0"),
        ({"num_chunks": True}, "needs a number of chunks, got True"),
        ({"num_chunks": "2"}, "needs a number of chunks, got '2'"),
        ({"num_stages": 1, "form": "nonsense"}, "form 'nonsense' is unknown"),
        ({"name": ["1f1b"]}, "schedule \\['1f1b'\\] is unknown"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_one_error(options, message):
    arguments = {"name": "interleaved", "form": "auto", "num_chunks": None, "num_stages": 2, "num_microbatches": 4}
    with pytest.raises(ScheduleError, match=message):
        make_table(**{**arguments, **options})


def test_stages_that_keep_their_residuals_are_stages():
    with pytest.raises(ScheduleError, match="keeps the residuals of stage 7; its stages are 0 to 1"):
        replace(gpipe(2, 2), keeps=(7,))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": [2]}, "memory has 1 values, but there are 2 stages"),
        ({"times": Times(forward=[1.0])}, "forward has 1 values, but there are 2 stages"),
        ({"num_chunks": 0}, "needs at least 1 of its chunks"),
    ],
)
def test_a_search_with_the_wrong_number_of_values_is_an_error(options, message):
    with pytest.raises(ScheduleError, match=message):
        search(2, 4, **options)
