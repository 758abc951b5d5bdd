"""GPipe: every stage runs all forwards, then all backwards."""

from merak_jax.schedules.task import Schedule, Task, TaskKind, require_counts


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """The GPipe schedule: makespan (M+P-1)(F+B), M microbatches in flight on every stage.

    Source: Huang et al. 2019, "GPipe", section 2.3, with the backwards in the order of the forwards.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1; fewer than P is legal.

    Returns:
      A Schedule with one chunk and the same order on every stage.

    Raises:
      ScheduleError: a count below 1.
    """
    require_counts("gpipe", num_stages, num_microbatches)
    forwards = tuple(Task(TaskKind.F, microbatch) for microbatch in range(num_microbatches))
    backwards = tuple(Task(TaskKind.B, microbatch) for microbatch in range(num_microbatches))
    return Schedule("gpipe", num_stages, num_microbatches, 1, (forwards + backwards,) * num_stages)
