"""Wire the passes: from a traced step to the program that runs it on a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh

from merak_jax import _compat
from merak_jax.errors import NoRepeatedBlocksError, PlanError
from merak_jax.partition.blocks import BlockGraph, dominant_equation
from merak_jax.partition.fingerprint import different_rules
from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.lanes import LaneLayout
from merak_jax.partition.work import balanced_counts, flops
from merak_jax.runtime.groups import StateGroups, find_state_groups, known_groups, stack_leaves
from merak_jax.runtime.loss import LossProgram, block_inputs, output_status, separate, wanted_gradients
from merak_jax.runtime.pipeline import Pipeline
from merak_jax.runtime.program import StepProgram
from merak_jax.runtime.reroll import Rerolled
from merak_jax.runtime.sharding import choose_shardings
from merak_jax.runtime.state import StateLayout, leaf_paths
from merak_jax.runtime.tensor_options import TensorOptions
from merak_jax.schedules.forward_only import forward_only
from merak_jax.schedules.tick_table import TickTable
from merak_jax.tracing.jaxprs import make_jaxpr
from merak_jax.tracing.step import TracedStep


def build(
    full: TracedStep,
    micro: TracedStep,
    *,
    rows: int,
    mesh: Mesh,
    num_microbatches: int,
    table: TickTable,
    packable: Sequence[int],
    given: Mapping[int, StateLayout],
    semantics: str,
    tensor: TensorOptions,
) -> StepProgram:
    """Wire the passes for one set of argument shapes; `rows`: of one local microbatch, `micro`: see `separate`.

    `given`: layouts in which arguments of an evaluation are stored already. `tensor`: what hides the communication of
    tensor parallelism.

    Raises NotSeparableError and NoRepeatedBlocksError.
    """
    stages = mesh.shape["pipe"]
    known, known_specs = known_groups(full, given)
    # On one device a loop over blocks would save nothing.
    in_blocks = stages > 1 or mesh.shape["tensor"] > 1
    loss = separate(full, micro, rows, in_blocks, semantics, list(known.lanes))
    chains = loss.found.chains
    if not chains and stages > 1:
        raise NoRepeatedBlocksError(
            f"pipe={stages} needs a model with repeated blocks, but {_why_no_chain(loss.found)}, in the loss differentiated at "
            f"{full.equation.params['source']}; use pipe=1, or make at least two layers equal"
        )
    program = loss.graph.program
    pipelined = bool(loss.graph.chains)
    num_chunks, folded = _chunks_as_stored(known, table)
    counts = balanced_counts([flops(c.body) for c in chains], [c.length for c in chains], stages * num_chunks)
    chain_layouts = [LaneLayout(n, num_chunks, folded) for n in counts]
    empty = num_chunks * stages - np.count_nonzero(np.sum(counts, axis=0)) if num_chunks > 1 and chains else 0
    if empty and not full.is_evaluation:
        warnings.warn(
            f"{sum(c.length for c in chains)} blocks on {stages} stages with {num_chunks} chunks each leave {empty} chunks "
            "empty, and their ticks go by without work; take fewer chunks, fewer stages or another schedule",
            stacklevel=2,
        )
    operands = full.equation.invars

    def outer(var: Var):
        source = loss.inputs[var]
        return operands[source.index] if source.kind == "operand" else None

    chain_layouts = _as_stored(loss, chain_layouts, known, outer)
    lane_groups, stack_inputs = block_inputs(loss, full.num_loss_constants, chain_layouts)
    jaxpr = full.jaxpr.jaxpr
    # One program for what comes before and after the gradient call: the call's results are inputs of it.
    step = make_jaxpr(
        [],
        [*jaxpr.constvars, *jaxpr.invars, *full.equation.outvars],
        jaxpr.outvars,
        [e for e in jaxpr.eqns if e is not full.equation],
    )
    state_outputs = find_state_outputs(full, packable)
    # An evaluation reads the state as the train step stores it.
    stored = list(packable) if full.is_evaluation else list(state_outputs)
    groups = find_state_groups(
        full,
        step,
        {tuple(outer(v) for v in g): layout for g, layout in lane_groups.items() if outer(g[0]) is not None},
        {outer(v): layout for v, layout in stack_inputs.items() if outer(v) is not None},
        set(stored) - set(given),
    )
    groups = StateGroups({**groups.lanes, **known.lanes}, {**groups.stacks, **known.stacks}, groups.follows)
    in_groups = {v for g in groups.lanes for v in g} | set(groups.stacks)
    whole_leaves = [v for v, a in zip(jaxpr.invars, full.leaf_argument) if a in stored and v not in in_groups]
    paths = dict(zip(jaxpr.invars, full.leaf_path))

    def paths_of(leaf: Any) -> list[str]:
        """The paths of a parameter of the blocks: a variable for each block, or a stack of all."""
        own = [outer(v) for v in (leaf if isinstance(leaf, tuple) else (leaf,))]
        return [paths[v] for v in own if isinstance(v, Var) and v in paths]

    def wanted(leaf: Any) -> tuple[int | None] | None:
        stacked = not isinstance(leaf, tuple)
        shape = (leaf if stacked else leaf[0]).aval.shape
        return tensor.rules.of_blocks(paths_of(leaf), shape, stacked, mesh.shape["tensor"])

    inside = {path for leaf in (*lane_groups, *stack_inputs) for path in paths_of(leaf)}
    tensor.rules.check_used(sorted(inside), sorted(set(full.leaf_path) - inside))
    shardings = choose_shardings(loss.found, mesh, lane_groups, stack_inputs, groups, outer, whole_leaves, wanted)
    if not pipelined:
        # The loss runs as the user wrote it, and the state is stored so.
        shardings, groups = shardings.unpacked(), groups.unpacked()
        lane_groups, stack_inputs, chain_layouts = {}, {}, []
    shardings.stored.update(known_specs)
    prepare = Rerolled(program, lane_groups, stack_inputs, differentiated=True)
    gradient_groups, gradient_stacks = _gradient_groups(full, loss, lane_groups, stack_inputs)
    names = {v: f"state leaf {path}" for v, path in zip(jaxpr.invars, full.leaf_path)}
    gradients = full.equation.outvars[len(full.equation.outvars) - len(operands) + full.num_loss_constants :]
    parameters = zip(gradients, operands[full.num_loss_constants :])
    names.update({g: f"the gradient of {names[p]}" for g, p in parameters if isinstance(p, Var) and p in names})
    update = Rerolled(step, {**groups.lanes, **gradient_groups}, {**groups.stacks, **gradient_stacks}, names)
    layouts = groups.layouts(full, mesh, shardings.stored, stored)
    shared, shared_gradient, lane_gradient = wanted_gradients(loss, full.num_loss_constants)
    if full.is_evaluation:
        table = forward_only(stages, num_microbatches, num_chunks, folded)
    whole = full.rows == rows
    pipeline = Pipeline(
        graph=loss.graph,
        layouts=tuple(chain_layouts),
        mesh=mesh,
        num_microbatches=num_microbatches,
        table=table if pipelined else None,
        rows=full.rows,
        rows_status=tuple(loss.rows_status[v] for v in loss.graph.rows_inputs),
        output_status=tuple(output_status(loss, n, whole) for n in loss.graph.epilogue_outputs),
        shared=shared,
        shared_gradient=shared_gradient,
        shared_specs=shardings.shared(shared),
        lane_gradient=lane_gradient,
        lane_specs=shardings.lane_operands if pipelined else (),
        differentiated=not full.is_evaluation,
        rings=tensor.rings,
        paired=tensor.overlap == "paired",
    ).with_blocks(shardings.tensor, shardings.tokens(loss.found), tensor.sequence)
    return StepProgram(
        full,
        loss,
        layouts,
        tuple(chain_layouts),
        table if pipelined else None,
        pipeline,
        shardings,
        update,
        prepare,
        lane_groups,
        stack_inputs,
        state_outputs,
    )


def _why_no_chain(graph: BlockGraph) -> str:
    if graph.obstacle:
        return f"its blocks differ: {graph.obstacle}"
    program = graph.program
    largest = dominant_equation(program)
    where = ""
    if largest is not None and _compat.sub_jaxprs(largest):
        where = f", and most of the work is in one `{largest.primitive.name}` at {_compat.source_line(largest)}"
    rules = different_rules(program)
    if rules:
        where = (
            f"; `{rules[0].primitive.name}` at {_compat.source_line(rules[0])} computes something else than at "
            f"{_compat.source_line(rules[1])} or with other constants: give it what differs between layers as an argument"
        )
    return f"no chain of equal blocks was found among {len(program.eqns)} equations{where}"


def _chunks_as_stored(known: StateGroups, table: TickTable) -> tuple[int, bool]:
    """`(chunks per stage, whether they go forth and back)`: as the state is stored already, else as the ticks want them."""
    found = {(layout.num_chunks, layout.folded) for layout in [*known.lanes.values(), *known.stacks.values()]}
    if len(found) > 1:
        raise PlanError(
            "the states of this evaluation were stored by train steps with different chunks per stage "
            f"({sorted(found)}: chunks, whether they go forth and back); pass `unshard(state)` of one of them"
        )
    return next(iter(found), (table.num_chunks, table.folded))


def _as_stored(loss: LossProgram, layouts: Sequence[LaneLayout], known: StateGroups, outer) -> list[LaneLayout]:
    """The layout of each chain: that of its parameters where they are stored already."""
    found = []
    for chain, layout in zip(loss.found.chains, layouts):
        groups = lane_leaves(loss.found.program, [s.values for s in chain.slots if s.stack is None])
        stacks = stack_leaves(loss.found.program, [s.stack for s in chain.slots if s.stack is not None], chain.length)
        stored = [known.lanes.get(tuple(outer(v) for v in g)) for g in groups] + [
            known.stacks.get(outer(v)) for v in stacks
        ]
        found.append(next((s for s in stored if s is not None), layout))
    return found


def _gradient_groups(full: TracedStep, loss: LossProgram, lane_groups, stack_inputs):
    """The results of the gradient call that belong to lane groups and stacks."""
    count = len(full.equation.invars) - full.num_loss_constants
    gradients = full.equation.outvars[len(full.equation.outvars) - count :]

    def gradient(var: Var):
        source = loss.inputs[var]
        at = source.index - full.num_loss_constants
        return gradients[at] if source.kind == "operand" and at >= 0 else None

    groups = {tuple(gradient(v) for v in g): layout for g, layout in lane_groups.items()}
    stacks = {gradient(v): layout for v, layout in stack_inputs.items()}
    return {g: n for g, n in groups.items() if None not in g}, {v: n for v, n in stacks.items() if v is not None}


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
                mismatch = mismatch or _other_leaves(tree, out_tree)
                continue
            changed = [(n, p) for n, p in zip(leaves, positions) if not _same_type(invars[n], outvars[p])]
            if changed:
                n, p = changed[0]
                mismatch = (
                    f": leaf {traced.leaf_path[n]} goes in as {invars[n].aval.str_short()} and comes out as "
                    f"{outvars[p].aval.str_short()}, another program for the next call; give it that type from the start"
                )
                continue
            result[argument] = positions
            used.update(positions)
            break
    if not result and not traced.is_evaluation:
        raise PlanError(
            f"the train step at {traced.source} does not return a new state with the structure, shapes and types of the state "
            f"it takes{mismatch or f': it returns {_shape_of_result(traced)}; return (new_state, metrics)'}"
        )
    return result


def _shape_of_result(traced: TracedStep) -> str:
    """What the step returns, in a few words: the types of its results, or of its arrays."""
    leaves = iter(traced.jaxpr.jaxpr.outvars)

    def show(tree) -> str:
        own = [next(leaves) for _ in range(tree.num_leaves)]
        if jax.tree_util.treedef_is_leaf(tree):
            return own[0].aval.str_short()
        return "None" if tree.node_data() is None else tree.node_data()[0].__name__

    kind = traced.out_tree.node_data()
    if kind is None or kind[0] is not tuple:
        return show(traced.out_tree)
    return f"({', '.join(map(show, jax.tree_util.treedef_children(traced.out_tree)))})"


def _other_leaves(before: Any, after: Any) -> str:
    """How the leaves of a returned tree of the same kind differ from those of the state; empty for a tree of another kind."""
    if before.node_data() is None or after.node_data() is None or before.node_data()[0] is not after.node_data()[0]:
        return ""
    paths = [leaf_paths(jax.tree.unflatten(t, [0] * t.num_leaves)) for t in (before, after)]
    missing = [p for p in paths[0] if p not in paths[1]]
    extra = [p for p in paths[1] if p not in paths[0]]
    if len(missing) == len(paths[0]) or not missing + extra:
        return ""
    found = [
        f"{what} {', '.join(some[:3])}" for what, some in (("it lacks", missing), ("it has a new leaf", extra)) if some
    ]
    return f": what it returns is like the state, but {' and '.join(found)}"


def _same_type(a: Any, b: Any) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
