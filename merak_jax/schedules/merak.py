"""Merak's schedules: 1F1B with early recomputation, without recomputation on the last stage, with a shifted critical path."""

from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind, require_counts

F, R, B = TaskKind.F, TaskKind.R, TaskKind.B


def early_recompute(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose drain recomputes before the gradient arrives: makespan (M+P-1)(F+B) + M R, with P-s in flight.

    In the drain a stage waits for the next one's B. It spends the wait on the recomputation of the microbatch it waits for, so
    that a hop of the drain costs B and not R+B.

    Source: Lai et al. 2023, "Merak" (TPDS 34), section on stage-aware recomputation.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.

    Raises:
      ScheduleError: a count below 1.
    """
    require_counts("early_recompute", num_stages, num_microbatches)
    orders = tuple(_with_drain(num_stages, num_microbatches, stage) for stage in range(num_stages))
    return Schedule("early_recompute", num_stages, num_microbatches, 1, orders)


def last_no_recompute(num_stages: int, num_microbatches: int) -> Schedule:
    """Early recomputation, and none on the last stage: makespan (M+P-1)(F+B) + (M-2) R.

    The last stage runs B right behind F, so that keeping the residuals of one microbatch costs it little memory. The stage
    before it recomputes its first microbatch while it waits for the first gradient.

    Source: as `early_recompute`.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1; at least 2 where there are several stages.

    Raises:
      ScheduleError: a count below that.
    """
    name = "last_no_recompute"
    require_counts(name, num_stages, num_microbatches)
    if num_stages > 1:
        _require_microbatches(name, num_microbatches, 2)
    orders = []
    for stage in range(num_stages):
        if stage == num_stages - 2:
            rest = one_f_one_b(2, num_microbatches).orders[0][2:]
            orders.append((Task(F, 0), Task(F, 1), Task(R, 0), *rest))
        else:
            orders.append(_with_drain(num_stages, num_microbatches, stage))
    return Schedule(name, num_stages, num_microbatches, 1, tuple(orders), keeps=(num_stages - 1,))


def shifted_critical_path(num_stages: int, num_microbatches: int) -> Schedule:
    """Merak's shifted critical path: makespan (M+P-1)(F+B) + (M-3) R + max(0, F+R-B).

    Without recomputation on the last stage the one before it sets the pace. It takes one more microbatch in flight (3), and
    recomputes the first two early, so that it never waits between them; the stage before that recomputes its first one early.

    Source: Lai et al. 2023, "Merak" (TPDS 34), section on the shifted critical path.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M; at least P and at least 4 where there are several stages.

    Raises:
      ScheduleError: a count below that.
    """
    name = "shifted_critical_path"
    require_counts(name, num_stages, num_microbatches)
    if num_stages > 1:
        _require_microbatches(name, num_microbatches, max(4, num_stages))
    orders = []
    for stage in range(num_stages):
        order = _with_drain(num_stages, num_microbatches, stage)
        if stage == num_stages - 3:
            order = _before(order, Task(B, 0), Task(R, 0))
        elif stage == num_stages - 2:
            order = (*(Task(F, m) for m in range(3)), Task(R, 0), Task(B, 0), Task(R, 1), Task(B, 1))
            for microbatch in range(3, num_microbatches):
                order += (Task(F, microbatch), Task(B, microbatch - 1))
            order += (Task(B, num_microbatches - 1),)
        orders.append(order)
    return Schedule(name, num_stages, num_microbatches, 1, tuple(orders), keeps=(num_stages - 1,))


def _with_drain(num_stages: int, num_microbatches: int, stage: int) -> tuple[Task, ...]:
    """The 1F1B order of a stage, with an R before each B for which it waits at the end."""
    order = one_f_one_b(num_stages, num_microbatches).orders[stage]
    for microbatch in range(num_microbatches):
        if num_microbatches - microbatch + stage < num_stages:
            order = _before(order, Task(B, microbatch), Task(R, microbatch))
    return order


def _before(order: tuple[Task, ...], task: Task, new: Task) -> tuple[Task, ...]:
    at = order.index(task)
    return (*order[:at], new, *order[at:]) if new not in order else order


def _require_microbatches(name: str, num_microbatches: int, least: int) -> None:
    if num_microbatches < least:
        raise ScheduleError(
            f"schedule {name!r} needs at least {least} microbatches here, got {num_microbatches}; take more microbatches "
            "or another schedule"
        )


def stage_aware_ratios(num_stages: int, first: float, *, shifted: bool = False) -> tuple[float, ...]:
    """Which share of its blocks each stage recomputes so that all need the same memory, given that of the first one.

    Stage k of 1...P has P-k+1 microbatches in flight, and so can keep more of each the later it comes; the last one recomputes
    nothing. In the shifted order stage P-1 holds three, as the one before it does.

    Source: as `early_recompute`.

    Args:
      num_stages: P, at least 1.
      first: share of the first stage, 0 to 1.
      shifted: whether the order is that of `shifted_critical_path`.

    Raises:
      ScheduleError: a share outside 0 to 1, or no stage.
    """
    require_counts("stage_aware", num_stages, 1)
    if not 0 <= first <= 1:
        raise ScheduleError(f"the share of blocks that the first stage recomputes must be 0 to 1, got {first}")
    ratios = [1 - (1 - first) * (num_stages - 1) / (num_stages - k) for k in range(1, num_stages)]
    if shifted and num_stages > 2:
        ratios[-1] = ratios[-2]
    return (*(max(0.0, ratio) for ratio in ratios), 0.0)
