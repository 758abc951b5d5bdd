"""Zero-bubble schedules: the backward is split, and weight gradients fill what would be idle."""

from merak_jax.schedules.greedy import Times, place_greedily
from merak_jax.schedules.task import Schedule, Task, TaskKind, require_counts


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: makespan M(F+Bi+W) + (P-1)(F+Bi-W), with at most P microbatches in flight on every stage.

    Each stage runs 1F1B with Bi in the place of B. W of a microbatch waits as many microbatches as there are stages before, so
    that the drain of the late stages has W to do.

    Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 3.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.

    Raises:
      ScheduleError: a count below 1.
    """
    require_counts("zb_h1", num_stages, num_microbatches)
    orders = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage, num_microbatches)
        order = [Task(TaskKind.F, m) for m in range(warm_up)]
        for m in range(num_microbatches):
            order.append(Task(TaskKind.BI, m))
            if m >= stage:
                order.append(Task(TaskKind.W, m - stage))
            if m + warm_up < num_microbatches:
                order.append(Task(TaskKind.F, m + warm_up))
        late = max(0, num_microbatches - stage)
        order += [Task(TaskKind.W, m) for m in range(late, num_microbatches)]
        orders.append(tuple(order))
    return Schedule("zb_h1", num_stages, num_microbatches, 1, tuple(orders))


def zero_bubble_v(num_stages: int, num_microbatches: int, *, recompute: bool = False) -> Schedule:
    """ZB-V: two chunks that go forth and back, so that the first stage also holds the last layers; B is split.

    Tasks are placed one by one: input gradients first, then forwards, then what W fills, within the memory of 1F1B's first stage
    (P microbatches, 2 P halves) on every stage.

    Source: Qi et al. 2024, "Pipeline parallelism with controllable memory", for the placement.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.
      recompute: whether stages recompute, as a task of its own that a stage does while it waits.

    Raises:
      ScheduleError: a count below 1.
    """
    require_counts("zb_v", num_stages, num_microbatches)
    most = (2 * num_stages,) * num_stages
    found = place_greedily(
        "zb_v",
        num_stages,
        num_microbatches,
        num_chunks=2,
        folded=True,
        times=Times(recompute=float(recompute)),
        most=most,
        divide=True,
        early=recompute,
    )
    assert found is not None
    return found
