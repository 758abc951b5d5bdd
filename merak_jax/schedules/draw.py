"""draw: a timeline of a schedule or tick table as SVG, PNG or text."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from merak_jax.schedules.simulate import Interval, Timeline, simulate
from merak_jax.schedules.task import Schedule, ScheduleError, TaskKind
from merak_jax.schedules.tick_table import TickTable


class _Look(NamedTuple):
    fill: str
    ink: str
    words: str


# From light to dark, so that the kinds also differ in grey.
_LOOKS = {
    TaskKind.F: _Look("#d3e7f8", "#10243a", "F forward"),
    TaskKind.R: _Look("#f0b43c", "#2b1d00", "R recompute"),
    TaskKind.BI: _Look("#3f9c73", "#ffffff", "Bi backward, input gradient"),
    TaskKind.B: _Look("#2d5f9e", "#ffffff", "B backward"),
    TaskKind.W: _Look("#5c2352", "#ffffff", "W backward, weight gradient"),
}
_GREY, _HATCH, _LINE, _INK = "#f4f4f4", "#c9c9c9", "#8a8a8a", "#222222"
_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"


def draw(
    schedule: Schedule | TickTable,
    path: str | Path,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    recompute: float = 0.0,
) -> None:
    """Write a picture of one step: stages as rows, time to the right, each task a box with its microbatch.

    A TickTable is drawn as it runs: hatched boxes are parts of a tick in which a stage idles.

    Args:
      schedule: what to draw.
      path: ends in `.svg`, or in `.png` where matplotlib is installed.
      forward: time of one F; the unit is yours, only the ratios show.
      backward: time of one B.
      recompute: time of one R, or of the R that each B of a TickTable begins with.

    Raises:
      ScheduleError: another suffix, a cost that is not positive, or a schedule that cannot run.
      ImportError: `.png` without matplotlib.
    """
    path = Path(path)
    timeline = simulate(schedule, forward=forward, backward=backward, recompute=recompute)
    if path.suffix == ".svg":
        path.write_text("\n".join(_svg(timeline)) + "\n", encoding="utf-8")
    elif path.suffix == ".png":
        _png(timeline, path)
    else:
        raise ScheduleError(f"cannot draw to {str(path)!r}: the file name must end in .svg or .png")


def draw_text(
    schedule: Schedule | TickTable,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    recompute: float = 0.0,
    width: int = 110,
) -> str:
    """The timeline for a terminal: `F3` starts the F of microbatch 3, `-` goes on with it, `.` is idle.

    Args are `draw`'s; rows longer than `width` characters go on below.
    """
    timeline = simulate(schedule, forward=forward, backward=backward, recompute=recompute)
    shortest = min(interval.stop - interval.start for interval in timeline.intervals if interval.task)
    longest_label = max(len(str(interval.task)) for interval in timeline.intervals if interval.task)
    columns_per_time = (longest_label + 1) / shortest

    def column(time: float) -> int:
        return round(time * columns_per_time)

    rows = [["."] * column(timeline.makespan) for _ in range(timeline.num_stages)]
    for interval in timeline.intervals:
        if interval.task:
            start, stop = column(interval.start), column(interval.stop)
            cell = str(interval.task).ljust(stop - start - 1, "-") + " "
            rows[interval.stage][start:stop] = cell[: stop - start]
    lines = [str(timeline)]
    label = len(f"s{timeline.num_stages - 1} ")
    tick_columns = longest_label + 1
    per_panel = max(1, (width - label) // tick_columns) * tick_columns
    for start in range(0, column(timeline.makespan), per_panel):
        lines += [
            f"s{stage}".ljust(label) + "".join(row[start : start + per_panel]).rstrip()
            for stage, row in enumerate(rows)
        ] + [""]
    return "\n".join(lines[:-1])


class _Layout:
    """Pixels of a timeline: where a time and a stage lie, and how large the whole is."""

    row, gap, left, right, top, legend = 26, 6, 62, 16, 44, 30

    def __init__(self, timeline: Timeline):
        shortest = min(interval.stop - interval.start for interval in timeline.intervals if interval.task)
        # Two digits fit into 17 pixels; short timelines are stretched to the width of a title.
        self.per_time = max(17.0 / shortest, min(48.0 / shortest, 700.0 / timeline.makespan))
        self.axis = self.top + timeline.num_stages * (self.row + self.gap)
        legend = sum(self.legend_entry(words) for _, words in _legend(timeline))
        self.width = self.left + max(timeline.makespan * self.per_time, legend) + self.right
        self.height = self.axis + 26 + self.legend

    @staticmethod
    def legend_entry(words: str) -> float:
        return 44 + 6.3 * len(words)

    def x(self, time: float) -> float:
        return round(self.left + time * self.per_time, 2)

    def y(self, stage: int) -> float:
        return self.top + stage * (self.row + self.gap)


def _title(timeline: Timeline) -> str:
    return (
        f"{timeline.name}   P={timeline.num_stages}   M={timeline.num_microbatches}   "
        f"makespan {timeline.makespan:g}   bubble {100 * timeline.bubble_share:.1f} %"
    )


def _legend(timeline: Timeline) -> list[tuple[TaskKind | None, str]]:
    entries: list[tuple[TaskKind | None, str]] = [(kind, _LOOKS[kind].words) for kind in timeline.kinds()]
    if any(interval.task is None for interval in timeline.intervals):
        entries.append((None, "idle in a tick"))
    return entries


def _axis_times(timeline: Timeline) -> list[float]:
    """Round times to mark on the axis, at most about a dozen, and the makespan."""
    step = 1.0
    while timeline.makespan / step > 12:
        step *= 2.5 if f"{step:g}".startswith("2") else 2
    while timeline.makespan / step < 2:
        step /= 10
    times = [step * count for count in range(int(timeline.makespan / step) + 1)]
    return [time for time in times if timeline.makespan - time > 0.5 * step] + [timeline.makespan]


def _svg(timeline: Timeline) -> Iterator[str]:
    layout = _Layout(timeline)
    width, height = f"{layout.width:g}", f"{layout.height:g}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" font-size="11">'
    )
    yield (
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{_GREY}"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{_HATCH}" stroke-width="1.5"/></pattern></defs>'
    )
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield (
        f'<text x="{layout.left}" y="24" font-size="14" font-weight="bold" fill="{_INK}" '
        f'xml:space="preserve">{escape(_title(timeline))}</text>'
    )
    for stage in range(timeline.num_stages):
        x, y = layout.left - 8, layout.y(stage) + layout.row / 2 + 4
        yield f'<text x="{x}" y="{y:g}" text-anchor="end" fill="{_INK}">stage {stage}</text>'
        yield _svg_box(layout, layout.y(stage), 0, timeline.makespan, _GREY, "none") + "/>"
    for interval in timeline.intervals:
        yield _svg_interval(layout, interval)
    for time in _axis_times(timeline):
        mark = layout.x(time)
        yield f'<path d="M{mark:g} {layout.axis}v5" stroke="{_LINE}"/>'
        yield f'<text x="{mark:g}" y="{layout.axis + 17}" text-anchor="middle" fill="{_INK}">{time:g}</text>'
    legend_x, legend_y = float(layout.left), layout.axis + 30
    for kind, words in _legend(timeline):
        fill = _LOOKS[kind].fill if kind else "url(#idle)"
        yield f'<rect x="{legend_x:g}" y="{legend_y}" width="18" height="14" fill="{fill}" stroke="{_LINE}"/>'
        yield f'<text x="{legend_x + 24:g}" y="{legend_y + 11}" fill="{_INK}">{words}</text>'
        legend_x += layout.legend_entry(words)
    yield "</svg>"


def _svg_box(layout: _Layout, y: float, start: float, stop: float, fill: str, line: str) -> str:
    x = layout.x(start)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{layout.x(stop) - x:g}" height="{layout.row}" '
        f'fill="{fill}" stroke="{line}" stroke-width="0.8"'
    )


def _svg_interval(layout: _Layout, interval: Interval) -> str:
    y = layout.y(interval.stage)
    if interval.task is None:
        return _svg_box(layout, y, interval.start, interval.stop, "url(#idle)", "none") + "/>"
    look = _LOOKS[interval.task.kind]
    middle = (layout.x(interval.start) + layout.x(interval.stop)) / 2
    hover = f"{interval.task} on stage {interval.stage}, {interval.start:g} to {interval.stop:g}"
    return (
        _svg_box(layout, y, interval.start, interval.stop, look.fill, _LINE)
        + f"><title>{hover}</title></rect>"
        + f'<text x="{middle:g}" y="{y + layout.row / 2 + 4:g}" text-anchor="middle" fill="{look.ink}" '
        + f'pointer-events="none">{_number(interval)}</text>'
    )


def _number(interval: Interval) -> str:
    """The microbatch, with the chunk where it is not the first."""
    return str(interval.task).lstrip("FRBiW")


def _png(timeline: Timeline, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise ImportError(
            f"drawing {str(path)!r} needs matplotlib: pip install 'merak_jax[plots]', or draw to a .svg file"
        ) from error
    layout = _Layout(timeline)
    pixels_per_inch, scale = 100, 1.5
    figure = Figure(figsize=(layout.width / pixels_per_inch, layout.height / pixels_per_inch))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, layout.width), ylim=(layout.height, 0))
    axes.set_axis_off()
    points = 72 / pixels_per_inch
    text: dict[str, Any] = {"fontsize": 11 * points, "color": _INK, "va": "center"}
    axes.text(layout.left, 20, _title(timeline), **text | {"fontsize": 14 * points, "weight": "bold"})

    def box(stage: int, start: float, stop: float, **look: Any) -> None:
        x = layout.x(start)
        axes.add_patch(Rectangle((x, layout.y(stage)), layout.x(stop) - x, layout.row, **look))

    idle: dict[str, Any] = {"facecolor": _GREY, "edgecolor": _HATCH, "hatch": "////", "linewidth": 0.0}
    for stage in range(timeline.num_stages):
        middle = layout.y(stage) + layout.row / 2
        axes.text(layout.left - 8, middle, f"stage {stage}", ha="right", **text)
        box(stage, 0, timeline.makespan, facecolor=_GREY, edgecolor="none")
    for interval in timeline.intervals:
        if interval.task is None:
            box(interval.stage, interval.start, interval.stop, **idle)
            continue
        look = _LOOKS[interval.task.kind]
        box(
            interval.stage,
            interval.start,
            interval.stop,
            facecolor=look.fill,
            edgecolor=_LINE,
            linewidth=0.8 * points,
        )
        x = (layout.x(interval.start) + layout.x(interval.stop)) / 2
        y = layout.y(interval.stage) + layout.row / 2
        axes.text(x, y, _number(interval), ha="center", **text | {"color": look.ink})
    for time in _axis_times(timeline):
        x = layout.x(time)
        axes.plot([x, x], [layout.axis, layout.axis + 5], color=_LINE, linewidth=points)
        axes.text(x, layout.axis + 13, f"{time:g}", ha="center", **text)
    handles = [
        Patch(label=words, **(idle if kind is None else {"facecolor": _LOOKS[kind].fill, "edgecolor": _LINE}))
        for kind, words in _legend(timeline)
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(layout.left / layout.width, 0.0),
        ncols=len(handles),
        fontsize=11 * points,
        frameon=False,
        borderpad=0.0,
        borderaxespad=0.4,
        handletextpad=0.5,
    )
    figure.savefig(path, dpi=pixels_per_inch * scale, facecolor="white")
