"""Which inputs of a program the values of the blocks are made of, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Var

from merak_jax.partition.fingerprint import equation_shape
from merak_jax.tracing.jaxprs import Atom, defining_equations


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
