"""check: a linter that replays a tick table and names the task that breaks a rule."""

from dataclasses import dataclass, field

import numpy as np

from merak_jax.schedules.task import ScheduleError
from merak_jax.schedules.tick_table import NONE, TickTable


def check(table: TickTable) -> None:
    """Raise unless the table runs every task once, in a legal order, on slots that hold what the task reads.

    Rules: the tables agree in shape and name microbatches and slots that exist; every stage has exactly one
    F and one B of every microbatch; F follows the previous stage's F by at least a tick; the epilogue follows
    the last stage's F in the same tick; B follows its own F, and the next stage's B by at least a tick; a
    slot is never written while it is occupied; a read finds what was written for it; every output arrives.

    Raises:
      ScheduleError: the first broken rule, with the tick, the stage and the task.
    """
    _check_shapes(table)
    _check_pairs(table)
    _check_counts(table)
    _check_dependencies(table)
    _Replay(table).run()


def _check_shapes(table: TickTable) -> None:
    shape = (table.num_ticks, table.num_stages)
    per_stage = {name: table.num_microbatches for name in ("forward", "backward")}
    per_stage |= {name: table.num_stash_slots for name in ("forward_slot", "backward_slot", "receive_forward_slot")}
    per_stage |= {name: table.num_cotangent_slots for name in ("cotangent_slot", "receive_backward_slot")}
    per_tick = {"epilogue": table.num_microbatches, "epilogue_slot": table.num_cotangent_slots}
    for name, size in (per_stage | per_tick).items():
        values, expected = getattr(table, name), shape if name in per_stage else shape[:1]
        if values.shape != expected:
            raise ScheduleError(f"{table.name}: table {name} has shape {values.shape}, expected {expected}")
        outside = np.argwhere((values < NONE) | (values >= size))
        if outside.size:
            where = tuple(outside[0].tolist())
            raise ScheduleError(f"{table.name}: {name}{list(where)} is {values[where]}, outside -1 to {size - 1}")


def _check_pairs(table: TickTable) -> None:
    """A task has its slots, and nothing else has any."""
    for task, kind, slots in (
        ("forward", "F", ("forward_slot",)),
        ("backward", "B", ("backward_slot", "cotangent_slot")),
        ("epilogue", "E", ("epilogue_slot",)),
    ):
        values = getattr(table, task)
        for slot in slots:
            odd = np.argwhere((values == NONE) != (getattr(table, slot) == NONE))
            if odd.size:
                where = tuple(odd[0].tolist())
                stage = where[1] if len(where) == 2 else table.num_stages - 1
                what = f"no {kind}, yet a" if values[where] == NONE else f"{kind}{values[where]} without a"
                raise ScheduleError(f"{table.name}, tick {where[0]}, stage {stage}: {what} {slot}")


def _check_counts(table: TickTable) -> None:
    for stage in range(table.num_stages):
        for kind, values in (("F", table.forward), ("B", table.backward)):
            found = np.bincount(values[:, stage][values[:, stage] != NONE], minlength=table.num_microbatches).tolist()
            for microbatch, count in enumerate(found):
                if count != 1:
                    raise ScheduleError(
                        f"{table.name}, stage {stage}: {kind}{microbatch} occurs {count} times; "
                        "every stage runs it exactly once"
                    )
    odd = np.flatnonzero(table.epilogue != table.forward[:, -1])
    if odd.size:
        tick = int(odd[0])
        raise ScheduleError(
            f"{table.name}, tick {tick}, stage {table.num_stages - 1}: the epilogue is of microbatch "
            f"{table.epilogue[tick]} and the F of microbatch {table.forward[tick, -1]}; the epilogue follows "
            "the last stage's F in the same tick"
        )


def _check_dependencies(table: TickTable) -> None:
    forward, backward = _tick_of(table.forward), _tick_of(table.backward)
    last = table.num_stages - 1

    def require(legal: bool, stage: int, task: str, tick: int, rule: str) -> None:
        if not legal:
            raise ScheduleError(f"{table.name}, tick {tick}, stage {stage}: {task} is too early, {rule}")

    for (stage, microbatch), tick in forward.items():
        if stage > 0:
            before = forward[stage - 1, microbatch]
            rule = f"stage {stage - 1} runs F{microbatch} in tick {before} and a hop takes a tick"
            require(tick > before, stage, f"F{microbatch}", tick, rule)
    for (stage, microbatch), tick in backward.items():
        own = forward[stage, microbatch]
        require(tick >= own, stage, f"B{microbatch}", tick, f"its F{microbatch} is in tick {own}")
        if stage < last:
            after = backward[stage + 1, microbatch]
            rule = f"stage {stage + 1} runs B{microbatch} in tick {after} and a hop takes a tick"
            require(tick > after, stage, f"B{microbatch}", tick, rule)


def _tick_of(values: np.ndarray) -> dict[tuple[int, int], int]:
    """The tick of each `(stage, microbatch)`."""
    return {(stage, int(values[tick, stage])): tick for tick, stage in np.argwhere(values != NONE).tolist()}


@dataclass
class _Buffer:
    """What the slots of one buffer of one stage hold."""

    what: str
    held: dict[int, int] = field(default_factory=dict)

    def write(self, slot: int, microbatch: int, where: str) -> None:
        if slot in self.held:
            raise ScheduleError(
                f"{where} writes {self.what} slot {slot}, still occupied by microbatch {self.held[slot]}"
            )
        self.held[slot] = microbatch

    def read(self, slot: int, microbatch: int, where: str) -> None:
        if self.held.get(slot) != microbatch:
            holds = f"microbatch {self.held[slot]}" if slot in self.held else "nothing"
            raise ScheduleError(
                f"{where} reads {self.what} slot {slot}, which holds {holds}; it must hold microbatch {microbatch}"
            )


class _Replay:
    """Runs the ticks on buffers that remember which microbatch each slot holds."""

    def __init__(self, table: TickTable):
        self.table = table
        self.stash = [_Buffer("stash") for _ in range(table.num_stages)]
        self.inbox = [_Buffer("cotangent") for _ in range(table.num_stages)]

    def run(self) -> None:
        for tick in range(self.table.num_ticks):
            self._forwards(tick)
            self._backwards(tick)
            self._sends(tick)

    def _where(self, tick: int, stage: int, task: str) -> str:
        return f"{self.table.name}, tick {tick}, stage {stage}: {task}"

    def _forwards(self, tick: int) -> None:
        table, last = self.table, self.table.num_stages - 1
        for stage, microbatch in _present(table.forward[tick]):
            slot, where = int(table.forward_slot[tick, stage]), self._where(tick, stage, f"F{microbatch}")
            if stage == 0:
                self.stash[0].write(slot, microbatch, where)
            else:
                self.stash[stage].read(slot, microbatch, where)
            if stage == last:
                slot = int(table.epilogue_slot[tick])
                self.inbox[last].write(slot, microbatch, self._where(tick, last, f"E{microbatch}"))

    def _backwards(self, tick: int) -> None:
        table = self.table
        for stage, microbatch in _present(table.backward[tick]):
            where = self._where(tick, stage, f"B{microbatch}")
            for buffer, slots in (
                (self.stash[stage], table.backward_slot),
                (self.inbox[stage], table.cotangent_slot),
            ):
                slot = int(slots[tick, stage])
                buffer.read(slot, microbatch, where)
                del buffer.held[slot]

    def _sends(self, tick: int) -> None:
        for kind, sent, slots, buffers, hop in (
            ("F", self.table.forward, self.table.receive_forward_slot, self.stash, 1),
            ("B", self.table.backward, self.table.receive_backward_slot, self.inbox, -1),
        ):
            for stage in range(self.table.num_stages):
                sender = stage - hop
                microbatch = sent[tick, sender] if 0 <= sender < self.table.num_stages else NONE
                slot = int(slots[tick, stage])
                if (microbatch == NONE) != (slot == NONE):
                    fault = (
                        f"receives into slot {slot}, but nothing is sent to it"
                        if microbatch == NONE
                        else f"has no slot for the output of {kind}{microbatch} of stage {sender}"
                    )
                    raise ScheduleError(f"{self.table.name}, tick {tick}, stage {stage}: {fault}")
                if microbatch != NONE:
                    where = self._where(tick, stage, f"the output of {kind}{microbatch} of stage {sender}")
                    buffers[stage].write(slot, int(microbatch), where)


def _present(row: np.ndarray) -> list[tuple[int, int]]:
    """The `(stage, microbatch)` pairs of one tick."""
    return [(stage, microbatch) for stage, microbatch in enumerate(row.tolist()) if microbatch != NONE]
