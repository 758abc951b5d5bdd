"""Cells of a parity benchmark in subprocesses: a process that dies fails one cell only, and one that lives shares references."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_all(batches: list[list[dict]], command: list[str], *, workers: int = 1, minutes: float | None = None) -> list:
    """A result per cell: batches run in `workers` subprocesses at a time; none begins after `minutes`.

    A cell is a dictionary with its name under "cell"; `command` starts a process that runs `serve`. A result has the cell's fields,
    "passed", and "error" where it failed.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results: list[dict] = []
    start = time.monotonic()

    def run_group(group: list[dict]) -> None:
        while group:
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                return
            done = 0
            for result in run_batch(group, command):
                done += 1
                results.append(result)
                progress.advance(task)
                if not result["passed"]:
                    text = f"{result['cell']}: {result['error']}"
                    progress.console.print(text, style="red", highlight=False, markup=False)
            group = group[done:]

    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        task = progress.add_task("cells", total=sum(map(len, batches)))
        for future in [pool.submit(run_group, batch) for batch in batches]:
            future.result()
    return results


def run_batch(cells: list[dict], command: list[str]) -> Iterator[dict]:
    """Yield a result per cell; when the process dies or hangs, its current cell failed and the later ones are not run."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = 0
    with tempfile.TemporaryFile("w+") as requests, tempfile.TemporaryFile("w+") as errors:
        json.dump(cells, requests)
        requests.seek(0)
        with subprocess.Popen(
            command, stdin=requests, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield {**cells[done], **json.loads(line)}
                done += 1
        errors.seek(0)
        last = errors.read().strip().splitlines()
    if done < len(cells):
        reason = next((line for line in last if "Termination timeout" in line), last[-1] if last else "")
        error = f"process ended with {process.returncode}: {reason[:300]}"
        yield {**cells[done], "passed": False, "error": error}


def serve(measure: Callable[[dict], tuple[dict, list[str]]]) -> int:
    """In the subprocess: cells as JSON on stdin, one result per line on stdout.

    `measure(cell)` returns numbers to report and what is above the bar, a line each; an exception fails the cell.
    """
    for cell in json.load(sys.stdin):
        start = time.monotonic()
        result: dict = {"passed": True}
        try:
            numbers, lines = measure(cell)
            result.update(numbers)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        if lines:
            result.update(passed=False, error="; ".join(lines))
        result["seconds"] = round(time.monotonic() - start, 1)
        print(json.dumps(result), flush=True)
    return 0
