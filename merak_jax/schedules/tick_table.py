"""TickTable: a schedule as integer tables that a tick program reads, one row per tick."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

NONE = -1


class Phase(NamedTuple):
    """Ticks `start` to `stop` (exclusive) in which the same kinds of work occur on some stage."""

    start: int
    stop: int
    forward: bool
    epilogue: bool
    backward: bool

    @property
    def num_ticks(self) -> int:
        """How many ticks the phase has."""
        return self.stop - self.start

    def __str__(self) -> str:
        kinds = [kind for kind, here in zip("FEB", (self.forward, self.epilogue, self.backward)) if here]
        return f"{{{','.join(kinds)}}} ticks {self.start}-{self.stop - 1}"


@dataclass(frozen=True, eq=False)
class TickTable:
    """What each stage does in each merged tick. All tables are int32 and read-only; -1 stands for none.

    In one tick, in this order: (1) prologue and F on every stage; (2) the epilogue for the microbatch whose
    F just ran on the last stage, which writes its cotangent into that stage's cotangent inbox; (3) B on every
    stage, reading its stash and its inbox; (4) the sends: F's output into the stash of stage s+1, B's into
    the cotangent inbox of stage s-1.

    Attributes:
      name: the schedule's name.
      forward: `[ticks, stages]` microbatch of F.
      forward_slot: `[ticks, stages]` stash slot that holds F's input; stage 0 writes it, the others read it.
      backward: `[ticks, stages]` microbatch of B.
      backward_slot: `[ticks, stages]` stash slot of that microbatch.
      cotangent_slot: `[ticks, stages]` inbox slot that B reads.
      epilogue: `[ticks]` microbatch of the epilogue.
      epilogue_slot: `[ticks]` inbox slot of the last stage that the epilogue writes.
      receive_forward_slot: `[ticks, stages]` stash slot for the boundary that arrives at the end of the tick.
      receive_backward_slot: `[ticks, stages]` inbox slot for the cotangent that arrives then.
      num_microbatches: M.
      num_stash_slots: slots of the largest stash over the stages.
      num_cotangent_slots: slots of the largest cotangent inbox over the stages.
    """

    name: str
    forward: np.ndarray
    forward_slot: np.ndarray
    backward: np.ndarray
    backward_slot: np.ndarray
    cotangent_slot: np.ndarray
    epilogue: np.ndarray
    epilogue_slot: np.ndarray
    receive_forward_slot: np.ndarray
    receive_backward_slot: np.ndarray
    num_microbatches: int
    num_stash_slots: int
    num_cotangent_slots: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                frozen = np.array(value, np.int32)
                frozen.flags.writeable = False
                object.__setattr__(self, field.name, frozen)

    @property
    def num_ticks(self) -> int:
        """Ticks of the whole table."""
        return self.forward.shape[0]

    @property
    def num_stages(self) -> int:
        """P, the stages of the pipeline."""
        return self.forward.shape[1]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The maximal runs of ticks with the same kinds of work on any stage, in order."""
        kinds = np.stack([(self.forward != NONE).any(1), self.epilogue != NONE, (self.backward != NONE).any(1)], axis=1)
        changes = np.flatnonzero((kinds[1:] != kinds[:-1]).any(1)) + 1
        starts = [0, *changes.tolist()]
        stops = [*changes.tolist(), self.num_ticks]
        return tuple(Phase(start, stop, *kinds[start].tolist()) for start, stop in zip(starts, stops))

    def in_flight(self) -> list[int]:
        """`[stages]` the peak number of microbatches whose F is done and whose B is not."""
        # B runs after F in a tick, so a microbatch is counted in the ticks of both.
        done = np.cumsum(self.forward != NONE, axis=0)
        backwards = self.backward != NONE
        return (done - np.cumsum(backwards, axis=0) + backwards).max(axis=0).tolist()

    def makespan(self, forward: float, backward: float) -> float:
        """The time of one step, in the unit of the two costs: a tick costs the sum of its phase's kinds.

        Args:
          forward: one F of one stage.
          backward: one B of one stage, with the recompute it contains.
        """
        return sum(phase.num_ticks * (forward * phase.forward + backward * phase.backward) for phase in self.phases)

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
        return (
            f"{self.name}: {self.num_stages} stages, {self.num_microbatches} microbatches, "
            f"{self.num_ticks} ticks, {self.num_stash_slots} stash slots, "
            f"{self.num_cotangent_slots} cotangent slots"
        )

    def _cells(self, tick: int) -> list[str]:
        cells = []
        for stage in range(self.num_stages):
            cell = []
            if self.forward[tick, stage] != NONE:
                cell.append(f"F{self.forward[tick, stage]}@{self.forward_slot[tick, stage]}")
            if self.backward[tick, stage] != NONE:
                slots = f"{self.backward_slot[tick, stage]},{self.cotangent_slot[tick, stage]}"
                cell.append(f"B{self.backward[tick, stage]}@{slots}")
            cells.append(" ".join(cell) or ".")
        epilogue = self.epilogue[tick]
        return [*cells, "." if epilogue == NONE else f"E{epilogue}@{self.epilogue_slot[tick]}"]
