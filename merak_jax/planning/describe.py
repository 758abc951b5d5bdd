"""Describe a built step as a Plan: stages, bytes, splits, with the names of the user's leaves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from merak_jax.planning.plan import Plan, StagePlan
from merak_jax.runtime.program import StepProgram


def describe(program: StepProgram, schedule: str, num_microbatches: int) -> Plan:
    """The plan of a step for the shapes it was traced with."""
    traced, graph, mesh, lanes = program.traced, program.loss.found, program.pipeline.mesh, program.lanes
    chain = graph.chain
    carry = sum(_bytes(a) for a in chain.carry_avals) if chain is not None else 0
    if program.table is not None:
        in_flight = [int(n) for n in program.table.in_flight()]
        slots = program.table.num_stash_slots
    else:
        in_flight, slots = [1] * lanes.num_stages, 0
    block = sum(_bytes(v.aval) for v in chain.lane_prepare.outvars) if chain is not None else 0
    counts = lanes.counts if program.table is not None else (chain.length if chain is not None else 0,)
    stages = tuple(StagePlan(n, n * block, held, slots * lanes.depth * carry) for n, held in zip(counts, in_flight))
    state_bytes = 0
    splits, others = [], []
    for layout in program.layouts.values():
        for number, spec in enumerate(layout.specs):
            members = layout.leaves_of(number)
            lane = layout.places[members[0]].lane
            aval = layout.avals[members[0]]
            shape = (
                aval.shape
                if lane is None
                else (lanes.num_stages, lanes.depth, *(aval.shape if lane >= 0 else aval.shape[1:]))
            )
            ways = math.prod(
                mesh.shape[a]
                for entry in spec
                if entry is not None
                for a in (entry if isinstance(entry, tuple) else (entry,))
            )
            state_bytes += math.prod(shape) * getattr(aval.dtype, "itemsize", 8) // ways
            path = layout.paths[members[0]]
            if lane is not None and "tensor" in spec and ".opt_state" not in path:
                splits.append(
                    f"{path}{list(aval.shape)} dimension {list(spec).index('tensor') - 2 + (lane < 0)}"
                    + (f" (and {len(members) - 1} more blocks)" if len(members) > 1 else "")
                )
            if lane is None and aval.shape and ".opt_state" not in path and "tensor" in spec:
                splits.append(f"{path}{list(aval.shape)} dimension {list(spec).index('tensor')}")
            elif lane is None and aval.shape and ".opt_state" not in path:
                entry: Any = [f"{d}: {e}" for d, e in enumerate(spec) if e is not None]
                others.append(
                    f"{path}{list(aval.shape)} " + (f"split {entry[0]}" if entry else "whole on every device")
                )
    return Plan(
        data=mesh.shape["data"],
        pipe=mesh.shape["pipe"],
        tensor=mesh.shape["tensor"],
        num_microbatches=num_microbatches,
        rows=traced.rows,
        schedule=schedule,
        chain=str(graph),
        block_source=chain.source if chain is not None else "",
        stages=stages,
        boundary_bytes=carry,
        state_bytes=state_bytes,
        tensor_splits=tuple(splits),
        other_leaves=tuple(others),
    )


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape)) * getattr(aval.dtype, "itemsize", 8)
