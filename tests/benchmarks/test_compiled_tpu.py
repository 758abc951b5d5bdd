"""The rings of tensor parallelism on a slice of eight TPUs that are not there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the compiler for TPUs is not installed: pip install --no-deps libtpu==0.0.42.1",
)


def test_every_send_of_a_ring_has_a_matmul_beside_it_on_v5e():
    options = "--json --hardware v5e --overlap collective --mesh 1,1,8 --length 2048 --microbatches 4".split()
    command = [sys.executable, "-m", "benchmarks.compiled", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(rows) == 2
    for row in rows:
        assert row["kinds"] == ["collective-permute"]
        assert row["hidden"] == row["collectives"] > 0
