"""Run a flat jaxpr with what is the same for every block done once, batched over `[P, N]`: the re-rolled update."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax.partition.fingerprint import equation_shape
from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.evaluation import Evaluation
from merak_jax.runtime.folds import ELEMENTWISE, STACK_FOLDS, is_fold
from merak_jax.tracing.jaxprs import Atom, defining_equations


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
        *,
        differentiated: bool = False,
    ):
        self.jaxpr, self.names, self.has_warned = jaxpr, names or {}, False
        self.differentiated = differentiated
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
        if name in STACK_FOLDS:
            return 0 not in eqn.params["axes"] and is_fold(name.removeprefix("reduce_"), eqn.outvars[0].aval.dtype)
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


def _identity(atom: Atom) -> Any:
    return (str(atom.aval), np.asarray(atom.val).tobytes()) if isinstance(atom, Literal) else atom
