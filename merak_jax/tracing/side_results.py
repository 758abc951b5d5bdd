"""Results of a remat or scan that need not be computed in it: operands passed on, random keys, what needs no batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.tracing.jaxprs import live_equations, make_jaxpr

REMAT = frozenset({"checkpoint", "remat", "remat2"})
_KEYS = frozenset({"random_fold_in", "random_wrap", "random_unwrap"})


def passed_on(eqn: JaxprEqn) -> dict[int, int]:
    """Results of a remat or scan that are operands, untouched: `{result: operand}`. nnx.remat and nnx.scan return whole modules."""
    if eqn.primitive.name not in REMAT | {"scan"}:
        return {}
    inner = eqn.params["jaxpr"]
    inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    position = {v: i for i, v in enumerate(inner.invars)}
    found = {n: position[a] for n, a in enumerate(inner.outvars) if isinstance(a, Var) and a in position}
    if eqn.primitive.name != "scan":
        return found
    carries = eqn.params["num_carry"]
    first_stack = eqn.params["num_consts"] + carries
    return {n: i for n, i in found.items() if (i == eqn.params["num_consts"] + n if n < carries else i >= first_stack)}


def keys_outside(remat: JaxprEqn, operands: list) -> tuple[list[JaxprEqn], JaxprEqn, list]:
    """Derive the random keys of a remat before it: `(equations, remat that takes the keys, its operands)`.

    flax folds the path of a module into its keys, a number that differs from block to block. Inside a remat it would make
    blocks that do the same work look different.
    """
    inner = remat.params["jaxpr"]
    outer: dict[Var, Any] = dict(zip(inner.invars, operands))
    derived, keys, body = [], [], []
    for eqn in inner.eqns:
        if eqn.primitive.name not in _KEYS or not all(isinstance(a, Literal) or a in outer for a in eqn.invars):
            body.append(eqn)
            continue
        results = [_compat.new_var(v.aval) for v in eqn.outvars]
        derived.append(
            eqn.replace(invars=[a if isinstance(a, Literal) else outer[a] for a in eqn.invars], outvars=results)
        )
        outer.update(zip(eqn.outvars, results))
        keys.extend(eqn.outvars)
    if not derived:
        return [], remat, operands
    jaxpr = make_jaxpr(inner.constvars, [*inner.invars, *keys], inner.outvars, body)
    operands = [*operands, *(outer[key] for key in keys)]
    return derived, remat.replace(params={**remat.params, "jaxpr": jaxpr}), operands


def only_used(remat: JaxprEqn, operands: list) -> tuple[JaxprEqn, list]:
    """`(remat without results that are operands and without operands that it does not read, its operands)`.

    A function of a few layers under remat may be given the parameters of all.
    """
    inner = remat.params["jaxpr"]
    passed = passed_on(remat)
    results = [n for n in range(len(remat.outvars)) if n not in passed]
    outvars = [inner.outvars[n] for n in results]
    read = {a for a in [*outvars, *(a for e in inner.eqns for a in e.invars)] if isinstance(a, Var)}
    kept = [n for n, v in enumerate(inner.invars) if v in read]
    if not passed and len(kept) == len(inner.invars):
        return remat, operands
    jaxpr = make_jaxpr(inner.constvars, [inner.invars[n] for n in kept], outvars, inner.eqns)
    operands = [operands[n] for n in kept]
    outvars = [remat.outvars[n] for n in results]
    return remat.replace(invars=operands, outvars=outvars, params={**remat.params, "jaxpr": jaxpr}), operands


def without_side_results(
    closed: ClosedJaxpr, from_batch: Sequence[bool], known: frozenset[Var] = frozenset()
) -> ClosedJaxpr:
    """The same function; what a remat or scan computes without the batch is computed beside it.

    Within one equation a counter of random draws or the norm of a weight would look as if it depended on the batch, as the
    activations do that leave the equation with it.

    `from_batch`: for each constant and input of `closed`; `known`: values that count as made without the batch.
    """
    jaxpr, _ = _apart(closed.jaxpr, from_batch, known)
    return ClosedJaxpr(jaxpr, closed.consts)


def _apart(jaxpr: Jaxpr, from_batch: Sequence[bool], known: frozenset[Var] = frozenset()) -> tuple[Jaxpr, list[bool]]:
    """`(the program, which outputs depend on the batch)`."""
    depends = {v for v, yes in zip([*jaxpr.constvars, *jaxpr.invars], from_batch) if yes}
    renamed: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []

    def read(atom):
        return renamed.get(atom, atom) if isinstance(atom, Var) else atom

    for eqn in jaxpr.eqns:
        if any(isinstance(a, Var) and a in renamed for a in eqn.invars):
            eqn = eqn.replace(invars=[read(a) for a in eqn.invars])
        flags = [isinstance(a, Var) and a in depends for a in eqn.invars]
        if eqn.primitive.name not in REMAT | {"scan"} or not any(flags):
            eqns.append(eqn)
            if any(flags):
                depends.update(v for v in eqn.outvars if v not in known)
            continue
        eqn, found = _with_inner_apart(eqn, flags)
        beside, values = _beside(eqn, found)
        eqns += [*beside, eqn]
        values.update((n, eqn.invars[i]) for n, i in passed_on(eqn).items())
        renamed.update((eqn.outvars[n], value) for n, value in values.items())
        depends.update(v for v, yes in zip(eqn.outvars, found) if yes)
    outvars = [read(a) for a in jaxpr.outvars]
    new = make_jaxpr(jaxpr.constvars, jaxpr.invars, outvars, eqns) if renamed or _replaced(jaxpr, eqns) else jaxpr
    return new, [isinstance(a, Var) and a in depends for a in outvars]


def _replaced(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> bool:
    return len(eqns) != len(jaxpr.eqns) or any(a is not b for a, b in zip(eqns, jaxpr.eqns))


def _with_inner_apart(eqn: JaxprEqn, flags: list[bool]) -> tuple[JaxprEqn, list[bool]]:
    """`(the remat or scan with the same done inside, which results depend on the batch)`."""
    closed = eqn.params["jaxpr"]
    inner = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
    flags = list(flags)
    first = eqn.params["num_consts"] if eqn.primitive.name == "scan" else 0
    num_carry = eqn.params["num_carry"] if eqn.primitive.name == "scan" else 0
    while True:
        new, found = _apart(inner, [False] * len(inner.constvars) + flags)
        carried = [a or b for a, b in zip(flags[first : first + num_carry], found)]
        if carried == flags[first : first + num_carry]:
            break
        flags[first : first + num_carry] = carried
    if new is not inner:
        value = ClosedJaxpr(new, closed.consts) if isinstance(closed, ClosedJaxpr) else new
        eqn = eqn.replace(params={**eqn.params, "jaxpr": value})
    return eqn, [*flags[first : first + num_carry], *found[num_carry:]]


def _beside(eqn: JaxprEqn, from_batch: Sequence[bool]) -> tuple[list[JaxprEqn], dict[int, Any]]:
    """Equations for the results of a remat or scan that do not depend on the batch: `(equations, {result: its value})`."""
    closed = eqn.params["jaxpr"]
    inner, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, [])
    num_consts, num_carry = (
        (eqn.params[k] for k in ("num_consts", "num_carry")) if eqn.primitive.name == "scan" else (0, 0)
    )
    # All carries that do not depend on the batch, also one that becomes a constant: the results may need them.
    alone = [n for n, yes in enumerate(from_batch) if not yes and (n < num_carry or isinstance(inner.outvars[n], Var))]
    if not set(alone) - set(passed_on(eqn)):
        return [], {}
    outs = [inner.outvars[n] for n in alone]
    body = [e for e, needed in zip(inner.eqns, live_equations(inner.eqns, outs, keep_effects=False)) if needed]
    if eqn.primitive.name != "scan":
        rename: dict[Var, Any] = dict(zip(inner.invars, eqn.invars))
        made = []
        for e in body:
            outvars = [_compat.new_var(v.aval) for v in e.outvars]
            invars = [a if isinstance(a, Literal) else rename.get(a, a) for a in e.invars]
            made.append(e.replace(invars=invars, outvars=outvars))
            rename.update(zip(e.outvars, outvars))
        return made, {n: rename[o] for n, o in zip(alone, outs)}
    carries = [n for n in alone if n < num_carry]
    read = {a for a in [*outs, *(a for e in body for a in e.invars)] if isinstance(a, Var)}
    inputs = [
        i
        for i, v in enumerate(inner.invars)
        if (i - num_consts in carries if num_consts <= i < num_consts + num_carry else v in read)
    ]
    constants = [(v, c) for v, c in zip(inner.constvars, consts) if v in read]
    jaxpr = make_jaxpr([v for v, _ in constants], [inner.invars[i] for i in inputs], outs, body)
    params = {
        **eqn.params,
        "jaxpr": ClosedJaxpr(jaxpr, [c for _, c in constants]),
        "num_consts": sum(i < num_consts for i in inputs),
        "num_carry": len(carries),
    }
    outvars = [_compat.new_var(eqn.outvars[n].aval) for n in alone]
    new = eqn.replace(invars=[eqn.invars[i] for i in inputs], outvars=outvars, params=params, effects=jaxpr.effects)
    return [new], dict(zip(alone, outvars))
