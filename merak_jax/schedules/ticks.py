"""Lower a schedule to a tick table: give every task a tick and every boundary a slot."""

from dataclasses import dataclass, field

import numpy as np

from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.tick_check import check
from merak_jax.schedules.tick_table import NONE, Phase, TickTable

__all__ = ["NONE", "Phase", "TickTable", "check", "lower"]

# Only their ratio matters: it decides between two ways to lay out the same order.
_NOMINAL_COSTS = {"forward": 1.0, "backward": 2.0}


def lower(schedule: Schedule, form: str = "merged") -> TickTable:
    """The tick table of a schedule, each stage running its list in order as early as the ticks allow.

    A stage's F and the B that follows it in its list share a tick where that makes the step shorter; where
    it does not, as in GPipe, they don't if that leaves fewer phases. A boundary is written straight into a
    slot of the receiver: the lowest that is free, so that the number of slots is the smallest possible.

    An order in which a stage waits for an answer of the next one (strict 1F1B) is legal but slow here, since
    a hop takes a tick, and its phases grow with M.

    Args:
      schedule: any legal order of F and B with one chunk.
      form: `"merged"`, at most one F and then one B on each stage in each tick.

    Returns:
      A TickTable that passes `check`.

    Raises:
      ScheduleError: another form, another kind of task, a missing or repeated task, or an order in which the
        stages wait for each other.
    """
    if form != "merged":
        raise ScheduleError(f"schedule {schedule.name!r} cannot be lowered to form {form!r}; known: 'merged'")
    _require_merged_tasks(schedule)
    layouts = [_allocate(schedule, _place(schedule, share_ticks=share)) for share in (True, False)]
    return min(layouts, key=lambda table: (table.makespan(**_NOMINAL_COSTS), len(table.phases), table.num_ticks))


def _require_merged_tasks(schedule: Schedule) -> None:
    if schedule.num_chunks != 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_chunks} chunks; merged ticks run schedules with 1"
        )
    for stage, order in enumerate(schedule.orders):
        for kind in TaskKind:
            found = sorted(task.microbatch for task in order if task.kind is kind)
            if kind in (TaskKind.F, TaskKind.B):
                for microbatch in range(schedule.num_microbatches):
                    if found.count(microbatch) != 1:
                        raise ScheduleError(
                            f"schedule {schedule.name!r}, stage {stage}: {kind}{microbatch} occurs "
                            f"{found.count(microbatch)} times; every stage runs it exactly once"
                        )
            elif found:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, stage {stage}: merged ticks run F and B only, not {kind}{found[0]}"
                )


@dataclass(frozen=True)
class _Ticks:
    """The tick of every task, `[stages, microbatches]`."""

    forward: np.ndarray
    backward: np.ndarray


def _place(schedule: Schedule, *, share_ticks: bool) -> _Ticks:
    """Give each task the earliest tick that its list and its neighbours allow."""
    last = schedule.num_stages - 1
    forward = np.full((schedule.num_stages, schedule.num_microbatches), NONE)
    backward = np.full_like(forward, NONE)
    position = [0] * schedule.num_stages

    def ready(task: Task, stage: int, tick: int) -> bool:
        if task.kind is TaskKind.F:
            return stage == 0 or 0 <= forward[stage - 1, task.microbatch] < tick
        if forward[stage, task.microbatch] == NONE:
            return False
        return stage == last or 0 <= backward[stage + 1, task.microbatch] < tick

    def run_next(kind: TaskKind, stage: int, tick: int) -> bool:
        order = schedule.orders[stage]
        if position[stage] == len(order):
            return False
        task = order[position[stage]]
        if task.kind is not kind or not ready(task, stage, tick):
            return False
        (forward if kind is TaskKind.F else backward)[stage, task.microbatch] = tick
        position[stage] += 1
        return True

    tick = 0
    while any(position[stage] < len(order) for stage, order in enumerate(schedule.orders)):
        progress = False
        for stage in range(schedule.num_stages):
            ran_forward = run_next(TaskKind.F, stage, tick)
            ran_backward = (share_ticks or not ran_forward) and run_next(TaskKind.B, stage, tick)
            progress |= ran_forward or ran_backward
        if not progress:
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
        tick += 1
    return _Ticks(forward, backward)


@dataclass
class _Slots:
    """The slots of one buffer of one stage; takes the lowest that is free."""

    free: list[bool] = field(default_factory=list)
    of: dict[int, int] = field(default_factory=dict)

    def take(self, microbatch: int) -> int:
        if True not in self.free:
            self.free.append(True)
        slot = self.free.index(True)
        self.free[slot] = False
        self.of[microbatch] = slot
        return slot

    def release(self, microbatch: int) -> int:
        slot = self.of.pop(microbatch)
        self.free[slot] = True
        return slot


def _allocate(schedule: Schedule, ticks: _Ticks) -> TickTable:
    """Replay the ticks in the order a tick runs, handing out slots."""
    num_stages, num_ticks = schedule.num_stages, int(ticks.backward.max()) + 1
    last = num_stages - 1
    shape = (num_ticks, num_stages)
    forward, forward_slot, backward, backward_slot = (np.full(shape, NONE) for _ in range(4))
    cotangent_slot, receive_forward_slot, receive_backward_slot = (np.full(shape, NONE) for _ in range(3))
    epilogue, epilogue_slot = (np.full(num_ticks, NONE) for _ in range(2))
    for stage in range(num_stages):
        forward[ticks.forward[stage], stage] = np.arange(schedule.num_microbatches)
        backward[ticks.backward[stage], stage] = np.arange(schedule.num_microbatches)

    stashes = [_Slots() for _ in range(num_stages)]
    inboxes = [_Slots() for _ in range(num_stages)]
    for tick in range(num_ticks):
        for stage, microbatch in _tasks(forward[tick]):
            forward_slot[tick, stage] = stashes[0].take(microbatch) if stage == 0 else stashes[stage].of[microbatch]
            if stage == last:
                epilogue[tick] = microbatch
                epilogue_slot[tick] = inboxes[last].take(microbatch)
        for stage, microbatch in _tasks(backward[tick]):
            backward_slot[tick, stage] = stashes[stage].release(microbatch)
            cotangent_slot[tick, stage] = inboxes[stage].release(microbatch)
        for stage, microbatch in _tasks(forward[tick]):
            if stage < last:
                receive_forward_slot[tick, stage + 1] = stashes[stage + 1].take(microbatch)
        for stage, microbatch in _tasks(backward[tick]):
            if stage > 0:
                receive_backward_slot[tick, stage - 1] = inboxes[stage - 1].take(microbatch)

    return TickTable(
        name=schedule.name,
        forward=forward,
        forward_slot=forward_slot,
        backward=backward,
        backward_slot=backward_slot,
        cotangent_slot=cotangent_slot,
        epilogue=epilogue,
        epilogue_slot=epilogue_slot,
        receive_forward_slot=receive_forward_slot,
        receive_backward_slot=receive_backward_slot,
        num_microbatches=schedule.num_microbatches,
        num_stash_slots=max(len(stash.free) for stash in stashes),
        num_cotangent_slots=max(len(inbox.free) for inbox in inboxes),
    )


def _tasks(row: np.ndarray) -> list[tuple[int, int]]:
    """The `(stage, microbatch)` pairs of one tick."""
    return [(stage, microbatch) for stage, microbatch in enumerate(row.tolist()) if microbatch != NONE]
