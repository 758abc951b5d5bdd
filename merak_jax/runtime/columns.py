"""What ticks read of a tick table."""

from __future__ import annotations

import numpy as np

from merak_jax.schedules.tick_table import NONE, TickTable


def columns_of(table: TickTable) -> dict[str, np.ndarray]:
    """What a tick reads of the table, `[ticks, P]` or `[ticks]`."""
    columns = {name: values for name, values in table.arrays().items() if not name.startswith("receive_")}
    # What all devices need to know of the first visit of the path, so that nobody asks its stage for it.
    for name, source in (("prologue", "forward"), ("prologue_backward", "backward")):
        first = getattr(table, f"{source}_chunk")[:, 0] == 0
        columns[name] = np.where(first, getattr(table, source)[:, 0], NONE)
    # What arrives at the end of a tick is stored at the start of the next one.
    nothing = np.full((1, table.num_stages), NONE, np.int32)
    for name, source in (("store_arrived", "receive_forward"), ("store_returned", "receive_backward")):
        for way in ("", "_back"):
            slots = getattr(table, f"{source}{way}_slot")
            columns[f"{name}{way}"] = np.concatenate([nothing, slots[:-1]])
    return columns
