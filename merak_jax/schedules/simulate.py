"""simulate: when each task of a schedule or tick table runs, given what a task costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from merak_jax.schedules.greedy import on_stages
from merak_jax.schedules.needs import Needs
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_table import TickTable

F, R, B, BI, W = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.W


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
      critical: intervals without a gap from the start to the end, each of which waits for the one before it: shorten any of
        them and the step may be shorter.
    """

    name: str
    num_stages: int
    num_microbatches: int
    makespan: float
    intervals: tuple[Interval, ...]
    critical: tuple[Interval, ...] = ()

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time, 0 to 1, in which they do no task."""
        busy = sum(interval.stop - interval.start for interval in self.intervals if interval.task)
        return 1.0 - busy / (self.num_stages * self.makespan)

    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of task that occur."""
        present = {interval.task.kind for interval in self.intervals if interval.task}
        return tuple(kind for kind in TaskKind if kind in present)

    def held(self, stage: int) -> list[tuple[float, int]]:
        """`(time, microbatches in flight from then on)` of a stage, at each change: up when F starts, down when B (W) ends."""
        changes: list[tuple[float, int]] = []
        own = [i for i in self.intervals if i.task and i.stage == stage]
        split = {(i.task.microbatch, i.task.chunk) for i in own if i.task and i.task.kind is W}
        for interval in own:
            task = interval.task
            assert task is not None
            if task.kind is F:
                changes.append((interval.start, 1))
            elif task.kind is W or (task.kind is B and (task.microbatch, task.chunk) not in split):
                changes.append((interval.stop, -1))
        found, now = [(0.0, 0)], 0
        for time, change in sorted(changes):
            # What ends where another begins, but for rounding, ends first.
            same = len(found) > 1 and time - found[-1][0] <= 1e-9 * self.makespan
            now += change
            found.append((found.pop()[0] if same else time, now))
        return found

    def in_flight(self) -> list[int]:
        """`[stages]` the most microbatches (times chunks) in flight."""
        return [max(count for _, count in self.held(stage)) for stage in range(self.num_stages)]

    def peak_bytes(self, per_microbatch: float | Sequence[float]) -> list[float]:
        """`[stages]` the most bytes of activations, given what one microbatch in flight (of one chunk) holds on a stage."""
        each = on_stages(per_microbatch, self.num_stages)
        return [size * count for size, count in zip(each, self.in_flight(), strict=True)]

    def busy(self) -> list[float]:
        """`[stages]` the time in which a stage does tasks."""
        total = [0.0] * self.num_stages
        for interval in self.intervals:
            if interval.task:
                total[interval.stage] += interval.stop - interval.start
        return total

    def __str__(self) -> str:
        return (
            f"{self.name}: P={self.num_stages}, M={self.num_microbatches}, makespan {self.makespan:g}, "
            f"bubble {100 * self.bubble_share:.1f} %"
        )


Cost = float | Sequence[float]


def simulate(
    schedule: Schedule | TickTable,
    *,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    recompute: Cost = 0.0,
    early_recompute: Cost | None = None,
    weight_gradient: Cost | None = None,
    tensor: Cost = 0.0,
    hidden: float = 0.0,
    hop: float = 0.0,
    boundary_bytes: float = 0.0,
    bandwidth: float = float("inf"),
) -> Timeline:
    """When each task runs.

    A Schedule runs as on a machine where every stage goes its own pace: a task starts when its stage is free and its input is
    there, a hop after the stage that made it is done. A TickTable runs as the program does: every stage waits for the slowest
    one of the tick, then for the hop.

    Args:
      schedule: what to run.
      forward: time of one F of one stage (with several chunks, of all of them together), or one for each stage.
      backward: time of one B, which is Bi and W.
      weight_gradient: time of W alone; half of B if not given.
      recompute: time of the R that a B (Bi) without one of its own begins with. Stages that keep their residuals have none.
      early_recompute: time of an R that is a task of its own; `recompute` if not given.
      tensor: time of the tensor-parallel collectives of one F; a B (Bi) has as many, and an R.
      hidden: share of that time, 0 to 1, that runs behind the same task's computation. In paired ticks with F and B the
        collectives of one run behind the other's computation as well: such a tick takes the longer of the two sums.
      hop: time from the end of a task to its result on the next stage.
      boundary_bytes, bandwidth: bytes of a hop, and bytes per unit of time, which come on top of `hop`.

    Raises:
      ScheduleError: a cost that is not above 0 (recompute, tensor, hop and the parts of B: below 0) or not finite, another
        number of costs than stages, or stages that wait for each other.
    """
    _require_costs(
        forward=forward,
        backward=backward,
        recompute=recompute,
        early_recompute=early_recompute,
        weight_gradient=weight_gradient,
        tensor=tensor,
        hidden=hidden,
        hop=hop,
        boundary_bytes=boundary_bytes,
    )
    if not bandwidth > 0:
        raise ScheduleError(f"cost bandwidth must be above 0, got {bandwidth}")
    given = {"forward": forward, "backward": backward, "recompute": recompute, "tensor": tensor}
    times = {name: _per_stage(schedule, name, value) for name, value in given.items()}
    weights = (
        [b / 2 for b in times["backward"]]
        if weight_gradient is None
        else _per_stage(schedule, "weight_gradient", weight_gradient)
    )
    again = times["recompute"] if early_recompute is None else _per_stage(schedule, "early_recompute", early_recompute)
    inputs = [b - w for b, w in zip(times["backward"], weights)]
    if min(inputs) < 0:
        raise ScheduleError(
            f"cost weight_gradient={weight_gradient} is a part of backward={backward} and cannot be more"
        )
    costs = {F: times["forward"], R: again, B: times["backward"], BI: inputs, W: weights}
    exposed = {
        kind: [t * (1 - hidden) if kind is not W and cost else 0.0 for t, cost in zip(times["tensor"], costs[kind])]
        for kind in TaskKind
    }
    inside = [r + t * (1 - hidden) if r else 0.0 for r, t in zip(times["recompute"], times["tensor"])]
    hop += boundary_bytes / bandwidth
    if isinstance(schedule, TickTable):
        timeline = _ticks(schedule, costs, exposed, inside, hop)
    else:
        timeline = _free_running(schedule, _sums(costs, exposed), inside, hop)
    if not math.isfinite(timeline.makespan):
        raise ScheduleError(f"the costs add up to {timeline.makespan}; give them in a larger unit")
    return timeline


Costs = dict[TaskKind, list[float]]


def _require_costs(**costs: Cost | None) -> None:
    for name, cost in costs.items():
        for value in [] if cost is None else on_stages(cost, 1):
            positive, most = name in ("forward", "backward"), 1 if name == "hidden" else float("inf")
            if not math.isfinite(value) or value < 0 or (positive and value == 0) or value > most:
                least = "above 0" if positive else "0 to 1" if name == "hidden" else "at least 0"
                raise ScheduleError(f"cost {name} must be a number {least}, got {value}")


def _sums(costs: Costs, more: Costs) -> Costs:
    return {kind: [a + b for a, b in zip(costs[kind], more[kind])] for kind in costs}


def _per_stage(schedule: Schedule | TickTable, name: str, value: Cost) -> list[float]:
    values = on_stages(value, schedule.num_stages)
    if len(values) != schedule.num_stages:
        raise ScheduleError(
            f"{name} has {len(values)} costs, but schedule {schedule.name!r} has {schedule.num_stages} stages"
        )
    return [v / schedule.num_chunks for v in values]


def _ticks(table: TickTable, costs: Costs, exposed: Costs, inside: list[float], hop: float) -> Timeline:
    lengths = table.tick_times(_sums(costs, exposed), inside)
    if table.form == "paired":
        both = ((table.forward >= 0) & (table.backward >= 0)).any(axis=1)
        nothing = {kind: [0.0] * table.num_stages for kind in costs}
        communicates = [bool(r) * t for r, t in zip(inside, exposed[F])]
        computes = [r - t for r, t in zip(inside, communicates)]
        behind = np.maximum(table.tick_times(costs, computes), table.tick_times(_sums(nothing, exposed), communicates))
        lengths = np.where(both, behind, lengths)
    with_both = _sums(costs, exposed)
    intervals: list[Interval] = []
    critical: list[Interval] = []
    start = 0.0
    for tick, length in enumerate(lengths.tolist()):
        stop = start + length
        longest: list[Interval] = []
        for stage in range(table.num_stages):
            tasks = [(task, with_both[task.kind][stage]) for task in table.tasks(tick, stage)]
            if table.recomputes_inside(tick, stage) and inside[stage]:
                at = next(n for n, (task, _) in enumerate(tasks) if task.kind in (B, BI))
                tasks.insert(at, (Task(R, tasks[at][0].microbatch, tasks[at][0].chunk), inside[stage]))
            total = sum(time for _, time in tasks)
            # Where collectives run behind another task's computation, the tasks together are shorter than their sum.
            scale = min(1.0, length / total) if total else 1.0
            now, own = start, []
            for task, time in tasks:
                end = now + time * scale
                own.append(Interval(stage, now, end, task))
                now = end
            intervals += own
            if now < stop - 1e-9 * length:
                intervals.append(Interval(stage, now, stop, None))
            elif own and not longest:
                longest = own
        critical += longest
        start = stop + hop
    makespan = start - hop if len(lengths) else 0.0
    intervals.sort(key=lambda interval: (interval.stage, interval.start))
    return Timeline(table.name, table.num_stages, table.num_microbatches, makespan, tuple(intervals), tuple(critical))


def _free_running(schedule: Schedule, costs: Costs, inside: list[float], hop: float) -> Timeline:
    needs = Needs(schedule)
    stops: dict[tuple[int, Task], float] = {}
    position, free = [0] * schedule.num_stages, [0.0] * schedule.num_stages
    intervals: list[Interval] = []
    made_by: dict[tuple[int, Task], int] = {}
    cause: list[int | None] = []
    latest: list[int | None] = [None] * schedule.num_stages

    def add(stage: int, start: float, stop: float, task: Task, after: int | None) -> int:
        intervals.append(Interval(stage, start, stop, task))
        cause.append(after)
        return len(intervals) - 1

    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(schedule.orders):
            while position[stage] < len(order):
                task = order[position[stage]]
                inputs = needs.of(stage, task)
                if any(need not in stops for need in inputs):
                    break
                start, number = free[stage], latest[stage]
                for need in inputs:
                    ready = stops[need] + (hop if need[0] != stage else 0.0)
                    if ready > start:
                        start, number = ready, made_by[need]
                if needs.recomputes_inside(stage, task) and inside[stage]:
                    again = Task(R, task.microbatch, task.chunk)
                    number = add(stage, start, start + inside[stage], again, number)
                    start += inside[stage]
                stop = start + costs[task.kind][stage]
                number = add(stage, start, stop, task, number)
                # Whoever waits for B waits for its input gradient, whether or not W comes later.
                written = Task(B, task.microbatch, task.chunk) if task.kind is BI else task
                stops[stage, written] = free[stage] = stop
                made_by[stage, written] = latest[stage] = number
                position[stage] += 1
                progress = True
    waiting = [
        f"stage {stage} for {order[position[stage]]}"
        for stage, order in enumerate(schedule.orders)
        if position[stage] < len(order)
    ]
    if waiting:
        raise ScheduleError(f"schedule {schedule.name!r}: stages wait for each other, " + ", ".join(waiting))
    trail = []
    at = latest[free.index(max(free))]
    while at is not None:
        trail.append(intervals[at])
        at = cause[at]
    critical = tuple(reversed(trail))
    intervals.sort(key=lambda interval: (interval.stage, interval.start))
    return Timeline(
        schedule.name, schedule.num_stages, schedule.num_microbatches, max(free), tuple(intervals), critical
    )
