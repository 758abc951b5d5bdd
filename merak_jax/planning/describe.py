"""Describe a built step as a Plan: stages, bytes, splits, with the names of the user's leaves."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jax.extend.core import Var

from merak_jax.partition.chain import stashed_once
from merak_jax.partition.communication import BlockCollective, block_collectives
from merak_jax.partition.derivative import BlockDerivative
from merak_jax.partition.splits import FREE, WHOLE, Split, Splits
from merak_jax.planning.plan import Plan, StagePlan
from merak_jax.runtime.program import StepProgram
from merak_jax.runtime.state import StateLayout


def describe(
    program: StepProgram, schedule: tuple[str, str, int] | None, num_microbatches: int, overlap: str = "none"
) -> Plan:
    """The plan of a step for the shapes it was traced with.

    `schedule`: its name, form and chunks; None for an evaluation. `overlap`: what hides communication over `tensor`.
    """
    traced, graph, mesh = program.traced, program.loss.found, program.pipeline.mesh
    chain = graph.chain
    tensor, pipeline = mesh.shape["tensor"], program.pipeline
    carry_bytes = [_bytes(a) for a in graph.carry_avals] if graph.chains else []
    if pipeline.carry_specs:
        carry_bytes = [n // (tensor if "tensor" in spec else 1) for n, spec in zip(carry_bytes, pipeline.carry_specs)]
    specs = iter(program.shardings.lane_operands)
    block_bytes = [
        sum(_bytes(v.aval) // (tensor if "tensor" in next(specs) else 1) for v in c.lane_prepare.outvars)
        for c in graph.chains
    ]
    table = program.table
    if table is not None:
        held = [int(n) for n in table.in_flight()]
        counts = list(zip(*(layout.per_stage for layout in program.chain_layouts)))
        constant = stashed_once(graph.chains) if program.pipeline.differentiated else [True] * len(graph.carry_avals)
        depth = int(np.sum([layout.visits[..., 1] for layout in program.chain_layouts], axis=0).max())
        stash = table.num_stash_slots * sum(
            split * (1 if same else depth) for split, same in zip(carry_bytes, constant)
        )
        for layout, block, splits in zip(program.chain_layouts, pipeline.blocks, pipeline.splits):
            if isinstance(block, BlockDerivative):
                # What R or F keeps for B, and Bi for W, of every block of a visit.
                kept = table.num_residual_slots * sum(_split_bytes(v, splits) for v in block.residual_vars)
                kept += table.num_saved_slots * sum(_split_bytes(v, splits) for v in block.saved_vars)
                stash += kept * int(layout.visits[..., 1].max())
    else:
        held, counts, stash = [1], [tuple(c.length for c in graph.chains)], 0
    # What stands between two chains is no block.
    layers = [n for n, c in enumerate(graph.chains) if c.length > 1]
    stages = tuple(
        StagePlan(sum(own[n] for n in layers), sum(n * size for n, size in zip(own, block_bytes)), most, stash)
        for own, most in zip(counts, held)
    )
    state_bytes = sum(
        _stored_bytes(layout, number) for layout in program.layouts.values() for number in range(len(layout.specs))
    )
    tensor_splits, others = _parameter_lines(program)
    folded = table is not None and table.folded
    collectives = _collectives(program)
    name, form, num_chunks = schedule or ("forward", "merged", 1 if table is None else table.num_chunks)
    return Plan(
        data=mesh.shape["data"],
        pipe=mesh.shape["pipe"],
        tensor=mesh.shape["tensor"],
        num_microbatches=num_microbatches,
        rows=traced.rows,
        schedule=name,
        chain=str(graph),
        block_source=chain.source if chain is not None else "",
        stages=stages,
        boundary_bytes=sum(carry_bytes),
        state_bytes=state_bytes,
        tensor_splits=tensor_splits,
        other_leaves=others,
        form=form,
        num_chunks=num_chunks,
        folded=folded,
        overlap=overlap if pipeline.blocks and tensor > 1 else "none",
        sequence_parallel=any("tensor" in spec for spec in pipeline.carry_specs),
        carry_split=_carry_split(program),
        collectives=tuple(
            (f"chain {n}: " if len(collectives) > 1 else "") + str(c) for n, own in enumerate(collectives) for c in own
        ),
        tensor_bytes=tuple((_sent(own, "forward"), _sent(own, "backward")) for own in collectives),
    )


def _carry_split(program: StepProgram) -> str:
    """How the carry is split over `tensor` between blocks, or why it is whole."""
    pipeline = program.pipeline
    dims = [next((d for d, axis in enumerate(spec) if axis), None) for spec in pipeline.carry_specs]
    if any(d is not None for d in dims):
        return "; ".join(
            f"{aval.str_short()} " + ("whole" if d is None else f"split along dimension {d}")
            for aval, d in zip(program.loss.found.carry_avals, dims)
        )
    why = next(
        (x.sequence_reason for x in program.shardings.tensor if x is not None and not any(_some(x.sequence))), ""
    )
    return f"whole on every device of a stage{why and f': {why}'}"


def _some(dimensions: tuple[int | None, ...]) -> list[bool]:
    return [d is not None for d in dimensions]


def _collectives(program: StepProgram) -> list[tuple[BlockCollective, ...]]:
    """Of a block of each chain of layers, what it communicates over `tensor`."""
    pipeline = program.pipeline
    if program.shardings.mesh.shape["tensor"] == 1:
        return []
    return [
        block_collectives(
            block.forward,
            block.pull_back if isinstance(block, BlockDerivative) else None,
            splits,
            [WHOLE if "tensor" not in spec else FREE for spec in pipeline.carry_specs],
            rings=pipeline.rings is not None,
            paired=pipeline.paired,
        )
        for chain, block, splits in zip(program.loss.found.chains, pipeline.blocks, pipeline.splits)
        if chain.length > 1
    ]


def _sent(collectives: tuple[BlockCollective, ...], direction: str) -> int:
    return sum(c.nbytes for c in collectives if c.direction == direction)


def _split_bytes(var: Var, splits: Splits) -> int:
    return _bytes(var.aval) // (splits.size if isinstance(splits.of(var), Split) else 1)


def _stored_bytes(layout: StateLayout, number: int) -> int:
    """Bytes of one stored array on one device."""
    leaf = layout.leaves_of(number)[0]
    lane, aval = layout.places[leaf].lane, layout.avals[leaf]
    lanes = layout.lanes[number]
    lead = () if lanes is None else (lanes.num_stages, lanes.depth)
    axes = [a for entry in layout.specs[number] if entry for a in (entry if isinstance(entry, tuple) else (entry,))]
    ways = math.prod(layout.mesh.shape[a] for a in axes)
    return math.prod((*lead, *aval.shape[lane == -1 :])) * getattr(aval.dtype, "itemsize", 8) // ways


def _parameter_lines(program: StepProgram) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How the differentiated leaves are stored: those split over `tensor`, and the others outside the blocks.

    Leaves whose paths differ in a number only, and that are stored alike, share a line.
    """
    traced = program.traced
    differentiated = set(a for a in traced.equation.invars[traced.num_loss_constants :] if isinstance(a, Var))
    splits: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for argument, layout in program.layouts.items():
        leaves = [v for v, n in zip(traced.jaxpr.jaxpr.invars, traced.leaf_argument) if n == argument]
        for var, path, place, aval in zip(leaves, layout.paths, layout.places, layout.avals):
            if var not in differentiated:
                continue
            spec = layout.specs[place.array]
            own = spec if place.lane is None else (*((None,) if place.lane == -1 else ()), *spec[2:])
            where = [f"dimension {d} over {entry}" for d, entry in enumerate(own) if entry]
            leaf = f"{path}{list(aval.shape)}"
            if "tensor" in own:
                splits.setdefault(re.sub(r"\d+", "#", leaf) + where[0], []).append(f"{leaf} {where[0]}")
            elif place.lane is None:
                line = f"{leaf} {where[0] if where else 'whole on every device'}"
                others.setdefault(re.sub(r"\d+", "#", line), []).append(line)
    return _one_line_each(splits), _one_line_each(others)


def _one_line_each(lines: dict[str, list[str]]) -> tuple[str, ...]:
    return tuple(same[0] + (f" (and {len(same) - 1} like it)" if len(same) > 1 else "") for same in lines.values())


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape)) * getattr(aval.dtype, "itemsize", 8)
