"""1F1B: after a warm-up each stage alternates one forward and one backward."""

from merak_jax.schedules.task import Schedule, Task, TaskKind, require_counts


def one_f_one_b(num_stages: int, num_microbatches: int, *, eager: bool = False) -> Schedule:
    """The 1F1B schedule, strict or eager: makespan (M+P-1)(F+B) for both when a hop costs nothing.

    Strict has min(M, P-s) microbatches in flight on stage s and suits one task per tick. Eager has
    min(M, 2(P-1-s)+1) and keeps every stage busy when a hop costs a tick, as it does in merged ticks.

    Source: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training" (strict).

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1; fewer than P is legal.
      eager: warm up with two forwards for each later stage instead of one.

    Returns:
      A Schedule with one chunk, named `1f1b` or `eager_1f1b`.

    Raises:
      ScheduleError: a count below 1.
    """
    name = "eager_1f1b" if eager else "1f1b"
    require_counts(name, num_stages, num_microbatches)
    per_later_stage = 2 if eager else 1
    orders = tuple(_order(per_later_stage * (num_stages - 1 - stage), num_microbatches) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, 1, orders)


def _order(warm_up: int, num_microbatches: int) -> tuple[Task, ...]:
    """`warm_up` forwards, then pairs of one forward and one backward, then the remaining backwards."""
    warm_up = min(warm_up, num_microbatches)
    order = [Task(TaskKind.F, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(warm_up, num_microbatches):
        order += [Task(TaskKind.F, microbatch), Task(TaskKind.B, microbatch - warm_up)]
    order += [Task(TaskKind.B, microbatch) for microbatch in range(num_microbatches - warm_up, num_microbatches)]
    return tuple(order)
