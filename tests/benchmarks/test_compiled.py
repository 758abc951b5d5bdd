"""The step of GPT-2 XL compiles for eight H100s that are not there, fits, and moves no parameter in its loops."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
    reason="the compiler for GPUs is not installed: pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, as jax's version",
)


@pytest.fixture(scope="module")
def compiled():
    """What benchmarks/compiled.py prints for GPT-2 XL on mesh 2·2·2."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--json", "--mesh", "2,2,2", "--microbatches", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_gpt2_xl_fits_eight_h100s(compiled):
    assert 0 < compiled["state_bytes"] < compiled["peak_bytes"] < 80 * GIB
    assert compiled["alias_bytes"] >= 0.95 * compiled["state_bytes"]


def test_loops_gather_no_parameter_on_h100(compiled):
    inside = compiled["in_loops"]
    assert {c["kind"] for c in inside} >= {"all-reduce", "collective-permute"}
    gathers = [c for c in inside if c["kind"] in ("all-gather", "all-to-all")]
    assert [c for c in gathers if c["largest"] > compiled["carry_bytes"]] == []
    assert [c for c in inside if c["kind"] == "collective-permute" and c["largest"] > compiled["carry_bytes"]] == []


def test_step_has_no_conditional_on_h100(compiled):
    assert compiled["conditionals"] == 0
