"""Describe a built step as a Plan: stages, bytes, splits, with the names of the user's leaves."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jax.extend.core import Var

from merak_jax.partition.chain import stashed_once
from merak_jax.planning.plan import Plan, StagePlan
from merak_jax.runtime.program import StepProgram
from merak_jax.runtime.state import StateLayout


def describe(program: StepProgram, schedule: tuple[str, str, int] | None, num_microbatches: int) -> Plan:
    """The plan of a step for the shapes it was traced with. `schedule`: its name, form and chunks; None for an evaluation."""
    traced, graph, mesh = program.traced, program.loss.found, program.pipeline.mesh
    chain = graph.chain
    carry = sum(_bytes(a) for a in graph.carry_avals) if graph.chains else 0
    tensor = mesh.shape["tensor"]
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
            _bytes(a) * (1 if same else depth) for a, same in zip(graph.carry_avals, constant)
        )
        for layout, derivative in zip(program.chain_layouts, program.pipeline.derivatives):
            # What R or F keeps for B, and Bi for W, of every block of a visit.
            kept = table.num_residual_slots * sum(_bytes(v.aval) for v in derivative.residual_vars)
            kept += table.num_saved_slots * sum(_bytes(v.aval) for v in derivative.saved_vars)
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
    splits, others = _parameter_lines(program)
    folded = table is not None and table.folded
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
        boundary_bytes=carry,
        state_bytes=state_bytes,
        tensor_splits=splits,
        other_leaves=others,
        form=form,
        num_chunks=num_chunks,
        folded=folded,
    )


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
