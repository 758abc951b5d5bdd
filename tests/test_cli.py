"""The command line: numbers, pictures, and errors without a traceback."""

import json

import pytest

from merak_jax.cli import main


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_simulate_prints_json(capsys):
    status, out, _ = run(
        capsys,
        "simulate",
        "--schedule",
        "shifted_critical_path",
        "--stages",
        "4",
        "--microbatches",
        "8",
        "--recompute",
        "1",
        "--json",
    )
    found = json.loads(out)
    assert status == 0
    assert found["makespan"] == 38 and found["in_flight"] == [4, 3, 3, 1]
    assert found["bubble"] == pytest.approx(1 - (3 * 32 + 24) / (4 * 38))
    assert [row["busy"] for row in found["per_stage"]] == [32, 32, 32, 24]


@pytest.mark.parametrize("form, makespan", [("free", 44), ("merged", 44), ("paired", 44), ("switched", 38)])
def test_simulate_knows_the_forms(capsys, form, makespan):
    _, out, _ = run(capsys, "simulate", "--recompute", "1", "--form", form, "--json")
    assert json.loads(out)["makespan"] == makespan


def test_costs_and_chunks_are_taken(capsys):
    _, out, _ = run(
        capsys, "simulate", "--schedule", "interleaved", "--chunks", "4", "--forward", "2", "--backward", "4", "--json"
    )
    assert json.loads(out)["makespan"] == 8 * 6 + 3 * 6 / 4
    _, out, _ = run(capsys, "simulate", "--stages", "2", "--microbatches", "1", "--hop", "0.5", "--json")
    assert json.loads(out)["makespan"] == 2 * 3 + 2 * 0.5
    _, out, _ = run(capsys, "simulate", "--form", "merged", "--tensor", "1", "--hidden", "0.5", "--json")
    assert json.loads(out)["makespan"] == 11 * (3 + 2 * 0.5)


def test_simulate_prints_a_table(capsys):
    _, out, _ = run(capsys, "simulate", "--stages", "2", "--microbatches", "2")
    assert out.splitlines()[0] == "1f1b: P=2, M=2, makespan 9, bubble 33.3 %"
    assert len(out.splitlines()) == 4


def test_draw_writes_what_the_ending_says_or_prints_text(capsys, tmp_path):
    for ending in ("svg", "json"):
        path = tmp_path / f"timeline.{ending}"
        status, out, _ = run(capsys, "draw", "--form", "merged", "--out", str(path))
        assert status == 0 and path.stat().st_size > 1000 and str(path) in out
    _, out, _ = run(capsys, "draw", "--stages", "2", "--microbatches", "2")
    assert out.splitlines()[1].startswith("s0 F0 F1")


def test_chunks_are_for_the_schedules_that_have_them(capsys):
    _, out, _ = run(capsys, "simulate", "--schedule", "interleaved,1f1b", "--chunks", "4", "--json")
    interleaved, plain = json.loads(out)
    assert interleaved["makespan"] == 8 * 3 + 3 * 3 / 4
    assert plain["makespan"] == 11 * 3


def test_several_schedules_at_once(capsys, tmp_path):
    both = ("--schedule", "1f1b,shifted_critical_path", "--recompute", "1")
    _, out, _ = run(capsys, "simulate", *both, "--json")
    assert [found["makespan"] for found in json.loads(out)] == [44, 38]
    _, out, _ = run(capsys, "draw", *both, "--out", str(tmp_path / "both.svg"))
    assert len(out.splitlines()) == 3
    assert (tmp_path / "both.svg").read_text().count("makespan") == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("simulate", "--schedule", "zigzag"), "'zigzag' is unknown; known: 1f1b"),
        (("simulate", "--stages", "0"), "needs at least 1 of its stages, got 0"),
        (("simulate", "--forward", "0"), "cost forward must be a number above 0"),
        (("simulate", "--forward", "nan"), "cost forward must be a number above 0, got nan"),
        (("simulate", "--hop", "inf"), "cost hop must be a number at least 0, got inf"),
        (("simulate", "--hidden", "2"), "cost hidden must be a number 0 to 1"),
        (("simulate", "--weight-gradient", "5"), "cost weight_gradient=5.0 is a part of backward=2.0"),
        (("draw", "--out", "timeline.pdf"), "must end in .svg, .png or .json"),
        (("draw", "--out", "/nowhere/timeline.svg"), "/nowhere/timeline.svg"),
        (("simulate", "--schedule", "gpipe", "--chunks", "2"), "has one chunk per stage"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["simulate", "draw"])
def test_help_has_a_worked_example(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"example: merak-jax {command} --schedule" in capsys.readouterr().out
