"""Evaluate a re-rolled program: each value is computed when asked for, packed where blocks have their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from merak_jax.partition.fingerprint import same_literal
from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.folds import FOLDS, STACK_FOLDS, is_fold
from merak_jax.tracing.jaxprs import Atom, evaluate_equation

if TYPE_CHECKING:
    from merak_jax.runtime.reroll import Rerolled


class Evaluation:
    """Values of one run, computed when asked for and kept."""

    def __init__(self, program: Rerolled, lanes, stacks, whole):
        self.program = program

        def given(value, layout: LaneLayout):
            return layout.shielded(value) if program.differentiated else value

        self._lane_values: dict[tuple, tuple[Any, bool]] = {
            (group, layout): (given(value, layout), True)
            for (group, layout), value in zip(program.lanes.items(), lanes)
        }
        self._stack_values = {v: given(x, layout) for (v, layout), x in zip(program.stacks.items(), stacks)}
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
        return layout.spread(jnp.asarray(value, atom.aval.dtype) if isinstance(atom, Literal) else value)

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
        if program.differentiated and any(lane for _, lane in operands):
            operands = [
                (layout.spread(value), True)
                if not lane and isinstance(value, jax.Array) and layout.needs_shield(value)
                else (value, lane)
                for value, lane in operands
            ]
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
        if name in FOLDS and is_fold(name, var.aval.dtype) and self._fold(eqn):
            return
        folds = name in STACK_FOLDS and is_fold(name.removeprefix("reduce_"), var.aval.dtype)
        if folds and eqn.invars[0] in program.stacked:
            layout = program.stacked[eqn.invars[0]]
            packed = self._stack(eqn.invars[0], layout)
            axes = (0, 1, *(a + 1 for a in eqn.params["axes"] if a != 0))
            value = STACK_FOLDS[name](self._neutral(packed, name.removeprefix("reduce_"), layout), axis=axes)
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
                folded = FOLDS[name](self._neutral(packed, name, layout), axis=(0, 1))
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
            if name in STACK_FOLDS:
                axes = tuple(a + 1 for a in params["axes"])
                value = STACK_FOLDS[name](self._stack(eqn.invars[0], layout), axis=axes).astype(atom.aval.dtype)
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
                        layout.shielded(jnp.broadcast_to(jnp.asarray(o, a.aval.dtype), shape))
                        for o, a in zip(operands, eqn.invars)
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
                return layout.spread(one_block[0])
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


def _draws_otherwise_in_batches(eqn: JaxprEqn) -> bool:
    """Whether the equation uses keys whose draws change under `vmap`, as all but threefry's do."""
    keys = [a.aval.dtype for a in eqn.invars if jnp.issubdtype(a.aval.dtype, jax.dtypes.prng_key)]
    return any("fry" not in str(dtype) for dtype in keys)
