"""A scan over layers as a chain of blocks."""

from __future__ import annotations

import numpy as np
from jax.extend.core import JaxprEqn, Var

from merak_jax import _compat
from merak_jax.partition.chain import BATCH, BOTH, PARAMETER, Chain, LaneSlot, PlacedChain
from merak_jax.partition.outputs import aval_of, block_number, collect
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import Atom, is_dropped, make_jaxpr, slice_program


def scan_as_chain(eqn: JaxprEqn, domain, used, obstacles) -> PlacedChain | None:
    """A `scan` over layers as a chain: its body is the block, its `xs` that depend on parameters are the lanes."""
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, init, xs = (
        eqn.invars[:num_consts],
        eqn.invars[num_consts : num_consts + num_carry],
        eqn.invars[num_consts + num_carry :],
    )

    def depends(atom):
        return domain[atom] if isinstance(atom, Var) else 0

    if not any(depends(a) & BATCH for a in init) or not any(depends(x) & PARAMETER for x in xs):
        return None
    inner = inline(eqn.params["jaxpr"])
    obstacle = (
        "runs in reverse"
        if eqn.params["reverse"]
        else "reads values made of the batch layer by layer"
        if any(depends(x) & BATCH for x in xs)
        else "holds constant arrays of its own"
        if inner.consts
        else ""
    )
    if obstacle:
        obstacles.append(f"the scan over layers at {_compat.source_line(eqn)} {obstacle}")
        return None
    jaxpr = inner.jaxpr
    carry_vars = jaxpr.invars[num_consts : num_consts + num_carry]
    lane_vars = jaxpr.invars[num_consts + num_carry :]
    substitution: dict[Var, Atom] = dict(zip(jaxpr.invars[:num_consts], consts))
    # What depends on parameters and batch is the same for all layers, but made on the first stage: it travels along.
    passing = [c for c in dict.fromkeys(consts) if isinstance(c, Var) and domain[c] == BOTH]
    passed = {c: _compat.new_var(c.aval) for c in passing}
    substitution.update((v, passed[c]) for v, c in zip(jaxpr.invars, consts) if isinstance(c, Var) and c in passed)

    def read(atom):
        return substitution.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = [e.replace(invars=[read(a) for a in e.invars]) for e in jaxpr.eqns]
    outvars = [*(read(a) for a in jaxpr.outvars[:num_carry]), *passed.values()]
    carry_vars = [*carry_vars, *passed.values()]
    # What each layer returns is written into an array that travels along.
    stacked = [y for y in eqn.outvars[num_carry:] if y in used]
    number = _compat.new_var(aval_of((), np.int32))
    for y, atom in zip(eqn.outvars[num_carry:], jaxpr.outvars[num_carry:]):
        if y in used:
            made = read(atom)
            if not isinstance(made, Var):
                obstacles.append(
                    f"the scan over layers at {_compat.source_line(eqn)} returns a constant of every layer"
                )
                return None
            buffer, written, _ = collect(made.aval, made, number, eqn.params["length"])
            carry_vars.append(buffer)
            eqns += written
            outvars.append(written[-1].outvars[0])
    if stacked:
        lane_vars = [*lane_vars, number]
    rows = [c for c in dict.fromkeys(consts) if isinstance(c, Var) and domain[c] == BATCH]
    shared = [c for c in dict.fromkeys(consts) if isinstance(c, Var) and not domain[c] & BATCH]
    # What depends on lanes and shared values only is prepared once per step, outside the loops.
    varying: set[Var] = {*carry_vars, *rows}
    on_lanes: set[Var] = set(lane_vars)
    body_eqns = []
    for e in eqns:
        atoms = {a for a in e.invars if isinstance(a, Var)}
        if not atoms & varying and atoms & on_lanes and not e.effects:
            on_lanes.update(e.outvars)
            continue
        if atoms & varying or e.effects:
            varying.update(e.outvars)
        body_eqns.append(e)
    wanted = {a for e in body_eqns for a in e.invars if isinstance(a, Var)} | {a for a in outvars if isinstance(a, Var)}
    lane_out = [v for v in [*lane_vars, *(v for e in eqns for v in e.outvars)] if v in on_lanes and v in wanted]
    body = make_jaxpr([], [*carry_vars, *lane_out, *shared, *rows], outvars, body_eqns)
    prepare = slice_program(eqns, [*lane_vars, *shared], lane_out)
    chain = Chain(
        eqn.params["length"],
        body,
        len(carry_vars),
        (
            *(LaneSlot(stack=x) for x in xs),
            *([LaneSlot(tuple(map(block_number, range(eqn.params["length"]))))] if stacked else []),
        ),
        prepare,
        tuple(shared),
        tuple(rows),
        _compat.source_line(eqn),
    )
    final = {v: n for n, v in enumerate(eqn.outvars[:num_carry]) if not is_dropped(v)}
    final.update((c, num_carry + n) for n, c in enumerate(passing))
    final.update((y, len(carry_vars) - len(stacked) + n) for n, y in enumerate(stacked))
    return PlacedChain(chain, (*init, *passing, *[None] * len(stacked)), final, (eqn,))
