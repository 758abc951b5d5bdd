"""List scheduling: an order made task by task, whoever can start first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from merak_jax.schedules.task import Schedule, Task, TaskKind

F, R, B, BI, W = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.W


@dataclass(frozen=True)
class Times:
    """Times of one stage's F, R, Bi, W (of all its chunks together), each one number or one for each stage; and of a hop.

    `tensor`, `hidden`: as of `simulate`, the collectives of an F (as many in R and Bi) and the share of them that is hidden.
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    recompute: float | Sequence[float] = 0.0
    hop: float = 0.0
    tensor: float | Sequence[float] = 0.0
    hidden: float = 0.0

    def of(self, kind: TaskKind, stage: int) -> float:
        """The time of a task, with the collectives that nothing hides."""
        values = {F: self.forward, BI: self.input_gradient, W: self.weight_gradient, R: self.recompute}
        if kind is B:
            return self.of(BI, stage) + self.of(W, stage)
        time = on_stages(values[kind], stage + 1)[stage]
        exposed = on_stages(self.tensor, stage + 1)[stage] * (1 - self.hidden)
        return time + exposed if kind is F or (kind in (R, BI) and time) else time


def on_stages(value: float | Iterable[float], num_stages: int) -> list[float]:
    """One number for each stage, given one for all or one for each."""
    return [float(v) for v in value] if isinstance(value, Iterable) else [float(value)] * num_stages


def place_greedily(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    folded: bool = False,
    times: Times | None = None,
    most: tuple[int, ...],
    divide: bool,
    early: bool = False,
    keeps: tuple[int, ...] = (),
) -> Schedule | None:
    """An order in which a stage, whenever it is free, takes what it can start first; None where stages then wait for each other.

    Of tasks that could start at the same time it takes Bi (or B) before F before R before W, and the chunk that is furthest.

    Args:
      most: for each stage the most microbatches (times chunks) in flight.
      divide: whether B is split into Bi and W.
      early: whether a stage that would wait recomputes ahead.
    """
    return _Greedy(
        name, num_stages, num_microbatches, num_chunks, folded, times or Times(), most, divide, early, keeps
    ).run()


@dataclass
class _Greedy:
    """The state of one list scheduling."""

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    folded: bool
    times: Times
    most: tuple[int, ...]
    divide: bool
    early: bool
    keeps: tuple[int, ...]
    stops: dict[tuple[int, TaskKind, int, int], float] = field(default_factory=dict)

    def run(self) -> Schedule | None:
        """The order, or None where the stages wait for each other (too little memory)."""
        empty: tuple[tuple[Task, ...], ...] = ((),) * self.num_stages
        frame = Schedule(self.name, self.num_stages, self.num_microbatches, self.num_chunks, empty, folded=self.folded)
        path = frame.path()
        self.before, self.after = dict(zip(path[1:], path)), dict(zip(path, path[1:]))
        self.chunks = {s: [place for place in reversed(path) if place[0] == s] for s in range(self.num_stages)}
        self.next = {(kind, *place): 0 for kind in (F, R, B, W) for place in path}
        free = [0.0] * self.num_stages
        held = [0] * self.num_stages
        orders: list[list[Task]] = [[] for _ in range(self.num_stages)]
        total = len(path) * self.num_microbatches * (3 if self.divide else 2)
        while total:
            options = [o for s in range(self.num_stages) for o in self._options(s, free[s], held[s])]
            if not options:
                return None
            start, _, _, stage, task = min(options, key=lambda o: o[:4])
            self._take(stage, task, start, free, held)
            orders[stage].append(task)
            total -= task.kind is not R
        return Schedule(
            self.name,
            self.num_stages,
            self.num_microbatches,
            self.num_chunks,
            tuple(map(tuple, orders)),
            keeps=self.keeps,
            folded=self.folded,
        )

    def _recomputes(self, stage: int) -> bool:
        return stage not in self.keeps and self.times.of(R, stage) > 0

    def _options(self, stage: int, free: float, held: int) -> Iterator[tuple]:
        """`(start, rank, tie, stage, task)` of what a stage could do next."""
        for tie, (_, chunk) in enumerate(self.chunks[stage]):
            m = self.next[B, stage, chunk]
            if m < self.num_microbatches and (stage, F, m, chunk) in self.stops:
                ready = self._ready(self.after, stage, chunk, B, m)
                if ready is not None:
                    yield max(free, ready), 0, tie, stage, Task(BI if self.divide else B, m, chunk)
                r = self.next[R, stage, chunk]
                if self.early and self._recomputes(stage) and r == m and held <= self.most[stage]:
                    yield max(free, self.stops[stage, F, m, chunk]), 2, tie, stage, Task(R, m, chunk)
            m = self.next[F, stage, chunk]
            if m < self.num_microbatches and held < self.most[stage]:
                ready = self._ready(self.before, stage, chunk, F, m)
                if ready is not None:
                    yield max(free, ready), 1, tie, stage, Task(F, m, chunk)
            m = self.next[W, stage, chunk]
            if self.divide and m < self.next[B, stage, chunk]:
                yield free, 3, tie, stage, Task(W, m, chunk)

    def _ready(self, neighbours, stage: int, chunk: int, kind: TaskKind, m: int) -> float | None:
        """When the input from the neighbour is there; None if it has not been made yet."""
        if (stage, chunk) not in neighbours:
            return 0.0
        s, c = neighbours[stage, chunk]
        stop = self.stops.get((s, kind, m, c))
        return None if stop is None else stop + (self.times.hop if s != stage else 0.0)

    def _take(self, stage: int, task: Task, start: float, free: list[float], held: list[int]) -> None:
        kind, m, chunk = task.kind, task.microbatch, task.chunk
        length = self.times.of(kind, stage) / self.num_chunks
        if kind in (B, BI):
            if self._recomputes(stage) and self.next[R, stage, chunk] == m:
                length += self.times.of(R, stage) / self.num_chunks
            self.next[R, stage, chunk] = m + 1
            kind = B
        self.next[kind, stage, chunk] = m + 1
        free[stage] = self.stops[stage, kind, m, chunk] = start + length
        held[stage] += (task.kind is F) - (task.kind in (B, W))
