"""The schedule of an evaluation: every stage runs F of each microbatch, and nothing else."""

from merak_jax.schedules.task import Schedule, Task, TaskKind, require_counts
from merak_jax.schedules.tick_table import TickTable
from merak_jax.schedules.ticks import lower


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1, folded: bool = False) -> TickTable:
    """The tick table of a pipeline that only runs forward: M + P - 1 ticks with one chunk.

    With several chunks a stage prefers what is furthest on its way, so that little waits.
    """
    require_counts("forward", num_stages, num_microbatches, num_chunks)
    frame = Schedule("forward", num_stages, num_microbatches, num_chunks, ((),) * num_stages, folded=folded)
    path = frame.path()
    # `waiting[place]`: the next microbatch of a place, and how many have arrived.
    following = dict.fromkeys(path, 0)
    arrived = dict.fromkeys(path, 0) | {path[0]: num_microbatches}
    orders: list[list[Task]] = [[] for _ in range(num_stages)]
    while any(following[place] < num_microbatches for place in path):
        ran = {}
        for place in path:
            if following[place] < arrived[place]:
                ran[place[0]] = place
        for stage, place in ran.items():
            orders[stage].append(Task(TaskKind.F, following[place], place[1]))
            following[place] += 1
        for place in ran.values():
            behind = path.index(place) + 1
            if behind < len(path):
                arrived[path[behind]] += 1
    schedule = Schedule("forward", num_stages, num_microbatches, num_chunks, tuple(map(tuple, orders)), folded=folded)
    return lower(schedule)
