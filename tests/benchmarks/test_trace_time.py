"""The benchmark of tracing runs, and counts the parameters of the model that it says."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_prints_a_row_for_each_depth():
    command = [sys.executable, "benchmarks/trace_time.py", "--layers", "4", "6", "--repeats", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert [row["layers"] for row in rows] == [4, 6]
    assert rows[1]["leaves"] - rows[0]["leaves"] == 2 * 16, "16 leaves a layer"
    for row in rows:
        assert min(row["make_jaxpr"], row["passes"], row["lowering"], row["ratio"]) > 0
