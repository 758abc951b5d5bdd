"""Ticks of an evaluation: every stage runs F of microbatch m in tick m + s, and nothing else."""

import numpy as np

from merak_jax.schedules.tick_table import NONE, TickTable


def forward_only(num_stages: int, num_microbatches: int) -> TickTable:
    """The tick table of a pipeline that only runs forward: M + P - 1 ticks, one slot, as a stage reads what arrived at once."""
    num_ticks = num_microbatches + num_stages - 1
    microbatch = np.arange(num_ticks)[:, None] - np.arange(num_stages)[None, :]
    forward = np.where((microbatch >= 0) & (microbatch < num_microbatches), microbatch, NONE)
    slots = np.where(forward == NONE, NONE, 0)
    arrives = np.concatenate([np.full((num_ticks, 1), NONE), slots[:, :-1]], axis=1)
    nothing = np.full_like(forward, NONE)
    return TickTable(
        name="forward",
        forward=forward,
        forward_slot=slots,
        backward=nothing,
        backward_slot=nothing,
        cotangent_slot=nothing,
        epilogue=forward[:, -1],
        epilogue_slot=np.full(num_ticks, NONE),
        receive_forward_slot=arrives,
        receive_backward_slot=nothing,
        num_microbatches=num_microbatches,
        num_stash_slots=1,
        num_cotangent_slots=0,
    )
