"""draw: timelines of schedules or tick tables as SVG, PNG, a trace file or text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from merak_jax.schedules.picture import GREY, HATCH, Box, Picture, Words, picture, shortest_task
from merak_jax.schedules.simulate import Timeline, simulate
from merak_jax.schedules.task import Schedule, ScheduleError
from merak_jax.schedules.tick_table import TickTable

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"

Drawable = Schedule | TickTable | Timeline


def draw(schedule: Drawable | Sequence[Drawable], path: str | Path, **costs: Any) -> None:
    """Write a picture of one step: stages as rows, time to the right, each task a box with its microbatch.

    A TickTable is drawn as it runs: hatched boxes are parts of a tick in which a stage idles. The critical path has a red
    outline; below, each stage's microbatches in flight. Several schedules are drawn below each other, on one time axis.

    Args:
      schedule: what to draw.
      path: ends in `.svg`, in `.png` where matplotlib is installed, or in `.json`: a trace for Perfetto or chrome://tracing, with
        one unit of time as a microsecond.
      costs: as of `simulate`.

    Raises:
      ScheduleError: another suffix, a cost that is not positive, or a schedule that cannot run.
      ImportError: `.png` without matplotlib.
    """
    path = Path(path)
    timelines = [_timeline(s, costs) for s in ([schedule] if isinstance(schedule, Drawable) else schedule)]
    if not timelines:
        raise ScheduleError("there is no schedule to draw")
    if path.suffix == ".svg":
        path.write_text("\n".join(_svg(picture(timelines))) + "\n", encoding="utf-8")
    elif path.suffix == ".png":
        _png(picture(timelines), path)
    elif path.suffix == ".json":
        path.write_text(
            json.dumps({"traceEvents": list(_events(timelines)), "displayTimeUnit": "ms"}), encoding="utf-8"
        )
    else:
        raise ScheduleError(f"cannot draw to {str(path)!r}: the file name must end in .svg, .png or .json")


def draw_text(schedule: Drawable, *, width: int = 110, **costs: Any) -> str:
    """The timeline for a terminal: `F3` starts the F of microbatch 3, `-` goes on with it, `.` is idle.

    Args are `draw`'s; rows longer than `width` characters go on below.
    """
    timeline = _timeline(schedule, costs)
    shortest = max(shortest_task([timeline]), timeline.makespan / 1500)
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


def _timeline(schedule: Drawable, costs: dict[str, Any]) -> Timeline:
    return schedule if isinstance(schedule, Timeline) else simulate(schedule, **costs)


def _svg(drawn: Picture) -> Iterator[str]:
    width, height = f"{drawn.width:g}", f"{drawn.height:g}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" font-size="11">'
    )
    yield (
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{GREY}"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{HATCH}" stroke-width="1.5"/></pattern></defs>'
    )
    for shape in drawn.shapes:
        yield _svg_box(shape) if isinstance(shape, Box) else _svg_words(shape)
    yield "</svg>"


def _svg_box(box: Box) -> str:
    fill = "url(#idle)" if box.hatched else box.fill
    text = (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" fill="{fill}" '
        f'stroke="{box.line}" stroke-width="{box.line_width:g}"'
    )
    if box.fill == "none":
        text += ' pointer-events="none"'
    return text + (f"><title>{box.title}</title></rect>" if box.title else "/>")


def _svg_words(words: Words) -> str:
    more = f' font-size="{words.size:g}"' if words.size != 11 else ""
    more += ' font-weight="bold"' if words.bold else ""
    more += f' text-anchor="{words.anchor}"' if words.anchor != "start" else ""
    return (
        f'<text x="{words.x:g}" y="{words.y:g}" fill="{words.colour}"{more} pointer-events="none" xml:space="preserve">'
        f"{escape(''.join(c for c in words.text if c.isprintable()))}</text>"
    )


def _png(drawn: Picture, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            f"drawing {str(path)!r} needs matplotlib: pip install 'merak_jax[plots]', or draw to a .svg file"
        ) from error
    pixels_per_inch, scale = 100, 1.5
    figure = Figure(figsize=(drawn.width / pixels_per_inch, drawn.height / pixels_per_inch))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    points = 72 / pixels_per_inch
    for order, shape in enumerate(drawn.shapes):
        if isinstance(shape, Words):
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                color=shape.colour,
                fontsize=shape.size * points,
                weight="bold" if shape.bold else "normal",
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="baseline",
                zorder=order,
            )
            continue
        look: dict[str, Any] = {
            "facecolor": shape.fill,
            "edgecolor": shape.line,
            "linewidth": shape.line_width * points,
        }
        if shape.hatched:
            look |= {"edgecolor": HATCH, "hatch": "////", "linewidth": 0.0}
        axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, zorder=order, **look))
    figure.savefig(path, dpi=pixels_per_inch * scale, facecolor="white")


def _events(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """Trace events: a process per timeline, a thread per stage, and a counter of what is in flight."""
    for process, timeline in enumerate(timelines):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": str(timeline)}}
        for stage in range(timeline.num_stages):
            place = {"pid": process, "tid": stage}
            yield {"ph": "M", **place, "name": "thread_name", "args": {"name": f"stage {stage}"}}
            for time, count in timeline.held(stage):
                yield {"ph": "C", **place, "ts": time, "name": f"in flight {stage}", "args": {"microbatches": count}}
        critical = set(timeline.critical)
        for interval in timeline.intervals:
            if interval.task:
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": interval.stage,
                    "ts": interval.start,
                    "dur": interval.stop - interval.start,
                    "name": str(interval.task),
                    "cat": str(interval.task.kind),
                    "args": {
                        "microbatch": interval.task.microbatch,
                        "chunk": interval.task.chunk,
                        "critical": interval in critical,
                    },
                }
