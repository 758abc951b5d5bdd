"""What a person sees of a training run: its progress, its loss curve, and losses in words."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress(contextlib.AbstractContextManager):
    """Step, loss, tokens/s and time left: a live bar on a terminal, ten lines in all elsewhere."""

    def __init__(self, steps: int):
        self._steps, self._done, self._started = steps, 0, 0.0
        console = Console()
        self._live = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("compiling", total=steps, state="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def advance(self, loss: float, tokens: int) -> None:
        """Count one more step of `tokens` tokens, and show its loss."""
        now = time.perf_counter()
        # The first step compiles, so the clock starts after it.
        self._started = self._started or now
        state = f"loss {loss:.3f}"
        if now > self._started:
            per_second = self._done * tokens / (now - self._started)
            left = (self._steps - self._done - 1) * tokens / per_second
            state += f"  {per_second:,.0f} tokens/s"
            if not self._live:
                state += f"  {left:.0f} s left"
        self._done += 1
        self._bar.update(self._task, advance=1, description="training", state=state)
        if not self._live and (self._done == 1 or self._done % max(1, self._steps // 10) == 0):
            print(f"step {self._done}/{self._steps}  {state}", flush=True)


def describe_loss(nats: float) -> str:
    """A cross entropy per byte, in nats and in bits."""
    return f"{nats:.3f} nats = {nats / math.log(2):.3f} bits per byte"


def write_loss_curve(losses: list[float], held_out: float, folder: Path) -> Path:
    """Draw the training loss by step (nats) and the final held-out loss; returns the path of the picture.

    A PNG where matplotlib is installed, else an SVG.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        path = folder / "loss.svg"
        path.write_text(_loss_curve_svg(losses, held_out))
        return path
    path = folder / "loss.png"
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, label="training")
    axes.axhline(held_out, linestyle="--", color="tab:orange", label="held out, at the end")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _loss_curve_svg(losses, held_out) -> str:
    width, height, left, bottom, top = 700, 400, 60, 350, 20
    values = np.nan_to_num(np.array([*losses, held_out]), posinf=0.0, neginf=0.0)
    low, high = math.floor(values.min()), math.ceil(values.max() + 1e-9)

    def y(value):
        return bottom - (value - low) / (high - low) * (bottom - top)

    x = np.linspace(left, width - 20, len(losses))
    points = " ".join(f"{a:.1f},{y(b):.1f}" for a, b in zip(x, values[:-1]))
    ticks = "".join(
        f'<line x1="{left}" x2="{width - 20}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in np.linspace(low, high, 5)
    )
    level = y(values[-1])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>{ticks}'
        f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<line x1="{left}" x2="{width - 20}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ff7f0e" '
        f'stroke-dasharray="6 4"/><text x="{width - 20}" y="{level - 6:.1f}" text-anchor="end" '
        f'fill="#ff7f0e">held out, at the end</text><text x="{left}" y="{bottom + 20}">step 1</text>'
        f'<text x="{width - 20}" y="{bottom + 20}" text-anchor="end">step {len(losses)}</text>'
        f'<text x="{left}" y="14">loss (nats per byte)</text></svg>\n'
    )
