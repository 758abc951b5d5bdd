"""A picture of timelines as boxes, lines and words, before it becomes SVG or PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from merak_jax.schedules.simulate import Interval, Timeline
from merak_jax.schedules.task import TaskKind


class Look(NamedTuple):
    """How a kind of task looks: its colour, that of its number, and what the legend says."""

    fill: str
    ink: str
    words: str


# From light to dark, so that the kinds also differ in grey.
LOOKS = {
    TaskKind.F: Look("#d3e7f8", "#10243a", "F forward"),
    TaskKind.R: Look("#f0b43c", "#2b1d00", "R recompute"),
    TaskKind.BI: Look("#3f9c73", "#ffffff", "Bi backward, input gradient"),
    TaskKind.B: Look("#2d5f9e", "#ffffff", "B backward"),
    TaskKind.W: Look("#5c2352", "#ffffff", "W backward, weight gradient"),
}
GREY, HATCH, LINE, INK, PATH, HELD = "#f4f4f4", "#c9c9c9", "#8a8a8a", "#222222", "#c00000", "#9db7c9"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; `hatched` over its fill, `title` shows when the pointer is on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str = "none"
    line_width: float = 0.8
    hatched: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; `y` is its base line, `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    colour: str = INK
    size: float = 11
    anchor: str = "start"
    bold: bool = False


@dataclass
class Picture:
    """Shapes in pixels, y downwards, later ones over earlier ones."""

    width: float = 0.0
    height: float = 0.0
    shapes: list[Box | Words] = field(default_factory=list)


# A picture is no wider than so many of its shortest tasks; shorter ones have no room for their number.
_MOST_COLUMNS = 1500
_ROW, _GAP, _LEFT, _RIGHT, _STRIP = 26, 6, 62, 40, 11


def picture(timelines: Sequence[Timeline]) -> Picture:
    """Timelines below each other on one time axis: stages as rows, the critical path outlined, what is in flight below."""
    result = Picture()
    longest = max(t.makespan for t in timelines)
    shortest = max(shortest_task(timelines), longest / _MOST_COLUMNS)
    letters = max(len(_number(i)) for t in timelines for i in t.intervals if i.task)
    # A label fits into the shortest box; short timelines are stretched to the width of a title.
    per_time = max((3 + 7.0 * letters) / shortest, min(48.0 / shortest, 700.0 / longest))
    entries = list(_legend(timelines))
    top = 0.0
    for timeline in timelines:
        top = _panel(result, timeline, per_time, top)
    x = float(_LEFT)
    for kind, words in entries:
        if kind is None:
            result.shapes.append(Box(x, top + 8, 18, 14, GREY, HATCH, hatched=True))
        else:
            fill = LOOKS[kind].fill if isinstance(kind, TaskKind) else "#ffffff"
            line, width = (PATH, 1.8) if kind == "path" else (LINE, 0.8)
            result.shapes.append(Box(x, top + 8, 18, 14, fill, line, width))
            if kind == "chunk":
                result.shapes.append(Box(x + 2, top + 18, 14, 1.6, INK))
        result.shapes.append(Words(x + 24, top + 19, words))
        x += 44 + 6.3 * len(words)
    result.width = (
        max(_LEFT + longest * per_time, x - 16, _LEFT + 9.0 * max(len(_title(t)) for t in timelines)) + _RIGHT
    )
    result.height = top + 32
    result.shapes.insert(0, Box(0, 0, result.width, result.height, "#ffffff"))
    return result


def _panel(result: Picture, timeline: Timeline, per_time: float, top: float) -> float:
    """One timeline from `top` on; returns where the next one may begin."""

    def x(time: float) -> float:
        return round(_LEFT + time * per_time, 2)

    def y(stage: int) -> float:
        return top + 44 + stage * (_ROW + _GAP)

    def box(stage: int, start: float, stop: float, fill: str, line: str = "none", width: float = 0.8, **more) -> Box:
        return Box(x(start), y(stage), x(stop) - x(start), _ROW, fill, line, width, **more)

    shapes = result.shapes
    shapes.append(Words(_LEFT, top + 24, _title(timeline), size=14, bold=True))
    for stage in range(timeline.num_stages):
        shapes.append(Words(_LEFT - 8, y(stage) + _ROW / 2 + 4, f"stage {stage}", anchor="end"))
        shapes.append(box(stage, 0, timeline.makespan, GREY))
    for interval in timeline.intervals:
        if interval.task is None:
            shapes.append(box(interval.stage, interval.start, interval.stop, GREY, hatched=True))
            continue
        look = LOOKS[interval.task.kind]
        title = f"{interval.task} on stage {interval.stage}, {interval.start:g} to {interval.stop:g}"
        shapes.append(box(interval.stage, interval.start, interval.stop, look.fill, LINE, title=title))
        for chunk in range(interval.task.chunk):
            # A bar for each chunk after the first.
            width = x(interval.stop) - x(interval.start)
            shapes.append(
                Box(x(interval.start) + 2, y(interval.stage) + _ROW - 4 - 3 * chunk, width - 4, 1.6, look.ink)
            )
        if x(interval.stop) - x(interval.start) < 6.0 * len(_number(interval)):
            continue
        middle = (x(interval.start) + x(interval.stop)) / 2
        shapes.append(Words(middle, y(interval.stage) + _ROW / 2 + 4, _number(interval), look.ink, anchor="middle"))
    for interval in timeline.critical:
        shapes.append(box(interval.stage, interval.start, interval.stop, "none", PATH, 1.8))
    axis = y(timeline.num_stages)
    for time in _axis_times(timeline):
        shapes.append(Box(x(time), axis, 0.8, 5, LINE))
        shapes.append(Words(x(time), axis + 17, f"{time:g}", anchor="middle"))
    return _strip(result, timeline, x, axis + 26)


def _strip(result: Picture, timeline: Timeline, x, top: float) -> float:
    """Below the axis: for each stage the microbatches in flight over time, and the most of them at the right."""
    most = timeline.in_flight()
    highest = max(1, *most)
    for stage in range(timeline.num_stages):
        base = top + (stage + 1) * (_STRIP + 3)
        held = [*timeline.held(stage), (timeline.makespan, 0)]
        for (start, count), (stop, _) in zip(held, held[1:]):
            if count:
                height = _STRIP * count / highest
                result.shapes.append(Box(x(start), base - height, x(stop) - x(start), height, HELD))
        result.shapes.append(Box(x(0), base, x(timeline.makespan) - x(0), 0.6, LINE))
        result.shapes.append(Words(_LEFT - 8, base, f"held {stage}", size=9, anchor="end"))
        result.shapes.append(Words(x(timeline.makespan) + 6, base, f"{most[stage]}", size=9))
    return top + timeline.num_stages * (_STRIP + 3) + 8


def _title(timeline: Timeline) -> str:
    return (
        f"{timeline.name}   P={timeline.num_stages}   M={timeline.num_microbatches}   "
        f"makespan {timeline.makespan:g}   bubble {100 * timeline.bubble_share:.1f} %"
    )


def _legend(timelines: Sequence[Timeline]) -> Iterator[tuple[TaskKind | str | None, str]]:
    present = {kind for timeline in timelines for kind in timeline.kinds()}
    for kind in TaskKind:
        if kind in present:
            yield kind, LOOKS[kind].words
    if any(interval.task is None for timeline in timelines for interval in timeline.intervals):
        yield None, "idle in a tick"
    yield "path", "critical path"
    if any(interval.task and interval.task.chunk for timeline in timelines for interval in timeline.intervals):
        yield "chunk", "bar: later chunk"


def _axis_times(timeline: Timeline) -> list[float]:
    """Round times to mark on the axis, at most about a dozen, and the makespan."""
    step = 1.0
    while timeline.makespan / step > 12:
        step *= 2.5 if f"{step:g}".startswith("2") else 2
    while timeline.makespan / step < 2:
        step /= 10
    times = [step * count for count in range(int(timeline.makespan / step) + 1)]
    return [time for time in times if timeline.makespan - time > 0.5 * step] + [timeline.makespan]


def shortest_task(timelines: Sequence[Timeline]) -> float:
    """The shortest time of a task that takes any."""
    return min(i.stop - i.start for t in timelines for i in t.intervals if i.task and i.stop > i.start)


def _number(interval: Interval) -> str:
    assert interval.task is not None
    return str(interval.task.microbatch)
