"""TickTable: a schedule as integer tables that a tick program reads, one row per tick."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from merak_jax.schedules.task import Task, TaskKind, path_of

NONE = -1


class Phase(NamedTuple):
    """Ticks `start` to `stop` (exclusive), and the parts of a tick that the program runs in them."""

    start: int
    stop: int
    parts: frozenset[str]

    @property
    def num_ticks(self) -> int:
        """How many ticks the phase has."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{{{','.join(part for part in PARTS if part in self.parts)}}} ticks {self.start}-{self.stop - 1}"


# The parts of a tick, in the order in which a stage runs them; E is the epilogue.
PARTS = ("F", "E", "R", "B", "W")
# Of each part: its microbatches and the slots that go with them, those that it must have first.
_TABLES = {
    "F": ("forward", ("forward_chunk", "forward_slot"), ("keep_slot",)),
    "R": ("recompute", ("recompute_chunk", "recompute_slot", "recompute_keep_slot"), ()),
    "B": ("backward", ("backward_chunk", "backward_slot", "cotangent_slot"), ("residual_slot", "saved_slot")),
    "W": ("weight", ("weight_chunk", "weight_slot", "weight_saved_slot"), ()),
}


@dataclass(frozen=True, eq=False)
class TickTable:
    """What each stage does in each tick. All tables are int32, `[ticks, stages]` if not said otherwise, and read-only; -1 is none.

    In one tick, in this order: (1) the prologue, and F on every stage; (2) the epilogue for the microbatch whose last F just
    ran, which writes its cotangent into that stage's inbox; (3) R on every stage; (4) B or Bi, which read the stash and the
    inbox; (5) W; (6) the sends: F's output into the stash of the stage that runs its next F, B's into the inbox of the stage
    that runs its next B. A stage has at most one task of each part in a tick, and in the switched form at most one in all.

    Buffers of a stage, by slot: the *stash* (inputs of F, kept until the backward is through), the *inbox* (cotangents), the
    *residuals* (what F or R kept for B), and what Bi *saved* for W.

    Attributes:
      name: the schedule's name.
      num_microbatches: M.
      num_stash_slots, num_cotangent_slots, num_residual_slots, num_saved_slots: slots of the largest buffer over the stages.
      forward, forward_slot: microbatch of F and the stash slot of its input; the first stage of the path writes it there.
      backward, backward_slot, cotangent_slot: microbatch of B or Bi, its stash slot, and the inbox slot that it reads.
      epilogue, epilogue_slot: `[ticks]` microbatch of the epilogue, and the inbox slot that it writes.
      receive_forward_slot: stash slot for what arrives at the end of the tick from the stage before (before 0 comes the last one).
      receive_backward_slot: inbox slot for what arrives then from the stage after.
      receive_forward_back_slot, receive_backward_back_slot: the same from the other side, where chunks go forth and back; the
        first and the last stage turn around by sending to themselves.
      forward_chunk, recompute_chunk, backward_chunk, weight_chunk: of the task.
      keep_slot: residual slot that F fills, where it keeps its residuals.
      recompute, recompute_slot, recompute_keep_slot: microbatch of R, its stash slot, the residual slot that it fills.
      residual_slot: residual slot that B reads; none where B recomputes.
      saved_slot: slot that Bi saves to for W; none where B is whole.
      weight, weight_slot, weight_saved_slot: microbatch of W, its stash slot and the slot that Bi saved to.
      num_chunks: V.
      folded: whether chunks go forth and back.
      form: `merged`, `paired` or `switched`.
    """

    name: str
    num_microbatches: int
    num_stash_slots: int
    num_cotangent_slots: int
    forward: np.ndarray
    forward_slot: np.ndarray
    backward: np.ndarray
    backward_slot: np.ndarray
    cotangent_slot: np.ndarray
    epilogue: np.ndarray
    epilogue_slot: np.ndarray
    receive_forward_slot: np.ndarray
    receive_backward_slot: np.ndarray
    receive_forward_back_slot: np.ndarray
    receive_backward_back_slot: np.ndarray
    forward_chunk: np.ndarray
    backward_chunk: np.ndarray
    keep_slot: np.ndarray
    recompute: np.ndarray
    recompute_chunk: np.ndarray
    recompute_slot: np.ndarray
    recompute_keep_slot: np.ndarray
    residual_slot: np.ndarray
    saved_slot: np.ndarray
    weight: np.ndarray
    weight_chunk: np.ndarray
    weight_slot: np.ndarray
    weight_saved_slot: np.ndarray
    num_residual_slots: int = 0
    num_saved_slots: int = 0
    num_chunks: int = 1
    folded: bool = False
    form: str = "merged"

    def __post_init__(self) -> None:
        for name, value in self.arrays().items():
            frozen = np.array(value, np.int32)
            frozen.flags.writeable = False
            object.__setattr__(self, name, frozen)

    def arrays(self) -> dict[str, np.ndarray]:
        """The tables by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}

    @property
    def num_ticks(self) -> int:
        """Ticks of the whole table."""
        return self.forward.shape[0]

    @property
    def num_stages(self) -> int:
        """P, the stages of the pipeline."""
        return self.forward.shape[1]

    @property
    def path(self) -> list[tuple[int, int]]:
        """The (stage, chunk) pairs that a microbatch visits, in the order of the forward."""
        return path_of(self.num_stages, self.num_chunks, self.folded)

    @property
    def differentiated(self) -> bool:
        """Whether there is a backward at all."""
        return bool((self.backward != NONE).any())

    def where(self, part: str) -> np.ndarray:
        """`[ticks]` in which ticks some stage has this part."""
        if part == "E":
            return self.epilogue != NONE
        return (getattr(self, _TABLES[part][0]) != NONE).any(1)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Runs of ticks that one loop of the program covers: cut where a part occurs for the first or the last time.

        So there are at most eleven of them, whatever the number of microbatches. Switched ticks choose what they do as they run:
        one loop covers them all.
        """
        ticks = {part: np.flatnonzero(self.where(part)).tolist() for part in PARTS}
        spans = {part: (at[0], at[-1] + 1) for part, at in ticks.items() if at}
        if self.form == "switched":
            return (Phase(0, self.num_ticks, frozenset(spans)),)
        cuts = sorted({0, self.num_ticks, *(edge for span in spans.values() for edge in span)})
        return tuple(
            Phase(start, stop, frozenset(part for part, (first, end) in spans.items() if first <= start < end))
            for start, stop in zip(cuts, cuts[1:])
        )

    def tasks(self, tick: int, stage: int) -> list[Task]:
        """What a stage does in a tick, in order, without the epilogue."""
        found = []
        for part, (name, (chunk, *_), _) in _TABLES.items():
            microbatch = int(getattr(self, name)[tick, stage])
            if microbatch != NONE:
                kind = TaskKind.BI if part == "B" and self.saved_slot[tick, stage] != NONE else TaskKind(part)
                found.append(Task(kind, microbatch, int(getattr(self, chunk)[tick, stage])))
        return found

    def order(self, stage: int) -> tuple[Task, ...]:
        """All tasks of a stage in the order in which it runs them."""
        return tuple(task for tick in range(self.num_ticks) for task in self.tasks(tick, stage))

    def recomputes_inside(self, tick: int, stage: int) -> bool:
        """Whether the B of a tick begins with a recomputation of its own."""
        return bool(self.backward[tick, stage] != NONE and self.residual_slot[tick, stage] == NONE)

    def in_flight(self) -> list[int]:
        """`[stages]` the peak number of microbatches (times chunks) whose F is done and whose B, or W where it is split, is not."""
        # B runs after F in a tick, so a microbatch is counted in the ticks of both.
        done = np.cumsum(self.forward != NONE, axis=0)
        ends = ((self.backward != NONE) & (self.saved_slot == NONE)).astype(int) + (self.weight != NONE)
        return (done - np.cumsum(ends, axis=0) + ends).max(axis=0).tolist()

    def tick_times(self, costs: Mapping[TaskKind, list[float]], inside: list[float]) -> np.ndarray:
        """`[ticks]` how long each tick lasts: as long as its slowest stage.

        `costs`: per kind, of one chunk of each stage; `inside`: of the recomputation that a B begins with.
        """
        times = np.zeros((self.num_ticks, self.num_stages))
        for stage in range(self.num_stages):
            per_part = {part: costs[TaskKind(part)][stage] for part in _TABLES}
            for part, (name, *_) in _TABLES.items():
                times[:, stage] += per_part[part] * (getattr(self, name)[:, stage] != NONE)
            here = self.backward[:, stage] != NONE
            split = here & (self.saved_slot[:, stage] != NONE)
            times[:, stage] += (costs[TaskKind.BI][stage] - per_part["B"]) * split
            times[:, stage] += inside[stage] * (here & (self.residual_slot[:, stage] == NONE))
        return times.max(axis=1)

    def makespan(self, forward: float, backward: float) -> float:
        """The time of one step, in the unit of the two costs; a tick lasts as long as its slowest stage.

        Args:
          forward: one F of one stage, all chunks together.
          backward: one B of one stage, with the recompute that it contains; Bi and W are half of it each.
        """
        share = 1 / self.num_chunks
        costs = {TaskKind.F: forward, TaskKind.R: 0.0, TaskKind.B: backward}
        costs |= {TaskKind.BI: backward / 2, TaskKind.W: backward / 2}
        per_stage = {kind: [c * share] * self.num_stages for kind, c in costs.items()}
        return float(self.tick_times(per_stage, [0.0] * self.num_stages).sum())

    def bubble_share(self, forward: float, backward: float) -> float:
        """The share of the makespan, 0 to 1, in which a stage idles."""
        return 1.0 - self.num_microbatches * (forward + backward) / self.makespan(forward, backward)

    def __str__(self) -> str:
        """One row per tick; `F3@1` is F of microbatch 3 with stash slot 1, `B0@2,0` adds the inbox slot."""
        kinds = {tick: str(phase).split()[0] for phase in self.phases for tick in range(phase.start, phase.stop)}
        head = ["tick", "phase", *(f"s{stage}" for stage in range(self.num_stages)), "epilogue"]
        rows = [[str(tick), kinds[tick], *self._cells(tick)] for tick in range(self.num_ticks)]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *rows]]
        return "\n".join([self._summary(), *lines])

    def _summary(self) -> str:
        more = [(self.num_residual_slots, "residual"), (self.num_saved_slots, "saved")]
        chunks = f"{self.num_chunks} chunks, " if self.num_chunks > 1 else ""
        return (
            f"{self.name}: {self.num_stages} stages, {chunks}{self.num_microbatches} microbatches, "
            f"{self.num_ticks} ticks, {self.num_stash_slots} stash slots, {self.num_cotangent_slots} cotangent slots"
            + "".join(f", {count} {what} slots" for count, what in more if count)
        )

    def _cells(self, tick: int) -> list[str]:
        cells = [" ".join(self._words(tick, stage)) or "." for stage in range(self.num_stages)]
        epilogue = self.epilogue[tick]
        return [*cells, "." if epilogue == NONE else f"E{epilogue}@{self.epilogue_slot[tick]}"]

    def _words(self, tick: int, stage: int) -> Iterator[str]:
        for task in self.tasks(tick, stage):
            _, (_, *slots), more = _TABLES["B" if task.kind is TaskKind.BI else task.kind.value]
            at = [int(getattr(self, name)[tick, stage]) for name in (*slots, *more)]
            yield f"{task}@" + ",".join(str(slot) for slot in at if slot != NONE)


def empty_tables(num_ticks: int, num_stages: int) -> dict[str, np.ndarray]:
    """All tables of a TickTable with nothing in them."""
    kinds = {field.name: field.type for field in fields(TickTable)}
    per_tick = ("epilogue", "epilogue_slot")
    return {
        name: np.full((num_ticks,) if name in per_tick else (num_ticks, num_stages), NONE)
        for name, kind in kinds.items()
        if kind is np.ndarray
    }


def part_tables() -> dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Of each part but E: its table of microbatches, the tables that go with it always, and those that go with it sometimes."""
    return dict(_TABLES)


def comes_back(num_stages: int, sender: int, receiver: int, way: str) -> bool:
    """Where chunks go forth and back: whether a send arrives from the other side than the usual one of its way."""
    if sender == receiver:
        # Nothing else comes from behind the last stage, or from before the first.
        from_before = receiver == 0
    else:
        from_before = sender < receiver
    return from_before != (way == "forward")
