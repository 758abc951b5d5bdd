"""Take every microbatch as a batch of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
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
    move once a step, by the mean of what the microbatches say), such integers are summed, but terms that do not follow the batch
    count once (a running count grows by the sum of what is added to it), flags are true where all or any of the microbatches' are,
    as `all` or `any` made them. Random draws are the microbatch's rows of the whole draw.

    Args as for `microbatch`; `micro` is traced at `rows_micro` rows. Raises NotSeparableError where the two are different
    programs, and for counts and flags that microbatches do not add up to.
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
    negated: set[int] = set()  # sums of flags are true where any is
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
            elif b.aval.dtype == bool and not counts.is_any(b):
                b = walker.insert(lambda x: ~x, [b], None, Partial())
                negated.add(n)
            walker.status[b] = Partial()
        outvars.append(b)
    update_domains()
    kept = [e for e, needed in zip(walker.eqns, live_equations(walker.eqns, outvars)) if needed]
    pipeline = make_jaxpr(micro.jaxpr.constvars, [*micro.jaxpr.invars, walker.numbers], outvars, kept)
    results = [_compat.new_var(a.aval) for a in full.jaxpr.outvars]
    final, after = list(results), []
    for n in negated:
        flip = jax.make_jaxpr(jnp.logical_not)(jax.ShapeDtypeStruct(results[n].aval.shape, bool)).jaxpr.eqns[0]
        final[n] = _compat.new_var(results[n].aval)
        after.append(flip.replace(invars=[results[n]], outvars=[final[n]]))

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
        ClosedJaxpr(make_jaxpr([], [*full.jaxpr.invars, *results], final, after), []),
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


# Equations of one operand that take a whole number added to it to one added to their result.
_LINEAR = frozenset(
    {
        "round",
        "floor",
        "ceil",
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


_SUMS = frozenset({"add", "sub", "concatenate", "stack"})
_HANDLED = _LINEAR | _SUMS | {"scatter-add", "mul", "select_n"}


class _Counts:
    """Running counts: which part of an integer that follows the batch does not follow it.

    Of `old + 1 + sum(mask)` of every microbatch, summed, `old + 1` must not count as often as there are microbatches.

    Attributes:
      whole: integers that do not follow the batch, and real numbers that are whole because they are made of them.
      broken: real numbers that do not follow the batch, made of inputs and perhaps not whole.
      given: those of `whole` that are made of inputs, not of constants only.
      reached: values that follow the batch and may hold one of these as a term.
    """

    def __init__(self, walker: Walker, domain: dict[Var, Domain], sized: _Sized, inputs: Sequence[Var]):
        self.walker, self.domain, self.sized = walker, domain, sized
        self.defined = {v: e for e in walker.eqns for v in e.outvars}
        self.known: dict[Var, Atom | None] = {}
        known = {v for v in inputs if not domain[v] & Domain.BATCH}
        self.whole = {v for v in known if _is_integer(v)}
        self.given = set(self.whole)
        self.broken = known - self.whole
        self.reached: set[Var] = set()
        for eqn in walker.eqns:
            name, operands = eqn.primitive.name, [a for a in eqn.invars if isinstance(a, Var)]
            if any(a in known for a in operands):
                known.update(eqn.outvars)
            sources = [a for a in operands if a in self.given or a in self.broken or a in self.reached]
            for v in eqn.outvars:
                if not _is_number(v):
                    continue
                if self._follows(v):
                    if name in _HANDLED or any(a in self.reached or a.aval.shape == v.aval.shape for a in sources):
                        self.reached.add(v)
                elif _is_integer(v) or (self._stays_whole(eqn) and (sources or not operands)):
                    self.whole.add(v)
                    if v in known:
                        self.given.add(v)
                elif v in known:
                    self.broken.add(v)

    def _stays_whole(self, eqn: JaxprEqn) -> bool:
        """Whether a real number is whole because the operands are."""
        return eqn.primitive.name in _LINEAR | _SUMS | {"mul"} and all(
            _is_whole(a) if isinstance(a, Literal) else a in self.whole for a in eqn.invars
        )

    def _follows(self, var: Var) -> bool:
        """Whether a value follows the batch or its size."""
        return var in self.sized.values or bool(self.domain[var] & Domain.BATCH)

    def carried(self, value: Atom) -> Atom | None:
        """The part of an integer that does not follow the batch, None where there is none.

        Raises NotSeparableError where a given one is mixed with the batch in another way than by sums.
        """
        if isinstance(value, Literal) or value not in self.reached:
            return None
        if value not in self.known:
            eqn = self.defined[value]
            try:
                self.known[value] = self._carried(value, eqn)
            except RecursionError:
                # An integer made of all layers of a model.
                raise self._refusal(eqn) from None
        return self.known[value]

    def _carried(self, value: Var, eqn: JaxprEqn) -> Atom | None:
        name, operands = eqn.primitive.name, eqn.invars
        follows = [
            self._follows(a) if isinstance(a, Var) else (eqn.outvars[0], i) in self.sized.literals
            for i, a in enumerate(operands)
        ]

        def part(i: int) -> Atom | None:
            atom = operands[i]
            if value in self.sized.rows and atom.aval.shape != value.aval.shape:
                return None  # once for each row
            if isinstance(atom, Literal):
                return None if follows[i] or not _is_whole(atom) or not np.any(atom.val) else atom
            if atom in self.broken:
                raise self._refusal(eqn)
            return self.carried(atom) if follows[i] else atom if atom in self.whole else None

        def with_operands(*new: Atom) -> Var:
            result = _compat.new_var(value.aval)
            self.walker.eqns.append(eqn.replace(invars=list(new), outvars=[result]))
            self.walker.status[result] = Shared()
            if any(isinstance(a, Var) and a in self.given for a in new):
                self.given.add(result)
            return result

        def or_zero(found: Atom | None, i: int) -> Atom:
            return self.walker.insert(lambda x: x * 0, [operands[i]], eqn, Shared()) if found is None else found

        if name in _LINEAR and len(operands) == 1:
            found = part(0) if follows[0] else None
            return None if found is None else with_operands(found)
        if name in _SUMS:
            parts = [part(i) for i in range(len(operands))]
            if all(p is None for p in parts):
                return None
            return with_operands(*(or_zero(p, i) for i, p in enumerate(parts)))
        if name == "scatter-add":
            return part(0)
        if sum(follows) == 1 and (name == "mul" or (name == "div" and follows[0])):
            i = follows.index(True)
            found = part(i)
            if found is not None and name == "div":
                raise self._refusal(eqn)
            return None if found is None else with_operands(*(found if k == i else a for k, a in enumerate(operands)))
        if name == "select_n":
            parts = [part(i) for i in range(1, len(operands))]
            if all(p is parts[0] for p in parts):
                return parts[0]
            if not follows[0]:
                return with_operands(operands[0], *(or_zero(p, i) for i, p in enumerate(parts, 1)))
        for i, atom in enumerate(operands):
            held = part(i) if follows[i] or atom.aval.shape == value.aval.shape else None
            if isinstance(held, Var) and held in self.given:
                raise self._refusal(eqn)
        return None

    def is_any(self, flag: Var) -> bool:
        """Whether a flag that follows the batch is made by `any`, and not by `all`. Raises NotSeparableError if by neither."""
        found = self._flag(flag)
        if found not in ("any", "all"):
            eqn = self.defined.get(flag)
            raise NotSeparableError(
                "semantics='per_microbatch' puts flags that follow the batch together with `all` or `any`, as they were made. "
                f"`{eqn.primitive.name if eqn else 'flag'}` at {_compat.source_line(eqn) if eqn else 'an unknown line'} makes one "
                "in another way: return an integer, which is summed, or one flag for each row."
            )
        return found == "any"

    def _flag(self, atom: Atom) -> str:
        """How microbatches' flags belong together: "any", "all", "" if in another way; "same" if it does not follow the batch."""
        if isinstance(atom, Literal) or not self._follows(atom):
            return "same"
        eqn = self.defined.get(atom)
        name = eqn.primitive.name if eqn is not None else ""
        if eqn is None or atom.aval.dtype != bool:
            return ""
        if name in ("reduce_and", "reduce_or"):
            return "all" if name == "reduce_and" else "any"
        found = {self._flag(a) for a in eqn.invars} - {"same"}
        only = found.pop() if len(found) == 1 else ""
        if name == "not":
            return {"all": "any", "any": "all"}.get(only, "")
        wanted = {"and": ("all",), "or": ("any",)}.get(name, ("all", "any") if name in _LINEAR else ())
        return only if only in wanted else ""

    def _refusal(self, eqn: JaxprEqn) -> NotSeparableError:
        return NotSeparableError(
            "semantics='per_microbatch' sums integers that follow the batch, and counts terms that do not follow it once. "
            f"`{eqn.primitive.name}` at {_compat.source_line(eqn)} mixes the two in another way than by a sum: return the "
            "batch's part of it, and put the two together after the gradient."
        )


def _is_integer(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.integer)


def _is_number(var: Var) -> bool:
    return _is_integer(var) or jnp.issubdtype(var.aval.dtype, jnp.floating)


def _is_whole(literal: Literal) -> bool:
    value = np.asarray(literal.val)
    return value.dtype != bool and bool(np.all(value == np.round(value)))
