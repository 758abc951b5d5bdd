"""Results of a remat or scan that need not be computed in it: operands passed on, random keys, counters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

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


def counted_apart(eqn: JaxprEqn, operands: list) -> tuple[list[JaxprEqn], dict[int, Any]]:
    """Compute results of a remat or scan that no real number goes into beside it: `(equations, {result: its value})`.

    nnx returns the counters of random streams from nnx.remat and nnx.scan, next to activations; within one equation they
    would look as if they depended on the batch.
    """
    name = eqn.primitive.name
    if name not in REMAT | {"scan"} or not any(_is_whole(v) for v in eqn.outvars):
        return [], {}
    inner = eqn.params["jaxpr"]
    inner, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, [])
    num_consts, num_carry = (eqn.params[k] for k in ("num_consts", "num_carry")) if name == "scan" else (0, 0)
    real = {v for v in [*inner.constvars, *inner.invars] if not _is_whole(v)}
    while True:
        tainted = set(real)
        for e in inner.eqns:
            if e.effects or any(isinstance(a, Var) and a in tainted for a in e.invars):
                tainted.update(e.outvars)
        carried = inner.invars[num_consts : num_consts + num_carry]
        more = {i for i, o in zip(carried, inner.outvars) if isinstance(o, Var) and o in tainted} - real
        if not more:
            break
        real |= more
    untouched = passed_on(eqn)
    wanted = [
        n
        for n, o in enumerate(inner.outvars)
        if n not in untouched and isinstance(o, Var) and o not in tainted and (n >= num_carry or carried[n] not in real)
    ]
    if not wanted or len(wanted) == len(inner.outvars):
        return [], {}
    if name != "scan":
        rename: dict[Var, Any] = dict(zip(inner.invars, operands))
        made = []
        for e, needed in zip(inner.eqns, live_equations(inner.eqns, [inner.outvars[n] for n in wanted])):
            if needed:
                outvars = [_compat.new_var(v.aval) for v in e.outvars]
                made.append(
                    e.replace(
                        invars=[a if isinstance(a, Literal) else rename.get(a, a) for a in e.invars], outvars=outvars
                    )
                )
                rename.update(zip(e.outvars, outvars))
        return made, {n: rename[inner.outvars[n]] for n in wanted}
    # Carries that are not tainted are all kept: the results may need them.
    kept = sorted({n for n in range(num_carry) if carried[n] not in real} | set(wanted))
    kept_carries = [n for n in kept if n < num_carry]
    outs = [inner.outvars[n] for n in kept]
    body = [e for e, needed in zip(inner.eqns, live_equations(inner.eqns, outs)) if needed]
    read = {a for e in body for a in e.invars if isinstance(a, Var)} | {a for a in outs if isinstance(a, Var)}
    inputs = [
        i
        for i, v in enumerate(inner.invars)
        if (i - num_consts in kept_carries if num_consts <= i < num_consts + num_carry else v in read)
    ]
    constants = [(v, c) for v, c in zip(inner.constvars, consts) if v in read]
    jaxpr = make_jaxpr([v for v, _ in constants], [inner.invars[i] for i in inputs], outs, body)
    params = {
        **eqn.params,
        "jaxpr": ClosedJaxpr(jaxpr, [c for _, c in constants]),
        "num_consts": sum(i < num_consts for i in inputs),
        "num_carry": len(kept_carries),
    }
    outvars = [_compat.new_var(eqn.outvars[n].aval) for n in kept]
    new = eqn.replace(invars=[operands[i] for i in inputs], outvars=outvars, params=params, effects=jaxpr.effects)
    return [new], {n: outvars[kept.index(n)] for n in wanted}


def _is_whole(var: Var) -> bool:
    """Whether a value is made of integers, booleans or random keys."""
    return not jnp.issubdtype(var.aval.dtype, jnp.inexact)
