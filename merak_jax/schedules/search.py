"""Find an order by list scheduling: at least as good as every named one for the given times and memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.greedy import Times, on_stages, place_greedily
from merak_jax.schedules.interleaved import interleaved
from merak_jax.schedules.merak import early_recompute, last_no_recompute, shifted_critical_path
from merak_jax.schedules.needs import divided, keeping, without_recompute
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.simulate import Timeline, simulate
from merak_jax.schedules.task import Schedule, ScheduleError, TaskKind, require_counts
from merak_jax.schedules.ticks import lower
from merak_jax.schedules.zero_bubble import zero_bubble_h1, zero_bubble_v

F, R, B, BI, W = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.W


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most microbatches (of one chunk each) that it holds at once: from F to B, or to W where B is split."""
    most = []
    for order in schedule.orders:
        now = peak = 0
        for task in order:
            now += (task.kind is F) - (task.kind in (B, W))
            peak = max(peak, now)
        most.append(peak)
    return most


def search(
    num_stages: int,
    num_microbatches: int,
    times: Times | None = None,
    *,
    memory: Sequence[int] | None = None,
    num_chunks: int = 1,
    split: bool = True,
    keeps: tuple[int, ...] = (),
    form: str = "free",
) -> Schedule:
    """The fastest order found by simulation; never slower than a named schedule that fits.

    Named schedules are tried, and orders made task by task: whenever a stage is free it takes what it can start first, input
    gradients before forwards before recomputations before weight gradients, as far as its memory goes.

    Args:
      num_stages, num_microbatches: P and M, at least 1.
      times: of the tasks.
      memory: for each stage the most microbatches in flight (times chunks); no limit if not given.
      num_chunks: V, the most chunks of a stage.
      split: whether B may be split into Bi and W.
      keeps: stages that keep their residuals in any case. Where `times.recompute` is above 0 the other ones recompute, but for
        those with one microbatch in flight: its B needs the residuals anyway.
      form: what is simulated: "free", stages at their own pace, or the ticks that the order is lowered to, of this form.

    Raises:
      ScheduleError: a count below 1, an unknown form, or memory in which nothing runs.
    """
    require_counts("search", num_stages, num_microbatches, num_chunks)
    times = times or Times()
    given = {"memory": memory, **{name: getattr(times, name) for name in Times.__dataclass_fields__}}
    for name, values in given.items():
        if isinstance(values, Iterable) and len(list(values)) != num_stages:
            raise ScheduleError(f"search: {name} has {len(list(values))} values, but there are {num_stages} stages")
    limit = [num_microbatches * num_chunks] * num_stages if memory is None else list(memory)
    best: tuple[float, Schedule] | None = None
    for schedule in _candidates(num_stages, num_microbatches, times, limit, num_chunks, split, keeps):
        held = in_flight(schedule)
        if any(times.of(R, s) for s in range(num_stages)) and any(
            held[s] > 1 for s in schedule.keeps if s not in keeps
        ):
            continue
        if any(count > m * schedule.num_chunks // num_chunks for count, m in zip(held, limit)):
            continue
        makespan = timeline(schedule, times, form).makespan
        if best is None or makespan < best[0] - 1e-9:
            best = makespan, schedule
    if best is None:
        raise ScheduleError(
            f"no order of {num_stages} stages and {num_microbatches} microbatches runs with at most {limit} in flight; "
            "a stage needs room for one microbatch of each chunk"
        )
    return best[1]


def _candidates(num_stages, num_microbatches, times, limit, num_chunks, split, keeps) -> Iterator[Schedule]:
    for schedule in _named(num_stages, num_microbatches, num_chunks, split):
        named = keeping(schedule, keeps)
        yield named
        if split:
            yield divided(named)
    shapes = [(1, False)]
    for chunks in range(2, num_chunks + 1):
        shapes += [(chunks, False), (chunks, True)]
    for (chunks, folded), divide, early in itertools.product(
        shapes, (False, True) if split else (False,), (False, True)
    ):
        if early and not times.recompute:
            continue
        for room in _limits(num_stages, num_microbatches, chunks, limit, num_chunks):
            # A last stage with one microbatch in flight keeps its residuals, and there is no R on it.
            alone = (*room[:-1], min(room[-1], 1))
            for most, kept in ((room, keeps), (alone, (*keeps, num_stages - 1))):
                if kept != keeps and (chunks > 1 or not times.recompute or num_stages - 1 in keeps):
                    continue
                made = place_greedily(
                    "search",
                    num_stages,
                    num_microbatches,
                    num_chunks=chunks,
                    folded=folded,
                    times=times,
                    most=most,
                    divide=divide,
                    early=early,
                    keeps=kept,
                )
                if made is not None:
                    yield made


def _named(num_stages: int, num_microbatches: int, num_chunks: int, split: bool) -> Iterator[Schedule]:
    for make in (one_f_one_b, gpipe, early_recompute, last_no_recompute, shifted_critical_path):
        try:
            yield make(num_stages, num_microbatches)
        except ScheduleError:
            continue
    yield one_f_one_b(num_stages, num_microbatches, eager=True)
    if split:
        yield zero_bubble_h1(num_stages, num_microbatches)
    for chunks in range(2, num_chunks + 1):
        yield interleaved(num_stages, num_microbatches, chunks)
        if split and chunks == 2:
            yield zero_bubble_v(num_stages, num_microbatches)
            yield zero_bubble_v(num_stages, num_microbatches, recompute=True)


def _limits(num_stages, num_microbatches, chunks, limit, num_chunks) -> list[tuple[int, ...]]:
    """Numbers of microbatches in flight that are worth a try, within the limit."""
    whole = [num_microbatches * chunks] * num_stages
    shapes = [
        whole,
        [chunks * (num_stages - s) for s in range(num_stages)],
        [chunks * (num_stages - s) + 1 for s in range(num_stages)],
        [chunks * num_stages] * num_stages,
        [chunks * (2 * (num_stages - 1 - s) + 1) for s in range(num_stages)],
    ]
    found = [tuple(min(a, m * chunks // num_chunks) for a, m in zip(shape, limit)) for shape in shapes]
    return list(dict.fromkeys(found))


def timeline(schedule: Schedule, times: Times, form: str = "free") -> Timeline:
    """The timeline of a schedule with these times, free-running or in ticks."""
    stages = range(schedule.num_stages)
    recomputes = any(on_stages(times.recompute, schedule.num_stages))
    return simulate(
        schedule if form == "free" else lower(schedule if recomputes else without_recompute(schedule), form),
        forward=times.forward,
        backward=[
            a + b for a, b in zip(*(on_stages(t, len(stages)) for t in (times.input_gradient, times.weight_gradient)))
        ],
        recompute=times.recompute,
        weight_gradient=times.weight_gradient,
        tensor=times.tensor,
        hidden=times.hidden,
        hop=times.hop,
    )
