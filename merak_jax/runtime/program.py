"""Build the whole parallel step from its parts: layouts, the pipelined loss, the re-rolled update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh

from merak_jax.errors import NoRepeatedBlocksError, NotSeparableError, PlanError, TraceError
from merak_jax.partition.blocks import BlockGraph, dependence, find_blocks
from merak_jax.partition.blocks import whole as whole_loss
from merak_jax.partition.chains import BATCH, PARAMETER
from merak_jax.partition.lanes import LaneLayout, even_counts
from merak_jax.runtime.groups import find_state_groups, stack_leaves
from merak_jax.runtime.pipeline import Pipeline
from merak_jax.runtime.reroll import Evaluation, Rerolled, lane_leaves
from merak_jax.runtime.sharding import Shardings, choose_shardings
from merak_jax.runtime.stage import is_differentiable
from merak_jax.runtime.state import StateLayout
from merak_jax.schedules.ticks import TickTable
from merak_jax.tracing.inline import make_jaxpr
from merak_jax.tracing.jaxprs import constants_to_inputs, evaluate
from merak_jax.tracing.microbatch import Batched, Domain, MicrobatchedLoss, Partial, Shared, microbatch
from merak_jax.tracing.step import TracedStep


@dataclasses.dataclass(frozen=True, eq=False)
class LossInput:
    """Where an input of the pipelined loss comes from: `kind` is constant, operand, precomputed or flag; `index` in it."""

    kind: str
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class LossProgram:
    """The microbatched loss as blocks, and what each of its inputs is.

    `graph` is what runs; `found` has the blocks also where one stage runs the loss as the user wrote it.
    """

    loss: MicrobatchedLoss
    graph: BlockGraph
    found: BlockGraph
    constants: tuple[Any, ...]
    inputs: dict[Var, LossInput]
    rows_status: dict[Var, Any]


def separate(full: TracedStep, micro: TracedStep, rows: int, stages: int) -> LossProgram:
    """Prove that the loss can be computed in microbatches of `rows` rows, and cut it into blocks.

    `micro`: the step traced at `rows_to_trace` rows.
    """
    operands, micro_operands = full.equation.invars, micro.equation.invars
    depends = outer_dependence(full)
    whole = full.rows == rows
    statuses: list[Any] = []
    domains: list[Domain] = []
    for n, (a, b) in enumerate(zip(operands, micro_operands)):
        bits = depends[a] if isinstance(a, Var) else 0
        statuses.append(_operand_status(full, n, a, b))
        if bits & BATCH and (isinstance(statuses[-1], Batched) or whole):
            domains.append(Domain.BATCH)
        else:
            # What the step made of the whole batch beforehand (a token count) is a constant for the loss.
            domains.append(Domain.CONSTANT if bits & BATCH else Domain(bits & PARAMETER))
    _check_loss_reads(full, domains)
    proved = microbatch(
        full.loss, micro.loss, statuses, domains, rows_full=full.rows, rows_micro=rows, rows_traced=micro.rows
    )
    program, constants = constants_to_inputs(proved.pipeline)
    count = len(operands)
    inputs: dict[Var, LossInput] = {}
    domain: dict[Var, int] = {}
    rows_status: dict[Var, Any] = {}
    kinds = [LossInput("constant", n) for n in range(len(constants))]
    kinds += [LossInput("operand", n) for n in range(count)]
    kinds += [LossInput("precomputed", n) for n in range(len(program.invars) - len(kinds) - 1)]
    kinds += [LossInput("flag", 0)]
    pipeline_status = [Shared()] * len(constants) + list(proved.pipeline_status)
    pipeline_domain = [Domain.CONSTANT] * len(constants) + list(proved.pipeline_domain)
    for var, kind, status, dom in zip(program.invars, kinds, pipeline_status, pipeline_domain):
        inputs[var] = kind
        rows = kind.kind == "flag" or isinstance(status, Batched) or (whole and dom == Domain.BATCH)
        domain[var] = BATCH if rows else int(dom) & PARAMETER
        if rows:
            rows_status[var] = None if kind.kind == "flag" else status
    found = find_blocks(program, domain)
    graph = found if stages > 1 else whole_loss(found, domain)
    # Merging equal equations keeps the inputs, so `inputs` stays valid for the graph's program.
    return LossProgram(proved, graph, found, tuple(constants), inputs, rows_status)


def _check_loss_reads(full: TracedStep, domains: Sequence[Domain]) -> None:
    """Raise TraceError unless the loss reads both the batch and what it is differentiated by."""
    jaxpr, source = full.loss.jaxpr, full.equation.params["source"]
    inputs = {v: 0 for v in jaxpr.constvars}
    for n, (v, domain) in enumerate(zip(jaxpr.invars, domains)):
        inputs[v] = (BATCH if domain & Domain.BATCH else 0) | (PARAMETER if n >= full.num_loss_constants else 0)
    loss = jaxpr.outvars[0]
    bits = dependence(jaxpr, inputs)[loss] if isinstance(loss, Var) else 0
    if not bits & PARAMETER:
        raise TraceError(f"the loss differentiated at {source} does not read the parameters it is differentiated by")
    if not bits & BATCH:
        raise TraceError(
            f"the loss differentiated at {source} does not read the batch argument of the train step; pass the "
            "batch as an argument instead of capturing it"
        )


def outer_dependence(traced: TracedStep) -> dict[Var, int]:
    """For each variable of the step whether it depends on the batch and on anything else the caller gives."""
    jaxpr = traced.jaxpr.jaxpr
    domain = {v: 0 for v in jaxpr.constvars}
    batch = {n for n, rows in enumerate(traced.leaf_rows) if rows}
    domain.update((v, BATCH if n in batch else PARAMETER) for n, v in enumerate(jaxpr.invars))
    return dependence(jaxpr, domain)


def _operand_status(full: TracedStep, n: int, a: Any, b: Any) -> Any:
    """Batched along the axis whose size follows the batch; a value with no such axis is the same for all microbatches."""
    if full.rows == 0 or a.aval.shape == b.aval.shape:
        return Shared()
    axes = [d for d, (x, y) in enumerate(zip(a.aval.shape, b.aval.shape)) if x != y]
    if len(axes) == 1 and a.aval.shape[axes[0]] == full.rows:
        return Batched(axes[0])
    raise NotSeparableError(
        f"a value {a.aval.str_short()} computed before the gradient call mixes the batch with other dimensions (axes {axes}); "
        "compute it inside the loss, or keep the batch as an axis of its own"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """Everything that running a step needs. `function(states, others)` -> `(new states, other outputs)`, to be jitted."""

    traced: TracedStep
    loss: LossProgram
    layouts: dict[int, StateLayout]
    lanes: LaneLayout
    table: TickTable | None
    pipeline: Pipeline
    shardings: Shardings
    update: Rerolled
    prepare: Rerolled
    lane_groups: tuple[tuple[Var, ...], ...]
    stack_inputs: tuple[Var, ...]
    state_outputs: dict[int, tuple[int, ...]]

    # The step.

    def __call__(self, states: Sequence[Sequence[Any]], others: Sequence[Any]):
        """New arrays of each packed argument, and the step's other outputs, flat.

        `states`: stored arrays of the packed arguments in argument order; `others`: leaves of the other arguments.
        """
        traced, operands = self.traced, self.traced.equation.invars
        lanes, stacks, whole = self._given(states, others)
        before = self.update.start(
            [lanes.get(g) for g in self.update.lanes], [stacks.get(v) for v in self.update.stacks], whole
        )
        outputs, gradients = self._loss_and_gradients(before, operands)
        results = traced.equation.outvars
        count = len(results) - (len(operands) - traced.num_loss_constants)
        whole.update(zip(results[:count], outputs))
        for group, value in gradients.items():
            if isinstance(group, tuple):
                lanes[group] = value
            elif group in self.update.stacks:
                stacks[group] = value
            else:
                whole[group] = value
        after = self.update.start([lanes[g] for g in self.update.lanes], [stacks[v] for v in self.update.stacks], whole)
        return self._results(after)

    def _given(self, states, others):
        """The arguments by variable: packed groups, packed stacks, whole leaves."""
        jaxpr, traced = self.traced.jaxpr, self.traced
        whole: dict[Var, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts))
        lanes: dict[tuple, Any] = {}
        stacks: dict[Var, Any] = {}
        arrays = dict(zip(self.layouts, states))
        feed = iter(others)
        leaves: dict[int, list[Var]] = {}
        for var, argument in zip(jaxpr.jaxpr.invars, traced.leaf_argument):
            if argument in self.layouts:
                leaves.setdefault(argument, []).append(var)
            else:
                whole[var] = next(feed)
        for argument, layout in self.layouts.items():
            for number, value in enumerate(arrays[argument]):
                members = layout.leaves_of(number)
                lane = layout.places[members[0]].lane
                if lane is None:
                    whole[leaves[argument][members[0]]] = value
                elif lane == -1:
                    stacks[leaves[argument][members[0]]] = value
                else:
                    members.sort(key=lambda i: layout.places[i].lane or 0)
                    lanes[tuple(leaves[argument][i] for i in members)] = value
        return lanes, stacks, whole

    def _loss_and_gradients(self, before: Evaluation, operands):
        """The loss's outputs over the whole batch, and the gradients by group, stack or variable of the step."""
        traced, loss, pipeline = self.traced, self.loss, self.pipeline
        num_constants = traced.num_loss_constants
        program = loss.graph.program

        def operand_of(var: Var) -> Any:
            source = loss.inputs[var]
            return source.index if source.kind == "operand" else None

        full_operands = [
            before.whole(a) if not isinstance(a, Var) or n < num_constants and self._is_read_whole(n) else None
            for n, a in enumerate(operands)
        ]
        precomputed = (
            evaluate(loss.loss.precompute.jaxpr, loss.loss.precompute.consts, *full_operands)
            if loss.loss.precompute.jaxpr.outvars
            else []
        )

        def value(var: Var) -> Any:
            source = loss.inputs[var]
            if source.kind == "constant":
                return loss.constants[source.index]
            if source.kind == "precomputed":
                return precomputed[source.index]
            return before.whole(operands[source.index])

        def group_value(group) -> Any:
            if loss.inputs[group[0]].kind == "constant":
                return self.lanes.pack([loss.constants[loss.inputs[v].index] for v in group])
            return before.packed([operands[operand_of(v)] for v in group])

        lanes = [group_value(g) for g in self.lane_groups]
        stacks = [
            before.packed_stack(operands[operand_of(v)])
            if operand_of(v) is not None
            else self.lanes.pack_stack(jnp.asarray(value(v)))
            for v in self.stack_inputs
        ]
        in_groups = {v for g in self.lane_groups for v in g} | set(self.stack_inputs)
        rows_vars = [v for v in loss.graph.rows_inputs if loss.inputs[v].kind != "flag"]
        single = [v for v in program.invars if v not in in_groups and v not in loss.rows_status and self._reads(v)]
        whole = {v: value(v) for v in single}
        batch = [value(v) for v in rows_vars]

        def wanted(var: Var) -> bool:
            index = operand_of(var)
            return index is not None and index >= num_constants and is_differentiable(var.aval)

        parts = (
            [wanted(g[0]) for g in self.lane_groups],
            [wanted(v) for v in self.stack_inputs],
            [wanted(v) for v in single],
        )
        given = (lanes, stacks, [whole[v] for v in single])
        chosen = tuple([x for x, yes in zip(values, flags) if yes] for values, flags in zip(given, parts))

        def prepare(chosen):
            filled = [_fill(values, flags, part) for values, flags, part in zip(given, parts, chosen)]
            ev = self.prepare.start(filled[0], filled[1], dict(zip(single, filled[2])))
            lane_values = self._lane_operands(ev)
            shared_values = [ev.whole(v) for v in pipeline.shared]
            differentiable = (
                [x for x, yes in zip(lane_values, pipeline.lane_gradient) if yes],
                [x for x, yes in zip(shared_values, pipeline.shared_gradient) if yes],
            )
            # Gradients of what is only returned (a parameter norm among the metrics) are not asked for.
            rest = [
                ev.whole(a) if n not in loss.graph.epilogue_outputs and not self._is_rows_output(a) else None
                for n, a in enumerate(program.outvars)
            ]
            return differentiable, (lane_values, shared_values, rest)

        made, pull, (lane_values, shared_values, rest) = jax.vjp(prepare, chosen, has_aux=True)
        lane_values = self.shardings.constrain(lane_values, pipeline.lane_specs)
        shared_values = self.shardings.constrain(shared_values, pipeline.shared_specs)
        pipelined, lane_sums, shared_sums = pipeline(lane_values, shared_values, batch)
        cotangent = (
            [s.astype(m.dtype) for s, m in zip(lane_sums, made[0])],
            [s.astype(m.dtype) for s, m in zip(shared_sums, made[1])],
        )
        (gradient_parts,) = pull(cotangent)
        outputs = self._loss_outputs(pipelined, rest, value)
        gradients: dict[Any, Any] = {}
        theta_results = traced.equation.outvars[len(traced.equation.outvars) - (len(operands) - num_constants) :]

        def result_of(var: Var) -> Var:
            return theta_results[operand_of(var) - num_constants]

        for sources, flags, part in zip((self.lane_groups, self.stack_inputs, single), parts, gradient_parts):
            for source, g in zip([s for s, yes in zip(sources, flags) if yes], part):
                if isinstance(source, tuple):
                    gradients[tuple(result_of(v) for v in source)] = g
                else:
                    gradients[result_of(source)] = g
        # Parameters that the loss does not read still get their zeros.
        covered = {v for g in gradients for v in (g if isinstance(g, tuple) else (g,))}
        for var in theta_results:
            if var not in covered:
                gradients[var] = jnp.zeros(var.aval.shape, var.aval.dtype)
        return outputs, gradients

    def _is_read_whole(self, operand: int) -> bool:
        """Whether the part of the loss that is computed on the full batch reads an operand."""
        jaxpr = self.loss.loss.precompute.jaxpr
        var = jaxpr.invars[operand]
        return any(a is var for e in jaxpr.eqns for a in e.invars) or any(a is var for a in jaxpr.outvars)

    def _reads(self, var: Var) -> bool:
        program = self.loss.graph.program
        return any(a is var for e in program.eqns for a in e.invars) or any(a is var for a in program.outvars)

    def _is_rows_output(self, atom: Any) -> bool:
        return isinstance(atom, Var) and atom in self.loss.rows_status

    def _lane_operands(self, ev: Evaluation) -> list[Any]:
        chain = self.loss.graph.chain
        if chain is None:
            return []
        raw = [ev.packed(s.values) if s.stack is None else ev.packed_stack(s.stack) for s in chain.slots]
        if not chain.lane_prepare.eqns and len(chain.lane_prepare.outvars) == len(raw):
            return raw
        shared = [ev.whole(v) for v in chain.shared]

        def prepare(*lane):
            return evaluate(chain.lane_prepare, [], *lane, *shared)

        return jax.vmap(jax.vmap(prepare))(*raw)

    def _loss_outputs(self, pipelined, rest, value) -> list[Any]:
        """All outputs of the loss, from the pipeline, from the parameters alone, or from the batch alone."""
        graph = self.loss.graph
        piped = dict(zip(graph.epilogue_outputs, pipelined))
        outputs = []
        for n, a in enumerate(graph.program.outvars):
            if n in piped:
                outputs.append(piped[n])
            elif self._is_rows_output(a):
                outputs.append(value(a))
            else:
                outputs.append(rest[n])
        return outputs

    def _results(self, after: Evaluation):
        """The step's outputs: states packed, everything else whole and flat."""
        outvars = self.traced.jaxpr.jaxpr.outvars
        new_states = []
        taken: set[int] = set()
        for argument, layout in self.layouts.items():
            positions = self.state_outputs[argument]
            taken.update(positions)
            arrays = []
            for number in range(len(layout.specs)):
                members = sorted(layout.leaves_of(number), key=lambda i: layout.places[i].lane or 0)
                atoms = [outvars[positions[i]] for i in members]
                lane = layout.places[members[0]].lane
                if lane is None:
                    arrays.append(_typed(after.whole(atoms[0]), layout.avals[members[0]]))
                elif lane == -1:
                    arrays.append(after.packed_stack(atoms[0]))
                else:
                    arrays.append(after.packed(atoms))
            new_states.append(self.shardings.constrain(arrays, layout.specs))
        rest = [_typed(after.whole(a), a.aval) for n, a in enumerate(outvars) if n not in taken]
        return new_states, rest


def _typed(value: Any, aval: Any) -> Any:
    return (
        jnp.asarray(value, aval.dtype)
        if isinstance(value, (bool, int, float)) or not hasattr(value, "dtype")
        else value
    )


def _fill(values, flags, part) -> list[Any]:
    feed = iter(part)
    return [next(feed) if yes else v for v, yes in zip(values, flags)]


def build(
    full: TracedStep,
    micro: TracedStep,
    rows: int,
    *,
    mesh: Mesh,
    num_microbatches: int,
    make_table: Callable[[int, int], TickTable],
    packable: Sequence[int],
) -> StepProgram:
    """Wire the passes for one set of argument shapes; `rows`: of one local microbatch.

    Raises NotSeparableError and NoRepeatedBlocksError.
    """
    stages = mesh.shape["pipe"]
    loss = separate(full, micro, rows, stages)
    chain = loss.found.chain
    if chain is None and stages > 1:
        raise NoRepeatedBlocksError(
            f"pipe={stages} needs a model with repeated blocks, but no chain of equal blocks was found among "
            f"{len(loss.graph.epilogue.eqns)} equations of the loss; use pipe=1, or give the model at least two equal layers"
        )
    program = loss.graph.program
    lane_groups, stack_inputs = block_inputs(loss.found)
    operands = full.equation.invars

    def outer(var: Var):
        source = loss.inputs[var]
        return operands[source.index] if source.kind == "operand" else None

    jaxpr = full.jaxpr.jaxpr
    # One program for what comes before and after the gradient call: the call's results are inputs of it.
    step = make_jaxpr(
        [],
        [*jaxpr.constvars, *jaxpr.invars, *full.equation.outvars],
        jaxpr.outvars,
        [e for e in jaxpr.eqns if e is not full.equation],
    )
    state_outputs = find_state_outputs(full, packable)
    groups = find_state_groups(
        full,
        step,
        [tuple(outer(v) for v in g) for g in lane_groups if outer(g[0]) is not None],
        [outer(v) for v in stack_inputs if outer(v) is not None],
        chain.length if chain is not None else 0,
        set(state_outputs),
    )
    in_groups = {v for g in groups.lanes for v in g} | set(groups.stacks)
    whole_leaves = [v for v, a in zip(jaxpr.invars, full.leaf_argument) if a in state_outputs and v not in in_groups]
    shardings = choose_shardings(loss.found, mesh, lane_groups, stack_inputs, groups, outer, whole_leaves)
    if stages == 1:
        # The loss runs as the user wrote it, and the state is stored so.
        shardings, groups = shardings.unpacked(), groups.unpacked()
        lane_groups, stack_inputs = [], []
    lanes = LaneLayout(even_counts(chain.length, stages) if chain is not None and stages > 1 else (0,))
    prepare = Rerolled(program, lane_groups, stack_inputs, lanes)
    gradient_groups, gradient_stacks = _gradient_groups(full, loss, lane_groups, stack_inputs)
    update = Rerolled(step, [*groups.lanes, *gradient_groups], [*groups.stacks, *gradient_stacks], lanes)
    layouts = groups.layouts(full, lanes, mesh, shardings.stored, list(state_outputs))
    shared, shared_gradient, lane_gradient = _wanted_gradients(loss, full.num_loss_constants)
    table = make_table(stages, num_microbatches) if stages > 1 else None
    whole = full.rows == rows
    pipeline = Pipeline(
        graph=loss.graph,
        layout=lanes,
        mesh=mesh,
        num_microbatches=num_microbatches,
        table=table,
        rows=full.rows,
        rows_status=tuple(loss.rows_status[v] for v in loss.graph.rows_inputs),
        output_status=tuple(_output_status(loss, n, whole) for n in loss.graph.epilogue_outputs),
        shared=shared,
        shared_gradient=shared_gradient,
        shared_specs=shardings.shared(shared),
        lane_gradient=lane_gradient,
        lane_specs=shardings.lane_operands if stages > 1 else (),
    )
    return StepProgram(
        full,
        loss,
        layouts,
        lanes,
        table,
        pipeline,
        shardings,
        update,
        prepare,
        tuple(lane_groups),
        tuple(stack_inputs),
        state_outputs,
    )


def block_inputs(graph: BlockGraph) -> tuple[list[tuple[Var, ...]], list[Var]]:
    """The inputs of the loss that blocks read: one per block, and stacks `[L, ...]`."""
    chain = graph.chain
    if chain is None:
        return [], []
    lane_groups = _disjoint(lane_leaves(graph.program, [s.values for s in chain.slots if s.stack is None]))
    in_lanes = {v for g in lane_groups for v in g}
    stacks = stack_leaves(graph.program, [s.stack for s in chain.slots if s.stack is not None], chain.length)
    return lane_groups, [v for v in stacks if v not in in_lanes]


def _gradient_groups(full: TracedStep, loss: LossProgram, lane_groups, stack_inputs):
    """The results of the gradient call that belong to lane groups and stacks."""
    count = len(full.equation.invars) - full.num_loss_constants
    gradients = full.equation.outvars[len(full.equation.outvars) - count :]

    def gradient(var: Var):
        source = loss.inputs[var]
        at = source.index - full.num_loss_constants
        return gradients[at] if source.kind == "operand" and at >= 0 else None

    groups = [tuple(gradient(v) for v in g) for g in lane_groups]
    stacks = [gradient(v) for v in stack_inputs]
    return [g for g in groups if None not in g], [v for v in stacks if v is not None]


def _disjoint(groups: Sequence[tuple[Var, ...]]) -> list[tuple[Var, ...]]:
    """Groups that share no variable with an earlier one."""
    taken: set[Var] = set()
    result = []
    for group in groups:
        if not taken & set(group):
            taken.update(group)
            result.append(group)
    return result


def _output_status(loss: LossProgram, n: int, whole: bool) -> Any:
    status = loss.loss.out_status[n]
    if whole and not isinstance(status, Batched):
        return Partial()
    if isinstance(status, Shared):
        raise NotSeparableError(f"output {n} of the loss depends on the batch but is the same for all microbatches")
    return status


def _wanted_gradients(loss: LossProgram, num_constants: int):
    """The shared values in a fixed order, and for which of them and of the lane operands gradients are wanted."""
    graph = loss.graph
    depends = dependence(
        graph.program,
        {
            v: int(loss.inputs[v].kind == "operand" and loss.inputs[v].index >= num_constants)
            for v in graph.program.invars
        },
    )
    chain = graph.chain
    names = [*graph.prologue_shared, *graph.side_shared, *graph.epilogue_shared, *(chain.shared if chain else ())]
    shared = tuple(dict.fromkeys(names))
    shared_gradient = tuple(bool(depends[v]) and is_differentiable(v.aval) for v in shared)
    if chain is None:
        return shared, shared_gradient, ()
    slot_bits = [
        any(isinstance(a, Var) and depends[a] for a in (s.values if s.stack is None else (s.stack,)))
        for s in chain.slots
    ]
    prepared = chain.lane_prepare
    bits = dependence(
        prepared, dict(zip(prepared.invars, [*map(int, slot_bits), *(int(bool(depends[v])) for v in chain.shared)]))
    )
    lane_gradient = tuple(bool(bits[v]) and is_differentiable(v.aval) for v in prepared.outvars)
    return shared, shared_gradient, lane_gradient


def find_state_outputs(traced: TracedStep, packable: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each argument that the step returns changed, the positions of its leaves among the step's flat outputs."""
    children = jax.tree_util.treedef_children(traced.out_tree)
    sizes = [c.num_leaves for c in children]
    outvars = traced.jaxpr.jaxpr.outvars
    invars = traced.jaxpr.jaxpr.invars
    candidates = [(traced.out_tree, 0)] + [(c, sum(sizes[:n])) for n, c in enumerate(children)]
    result: dict[int, tuple[int, ...]] = {}
    used: set[int] = set()
    mismatch = ""
    for argument in packable:
        tree = traced.in_trees[argument]
        leaves = [n for n, a in enumerate(traced.leaf_argument) if a == argument]
        for out_tree, start in candidates:
            positions = tuple(range(start, start + out_tree.num_leaves))
            if out_tree != tree or not leaves or used & set(positions):
                continue
            changed = [(n, p) for n, p in zip(leaves, positions) if not _same_type(invars[n], outvars[p])]
            if changed:
                n, p = changed[0]
                mismatch = (
                    f": leaf {traced.leaf_path[n]} goes in as {invars[n].aval.str_short()} and comes out as "
                    f"{outvars[p].aval.str_short()}"
                )
                continue
            result[argument] = positions
            used.update(positions)
            break
    if not result:
        raise PlanError(
            "the train step does not return a new state with the structure, shapes and types of the state it takes"
            f"{mismatch}; return (new_state, metrics)"
        )
    return result


def _same_type(a: Any, b: Any) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
