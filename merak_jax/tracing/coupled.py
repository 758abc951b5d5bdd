"""Take out of remats, conditionals and loops what couples the rows of the batch and needs no parameters: a count of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.tracing.jaxprs import like, live_equations, make_jaxpr
from merak_jax.tracing.matching import open_jaxpr
from merak_jax.tracing.side_results import REMAT

# A program traced at the full batch, and at another number of rows.
Pair = tuple[Jaxpr, Jaxpr]


def without_coupled(
    full: ClosedJaxpr, micro: ClosedJaxpr, parameters: Sequence[bool]
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """The same functions; what their remats, conditionals, scans reduce over the batch, parameters aside, is computed before them.

    Only at top level can such a value be made of the whole batch beforehand. It is computed whichever branch is taken. Of a
    scan, only what is the same at every turn.

    `parameters`: for each input whether it depends on more than the batch. Where the two programs differ they stay as they are:
    that is reported when they are matched.
    """
    new = _rewritten((full.jaxpr, micro.jaxpr), parameters)
    return ClosedJaxpr(new[0], full.consts), ClosedJaxpr(new[1], micro.consts)


def coupled_values(
    full: ClosedJaxpr, micro: ClosedJaxpr, parameters: Sequence[bool]
) -> tuple[frozenset[Var], frozenset[Var]]:
    """The values of each program, at top level, that are reductions of the batch, parameters aside."""
    found = _coupled((full.jaxpr, micro.jaxpr), parameters)
    made = [frozenset(v for n in found for v in p.jaxpr.eqns[n].outvars) for p in (full, micro)]
    return made[0], made[1]


def _rewritten(pair: Pair, parameters: Sequence[bool]) -> Pair:
    if _names(pair[0]) != _names(pair[1]):
        return pair
    depends = {v for v, yes in zip(pair[0].invars, parameters) if yes}
    eqns: tuple[list[JaxprEqn], list[JaxprEqn]] = ([], [])
    changed = False
    for both in zip(pair[0].eqns, pair[1].eqns):
        flags = [isinstance(a, Var) and a in depends for a in both[0].invars]
        if any(flags):
            depends.update(both[0].outvars)
        if any(flags) and (both[0].primitive.name in REMAT or both[0].primitive.name in ("cond", "scan")):
            found = _apart(both, flags)
            changed = changed or found is not None
            before, both = found or (([], []), both)
            eqns[0].extend(before[0])
            eqns[1].extend(before[1])
        eqns[0].append(both[0])
        eqns[1].append(both[1])
    if not changed:
        return pair
    return tuple(make_jaxpr(p.constvars, p.invars, p.outvars, e) for p, e in zip(pair, eqns))  # type: ignore[return-value]


def _names(jaxpr: Jaxpr) -> list[str]:
    return [e.primitive.name for e in jaxpr.eqns]


def _apart(both: tuple[JaxprEqn, JaxprEqn], flags: Sequence[bool]) -> tuple[tuple[list, list], Any] | None:
    """`(equations to run before, the equation that takes their results)`, each at both sizes; None: nothing to do."""
    is_cond, is_scan = both[0].primitive.name == "cond", both[0].primitive.name == "scan"
    values = [e.params["branches"] if is_cond else (e.params["jaxpr"],) for e in both]
    skipped = 1 if is_cond else 0
    # New operands come last, those of a scan behind its constants.
    place = both[0].params["num_consts"] if is_scan else len(flags)
    flags = [*flags[:place], *([True] * (len(flags) - place))]
    pairs: list[Pair] = [(open_jaxpr(a), open_jaxpr(b)) for a, b in zip(*values)]
    inner = [_rewritten(p, flags[skipped:]) for p in pairs]
    coupled = [_coupled(p, flags[skipped:]) for p in inner]
    if not any(coupled) and all(p is q for p, q in zip(inner, pairs)):
        return None
    before, new = [], []
    for side, eqn in enumerate(both):
        programs = [p[side] for p in inner]
        results = [[v for n in taken for v in j.eqns[n].outvars] for j, taken in zip(programs, coupled)]
        made: list[JaxprEqn] = []
        added: list[Var] = []
        for program, wanted in zip(programs, results):
            copies, outer = _copied(program, wanted, eqn.invars[skipped:])
            made += copies
            added += outer
        for k, (program, taken) in enumerate(zip(programs, coupled)):
            inputs = [v if i == k else _compat.new_var(v.aval) for i, own in enumerate(results) for v in own]
            kept = [e for n, e in enumerate(program.eqns) if n not in taken]
            kept = [e for e, live in zip(kept, live_equations(kept, program.outvars)) if live]
            programs[k] = make_jaxpr(
                program.constvars, _inserted(program.invars, place - skipped, inputs), program.outvars, kept
            )
        closed = [ClosedJaxpr(j, v.consts) if isinstance(v, ClosedJaxpr) else j for j, v in zip(programs, values[side])]
        param: dict[str, Any] = {"branches": like(values[side], closed)} if is_cond else {"jaxpr": closed[0]}
        if is_scan:
            param["num_consts"] = place + len(added)
        before.append(made)
        new.append(eqn.replace(invars=_inserted(eqn.invars, place, added), params={**eqn.params, **param}))
    return (before[0], before[1]), (new[0], new[1])


def _inserted(items: Sequence[Any], place: int, new: Sequence[Any]) -> list[Any]:
    return [*items[:place], *new, *items[place:]]


def _coupled(pair: Pair, parameters: Sequence[bool]) -> list[int]:
    """The equations that make a value without a batch dimension of one that has it, parameters aside."""
    if _names(pair[0]) != _names(pair[1]):
        return []
    depends = {*pair[0].constvars, *(v for v, yes in zip(pair[0].invars, parameters) if yes)}
    found = []
    for n, (a, b) in enumerate(zip(pair[0].eqns, pair[1].eqns)):
        if a.effects or any(isinstance(x, Var) and x in depends for x in a.invars):
            depends.update(a.outvars)
        elif not _same_shapes(a.invars, b.invars) and _same_shapes(a.outvars, b.outvars):
            found.append(n)
    return found


def _same_shapes(full: Sequence[Any], micro: Sequence[Any]) -> bool:
    return all(a.aval.shape == b.aval.shape for a, b in zip(full, micro))


def _copied(program: Jaxpr, wanted: Sequence[Var], operands: Sequence[Any]) -> tuple[list[JaxprEqn], list[Var]]:
    """`(the equations that `wanted` need, as equations on `operands`, the variables they make of it)`."""
    rename: dict[Var, Any] = dict(zip(program.invars, operands))
    made = []
    for eqn, needed in zip(program.eqns, live_equations(program.eqns, wanted, keep_effects=False)):
        if needed:
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            invars = [a if isinstance(a, Literal) else rename[a] for a in eqn.invars]
            made.append(eqn.replace(invars=invars, outvars=outvars))
            rename.update(zip(eqn.outvars, outvars))
    return made, [rename[v] for v in wanted]
