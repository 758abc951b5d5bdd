"""Pictures of schedules: one box for each task, readable numbers, kinds that differ in grey."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from merak_jax.schedules.draw import draw, draw_text
from merak_jax.schedules.gpipe import gpipe
from merak_jax.schedules.interleaved import interleaved
from merak_jax.schedules.merak import shifted_critical_path
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.picture import LOOKS
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import Schedule, ScheduleError, Task, TaskKind
from merak_jax.schedules.ticks import lower
from merak_jax.schedules.zero_bubble import zero_bubble_v

SVG = "{http://www.w3.org/2000/svg}"

TEXT = """\
eager_1f1b: P=2, M=2, makespan 9, bubble 33.3 %
s0 F0 F1 ......B0--- ...B1---
s1 ...F0 B0--- F1 B1--- ......"""


def boxes(path) -> dict[str, ElementTree.Element]:
    """The box of each task by its hover text, `F3 on stage 0, 3 to 4`."""
    found = {}
    for rectangle in ElementTree.parse(path).iter(f"{SVG}rect"):
        title = rectangle.find(f"{SVG}title")
        if title is not None:
            assert title.text not in found
            found[title.text] = rectangle
    return found


@pytest.mark.parametrize("make", [lambda s: s, lower], ids=["schedule", "ticks"])
def test_the_svg_has_one_box_for_each_task_and_says_what_it_shows(tmp_path, make):
    draw(make(one_f_one_b(8, 32, eager=True)), tmp_path / "timeline.svg")
    found = boxes(tmp_path / "timeline.svg")
    tasks = {text.split(",")[0] for text in found}
    assert tasks == {f"{kind}{m} on stage {s}" for kind in "FB" for m in range(32) for s in range(8)}
    assert len(found) == len(tasks)
    words = [element.text for element in ElementTree.parse(tmp_path / "timeline.svg").iter(f"{SVG}text")]
    assert "eager_1f1b   P=8   M=32   makespan 117   bubble 17.9 %" in words
    assert {"F forward", "B backward", "stage 7"} <= set(words)
    assert words.count("31") == 16


def test_two_digits_fit_into_the_shortest_box(tmp_path):
    draw(lower(one_f_one_b(8, 32, eager=True)), tmp_path / "timeline.svg")
    assert min(float(box.get("width")) for box in boxes(tmp_path / "timeline.svg").values()) >= 16


def test_boxes_lie_where_the_times_are(tmp_path):
    draw(gpipe(2, 2), tmp_path / "timeline.svg", forward=1.0, backward=3.0)
    found = boxes(tmp_path / "timeline.svg")
    first, later = found["F0 on stage 0, 0 to 1"], found["B0 on stage 1, 3 to 6"]
    width = float(first.get("width"))
    assert float(later.get("width")) == pytest.approx(3 * width, abs=0.02)
    assert float(later.get("x")) - float(first.get("x")) == pytest.approx(3 * width, abs=0.02)
    assert float(later.get("y")) > float(first.get("y"))


def test_idle_parts_of_ticks_are_hatched_in_a_tick_table_only(tmp_path):
    def hatched(schedule):
        draw(schedule, tmp_path / "timeline.svg")
        rectangles = ElementTree.parse(tmp_path / "timeline.svg").iter(f"{SVG}rect")
        return sum(rectangle.get("fill") == "url(#idle)" for rectangle in rectangles)

    assert hatched(one_f_one_b(2, 2)) == 0
    # Stage 0 lacks B in tick 1 and F in tick 2, stage 1 lacks F in tick 0 and B in tick 3; one in the legend.
    assert hatched(lower(one_f_one_b(2, 2, eager=True))) == 4 + 1


def test_recompute_is_a_box_of_its_own(tmp_path):
    draw(lower(gpipe(1, 1)), tmp_path / "timeline.svg", recompute=1.0)
    assert set(boxes(tmp_path / "timeline.svg")) == {
        "F0 on stage 0, 0 to 1",
        "R0 on stage 0, 1 to 2",
        "B0 on stage 0, 2 to 4",
    }


def test_kinds_differ_in_grey_and_their_numbers_stand_out():
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    assert set(LOOKS) == set(TaskKind)
    greys = sorted(grey(look.fill) for look in LOOKS.values())
    assert min(after - before for before, after in zip(greys, greys[1:])) > 0.1
    assert all(abs(grey(look.fill) - grey(look.ink)) > 0.4 for look in LOOKS.values())


def test_every_kind_of_task_can_be_drawn(tmp_path):
    order = tuple(Task(kind, 0) for kind in (TaskKind.F, TaskKind.R, TaskKind.BI, TaskKind.W))
    draw(Schedule("all", 1, 1, 1, (order,)), tmp_path / "timeline.svg", recompute=1.0)
    tasks = {text.split(" ")[0] for text in boxes(tmp_path / "timeline.svg")}
    assert tasks == {"F0", "R0", "Bi0", "W0"}


def test_a_png_is_written_with_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    draw(lower(one_f_one_b(2, 3, eager=True)), tmp_path / "timeline.png", recompute=1.0)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("merak_jax[plots]")):
        draw(gpipe(1, 1), tmp_path / "timeline.png")


def test_the_critical_path_has_no_gap_and_is_as_long_as_the_step():
    for schedule in (one_f_one_b(4, 8), shifted_critical_path(4, 8), zero_bubble_v(4, 8), interleaved(4, 7)):
        timeline = simulate(schedule, recompute=1.0, hop=0.25)
        critical = timeline.critical
        assert critical[0].start == 0 and critical[-1].stop == timeline.makespan
        for before, after in zip(critical, critical[1:]):
            assert after.start - before.stop == pytest.approx(0.25 if before.stage != after.stage else 0.0)


def test_several_schedules_share_an_axis_and_a_legend(tmp_path):
    draw([one_f_one_b(4, 8), shifted_critical_path(4, 8)], tmp_path / "both.svg", recompute=1.0)
    words = [element.text for element in ElementTree.parse(tmp_path / "both.svg").iter(f"{SVG}text")]
    assert words.count("stage 3") == 2 and words.count("critical path") == 1
    # In flight at the right of each strip: 4 3 2 1, and 4 3 3 1.
    assert [w for w, before in zip(words[1:], words) if str(before).startswith("held")] == list("43214331")


def test_a_chunk_is_a_bar_and_not_in_the_number(tmp_path):
    draw(interleaved(2, 4), tmp_path / "timeline.svg")
    titles = boxes(tmp_path / "timeline.svg")
    words = [element.text for element in ElementTree.parse(tmp_path / "timeline.svg").iter(f"{SVG}text")]
    assert any(title.startswith("F3.1 on stage 1") for title in titles)
    assert "bar: later chunk" in words and "3.1" not in words


def test_the_trace_holds_every_task_and_what_is_in_flight(tmp_path):
    draw(lower(shifted_critical_path(4, 8), "switched"), tmp_path / "trace.json", recompute=1.0)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X"]
    assert len(tasks) == 4 * 8 * 3 + 3 * 8  # F, Bi, W everywhere, R but on the last stage
    assert max(e["ts"] + e["dur"] for e in tasks) == 36
    held = [e["args"]["microbatches"] for e in events if e["ph"] == "C" and e["tid"] == 2]
    assert max(held) == 3 and held[-1] == 0


def test_another_suffix_is_an_error(tmp_path):
    with pytest.raises(ScheduleError, match=r"must end in \.svg, \.png or \.json"):
        draw(gpipe(1, 1), tmp_path / "timeline.pdf")


def test_the_text_shows_the_same_times():
    assert draw_text(lower(one_f_one_b(2, 2, eager=True))) == TEXT


def test_long_text_goes_on_below():
    lines = draw_text(lower(one_f_one_b(8, 32, eager=True)), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    starts = re.findall(r"[FB]\d+", " ".join(lines[1:]))
    assert len(starts) == 2 * 8 * 32


def test_tasks_that_take_no_time_or_hardly_any_leave_a_readable_picture(tmp_path):
    split = zero_bubble_v(2, 3, recompute=True)
    for costs in ({"weight_gradient": 0.0}, {"recompute": 1e-7}):
        draw(split, tmp_path / "a.svg", **costs)
        root = ElementTree.parse(tmp_path / "a.svg").getroot()
        assert 100 < float(root.get("width")) < 50_000
        assert len(draw_text(split, **costs)) < 100_000
