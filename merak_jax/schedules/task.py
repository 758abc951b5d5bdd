"""The data of a schedule: which tasks each stage runs, in which order."""

from dataclasses import dataclass
from enum import Enum


class ScheduleError(ValueError):
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

    Attributes:
      name: how the schedule is called in plans and pictures.
      num_stages: P, the stages of the pipeline.
      num_microbatches: M, the microbatches of one step.
      num_chunks: V, the visits of a microbatch to each stage (more than 1 is interleaved).
      orders: `[num_stages]` tuples of tasks, each in the order its stage runs them.

    Raises:
      ScheduleError: a count below 1, a wrong number of orders, or a task outside the counts.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    orders: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        require_counts(self.name, self.num_stages, self.num_microbatches, self.num_chunks)
        if len(self.orders) != self.num_stages:
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_stages} stages but {len(self.orders)} orders; "
                "give one order of tasks for each stage"
            )
        for stage, order in enumerate(self.orders):
            for task in order:
                if not (0 <= task.microbatch < self.num_microbatches and 0 <= task.chunk < self.num_chunks):
                    raise ScheduleError(
                        f"schedule {self.name!r}, stage {stage}: task {task} of chunk {task.chunk} is "
                        f"outside the schedule's {self.num_microbatches} microbatches and "
                        f"{self.num_chunks} chunks; both count from 0"
                    )

    def __str__(self) -> str:
        return "\n".join(" ".join([f"s{stage}", *map(str, order)]) for stage, order in enumerate(self.orders))


def require_counts(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raise ScheduleError unless there is at least one stage, one microbatch and one chunk."""
    for count, what in ((num_stages, "stages"), (num_microbatches, "microbatches"), (num_chunks, "chunks")):
        if count < 1:
            raise ScheduleError(f"schedule {name!r} needs at least 1 of its {what}, got {count}")
