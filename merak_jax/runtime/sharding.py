"""Choose the sharding of every stored array and of every value that the pipeline reads."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from merak_jax.partition.blocks import BlockGraph
from merak_jax.partition.chain import Chain
from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.lanes import LaneLayout
from merak_jax.partition.splits import WHOLE, BlockLayout, Place, Split, follow_splits
from merak_jax.partition.tensor import TensorLayout, tensor_layout, vocabulary_split
from merak_jax.runtime.groups import StateGroups, stack_leaves
from merak_jax.tracing.jaxprs import defining_equations, make_jaxpr

P = PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Shardings:
    """Specs: of the blocks' lane operands and of their raw slots `[P, N, ...]`, chain after chain, of each stored group, stack
    and whole leaf."""

    mesh: Mesh
    graph: BlockGraph
    lane_operands: tuple[PartitionSpec, ...]
    slot_specs: tuple[PartitionSpec, ...]
    stored: dict[Any, PartitionSpec]
    stacks: frozenset[Var]
    tensor: tuple[TensorLayout | None, ...]

    def __getitem__(self, key: Any) -> PartitionSpec:
        return self.stored[key]

    def constrain(self, values: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        """`values` with these shardings inside a jitted program."""
        if self.mesh.size == 1:
            return list(values)
        return [
            v
            if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)
            else lax.with_sharding_constraint(v, NamedSharding(self.mesh, s))
            for v, s in zip(values, specs)
        ]

    def unpacked(self) -> Shardings:
        """The same splits for leaves stored one by one, as with one stage."""
        stored: dict[Any, PartitionSpec] = {}
        for key, spec in self.stored.items():
            if isinstance(key, tuple):
                stored.update((v, P(*spec[2:])) for v in key)
            elif key in self.stacks:
                stored[key] = P(None, *spec[2:])
            else:
                stored[key] = spec
        return dataclasses.replace(self, stored=stored)

    def tokens(self, graph: BlockGraph) -> list[int | None]:
        """Per value of the carry the dimension along which it can be split over `tensor`; where chains differ, the usual one."""
        found = []
        for n in range(len(graph.carry_avals) if graph.chains else 0):
            own = [x.sequence[n] for x in self.tensor if x is not None and x.sequence[n] is not None]
            found.append(Counter(own).most_common(1)[0][0] if own else None)
        return found

    def shared(self, variables: Sequence[Var]) -> tuple[PartitionSpec, ...]:
        """Specs of shared values: tables that prologue or epilogue look up or multiply are split, all else is whole."""
        specs = {v: table_spec(v.aval.shape, d, self.mesh) for v, d in tables(self.graph).items()}
        if self.mesh.shape["pipe"] == 1:
            for slot, spec in zip((s for c in self.graph.chains for s in c.slots), self.slot_specs):
                specs.update((v, P(*spec[2:])) for v in slot.values if isinstance(v, Var))
                if slot.stack is not None:
                    specs[slot.stack] = P(None, *spec[2:])
        return tuple(specs.get(v, P()) for v in variables)


def _ways(mesh: Mesh) -> tuple[int, tuple[str, ...]]:
    names = tuple(a for a in ("pipe", "tensor") if mesh.shape[a] > 1)
    return math.prod(mesh.shape[a] for a in names), names


def table_spec(shape: Sequence[int], dimension: int, mesh: Mesh) -> PartitionSpec:
    """A table inside the step: its vocabulary over pipe and tensor together, the last part smaller where it does not divide."""
    ways, names = _ways(mesh)
    if ways == 1 or shape[dimension] < ways:
        return P()
    return P(*(names if d == dimension else None for d in range(len(shape))))


def whole_spec(shape: Sequence[int], mesh: Mesh, dimension: int | None = None) -> PartitionSpec:
    """How a leaf outside the blocks is stored: over pipe and tensor together, along `dimension` or the largest that divides."""
    ways, names = _ways(mesh)
    if ways == 1:
        return P()
    if dimension is not None and shape[dimension] % ways == 0:
        return P(*(names if d == dimension else None for d in range(len(shape))))
    for axes in (names, ("tensor",), ("pipe",)):
        ways = math.prod(mesh.shape[a] for a in axes)
        split = vocabulary_split(shape, ways) if ways > 1 else None
        if split is not None:
            return P(*(axes if d == split else None for d in range(len(shape))))
    return P()


def tables(graph: BlockGraph) -> dict[Var, int]:
    """The vocabulary dimension of each shared value that prologue and epilogue only look up, or multiply, along one dimension."""
    block_shared = set(graph.chain_shared)
    found: dict[Var, set[int | None]] = {}
    for program in (graph.prologue, graph.epilogue, graph.side):
        turned: dict[Var, tuple[Var, tuple[int, ...]]] = {}
        for eqn in program.eqns:
            if eqn.primitive.name == "transpose" and isinstance(eqn.invars[0], Var):
                source, order = turned.get(eqn.invars[0], (eqn.invars[0], tuple(range(len(eqn.invars[0].aval.shape)))))
                turned[eqn.outvars[0]] = (source, tuple(order[d] for d in eqn.params["permutation"]))
                continue
            for n, a in enumerate(eqn.invars):
                if isinstance(a, Var) and len(getattr(a.aval, "shape", ())) >= 2:
                    dimension = _vocabulary(eqn, n)
                    turn = turned.get(a)
                    source = a if turn is None else turn[0]
                    found.setdefault(source, set()).add(
                        dimension if dimension is None or turn is None else turn[1][dimension]
                    )
    shared = {*graph.prologue_shared, *graph.epilogue_shared, *graph.side_shared} - block_shared
    return {v: d for v, dims in found.items() if v in shared and len(dims) == 1 for d in dims if d is not None}


def _vocabulary(eqn: Any, operand: int) -> int | None:
    """The dimension that a lookup selects from or that a product leaves free, of one operand."""
    if eqn.primitive.name == "gather" and operand == 0:
        numbers = eqn.params["dimension_numbers"]
        return numbers.start_index_map[0] if numbers.start_index_map == numbers.collapsed_slice_dims else None
    if eqn.primitive.name == "dot_general":
        contracting, batch = eqn.params["dimension_numbers"]
        fixed = {*contracting[operand], *batch[operand]}
        free = [d for d in range(len(eqn.invars[operand].aval.shape)) if d not in fixed]
        return free[0] if len(free) == 1 else None
    return None


def _leaf_dimensions(graph: BlockGraph) -> dict[Var, int]:
    """For each input that a table is made of, through casts and transposes, its vocabulary dimension."""
    defined = defining_equations(graph.program.eqns)
    found: dict[Var, int] = {}
    for var, dimension in tables(graph).items():
        while var in defined:
            eqn = graph.program.eqns[defined[var][0]]
            if eqn.primitive.name == "transpose":
                dimension = eqn.params["permutation"][dimension]
            elif eqn.primitive.name not in ("convert_element_type", "copy"):
                break
            var = eqn.invars[0]
        else:
            found.setdefault(var, dimension)
    return found


def choose_shardings(
    graph: BlockGraph,
    mesh: Mesh,
    lane_groups: Mapping[tuple[Var, ...], LaneLayout],
    stack_inputs: Mapping[Var, LaneLayout],
    groups: StateGroups,
    outer: Callable[[Var], Any],
    whole_leaves: Sequence[Var],
    given: Callable[[Any], tuple[int | None] | None],
) -> Shardings:
    """Column and row splits for what the blocks read, splits over pipe and tensor for tables, copies for the rest.

    `given(leaf)`: `(dimension,)` of one block's part along which the user wants a parameter split, `(None,)` for whole, None where
    nothing is said; a leaf is a variable per block, or a stack.
    """
    tensor = mesh.shape["tensor"]
    layouts: list[TensorLayout | None] = []
    lane_operands: list[PartitionSpec] = []
    slot_specs: list[PartitionSpec] = []
    leaf_split: dict[Any, int | None] = {}
    for chain in graph.chains:
        operands = chain.lane_prepare.outvars
        positions = list(range(chain.num_carry, chain.num_carry + len(operands)))
        splits: Sequence[int | None] = [None] * len(operands)
        layout = None
        if tensor > 1 and operands:
            leaves = _BlockLeaves(graph, chain, lane_groups, stack_inputs)
            own, fixed = leaves.splits(tensor, given)
            layout = tensor_layout(chain.body, positions, tensor, carry_invars=range(chain.num_carry), fixed=fixed)
            splits = layout.splits
            leaf_split.update(own)
        layouts.append(layout)
        specs = [_lane_spec(len(v.aval.shape), s) for v, s in zip(operands, splits)]
        by_operand = dict(zip(operands, specs))
        lane_operands += specs
        slot_specs += [
            by_operand.get(v, _lane_spec(len(v.aval.shape), None))
            for v in chain.lane_prepare.invars[: len(chain.slots)]
        ]
    stored: dict[Any, PartitionSpec] = {}
    by_outer = {
        (tuple(outer(v) for v in source) if isinstance(source, tuple) else outer(source)): split
        for source, split in leaf_split.items()
    }
    for key in (*groups.lanes, *groups.stacks):
        # Moments are split like the parameter whose path they share, where they have its shape.
        parameter = groups.follows.get(key, key)
        shape = key[0].aval.shape if isinstance(key, tuple) else key.aval.shape[1:]
        like = parameter[0].aval.shape if isinstance(parameter, tuple) else parameter.aval.shape[1:]
        stored[key] = _lane_spec(len(shape), by_outer.get(parameter) if shape == like else None)
    # Moments have the shape of their table, and are stored like it.
    by_shape = {v.aval.shape: d for v, d in _leaf_dimensions(graph).items()}
    for var in whole_leaves:
        stored[var] = (
            whole_spec(var.aval.shape, mesh, by_shape.get(var.aval.shape))
            if not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended)
            else P()
        )
    return Shardings(
        mesh, graph, tuple(lane_operands), tuple(slot_specs), stored, frozenset(groups.stacks), tuple(layouts)
    )


def _lane_spec(ndim: int, split: int | None) -> PartitionSpec:
    return P("pipe", None, *("tensor" if d == split else None for d in range(ndim)))


class _BlockLeaves:
    """The parameters of a block, and the block together with what prepares its operands from them."""

    def __init__(self, graph: BlockGraph, chain: Chain, lane_groups, stack_inputs):
        self.chain, body = chain, chain.body
        slots = chain.lane_prepare.invars[: len(chain.slots)]
        if any(s.stack is not None for s in chain.slots):
            keys = [_stack_source(graph, chain, s.stack, stack_inputs) for s in chain.slots]
            # Leaves, and the inputs of the program that they are.
            self.leaves = [(key, var) for key, var in zip(keys, slots) if key is not None]
            inputs, eqns = list(slots), []
            self.slots = dict(zip(slots, slots))
        else:
            own = lane_leaves(graph.program, [s.values for s in chain.slots])
            self.leaves = [(g, g[0]) for g in own if g in lane_groups]
            inputs = [v for _, v in self.leaves]
            self.slots = {slot: s.values[0] for slot, s in zip(slots, chain.slots)}
            wanted = [a for a in self.slots.values() if isinstance(a, Var)]
            eqns = _ancestors(graph.program, wanted, set(inputs))
        self.before = _closed([], inputs, eqns, [a for a in self.slots.values() if isinstance(a, Var)])
        rename = {v: a for v, a in self.slots.items() if v is not a}
        prepare = [e.replace(invars=_renamed(e.invars, rename)) for e in chain.lane_prepare.eqns]
        operands = dict(zip(body.invars[chain.num_carry :], _renamed(chain.lane_prepare.outvars, rename)))
        block = [e.replace(invars=_renamed(e.invars, operands)) for e in body.eqns]
        self.program = _closed(body.invars[: chain.num_carry], inputs, [*eqns, *prepare, *block], body.outvars)

    def splits(
        self, tensor: int, given: Callable[[Any], tuple[int | None] | None]
    ) -> tuple[dict[Any, int | None], dict[int, int | None]]:
        """The split of each leaf, and of the operands that are made of those that the user splits, by their position."""
        positions = [self.program.invars.index(v) for _, v in self.leaves]
        found = [given(key) for key, _ in self.leaves]
        fixed = {n: own[0] for n, own in enumerate(found) if own is not None}
        carry = range(self.chain.num_carry)
        layout = tensor_layout(self.program, positions, tensor, carry_invars=carry, fixed=fixed)
        splits = {key: split for (key, _), split in zip(self.leaves, layout.splits)}
        return splits, self._operands(tensor, layout.splits) if fixed else {}

    def _operands(self, tensor: int, splits: Sequence[int | None]) -> dict[int, int | None]:
        """How the operands of the block are split if the leaves are."""
        nothing = BlockLayout((), (), False, False, frozenset(), tensor)

        def follow(program: Jaxpr, places: Mapping[Var, Place]) -> list[Place]:
            found = follow_splits(
                program, [places.get(v, WHOLE) for v in program.invars], [None] * len(program.invars), nothing
            )
            return [found.of(v) for v in program.outvars]

        leaves = {v: WHOLE if d is None else Split(d, False) for (_, v), d in zip(self.leaves, splits)}
        made = dict(zip(self.before.outvars, follow(self.before, leaves)))
        slots = {slot: made[a] for slot, a in self.slots.items() if a in made}
        operands = follow(self.chain.lane_prepare, slots)
        return {n: p.dimension if isinstance(p, Split) else None for n, p in enumerate(operands)}


def _renamed(atoms: Sequence[Any], names: Mapping[Var, Any]) -> list[Any]:
    return [names.get(a, a) if isinstance(a, Var) else a for a in atoms]


def _stack_source(graph: BlockGraph, chain: Chain, stack: Any, stack_inputs):
    made_of = stack_leaves(graph.program, [stack], chain.length) if stack is not None else []
    return made_of[0] if made_of and made_of[0] in stack_inputs else None


def _ancestors(program: Jaxpr, wanted: Sequence[Var], stop: set[Var]) -> list:
    need = {v for v in wanted if v not in stop}
    kept = []
    for eqn in reversed(program.eqns):
        if any(v in need for v in eqn.outvars):
            kept.append(eqn)
            need.update(a for a in eqn.invars if isinstance(a, Var) and a not in stop)
    return kept[::-1]


def _closed(carry, inputs, eqns, outvars) -> Jaxpr:
    """A jaxpr whose further inputs are whatever `eqns` read and do not make."""
    made = {v for e in eqns for v in e.outvars} | set(carry) | set(inputs)
    read = [a for e in eqns for a in e.invars if isinstance(a, Var)] + [a for a in outvars if isinstance(a, Var)]
    free = list(dict.fromkeys(a for a in read if a not in made))
    return make_jaxpr([], [*carry, *inputs, *free], outvars, eqns)
