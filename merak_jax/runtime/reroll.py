"""Run a flat jaxpr with what is the same for every block done once, batched over `[P, N]`: the re-rolled update."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax.partition.fingerprint import equation_shape, same_literal
from merak_jax.partition.lanes import LaneLayout
from merak_jax.tracing.jaxprs import Atom, defining_equations, evaluate_equation

ELEMENTWISE = frozenset(
    """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh
xor""".split()
)

_FOLDS: dict[str, Callable] = {
    "add": jnp.sum,
    "add_any": jnp.sum,
    "mul": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}
_STACK_FOLDS: dict[str, Callable] = {
    "reduce_sum": jnp.sum,
    "reduce_prod": jnp.prod,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}


class RerollWarning(UserWarning):
    """A value per block could not be computed for all blocks at once, each on its stage; it is correct, and slower."""


class Rerolled:
    """A flat jaxpr (no constants) whose inputs may be lanes (L variables, one per block) or stacks (one `[L, ...]` variable).

    `lanes`, `stacks`: the groups and stacks, each with the layout in which it is given, `[P, N, ...]`; results can be asked
    for in such a layout or whole. `names`: what the user calls an input, for warnings.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        lanes: Mapping[tuple[Var, ...], LaneLayout],
        stacks: Mapping[Var, LaneLayout],
        names: Mapping[Var, str] | None = None,
    ):
        self.jaxpr, self.names, self.has_warned = jaxpr, names or {}, False
        self.lanes, self.stacks = dict(lanes), dict(stacks)
        self.defined = defining_equations(jaxpr.eqns)
        self.lane_of_leaf = {v: (group, k) for group in self.lanes for k, v in enumerate(group)}
        self.shapes = [equation_shape(e) for e in jaxpr.eqns]
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars if isinstance(a, Var))
        self.uses.update(a for a in jaxpr.outvars if isinstance(a, Var))
        self._sign()
        self._find_stacked()

    def _sign(self) -> None:
        """Number each value that depends on one lane, so that the same value of other lanes has the same number.

        A signature is `(number, (layout, lane))`.
        """
        numbers: dict[Any, int] = {}
        self.signature: dict[Var, tuple[int, tuple[LaneLayout, int]]] = {
            v: (numbers.setdefault(("leaf", group), len(numbers)), (self.lanes[group], k))
            for v, (group, k) in self.lane_of_leaf.items()
        }
        self.touched: set[Var] = {*self.lane_of_leaf, *self.stacks}
        # What depends on no lane is numbered too: each lane may have made its own copy of the same value.
        free: dict[Var, int] = {}

        def identity(atom: Atom) -> Any:
            return free.get(atom, atom) if isinstance(atom, Var) else _identity(atom)

        for eqn, shape in zip(self.jaxpr.eqns, self.shapes):
            operands = [self.signature.get(a) if isinstance(a, Var) else None for a in eqn.invars]
            if any(isinstance(a, Var) and a in self.touched for a in eqn.invars):
                self.touched.update(eqn.outvars)
            touched = {s[1] for s in operands if s is not None}
            if len(touched) > 1:
                continue
            key = (
                shape,
                tuple(("lane", s[0]) if s is not None else identity(a) for a, s in zip(eqn.invars, operands)),
            )
            made = [numbers.setdefault((key, o), len(numbers)) for o in range(len(eqn.outvars))]
            if touched:
                lane = touched.pop()
                self.signature.update((v, (number, lane)) for v, number in zip(eqn.outvars, made))
            else:
                free.update(zip(eqn.outvars, made))

    def _find_stacked(self) -> None:
        """Which variables keep the leading `[L]` of a stack, so that they can stay packed."""
        self.stacked = dict(self.stacks)
        for eqn in self.jaxpr.eqns:
            layouts = {self.stacked[a] for a in eqn.invars if isinstance(a, Var) and a in self.stacked}
            if len(layouts) == 1 and self._keeps_stack(eqn):
                self.stacked.update(dict.fromkeys(eqn.outvars, layouts.pop()))

    def _keeps_stack(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if name in ELEMENTWISE:
            out = eqn.outvars[0].aval.shape
            return all(a.aval.shape in ((), out) for a in eqn.invars)
        if name in _STACK_FOLDS:
            return 0 not in eqn.params["axes"] and _folds(name.removeprefix("reduce_"), eqn.outvars[0].aval.dtype)
        if name == "broadcast_in_dim":
            dims = eqn.params["broadcast_dimensions"]
            return len(eqn.invars) == 1 and bool(dims) and dims[0] == 0
        return False

    def warn(self, atoms: Sequence[Atom], *, drawn: bool = False) -> None:
        """Say once that a value of each block is computed block by block, and which leaf of the state it is made of.

        Scalars are not worth it, and values that no packed leaf goes into are only if they are random draws (`drawn`).
        """
        self._warn_once(atoms, atoms[0].aval.size, "each block", "block by block", drawn)

    def warn_of_stack(self, atom: Atom, layout: LaneLayout) -> None:
        """Say once that a value `[L, ...]` is computed whole, on every stage, and which leaf of the state it is made of."""
        self._warn_once([atom], atom.aval.size // layout.num_lanes, "all blocks", "whole, on every stage")

    def _warn_once(self, atoms: Sequence[Atom], size: int, of: str, how: str, drawn: bool = False) -> None:
        from_blocks = drawn or any(isinstance(a, Var) and a in self.touched for a in atoms)
        if self.has_warned or size <= 1 or not from_blocks:
            return
        self.has_warned = True
        leaf = self._leaf_of(atoms)
        warnings.warn(
            f"a value {atoms[0].aval.str_short()} of {of}{f', made of {leaf},' if leaf else ''} is computed {how}, "
            "which is slower; perhaps other values too",
            RerollWarning,
            stacklevel=2,
        )

    def _leaf_of(self, atoms: Sequence[Atom]) -> str:
        """The name of an input that these values are made of."""
        pending, seen = [a for a in atoms if isinstance(a, Var)], set()
        while pending:
            var = pending.pop(0)
            if var in self.names:
                return self.names[var]
            if var not in seen and var in self.defined:
                eqn = self.jaxpr.eqns[self.defined[var][0]]
                pending.extend(a for a in eqn.invars if isinstance(a, Var) and a in self.touched)
            seen.add(var)
        return ""

    def start(self, lanes: Sequence[Any], stacks: Sequence[Any], whole: Mapping[Var, Any]) -> Evaluation:
        """Begin an evaluation: packed arrays for the lane groups and stacks, values for all other inputs."""
        return Evaluation(self, lanes, stacks, whole)


def _folds(name: str, dtype: Any) -> bool:
    """Whether an operation on this type is the fold of the table: `and` and `or` of integers work bit by bit."""
    return name not in ("and", "or") or dtype == jnp.bool_


def _draws_otherwise_in_batches(eqn: JaxprEqn) -> bool:
    """Whether the equation uses keys whose draws change under `vmap`, as all but threefry's do."""
    keys = [a.aval.dtype for a in eqn.invars if jnp.issubdtype(a.aval.dtype, jax.dtypes.prng_key)]
    return any("fry" not in str(dtype) for dtype in keys)


def _identity(atom: Atom) -> Any:
    return (str(atom.aval), np.asarray(atom.val).tobytes()) if isinstance(atom, Literal) else atom


class Evaluation:
    """Values of one run, computed when asked for and kept."""

    def __init__(self, program: Rerolled, lanes, stacks, whole):
        self.program = program
        self._lane_values: dict[tuple, tuple[Any, bool]] = {
            (group, layout): (value, True) for (group, layout), value in zip(program.lanes.items(), lanes)
        }
        self._stack_values = dict(zip(program.stacks, stacks))
        self._whole = dict(whole)

    def whole(self, atom: Atom) -> Any:
        """The value of one variable, whole."""
        with _deep_recursion():
            return self._full(atom)

    def packed(self, atoms: Sequence[Atom], layout: LaneLayout) -> Any:
        """The values of one variable per lane, as `[P, N, ...]`."""
        with _deep_recursion():
            return self._as_packed(*self._lane(tuple(atoms), layout), atoms[0], layout)

    def packed_stack(self, atom: Atom, layout: LaneLayout) -> Any:
        """The value `[L, ...]` of one variable, as `[P, N, ...]`."""
        with _deep_recursion():
            return self._stack(atom, layout)

    # One value per lane.

    def _as_packed(self, value, is_lane, atom, layout) -> Any:
        if is_lane:
            return value
        shape = (layout.num_stages, layout.depth, *np.shape(value))
        return jnp.broadcast_to(jnp.asarray(value, atom.aval.dtype) if isinstance(atom, Literal) else value, shape)

    def _lane(self, atoms: tuple[Atom, ...], layout: LaneLayout) -> tuple[Any, bool]:
        """`(value, whether it has the [P, N] axes)`."""
        first = atoms[0]
        if all(a is first for a in atoms):
            return self._full(first), False
        if all(isinstance(a, Literal) for a in atoms):
            if all(same_literal(first, a) for a in atoms):
                return first.val, False
            return layout.pack([np.asarray(a.val, first.aval.dtype) for a in atoms]), True
        if any(isinstance(a, Literal) for a in atoms):
            return self._one_by_one(atoms, layout), True
        if (atoms, layout) not in self._lane_values:
            self._compute_lane(atoms, layout)
        return self._lane_values[atoms, layout]

    def _compute_lane(self, atoms: tuple[Var, ...], layout: LaneLayout) -> None:
        program = self.program
        sources: list[Any] = [program.defined.get(a) for a in atoms]
        alike = (
            not any(s is None for s in sources)
            and len({s[1] for s in sources}) == 1
            and len({program.shapes[s[0]] for s in sources}) == 1
            and len({s[0] for s in sources}) == len(sources)
        )
        drawn = alike and _draws_otherwise_in_batches(program.jaxpr.eqns[sources[0][0]])
        if not alike or drawn:
            self._lane_values[atoms, layout] = (self._one_by_one(atoms, layout, drawn=drawn), True)
            return
        eqns = [program.jaxpr.eqns[s[0]] for s in sources]
        operands = [self._lane(column, layout) for column in zip(*(e.invars for e in eqns))]
        results = _batched(eqns[0], operands)
        is_lane = any(lane for _, lane in operands)
        for outvars, value in zip(zip(*(e.outvars for e in eqns)), results):
            self._lane_values[outvars, layout] = (value, is_lane)

    def _one_by_one(self, atoms, layout: LaneLayout, *, drawn: bool = False) -> Any:
        self.program.warn(atoms, drawn=drawn)
        return layout.pack([self._full(a) for a in atoms])

    # Whole values.

    def _full(self, atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._whole:
            self._compute_full(atom)
        return self._whole[atom]

    def _compute_full(self, var: Var) -> None:
        program = self.program
        if var in program.lane_of_leaf:
            group, lane = program.lane_of_leaf[var]
            layout = program.lanes[group]
            self._whole[var] = layout.unpack(self._lane_values[group, layout][0], lane)
            return
        if var in program.stacked:
            layout = program.stacked[var]
            self._whole[var] = layout.unpack_stack(self._stack(var, layout))
            return
        eqn = program.jaxpr.eqns[program.defined[var][0]]
        name = eqn.primitive.name
        if name in _FOLDS and _folds(name, var.aval.dtype) and self._fold(eqn):
            return
        folds = name in _STACK_FOLDS and _folds(name.removeprefix("reduce_"), var.aval.dtype)
        if folds and eqn.invars[0] in program.stacked:
            layout = program.stacked[eqn.invars[0]]
            packed = self._stack(eqn.invars[0], layout)
            axes = (0, 1, *(a + 1 for a in eqn.params["axes"] if a != 0))
            value = _STACK_FOLDS[name](self._neutral(packed, name.removeprefix("reduce_"), layout), axis=axes)
            self._whole[var] = value.astype(var.aval.dtype)
            return
        results = evaluate_equation(eqn, [self._full(a) for a in eqn.invars])
        self._whole.update(zip(eqn.outvars, results))

    def _fold(self, eqn: JaxprEqn) -> bool:
        """A chain of the same associative operation over lanes (a global norm): terms of one kind are folded at once."""
        program, name = self.program, eqn.primitive.name
        terms: list[Any] = []
        pending: list[Any] = [eqn]
        while pending:
            for a in pending.pop().invars:
                source = program.defined.get(a) if isinstance(a, Var) else None
                inner: Any = program.jaxpr.eqns[source[0]] if source is not None else None
                single = inner is not None and inner.primitive.name == name and program.uses[a] == 1
                if single and inner.outvars[0].aval == eqn.outvars[0].aval:
                    pending.append(inner)
                else:
                    terms.append(a)
        if len(terms) < 3:
            return False
        by_kind: dict[int, dict[tuple[LaneLayout, int], list[Var]]] = {}
        rest = []
        for a in terms:
            signature = program.signature.get(a) if isinstance(a, Var) else None
            if signature is None:
                rest.append(a)
            else:
                by_kind.setdefault(signature[0], {}).setdefault(signature[1], []).append(a)
        complete = [
            per_lane
            for per_lane in by_kind.values()
            if len({layout for layout, _ in per_lane}) == 1
            and len(per_lane) == next(iter(per_lane))[0].num_lanes
            and len({len(v) for v in per_lane.values()}) == 1
        ]
        if not complete:
            return False
        rest += [
            a
            for per_lane in by_kind.values()
            if not any(per_lane is c for c in complete)
            for group in per_lane.values()
            for a in group
        ]
        value = None

        def combine(new):
            nonlocal value
            value = new if value is None else _batched(eqn, [(value, False), (new, False)])[0]

        for per_lane in complete:
            layout = next(iter(per_lane))[0]
            for column in zip(*(per_lane[layout, k] for k in range(layout.num_lanes))):
                packed = self._as_packed(*self._lane(column, layout), column[0], layout)
                folded = _FOLDS[name](self._neutral(packed, name, layout), axis=(0, 1))
                combine(folded.astype(eqn.outvars[0].aval.dtype))
        for a in rest:
            combine(self._full(a))
        self._whole[eqn.outvars[0]] = value
        return True

    def _neutral(self, packed, name: str, layout: LaneLayout) -> Any:
        """`packed` with the padding replaced by what does not change the fold."""
        if layout.is_full:
            return packed
        dtype = packed.dtype
        low, high = (
            (False, True)
            if dtype == jnp.bool_
            else (-np.inf, np.inf)
            if jnp.issubdtype(dtype, jnp.inexact)
            else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        )
        neutral = {
            "sum": 0,
            "add": 0,
            "add_any": 0,
            "prod": 1,
            "mul": 1,
            "max": low,
            "min": high,
            "and": True,
            "or": False,
        }
        return jnp.where(layout.mask(packed.ndim), packed, jnp.asarray(neutral[name], dtype))

    # Stacks `[L, ...]`, packed.

    def _stack(self, atom: Atom, layout: LaneLayout) -> Any:
        program = self.program
        if not isinstance(atom, Var) or program.stacked.get(atom) != layout:
            return self._spread(atom, layout)
        if atom not in self._stack_values:
            eqn = program.jaxpr.eqns[program.defined[atom][0]]
            name, params = eqn.primitive.name, eqn.params
            lead = (layout.num_stages, layout.depth)
            if name in _STACK_FOLDS:
                axes = tuple(a + 1 for a in params["axes"])
                value = _STACK_FOLDS[name](self._stack(eqn.invars[0], layout), axis=axes).astype(atom.aval.dtype)
            elif name == "broadcast_in_dim":
                dims = (0, 1, *(d + 1 for d in params["broadcast_dimensions"][1:]))
                value = lax.broadcast_in_dim(self._stack(eqn.invars[0], layout), (*lead, *params["shape"][1:]), dims)
            else:
                operands = [self._full(a) if a.aval.shape == () else self._stack(a, layout) for a in eqn.invars]
                if any(np.shape(o) == () for o in operands) and name not in (
                    "select_n",
                    "clamp",
                    "convert_element_type",
                ):
                    shape = (*lead, *atom.aval.shape[1:])
                    operands = [
                        jnp.broadcast_to(jnp.asarray(o, a.aval.dtype), shape) for o, a in zip(operands, eqn.invars)
                    ]
                value = evaluate_equation(eqn, operands)[0]
            self._stack_values[atom] = value
        return self._stack_values[atom]

    def _spread(self, atom: Atom, layout: LaneLayout) -> Any:
        """A value that is not made from a stack, packed; what is the same for all blocks is spread when it is needed."""
        source = self.program.defined.get(atom) if isinstance(atom, Var) else None
        if source is not None:
            eqn = self.program.jaxpr.eqns[source[0]]
            dims = eqn.params.get("broadcast_dimensions", ())
            operand = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1 else None
            if operand is not None and (0 not in dims or operand.aval.shape[dims.index(0)] == 1):
                value = jnp.asarray(self._full(operand), atom.aval.dtype)
                one_block = lax.broadcast_in_dim(value, (1, *atom.aval.shape[1:]), dims)
                return jnp.broadcast_to(one_block, (layout.num_stages, layout.depth, *atom.aval.shape[1:]))
        self.program.warn_of_stack(atom, layout)
        return layout.pack_stack(self._full(atom))


def _batched(eqn: JaxprEqn, operands: Sequence[tuple[Any, bool]]) -> list[Any]:
    """One equation, vectorised over the `[P, N]` axes of the operands that have them."""
    if not any(lane for _, lane in operands):
        return evaluate_equation(eqn, [value for value, _ in operands])

    def run(*lanes):
        feed = iter(lanes)
        return evaluate_equation(eqn, [next(feed) if lane else value for value, lane in operands])

    return jax.vmap(jax.vmap(run))(*(value for value, lane in operands if lane))


@contextmanager
def _deep_recursion():
    """A value may hang on a chain of thousands of equations."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def lane_leaves(jaxpr: Jaxpr, groups: Sequence[tuple[Atom, ...]]) -> list[tuple[Var, ...]]:
    """The input tuples `(one input per lane)` that `groups` are made of, found by walking all lanes back in step."""
    defined = defining_equations(jaxpr.eqns)
    shapes: dict[int, Any] = {}

    def shape(index):
        if index not in shapes:
            shapes[index] = equation_shape(jaxpr.eqns[index])
        return shapes[index]

    inputs = set(jaxpr.invars)
    found: dict[tuple[Var, ...], None] = {}
    seen: set[tuple] = set()
    pending = [tuple(g) for g in groups]
    while pending:
        atoms = pending.pop()
        if not all(isinstance(a, Var) for a in atoms) or atoms in seen or len(set(atoms)) != len(atoms):
            continue
        seen.add(atoms)
        if all(a in inputs for a in atoms):
            found.setdefault(atoms)
            continue
        sources: list[Any] = [defined.get(a) for a in atoms]
        if any(s is None for s in sources):
            continue
        if len({s[1] for s in sources}) == 1 and all(shape(s[0]) == shape(sources[0][0]) for s in sources[1:]):
            pending.extend(zip(*(jaxpr.eqns[s[0]].invars for s in sources)))
    return list(found)
