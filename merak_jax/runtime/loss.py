"""The pipelined loss: proved separable, cut into blocks, with the origin of each of its inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError, TraceError
from merak_jax.partition.blocks import BlockGraph, dependence, find_blocks
from merak_jax.partition.blocks import whole as whole_loss
from merak_jax.partition.chain import BATCH, PARAMETER
from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.groups import stack_leaves
from merak_jax.runtime.stage import is_differentiable
from merak_jax.tracing.coupled import coupled_values, without_coupled
from merak_jax.tracing.jaxprs import constants_to_inputs
from merak_jax.tracing.matching import equal_values
from merak_jax.tracing.microbatch import Batched, Domain, MicrobatchedLoss, Partial, Shared, microbatch
from merak_jax.tracing.own_batches import own_batches
from merak_jax.tracing.side_results import without_side_results
from merak_jax.tracing.step import TracedStep


@dataclasses.dataclass(frozen=True, eq=False)
class LossInput:
    """Where an input of the pipelined loss comes from: `kind` is constant, operand, precomputed or numbers; `index` in it."""

    kind: str
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class LossProgram:
    """The microbatched loss as blocks, and what each of its inputs is.

    `graph` is what runs; `found` has the blocks also where one device runs the loss as the user wrote it.
    """

    loss: MicrobatchedLoss
    graph: BlockGraph
    found: BlockGraph
    constants: tuple[Any, ...]
    inputs: dict[Var, LossInput]
    rows_status: dict[Var, Any]


def separate(
    full: TracedStep,
    micro: TracedStep,
    rows: int,
    in_blocks: bool,
    semantics: str,
    stored: Sequence[tuple[Var, ...]] = (),
) -> LossProgram:
    """Prove that the loss can be computed in microbatches of `rows` rows, and cut it into blocks.

    `micro`: the step traced at another number of rows, or at `rows` where `semantics` is "per_microbatch" and nothing is proved.
    `in_blocks`: whether it is run block by block, where it has blocks. `stored`: groups of operands, one for each block, that are
    stored together.
    """
    if semantics == "per_microbatch":
        _check_constants(full, micro)
    operands, micro_operands = full.equation.invars, micro.equation.invars
    depends = outer_dependence(full)
    whole = full.rows == rows
    statuses: list[Any] = []
    domains: list[Domain] = []
    for n, (a, b) in enumerate(zip(operands, micro_operands)):
        bits = depends[a] if isinstance(a, Var) else 0
        statuses.append(_operand_status(full, n, a, b))
        if n >= full.num_loss_constants:
            _check_differentiated(full, n, bits, statuses[-1])
            domains.append(Domain.PARAMETER)
        elif isinstance(statuses[-1], Batched) or (bits & BATCH and whole):
            # Rows: of the batch, or drawn for each row beforehand.
            domains.append(Domain.BATCH)
        else:
            # What the step made of the whole batch beforehand (a token count) is a constant for the loss; so are keys and counters.
            constant = bits & BATCH or (isinstance(a, Var) and _is_key_or_counter(a.aval))
            domains.append(Domain.CONSTANT if constant else Domain(bits & PARAMETER))
    if not full.is_evaluation:
        _check_loss_reads(full, domains, depends)
    pairs = zip(full.loss.jaxpr.constvars, micro.loss.jaxpr.constvars)
    from_batch = [a.aval.shape != b.aval.shape for a, b in pairs] + [bool(d & Domain.BATCH) for d in domains]
    beside = [without_side_results(x.loss, from_batch) for x in (full, micro)]
    parameters = [bool(d & Domain.PARAMETER) for d in domains]
    pair = without_coupled(beside[0], beside[1], parameters)
    # Counts of the batch are made beforehand: what a remat makes of them and of no row may leave it too.
    counts = coupled_values(*pair, parameters)
    loss, micro_loss = (without_side_results(x, from_batch, known) for x, known in zip(pair, counts))
    prove = own_batches if semantics == "per_microbatch" else functools.partial(microbatch, rows_traced=micro.rows)
    proved = prove(
        loss,
        micro_loss,
        statuses,
        domains,
        rows_full=full.rows,
        rows_micro=rows,
        differentiated=not full.is_evaluation,
    )
    program, constants = constants_to_inputs(proved.pipeline)
    count = len(operands)
    inputs: dict[Var, LossInput] = {}
    domain: dict[Var, int] = {}
    rows_status: dict[Var, Any] = {}
    kinds = [LossInput("constant", n) for n in range(len(constants))]
    kinds += [LossInput("operand", n) for n in range(count)]
    kinds += [LossInput("precomputed", n) for n in range(len(program.invars) - len(kinds) - 1)]
    kinds += [LossInput("numbers", 0)]
    pipeline_status = [Shared()] * len(constants) + list(proved.pipeline_status)
    pipeline_domain = [Domain.CONSTANT] * len(constants) + list(proved.pipeline_domain)
    for var, kind, status, dom in zip(program.invars, kinds, pipeline_status, pipeline_domain):
        inputs[var] = kind
        rows = kind.kind == "numbers" or isinstance(status, Batched) or (whole and dom == Domain.BATCH)
        domain[var] = BATCH if rows else int(dom) & PARAMETER
        if rows:
            rows_status[var] = None if kind.kind == "numbers" else status
    operand_input = {
        operands[k.index]: v for v, k in inputs.items() if k.kind == "operand" and isinstance(operands[k.index], Var)
    }
    groups = [tuple(operand_input[v] for v in group) for group in stored if all(v in operand_input for v in group)]
    found = find_blocks(program, domain, groups)
    graph = found if in_blocks and found.chains else whole_loss(program, domain)
    # Merging equal equations keeps the inputs, so `inputs` stays valid for the graph's program.
    return LossProgram(proved, graph, found, tuple(constants), inputs, rows_status)


def _is_key_or_counter(aval: Any) -> bool:
    """Whether an operand that is not differentiated is small and holds no weights: a random key, a step number."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return True
    return not is_differentiable(aval) and (aval.shape == () or (aval.dtype == jnp.uint32 and aval.shape[-1] <= 4))


def _check_differentiated(full: TracedStep, n: int, bits: int, status: Any) -> None:
    """Raise NotSeparableError where the gradient is taken with respect to something made of the batch."""
    if bits & BATCH or isinstance(status, Batched):
        aval = full.equation.invars[n].aval.str_short()
        raise NotSeparableError(
            f"the gradient call at {full.equation.params['source']} differentiates a value {aval} that depends on the batch "
            f"(differentiated leaf {n - full.num_loss_constants}); only gradients of parameters are supported"
        )


def _check_constants(full: TracedStep, micro: TracedStep) -> None:
    """Raise NotSeparableError where the loss reads an array that Python made from the number of rows: it would be that of the
    whole batch."""
    constants = [dict(zip(traced.jaxpr.jaxpr.constvars, traced.jaxpr.consts)) for traced in (full, micro)]
    for a, b in zip(full.equation.invars[: full.num_loss_constants], micro.equation.invars):
        whole, own = (x.val if isinstance(x, Literal) else held.get(x) for x, held in zip((a, b), constants))
        if whole is None or own is None or jax.dtypes.issubdtype(a.aval.dtype, jax.dtypes.extended):
            continue
        if not equal_values(np.asarray(whole), np.asarray(own)):
            raise NotSeparableError(
                f"the loss differentiated at {full.equation.params['source']} reads {a.aval.str_short()}, which was made from the "
                "number of rows while the step was traced, as np.arange(rows) or jnp.array([rows]) are; under "
                "semantics='per_microbatch' every microbatch needs its own: make it inside the loss with jnp.arange, jnp.full or "
                "arithmetic on x.shape[0]"
            )


def _check_loss_reads(full: TracedStep, domains: Sequence[Domain], depends: dict[Var, int]) -> None:
    """Raise TraceError unless the loss reads both the batch and what it is differentiated by."""
    jaxpr, source = full.loss.jaxpr, full.equation.params["source"]
    inputs = {v: 0 for v in jaxpr.constvars}
    for n, (v, domain) in enumerate(zip(jaxpr.invars, domains)):
        inputs[v] = (BATCH if domain & Domain.BATCH else 0) | (PARAMETER if n >= full.num_loss_constants else 0)
    loss = jaxpr.outvars[0]
    bits = dependence(jaxpr, inputs)[loss] if isinstance(loss, Var) else 0
    if not bits & PARAMETER:
        raise TraceError(f"the loss differentiated at {source} does not read the parameters it is differentiated by")
    if not bits & BATCH and any(isinstance(a, Var) and depends[a] & BATCH for a in full.equation.invars):
        raise TraceError(
            f"the loss differentiated at {source} reads the batch only through values whose sizes do not follow the batch; "
            "the step prepares them with a hard-coded size: take sizes from the batch"
        )
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
    made = next((e for e in full.jaxpr.jaxpr.eqns if a in e.outvars), None)
    raise NotSeparableError(
        f"the value {a.aval.str_short()} computed{f' at {_compat.source_line(made)}' if made else ''}, before the gradient call at "
        f"{full.equation.params['source']}, does not have the batch of {full.rows} rows as a dimension of its own (dimensions "
        f"{axes} follow the batch); compute it inside the loss, or from all rows with the batch as an axis of its own"
    )


def block_inputs(
    loss: LossProgram, num_constants: int, layouts: Sequence[LaneLayout]
) -> tuple[dict[tuple[Var, ...], LaneLayout], dict[Var, LaneLayout]]:
    """The inputs of the loss that blocks read: one per block, and stacks `[L, ...]`, each with the layout of its chain.

    The members of a group are all differentiated, all other operands, or all constants: where some blocks are frozen and
    others are not, their inputs stay apart.
    """
    graph = loss.found

    def kind(var: Var) -> tuple[str, bool]:
        source = loss.inputs[var]
        return source.kind, source.kind == "operand" and source.index >= num_constants

    taken: set[Var] = set()
    lanes: dict[tuple[Var, ...], LaneLayout] = {}
    stacks: dict[Var, LaneLayout] = {}
    for chain, layout in zip(graph.chains, layouts):
        for group in lane_leaves(graph.program, [s.values for s in chain.slots if s.stack is None]):
            # Groups share no variable with an earlier one.
            if len({kind(v) for v in group}) == 1 and not taken & set(group):
                taken.update(group)
                lanes[group] = layout
        for v in stack_leaves(graph.program, [s.stack for s in chain.slots if s.stack is not None], chain.length):
            if v not in taken:
                taken.add(v)
                stacks[v] = layout
    return lanes, stacks


def output_status(loss: LossProgram, n: int, whole: bool) -> Any:
    status = loss.loss.out_status[n]
    if whole and not isinstance(status, Batched):
        return Partial()
    if isinstance(status, Shared):
        raise NotSeparableError(f"output {n} of the loss depends on the batch but is the same for all microbatches")
    return status


def wanted_gradients(loss: LossProgram, num_constants: int):
    """The shared values in a fixed order, and for which of them and of the lane operands gradients are wanted."""
    graph = loss.graph
    depends = dependence(
        graph.program,
        {
            v: int(loss.inputs[v].kind == "operand" and loss.inputs[v].index >= num_constants)
            for v in graph.program.invars
        },
    )
    names = [*graph.prologue_shared, *graph.side_shared, *graph.epilogue_shared, *graph.chain_shared]
    shared = tuple(dict.fromkeys(names))
    shared_gradient = tuple(bool(depends[v]) and is_differentiable(v.aval) for v in shared)
    lane_gradient: list[bool] = []
    for chain in graph.chains:
        slot_bits = [
            any(isinstance(a, Var) and depends[a] for a in (s.values if s.stack is None else (s.stack,)))
            for s in chain.slots
        ]
        prepared = chain.lane_prepare
        bits = dependence(
            prepared, dict(zip(prepared.invars, [*map(int, slot_bits), *(int(bool(depends[v])) for v in chain.shared)]))
        )
        lane_gradient += [bool(bits[v]) and is_differentiable(v.aval) for v in prepared.outvars]
    return shared, shared_gradient, tuple(lane_gradient)
