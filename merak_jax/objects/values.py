"""Where the values of nnx variables are between steps: in packed arrays on the mesh, gathered leaf by leaf when read."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from merak_jax.errors import StateError
from merak_jax.runtime.initialise import initialise
from merak_jax.runtime.state import Place, StateLayout


class Stored:
    """One packed array on the mesh, number `number` of `layout`; its leaves are read through `StoredLeaf`."""

    def __init__(self, layout: StateLayout, number: int, array: Any, num_leaves: int):
        self.layout, self.number, self.array, self.num_leaves = layout, number, array, num_leaves


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredLeaf:
    """Leaf `leaf` of the layout of a stored array."""

    stored: Stored
    leaf: int

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return self.stored.layout.avals[self.leaf]

    @property
    def lane(self) -> int | None:
        return self.stored.layout.places[self.leaf].lane

    def read(self) -> Any:
        """The whole leaf, a copy. StateError when its array was donated to a step that then failed."""
        array, layout = self.stored.array, self.stored.layout
        if array.is_deleted():
            raise StateError(
                f"the value of {layout.paths[self.leaf]} was donated to a step that failed while it ran, and is "
                "gone; restore a checkpoint, or keep values alive with parallelize(..., donate=False)"
            )
        if self.lane is None:
            return gathered(array)
        lanes = layout.lane_layout(self.stored.number)
        if self.lane == -1:
            return gathered(array, then=lanes.unpack_stack)
        return gathered(array, at=lanes.places[self.lane])


class Creation:
    """Values that `step.init` is to make: `function(*args)` returns them as a list. They are made on the mesh at the first
    step, or here as soon as somebody reads one."""

    def __init__(self, function: Callable[..., list], args: Sequence[Any]):
        self.function, self.args = function, tuple(args)
        self._made: list | None = None

    def some(self, numbers: Sequence[int]) -> Callable[..., list]:
        """The function of only these values."""

        def function(*args):
            values = self.function(*args)
            return [values[n] for n in numbers]

        return function

    def make(self) -> list:
        """All values, made on the default device, once."""
        if self._made is None:
            with jax.ensure_compile_time_eval():
                self._made = jax.jit(self.function)(*self.args)
        return self._made


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PlannedLeaf:
    """Value `number` of a creation."""

    creation: Creation
    number: int
    aval: jax.ShapeDtypeStruct

    def read(self) -> Any:
        """The value, made on the default device with all others of its creation."""
        return self.creation.make()[self.number]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LooseLeaf:
    """A whole array on the mesh that belongs to no layout."""

    array: Any

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.array.shape, self.array.dtype)

    def read(self) -> Any:
        """A copy on the default device."""
        return gathered(self.array)


Leaf = StoredLeaf | PlannedLeaf | LooseLeaf


class Deferred:
    """The raw value of a variable that nobody has read yet: a pytree `tree` of `leaves`. It is read once and kept."""

    __slots__ = ("tree", "leaves", "_value", "_is_read")

    def __init__(self, tree: Any, leaves: Sequence[Leaf]):
        self.tree, self.leaves, self._is_read = tree, tuple(leaves), False
        self._value: Any = None

    def read(self) -> Any:
        """The raw value, of real arrays."""
        if not self._is_read:
            self._value = jax.tree.unflatten(self.tree, [leaf.read() for leaf in self.leaves])
            self._is_read = True
        return self._value


def gathered(array: Any, at: tuple[int, int] | None = None, then: Callable[[Any], Any] = lambda x: x) -> Any:
    """A whole copy of `array`, or of its part `array[at]`, on the default device, not committed to it, as a new array is.

    The shards come through the host: no program runs over the mesh for a read. With several processes, nobody holds all
    shards: then the copy is on every device of the mesh.
    """
    with jax.ensure_compile_time_eval():
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = gathered(jax.random.key_data(array), at, then)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        if not array.is_fully_addressable:
            replicated = jax.NamedSharding(array.sharding.mesh, jax.P())
            return jax.jit(lambda x: jnp.copy(then(x if at is None else x[at])), out_shardings=replicated)(array)
        skip = 0 if at is None else 2
        whole = np.empty(array.shape[skip:], array.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            data, index = shard.data, shard.index
            if at is not None:
                starts = [s.start or 0 for s in index[:2]]
                inside = [k - start for k, start in zip(at, starts)]
                if not all(0 <= k < n for k, n in zip(inside, data.shape)):
                    continue
                data = data[tuple(inside)]
            whole[index[skip:]] = np.asarray(data)
        return jnp.asarray(then(whole))


# Which leaf an array is that an object holds directly, not in a variable: such an array cannot be deferred.
_attributes: dict[int, tuple[weakref.ref, StoredLeaf]] = {}


def remember(array: Any, leaf: StoredLeaf) -> None:
    """From now on the jax.Array `array` is known to be the value of `leaf`."""
    if not isinstance(array, jax.Array):
        return  # a numpy array may be changed in place
    key = id(array)
    _attributes[key] = (weakref.ref(array, lambda _: _attributes.pop(key, None)), leaf)


def leaf_of(array: Any) -> Any:
    """The leaf whose value `array` is, or else the array itself."""
    reference, leaf = _attributes.get(id(array), (None, None))
    return leaf if reference is not None and reference() is array else array


def aval_of(leaf: Any) -> Any:
    """Shape and type of a leaf, deferred or not."""
    return leaf.aval if isinstance(leaf, Leaf) else leaf


def assemble(layout: StateLayout, members: Sequence[Sequence[int]], leaves: Sequence[Any]) -> list[Any]:
    """The packed arrays of `layout` for `leaves` (deferred or real; `members`: the leaves of each array).

    An array whose leaves are all where they were is used as it is; a leaf that was changed is put into it; what `step.init`
    is to make is made on the mesh; all else is placed anew. Whatever is returned may be donated.
    """
    arrays: list[Any] = [None] * len(members)
    used: set[int] = set()
    planned: dict[Creation, list[int]] = {}
    anew: list[int] = []
    for number, own in enumerate(members):
        stored = _common_array(layout, number, own, leaves)
        if stored is not None:
            changed = [i for i in own if not _is_in(leaves[i], stored)]
            array, sharding = stored.array, layout.shardings[number]
            if array.sharding != sharding:
                array = jax.device_put(array, sharding)
            if id(stored) in used:
                array = _copy(array)
            used.add(id(stored))
            for i in changed:
                array = _replaced(
                    array, _value(leaves[i]), *layout.lane_layout(number).places[layout.places[i].lane or 0]
                )
            arrays[number] = array
        elif all(isinstance(leaves[i], PlannedLeaf) for i in own) and len({leaves[i].creation for i in own}) == 1:
            planned.setdefault(leaves[own[0]].creation, []).append(number)
        else:
            anew.append(number)
    for creation, numbers in planned.items():
        part = _part(layout, members, numbers)
        wanted = [leaves[i].number for number in numbers for i in members[number]]
        made = initialise(creation.some(wanted), creation.args, part)
        for number, array in zip(numbers, made._arrays):
            arrays[number] = array
    if anew:
        part = _part(layout, members, anew)
        placed = part.shard([_value(leaves[i]) for number in anew for i in members[number]])
        for number, array in zip(anew, placed._arrays):
            arrays[number] = array
    return arrays


def _value(leaf: Any) -> Any:
    if isinstance(leaf, LooseLeaf):
        return leaf.array
    return leaf.read() if isinstance(leaf, Leaf) else leaf


def _is_in(leaf: Any, stored: Stored) -> bool:
    return isinstance(leaf, StoredLeaf) and leaf.stored is stored


def _common_array(layout: StateLayout, number: int, own: Sequence[int], leaves: Sequence[Any]) -> Stored | None:
    """The stored array that has the leaves `own` as array `number` of `layout`, but for fewer than half that were changed."""
    inside = [i for i in own if isinstance(leaves[i], StoredLeaf)]
    if not inside:
        return None
    stored = leaves[inside[0]].stored
    inside = [i for i in inside if leaves[i].stored is stored]
    same_places = all(leaves[i].lane == layout.places[i].lane for i in inside)
    lanes_match = layout.lanes[number] == stored.layout.lanes[stored.number]
    if 2 * len(inside) <= len(own) or stored.num_leaves != len(own) or not same_places or not lanes_match:
        return None
    return None if stored.array.is_deleted() else stored


def stored_layout(tree: Any, paths: Sequence[str], avals: Sequence[Any], leaves: Sequence[Any]) -> StateLayout | None:
    """The layout in which `leaves` are stored already, those that aren't whole; None where stored arrays have other leaves too."""
    stored: dict[Stored, int] = {}
    for leaf in leaves:
        if isinstance(leaf, StoredLeaf):
            stored.setdefault(leaf.stored, 0)
            stored[leaf.stored] += 1
    meshes = {s.layout.mesh for s in stored}
    if len(meshes) != 1 or any(s.num_leaves != count for s, count in stored.items()):
        return None
    number: dict[Any, int] = {}
    places, specs, lanes = [], [], []
    for i, leaf in enumerate(leaves):
        own = leaf.stored if isinstance(leaf, StoredLeaf) else None
        key = i if own is None else own
        if key not in number:
            number[key] = len(number)
            specs.append(jax.P() if own is None else own.layout.specs[own.number])
            lanes.append(None if own is None else own.layout.lanes[own.number])
        places.append(Place(number[key], None if own is None else leaf.lane))
    return StateLayout(tree, tuple(paths), tuple(avals), tuple(places), tuple(specs), tuple(lanes), meshes.pop())


def _part(layout: StateLayout, members: Sequence[Sequence[int]], numbers: Sequence[int]) -> StateLayout:
    """The layout of some of its arrays; its tree is the list of their leaves, array after array."""
    own = [i for number in numbers for i in members[number]]
    new_number = {number: n for n, number in enumerate(numbers)}
    return dataclasses.replace(
        layout,
        tree=jax.tree.structure([0] * len(own)),
        paths=tuple(f"[{n}]" for n in range(len(own))),
        avals=tuple(layout.avals[i] for i in own),
        places=tuple(dataclasses.replace(layout.places[i], array=new_number[layout.places[i].array]) for i in own),
        specs=tuple(layout.specs[number] for number in numbers),
        lanes=tuple(layout.lanes[number] for number in numbers),
    )


def _copy(array: Any) -> Any:
    return jax.jit(jnp.copy, out_shardings=array.sharding)(array)


def _replaced(array: Any, value: Any, stage: int, index: int) -> Any:
    """`array` `[P, N, ...]` with another value of one lane."""
    value = jax.device_put(value, jax.NamedSharding(array.sharding.mesh, jax.P()))
    return jax.jit(_put, out_shardings=array.sharding)(array, value, stage, index)


def _put(array: Any, value: Any, stage: Any, index: Any) -> Any:
    return array.at[stage, index].set(value)
