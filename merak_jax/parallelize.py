"""`parallelize`: wrap a train step; the first call traces, plans and compiles it for the mesh."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from merak_jax.errors import PlanError, TraceError
from merak_jax.mesh import check_mesh, make_mesh
from merak_jax.objects.call import ObjectStep, read_all
from merak_jax.objects.graph import holds_objects
from merak_jax.planning.plan import Plan
from merak_jax.runtime.partition_rules import PartitionRules
from merak_jax.runtime.runner import Runner, StepOptions, key_of, shapes_of
from merak_jax.runtime.state import DeferredState, PackedState
from merak_jax.runtime.tensor_options import choose_tensor
from merak_jax.schedules.registry import choose, make_table
from merak_jax.schedules.task import ScheduleError
from merak_jax.tracing.step import static_arguments, unwrap


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
    sequence_parallel: bool | str = "auto",
    ring_directions: Sequence[int] = (1,),
    partition_rules: Mapping[str, PartitionSpec] | None = None,
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
      plan: take mesh sizes, microbatches, schedule, form, chunks, overlap and the split of the carry from an earlier plan, where
        they are not given.
      semantics: "full_batch", the numbers of the unwrapped step, proved; or "per_microbatch": every microbatch of every data
        shard is a batch of its own, as for batch normalization or contrastive losses that couple rows. Then loss, gradients and
        real-valued auxiliary outputs are the means over microbatches, integer ones that depend on the batch or its size the sums
        (terms that follow neither count once), flags are put together as `all` or `any` made them, per-row ones one after the
        other, and mutable collections move once a step. These are other numbers than the full batch's.
      donate: reuse the state's memory for the new state; the state passed in is then gone.
      overlap: what hides the communication of tensor parallelism. "collective": matmuls that work on parts of a value while the
        others go round in a ring; it needs the sequence split. "paired": F of one microbatch and B of another in one loop over
        blocks, so that a collective of one stands beside a matmul of the other; its ticks are paired. "none": what the compiler
        finds. "auto": "collective" where it can be, "none" on CPU devices.
      sequence_parallel: split the carry over `tensor` along its tokens between the matmuls of a block: norms, dropout and sums are
        then computed once, and stashes are T times smaller. "auto": where the tokens divide by T, but not with "paired".
      ring_directions: of the chunks that each device's part is cut into for "collective", 1 or -1 each; (1, -1) sends halves both
        ways round, (1, 1) sends halves one after the other.
      partition_rules: how parameters of blocks are split over `tensor`, where the plan would do otherwise:
        `{pattern: PartitionSpec}`, a pattern being a regular expression that is searched in paths like
        `params/h_0/mlp/up/kernel`; the first that is found counts. `PartitionSpec(None, "tensor")` splits the last of two
        dimensions, `PartitionSpec()` none. The numbers are the same.
      remat, zero, offload, hardware: only "auto" (None for hardware) so far.

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
        sequence_parallel=sequence_parallel,
        ring_directions=ring_directions,
        partition_rules=partition_rules,
    )
    if train_step is None:
        return lambda function: parallelize(function, **options)
    if not callable(train_step):
        raise PlanError(f"train_step must be callable, got {type(train_step).__name__}")
    for name in ("remat", "zero", "offload"):
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
        if plan.tensor > 1:
            overlap = plan.overlap if overlap == "auto" else overlap
            sequence_parallel = plan.sequence_parallel if sequence_parallel == "auto" else sequence_parallel
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
    tensor = choose_tensor(overlap, sequence_parallel, ring_directions, form, mesh)
    if partition_rules:
        tensor = dataclasses.replace(tensor, rules=PartitionRules(partition_rules))
    if tensor.overlap == "paired":
        form = "paired"
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
    chosen = StepOptions(mesh, int(num_microbatches), (schedule, form, num_chunks), table, donate, semantics, tensor)
    return ParallelStep(train_step, argnums, chosen)


class ParallelStep:
    """A train step on a mesh: call it as the step itself. Made by `parallelize`."""

    def __init__(self, train_step: Callable, batch_argnums: tuple[int, ...], options: StepOptions):
        functools.update_wrapper(self, train_step, updated=())
        self._train_step, self._static = unwrap(train_step), static_arguments(train_step)
        self._batch_argnums, self._options = batch_argnums, options
        self.mesh = options.mesh
        self._runners: dict[Any, Runner] = {}
        self._latest: Runner | None = None
        self._objects = ObjectStep(self._train_step, batch_argnums, functools.partial(Runner, options))

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
            program, _ = self._objects.program(args, shapes_of, key_of)
            self._latest = program.runner
            return Lowered(functools.partial(self._objects.lower, args, program), program.runner.compiling)
        runner = self._runner_for(args)
        return Lowered(functools.partial(runner.lower, args), runner.compiling)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._positional(args, kwargs)
        if any(map(holds_objects, args)):
            program, parts = self._objects.program(args, shapes_of, key_of)
            self._latest = program.runner
            return self._objects(args, program, parts)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            raise TraceError(
                "the parallel step is called under jax.jit or another transformation; call it directly: it compiles itself, "
                "for the whole mesh"
            )
        return self._runner_for(args)(args)

    def _runner_for(self, args: Sequence[Any]) -> Runner:
        key = tuple(key_of(a, f"argument {n}") for n, a in enumerate(args))
        if key not in self._runners:
            stored = {n: a._layout for n, a in enumerate(args) if isinstance(a, PackedState)}
            shapes = [shapes_of(a) for a in args]
            self._runners[key] = Runner(self._options, self._train_step, shapes, self._batch_argnums, stored)
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
