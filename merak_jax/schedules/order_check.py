"""check_order: a linter of schedules, and a replay with sends that wait for their receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from merak_jax.schedules.needs import Needs
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind

F, R, B, BI, W = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.W


def check_order(schedule: Schedule) -> None:
    """Raise unless every stage runs each of its tasks once, in an order that ends.

    Rules, for each stage, chunk and microbatch: exactly one F; exactly one B, or one Bi and one W; at most one R, and none on a
    stage that keeps its residuals; F before R before B (Bi) before W. Across stages: F follows the F that comes before it on the
    microbatch's path, B the B behind it, and no tasks wait for each other in a circle.

    Raises:
      ScheduleError: the first broken rule, with stage and task; a circle is shown in full.
    """
    check_tasks(schedule)
    _check_circles(schedule)


def check_tasks(schedule: Schedule) -> None:
    """The rules of `check_order` that concern each stage alone. A schedule without any backward needs one F of each only."""
    forward_only = {task.kind for order in schedule.orders for task in order} == {F}
    for stage, order in enumerate(schedule.orders):
        _check_stage(schedule, stage, order, forward_only)


def _check_stage(schedule: Schedule, stage: int, order: tuple[Task, ...], forward_only: bool) -> None:
    where = f"schedule {schedule.name!r}, stage {stage}"
    count = Counter(order)
    position = {task: n for n, task in enumerate(order)}
    for chunk in range(schedule.num_chunks):
        for m in range(schedule.num_microbatches):
            forward, again, whole, inputs, weights = (Task(kind, m, chunk) for kind in (F, R, B, BI, W))
            backward = (count[whole], count[inputs], count[weights])
            if count[forward] != 1:
                raise ScheduleError(
                    f"{where}: {forward} occurs {count[forward]} times; every stage runs it exactly once"
                )
            if backward not in (((0, 0, 0),) if forward_only else ((1, 0, 0), (0, 1, 1))):
                raise ScheduleError(
                    f"{where}: {whole} occurs {backward[0]} times, {inputs} {backward[1]}, {weights} {backward[2]}; every "
                    "stage runs one B, or one Bi and one W"
                )
            if count[again] > (stage not in schedule.keeps):
                kept = "; the stage keeps its residuals" if stage in schedule.keeps else ""
                raise ScheduleError(f"{where}: {again} occurs {count[again]} times{kept}")
            row = [t for t in (forward, again, whole, inputs, weights) if count[t]]
            for first, second in zip(row, row[1:]):
                if position[first] > position[second]:
                    raise ScheduleError(f"{where}: {second} comes before {first}")


def _check_circles(schedule: Schedule) -> None:
    """Tasks wait for the one before them on their stage and for what they read: the graph has no circle."""
    needs = Needs(schedule)
    place: dict[tuple[int, Task], int] = {}
    for stage, order in enumerate(schedule.orders):
        for n, task in enumerate(order):
            place[stage, task] = n
            if task.kind is BI:
                place[stage, Task(B, task.microbatch, task.chunk)] = n

    def waits_for(stage: int, n: int) -> Iterator[tuple[int, int]]:
        if n:
            yield stage, n - 1
        for s, task in needs.of(stage, schedule.orders[stage][n]):
            yield s, place[s, task]

    done: set[tuple[int, int]] = set()
    for start in ((s, len(order) - 1) for s, order in enumerate(schedule.orders) if order):
        trail: list[tuple[int, int]] = [start]
        on_trail, pending = {start}, [waits_for(*start)]
        while trail:
            node = next((x for x in pending[-1] if x not in done), None)
            if node is None:
                done.add(trail[-1])
                on_trail.discard(trail.pop())
                pending.pop()
            elif node in on_trail:
                circle = [*trail[trail.index(node) :], node]
                shown = " waits for ".join(f"{schedule.orders[s][n]} of stage {s}" for s, n in circle)
                raise ScheduleError(f"schedule {schedule.name!r} never ends: {shown}")
            else:
                trail.append(node)
                on_trail.add(node)
                pending.append(waits_for(*node))


def check_rendezvous(schedule: Schedule) -> None:
    """Raise if the stages hang where every send waits for its receiver.

    Between two tasks a stage posts the send of what it has just made and the receive of what it needs next at once, and goes on
    when both are through, as pipeline runtimes with blocking point-to-point operations do.

    Raises:
      ScheduleError: the stages that wait for each other, with what each one sends and receives.
    """
    needs = Needs(schedule)
    batches = [_batches(schedule, needs, stage) for stage in range(schedule.num_stages)]
    at = [0] * schedule.num_stages
    open_ends: set[tuple] = set()
    through: set[tuple] = set()

    def post(stage: int) -> None:
        if at[stage] < len(batches[stage]):
            for message in batches[stage][at[stage]]:
                (through if message in open_ends else open_ends).add(message)

    for stage in range(schedule.num_stages):
        post(stage)
    progress = True
    while progress:
        progress = False
        for stage in range(schedule.num_stages):
            while at[stage] < len(batches[stage]) and all(m in through for m in batches[stage][at[stage]]):
                at[stage] += 1
                post(stage)
                progress = True
    stuck = [s for s in range(schedule.num_stages) if at[s] < len(batches[s])]
    if stuck:
        lines = []
        for s in stuck:
            waiting = [m for m in batches[s][at[s]] if m not in through]
            lines.append(f"stage {s} for " + " and ".join(f"{task} from stage {a} to {b}" for a, b, task in waiting))
        raise ScheduleError(f"schedule {schedule.name!r} hangs where sends wait for their receiver: {'; '.join(lines)}")


def _batches(schedule: Schedule, needs: Needs, stage: int) -> list[list[tuple]]:
    """Before each task, and after the last one: the messages (from, to, what) that the stage posts together."""
    found: list[list[tuple]] = []
    sends: list[tuple] = []
    for task in schedule.orders[stage]:
        receives = [(s, stage, made) for s, made in needs.of(stage, task) if s != stage]
        found.append([*sends, *receives])
        sends = []
        place = (stage, task.chunk)
        if task.kind is F and place in needs.after and needs.after[place][0] != stage:
            sends = [(stage, needs.after[place][0], Task(F, task.microbatch, task.chunk))]
        elif task.kind in (B, BI) and place in needs.before and needs.before[place][0] != stage:
            sends = [(stage, needs.before[place][0], Task(B, task.microbatch, task.chunk))]
    return [*found, sends]
