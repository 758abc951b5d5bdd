"""simulate: when each task of a schedule or tick table runs, given what a task costs."""

from dataclasses import dataclass

from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_table import NONE, TickTable


@dataclass(frozen=True, slots=True)
class Interval:
    """A task, or the idle part of a tick (`task` None), on one stage from `start` to `stop`."""

    stage: int
    start: float
    stop: float
    task: Task | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The intervals of one step, sorted by start on each stage; gaps are idle. Times have the costs' unit.

    Attributes:
      name: the schedule's name.
      num_stages: P.
      num_microbatches: M.
      makespan: when the last stage stops.
      intervals: of all stages.
    """

    name: str
    num_stages: int
    num_microbatches: int
    makespan: float
    intervals: tuple[Interval, ...]

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time, 0 to 1, in which they do no task."""
        busy = sum(interval.stop - interval.start for interval in self.intervals if interval.task)
        return 1.0 - busy / (self.num_stages * self.makespan)

    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of task that occur."""
        present = {interval.task.kind for interval in self.intervals if interval.task}
        return tuple(kind for kind in TaskKind if kind in present)

    def __str__(self) -> str:
        return (
            f"{self.name}: P={self.num_stages}, M={self.num_microbatches}, makespan {self.makespan:g}, "
            f"bubble {100 * self.bubble_share:.1f} %"
        )


def simulate(
    schedule: Schedule | TickTable, *, forward: float = 1.0, backward: float = 2.0, recompute: float = 0.0
) -> Timeline:
    """When each task runs.

    A Schedule runs as on a machine where every stage goes its own pace and a hop costs nothing: a task starts
    when its stage is free and its input is there. A TickTable runs as the program does: a tick lasts as long
    as its phase's kinds together, on every stage, and a stage without a task idles.

    Args:
      schedule: what to run.
      forward: time of one F of one stage (of one chunk, where there are several).
      backward: time of one B; Bi and W take half of it each.
      recompute: time of one R, or of the R that each B of a TickTable begins with.

    Raises:
      ScheduleError: a cost that is not above 0 (recompute: below 0), or stages that wait for each other.
    """
    if forward <= 0 or backward <= 0 or recompute < 0:
        raise ScheduleError(
            f"costs must be above 0 (recompute at least 0), got forward={forward}, backward={backward}, "
            f"recompute={recompute}"
        )
    costs = {
        TaskKind.F: forward,
        TaskKind.R: recompute,
        TaskKind.B: backward,
        TaskKind.BI: backward / 2,
        TaskKind.W: backward / 2,
    }
    if isinstance(schedule, TickTable):
        return _ticks(schedule, costs)
    return _free_running(schedule, costs)


def _ticks(table: TickTable, costs: dict[TaskKind, float]) -> Timeline:
    intervals: list[Interval] = []
    now = 0.0
    for phase in table.phases:
        work = [(TaskKind.F, table.forward)] if phase.forward else []
        if phase.backward:
            work += [(TaskKind.R, table.backward)] if costs[TaskKind.R] else []
            work += [(TaskKind.B, table.backward)]
        for tick in range(phase.start, phase.stop):
            for kind, microbatches in work:
                stop = now + costs[kind]
                for stage, microbatch in enumerate(microbatches[tick].tolist()):
                    task = Task(kind, microbatch) if microbatch != NONE else None
                    intervals.append(Interval(stage, now, stop, task))
                now = stop
    intervals.sort(key=lambda interval: (interval.stage, interval.start))
    return Timeline(table.name, table.num_stages, table.num_microbatches, now, tuple(intervals))


def _free_running(schedule: Schedule, costs: dict[TaskKind, float]) -> Timeline:
    stops: dict[tuple[int, Task], float] = {}
    position, free = [0] * schedule.num_stages, [0.0] * schedule.num_stages
    intervals: list[Interval] = []
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(schedule.orders):
            while position[stage] < len(order):
                task = order[position[stage]]
                needs = _needs(schedule, stage, task)
                if any(need not in stops for need in needs):
                    break
                start = max([free[stage], *(stops[need] for need in needs)])
                stop = start + costs[task.kind]
                intervals.append(Interval(stage, start, stop, task))
                # Whoever waits for B waits for its input gradient, whether or not W comes later.
                written = Task(TaskKind.B, task.microbatch, task.chunk) if task.kind is TaskKind.BI else task
                stops[stage, written] = free[stage] = stop
                position[stage] += 1
                progress = True
    waiting = [
        f"stage {stage} for {order[position[stage]]}"
        for stage, order in enumerate(schedule.orders)
        if position[stage] < len(order)
    ]
    if waiting:
        raise ScheduleError(f"schedule {schedule.name!r}: stages wait for each other, " + ", ".join(waiting))
    intervals.sort(key=lambda interval: (interval.stage, interval.start))
    return Timeline(schedule.name, schedule.num_stages, schedule.num_microbatches, max(free), tuple(intervals))


def _needs(schedule: Schedule, stage: int, task: Task) -> list[tuple[int, Task]]:
    """The tasks, with their stages, whose results `task` reads."""
    last_stage, last_chunk = schedule.num_stages - 1, schedule.num_chunks - 1
    if task.kind is TaskKind.F:
        if stage > 0:
            return [(stage - 1, task)]
        return [(last_stage, Task(TaskKind.F, task.microbatch, task.chunk - 1))] if task.chunk > 0 else []
    own = (stage, Task(TaskKind.F, task.microbatch, task.chunk))
    if task.kind is TaskKind.R:
        return [own]
    backward = Task(TaskKind.B, task.microbatch, task.chunk)
    if task.kind is TaskKind.W:
        return [(stage, backward)]
    if stage < last_stage:
        return [own, (stage + 1, backward)]
    if task.chunk < last_chunk:
        return [own, (0, Task(TaskKind.B, task.microbatch, task.chunk + 1))]
    return [own]
