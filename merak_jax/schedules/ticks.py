"""Lower a schedule to a tick table: give every task a tick and everything that waits a slot."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from merak_jax.schedules.needs import Needs, divided
from merak_jax.schedules.order_check import check_tasks
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_check import check
from merak_jax.schedules.tick_table import NONE, Phase, TickTable, comes_back, empty_tables

__all__ = ["FORMS", "NONE", "Phase", "TickTable", "check", "lower"]

FORMS = ("merged", "paired", "switched")

# Only their ratio matters: it decides between two ways to lay out the same order.
_NOMINAL_COSTS = {"forward": 1.0, "backward": 2.0}

F, R, B, BI, W = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.W
_RANK = {F: 0, R: 1, B: 2, BI: 2, W: 3}


def lower(schedule: Schedule, form: str = "merged") -> TickTable:
    """The tick table of a schedule, each stage running its list in order as early as the ticks allow.

    A hop takes a tick. What a stage does in one tick depends on the form:

    - `merged`: at most one F, one R, one B (or Bi) and one W, in this order, so that an F and the B that follows it in the list
      share a tick. Where sharing makes the step no shorter, as in GPipe, and leaves more phases, they don't.
    - `paired`: as merged, but B runs at least one tick after its F also where the path ends. Then F and B of a tick do not
      depend on each other, may run block by block in turn, and share a tick in whichever order the list has them.
    - `switched`: one task, of about equal lengths: a B becomes R (where the stage recomputes), Bi and W. An order in which a
      stage waits for an answer of the next one (strict 1F1B, Merak's) keeps its pace and its number of microbatches in flight.

    What arrives is written straight into a slot of the receiver: the lowest that is free, so that the number of slots is the
    smallest possible.

    Args:
      schedule: any legal order; without backward it is that of an evaluation.
      form: one of `FORMS`.

    Returns:
      A TickTable that passes `check`.

    Raises:
      ScheduleError: another form, a missing or repeated task, or an order in which the stages wait for each other.
    """
    if form not in FORMS:
        known = ", ".join(map(repr, FORMS))
        raise ScheduleError(f"schedule {schedule.name!r} cannot be lowered to form {form!r}; known: {known}")
    check_tasks(schedule)
    if form == "switched":
        schedule = divided(schedule)
    shares = (True, False) if form == "merged" else (form == "paired",)
    layouts = [_Allocation(schedule, _Timing(schedule, share, form).run(), form).run() for share in shares]
    return min(layouts, key=lambda table: (table.makespan(**_NOMINAL_COSTS), len(table.phases), table.num_ticks))


class _Timing:
    """Gives each task the earliest tick that its list, its neighbours and the form allow."""

    def __init__(self, schedule: Schedule, share_ticks: bool, form: str):
        self.schedule, self.share, self.paired = schedule, share_ticks, form == "paired"
        self.needs = Needs(schedule)
        self.tick_of: dict[tuple[int, Task], int] = {}

    def run(self) -> list[list[list[Task]]]:
        """`[ticks][stages]` the tasks of a stage in a tick, in order."""
        schedule = self.schedule
        position = [0] * schedule.num_stages
        ticks: list[list[list[Task]]] = []
        while any(at < len(order) for at, order in zip(position, schedule.orders)):
            tick = len(ticks)
            row = []
            for stage, order in enumerate(schedule.orders):
                here: list[Task] = []
                while position[stage] < len(order) and self._fits(stage, order[position[stage]], here, tick):
                    task = order[position[stage]]
                    here.append(task)
                    made = Task(B, task.microbatch, task.chunk) if task.kind is BI else task
                    self.tick_of[stage, made] = tick
                    position[stage] += 1
                row.append(here)
            if not any(row):
                waiting = [
                    f"stage {stage} for {order[position[stage]]}"
                    for stage, order in enumerate(schedule.orders)
                    if position[stage] < len(order)
                ]
                raise ScheduleError(
                    f"schedule {schedule.name!r} stops after {tick} ticks, its stages wait for each other: "
                    + ", ".join(waiting)
                    + "; F needs the previous stage's F, B the next stage's B and its own stage's F"
                )
            ticks.append(row)
        return ticks

    def _fits(self, stage: int, task: Task, here: list[Task], tick: int) -> bool:
        rank, ranks = _RANK[task.kind], [_RANK[other.kind] for other in here]
        if here and (not self.share or (rank in ranks if self.paired else rank <= ranks[-1])):
            return False
        place = (stage, task.chunk)
        for source, need in self.needs.of(stage, task):
            made = self.tick_of.get((source, need))
            # The same task on the stage itself may come earlier in this tick; what is sent, also to itself, takes a tick.
            sent = need.kind is task.kind or (task.kind is BI and need.kind is B)
            if made is None or (made == tick and sent):
                return False
        ends = self.paired and task.kind in (B, BI) and place not in self.needs.after
        return not ends or self.tick_of[stage, Task(F, task.microbatch, task.chunk)] < tick


@dataclass
class _Slots:
    """The slots of one buffer of one stage; takes the lowest that is free."""

    free: list[bool] = field(default_factory=list)
    of: dict[Hashable, int] = field(default_factory=dict)

    def take(self, key: Hashable) -> int:
        if True not in self.free:
            self.free.append(True)
        slot = self.free.index(True)
        self.free[slot] = False
        self.of[key] = slot
        return slot

    def release(self, key: Hashable) -> int:
        slot = self.of.pop(key)
        self.free[slot] = True
        return slot


class _Allocation:
    """Replays the ticks in the order a tick runs, handing out slots."""

    def __init__(self, schedule: Schedule, ticks: list[list[list[Task]]], form: str):
        self.schedule, self.ticks, self.form = schedule, ticks, form
        self.needs = Needs(schedule)
        self.end = schedule.path()[-1]
        self.tables = empty_tables(len(ticks), schedule.num_stages)
        self.stash, self.inbox, self.residuals, self.saved = (
            [_Slots() for _ in range(schedule.num_stages)] for _ in range(4)
        )
        kinds = {task.kind for order in schedule.orders for task in order}
        self.forward_only = kinds == {F}

    def run(self) -> TickTable:
        for tick, row in enumerate(self.ticks):
            for rank in range(4):
                for stage, tasks in enumerate(row):
                    for task in tasks:
                        if _RANK[task.kind] == rank:
                            self._run(tick, stage, task)
            for stage, tasks in enumerate(row):
                for task in tasks:
                    self._send(tick, stage, task)
        return TickTable(
            name=self.schedule.name,
            num_microbatches=self.schedule.num_microbatches,
            num_stash_slots=max(len(b.free) for b in self.stash),
            num_cotangent_slots=max(len(b.free) for b in self.inbox),
            num_residual_slots=max(len(b.free) for b in self.residuals),
            num_saved_slots=max(len(b.free) for b in self.saved),
            num_chunks=self.schedule.num_chunks,
            folded=self.schedule.folded,
            form=self.form,
            **self.tables,
        )

    def _run(self, tick: int, stage: int, task: Task) -> None:
        tables, m, chunk = self.tables, task.microbatch, task.chunk
        key, at = (m, chunk), (tick, stage)
        stash, inbox = self.stash[stage], self.inbox[stage]
        residuals, saved = self.residuals[stage], self.saved[stage]
        if task.kind is F:
            tables["forward"][at], tables["forward_chunk"][at] = m, chunk
            first = (stage, chunk) not in self.needs.before
            tables["forward_slot"][at] = stash.take(key) if first else stash.of[key]
            if stage in self.schedule.keeps and not self.forward_only:
                tables["keep_slot"][at] = residuals.take(key)
            if (stage, chunk) == self.end:
                tables["epilogue"][tick] = m
                if not self.forward_only:
                    tables["epilogue_slot"][tick] = inbox.take(key)
            if self.forward_only:
                stash.release(key)
        elif task.kind is R:
            tables["recompute"][at], tables["recompute_chunk"][at] = m, chunk
            tables["recompute_slot"][at] = stash.of[key]
            tables["recompute_keep_slot"][at] = residuals.take(key)
        elif task.kind is W:
            tables["weight"][at], tables["weight_chunk"][at] = m, chunk
            tables["weight_slot"][at] = stash.release(key)
            tables["weight_saved_slot"][at] = saved.release(key)
        else:
            tables["backward"][at], tables["backward_chunk"][at] = m, chunk
            tables["cotangent_slot"][at] = inbox.release(key)
            if key in residuals.of:
                tables["residual_slot"][at] = residuals.release(key)
            if task.kind is BI:
                tables["saved_slot"][at] = saved.take(key)
                tables["backward_slot"][at] = stash.of[key]
            else:
                tables["backward_slot"][at] = stash.release(key)

    def _send(self, tick: int, stage: int, task: Task) -> None:
        place, key = (stage, task.chunk), task.microbatch
        if task.kind is F and place in self.needs.after:
            to, chunk = self.needs.after[place]
            slot, way = self.stash[to].take((key, chunk)), "forward"
        elif task.kind in (B, BI) and place in self.needs.before:
            to, chunk = self.needs.before[place]
            slot, way = self.inbox[to].take((key, chunk)), "backward"
        else:
            return
        back = "_back" if self.schedule.folded and comes_back(self.schedule.num_stages, stage, to, way) else ""
        self.tables[f"receive_{way}{back}_slot"][tick, to] = slot
