"""A train step for one set of shapes: traced once, compiled once, called many times."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from merak_jax import _compat
from merak_jax.errors import BatchError, NotSeparableError, PlanError, TraceError
from merak_jax.planning.describe import describe
from merak_jax.runtime.build import build
from merak_jax.runtime.initialise import initialise
from merak_jax.runtime.program import StepProgram
from merak_jax.runtime.state import DeferredState, PackedState, StateLayout, shapes_key
from merak_jax.runtime.tensor_options import TensorOptions
from merak_jax.schedules.tick_table import TickTable
from merak_jax.tracing.matching import ProgramsDifferError, merge
from merak_jax.tracing.microbatch import rows_to_trace
from merak_jax.tracing.step import abstract, batch_rows, python_random_state, source_of, trace

P = PartitionSpec

_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # XLA:CPU may start independent collectives in different orders on different devices and hang; this scheduler keeps one order.
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    # Keep sends where the tick puts them, early, and let the scheduler hide them behind matmuls.
    "gpu": {
        "xla_gpu_enable_analytical_latency_estimator": True,
        "xla_disable_hlo_passes": "collective-permute-motion",
        "xla_gpu_dot_merger_threshold_mb": 0,
    },
}


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What `parallelize` was asked for, with what was left open chosen.

    `schedule`: its name, form of ticks and chunks per stage; `table`: its ticks.
    """

    mesh: Mesh
    num_microbatches: int
    schedule: tuple[str, str, int]
    table: TickTable
    donate: bool
    semantics: str
    tensor: TensorOptions


def key_of(argument: Any, name: str = "the value") -> Any:
    """What tells arguments of different shapes apart; the same for a state before and after it is packed."""
    if isinstance(argument, PackedState):
        return argument._layout.key
    return shapes_key(shapes_of(argument, name))


def shapes_of(argument: Any, name: str = "the value") -> Any:
    if isinstance(argument, PackedState):
        return jax.tree.unflatten(argument._layout.tree, argument._layout.avals)
    if isinstance(argument, DeferredState):
        return abstract(argument.shapes)
    return abstract(argument, name)


class Runner:
    """The step for one set of shapes: traced once, compiled once."""

    def __init__(
        self,
        options: StepOptions,
        train_step: Callable,
        shapes: Sequence[Any],
        batch_argnums: Sequence[int],
        stored: Mapping[int, StateLayout],
    ):
        self.mesh, self.batch_argnums = options.mesh, tuple(batch_argnums)
        bad = [n for n in self.batch_argnums if not 0 <= n < len(shapes)]
        if bad:
            raise PlanError(
                f"the train step at {source_of(train_step)} got {len(shapes)} argument{'s' * (len(shapes) != 1)}, but its "
                f"batch is argument {bad[0]} (batch_argnums={self.batch_argnums}): pass the batch too, or set batch_argnums to "
                "where it is"
            )
        check_batch(train_step, shapes, self.batch_argnums, self.mesh.shape["data"], options.num_microbatches)
        full = trace(train_step, shapes, self.batch_argnums)
        rows = full.rows // (self.mesh.shape["data"] * options.num_microbatches)
        # A lone scalar beside the state (a loss scale) is an input, not a state: a metric may look just like it.
        packable = [
            n
            for n, shape in enumerate(shapes)
            if n not in self.batch_argnums and (n == 0 or not jax.tree_util.all_leaves([shape]))
        ]
        build_from = functools.partial(
            build,
            full,
            rows=rows,
            mesh=self.mesh,
            num_microbatches=options.num_microbatches,
            table=options.table,
            packable=packable,
            semantics=options.semantics,
            tensor=options.tensor,
            given={n: layout for n, layout in stored.items() if layout.mesh == self.mesh and full.is_evaluation},
        )
        proved = options.semantics == "full_batch"
        traced_rows = rows_to_trace(full.rows, rows) if proved else rows
        micro = full if rows == full.rows else trace(train_step, shapes, self.batch_argnums, rows=traced_rows)
        try:
            self.program: StepProgram = build_from(micro)
        except ProgramsDifferError as error:
            # With so few rows a reshape may find the shape it makes, and JAX leaves it out. Twice the batch is no such number.
            # A step that is another program each time it is traced is none to try again.
            before = python_random_state()
            try:
                if not proved:
                    raise
                again, wide = (
                    trace(train_step, shapes, self.batch_argnums, rows=n) for n in (traced_rows, 2 * full.rows)
                )
                merge(micro.loss.jaxpr, again.loss.jaxpr)
                if python_random_state() != before:
                    raise
                self.program = build_from(wide)
            except (ProgramsDifferError, TraceError):
                raise NotSeparableError(str(error)) from None
        schedule = None if full.is_evaluation else options.schedule
        self.plan = describe(self.program, schedule, options.num_microbatches, options.tensor.overlap)
        self.layouts = self.program.layouts
        self.others = [n for n in range(len(shapes)) if n not in self.layouts]
        platform = self.mesh.devices.flat[0].platform
        # XLA:CPU loads a program from JAX's compilation cache without the order of its collectives, and may hang in it.
        self.compiling = (
            _compat.no_new_cache_entry if platform == "cpu" and self.mesh.size > 1 else contextlib.nullcontext
        )
        self.other_shardings = [
            NamedSharding(self.mesh, P("data") if rows else P())
            for n, rows in zip(full.leaf_argument, full.leaf_rows)
            if n not in self.layouts
        ]
        self.jitted = jax.jit(
            self.program,
            # An evaluation leaves the state to the next train step.
            donate_argnums=(0,) if options.donate and not full.is_evaluation else (),
            in_shardings=([layout.shardings for layout in self.layouts.values()], self.other_shardings),
            out_shardings=([layout.shardings for layout in self.program.returned.values()], None),
            compiler_options=_COMPILER_OPTIONS.get({"cuda": "gpu"}.get(platform, platform))
            if self.mesh.size > 1
            else None,
        )

    def place(self, state: Any, argument: int) -> PackedState:
        """An argument as a packed state of this runner's layout."""
        layout = self.layouts[argument]
        if isinstance(state, PackedState):
            arrays = state._alive()
            return state if state._layout == layout else layout.shard(state._layout.unshard(arrays))
        if isinstance(state, DeferredState):
            return initialise(state._function, state._args, layout)
        return layout.shard(state)

    def __call__(self, args: Sequence[Any]) -> Any:
        states = [self.place(args[n], n)._arrays for n in self.layouts]
        leaves = [leaf for n in self.others for leaf in jax.tree.leaves(args[n])]
        others = [jax.device_put(leaf, s) for leaf, s in zip(leaves, self.other_shardings)]
        with self.compiling():
            new_states, rest = self.jitted(states, others)
        return self._rebuild(new_states, rest)

    def lower(self, args: Sequence[Any]) -> Any:
        states = []
        for layout in self.layouts.values():
            shapes = jax.eval_shape(layout.pack, list(layout.avals))
            states.append(
                [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=x) for s, x in zip(shapes, layout.shardings)]
            )
        leaves = [leaf for n in self.others for leaf in jax.tree.leaves(abstract(args[n]))]
        others = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s) for leaf, s in zip(leaves, self.other_shardings)
        ]
        return self.jitted.lower(states, others)

    def _rebuild(self, new_states, rest) -> Any:
        """The step's own return value, with packed states in it."""
        traced, program = self.program.traced, self.program
        flat: list[Any] = [None] * traced.out_tree.num_leaves
        taken: set[int] = set()
        for positions in program.state_outputs.values():
            taken.update(positions)
        feed = iter(rest)
        for n in range(len(flat)):
            if n not in taken:
                flat[n] = next(feed)
        packed = {
            argument: PackedState(layout, arrays)
            for (argument, layout), arrays in zip(program.returned.items(), new_states)
        }
        children = jax.tree_util.treedef_children(traced.out_tree)
        if not children:
            return jax.tree.unflatten(traced.out_tree, flat)
        starts = np.cumsum([0, *(c.num_leaves for c in children)])
        by_start = {positions[0]: (len(positions), packed[n]) for n, positions in program.state_outputs.items()}
        if 0 in by_start and by_start[0][1]._layout.tree == traced.out_tree:
            return by_start[0][1]
        parts = []
        for child, start in zip(children, starts):
            size_state = by_start.get(int(start))
            if size_state is not None and size_state[0] == child.num_leaves and child == size_state[1]._layout.tree:
                parts.append(size_state[1])
            else:
                parts.append(jax.tree.unflatten(child, flat[start : start + child.num_leaves]))
        outline = jax.tree.unflatten(traced.out_tree, list(range(len(flat))))
        top = jax.tree.structure(outline, is_leaf=lambda x: x is not outline)
        return jax.tree.unflatten(top, parts)


def check_batch(
    train_step: Callable, shapes: Sequence[Any], batch_argnums: Sequence[int], data: int, num_microbatches: int
) -> None:
    """Raise BatchError unless the rows divide by `data * num_microbatches`."""
    named = []
    for n in batch_argnums:
        for keys, leaf in jax.tree_util.tree_flatten_with_path(shapes[n])[0]:
            named.append((f"argument {n}{jax.tree_util.keystr(keys)}", leaf))
    try:
        rows, has_rows = batch_rows(named)
    except BatchError as error:
        places = ", ".join(map(str, batch_argnums))
        raise BatchError(
            f"{error}; argument {places} of the train step at {source_of(train_step)} is taken as the batch (batch_argnums)"
        ) from None
    step = data * num_microbatches
    if rows % step or rows == 0:
        path = next(path for (path, _), yes in zip(named, has_rows) if yes)
        below, above = rows // step * step, (rows // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        raise BatchError(
            f"{path} has {rows} rows, which data={data} x num_microbatches={num_microbatches} = {step} does not divide; "
            f"use a batch of {near} rows, or another num_microbatches"
        )
