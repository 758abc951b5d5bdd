"""Find chains of equal blocks: tandem repeats of unrolled layers, and scans over layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.partition.chain import Chain, LaneSlot, PlacedChain
from merak_jax.partition.fingerprint import equation_numbers, equation_shape, same_literal
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import Atom, defining_equations, is_dropped, make_jaxpr, slice_program

PARAMETER, BATCH, BOTH = 1, 2, 3


def pipelined(program: Jaxpr, domain: Mapping[Var, int]) -> list[JaxprEqn]:
    """The equations that depend on parameters and on the batch."""
    return [e for e in program.eqns if any(domain[v] == BOTH for v in e.outvars if not is_dropped(v))]


def find_chains(
    program: Jaxpr, domain: Mapping[Var, int], obstacles: list[str], within: tuple[int, int] | None = None
) -> Iterator[PlacedChain]:
    """Chains in the pipelined part of `program`, the one that covers most equations first.

    `obstacles` gets, in words, why equal segments were no chain. `within`: only among these of the pipelined equations.
    """
    both = pipelined(program, domain)
    low, high = (0, len(both)) if within is None else within
    used = {a for e in program.eqns for a in e.invars if isinstance(a, Var)}
    used |= {a for a in program.outvars if isinstance(a, Var)}
    search = _Search(program, both, domain, obstacles)
    found: list[tuple[int, Any]] = []
    for eqn in both[low:high]:
        if eqn.primitive.name == "scan":
            placed = _scan_as_chain(eqn, domain, used, obstacles)
            if placed is not None and placed.chain.length >= 2:
                found.append((placed.chain.length * len(placed.chain.body.eqns), lambda placed=placed: iter([placed])))
    for start, period, repeats, slack in _tandem_repeats(both[low:high], domain):
        found.append((repeats * period, lambda a=(low + start, period, repeats, slack): _cuts_of_repeat(search, *a)))
    for _, make in sorted(found, key=lambda f: -f[0]):
        yield from make()


def _tandem_repeats(both: Sequence[JaxprEqn], domain) -> Iterator[tuple[int, int, int, int]]:
    """`(start, period, repeats, slack)` of runs of equations that equal those one period later, up to renaming."""
    shape = np.array(equation_numbers(both, domain), dtype=np.int64)
    n = len(shape)
    best = 0
    for period in range(1, n // 2 + 1):
        equal = shape[:-period] == shape[period:]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.view(np.int8), [0]])))
        for first, stop in zip(edges[::2], edges[1::2]):
            length = int(stop - first) + period
            repeats = length // period
            # Small repeats inside a block are not worth a look once a longer chain is known.
            if repeats >= 2 and repeats * period * 4 >= best:
                best = max(best, repeats * period)
                yield int(first), period, repeats, length - repeats * period


@dataclasses.dataclass(frozen=True)
class _Search:
    """What looking for a chain among the pipelined equations `both` needs, and what stood in its way."""

    program: Jaxpr
    both: list[JaxprEqn]
    domain: Mapping[Var, int]
    obstacles: list[str]

    @functools.cached_property
    def defined(self) -> dict[Var, tuple[int, int]]:
        return defining_equations(self.program.eqns)


def _cuts_of_repeat(search: _Search, start, period, repeats, slack) -> Iterator[PlacedChain]:
    """The cut points of a tandem repeat, those with the fewest live bytes first; then parts of it, the longest first."""
    program, both = search.program, search.both
    uses: dict[Var, int] = {a: i for i, e in enumerate(both) for a in e.invars if isinstance(a, Var)}
    uses.update({a: len(both) for a in program.outvars if isinstance(a, Var)})

    def live_bytes(phase: int) -> int:
        cut = start + phase + period
        return sum(
            _bytes(v)
            for e in both[start + phase : cut]
            for v in e.outvars
            if not is_dropped(v) and uses.get(v, -1) >= cut
        )

    phases = sorted(range(slack + 1), key=lambda p: (live_bytes(p), p))
    for phase in phases:
        placed = _repeat_as_chain(search, start + phase, period, repeats)
        if placed is not None:
            yield placed
    # The first or last blocks may be wired differently from the rest (they make a value that all others read).
    parts: list[PlacedChain] = []
    for phase in phases[:4]:
        parts.extend(_parts_of_repeat(search, start + phase, period, repeats))
    yield from sorted(parts, key=lambda part: -part.chain.length)


def _parts_of_repeat(search: _Search, start, period, repeats) -> Iterator[PlacedChain]:
    """Runs of blocks that do form chains, found from the left, each as long as possible."""
    first = 0
    while first < repeats - 1:
        longest, low, high = None, 2, repeats - first
        while low <= high:
            length = (low + high) // 2
            placed = _repeat_as_chain(search, start + first * period, period, length)
            if placed is None:
                high = length - 1
            else:
                longest, low = placed, length + 1
        if longest is not None:
            yield longest
        first += longest.chain.length if longest is not None else 1


def _bytes(var: Var) -> int:
    return int(np.prod(var.aval.shape)) * getattr(var.aval.dtype, "itemsize", 8)


def _repeat_as_chain(search: _Search, start, period, repeats) -> PlacedChain | None:
    """The chain made of equal segments, or None if their wiring differs."""
    try:
        return _wired_chain(search, start, period, repeats)
    except _Mismatch as mismatch:
        if len(search.obstacles) < 50:
            search.obstacles.append(str(mismatch))
        return None


def _wired_chain(search: _Search, start, period, repeats) -> PlacedChain:
    """The chain made of equal segments; _Mismatch if their wiring differs."""
    program, both, domain = search.program, search.both, search.domain
    segments = [both[start + k * period : start + (k + 1) * period] for k in range(repeats)]
    where: dict[Var, tuple[int, int, int]] = {
        v: (k, j, o)
        for k, segment in enumerate(segments)
        for j, e in enumerate(segment)
        for o, v in enumerate(e.outvars)
        if not is_dropped(v)
    }
    carry_init: dict[Any, Atom] = {}  # (j, o) of the previous block, or a passed-through Var -> initial value
    carry_in: dict[Any, Var] = {}
    lanes: dict[tuple, Var] = {}
    shared: dict[Var, None] = {}
    rows: dict[Var, None] = {}
    rename: dict[Var, Var] = {}
    inside_block: dict[tuple, Var] = {}
    body_eqns: list[JaxprEqn] = []

    def carry(key, init):
        if key in carry_init and carry_init[key] is not init:
            raise _Mismatch("the first block reads two values where later blocks read one")
        carry_init[key] = init
        return carry_in.setdefault(key, _compat.new_var(init.aval))

    def fail(j, what) -> _Mismatch:
        line = _compat.source_line(segments[1][j])
        return _Mismatch(f"of {repeats} equal blocks, `{segments[1][j].primitive.name}` at {line} {what}")

    def operand(j, i):
        atoms = [segment[j].invars[i] for segment in segments]
        places: list[Any] = [where.get(a) if isinstance(a, Var) else None for a in atoms]
        if all(p is not None and p[0] == k for k, p in enumerate(places)):
            if len({p[1:] for p in places}) != 1:
                raise fail(j, "reads another value of its own block than in other blocks")
            return rename[atoms[1]]
        if all(p is not None and p[0] == k - 1 for k, p in enumerate(places) if k > 0):
            if len({p[1:] for p in places[1:]}) != 1 or places[0] is not None:
                raise fail(j, "reads another value of the block before than in other blocks")
            return carry(places[1][1:], atoms[0])
        if any(p is not None for p in places):
            raise fail(j, "reads a value of an earlier block in some blocks only, or of a block further back")
        first = atoms[0]
        if all(isinstance(a, Literal) for a in atoms):
            if all(same_literal(first, a) for a in atoms):
                return first
        elif any(isinstance(a, Literal) for a in atoms):
            raise fail(j, "reads a constant in some blocks and a value in others")
        elif all(a is first for a in atoms):
            if domain[first] == BOTH:
                return carry(first, first)
            (rows if domain[first] & BATCH else shared).setdefault(first)
            return first
        elif any(domain[a] & BATCH for a in atoms):
            made = pulled(tuple(atoms))
            if made is None:
                raise fail(j, "reads a value made of the batch that differs from block to block")
            return made
        return lane(atoms)

    def lane(atoms):
        key = tuple(a if isinstance(a, Var) else id(a) for a in atoms)
        if key not in lanes:
            lanes[key] = (_compat.new_var(atoms[0].aval), tuple(atoms))
        return lanes[key][0]

    def pulled(atoms):
        """A value that each block makes of the batch in its own way (a dropout mask with the block's key), made in the block."""
        first = atoms[0]
        if all(a is first for a in atoms) and isinstance(first, Var):
            if domain[first] == BOTH:
                return None
            (rows if domain[first] & BATCH else shared).setdefault(first)
            return first
        if all(isinstance(a, Literal) for a in atoms):
            return first if all(same_literal(first, a) for a in atoms) else lane(atoms)
        if any(isinstance(a, Literal) for a in atoms):
            return None
        if not any(domain[a] & BATCH for a in atoms):
            return lane(atoms)
        if atoms in inside_block:
            return inside_block[atoms]
        places: list[Any] = [search.defined.get(a) for a in atoms]
        if any(p is None for p in places) or len({p[1] for p in places}) > 1 or any(domain[a] == BOTH for a in atoms):
            return None
        eqns = [program.eqns[p[0]] for p in places]
        if len({equation_shape(e) for e in eqns}) > 1 or eqns[0].effects:
            return None
        operands = [pulled(column) for column in zip(*(e.invars for e in eqns))]
        if any(o is None for o in operands):
            return None
        outvars = [_compat.new_var(v.aval) for v in eqns[0].outvars]
        body_eqns.append(eqns[0].replace(invars=operands, outvars=outvars))
        inside_block.update(zip(zip(*(e.outvars for e in eqns)), outvars))
        return inside_block[atoms]

    for j, eqn in enumerate(segments[1]):
        operands = [operand(j, i) for i in range(len(eqn.invars))]
        outvars = []
        for v in eqn.outvars:
            new = _compat.new_var(v.aval)
            if not is_dropped(v):
                rename[v] = new
            outvars.append(new)
        body_eqns.append(eqn.replace(invars=operands, outvars=outvars))
    if not any(isinstance(key, tuple) for key in carry_init):
        raise fail(0, "starts a block that reads nothing of the block before: they stand side by side")
    inside = set(where)
    later = [a for e in both[start + repeats * period :] for a in e.invars] + list(program.outvars)
    final: dict[Var, int] = {}
    extra: dict[tuple[int, int], Var] = {}
    collected: dict[tuple[int, int], set[Var]] = {}
    for atom in later:
        if isinstance(atom, Var) and atom in inside:
            k, j, o = where[atom]
            if k != repeats - 1:
                collected.setdefault((j, o), set()).add(atom)
            elif (j, o) not in carry_init:
                extra[(j, o)] = atom
    # A layer under remat is one equation too.
    if collected and period < 2 and not _compat.sub_jaxprs(segments[0][0]):
        raise fail(0, "is all there is of a block whose value is read later: products in a row, and no layers")
    keys = list(carry_init)
    positions = {key: n for n, key in enumerate(keys)}
    out = [rename[segments[1][key[0]].outvars[key[1]]] if isinstance(key, tuple) else carry_in[key] for key in keys]
    invars = [carry_in[key] for key in keys]
    initial: list[Any] = [carry_init[key] for key in keys]
    for (j, o), atom in extra.items():
        # Read after the last block only: its place in the carry starts as zeros.
        positions[(j, o)] = len(invars)
        invars.append(_compat.new_var(atom.aval))
        out.append(rename[segments[1][j].outvars[o]])
        initial.append(None)
    for atom in later:
        if isinstance(atom, Var) and atom in inside and where[atom][0] == repeats - 1:
            final[atom] = positions[where[atom][1:]]
    after: list[JaxprEqn] = []
    for (j, o), members in collected.items():
        made = segments[1][j].outvars[o]
        number = lane([_index(k) for k in range(repeats)])
        buffer, written, kept = _collect(made.aval, rename[made], number, repeats)
        body_eqns += written
        final[kept] = len(invars)
        invars.append(buffer)
        out.append(written[-1].outvars[0])
        initial.append(None)
        for atom in sorted(members, key=where.__getitem__):
            after += _taken(kept, where[atom][0], atom)
    for key in keys:
        if isinstance(key, Var):
            final[key] = positions[key]
    lane_vars = [v for v, _ in lanes.values()]
    slots = tuple(LaneSlot(values=atoms) for _, atoms in lanes.values())
    body = make_jaxpr([], [*invars, *lane_vars, *shared, *rows], out, body_eqns)
    identity = make_jaxpr([], [*lane_vars, *shared], lane_vars, [])
    chain = Chain(
        repeats, body, len(invars), slots, identity, tuple(shared), tuple(rows), _compat.source_line(segments[0][0])
    )
    return PlacedChain(chain, tuple(initial), final, tuple(e for segment in segments for e in segment), tuple(after))


def _index(k: int) -> Literal:
    """The number of a block, as an operand."""
    value = np.int32(k)
    return Literal(value, _aval((), np.int32))


def _aval(shape: Sequence[int], dtype: Any) -> Any:
    return jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(tuple(shape), dtype)).in_avals[0]


def _spliced(function: Any, operands: Sequence[Atom], result: Var | None = None) -> list[JaxprEqn]:
    """The equations of a small function of `operands`; the last one makes its result."""
    jaxpr = inline(
        jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands))
    ).jaxpr
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands))
    if result is not None:
        names[jaxpr.outvars[0]] = result
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [names.setdefault(v, _compat.new_var(v.aval)) for v in eqn.outvars]
        invars = [a if isinstance(a, Literal) else names[a] for a in eqn.invars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return eqns


def _collect(aval: Any, value: Var, number: Var, length: int) -> tuple[Var, list[JaxprEqn], Var]:
    """`(buffer [L, ...] that a block gets, equations that write its value at its number, the buffer after the last block)`."""
    whole = _aval((length, *aval.shape), aval.dtype)
    buffer = _compat.new_var(whole)

    def write(buffer, value, number):
        return jax.lax.dynamic_update_slice(buffer, value[None], [number, *[np.int32(0)] * value.ndim])

    return buffer, _spliced(write, [buffer, value, number]), _compat.new_var(whole)


def _taken(buffer: Var, k: int, result: Var) -> list[JaxprEqn]:
    """Equations for the value of block k, under the name that it has in the program."""
    return _spliced(lambda x: jax.lax.squeeze(jax.lax.slice_in_dim(x, k, k + 1), (0,)), [buffer], result)


class _Mismatch(Exception):
    """Two blocks are wired differently."""


def _scan_as_chain(eqn: JaxprEqn, domain, used, obstacles) -> PlacedChain | None:
    """A `scan` over layers as a chain: its body is the block, its `xs` that depend on parameters are the lanes."""
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, init, xs = (
        eqn.invars[:num_consts],
        eqn.invars[num_consts : num_consts + num_carry],
        eqn.invars[num_consts + num_carry :],
    )

    def depends(atom):
        return domain[atom] if isinstance(atom, Var) else 0

    if not any(depends(a) == BOTH for a in init) or not any(depends(x) & PARAMETER for x in xs):
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
    number = _compat.new_var(_aval((), np.int32))
    for y, atom in zip(eqn.outvars[num_carry:], jaxpr.outvars[num_carry:]):
        if y in used:
            made = read(atom)
            if not isinstance(made, Var):
                obstacles.append(
                    f"the scan over layers at {_compat.source_line(eqn)} returns a constant of every layer"
                )
                return None
            buffer, written, _ = _collect(made.aval, made, number, eqn.params["length"])
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
            *([LaneSlot(tuple(map(_index, range(eqn.params["length"]))))] if stacked else []),
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
