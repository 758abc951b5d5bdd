"""Take every microbatch as a batch of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError
from merak_jax.tracing.jaxprs import live_equations, make_jaxpr
from merak_jax.tracing.matching import equal_values, merge
from merak_jax.tracing.microbatch import Domain, MicrobatchedLoss, assembled, undivided, variables
from merak_jax.tracing.rows import Atom, Walker, differing_axes
from merak_jax.tracing.separability import Batched, Partial, Shared, Status, Uniform


def own_batches(
    full: ClosedJaxpr,
    micro: ClosedJaxpr,
    statuses: Sequence[Status],
    domains: Sequence[Domain],
    *,
    rows_full: int,
    rows_micro: int,
    differentiated: bool = True,
) -> MicrobatchedLoss:
    """Take every microbatch as a batch of its own: the loss is the mean of the microbatches' losses, as the user wrote it.

    Of the other outputs, rows are put together, real numbers that depend on the batch or its size are averaged (so running averages
    move once a step, by the mean of what the microbatches say), such integers are summed, but for what they carry from the state
    (a running count grows by the sum of what is added to it). Random draws are the microbatch's rows of the whole draw.

    Args as for `microbatch`; `micro` is traced at `rows_micro` rows. Raises NotSeparableError where the two are different
    programs.
    """
    if rows_full == rows_micro:
        return undivided(micro, domains, rows_full)
    if rows_micro == 1:
        raise NotSeparableError(
            "semantics='per_microbatch' needs microbatches of at least two rows; take fewer microbatches or a larger batch"
        )
    merge(full.jaxpr, micro.jaxpr)
    count = rows_full // rows_micro
    walker = Walker(rows_full, rows_micro, own=True)
    domain: dict[Var, Domain] = dict.fromkeys(micro.jaxpr.constvars, Domain.CONSTANT)
    walker.status.update((v, Shared()) for v in micro.jaxpr.constvars)
    domain.update((v, Domain(d)) for v, d in zip(micro.jaxpr.invars, domains))
    walker.status.update(zip(micro.jaxpr.invars, statuses))
    live = live_equations(micro.jaxpr.eqns, micro.jaxpr.outvars)
    for is_live, a, b in zip(live, full.jaxpr.eqns, micro.jaxpr.eqns):
        if is_live:
            walker.step(a, b)
    walker.status[walker.numbers], domain[walker.numbers] = Batched(0), Domain.BATCH

    def update_domains() -> None:
        for eqn in walker.eqns:
            union = Domain.CONSTANT
            for atom in eqn.invars:
                union |= domain[atom] if isinstance(atom, Var) else Domain.CONSTANT
            domain.update((v, union) for v in eqn.outvars)

    update_domains()
    outvars: list[Atom] = []
    sized = _Sized(full.jaxpr, micro.jaxpr)
    counts = _Counts(walker, domain, sized, micro.jaxpr.invars)
    for n, b in enumerate(micro.jaxpr.outvars):
        if sized.follow(full.jaxpr.outvars[n], b) and not (isinstance(b, Var) and domain[b] & Domain.BATCH):
            outvars.append(_over_microbatches(walker, full.jaxpr.outvars[n], b, count, counts))
            continue
        status = walker.read(b)
        if (
            isinstance(b, Var)
            and isinstance(status, Shared)
            and (n == 0 and differentiated or domain[b] & Domain.BATCH)
        ):
            if jnp.issubdtype(b.aval.dtype, jnp.inexact):
                b = walker.insert(lambda x: x / count, [b], None, Partial())
            elif (carried := counts.carried(b)) is not None:
                once = walker.once(carried, None)
                b = walker.insert(lambda x, old, new: x - old + new, [b, carried, once], None, Partial())
            walker.status[b] = Partial()
        outvars.append(b)
    update_domains()
    kept = [e for e, needed in zip(walker.eqns, live_equations(walker.eqns, outvars)) if needed]
    pipeline = make_jaxpr(micro.jaxpr.constvars, [*micro.jaxpr.invars, walker.numbers], outvars, kept)
    results = [_compat.new_var(a.aval) for a in full.jaxpr.outvars]

    def public(var: Var) -> Status:
        status = walker.status[var]
        return (
            Batched(status.axis, 1, var.aval.shape[status.axis] // rows_micro)
            if isinstance(status, Uniform)
            else status
        )

    return assembled(
        ClosedJaxpr(make_jaxpr([], full.jaxpr.invars, [], []), []),
        0,
        ClosedJaxpr(pipeline, micro.consts),
        {v: public(v) for v in variables(pipeline)},
        domain,
        ClosedJaxpr(make_jaxpr([], [*full.jaxpr.invars, *results], results, []), []),
    )


class _Sized:
    """Of two traces of one program, the values of the second that follow the number of rows they were traced with."""

    def __init__(self, full: Jaxpr, micro: Jaxpr):
        self.values: set[Var] = set()
        self.rows: set[Var] = set()  # those whose shape follows it
        self.literals: set[tuple[Var, int]] = set()  # of an equation, by its first result: which operands
        for a, b in zip(full.eqns, micro.eqns):
            differs = [self.follow(x, y) for x, y in zip(a.invars, b.invars)]
            if (
                any(differs)
                or _text(a.params) != _text(b.params)
                or [v.aval.shape for v in a.outvars] != [v.aval.shape for v in b.outvars]
            ):
                self.values.update(b.outvars)
            self.rows.update(y for x, y in zip(a.outvars, b.outvars) if x.aval.shape != y.aval.shape)
            self.literals.update((b.outvars[0], i) for i, yes in enumerate(differs) if yes)

    def follow(self, whole: Atom, own: Atom) -> bool:
        """Whether a value is another one in the trace of the whole batch."""
        if isinstance(own, Var):
            return own in self.values
        return not isinstance(whole, Literal) or not equal_values(np.asarray(whole.val), np.asarray(own.val))


def _text(params: dict) -> str:
    """The parameters of an equation as text, without the addresses of functions, which differ from trace to trace."""
    return re.sub(r"0x[0-9a-f]+|id=\d+", "", str(params))


def _over_microbatches(walker: Walker, whole: Atom, own: Atom, count: int, counts: _Counts) -> Atom:
    """An output that follows the number of rows but reads no row, and so is the same in every microbatch: an integer is summed."""
    axes = differing_axes(whole.aval, own.aval)
    if axes:
        # Every microbatch has its rows, all alike: they are put together.
        walker.status[own] = Uniform(axes[0])
        return own
    if not jnp.issubdtype(own.aval.dtype, jnp.integer):
        return own
    if isinstance(own, Literal):
        return Literal(np.asarray(own.val * count, own.aval.dtype)[()], own.aval)
    if (carried := counts.carried(own)) is not None:
        return walker.insert(lambda x, old: (x - old) * count + old, [own, carried], None, Shared())
    return walker.insert(lambda x: x * count, [own], None, Shared())


# Equations whose result is as linear in their first operand as it is.
_LINEAR = frozenset(
    {
        "neg",
        "convert_element_type",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "transpose",
        "reduce_sum",
        "slice",
        "rev",
        "copy",
    }
)


class _Counts:
    """Running counts: which part of an integer that follows the batch is what the step was given.

    `old + sum(mask)` of every microbatch, summed, would count `old` as often as there are microbatches.
    """

    def __init__(self, walker: Walker, domain: dict[Var, Domain], sized: _Sized, inputs: Sequence[Var]):
        self.walker, self.domain, self.sized = walker, domain, sized
        self.defined = {v: e for e in walker.eqns for v in e.outvars}
        self.known: dict[Var, Atom | None] = {}
        self.given = {v for v in inputs if not domain[v] & Domain.BATCH}
        for eqn in walker.eqns:
            if any(isinstance(a, Var) and a in self.given for a in eqn.invars):
                self.given.update(eqn.outvars)

    def _follows(self, atom: Atom, reader: JaxprEqn, i: int) -> bool:
        """Whether operand `i` of an equation follows the batch or its size."""
        if isinstance(atom, Var):
            return atom in self.sized.values or bool(self.domain[atom] & Domain.BATCH)
        return (reader.outvars[0], i) in self.sized.literals

    def carried(self, value: Atom) -> Atom | None:
        """The part of an integer that was given and does not follow the batch, None where there is none.

        Raises NotSeparableError where it is mixed with the batch in another way than by sums.
        """
        if isinstance(value, Literal) or value not in self.given or value not in self.defined:
            return None
        if value not in self.known:
            self.known[value] = self._carried(value, self.defined[value])
        return self.known[value]

    def _carried(self, value: Var, eqn: JaxprEqn) -> Atom | None:
        name, operands = eqn.primitive.name, eqn.invars
        follows = [self._follows(a, eqn, i) for i, a in enumerate(operands)]

        def part(i: int) -> Atom | None:
            atom = operands[i]
            if value in self.sized.rows and atom.aval.shape != value.aval.shape:
                return None  # once for each row
            if follows[i]:
                return self.carried(atom)
            return atom if isinstance(atom, Var) and atom in self.given else None

        def with_operands(*new: Atom) -> Var:
            result = _compat.new_var(value.aval)
            self.walker.eqns.append(eqn.replace(invars=list(new), outvars=[result]))
            self.walker.status[result] = Shared()
            return result

        def or_zero(found: Atom | None, i: int) -> Atom:
            return self.walker.insert(lambda x: x * 0, [operands[i]], eqn, Shared()) if found is None else found

        if not jnp.issubdtype(value.aval.dtype, jnp.integer):
            return None
        if name in _LINEAR and len(operands) == 1:
            integer = jnp.issubdtype(operands[0].aval.dtype, jnp.integer)
            found = part(0) if follows[0] and integer else None
            return None if found is None else with_operands(found)
        if name in ("add", "sub", "concatenate", "stack"):
            parts = [part(i) for i in range(len(operands))]
            if all(p is None for p in parts):
                return None
            return with_operands(*(or_zero(p, i) for i, p in enumerate(parts)))
        if name == "scatter-add":
            return part(0)
        parts = [part(i) for i in range(len(operands)) if operands[i].aval == value.aval]
        if all(p is None for p in parts):
            return None
        if name == "mul" and sum(follows) == 1:
            i = follows.index(True)
            found = part(i)
            return None if found is None else with_operands(*(found if k == i else a for k, a in enumerate(operands)))
        if name == "select_n":
            if all(p is parts[0] for p in parts):
                return parts[0]
            if not follows[0]:
                return with_operands(operands[0], *(or_zero(p, i) for i, p in enumerate(parts, 1)))
        raise NotSeparableError(
            "semantics='per_microbatch' sums integers that follow the batch, and takes what they carry from the state once. "
            f"`{name}` at {_compat.source_line(eqn)} mixes the two in another way than by a sum: return the batch's part of it, "
            "and put the two together after the gradient."
        )
