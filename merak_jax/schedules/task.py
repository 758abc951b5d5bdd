"""The data of a schedule: which tasks each stage runs, in which order."""

from dataclasses import dataclass
from enum import Enum
from numbers import Integral

from merak_jax.errors import MerakError


class ScheduleError(MerakError, ValueError):
    """A schedule or tick table that cannot run; the message names the task, the stage and the broken rule."""


class TaskKind(Enum):
    """What a stage does with one microbatch."""

    F = "F"  # forward
    R = "R"  # recompute of the forward
    B = "B"  # whole backward
    BI = "Bi"  # backward, input gradient only
    W = "W"  # backward, weight gradient only

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of work on one microbatch, in the `chunk`-th visit of that microbatch to the stage."""

    kind: TaskKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of tasks on every stage; prints as one row per stage, `s0 F0 F1 B0 B1`.

    A forward whose residuals an R makes again prints as `f`. With recomputation, a B without an R of its own begins with one,
    but on stages that keep their residuals.

    Attributes:
      name: how the schedule is called in plans and pictures.
      num_stages: P, the stages of the pipeline.
      num_microbatches: M, the microbatches of one step.
      num_chunks: V, the visits of a microbatch to each stage (more than 1 is interleaved).
      orders: `[num_stages]` tuples of tasks, each in the order its stage runs them.
      keeps: the stages that keep the residuals of their forwards and never recompute.
      folded: whether chunks go forth and back (chunk 1 starts on the last stage) instead of round and round.

    Raises:
      ScheduleError: a count below 1, a wrong number of orders, or a task or a kept stage outside the counts.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    orders: tuple[tuple[Task, ...], ...]
    keeps: tuple[int, ...] = ()
    folded: bool = False

    def __post_init__(self) -> None:
        require_counts(self.name, self.num_stages, self.num_microbatches, self.num_chunks)
        if len(self.orders) != self.num_stages:
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_stages} stages but {len(self.orders)} orders; "
                "give one order of tasks for each stage"
            )
        for stage in self.keeps:
            if not (_is_count(stage) and 0 <= stage < self.num_stages):
                raise ScheduleError(
                    f"schedule {self.name!r} keeps the residuals of stage {stage!r}; its stages are 0 to {self.num_stages - 1}"
                )
        for stage, order in enumerate(self.orders):
            for task in order:
                if not (isinstance(task, Task) and _is_count(task.microbatch) and _is_count(task.chunk)):
                    raise ScheduleError(
                        f"schedule {self.name!r}, stage {stage}: {task!r} is no Task with a microbatch and a chunk, both integers"
                    )
                if not (0 <= task.microbatch < self.num_microbatches and 0 <= task.chunk < self.num_chunks):
                    raise ScheduleError(
                        f"schedule {self.name!r}, stage {stage}: task {task} of chunk {task.chunk} is "
                        f"outside the schedule's {self.num_microbatches} microbatches and "
                        f"{self.num_chunks} chunks; both count from 0"
                    )

    def path(self) -> list[tuple[int, int]]:
        """The (stage, chunk) pairs that a microbatch visits, in the order of the forward."""
        return path_of(self.num_stages, self.num_chunks, self.folded)

    def __str__(self) -> str:
        return "\n".join(" ".join([f"s{stage}", *_words(order)]) for stage, order in enumerate(self.orders))


def path_of(num_stages: int, num_chunks: int, folded: bool) -> list[tuple[int, int]]:
    """The (stage, chunk) pairs that a microbatch visits, in the order of the forward: round and round, or forth and back."""
    return [
        (num_stages - 1 - s if folded and chunk % 2 else s, chunk)
        for chunk in range(num_chunks)
        for s in range(num_stages)
    ]


def _words(order: tuple[Task, ...]) -> list[str]:
    again = {(task.microbatch, task.chunk) for task in order if task.kind is TaskKind.R}
    return [
        str(task).lower() if task.kind is TaskKind.F and (task.microbatch, task.chunk) in again else str(task)
        for task in order
    ]


def require_counts(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raise ScheduleError unless there is at least one stage, one microbatch and one chunk."""
    for count, what in ((num_stages, "stages"), (num_microbatches, "microbatches"), (num_chunks, "chunks")):
        if not _is_count(count):
            raise ScheduleError(f"schedule {name!r} needs a number of {what}, got {count!r}")
        if count < 1:
            raise ScheduleError(f"schedule {name!r} needs at least 1 of its {what}, got {count}")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
