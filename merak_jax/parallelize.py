"""`parallelize`: wrap a train step; the first call traces, plans and compiles it for the mesh."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from merak_jax import _compat
from merak_jax.errors import BatchError, NotSeparableError, PlanError, TraceError
from merak_jax.mesh import check_mesh, make_mesh
from merak_jax.objects.call import ObjectStep, read_all
from merak_jax.objects.graph import holds_objects
from merak_jax.planning.describe import describe
from merak_jax.planning.plan import Plan
from merak_jax.runtime.build import build
from merak_jax.runtime.initialise import initialise
from merak_jax.runtime.program import StepProgram
from merak_jax.runtime.state import DeferredState, PackedState, StateLayout, shapes_key
from merak_jax.schedules.registry import choose, make_table
from merak_jax.schedules.task import ScheduleError
from merak_jax.schedules.tick_table import TickTable
from merak_jax.tracing.matching import ProgramsDifferError, merge
from merak_jax.tracing.microbatch import rows_to_trace
from merak_jax.tracing.step import abstract, batch_rows, python_random_state, source_of, static_arguments, trace, unwrap

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


def parallelize(
    train_step: Callable | None = None,
    *,
    mesh: Mesh | None = None,
    num_microbatches: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    schedule: str = "auto",
    form: str = "auto",
    num_chunks: int | None = None,
    remat: str = "auto",
    overlap: str = "auto",
    zero: str | int = "auto",
    offload: str = "auto",
    plan: Plan | None = None,
    hardware: Any = None,
    donate: bool = True,
    semantics: str = "full_batch",
) -> Any:
    """Run a train step on a mesh with axes `data`, `pipe`, `tensor`, with the numbers of the single-device step.

    `train_step(state, batch, *rest)` returns `new_state`, or a tuple or other container that holds it; `batch` arrays are
    `[batch, ...]`. Also a decorator.

    With nnx objects as arguments the step works as under `nnx.jit`: `train_step(model, optimizer, batch)` changes its arguments
    in place and returns anything. Between steps the variables' values stay on the mesh; reading one (`model.head.kernel[...]`,
    `nnx.state(model)`, `model(x)`) gathers it, once, to the default device, and a value that you set is used by the next step.
    Every way of reading an object reads all of its values: `print(model)` gathers the model.

    Args:
      mesh: from `merak_jax.make_mesh`; by default all devices along `data`.
      num_microbatches: M; the batch must divide by M times the size of `data`. By default the pipe size (1 without stages).
      batch_argnums: which arguments are batches. With nnx objects the default is the one argument that can be.
      schedule: "1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "interleaved", "zb_h1", "zb_v",
        "search" or a name given to `merak_jax.register_schedule`; "auto" is "1f1b".
      form: what a stage does in one tick: "merged" (an F and then a B), "paired" (the same, independent of each other) or
        "switched" (one of F, R, Bi, W); "auto" is what suits the schedule.
      num_chunks: chunks of the model that each stage holds, for "interleaved" and "search" (there 2 by default; "zb_v" has 2).
      plan: take mesh sizes, microbatches, schedule, form and chunks from an earlier plan, where they are not given.
      semantics: "full_batch", the numbers of the unwrapped step, proved; or "per_microbatch": every microbatch of every data
        shard is a batch of its own, as for batch normalization or contrastive losses that couple rows. Then loss, gradients and
        real-valued auxiliary outputs are the means over microbatches, integer ones that depend on the batch or its size the sums
        (terms that follow neither count once), flags are put together as `all` or `any` made them, per-row ones one after the
        other, and mutable collections move once a step. These are other numbers than the full batch's.
      donate: reuse the state's memory for the new state; the state passed in is then gone.
      remat, overlap, zero, offload, hardware: only "auto" (None for hardware) so far.

    Returns a `ParallelStep`. Raises MeshError and PlanError for bad arguments, before anything runs.
    """
    options = dict(
        mesh=mesh,
        num_microbatches=num_microbatches,
        batch_argnums=batch_argnums,
        schedule=schedule,
        form=form,
        num_chunks=num_chunks,
        remat=remat,
        overlap=overlap,
        zero=zero,
        offload=offload,
        plan=plan,
        hardware=hardware,
        donate=donate,
        semantics=semantics,
    )
    if train_step is None:
        return lambda function: parallelize(function, **options)
    if not callable(train_step):
        raise PlanError(f"train_step must be callable, got {type(train_step).__name__}")
    for name in ("remat", "overlap", "zero", "offload"):
        if options[name] != "auto":
            raise PlanError(f"{name}={options[name]!r} is not supported yet; leave it at 'auto'")
    if hardware is not None:
        raise PlanError(f"hardware={hardware!r} is not supported yet; leave it at None")
    if plan is not None:
        if not isinstance(plan, Plan):
            raise PlanError(f"plan must be a merak_jax Plan, got {type(plan).__name__}; Plan.from_json reads one")
        mesh = make_mesh(data=plan.data, pipe=plan.pipe, tensor=plan.tensor) if mesh is None else mesh
        num_microbatches = plan.num_microbatches if num_microbatches is None else num_microbatches
        if schedule == "auto" and plan.schedule != "forward":
            schedule = plan.schedule
            form = plan.form if form == "auto" else form
            num_chunks = plan.num_chunks if num_chunks is None else num_chunks
    mesh = make_mesh(data=len(jax.devices())) if mesh is None else check_mesh(mesh)
    if num_microbatches is None:
        num_microbatches = mesh.shape["pipe"]
    if (
        isinstance(num_microbatches, bool)
        or not isinstance(num_microbatches, (int, np.integer))
        or num_microbatches < 1
    ):
        raise PlanError(f"num_microbatches={num_microbatches!r} must be a positive integer")
    schedule = "1f1b" if schedule == "auto" else schedule
    try:
        form, num_chunks = choose(schedule, form, num_chunks)
        table = make_table(schedule, form, num_chunks, mesh.shape["pipe"], int(num_microbatches))
    except ScheduleError as error:
        raise PlanError(str(error)) from None
    if semantics not in ("full_batch", "per_microbatch"):
        raise PlanError(f"semantics={semantics!r} is unknown; choose 'full_batch' or 'per_microbatch'")
    argnums = tuple(batch_argnums) if isinstance(batch_argnums, Sequence) else (batch_argnums,)
    if not argnums or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in argnums):
        raise PlanError(
            f"batch_argnums={batch_argnums!r} must be the position of the batch among the train step's arguments, counted from 0, "
            "or a sequence of positions"
        )
    chosen = (schedule, form, num_chunks)
    return ParallelStep(train_step, mesh, int(num_microbatches), argnums, chosen, table, donate, semantics)


class ParallelStep:
    """A train step on a mesh: call it as the step itself. Made by `parallelize`."""

    def __init__(
        self,
        train_step,
        mesh: Mesh,
        num_microbatches: int,
        batch_argnums: tuple[int, ...],
        schedule: tuple[str, str, int],
        table: TickTable,
        donate: bool,
        semantics: str,
    ):
        functools.update_wrapper(self, train_step, updated=())
        self._train_step, self._static = unwrap(train_step), static_arguments(train_step)
        self.mesh = mesh
        self._num_microbatches, self._batch_argnums = num_microbatches, batch_argnums
        self._schedule, self._table, self._donate, self._semantics = schedule, table, donate, semantics
        self._runners: dict[Any, _Runner] = {}
        self._latest: _Runner | None = None
        self._objects = ObjectStep(self._train_step, batch_argnums, functools.partial(_Runner, self))

    @property
    def plan(self) -> Plan:
        """The plan of the latest shapes; PlanError before the first call or `lower`."""
        if self._latest is None:
            raise PlanError(
                "there is no plan before the step has seen a batch; call step.lower(state, batch) first "
                "(shapes will do: jax.ShapeDtypeStruct leaves), or run a step"
            )
        return self._latest.plan

    def init(self, create_state: Callable, *args: Any) -> Any:
        """The state `create_state(*args)`, to be made on the mesh, shard by shard, at the first step or `shard`.

        nnx objects are returned at once; only the values of their variables wait. Reading a value before the first step makes
        all of them on the default device: create the optimizer inside `create_state` too, since it reads the parameters.
        """
        if any(map(holds_objects, args)):
            return self._objects.create(create_state, args)
        state = DeferredState(create_state, args)
        return self._objects.create(create_state, args) if holds_objects(state.shapes) else state

    def shard(self, state: Any, argument: int = 0) -> PackedState:
        """Place the user's state on the mesh; PlanError before the step has seen a batch, and for nnx objects."""
        if holds_objects(state):
            raise PlanError("nnx objects are placed on the mesh by the step itself: call it with them as they are")
        if self._latest is None:
            raise PlanError(
                "the state's layout follows from the model and the batch; call step.lower(state, batch) first, or "
                "pass the state to the step as it is"
            )
        return self._latest.place(state, argument)

    def unshard(self, state: Any) -> Any:
        """The user's own tree, every leaf whole. nnx objects are themselves; their values are gathered now, not when read."""
        if holds_objects(state):
            return read_all(state)
        if isinstance(state, PackedState):
            return state._whole()
        return state.make() if isinstance(state, DeferredState) else state

    def _positional(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """The arguments in the order of the train step's signature; PlanError for one that is static under the user's jit."""
        if kwargs:
            bound = inspect.signature(self._train_step).bind(*args, **kwargs)
            if bound.kwargs:
                raise PlanError(
                    f"keyword-only arguments {sorted(bound.kwargs)} of the train step are not supported; make them positional"
                )
            args = bound.args
        static = [n for n in self._static if n < len(args)]
        if static:
            raise PlanError(
                f"argument {static[0]} of the train step is static under the jit around it, and the parallel step takes arrays "
                f"only ({args[static[0]]!r}); bind it first: merak_jax.parallelize(functools.partial(train_step, ...))"
            )
        return args

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The step traced for these arguments, which may be abstract; sets `plan`. Lowering itself waits until it is asked for."""
        args = self._positional(args, kwargs)
        if any(map(holds_objects, args)):
            program, _ = self._objects.program(args, _shapes_of, _key)
            self._latest = program.runner
            return Lowered(functools.partial(self._objects.lower, args, program), program.runner.compiling)
        runner = self._runner_for(args)
        return Lowered(functools.partial(runner.lower, args), runner.compiling)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._positional(args, kwargs)
        if any(map(holds_objects, args)):
            program, parts = self._objects.program(args, _shapes_of, _key)
            self._latest = program.runner
            return self._objects(args, program, parts)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            raise TraceError(
                "the parallel step is called under jax.jit or another transformation; call it directly: it compiles itself, "
                "for the whole mesh"
            )
        return self._runner_for(args)(args)

    def _runner_for(self, args: Sequence[Any]) -> _Runner:
        key = tuple(_key(a, f"argument {n}") for n, a in enumerate(args))
        if key not in self._runners:
            stored = {n: a._layout for n, a in enumerate(args) if isinstance(a, PackedState)}
            shapes = [_shapes_of(a) for a in args]
            self._runners[key] = _Runner(self, self._train_step, shapes, self._batch_argnums, stored)
        self._latest = self._runners[key]
        return self._latest


class Lowered:
    """A lowered step: `compile()`, `as_text()`; after compiling, `memory` in bytes per device."""

    def __init__(self, lower: Callable[[], Any], compiling: Callable[[], Any]):
        self._lower, self._compiling = lower, compiling
        self._compiled: Any = None

    @functools.cached_property
    def lowered(self) -> Any:
        """JAX's own lowered object."""
        return self._lower()

    def compile(self) -> Lowered:
        """Compile for the mesh's devices; returns self."""
        if self._compiled is None:
            with self._compiling():
                self._compiled = self.lowered.compile()
        return self

    @property
    def compiled(self) -> Any:
        """JAX's own compiled object."""
        return self.compile()._compiled

    @property
    def memory(self) -> Any:
        """XLA's memory analysis: argument, output, alias and temporary bytes per device."""
        return self.compiled.memory_analysis()

    def as_text(self) -> str:
        """The program: StableHLO before `compile()`, scheduled HLO after."""
        return self._compiled.as_text() if self._compiled is not None else self.lowered.as_text()


def _key(argument: Any, name: str = "the value") -> Any:
    """What tells arguments of different shapes apart; the same for a state before and after it is packed."""
    if isinstance(argument, PackedState):
        return argument._layout.key
    return shapes_key(_shapes_of(argument, name))


def _shapes_of(argument: Any, name: str = "the value") -> Any:
    if isinstance(argument, PackedState):
        return jax.tree.unflatten(argument._layout.tree, argument._layout.avals)
    if isinstance(argument, DeferredState):
        return abstract(argument.shapes)
    return abstract(argument, name)


class _Runner:
    """The step for one set of shapes: traced once, compiled once."""

    def __init__(
        self,
        step: ParallelStep,
        train_step: Callable,
        shapes: Sequence[Any],
        batch_argnums: Sequence[int],
        stored: Mapping[int, StateLayout],
    ):
        self.mesh, self.batch_argnums = step.mesh, tuple(batch_argnums)
        bad = [n for n in self.batch_argnums if not 0 <= n < len(shapes)]
        if bad:
            raise PlanError(
                f"the train step at {source_of(train_step)} got {len(shapes)} argument{'s' * (len(shapes) != 1)}, but its "
                f"batch is argument {bad[0]} (batch_argnums={self.batch_argnums}): pass the batch too, or set batch_argnums to "
                "where it is"
            )
        check_batch(train_step, shapes, self.batch_argnums, self.mesh.shape["data"], step._num_microbatches)
        full = trace(train_step, shapes, self.batch_argnums)
        rows = full.rows // (self.mesh.shape["data"] * step._num_microbatches)
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
            num_microbatches=step._num_microbatches,
            table=step._table,
            packable=packable,
            semantics=step._semantics,
            given={n: layout for n, layout in stored.items() if layout.mesh == self.mesh and full.is_evaluation},
        )
        proved = step._semantics == "full_batch"
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
        self.plan = describe(self.program, None if full.is_evaluation else step._schedule, step._num_microbatches)
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
            donate_argnums=(0,) if step._donate and not full.is_evaluation else (),
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
