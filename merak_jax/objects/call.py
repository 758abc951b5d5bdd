"""The front end for nnx: `step(model, optimizer, batch)` in nnx's mutating style, as under `nnx.jit`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import graphlib

from merak_jax import _compat
from merak_jax.errors import PlanError, TraceError
from merak_jax.objects.graph import (
    PureStep,
    Returned,
    Split,
    holds_objects,
    is_object,
    path_string,
    split,
    state_order,
)
from merak_jax.objects.values import (
    Creation,
    Deferred,
    Leaf,
    LooseLeaf,
    PlannedLeaf,
    Stored,
    StoredLeaf,
    assemble,
    aval_of,
    remember,
    stored_layout,
)
from merak_jax.runtime.state import PackedState, StateLayout
from merak_jax.tracing.step import abstract


@dataclasses.dataclass(eq=False)
class _Program:
    """A step for one graph and one set of shapes, and how its state is stored."""

    pure: PureStep
    runner: Any
    layout: StateLayout | None  # None where the objects hold no values

    @functools.cached_property
    def members(self) -> list[list[int]]:
        """The leaves of each packed array, by their number in the state."""
        assert self.layout is not None
        places = self.layout.places
        return [
            sorted(self.layout.leaves_of(number), key=lambda i: places[i].lane or 0)
            for number in range(len(self.layout.specs))
        ]


class ObjectStep:
    """Runs a train step whose arguments are nnx objects. After a call, the objects' variables are deferred: a value is gathered
    when it is read, and goes back to the mesh unread where nobody changed it."""

    def __init__(self, function: Callable, batch_argnums: Sequence[int], make_runner: Callable):
        self.function, self.batch_argnums, self.make_runner = function, tuple(batch_argnums), make_runner
        self.programs: dict[Any, dict[Any, _Program]] = {}
        self._changes_in_a_row = 0

    def program(self, args: Sequence[Any], shapes_of: Callable, key_of: Callable) -> tuple[_Program, Split]:
        """The traced step for these arguments, and the arguments' split; TraceError, PlanError."""
        positions = [n for n, a in enumerate(args) if holds_objects(a)]
        names = _names(self.function, len(args), positions)
        parts = split(tuple(args[n] for n in positions), names)
        leaves = [leaf for slot in parts.slots for leaf in slot.leaves]
        shapes = [abstract(aval_of(leaf)) for leaf in leaves]
        key = (
            parts.graphdef,
            tuple(slot.tree for slot in parts.slots),
            tuple((s.shape, s.dtype) for s in shapes),
            tuple(None if n in positions else key_of(a) for n, a in enumerate(args)),
        )
        known = self.programs.setdefault(key, {})
        outcome = next(iter(known.values())).pure.outcome if known else None
        given = None
        if outcome is None or outcome.evaluates:
            # An evaluation takes its arguments as the train step has stored them; another way of storing is another program.
            order, tree, paths = state_order(parts)
            given = stored_layout(tree, paths, [shapes[i] for i in order], [leaves[i] for i in order])
        stored_as = _signature(given)
        if outcome is not None and not outcome.evaluates:
            return next(iter(known.values())), parts
        if stored_as not in known:
            batch = self._batch(args, positions)
            pure = PureStep(self.function, parts, positions, names)
            pure_shapes = [() if n in positions else shapes_of(a) for n, a in enumerate(args)]
            pure_shapes[positions[0]] = pure.state(shapes)
            _compat.allow_deferred_values(Deferred)
            with _compat.guarded_variables(_refusals(parts)):
                runner = self.make_runner(pure, pure_shapes, batch, {} if given is None else {positions[0]: given})
            program = _Program(pure, runner, runner.layouts.get(positions[0]))
            known[stored_as] = known[_signature(program.layout)] = program
        return known[stored_as], parts

    def __call__(self, args: Sequence[Any], program: _Program, parts: Split) -> Any:
        """Run the step, write the new values into the user's objects, return what the step returns."""
        pure, layout, outcome = program.pure, program.layout, program.pure.outcome
        assert outcome is not None
        leaves = [leaf for slot in parts.slots for leaf in slot.leaves]
        pure_args = [() if n in pure.positions else a for n, a in enumerate(args)]
        if layout is None:
            pure_args[pure.positions[0]] = pure.state([])
            _, extra, *returned = program.runner(pure_args)
            return self._write_back(pure, parts, [], {}, extra, returned)
        arrays = assemble(layout, program.members, [leaves[i] for i in pure.order])
        pure_args[pure.positions[0]] = PackedState(layout, arrays)
        state, extra, *returned = program.runner(pure_args)
        if not outcome.evaluates:
            arrays = state._arrays
        stored = [Stored(layout, n, array, len(own)) for n, (array, own) in enumerate(zip(arrays, program.members))]
        new: list[Any] = [None] * len(leaves)
        for p, i in enumerate(pure.order):
            new[i] = StoredLeaf(stored[layout.places[p].array], p)
            if (
                outcome.evaluates
                and isinstance(leaves[i], StoredLeaf)
                and leaves[i].stored.array is new[i].stored.array
            ):
                new[i] = leaves[i]
        changed = dict(zip(outcome.changed, state)) if outcome.evaluates else {}
        return self._write_back(pure, parts, new, changed, extra, returned)

    def lower(self, args: Sequence[Any], program: _Program) -> Any:
        """JAX's lowered step; values are not needed."""
        return program.runner.lower([() if n in program.pure.positions else a for n, a in enumerate(args)])

    def create(self, function: Callable, args: Sequence[Any]) -> Any:
        """What `function(*args)` returns, now, its variables deferred: they are made on the mesh at the first step."""
        _compat.allow_deferred_values(Deferred)
        positions = [n for n, a in enumerate(args) if holds_objects(a)]
        names = _names(function, len(args), positions)
        parts = split(tuple(args[n] for n in positions), names)
        pure = PureStep(function, parts, positions, names)
        leaves = [leaf for slot in parts.slots for leaf in slot.leaves]
        pure_args = [() if n in positions else a for n, a in enumerate(args)]
        if positions:
            pure_args[positions[0]] = pure.state([x.read() if isinstance(x, Leaf) else x for x in leaves])
        shapes = jax.eval_shape(pure, *pure_args)
        flat, tree = jax.tree.flatten(shapes)
        creation = Creation(lambda *args: jax.tree.leaves(pure(*args)), pure_args)
        planned = [PlannedLeaf(creation, n, jax.ShapeDtypeStruct(x.shape, x.dtype)) for n, x in enumerate(flat)]
        state, extra, *returned = jax.tree.unflatten(tree, planned)
        outcome = pure.outcome
        assert outcome is not None
        if outcome.evaluates:
            changed = dict(zip(outcome.changed, state))
            after = [jax.tree.leaves(changed[k]) if k in changed else slot.leaves for k, slot in enumerate(parts.slots)]
            new = [leaf for values in after for leaf in values]
        else:
            new = list(leaves)
            for leaf, i in zip(jax.tree.leaves(state), pure.order):
                new[i] = leaf
        # A value that stands in no variable is needed now.
        extra = [_deferred(value) for value in extra]
        now = [
            leaf
            for x in jax.tree.leaves(returned, is_leaf=_is_returned)
            for leaf in (
                [
                    leaf
                    for v, is_variable in zip(x.values, x.variables)
                    if not is_variable
                    for leaf in jax.tree.leaves(v)
                ]
                if _is_returned(x)
                else [x]
            )
        ]
        if now:
            numbers = [leaf.number for leaf in now]
            made = jax.jit(creation.some(numbers))(*pure_args)
            for leaf, array in zip(now, made):
                remember(array, leaf)
            arrays = dict(zip(numbers, made))
        else:
            arrays = {}

        def real(leaf):
            return arrays[leaf.number]

        def ready(x):
            if not _is_returned(x):
                return real(x)
            values = [_deferred(v) if var else jax.tree.map(real, v) for v, var in zip(x.values, x.variables)]
            return Returned(x.graphdef, x.variables, values)

        returned = [jax.tree.map(ready, part, is_leaf=_is_returned) for part in returned]
        return self._write_back(pure, parts, new, {}, extra, returned)

    def _write_back(
        self, pure: PureStep, parts: Split, new: list, changed: dict[int, Any], extra: list, returned: list
    ) -> Any:
        """Write into the user's objects: the leaves `new` of all slots, or whole values for the slots `changed`, and the values
        `extra`. Returns the rebuilt return value."""
        outcome = pure.outcome
        assert outcome is not None
        nodes = graphlib.IndexMap(parts.nodes)
        whole = {**changed, **{k: extra[n] for k, n in outcome.replaced.items()}}
        values: list[Any] = []
        feed = iter(new)
        for k, slot in enumerate(parts.slots):
            leaves = [next(feed) for _ in slot.leaves]
            if not slot.is_variable:
                values.append(slot.holder if outcome.same_graph else whole[k] if k in whole else leaves[0].read())
                if k not in whole:
                    remember(values[-1], leaves[0])
                continue
            values.append(_loose(whole[k]) if k in whole else Deferred(slot.tree, leaves))
            if k in whole or any(a is not b for a, b in zip(leaves, slot.leaves)):
                _compat.set_variable(slot.holder, values[-1])
        created = nodes
        if outcome.same_graph:
            self._changes_in_a_row = 0
        else:
            self._warn_of_change(parts.graphdef, outcome.graphdef)
            created = graphlib.IndexMap()
            sources = [values[n] if kind == "slot" else extra[n] for kind, n in outcome.sources]
            nnx.unflatten(outcome.graphdef, sources, index_ref=created, outer_index_outer_ref=nodes)

        def rebuilt(x):
            if not _is_returned(x):
                return x
            return nnx.unflatten(x.graphdef, x.values, index_ref=created, outer_index_outer_ref=nodes)

        def stop(x):
            return isinstance(x, (Returned, PackedState))

        result = tuple(jax.tree.map(rebuilt, part, is_leaf=stop) for part in returned)
        return result if outcome.returns_tuple else result[0]

    def _warn_of_change(self, before: Any, after: Any) -> None:
        """A step that changes static attributes in every call is traced and compiled in every call."""
        self._changes_in_a_row += 1
        changed = [key for (key, a), (_, b) in zip(before.attributes, after.attributes) if a != b]
        if self._changes_in_a_row == 2:
            where = f"the static attributes {sorted(set(map(str, changed)))}" if changed else "the structure"
            warnings.warn(
                f"the train step changes {where} of its nnx arguments in every call, so it is traced and compiled "
                "anew each time, as under nnx.jit; keep what changes in an nnx.Variable",
                stacklevel=5,
            )

    def _batch(self, args: Sequence[Any], positions: Sequence[int]) -> tuple[int, ...]:
        """Which arguments are batches: those the user named, or the only argument with array dimensions that is no object."""
        wrong = [n for n in self.batch_argnums if n in positions]
        if not wrong:
            return self.batch_argnums
        names = _names(self.function, len(args), range(len(args)))
        candidates = [n for n, a in enumerate(args) if n not in positions and _has_dimensions(a)]
        if self.batch_argnums == (1,) and len(candidates) == 1:
            return tuple(candidates)
        could = ", ".join(f"{n} ({names[n]})" for n in candidates) or "none: all are nnx objects or scalars"
        raise PlanError(
            f"batch_argnums={self.batch_argnums}, but argument {wrong[0]} ({names[wrong[0]]}) is an nnx object; say which "
            f"arguments are the batch, with batch_argnums=; candidates: {could}"
        )


def _signature(layout: StateLayout | None) -> Any:
    """How values are stored, hashable."""
    return None if layout is None else (layout.places, layout.specs, layout.lanes, layout.mesh)


def _names(function: Callable, count: int, positions: Sequence[int]) -> list[str]:
    """The names of some of the positional arguments."""
    try:
        parameters = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    return [parameters[n] if n < len(parameters) else f"argument_{n}" for n in range(count) if n in positions]


def _has_dimensions(tree: Any) -> bool:
    return any(
        getattr(x, "ndim", 0) > 0 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        for x in jax.tree.leaves(tree)
    )


def _is_returned(x: Any) -> bool:
    return isinstance(x, Returned)


def _loose(value: Any) -> Any:
    """A whole value that the step returned, for a variable: gathered when read."""
    leaves, tree = jax.tree.flatten(value)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return value
    return Deferred(tree, [LooseLeaf(leaf) for leaf in leaves])


def _deferred(value: Any) -> Deferred:
    leaves, tree = jax.tree.flatten(value)
    return Deferred(tree, leaves)


def _refusals(parts: Split) -> dict[int, Callable[[], None]]:
    """While a step is traced, the objects that were passed must not be read, only the step's own arguments."""

    def refuse(path):
        def fail():
            raise TraceError(
                f"the train step reads {path_string(path)} of the object outside instead of its argument: the value would be a "
                f"constant of the compiled step, without a gradient; use the argument {path[0]} in the step and in its loss"
            )

        return fail

    return {id(slot.holder): refuse(slot.path) for slot in parts.slots if slot.is_variable}


def read_all(objects: Any) -> Any:
    """The objects themselves, every value gathered."""
    for x in jax.tree.leaves(objects, is_leaf=is_object):
        if is_object(x):
            for leaf in nnx.flatten(x, graph=True)[1].leaves:
                if isinstance(leaf, nnx.Variable):
                    leaf.get_raw_value()
    return objects
