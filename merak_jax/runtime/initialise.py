"""Make a state on the mesh: the user's initialiser, re-rolled, so that no device makes a whole stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from merak_jax.errors import StateError
from merak_jax.runtime.reroll import Rerolled
from merak_jax.runtime.state import PackedState, StateLayout, leaf_paths
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import constants_to_inputs


def initialise(function: Callable, args: Sequence[Any], layout: StateLayout) -> PackedState:
    """`function(*args)` stored as `layout` says; the values are those of `jax.jit(function)(*args)`.

    Raises StateError when the function makes another structure than the step was planned for.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    # Called again, an initialiser makes its optimizer again: static fields are new objects, leaves and paths are the same.
    if leaf_paths(shapes) != layout.paths:
        raise StateError("the initialiser makes another structure than the state that the step was planned for")
    jaxpr, constants = constants_to_inputs(inline(closed))
    program = Rerolled(jaxpr, {}, {})

    def make(*inputs):
        values = program.start([], [], dict(zip(jaxpr.invars, inputs)))
        arrays = []
        for number in range(len(layout.specs)):
            members = sorted(layout.leaves_of(number), key=lambda i: layout.places[i].lane or 0)
            atoms = [jaxpr.outvars[i] for i in members]
            lane = layout.places[members[0]].lane
            if lane is None:
                value = values.whole(atoms[0])
            elif lane == -1:
                value = values.packed_stack(atoms[0], layout.lane_layout(number))
            else:
                value = values.packed(atoms, layout.lane_layout(number))
            arrays.append(
                jax.numpy.asarray(value, layout.avals[members[0]].dtype) if not hasattr(value, "dtype") else value
            )
        return arrays

    replicated = NamedSharding(layout.mesh, PartitionSpec())
    inputs = [jax.device_put(x, replicated) for x in [*constants, *jax.tree.leaves(tuple(args))]]
    return PackedState(layout, jax.jit(make, out_shardings=layout.shardings)(*inputs))
