"""Packed state: the user's tree stored as `[P, N, ...]` arrays over `pipe`, and read back as the user's tree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from merak_jax.errors import StateError
from merak_jax.partition.lanes import LaneLayout


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf of the user's tree is stored: array number and lane; None: whole, -1: all lanes `[L, ...]`."""

    array: int
    lane: int | None = None


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """How one argument of the train step is stored: a place per leaf, a sharding and a lane layout per stored array.

    `lanes`: None for an array that holds one leaf, whole.
    """

    tree: Any
    paths: tuple[str, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    places: tuple[Place, ...]
    specs: tuple[PartitionSpec, ...]
    lanes: tuple[LaneLayout | None, ...]
    mesh: Mesh

    def __hash__(self) -> int:
        return hash((self.tree, self.places, self.specs, self.lanes, self.mesh))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateLayout) and (
            (self.tree, self.places, self.specs, self.lanes, self.mesh, self.avals)
            == (other.tree, other.places, other.specs, other.lanes, other.mesh, other.avals)
        )

    @functools.cached_property
    def key(self) -> Any:
        """The structure, shapes and types of the user's tree, hashable."""
        return shapes_key(jax.tree.unflatten(self.tree, self.avals))

    @functools.cached_property
    def shardings(self) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, spec) for spec in self.specs]

    def leaves_of(self, array: int) -> list[int]:
        """The leaves stored in one array, in lane order."""
        return [i for i, place in enumerate(self.places) if place.array == array]

    def lane_layout(self, array: int) -> LaneLayout:
        """The layout of an array that holds lanes."""
        layout = self.lanes[array]
        assert layout is not None
        return layout

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """The stored arrays made from whole leaves (traced or not)."""
        arrays = []
        for number in range(len(self.specs)):
            members = self.leaves_of(number)
            lane = self.places[members[0]].lane
            if lane is None:
                arrays.append(leaves[members[0]])
            elif lane == -1:
                arrays.append(self.lane_layout(number).pack_stack(leaves[members[0]]))
            else:
                members.sort(key=lambda i: self.places[i].lane or 0)
                arrays.append(self.lane_layout(number).pack([leaves[i] for i in members]))
        return arrays

    def unpack_leaf(self, arrays: Sequence[Any], leaf: int) -> Any:
        """One leaf of the user's tree."""
        place = self.places[leaf]
        if place.lane is None:
            return arrays[place.array]
        if place.lane == -1:
            return self.lane_layout(place.array).unpack_stack(arrays[place.array])
        return self.lane_layout(place.array).unpack(arrays[place.array], place.lane)

    def shard(self, tree: Any) -> PackedState:
        """Place the user's tree on the mesh; every array is a fresh buffer, so that donating it cannot touch the user's."""
        structure = jax.tree.structure(tree)
        if structure != self.tree and leaf_paths(tree) == self.paths:
            raise StateError(
                "the state has the leaves that the step was planned for, but other static fields (an optimizer or apply_fn "
                "made anew); make them once, outside the function that creates the state, or pass the state to the step as it is"
            )
        if structure != self.tree:
            raise StateError(
                f"the state has another structure than the one the step was planned for:\n  {structure}\n"
                f"planned:\n  {self.tree}"
            )
        leaves = jax.tree.leaves(tree)
        for path, aval, leaf in zip(self.paths, self.avals, leaves):
            if np.shape(leaf) != aval.shape:
                raise StateError(f"state leaf {path} has shape {np.shape(leaf)}, planned for {aval.shape}")
        leaves = [
            jnp.asarray(x, dtype=a.dtype) if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) else x
            for x, a in zip(leaves, self.avals)
        ]
        arrays: list[Any] = [None] * len(self.specs)
        shardings = self.shardings
        for number, sharding in enumerate(shardings):
            members = self.leaves_of(number)
            if self.places[members[0]].lane is None:
                arrays[number] = jax.device_put(leaves[members[0]], sharding)
            else:
                members.sort(key=lambda i: self.places[i].lane or 0)
                host = [_on_host(leaves[i]) for i in members]
                lanes, lane = self.lane_layout(number), self.places[members[0]].lane
                packed = lanes.pack_stack(host[0]) if lane == -1 else lanes.pack(host)
                arrays[number] = jax.device_put(packed, sharding)
        # device_put may share memory with the user's arrays, and two leaves may be one array.
        return PackedState(self, _copy(arrays, tuple(shardings)))

    def unshard(self, arrays: Sequence[Any]) -> Any:
        """The user's own tree, every leaf whole."""
        # One transfer for each stored array; a leaf is a copy, as the next step may be given the array's memory.
        host = [_on_host(a) if lanes is not None else a for a, lanes in zip(arrays, self.lanes)]
        leaves = [self.unpack_leaf(host, i) for i in range(len(self.places))]
        return jax.tree.unflatten(
            self.tree, [jnp.array(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves]
        )


def _copy(arrays: list[Any], shardings: tuple[NamedSharding, ...]) -> list[Any]:
    return jax.jit(lambda xs: [jnp.copy(x) for x in xs], out_shardings=list(shardings))(arrays)


def _on_host(x: Any) -> Any:
    """An array as a NumPy array, where one can be had: slicing and stacking many leaves is far quicker there."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or not x.is_fully_addressable:
        return x
    return np.asarray(x)


def leaf_paths(tree: Any) -> tuple[str, ...]:
    """The path of each leaf."""
    return tuple(jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0])


def shapes_key(tree: Any) -> Any:
    """Structure, shapes and types of a tree of abstract values, hashable."""
    return jax.tree.structure(tree), tuple((x.shape, x.dtype) for x in jax.tree.leaves(tree))


_READ_ONLY = "the sharded state is read-only; use step.unshard(state), change {!r}, and step.shard it"


class _Unread:
    """Stands for a leaf while an attribute of the user's tree is looked up."""

    def __init__(self, leaf: int):
        self.leaf = leaf


@jax.tree_util.register_pytree_with_keys_class
class PackedState:
    """The state between steps: reads like the user's tree (`state.step`, `state.params[...]`), stored packed and sharded."""

    def __init__(self, layout: StateLayout, arrays: Sequence[Any]):
        object.__setattr__(self, "_layout", layout)
        object.__setattr__(self, "_arrays", list(arrays))

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.SequenceKey(i), a) for i, a in enumerate(self._arrays)], self._layout

    @classmethod
    def tree_unflatten(cls, layout, arrays):
        return cls(layout, arrays)

    def _alive(self) -> list[Any]:
        """The stored arrays; StateError if an earlier step was given their memory."""
        if any(
            isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) and a.is_deleted() for a in self._arrays
        ):
            raise StateError(
                "this state was donated to an earlier call and is gone; use the state which that call returned, or keep "
                "states alive with parallelize(..., donate=False)"
            )
        return self._arrays

    def _whole(self) -> Any:
        return self._layout.unshard(self._alive())

    def _resolve(self, part: Any) -> Any:
        def read(x):
            return self._layout.unpack_leaf(self._alive(), x.leaf) if isinstance(x, _Unread) else x

        return jax.tree.map(read, part, is_leaf=lambda x: isinstance(x, _Unread))

    def _outline(self) -> Any:
        return jax.tree.unflatten(self._layout.tree, [_Unread(i) for i in range(len(self._layout.places))])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        outline = self._outline()
        value = getattr(outline, name)
        if getattr(value, "__self__", None) is outline:
            # A method sees the user's tree, not its outline.
            return getattr(self._whole(), name)
        return self._resolve(value)

    def __iter__(self):
        return (self._resolve(part) for part in self._outline())

    def __len__(self) -> int:
        return len(self._outline())

    def __contains__(self, key: Any) -> bool:
        return key in self._outline()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(_READ_ONLY.format(name))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(_READ_ONLY.format(key))

    def __getitem__(self, key: Any) -> Any:
        return self._resolve(self._outline()[key])

    def __repr__(self) -> str:
        layout = self._layout
        mesh = "·".join(str(n) for n in layout.mesh.devices.shape)
        stored = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in self._arrays if hasattr(a, "nbytes"))
        kind = type(self._outline()).__name__
        return f"<{kind} sharded over mesh {mesh}: {len(layout.places)} leaves in {len(self._arrays)} arrays, {stored:,} bytes>"


class DeferredState:
    """A state that `step.init` will make on the mesh when the first batch tells its layout; reading it makes it here."""

    def __init__(self, function, args):
        self._function, self._args, self._made = function, args, None
        self.shapes = jax.eval_shape(function, *args)

    def make(self) -> Any:
        """The user's tree, made on the default device, once."""
        if self._made is None:
            self._made = jax.jit(self._function)(*self._args)
        return self._made

    def __iter__(self):
        return iter(self.make())

    def __getitem__(self, key: Any) -> Any:
        return self.make()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "shapes":
            raise AttributeError(name)
        return getattr(self.make(), name)

    def __repr__(self) -> str:
        count = len(jax.tree.leaves(self.shapes))
        return f"<{type(self.shapes).__name__} to be made on the mesh at the first step: {count} leaves>"
