"""Needs: what each task of a schedule reads."""

from collections.abc import Iterable
from dataclasses import replace

from merak_jax.schedules.task import Schedule, Task, TaskKind


class Needs:
    """What each task of a schedule reads, and whether it recomputes first."""

    def __init__(self, schedule: Schedule):
        path = schedule.path()
        self.before = dict(zip(path[1:], path))
        self.after = dict(zip(path, path[1:]))
        self.keeps = set(schedule.keeps)
        self.explicit = {
            (stage, t.microbatch, t.chunk)
            for stage, order in enumerate(schedule.orders)
            for t in order
            if t.kind is TaskKind.R
        }

    def of(self, stage: int, task: Task) -> list[tuple[int, Task]]:
        """The tasks, with their stages, whose results `task` reads."""
        place = (stage, task.chunk)
        own = (stage, Task(TaskKind.F, task.microbatch, task.chunk))
        if task.kind is TaskKind.F:
            return [self._at(self.before, place, TaskKind.F, task)] if place in self.before else []
        if task.kind is TaskKind.R:
            return [own]
        if task.kind is TaskKind.W:
            return [(stage, Task(TaskKind.B, task.microbatch, task.chunk))]
        if (stage, task.microbatch, task.chunk) in self.explicit:
            own = (stage, Task(TaskKind.R, task.microbatch, task.chunk))
        return [own, self._at(self.after, place, TaskKind.B, task)] if place in self.after else [own]

    def recomputes_inside(self, stage: int, task: Task) -> bool:
        """Whether a backward task begins with the recomputation of its forward."""
        return (
            task.kind in (TaskKind.B, TaskKind.BI)
            and stage not in self.keeps
            and (stage, task.microbatch, task.chunk) not in self.explicit
        )

    @staticmethod
    def _at(neighbours: dict[tuple[int, int], tuple[int, int]], place: tuple[int, int], kind: TaskKind, task: Task):
        stage, chunk = neighbours[place]
        return stage, Task(kind, task.microbatch, chunk)


def divided(schedule: Schedule) -> Schedule:
    """The same order with every B, and every recomputation inside it, as tasks of their own."""
    needs = Needs(schedule)
    orders: list[list[Task]] = []
    for stage, order in enumerate(schedule.orders):
        orders.append([])
        for task in order:
            kinds = [TaskKind.R] if needs.recomputes_inside(stage, task) else []
            kinds += [TaskKind.BI, TaskKind.W] if task.kind is TaskKind.B else [task.kind]
            orders[-1] += [Task(kind, task.microbatch, task.chunk) for kind in kinds]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def keeping(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """The same order where these stages keep their residuals as well, and have no R."""
    keeps = tuple(sorted({*schedule.keeps, *stages}))
    orders = tuple(
        tuple(task for task in order if task.kind is not TaskKind.R) if stage in keeps else order
        for stage, order in enumerate(schedule.orders)
    )
    return replace(schedule, orders=orders, keeps=keeps)


def without_recompute(schedule: Schedule) -> Schedule:
    """The same order with all residuals kept, and no R."""
    return keeping(schedule, range(schedule.num_stages))
