"""Which leaves of the state are one leaf per block: parameters by following the data, optimizer moments by their paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var
from jax.sharding import Mesh, PartitionSpec

from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.folds import ELEMENTWISE
from merak_jax.runtime.state import Place, StateLayout
from merak_jax.tracing.jaxprs import defining_equations
from merak_jax.tracing.step import TracedStep


@dataclasses.dataclass(frozen=True)
class StateGroups:
    """Lane groups (one input per block) and stacks (one input `[L, ...]`) among the inputs of the step."""

    lanes: Mapping[tuple[Var, ...], LaneLayout]
    stacks: Mapping[Var, LaneLayout]
    follows: Mapping[Any, Any]  # a group or stack of moments -> the parameter group or stack whose path it shares

    def unpacked(self) -> StateGroups:
        """No groups: every leaf is stored as the user has it."""
        return StateGroups({}, {}, {})

    def layouts(
        self,
        traced: TracedStep,
        mesh: Mesh,
        specs: Mapping[Any, PartitionSpec],
        arguments: Sequence[int],
    ) -> dict[int, StateLayout]:
        """The stored form of each packed argument; `specs` gives the sharding of each group, stack and whole leaf."""
        in_lane = {v: (group, k) for group in self.lanes for k, v in enumerate(group)}
        result = {}
        invars = traced.jaxpr.jaxpr.invars
        for argument in arguments:
            leaves = [n for n, a in enumerate(traced.leaf_argument) if a == argument]
            numbers: dict[Any, int] = {}
            places, avals = [], []
            for n in leaves:
                var = invars[n]
                group, lane = in_lane.get(var, (var, -1 if var in self.stacks else None))
                places.append(Place(numbers.setdefault(group, len(numbers)), lane))
                avals.append(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
            result[argument] = StateLayout(
                tree=traced.in_trees[argument],
                paths=tuple(traced.leaf_path[n] for n in leaves),
                avals=tuple(avals),
                places=tuple(places),
                specs=tuple(specs[g] for g in numbers),
                lanes=tuple(self.lanes.get(g, self.stacks.get(g)) for g in numbers),
                mesh=mesh,
            )
        return result


def known_groups(traced: TracedStep, given: Mapping[int, StateLayout]) -> tuple[StateGroups, dict[Any, PartitionSpec]]:
    """The groups of arguments that are stored already, and the sharding of each group, stack and whole leaf of them."""
    lanes: dict[tuple[Var, ...], LaneLayout] = {}
    stacks: dict[Var, LaneLayout] = {}
    specs: dict[Any, PartitionSpec] = {}
    for argument, layout in given.items():
        leaves = [v for v, n in zip(traced.jaxpr.jaxpr.invars, traced.leaf_argument) if n == argument]
        for number, spec in enumerate(layout.specs):
            members = sorted(layout.leaves_of(number), key=lambda i: layout.places[i].lane or 0)
            lane = layout.places[members[0]].lane
            key: Any = leaves[members[0]] if lane is None or lane == -1 else tuple(leaves[i] for i in members)
            specs[key] = spec
            if lane == -1:
                stacks[key] = layout.lane_layout(number)
            elif lane is not None:
                lanes[key] = layout.lane_layout(number)
    return StateGroups(lanes, stacks, {}), specs


def find_state_groups(
    traced: TracedStep,
    step: Jaxpr,
    lane_atoms: Mapping[tuple, LaneLayout],
    stack_atoms: Mapping[Any, LaneLayout],
    arguments: set[int],
) -> StateGroups:
    """Group the leaves of the packed `arguments`.

    Parameters are found by following `lane_atoms` and `stack_atoms` (what the blocks read) back to the step's inputs. Other
    leaves (moments, averages) join when their path differs from block to block as the parameter's path does; where that
    guess is wrong, only the storage is unusual, the numbers are the same.
    """
    number = {v: n for n, v in enumerate(traced.jaxpr.jaxpr.invars)}

    def packable(v) -> bool:
        return v in number and traced.leaf_argument[number[v]] in arguments

    taken: set[Var] = set()
    lanes: dict[tuple[Var, ...], LaneLayout] = {}
    stacks: dict[Var, LaneLayout] = {}
    for layout in dict.fromkeys([*lane_atoms.values(), *stack_atoms.values()]):
        for group in lane_leaves(step, [g for g, own in lane_atoms.items() if own == layout]):
            same_argument = len({traced.leaf_argument[number[v]] for v in group if v in number}) == 1
            if all(packable(v) for v in group) and same_argument and not taken & set(group):
                taken.update(group)
                lanes[group] = layout
        for v in stack_leaves(step, [a for a, own in stack_atoms.items() if own == layout], layout.num_lanes):
            if packable(v) and v not in taken:
                taken.add(v)
                stacks[v] = layout
    by_path = {(traced.leaf_argument[n], traced.leaf_keys[n]): v for v, n in number.items()}
    follows = {
        **_lanes_by_path(traced, number, by_path, lanes, taken, packable),
        **_stacks_by_path(traced, number, stacks, taken, packable),
    }
    lanes.update((g, lanes[like]) for g, like in follows.items() if isinstance(g, tuple))
    stacks.update((v, stacks[like]) for v, like in follows.items() if not isinstance(v, tuple))
    return StateGroups(lanes, stacks, follows)


def _lanes_by_path(traced, number, by_path, lanes, taken, packable) -> dict[tuple[Var, ...], Any]:
    """Groups whose paths hold the distinguishing part of a parameter group's paths, block by block."""
    suffixes: dict[tuple, list[tuple]] = {}
    for group in lanes:
        keys = [traced.leaf_keys[number[v]] for v in group]
        start = next((i for i, column in enumerate(zip(*keys)) if len(set(column)) > 1), None)
        if start is not None:
            suffixes.setdefault(keys[0][start:], []).append((group, [k[start:] for k in keys], keys[0][:start]))
    lengths = {len(s) for s in suffixes}
    found: dict[tuple[Var, ...], Any] = {}
    for var, n in number.items():
        if var in taken or not packable(var):
            continue
        argument, keys = traced.leaf_argument[n], traced.leaf_keys[n]
        for length in lengths:
            for at in range(len(keys) - length + 1):
                # Encoder and decoder layers may have the same names: the parameter with most of the path before them is meant.
                alike = suffixes.get(keys[at : at + length], [])
                if not alike:
                    continue
                parameter, others, _ = max(alike, key=lambda entry: _common_end(entry[2], keys[:at]))
                group = tuple(by_path.get((argument, keys[:at] + other + keys[at + length :])) for other in others)
                if None in group or any(v in taken for v in group) or len(set(group)) != len(group):
                    continue
                if all(v.aval.shape == var.aval.shape and v.aval.dtype == var.aval.dtype for v in group):
                    taken.update(group)
                    found[group] = parameter
    return found


def _common_end(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many of the last keys of two paths are equal."""
    count = 0
    for x, y in zip(reversed(a), reversed(b)):
        if x != y:
            break
        count += 1
    return count


def _stacks_by_path(traced, number, stacks, taken, packable) -> dict[Var, Any]:
    """Leaves `[L, ...]` whose path ends as a stacked parameter's does."""
    suffixes = {traced.leaf_keys[number[v]][1:] or traced.leaf_keys[number[v]]: v for v in stacks}
    found: dict[Var, Any] = {}
    for var, n in number.items():
        keys = traced.leaf_keys[n]
        parameter = next((v for s, v in suffixes.items() if keys[-len(s) :] == s), None)
        if parameter is None or var in taken or not packable(var):
            continue
        if var.aval.shape[:1] == (stacks[parameter].num_lanes,):
            taken.add(var)
            found[var] = parameter
    return found


def stack_leaves(jaxpr: Jaxpr, stacks: Sequence[Any], num_blocks: int) -> list[Var]:
    """The inputs `[L, ...]` that `stacks` are made of by elementwise work (casts, scalings)."""
    defined = defining_equations(jaxpr.eqns)
    inputs = set(jaxpr.invars)
    found: dict[Var, None] = {}
    pending = list(stacks)
    while pending:
        atom = pending.pop()
        if not isinstance(atom, Var) or atom.aval.shape[:1] != (num_blocks,):
            continue
        if atom in inputs:
            found.setdefault(atom)
        elif atom in defined:
            eqn = jaxpr.eqns[defined[atom][0]]
            if eqn.primitive.name in ELEMENTWISE:
                pending.extend(a for a in eqn.invars if a.aval.shape == atom.aval.shape)
    return list(found)
