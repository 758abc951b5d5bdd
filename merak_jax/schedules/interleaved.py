"""Interleaved 1F1B: every stage holds several chunks of the model, and a microbatch visits it once for each."""

from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind, require_counts


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """The interleaved schedule: makespan M(F+B) + (P-1)(F+B)/V where P divides M.

    Microbatches go in groups of P (or a little more, where P does not divide M); a stage runs a group through its first chunk,
    then through the next one.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1, not only multiples of P.
      num_chunks: V, at least 1.

    Raises:
      ScheduleError: a count below 1.
    """
    require_counts("interleaved", num_stages, num_microbatches, num_chunks)
    count = max(1, num_microbatches // num_stages)
    ends = [num_microbatches * (g + 1) // count for g in range(count)]
    groups = [range(first, end) for first, end in zip([0, *ends], ends)]
    largest = max(len(group) for group in groups)
    forwards = [Task(TaskKind.F, m, v) for group in groups for v in range(num_chunks) for m in group]
    backwards = [Task(TaskKind.B, m, v) for group in groups for v in reversed(range(num_chunks)) for m in group]
    # Groups of different sizes may need a stage to run ahead a little further.
    for ahead in range(num_stages * num_chunks + 1):
        orders = []
        for stage in range(num_stages):
            warm_up = min(2 * (num_stages - 1 - stage) + (num_chunks - 1) * largest + ahead, len(forwards))
            order = list(forwards[:warm_up])
            for n in range(warm_up, len(forwards)):
                order += [forwards[n], backwards[n - warm_up]]
            orders.append((*order, *backwards[len(forwards) - warm_up :]))
        schedule = Schedule("interleaved", num_stages, num_microbatches, num_chunks, tuple(orders))
        try:
            simulate(schedule)
        except ScheduleError:
            continue
        return schedule
    raise AssertionError(f"no interleaved order for P={num_stages}, M={num_microbatches}, V={num_chunks}")
