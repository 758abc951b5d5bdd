"""The parity benchmark: which cells it has, which of them run together, and what it says about them."""

import argparse
import itertools
import json
import sys
from collections import Counter

import pytest

from benchmarks import parity, parity_cells, parity_gpt2, parity_models
from tests import zoo
from tests.parity import DEPTHS, HEADS, LAYERS, MASKS, MESHES, MICROBATCHES, OPTIMIZERS, SCHEDULES, all_cells


def options(*arguments) -> argparse.Namespace:
    return parity.make_parser().parse_args(arguments)


def point(cell):
    return (cell.mesh, cell.num_microbatches, cell.depth, cell.layers, cell.head)


def test_the_grid_has_each_point_once_and_is_part_of_the_full_product():
    grid = parity_gpt2.grid()
    wanted = {point(cell) for cell in all_cells()}
    assert Counter(map(point, grid)) == Counter(wanted)
    assert set(grid) <= set(all_cells())
    sizes = (MESHES, MICROBATCHES, DEPTHS, LAYERS, HEADS)
    assert wanted == {
        (mesh, count, *model)
        for mesh, rule in itertools.product(*sizes[:2])
        if (count := {"1": 1, "P-1": mesh[1] - 1, "P": mesh[1], "8": 8}[rule]) > 0
        for model in itertools.product(*sizes[2:])
    }


def test_every_mesh_and_number_of_microbatches_sees_every_schedule_mask_and_optimizer():
    seen = {}
    for cell in parity_gpt2.grid():
        seen.setdefault((cell.mesh, cell.num_microbatches), Counter()).update(
            [(cell.schedule, cell.mask, cell.optimizer)]
        )
    for (mesh, count), others in seen.items():
        masks = MASKS if count * mesh[0] > 1 else ("ragged",)
        assert set(others) == set(itertools.product(SCHEDULES, masks, OPTIMIZERS))
        assert len(set(others.values())) == 1


def test_the_narrow_precisions_of_the_grid_run_on_three_meshes():
    cells = parity.choose(options("--grid"))
    assert len(cells) == len(set(cells))
    by_precision = {p: [c for c in cells if c.bar == p] for p in ("float64", "float32", "bfloat16")}
    on_narrow = {point(c) for c in by_precision["float64"] if c.mesh in parity_gpt2.NARROW}
    assert {point(c) for c in by_precision["float32"]} == on_narrow
    assert {point(c) for c in by_precision["bfloat16"]} == on_narrow
    assert Counter(c.precision for c in by_precision["bfloat16"])["all bfloat16"] * 2 == len(by_precision["bfloat16"])


def test_full_is_the_product_of_all_options_and_excludes_the_grid():
    assert set(all_cells()) < set(parity.choose(options("--full")))
    assert set(parity.choose(options("--grid"))) < set(parity.choose(options("--full")))
    with pytest.raises(SystemExit):
        options("--full", "--grid")


def test_by_default_every_row_has_every_mesh_and_number_of_microbatches():
    cells = parity.choose(options())
    assert len(cells) == len(set(cells)) == len(set(map(str, cells)))
    meshes = {(2, 2, 2), (1, 4, 2), (2, 4, 1), (1, 8, 1)}
    lines = {}
    for cell in cells:
        lines.setdefault((cell.row, cell.precision), []).append((cell.mesh, cell.num_microbatches))
    wanted = Counter(itertools.product(meshes, (2, 8)))
    assert all(Counter(line) == wanted for line in lines.values())
    rows = {p: {row for row, precision in lines if precision == p} for p in ("float64", "float32", "bfloat16")}
    assert rows["float32"] == set(zoo.ROWS) and len(rows["float64"]) >= 24 and len(rows["bfloat16"]) >= 6
    assert rows["float32"] - rows["float64"] == {"GPT-2, dynamic loss scale"}


def test_every_batch_divides_into_the_microbatches_of_its_mesh():
    for cell in parity.choose(options()):
        assert cell.rows % (cell.mesh[0] * cell.num_microbatches) == 0 and cell.rows >= 4


@pytest.mark.parametrize("suite", ["--grid", None])
def test_batches_keep_cells_that_share_a_reference_together_and_lose_none(suite):
    chosen = options(*[suite] * (suite is not None))
    cells, share = parity.choose(chosen), parity.suite_of(chosen).share
    batches = parity.batches_of(cells, chosen)
    assert Counter(itertools.chain(*batches)) == Counter(cells)
    assert all(len({share(c) for c in batch}) == 1 for batch in batches)
    if suite is None:
        assert len(batches) == len({share(c) for c in cells})


def test_a_sample_keeps_its_order():
    chosen = options("--sample", "40")
    cells = parity.choose(chosen)
    assert len(cells) == 40 and parity.batches_of(cells, chosen) == [cells[:32], cells[32:]]
    assert cells == parity.choose(chosen) != parity.choose(options("--sample", "40", "--seed", "1"))


def test_only_and_limit_choose_by_name():
    names = list(map(str, parity.choose(options("--only", "nnx, 2x4x1", "--limit", "2"))))
    assert len(names) == 2 and all("nnx, 2x4x1" in name for name in names)


WORKER = """
import os, sys
from benchmarks.parity_cells import serve
def measure(cell):
    if cell["do"] == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if cell["do"] == "raise":
        raise ValueError("no such layer")
    return {"value": cell["n"]}, ["too far"] * (cell["do"] == "miss")
sys.exit(serve(measure))
"""


def test_a_process_that_dies_fails_one_cell_and_the_next_process_goes_on():
    kinds = ["pass", "die", "miss", "raise", "die", "pass"]
    batch = [{"cell": f"{n}", "n": n, "do": do} for n, do in enumerate(kinds)]
    results = parity_cells.run_all([batch], [sys.executable, "-c", WORKER])
    assert [(r["cell"], r["passed"]) for r in results] == [(f"{n}", do == "pass") for n, do in enumerate(kinds)]
    assert [r.get("error") for r in results] == [
        None,
        "process ended with 3: last words",
        "too far",
        "ValueError: no such layer",
        "process ended with 3: last words",
        None,
    ]
    assert [r.get("value") for r in results] == [0, None, 2, None, None, 5]


def results():
    """Two rows in float64, one in bfloat16: a cell that passed, one over its bar, one that died, the others not run."""

    def result(row, count, precision, passed=True, **numbers):
        cell = zoo.ZooCell(row, (2, 2, 2), count, precision)
        fields = {"row": row, "mesh": [2, 2, 2], "num_microbatches": count, "precision": precision}
        return {"cell": str(cell), **fields, "passed": passed, **numbers}

    return [
        result("Mixtral, router z-loss", 2, "float64", metrics=1e-16, gradients=2e-15, trained=3e-15),
        result("GPT-2", 8, "float64", False, metrics=1e-16, gradients=2e-3, trained=3e-15, error="gradients"),
        result("GPT-2", 2, "float64", False, error="process ended with -6: abort"),
        result("GPT-2", 2, "bfloat16", metrics=0.0, gradients=0.0, trained=4e-3),
    ]


def test_the_document_has_the_table_with_the_largest_difference_of_each_cell():
    document = json.loads(json.dumps(parity.document(parity_models, results(), total=10)))
    assert document["table"] == {
        "float64": {
            "GPT-2": {"2·2·2 M=2": None, "2·2·2 M=8": 2e-3},
            "Mixtral, router z-loss": {"2·2·2 M=2": 3e-15},
        },
        "bfloat16": {"GPT-2": {"2·2·2 M=2": 4e-3}},
    }
    assert (document["passed"], document["failed"], document["not_run"]) == (2, 2, 6)
    assert document["worst"]["float64"] == {
        "metrics": [1e-16, "GPT-2, 2x2x2, M=8, float64"],
        "gradients": [2e-3, "GPT-2, 2x2x2, M=8, float64"],
        "trained": [3e-15, "GPT-2, 2x2x2, M=8, float64"],
    }


def test_the_printed_table_marks_what_failed_and_what_was_not_run(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    parity_models.report(results(), 10, {})
    lines = capsys.readouterr().out.splitlines()
    float64, bfloat16 = ([line for line in lines if word in line] for word in ("float64", "bfloat16"))
    assert len(float64) == len(bfloat16) == 1
    cells = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in lines if line.startswith("│")}
    assert [x.strip() for x in cells["Mixtral, router z-loss"]] == ["3e-15"] + ["-"] * 7
    gpt2 = [[x.strip() for x in line.split("│")[2:4]] for line in lines if line.startswith("│ GPT-2 ")]
    assert gpt2 == [["error ✗", "2e-03 ✗"], ["4e-03", "-"]]
    assert lines[-1] == "4 of 10 cells, 2 failed"
