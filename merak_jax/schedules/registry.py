"""The schedules by name, the user's own among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.greedy import Times
from merak_jax.schedules.interleaved import interleaved
from merak_jax.schedules.merak import early_recompute, last_no_recompute, shifted_critical_path
from merak_jax.schedules.needs import without_recompute
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.order_check import check_order
from merak_jax.schedules.search import search
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind, require_counts
from merak_jax.schedules.tick_table import TickTable
from merak_jax.schedules.ticks import FORMS, lower
from merak_jax.schedules.zero_bubble import zero_bubble_h1, zero_bubble_v

Tasks = Sequence[Iterable[Task | str] | str] | Schedule


class Use(NamedTuple):
    """What a schedule is for: whether stages recompute, the times of the tasks, and the form it will run in."""

    recompute: bool
    times: Times
    form: str


@dataclass(frozen=True)
class Entry:
    """How a schedule is made, and the form of ticks that suits it.

    `make(P, M, V, use)`; `chunks`: V if none is asked for, 0 where only 1 is possible.
    """

    make: Callable[[int, int, int, Use], Schedule]
    form: str
    chunks: int = 0


def _two_chunks(num_chunks: int, schedule: Schedule) -> Schedule:
    if num_chunks != 2:
        raise ScheduleError(f"schedule {schedule.name!r} has two chunks per stage, got num_chunks={num_chunks}")
    return schedule


def _found(num_stages: int, num_microbatches: int, num_chunks: int, use: Use) -> Schedule:
    """What `search` finds with no more in flight on a stage than two microbatches for each stage, as no named one but gpipe has."""
    require_counts("search", num_stages, num_microbatches, num_chunks)
    memory = [2 * num_stages * num_chunks] * num_stages
    found = search(num_stages, num_microbatches, use.times, memory=memory, num_chunks=num_chunks, form=use.form)
    return found if found.name == "search" else replace(found, name=f"search ({found.name})")


SCHEDULES: dict[str, Entry] = {
    "1f1b": Entry(lambda p, m, v, use: one_f_one_b(p, m), "merged"),
    "gpipe": Entry(lambda p, m, v, use: gpipe(p, m), "merged"),
    "early_recompute": Entry(lambda p, m, v, use: early_recompute(p, m), "switched"),
    "last_no_recompute": Entry(lambda p, m, v, use: last_no_recompute(p, m), "switched"),
    "shifted_critical_path": Entry(lambda p, m, v, use: shifted_critical_path(p, m), "switched"),
    "interleaved": Entry(lambda p, m, v, use: interleaved(p, m, v), "merged", 2),
    "zb_h1": Entry(lambda p, m, v, use: zero_bubble_h1(p, m), "switched"),
    "zb_v": Entry(lambda p, m, v, use: _two_chunks(v, zero_bubble_v(p, m, recompute=use.recompute)), "switched", 2),
    "search": Entry(_found, "switched", 2),
}


def register_schedule(name: str, tasks: Callable[[int, int], Tasks], *, form: str = "merged") -> None:
    """Make a schedule of your own known as `parallelize(schedule=name)`.

    Args:
      name: how it is called; an own one of that name is replaced.
      tasks: `tasks(num_stages, num_microbatches)` returns for each stage its tasks in order: `Task`s, words like `F0`, `R0`,
        `B0`, `Bi0`, `W0`, or one string of such words. Or it returns a `Schedule`, which may have several chunks per stage and
        stages that keep their residuals.
      form: the form of ticks it runs in if none is asked for.

    Raises:
      ScheduleError: a name that is taken or no text, or an unknown form. What `tasks` returns is checked when it is used.
    """
    if not isinstance(name, str) or not name or name in _RESERVED:
        raise ScheduleError(
            f"a schedule's name must be text, and none of {', '.join(map(repr, _RESERVED))}; got {name!r}"
        )
    if name in _BUILT_IN:
        raise ScheduleError(f"schedule {name!r} is built in; choose another name")
    if not callable(tasks):
        raise ScheduleError(
            f"schedule {name!r}: tasks must be a function of stages and microbatches, got {tasks!r:.80}"
        )
    if form not in FORMS:
        raise ScheduleError(f"schedule {name!r}: form {form!r} is unknown; known: {', '.join(FORMS)}")

    def make(num_stages: int, num_microbatches: int, num_chunks: int, use: Use) -> Schedule:
        try:
            made = tasks(num_stages, num_microbatches)
        except Exception as error:
            raise ScheduleError(
                f"schedule {name!r}: its function failed with {type(error).__name__}: {error}"
            ) from error
        return _own(name, made, num_stages, num_microbatches)

    SCHEDULES[name] = Entry(make, form)


_BUILT_IN = frozenset(SCHEDULES)
# "auto" lets merak_jax choose, and a plan calls an evaluation "forward".
_RESERVED = ("auto", "forward")


def _own(name: str, made: Tasks, num_stages: int, num_microbatches: int) -> Schedule:
    """What a user's function returned, as a schedule."""
    if isinstance(made, Schedule):
        sizes = (made.num_stages, made.num_microbatches)
        if sizes != (num_stages, num_microbatches):
            raise ScheduleError(
                f"schedule {name!r}: its function was asked for {num_stages} stages and {num_microbatches} microbatches and made "
                f"a Schedule of {sizes[0]} and {sizes[1]}"
            )
        return replace(made, name=name)
    what = "one row of tasks per stage (Tasks, or words like F0), or a Schedule"
    try:
        rows = None if isinstance(made, str) else [o.split() if isinstance(o, str) else list(o) for o in made]
    except TypeError:
        rows = None
    if rows is None:
        raise ScheduleError(f"schedule {name!r}: its function returned {made!r:.80}; return {what}")
    orders = tuple(tuple(_task(name, stage, word) for word in row) for stage, row in enumerate(rows))
    schedule = Schedule(name, num_stages, num_microbatches, 1, orders)
    for stage, row in enumerate(rows):
        for word, task in zip(row, orders[stage]):
            if isinstance(word, str) and word[0] == "f" and Task(TaskKind.R, task.microbatch) not in orders[stage]:
                raise ScheduleError(
                    f"schedule {name!r}, stage {stage}: {word} is an F with an R later, and there is no R"
                )
    return schedule


def _task(name: str, stage: int, word: Task | str) -> Task:
    if isinstance(word, Task):
        return word
    found = re.fullmatch(r"(F|f|R|Bi|B|W)(0|[1-9][0-9]*)", word) if isinstance(word, str) else None
    if found is None:
        raise ScheduleError(
            f"schedule {name!r}, stage {stage}: {word!r} is no task; write one of F, R, B, Bi, W and a microbatch, as in F0"
        )
    return Task(TaskKind(found[1].replace("f", "F")), int(found[2]))


def choose(name: str, form: str = "auto", num_chunks: int | None = None) -> tuple[str, int]:
    """`(form, chunks per stage)` of a schedule: as asked for, "auto" and None being what suits it.

    Raises:
      ScheduleError: an unknown name or form, or chunks that it cannot have.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is unknown; known: {', '.join(sorted(SCHEDULES))}")
    entry = SCHEDULES[name]
    if form == "auto":
        form = entry.form
    if form not in ("free", *FORMS):
        raise ScheduleError(f"schedule {name!r}: form {form!r} is unknown; known: {', '.join(map(repr, FORMS))}")
    chunks = max(1, entry.chunks) if num_chunks is None else num_chunks
    require_counts(name, 1, 1, chunks)
    if chunks != 1 and not entry.chunks:
        raise ScheduleError(
            f"schedule {name!r} has one chunk per stage, got num_chunks={chunks}; interleaved has several"
        )
    return form, chunks


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    recompute: bool = True,
    times: Times | None = None,
    form: str = "free",
) -> Schedule:
    """A schedule by its name, checked. Without `recompute` all stages keep their residuals, and there is no R.

    `times` and `form` ("free": stages at their own pace) are what "search" looks for an order for.

    Raises:
      ScheduleError: an unknown name, counts that it does not allow, or (of the user's own) tasks that cannot run.
    """
    form, chunks = choose(name, form, num_chunks)
    use = Use(recompute, times or Times(recompute=float(recompute)), form)
    schedule = SCHEDULES[name].make(num_stages, num_microbatches, chunks, use)
    check_order(schedule)
    if all(task.kind is TaskKind.F for order in schedule.orders for task in order):
        raise ScheduleError(f"schedule {name!r} has no B: a train step goes back as well")
    return schedule if recompute else without_recompute(schedule)


def make_table(
    name: str,
    form: str,
    num_chunks: int | None,
    num_stages: int,
    num_microbatches: int,
    *,
    recompute: bool = True,
    times: Times | None = None,
) -> TickTable:
    """The tick table of a schedule by its name, in a form; "auto" is the form that suits it.

    One stage has nothing to schedule: it has an F and a B per tick, of one microbatch or, paired, of two.

    Raises:
      ScheduleError: as `make_schedule`, or an unknown form.
    """
    form, num_chunks = choose(name, form, num_chunks)
    if form == "free":
        raise ScheduleError(f"schedule {name!r}: form 'free' has no ticks; known: {', '.join(map(repr, FORMS))}")
    schedule = make_schedule(
        name, num_stages, num_microbatches, num_chunks, recompute=recompute, times=times, form=form
    )
    if num_stages == 1:
        return lower(one_f_one_b(1, num_microbatches), "paired" if form == "paired" else "merged")
    if name == "1f1b" and form != "switched":
        # A hop takes a tick: with strict 1F1B in flight the stages would wait every other tick.
        eager = one_f_one_b(num_stages, num_microbatches, eager=True)
        schedule = replace(eager, name=name, keeps=schedule.keeps)
    return lower(schedule, form)
