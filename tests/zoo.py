"""The parity table of models: its rows (models with train steps), its columns (meshes and microbatches), and how a cell runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import merak_jax
from merak_jax.schedules.registry import SCHEDULES
from merak_jax.schedules.ticks import FORMS
from tests import zoo_models as models
from tests import zoo_steps as steps
from tests.helper import STEPS, Differences, Run, differences, raw_gradients, run_on_mesh, run_on_one_device
from tests.parity import mesh_of
from tests.zoo_steps import Setting

# Sizes of data, pipe and tensor.
MESHES = ((2, 2, 2), (1, 4, 2), (2, 4, 1), (1, 8, 1))
MICROBATCHES = (2, 8)
USUAL, WIDE = ("float64", "float32"), ("float64", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Row:
    """A model with a train step: `make_task(precision, **options)`, and `make_setting(task)`, for each of `precisions`."""

    name: str
    make_task: Callable
    make_setting: Callable[[Any], Setting]
    precisions: tuple[str, ...] = USUAL
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Of a chain of the model."""
        return self.options.get("num_layers", 4)

    def build(self, precision: str) -> Setting:
        """What the runs of this row need."""
        return self.make_setting(self.make_task(precision, **self.options))


def _row(name, make_task, make_setting=steps.plain, precisions=USUAL, **options) -> Row:
    return Row(name, make_task, make_setting, precisions, options)


# fmt: off
ROWS: dict[str, Row] = {row.name: row for row in (
    _row("GPT-2", models.gpt2_task, precisions=WIDE),
    _row("GPT-2, untied head", models.gpt2_task, precisions=WIDE, tie_head=False, num_layers=3),
    _row("GPT-2, scanned", models.gpt2_task, precisions=WIDE, scan_layers=True, num_layers=8),
    _row("Llama, grouped heads", models.llama_task, precisions=WIDE),
    _row("Llama, scanned, tied, slow rotation", models.llama_task, scan_layers=True, tie_head=True, rotary_scale=8.0),
    _row("Llama, blocks recomputed", models.llama_task, model=models.RematLlama),
    _row("Llama, every second block local", models.llama_task, model=models.LocalLlama),
    _row("Mixtral, router z-loss", models.mixtral_task),
    _row("Mixtral, every second block dense", models.mixtral_task, model=models.SparseMixtral),
    _row("BERT, masked tokens", models.bert_task, precisions=WIDE),
    _row("BERT, scanned, sentence pairs", models.pair_task, scan_layers=True),
    _row("ViT, stochastic depth", models.vit_task),
    _row("ViT, scanned", models.vit_task, scan_layers=True, num_layers=8),
    _row("T5, label smoothing, z-loss", models.t5_task, num_layers=3),
    _row("T5 1.1, scanned, gated, untied", models.t5_task, scan_layers=True, gated=True, tie_head=False, num_layers=3),
    _row("GPT-2, dictionary state, key split", models.gpt2_task, steps.dictionary_state),
    _row("GPT-2, frozen dictionary, weight penalty", models.gpt2_task, steps.weight_penalty),
    _row("GPT-2, average of parameters", models.gpt2_task, steps.averaged),
    _row("GPT-2, frozen embeddings", models.gpt2_task, steps.frozen_embeddings),
    _row("GPT-2, low-rank adapters", models.gpt2_task, steps.adapters),
    _row("GPT-2, several losses", models.gpt2_task, steps.several_losses),
    _row("GPT-2, outputs of every row", models.gpt2_task, steps.outputs_of_rows),
    # flax casts the gradients to float32 in there, so that nothing is left of float64.
    _row("GPT-2, dynamic loss scale", models.gpt2_task, steps.dynamic_scale, precisions=("float32",)),
    _row("GPT-2, clipped AdamW, decay mask, warm-up", models.gpt2_task, steps.clipped_adamw),
    _row("GPT-2, LAMB", models.gpt2_task, steps.lamb),
    _row("GPT-2 in nnx", models.gpt2_nnx_task, steps.mutating, precisions=WIDE),
    _row("GPT-2 in nnx, split and merged", models.gpt2_nnx_task, steps.split_and_merged),
    _row("Llama in nnx", models.llama_nnx_task, steps.mutating),
    _row("Llama in nnx, metrics object", models.llama_nnx_task, steps.metrics_object),
)}
# fmt: on


@dataclasses.dataclass(frozen=True)
class ZooCell:
    """One row on one mesh (sizes of data, pipe, tensor) with one number of microbatches, in one precision."""

    row: str
    mesh: tuple[int, int, int]
    num_microbatches: int
    precision: str = "float64"
    schedule: str = "auto"
    form: str = "auto"
    num_chunks: int | None = None
    overlap: str = "auto"
    sequence_parallel: bool | str = "auto"
    ring_directions: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        name = f"{self.row}, {'x'.join(map(str, self.mesh))}, M={self.num_microbatches}, {self.precision}"
        name = name if self.schedule == "auto" else f"{name}, {self.schedule_name}, {self.form}"
        return name if self.overlap == "auto" else f"{name}, {self.overlap_name}"

    @property
    def overlap_name(self) -> str:
        """What hides communication, and how the carry is split."""
        carry = {True: ", carry split", False: ", carry whole"}.get(self.sequence_parallel, "")
        rings = "" if self.ring_directions == (1,) else f", rings {self.ring_directions}"
        return f"{self.overlap}{carry}{rings}"

    @property
    def schedule_name(self) -> str:
        """The schedule, with its chunks where they were chosen."""
        return self.schedule + (f" V={self.num_chunks}" if self.num_chunks else "")

    @property
    def chunks(self) -> int:
        """The chunks of a stage."""
        entry = SCHEDULES.get(self.schedule)
        return self.num_chunks or (max(1, entry.chunks) if entry else 1)

    @property
    def rows(self) -> int:
        """B: 16, or 14 where M is 7; in bfloat16 as few as possible, at least 4, since every further row adds rounding noise."""
        step = self.mesh[0] * self.num_microbatches
        return step * math.ceil(4 / step) if self.precision == "bfloat16" else 16 // step * step

    @property
    def steps(self) -> int:
        """One in bfloat16: rounding makes the parameters after it differ, and the next gradients are taken elsewhere."""
        return 1 if self.precision == "bfloat16" else STEPS


def all_cells() -> list[ZooCell]:
    """Every row on every mesh with every number of microbatches, in each of its precisions."""
    return [
        ZooCell(row.name, mesh, count, precision)
        for row in ROWS.values()
        for precision in row.precisions
        for mesh, count in itertools.product(MESHES, MICROBATCHES)
    ]


# What stages do is tried on this model, which has two blocks for each chunk of four stages with two.
DEEP = _row("GPT-2, eight layers", models.gpt2_task, num_layers=8)
SCHEDULE_MESHES = ((1, 4, 1), (2, 2, 2), (1, 4, 2))
SCHEDULE_MICROBATCHES = (4, 7, 8)
CHUNKS = {"interleaved": (1, 2, 3), "search": (1, 2)}


def row_of(name: str) -> Row:
    """The row of a cell, by its name."""
    return DEEP if name == DEEP.name else ROWS[name]


def schedule_cells() -> list[ZooCell]:
    """Every schedule in every form of ticks, on three meshes with three numbers of microbatches."""
    return [
        ZooCell(DEEP.name, mesh, count, "float64", name, form, chunks)
        for name in SCHEDULES
        for chunks in CHUNKS.get(name, (None,))
        for form in FORMS
        for mesh, count in itertools.product(SCHEDULE_MESHES, SCHEDULE_MICROBATCHES)
    ]


OVERLAPS = ("none", "collective", "paired")
OVERLAP_MESHES = ((1, 1, 2), (1, 1, 4), (1, 2, 4), (2, 2, 2), (1, 4, 2))


def overlap_cells() -> list[ZooCell]:
    """Every way to hide communication over `tensor`, with the carry split and whole, on five meshes in three precisions."""
    return [
        ZooCell("GPT-2", mesh, 4, precision, overlap=overlap, sequence_parallel=sequence)
        for precision in WIDE
        for overlap in OVERLAPS
        for sequence in (True, False)
        for mesh in OVERLAP_MESHES
    ]


def reference(cell: ZooCell) -> Run:
    """The single-device run of a cell; cells of one row and precision share it."""
    return _reference(cell.row, cell.precision, cell.rows, cell.steps)


def parallel(cell: ZooCell) -> Run:
    """The parallel run of a cell."""
    setting = _setting(cell.row, cell.precision)
    options = {
        "mesh": mesh_of(*cell.mesh),
        "num_microbatches": cell.num_microbatches,
        "schedule": cell.schedule,
        "form": cell.form,
        "num_chunks": cell.num_chunks,
        "overlap": cell.overlap,
        "sequence_parallel": cell.sequence_parallel,
        "ring_directions": cell.ring_directions,
    }
    make_batch = functools.partial(setting.make_batch, rows=cell.rows)
    if setting.objects:
        return _run_objects(merak_jax.parallelize(setting.train_step, **options), setting, make_batch, cell.steps)
    run = run_on_mesh(
        setting.train_step,
        setting.make_state,
        make_batch,
        optimizer=setting.optimizer,
        steps=cell.steps,
        **options,
    )
    return _pure(run)


def compare(cell: ZooCell) -> Differences:
    """How far the parallel run of a cell is from the single-device run."""
    return differences(parallel(cell), reference(cell))


def check(cell: ZooCell) -> None:
    """Assert parity for a cell."""
    lines = compare(cell).over(cell.precision)
    assert not lines, "\n".join(lines)


@functools.lru_cache(maxsize=8)
def _setting(name: str, precision: str) -> Setting:
    setting = row_of(name).build(precision)
    # Adam's first step has one size for all gradients: in bfloat16 it would turn the noise of small ones into steps.
    return dataclasses.replace(setting, optimizer=steps.SGD) if precision == "bfloat16" else setting


@functools.lru_cache(maxsize=8)
def _reference(name: str, precision: str, rows: int, steps: int) -> Run:
    setting = _setting(name, precision)
    make_batch = functools.partial(setting.make_batch, rows=rows)
    if setting.objects:
        return _run_objects(nnx.jit(setting.train_step), setting, make_batch, steps)
    run = run_on_one_device(setting.train_step, setting.make_state, make_batch, setting.optimizer, steps=steps)
    return _pure(run)


def _pure(run: Run) -> Run:
    """Values in place of nnx's variables, so that the path of a leaf ends with its name."""
    return Run(*(nnx.as_pure(part) for part in (run.metrics, run.gradients, run.state)))


def _run_objects(step: Callable, setting: Setting, make_batch: Callable, num_steps: int) -> Run:
    """The runs of the parity helper, for a step that changes nnx objects."""
    objects = setting.make_state(steps.recorded(setting.optimizer))
    metrics, gradients = [], None
    for n in range(num_steps):
        metrics.append(jax.device_get(step(*objects, make_batch(n))))
        if n == 0:
            gradients = jax.device_get(raw_gradients(objects[1].opt_state))
    # The optimizer's own tree tells moments from counts; its state as an object is one dictionary.
    state = [x.opt_state if isinstance(x, nnx.Optimizer) else nnx.state(x) for x in objects]
    return _pure(Run(tuple(metrics), gradients, jax.device_get(state)))
