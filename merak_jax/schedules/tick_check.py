"""check: a linter that replays a tick table and names the task that breaks a rule."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from merak_jax.schedules.task import ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_table import NONE, TickTable, comes_back, part_tables

F, R, B, BI, W = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.W


def check(table: TickTable) -> None:
    """Raise unless the table runs every task once, in a legal order, on slots that hold what the task reads.

    Rules: the tables agree in shape and name microbatches, chunks and slots that exist; every stage has exactly one F, and one B
    or one Bi and one W, of every microbatch and chunk (a table without any B is that of an evaluation), and at most one R; F
    follows the F before it on the path by at least a tick; the epilogue follows the last F in the same tick; B follows its own
    F, and the B behind it on the path by at least a tick; W follows its Bi; a slot is never written while it is occupied; a read
    finds what was written for it; every output arrives; in switched ticks a stage has one task.

    Raises:
      ScheduleError: the first broken rule, with the tick, the stage and the task.
    """
    _check_shapes(table)
    _check_pairs(table)
    _check_counts(table)
    _check_dependencies(table)
    _Replay(table).run()


def _sizes(table: TickTable) -> dict[str, int]:
    """How many microbatches, chunks or slots the entries of each table number."""
    sizes = {"epilogue": table.num_microbatches}
    for name, (chunk, *_), _ in part_tables().values():
        sizes[name], sizes[chunk] = table.num_microbatches, table.num_chunks
    for names, count in (
        (("forward_slot", "backward_slot", "recompute_slot", "weight_slot"), table.num_stash_slots),
        (("receive_forward_slot", "receive_forward_back_slot"), table.num_stash_slots),
        (("receive_backward_slot", "receive_backward_back_slot"), table.num_cotangent_slots),
        (("cotangent_slot", "epilogue_slot"), table.num_cotangent_slots),
        (("keep_slot", "recompute_keep_slot", "residual_slot"), table.num_residual_slots),
        (("saved_slot", "weight_saved_slot"), table.num_saved_slots),
    ):
        sizes |= {name: count for name in names}
    return sizes


def _check_shapes(table: TickTable) -> None:
    shape, sizes = (table.num_ticks, table.num_stages), _sizes(table)
    for name, values in table.arrays().items():
        expected = shape[:1] if name in ("epilogue", "epilogue_slot") else shape
        if values.shape != expected:
            raise ScheduleError(f"{table.name}: table {name} has shape {values.shape}, expected {expected}")
        outside = np.argwhere((values < NONE) | (values >= sizes[name]))
        if outside.size:
            where = tuple(outside[0].tolist())
            raise ScheduleError(
                f"{table.name}: {name}{list(where)} is {values[where]}, outside -1 to {sizes[name] - 1}"
            )


def _check_pairs(table: TickTable) -> None:
    """A task has its slots, and nothing else has any."""
    pairs = [(part, name, always, often) for part, (name, always, often) in part_tables().items()]
    pairs.append(("E", "epilogue", ("epilogue_slot",) if table.differentiated else (), ()))
    for part, task, always, often in pairs:
        values = getattr(table, task)
        for slot in (*always, *often):
            there = getattr(table, slot) != NONE
            odd = np.argwhere(there & (values == NONE) if slot in often else there != (values != NONE))
            if odd.size:
                where = tuple(odd[0].tolist())
                stage = where[1] if len(where) == 2 else table.path[-1][0]
                what = f"no {part}, yet a" if values[where] == NONE else f"{part}{values[where]} without a"
                raise ScheduleError(f"{table.name}, tick {where[0]}, stage {stage}: {what} {slot}")
    if table.form == "switched":
        for tick in range(table.num_ticks):
            for stage in range(table.num_stages):
                tasks = table.tasks(tick, stage)
                if len(tasks) > 1:
                    found = " and ".join(map(str, tasks))
                    raise ScheduleError(
                        f"{table.name}, tick {tick}, stage {stage}: {found}; a switched tick has one task"
                    )


def _check_counts(table: TickTable) -> None:
    end_stage, end_chunk = table.path[-1]
    for stage in range(table.num_stages):
        counts = Counter(table.order(stage))
        for chunk in range(table.num_chunks):
            for m in range(table.num_microbatches):
                found = {kind: counts[Task(kind, m, chunk)] for kind in TaskKind}
                backward = (found[B], found[BI], found[W])
                legal = ((1, 0, 0), (0, 1, 1)) if table.differentiated else ((0, 0, 0),)
                if found[F] != 1:
                    raise ScheduleError(
                        f"{table.name}, stage {stage}: {Task(F, m, chunk)} occurs {found[F]} times; every stage runs it "
                        "exactly once"
                    )
                if backward not in legal:
                    raise ScheduleError(
                        f"{table.name}, stage {stage}: {Task(B, m, chunk)} occurs {found[B]} times, {Task(BI, m, chunk)} "
                        f"{found[BI]}, {Task(W, m, chunk)} {found[W]}; every stage runs one B, or one Bi and one W"
                    )
                if found[R] > 1:
                    raise ScheduleError(
                        f"{table.name}, stage {stage}: {Task(R, m, chunk)} occurs {found[R]} times; once is enough"
                    )
    ends = np.where(table.forward_chunk[:, end_stage] == end_chunk, table.forward[:, end_stage], NONE)
    odd = np.flatnonzero(table.epilogue != ends)
    if odd.size:
        tick = int(odd[0])
        raise ScheduleError(
            f"{table.name}, tick {tick}, stage {end_stage}: the epilogue is of microbatch {table.epilogue[tick]} and the F of "
            f"microbatch {ends[tick]}; the epilogue follows the last F in the same tick"
        )


def _check_dependencies(table: TickTable) -> None:
    tick_of = {}
    for tick in range(table.num_ticks):
        for stage in range(table.num_stages):
            for task in table.tasks(tick, stage):
                kind = B if task.kind is BI else task.kind
                tick_of[kind, stage, task.chunk, task.microbatch] = tick, task
    path = table.path
    before, after = dict(zip(path[1:], path)), dict(zip(path, path[1:]))

    def require(legal: bool, stage: int, task: Task, tick: int, rule: str) -> None:
        if not legal:
            raise ScheduleError(f"{table.name}, tick {tick}, stage {stage}: {task} is too early, {rule}")

    for (kind, stage, chunk, m), (tick, task) in tick_of.items():
        neighbours = {F: before, B: after}.get(kind, {})
        if (stage, chunk) in neighbours:
            s, c = neighbours[stage, chunk]
            made, other = tick_of[kind, s, c, m]
            require(tick > made, stage, task, tick, f"stage {s} runs {other} in tick {made} and a hop takes a tick")
        first = {R: F, B: F, W: B}.get(kind)
        if first is not None:
            made, other = tick_of[first, stage, chunk, m]
            ends = table.form == "paired" and kind is B and (stage, chunk) == path[-1]
            rule = f"its {other} is in tick {made}"
            require(tick > made if ends else tick >= made, stage, task, tick, rule + " and the form is paired" * ends)
        if kind is B and (R, stage, chunk, m) in tick_of:
            made, other = tick_of[R, stage, chunk, m]
            require(tick >= made, stage, task, tick, f"its {other} is in tick {made}")


@dataclass
class _Buffer:
    """What the slots of one buffer of one stage hold: a microbatch of a chunk."""

    what: str
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def write(self, slot: int, key: tuple[int, int], where: str) -> None:
        if slot in self.held:
            raise ScheduleError(f"{where} writes {self.what} slot {slot}, still occupied by {_named(self.held[slot])}")
        self.held[slot] = key

    def read(self, slot: int, key: tuple[int, int], where: str, *, last: bool) -> None:
        if self.held.get(slot) != key:
            holds = _named(self.held[slot]) if slot in self.held else "nothing"
            raise ScheduleError(
                f"{where} reads {self.what} slot {slot}, which holds {holds}; it must hold {_named(key)}"
            )
        if last:
            del self.held[slot]


def _named(key: tuple[int, int]) -> str:
    microbatch, chunk = key
    return f"microbatch {microbatch}" + (f" of chunk {chunk}" if chunk else "")


class _Replay:
    """Runs the ticks on buffers that remember which microbatch each slot holds."""

    def __init__(self, table: TickTable):
        self.table = table
        self.stash, self.inbox, self.residuals, self.saved = (
            [_Buffer(what) for _ in range(table.num_stages)] for what in ("stash", "cotangent", "residual", "saved")
        )
        path = table.path
        self.before, self.after = dict(zip(path[1:], path)), dict(zip(path, path[1:]))
        self.end = path[-1]
        self.only_forward = not table.differentiated

    def run(self) -> None:
        for tick in range(self.table.num_ticks):
            rows = [self.table.tasks(tick, stage) for stage in range(self.table.num_stages)]
            for kinds in ((F,), (R,), (B, BI), (W,)):
                for stage, tasks in enumerate(rows):
                    for task in tasks:
                        if task.kind in kinds:
                            self._run(tick, stage, task)
            self._sends(tick, rows)
        for stage, buffers in enumerate(zip(self.stash, self.inbox, self.residuals, self.saved)):
            for buffer in buffers:
                for slot, key in buffer.held.items():
                    raise ScheduleError(
                        f"{self.table.name}, stage {stage}: {buffer.what} slot {slot} holds {_named(key)} after the last tick; "
                        "somebody must read what is kept"
                    )

    def _where(self, tick: int, stage: int, task: object) -> str:
        return f"{self.table.name}, tick {tick}, stage {stage}: {task}"

    def _run(self, tick: int, stage: int, task: Task) -> None:
        table, key, where = self.table, (task.microbatch, task.chunk), self._where(tick, stage, task)
        stash, inbox, residuals, saved = self.stash[stage], self.inbox[stage], self.residuals[stage], self.saved[stage]

        def slot(name: str) -> int:
            return int(getattr(table, name)[tick, stage])

        if task.kind is F:
            if (stage, task.chunk) not in self.before:
                stash.write(slot("forward_slot"), key, where)
            stash.read(slot("forward_slot"), key, where, last=self.only_forward)
            if slot("keep_slot") != NONE:
                residuals.write(slot("keep_slot"), key, where)
            if (stage, task.chunk) == self.end and not self.only_forward:
                epilogue = self._where(tick, stage, f"E{task.microbatch}")
                inbox.write(int(table.epilogue_slot[tick]), key, epilogue)
        elif task.kind is R:
            stash.read(slot("recompute_slot"), key, where, last=False)
            if key in residuals.held.values():
                raise ScheduleError(f"{where} makes residuals again that its F has kept")
            residuals.write(slot("recompute_keep_slot"), key, where)
        elif task.kind is W:
            stash.read(slot("weight_slot"), key, where, last=True)
            saved.read(slot("weight_saved_slot"), key, where, last=True)
        else:
            stash.read(slot("backward_slot"), key, where, last=task.kind is B)
            inbox.read(slot("cotangent_slot"), key, where, last=True)
            if slot("residual_slot") != NONE:
                residuals.read(slot("residual_slot"), key, where, last=True)
            elif key in residuals.held.values():
                raise ScheduleError(f"{where} does not read the residuals that are kept for it")
            if task.kind is BI:
                saved.write(slot("saved_slot"), key, where)

    def _sends(self, tick: int, rows: list[list[Task]]) -> None:
        table = self.table
        for way, kinds, neighbours, buffers in (
            ("forward", (F,), self.after, self.stash),
            ("backward", (B, BI), self.before, self.inbox),
        ):
            arrives: dict[tuple[str, int], tuple[int, Task, tuple[int, int]]] = {}
            for sender, tasks in enumerate(rows):
                for task in tasks:
                    if task.kind in kinds and (sender, task.chunk) in neighbours:
                        to, chunk = neighbours[sender, task.chunk]
                        other_side = table.folded and comes_back(table.num_stages, sender, to, way)
                        arrives["_back" * other_side, to] = sender, task, (task.microbatch, chunk)
            for back in ("", "_back"):
                slots = getattr(table, f"receive_{way}{back}_slot")
                for stage in range(table.num_stages):
                    slot = int(slots[tick, stage])
                    if (back, stage) not in arrives:
                        if slot != NONE:
                            raise ScheduleError(
                                f"{table.name}, tick {tick}, stage {stage}: receives into slot {slot}, but nothing is sent to it"
                            )
                        continue
                    sender, task, key = arrives[back, stage]
                    what = f"the output of {task} of stage {sender}"
                    if slot == NONE:
                        raise ScheduleError(f"{table.name}, tick {tick}, stage {stage}: has no slot for {what}")
                    buffers[stage].write(slot, key, self._where(tick, stage, what))
