"""What hides the communication of tensor parallelism, as the user asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from merak_jax.errors import PlanError
from merak_jax.runtime.overlap import Rings
from merak_jax.runtime.partition_rules import NO_RULES, PartitionRules

OVERLAPS = ("auto", "none", "collective", "paired")


@dataclasses.dataclass(frozen=True)
class TensorOptions:
    """What the user asks of tensor parallelism.

    `overlap`: one of OVERLAPS but "auto"; `sequence`: whether carries are split along their tokens, where they can be; `rings`: how
    collective matmuls run; `rules`: which splits of parameters the user wants.
    """

    overlap: str
    sequence: bool
    rings: Rings | None
    rules: PartitionRules = NO_RULES


def choose_tensor(
    overlap: str, sequence_parallel: bool | str, ring_directions: Sequence[int], form: str, mesh: Mesh
) -> TensorOptions:
    """Check the options and choose what is left open; `form`: of the ticks, as it is asked for. Raises PlanError."""
    directions = tuple(ring_directions) if isinstance(ring_directions, Sequence) else ()
    if not directions or any(d not in (1, -1) or isinstance(d, bool) for d in directions):
        raise PlanError(
            f"ring_directions={ring_directions!r} must be a sequence of 1 and -1, one for each chunk of a device's part"
        )
    if overlap not in OVERLAPS:
        raise PlanError(f"overlap={overlap!r} is unknown; known: {', '.join(map(repr, OVERLAPS))}")
    if sequence_parallel not in ("auto", True, False):
        raise PlanError(f"sequence_parallel={sequence_parallel!r} must be True, False or 'auto'")
    if overlap == "paired" and form not in ("auto", "paired"):
        raise PlanError(f"overlap='paired' runs F and B of a tick in one loop: its ticks are paired, not form={form!r}")
    platform, size = mesh.devices.flat[0].platform, mesh.shape["tensor"]
    # F and B in one loop hide all-reduces, which have a matmul in front; gathers and scatters follow each other too closely.
    sequence = size > 1 and (overlap != "paired" if sequence_parallel == "auto" else bool(sequence_parallel))
    if overlap == "auto":
        overlap = "collective" if sequence and platform != "cpu" else "none"
    rings = Rings(size, directions, platform != "cpu") if overlap == "collective" and size > 1 else None
    return TensorOptions(overlap, sequence, rings)
