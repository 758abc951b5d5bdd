"""Small tools on flat jaxprs: evaluate them under any mesh context, cut a sub-program out, move constants to inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat

Atom: TypeAlias = Var | Literal


def make_jaxpr(constvars, invars, outvars, eqns) -> Jaxpr:
    """A jaxpr from its parts, with the effects of its equations."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    return Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info=_compat.no_debug_info())


def live_equations(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], *, keep_effects: bool = True) -> list[bool]:
    """Which equations the outputs need; those with effects (a debug print) are needed too."""
    needed = {a for a in outvars if isinstance(a, Var)}
    flags = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        if (keep_effects and eqns[i].effects) or any(v in needed for v in eqns[i].outvars):
            flags[i] = True
            needed.update(a for a in eqns[i].invars if isinstance(a, Var))
    return flags


def evaluate_equation(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation on `operands`, bound under the caller's mesh and not the one it was traced in.

    What it becomes keeps its lines.
    """
    with _compat.source_of(eqn):
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any, special: Callable | None = None) -> list[Any]:
    """The outputs of a flat jaxpr; `special(eqn, operands)` may return results for an equation, or None."""
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts))
    env.update(zip(jaxpr.invars, args))
    last = last_uses(jaxpr)

    def read(atom: Atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        operands = [read(a) for a in eqn.invars]
        results = special(eqn, operands) if special is not None else None
        if results is None:
            results = evaluate_equation(eqn, operands)
        env.update(zip(eqn.outvars, results))
        for atom in eqn.invars:
            if isinstance(atom, Var) and last.get(atom) == index:
                env.pop(atom, None)
    return [read(a) for a in jaxpr.outvars]


def last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    """The index of the last equation that reads each variable; outputs are never last used."""
    last = {a: i for i, eqn in enumerate(jaxpr.eqns) for a in eqn.invars if isinstance(a, Var)}
    for atom in jaxpr.outvars:
        if isinstance(atom, Var):
            last[atom] = len(jaxpr.eqns)
    return last


def function_of(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """`closed` as a Python function from flat arguments to a flat list."""
    return lambda *args: evaluate(closed.jaxpr, closed.consts, *args)


def defining_equations(eqns: Iterable[JaxprEqn]) -> dict[Var, tuple[int, int]]:
    """For each variable the (equation index, output index) that defines it."""
    return {v: (i, o) for i, eqn in enumerate(eqns) for o, v in enumerate(eqn.outvars) if isinstance(v, Var)}


def slice_program(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom]) -> Jaxpr:
    """The jaxpr `inputs -> outputs` made of the equations that `outputs` need; raises KeyError on a free variable."""
    needed = {a for a in outputs if isinstance(a, Var)} - set(inputs)
    kept = []
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.difference_update(eqn.outvars)
            needed.update(a for a in eqn.invars if isinstance(a, Var))
            needed.difference_update(inputs)
    if needed:
        raise KeyError(f"free variables {sorted(str(v.aval) for v in needed)}")
    return make_jaxpr([], list(inputs), list(outputs), kept[::-1])


def constants_to_inputs(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """`(jaxpr whose first inputs were its constants, the constants)`."""
    jaxpr = closed.jaxpr
    return make_jaxpr([], [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns), list(closed.consts)


def like(sequence: tuple | list, items: Iterable[Any]) -> tuple:
    """`items` as a tuple of the kind of `sequence`: parameters of an equation may be named tuples."""
    kind: Any = type(sequence)
    return kind(*items) if hasattr(sequence, "_fields") else tuple(items)


def is_dropped(var: Any) -> bool:
    """Whether an output position of an equation is never read."""
    return type(var).__name__ == "DropVar"
