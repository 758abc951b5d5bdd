"""Plan: what will run where, readable before anything compiles, as text, as a picture and as JSON."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from typing import Any

from merak_jax.schedules.forward_only import forward_only
from merak_jax.schedules.registry import make_table
from merak_jax.schedules.simulate import Timeline, simulate
from merak_jax.schedules.tick_table import TickTable

# Forward, backward and recompute of a block, in units of its forward.
FORWARD, BACKWARD, RECOMPUTE = 1.0, 2.0, 1.0


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage: its blocks, the bytes of its parameters on one device, and the most microbatches (times chunks) it holds at once.

    `stash_bytes`: of inputs of blocks, residuals, and what Bi leaves for W. All stages have buffers of one size, as large as the
    stage with most needs them.
    """

    blocks: int
    parameter_bytes: int
    in_flight: int
    stash_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a train step is laid out on a mesh. Sizes in bytes are per device; rows are rows of the batch.

    `schedule`, `form`, `num_chunks`: as asked for (`table` has the chunks of an own one); the schedule "forward" is an
    evaluation, `folded` says how its chunks go. `overlap`: what hides the communication over `tensor`; `sequence_parallel`: whether
    the carry is split over it, `carry_split` along what or why not; `collectives`: those of one block and microbatch;
    `tensor_bytes`: what each device sends for them, forward and backward, of a block of each chain.
    """

    data: int
    pipe: int
    tensor: int
    num_microbatches: int
    rows: int
    schedule: str
    chain: str
    block_source: str
    stages: tuple[StagePlan, ...]
    boundary_bytes: int
    state_bytes: int
    tensor_splits: tuple[str, ...]
    other_leaves: tuple[str, ...]
    form: str = "merged"
    num_chunks: int = 1
    folded: bool = False
    overlap: str = "none"
    sequence_parallel: bool = False
    carry_split: str = ""
    collectives: tuple[str, ...] = ()
    tensor_bytes: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def table(self) -> TickTable:
        """The ticks that run: with one stage, one F and one B per microbatch."""
        if self.schedule == "forward":
            return forward_only(self.pipe, self.num_microbatches, self.num_chunks, self.folded)
        return make_table(self.schedule, self.form, self.num_chunks, self.pipe, self.num_microbatches)

    @property
    def bubble_share(self) -> float:
        """Share of the time that a stage idles, blocks taken as equal and B as recompute plus two forwards."""
        return self._timeline.bubble_share

    @functools.cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.table, forward=FORWARD, backward=BACKWARD, recompute=self._recompute)

    @property
    def _recompute(self) -> float:
        return RECOMPUTE if self.pipe * self.tensor > 1 else 0.0

    def draw(self, path: str, **options: Any) -> str:
        """Write the timeline as SVG or PNG, by the ending of `path`; returns the path."""
        from merak_jax.schedules.draw import draw

        draw(
            self.table,
            path,
            forward=FORWARD,
            backward=BACKWARD,
            recompute=self._recompute,
            **options,
        )
        return str(path)

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        fields = json.loads(text)
        fields["stages"] = tuple(StagePlan(**s) for s in fields["stages"])
        for name in ("tensor_splits", "other_leaves", "collectives"):
            fields[name] = tuple(fields.get(name, ()))
        fields["tensor_bytes"] = tuple(map(tuple, fields.get("tensor_bytes", ())))
        return cls(**fields)

    def _details(self) -> str:
        if self.pipe == 1 or self.schedule == "forward":
            return ""
        chunks = self.table.num_chunks
        found = f" ({self.table.name})" if self.schedule == "search" else ""
        return f"{found} in {self.form} ticks" + (f", {chunks} chunks per stage" if chunks > 1 else "")

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        rows = self.rows // (self.data * self.num_microbatches)
        title = (
            f"plan: data {self.data} · pipe {self.pipe} · tensor {self.tensor}, {self.num_microbatches} microbatches "
            f"of {rows} rows, {self.schedule}{self._details()}\n"
        )
        table = Table()
        for name in ("stage", "blocks", "parameters", "in flight", "stash"):
            table.add_column(name, justify="right")
        for s, stage in enumerate(self.stages):
            table.add_row(
                str(s), str(stage.blocks), _size(stage.parameter_bytes), str(stage.in_flight), _size(stage.stash_bytes)
            )
        out = io.StringIO()
        console = Console(file=out, width=110, force_terminal=False)
        console.print(table)
        lines = [
            f"blocks: {self.chain}",
            f"first block: {self.block_source}",
            f"state per device: {_size(self.state_bytes)}; boundary per microbatch: {_size(self.boundary_bytes)}; "
            f"idle share: {self.bubble_share:.1%}",
        ]
        if self.tensor > 1:
            lines.append(f"carry between blocks: {self.carry_split}; overlap: {self.overlap}")
            lines += [
                f"sent over tensor per block and microbatch: {_size(forward)} forward, {_size(backward)} backward"
                for forward, backward in self.tensor_bytes
            ]
        lines += [f"split over tensor: {line}" for line in self.tensor_splits]
        lines += [f"a block's collectives: {line}" for line in self.collectives]
        lines += [f"other parameter: {line}" for line in self.other_leaves]
        return title + out.getvalue() + "\n".join(lines)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError
