"""The front end for nnx: `step(model, optimizer, batch)` in nnx's mutating style, as under `nnx.jit`."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import graphlib

from merak_jax import _compat
from merak_jax.errors import PlanError, StateError, TraceError
from merak_jax.objects.graph import PureStep, Returned, Split, holds_objects, is_object, path_string, split
from merak_jax.objects.values import (
    Creation,
    Deferred,
    PlannedLeaf,
    Stored,
    StoredLeaf,
    assemble,
    aval_of,
    leaf_of,
    remember,
)
from merak_jax.runtime.state import PackedState, StateLayout
from merak_jax.tracing.step import abstract


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A step for one graph and one set of shapes. `members`: the leaves of each packed array, in the order of the state."""

    pure: PureStep
    runner: Any
    members: tuple[tuple[int, ...], ...]

    @property
    def position(self) -> int:
        return self.pure.positions[0]

    @property
    def layout(self) -> StateLayout:
        return self.runner.layouts[self.position]


class ObjectStep:
    """Runs a train step whose arguments are nnx objects. After a call, the objects' variables are deferred: a value is gathered
    when it is read, and goes back to the mesh unread where nobody changed it."""

    def __init__(self, function: Callable, batch_argnums: Sequence[int], make_runner: Callable):
        self.function, self.batch_argnums, self.make_runner = function, tuple(batch_argnums), make_runner
        self.programs: dict[Any, _Program] = {}
        self.changes_in_a_row = 0

    def program(self, args: Sequence[Any], shapes_of: Callable, key_of: Callable) -> tuple[_Program, Split]:
        """The traced step for these arguments, and the arguments' split; TraceError, PlanError."""
        positions = [n for n, a in enumerate(args) if holds_objects(a)]
        names = self._names(len(args), positions)
        parts = split(tuple(args[n] for n in positions), names)
        leaves = [leaf for slot in parts.slots for leaf in slot.leaves]
        shapes = [abstract(aval_of(leaf)) for leaf in leaves]
        key = (
            parts.graphdef,
            tuple(slot.tree for slot in parts.slots),
            tuple((s.shape, s.dtype) for s in shapes),
            tuple(None if n in positions else key_of(a) for n, a in enumerate(args)),
        )
        if key in self.programs:
            return self.programs[key], parts
        batch = self._batch(args, positions)
        pure = PureStep(self.function, parts, positions, names)
        pure_shapes = [() if n in positions else shapes_of(a) for n, a in enumerate(args)]
        pure_shapes[positions[0]] = pure.state(shapes)
        with _compat.guarded_variables(_refusals(parts), Deferred):
            runner = self.make_runner(pure, pure_shapes, batch)
        members = []
        if positions[0] in runner.layouts:
            layout = runner.layouts[positions[0]]
            for number in range(len(layout.specs)):
                own = sorted(layout.leaves_of(number), key=lambda i: layout.places[i].lane or 0)
                members.append(tuple(own))
        self.programs[key] = _Program(pure, runner, tuple(members))
        return self.programs[key], parts

    def __call__(self, args: Sequence[Any], program: _Program, parts: Split) -> Any:
        """Run the step, write the new values into the user's objects, return what the step returns."""
        pure, layout = program.pure, program.layout
        leaves = [leaf for slot in parts.slots for leaf in slot.leaves]
        arrays = assemble(layout, program.members, [leaves[i] for i in pure.order])
        pure_args = [() if n in pure.positions else a for n, a in enumerate(args)]
        pure_args[program.position] = PackedState(layout, arrays)
        state, extra, *returned = program.runner(pure_args)
        stored = [
            Stored(layout, number, array, len(own))
            for number, (array, own) in enumerate(zip(state._arrays, program.members))
        ]
        new: list[Any] = [None] * len(leaves)
        for p, i in enumerate(pure.order):
            new[i] = StoredLeaf(stored[layout.places[p].array], p)
        return self._write_back(pure, parts, new, extra, returned)

    def _write_back(self, pure: PureStep, parts: Split, new: list, extra: list, returned: list) -> Any:
        outcome = pure.outcome
        assert outcome is not None
        nodes = graphlib.IndexMap(parts.nodes)
        start = 0
        values: list[Any] = []
        for k, slot in enumerate(parts.slots):
            leaves = new[start : start + slot.tree.num_leaves]
            start += slot.tree.num_leaves
            if k in outcome.replaced:
                values.append(extra[outcome.replaced[k]])
                if slot.variable is not None:
                    _compat.set_variable(slot.variable, values[-1])
            elif slot.variable is not None:
                values.append(Deferred(slot.tree, leaves))
                _compat.defer_variable(slot.variable, values[-1])
            elif outcome.same_graph:
                for leaf, array in zip(leaves, slot.leaves):
                    self._remember(array, leaf)
            else:
                values.append(leaves[0].read())
                remember(values[-1], leaves[0])
        created = graphlib.IndexMap() if not outcome.same_graph else nodes
        outer = nodes
        if not outcome.same_graph:
            self._note_change(parts.graphdef, outcome.graphdef)
            sources = [values[n] if kind == "slot" else extra[n] for kind, n in outcome.sources]
            nnx.unflatten(outcome.graphdef, sources, index_ref=created, outer_index_outer_ref=outer)
        else:
            self.changes_in_a_row = 0

        def rebuilt(x):
            if not isinstance(x, Returned):
                return x
            return nnx.unflatten(x.graphdef, x.leaves, index_ref=created, outer_index_outer_ref=outer)

        parts_out = jax.tree.map(rebuilt, tuple(returned), is_leaf=lambda x: isinstance(x, (Returned, PackedState)))
        return parts_out if outcome.returns_tuple else parts_out[0]
