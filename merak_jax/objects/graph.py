"""Split nnx arguments into values and graph, jointly, and make a mutating step a pure one over the values."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.errors
import jax
from flax import nnx
from flax.nnx import graphlib

from merak_jax import _compat
from merak_jax.errors import TraceError
from merak_jax.objects.values import Deferred, leaf_of
from merak_jax.runtime.state import DeferredState, PackedState


def is_object(x: Any) -> bool:
    """Whether `x` is an nnx object: a module, optimizer, metric, rngs, or a variable."""
    return isinstance(x, (nnx.Pytree, nnx.Variable)) or graphlib.is_graph_node(x)


def holds_objects(tree: Any) -> bool:
    """Whether an argument holds nnx objects. An `nnx.State` is a tree of values: it holds none."""
    if isinstance(tree, (PackedState, DeferredState)):
        return False

    def stop(x):
        return isinstance(x, nnx.State) or is_object(x)

    return any(is_object(x) for x in jax.tree.leaves(tree, is_leaf=stop))


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds values in the user's objects: a variable (number `index` of the graph), or an array held directly.

    `tree`, `leaves`: its raw value, where deferred leaves and arrays known to be one stand as they are. `holder`: the variable
    or the array.
    """

    path: tuple[Any, ...]
    holder: Any
    index: int | None
    tree: Any
    leaves: tuple[Any, ...]

    @property
    def is_variable(self) -> bool:
        return self.index is not None


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """nnx objects split jointly: what two of them share is one slot. `nodes`: graph index -> object."""

    graphdef: Any
    slots: tuple[Slot, ...]
    nodes: dict[int, Any]


def split(objects: tuple[Any, ...], names: Sequence[str]) -> Split:
    """Split `objects`, reading no deferred value; paths begin with `names`. TraceError for kinds of variables that cannot be."""
    index = graphlib.RefMap()
    with _compat.unread_variables():
        graphdef, flat = nnx.flatten(objects, ref_index=index, graph=True)
        slots = []
        for path, leaf in zip(flat.paths, flat.leaves):
            path = (names[path[0]], *path[1:])
            variable = leaf if isinstance(leaf, nnx.Variable) else None
            if variable is not None:
                _check_kind(variable, path)
            raw = leaf_of(leaf) if variable is None else variable.get_raw_value()
            if isinstance(raw, Deferred):
                tree, leaves = raw.tree, raw.leaves
            else:
                values, tree = jax.tree.flatten(raw)
                leaves = tuple(values)
            slots.append(Slot(path, leaf, None if variable is None else index[variable], tree, leaves))
    return Split(graphdef, tuple(slots), {i: node for node, i in index.items()})


def state_order(parts: Split) -> tuple[list[int], Any, list[str]]:
    """For each leaf of the state its number among the leaves of all slots; the state's structure; its leaves' paths."""
    count, numbered = 0, {}
    for slot in parts.slots:
        numbered[slot.path] = jax.tree.unflatten(slot.tree, range(count, count + slot.tree.num_leaves))
        count += slot.tree.num_leaves
    leaves, tree = jax.tree_util.tree_flatten_with_path(nnx.from_flat_state(numbered))
    return [number for _, number in leaves], tree, [jax.tree_util.keystr(keys) for keys, _ in leaves]


def _check_kind(variable: Any, path: tuple[Any, ...]) -> None:
    if not issubclass(type(variable), nnx.Variable) or variable.ref:
        kind = "hijax" if not issubclass(type(variable), nnx.Variable) else "ref"
        raise TraceError(
            f"the variable {path_string(path)} is made with {kind}=True, which merak_jax does not support; make it with "
            f"{kind}=False (nnx.var_defaults(hijax=False, ref=False))"
        )


def path_string(path: Sequence[Any]) -> str:
    """`model.layers[0].kernel`."""
    return str(path[0]) + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path[1:])


class Returned:
    """An nnx object in what a function returns: its graph, which may refer to the arguments, and the values that these don't have.

    `variables`: which of the values stand in variables.
    """

    def __init__(self, graphdef: Any, variables: tuple[bool, ...], values: list):
        self.graphdef, self.variables, self.values = graphdef, variables, values


jax.tree_util.register_pytree_node(
    Returned,
    lambda x: ((x.values,), (x.graphdef, x.variables)),
    lambda static, children: Returned(static[0], static[1], children[0]),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step did to the graph of its arguments, known after tracing.

    `graphdef`: the graph after the step; nodes that were there before have their old number as outer index.
    `sources`: for each value of that graph, ("slot", n) or ("extra", n). `replaced`: slots whose value has another shape or
    type after the step, and the number of the extra value. `same_graph`: writing the slots is all that is to do. `evaluates`:
    the step takes no gradient; then `changed` are the slots with new values, and only these are returned.
    """

    graphdef: Any
    sources: tuple[tuple[str, int], ...]
    replaced: dict[int, int]
    same_graph: bool
    returns_tuple: bool
    evaluates: bool
    changed: tuple[int, ...]


class PureStep:
    """`step(state, *others) -> (new_state, extra, *returned)` from a step that mutates its nnx arguments.

    `state` is an `nnx.State` of the values of all nnx arguments, argument number `positions[0]`; the other nnx arguments are
    empty. `extra` are values that the step added to the objects. `outcome` is set by the first trace. Without nnx arguments
    there is no `state` among the arguments. A step that takes no gradient and changes little (an evaluation) returns a list of
    the values that it changed for `new_state`, so that the others stay where they are.
    """

    def __init__(self, function: Callable, split: Split, positions: Sequence[int], names: Sequence[str]):
        self.function, self.positions, self.names = function, tuple(positions), tuple(names)
        self.__wrapped__ = function  # messages name the user's step
        # The objects themselves are not kept: the pure step outlives them.
        self.graphdef = split.graphdef
        self.paths = tuple(slot.path for slot in split.slots)
        self.trees = tuple(slot.tree for slot in split.slots)
        self.indices = tuple(slot.index for slot in split.slots)
        self.outcome: Outcome | None = None
        # Leaf p of the state is leaf `order[p]` of the slots.
        self.order, self.state_tree, _ = state_order(split)

    def _state(self, values: Sequence[Any]) -> nnx.State:
        return nnx.from_flat_state(dict(zip(self.paths, values)))

    def state(self, leaves: Sequence[Any]) -> Any:
        """The state from the leaves of all slots."""
        return jax.tree.unflatten(self.state_tree, [leaves[i] for i in self.order])

    def __call__(self, *args: Any) -> Any:
        leaves: list[Any] = [None] * len(self.order)
        state = args[self.positions[0]] if self.positions else ()
        for value, i in zip(jax.tree.leaves(state), self.order):
            leaves[i] = value
        values, start = [], 0
        for tree in self.trees:
            values.append(jax.tree.unflatten(tree, leaves[start : start + tree.num_leaves]))
            start += tree.num_leaves
        nodes = graphlib.IndexMap()
        # Containers in a value are the step's own, so that it may change them: `values` keeps the old leaves.
        objects = nnx.unflatten(self.graphdef, [jax.tree.map(lambda x: x, v) for v in values], index_ref=nodes)
        args = tuple(objects[self.positions.index(n)] if n in self.positions else a for n, a in enumerate(args))
        gradients: list[Any] = []

        def noted(original, fun, *primals, has_aux):
            gradients.append(fun)
            return original(fun, *primals, has_aux=has_aux)

        try:
            with _compat.replaced_vjp(noted):
                returned = self.function(*args)
        except flax.errors.TraceContextError as error:
            reason = str(error).split(" (http")[0]
            raise TraceError(
                f"{_last_user_line(error)} changes an nnx object that was not passed in but captured ({reason}); pass the module, "
                "optimizer, metric or rngs that it belongs to as an argument of the train step, and of the loss where the loss "
                "changes it: nnx.value_and_grad(loss)(model, rngs)"
            ) from error
        return self._result(objects, nodes, values, returned, bool(gradients))

    def _result(self, objects: Any, nodes: Any, before: list, returned: Any, took_gradient: bool) -> tuple:
        outer = graphlib.RefMap()
        for index, node in nodes.items():
            outer[node] = index
        seen = graphlib.RefMap()
        graphdef, flat = nnx.flatten(objects, ref_index=seen, ref_outer_index=outer, graph=True)
        slot_of_variable = {index: k for k, index in enumerate(self.indices) if index is not None}
        slot_of_array = {path: k for k, path in enumerate(self.paths) if self.indices[k] is None}
        after = list(before)
        extra: list[Any] = []
        replaced: dict[int, int] = {}
        sources = []

        def put(k: int, value: Any) -> None:
            if _same_types(value, before[k]):
                after[k] = value
            elif k not in replaced:
                replaced[k] = len(extra)
                extra.append(value)

        for index, k in slot_of_variable.items():
            put(k, nodes[index].get_raw_value())
        for path, leaf in zip(flat.paths, flat.leaves):
            is_variable = isinstance(leaf, nnx.Variable)
            path = (self.names[path[0]], *path[1:])
            known = slot_of_variable.get(outer.get(leaf, -1)) if is_variable else slot_of_array.get(path)
            if known is None:
                sources.append(("extra", len(extra)))
                extra.append(leaf.get_raw_value() if is_variable else leaf)
                continue
            if not is_variable:
                put(known, leaf)
            sources.append(("slot", known))
        arrays_changed = any(
            after[k] is not before[k] or k in replaced for k, index in enumerate(self.indices) if index is None
        )
        changed = tuple(k for k in range(len(after)) if not _same_leaves(after[k], before[k]))
        # A step that changes most of its state and takes no gradient is told so by the tracing.
        evaluates = not took_gradient and 2 * _size(after[k] for k in changed) <= _size(before)
        if self.outcome is None:
            self.outcome = Outcome(
                graphdef=graphdef,
                sources=tuple(sources),
                replaced=replaced,
                same_graph=graphdef == self.graphdef.with_same_outer_index() and not arrays_changed,
                returns_tuple=type(returned) is tuple,
                evaluates=evaluates,
                changed=changed,
            )

        def stop(x):
            return isinstance(x, nnx.State) or is_object(x)

        def pure(x):
            if not is_object(x):
                return x
            graphdef, flat = nnx.flatten(x, ref_index=seen, ref_outer_index=outer, graph=True)
            variables = tuple(isinstance(leaf, nnx.Variable) for leaf in flat.leaves)
            values = [v.get_raw_value() if is_variable else v for v, is_variable in zip(flat.leaves, variables)]
            return Returned(graphdef, variables, values)

        parts = returned if type(returned) is tuple else (returned,)
        parts = tuple(jax.tree.map(pure, part, is_leaf=stop) for part in parts)
        return ([after[k] for k in changed] if evaluates else self._state(after), extra, *parts)


def _same_leaves(after: Any, before: Any) -> bool:
    return all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before)))


def _size(values: Iterable[Any]) -> int:
    """How many floating point numbers."""
    leaves = [x for value in values for x in jax.tree.leaves(value) if hasattr(x, "dtype")]
    return sum(x.size for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact))


def _same_types(value: Any, before: Any) -> bool:
    if jax.tree.structure(value) != jax.tree.structure(before):
        return False

    def kind(x):
        x = jax.numpy.asarray(x) if not hasattr(x, "dtype") else x
        return x.shape, x.dtype

    return all(kind(a) == kind(b) for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(before)))


def _last_user_line(error: BaseException) -> str:
    """The innermost line of the user's code that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "merak_jax/objects" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else "the train step"
