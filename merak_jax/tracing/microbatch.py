"""Prove that a loss can be computed microbatch by microbatch, and rewrite it so."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError
from merak_jax.tracing.jaxprs import live_equations, make_jaxpr
from merak_jax.tracing.matching import merge
from merak_jax.tracing.resize import resized
from merak_jax.tracing.rows import WAYS_OUT, Atom, Walker, differing_axes, numbers_variable
from merak_jax.tracing.separability import Batched, Partial, Shared, Status, Uniform

__all__ = [
    "Batched",
    "Domain",
    "MicrobatchedLoss",
    "Partial",
    "Shared",
    "Status",
    "microbatch",
    "rows_to_trace",
]


class Domain(enum.IntFlag):
    """What a value depends on; a value with a batch dimension depends on the batch."""

    CONSTANT = 0
    PARAMETER = 1
    BATCH = 2
    BOTH = 3


@dataclass(frozen=True)
class MicrobatchedLoss:
    """A loss in three programs: one runs on the full batch, then one on every microbatch, then one on what these add up to.

    Attributes:
      precompute: full size. Inputs of the loss -> values that depend on the batch only and can't be made row
        by row (a token count, a sort over the batch).
      precomputed_status: of its outputs, Shared or Batched (a microbatch gets its rows, as of a batch leaf).
      pipeline: microbatch size. [inputs of the loss, precomputed values, numbers] -> outputs of the loss, where numbers
        (uint32 [b]) are the places of the microbatch's rows in the whole batch. No dead equations.
      pipeline_status, pipeline_domain: of its inputs.
      out_status, out_domain: of its outputs. Output 0, the loss, is Partial (Shared if there is only one
        microbatch), so the gradient of the full-batch loss is the sum of the microbatches' gradients.
      postcompute: full size. [inputs of the loss, outputs of the pipeline for the whole batch] -> outputs of the loss; what is
        only reported may be any function of sums and rows.
      status, domain: of every variable of `pipeline`.
    """

    precompute: ClosedJaxpr
    precomputed_status: tuple[Status, ...]
    pipeline: ClosedJaxpr
    pipeline_status: tuple[Status, ...]
    pipeline_domain: tuple[Domain, ...]
    out_status: tuple[Status, ...]
    out_domain: tuple[Domain, ...]
    status: dict[Var, Status]
    domain: dict[Var, Domain]
    postcompute: ClosedJaxpr


def rows_to_trace(rows_full: int, rows_micro: int) -> int:
    """The number of rows to trace the second program at: b, but never 1, where JAX writes other equations."""
    if rows_micro > 1 or rows_full == rows_micro:
        return rows_micro
    return 2 if rows_full > 2 else 4


def microbatch(
    full: ClosedJaxpr,
    micro: ClosedJaxpr,
    statuses: Sequence[Status],
    domains: Sequence[Domain],
    *,
    rows_full: int,
    rows_micro: int,
    rows_traced: int | None = None,
    differentiated: bool = True,
) -> MicrobatchedLoss:
    """Rewrite a loss so that microbatches of `rows_micro` rows combine to the numbers of `rows_full` rows.

    Args:
      full, micro: the loss traced at both sizes, without nested `jit`; output 0 is the loss.
      statuses: of the inputs: Shared for parameters and values made before, Batched for batch leaves.
      domains: of the inputs.
      rows_full, rows_micro: B and b; B is a multiple of b.
      rows_traced: the rows that `micro` was traced at, see `rows_to_trace`; b if not given.
      differentiated: whether output 0 is a loss that gradients are taken of.

    Raises:
      NotSeparableError: the two are different programs, or a value that the loss needs is no function of
        single rows; the message has the user's source line and the ways out.
    """
    if len(statuses) != len(micro.jaxpr.invars) or len(domains) != len(statuses):
        raise ValueError(f"{len(micro.jaxpr.invars)} inputs, {len(statuses)} statuses, {len(domains)} domains")
    rows_traced = rows_micro if rows_traced is None else rows_traced
    if rows_full == rows_micro:
        return undivided(micro, domains, rows_full)
    if rows_full % rows_micro:
        raise ValueError(f"{rows_micro} rows do not divide {rows_full}")
    merged = merge(full.jaxpr, micro.jaxpr)
    if rows_traced != rows_micro:
        merged = resized(full.jaxpr, merged, rows_full, rows_traced, rows_micro)
    live = live_equations(full.jaxpr.eqns, full.jaxpr.outvars)
    split = _Split(full, merged, rows_full, rows_micro, differentiated)
    split.read_inputs(statuses, domains)
    for is_live, a, b in zip(live, full.jaxpr.eqns, merged.eqns):
        if is_live:
            split.equation(a, b)
    return split.finish()


class _Split:
    """Sorts the equations of the loss into the pipeline and what is made of the full batch before it."""

    def __init__(self, full: ClosedJaxpr, micro: Jaxpr, rows_full: int, rows_micro: int, differentiated: bool):
        self.full, self.micro, self.differentiated = full, micro, differentiated
        self.walker = Walker(rows_full, rows_micro)
        self.domain: dict[Var, Domain] = {}
        self.full_of: dict[Var, Var] = {}
        self.micro_of: dict[Var, Var] = {}

    def read_inputs(self, statuses: Sequence[Status], domains: Sequence[Domain]) -> None:
        for a, b in zip(self.full.jaxpr.constvars, self.micro.constvars):
            if differing_axes(a.aval, b.aval):
                self.domain[b] = Domain.BATCH
                error = NotSeparableError(
                    f"A constant array {a.aval} does not have the batch in one dimension. {WAYS_OUT}"
                )
                self._precompute(a, b, [], error)
            else:
                self.domain[b], self.walker.status[b] = Domain.CONSTANT, Shared()
        for i, (a, b) in enumerate(zip(self.full.jaxpr.invars, self.micro.invars)):
            if not self.walker.consistent(statuses[i], a.aval, b.aval):
                raise NotSeparableError(
                    f"input {i} is {a.aval} for the full batch and {b.aval} for a microbatch, "
                    f"which is not {statuses[i]}"
                )
            self.domain[b], self.walker.status[b] = Domain(domains[i]), statuses[i]

    def equation(self, full: JaxprEqn, micro: JaxprEqn) -> None:
        domain = self._union(micro.invars)
        if any(differing_axes(a.aval, b.aval) for a, b in zip(full.outvars, micro.outvars)):
            domain |= Domain.BATCH
        self.domain.update((v, domain) for v in micro.outvars)
        self.micro_of.update(zip(full.outvars, micro.outvars))
        try:
            found: list[Status] = self.walker.step(full, micro)
            reason = NotSeparableError(f"a sum over the batch has the batch in one dimension. {WAYS_OUT}")
        except NotSeparableError as error:
            if domain & Domain.PARAMETER:
                # No microbatch can have it. Where it is only reported, it is made after the pipeline.
                missing = self.walker.missing
                first = (
                    missing[a]
                    for a in micro.invars
                    if isinstance(a, Var) and a in missing and self.domain[a] & Domain.PARAMETER
                )
                missing.update(dict.fromkeys(micro.outvars, next(first, error)))
                return
            found, reason = [Partial()], error
        if domain & Domain.PARAMETER or not any(isinstance(s, Partial) for s in found):
            return
        operands = [self.walker.status.get(a) for a in micro.invars if isinstance(a, Var)]
        for a, b in zip(full.outvars, micro.outvars):
            self._precompute(a, b, operands, reason)

    def _precompute(self, full: Var, micro: Var, operands: Iterable[Status | None], reason: NotSeparableError) -> None:
        """Let the pipeline have a value of the full batch: whole, or its rows if they lie along one axis."""
        axes = differing_axes(full.aval, micro.aval)
        status: Status = Shared()
        if axes:
            share = full.aval.shape[axes[0]] // self.walker.rows_full
            layouts = [s for s in operands if isinstance(s, Batched) and s.outer * s.inner == share]
            outer = layouts[0].outer if layouts else 1
            status = Batched(axes[0], outer, share // outer)
        if not self.walker.consistent(status, full.aval, micro.aval):
            self.walker.missing[micro] = reason
            return
        self.walker.status[micro] = status
        self.full_of[micro] = full

    def finish(self) -> MicrobatchedLoss:
        walker, outvars = self.walker, list(self.micro.outvars)
        if self.differentiated:
            outvars[0] = self._loss(outvars[0])
        post, outvars = self._postcompute(outvars)
        candidates = [e for e in walker.eqns if not any(v in self.full_of for v in e.outvars)]
        kept = [e for e, live in zip(candidates, live_equations(candidates, outvars)) if live]
        used = {a for e in kept for a in e.invars if isinstance(a, Var)} | {a for a in outvars if isinstance(a, Var)}
        precomputed = [v for v in self.full_of if v in used]
        constants = [
            (v, c) for v, c in zip(self.micro.constvars, self.full.consts) if v in used and v not in self.full_of
        ]
        invars = [*self.micro.invars, *precomputed, walker.numbers]
        walker.status[walker.numbers] = Batched(0)
        self.domain[walker.numbers] = Domain.BATCH
        jaxpr = make_jaxpr([v for v, _ in constants], invars, outvars, kept)
        for eqn in kept:
            self.domain.update((v, self._union(eqn.invars)) for v in eqn.outvars if v not in self.domain)
        return assembled(
            _precompute_program(self.full, [self.full_of[v] for v in precomputed]),
            len(precomputed),
            ClosedJaxpr(jaxpr, [c for _, c in constants]),
            {v: self._public(walker.status[v], v) for v in variables(jaxpr)},
            self.domain,
            post,
        )

    def _loss(self, loss: Atom) -> Atom:
        """The loss as a sum over microbatches."""
        walker = self.walker
        status = walker.read(loss)
        if isinstance(status, Shared):
            once = walker.once(loss, walker.seen[-1][1] if walker.seen else None)
            if isinstance(once, Var):
                walker.status[once] = Partial()
            return once
        if not isinstance(status, Partial):
            raise NotSeparableError(
                "The loss has one value per row of the batch "
                f"({self.full.jaxpr.outvars[0].aval} for the full batch); return its sum or its mean."
            )
        return loss

    def _postcompute(self, outvars: list[Atom]) -> tuple[ClosedJaxpr, list[Atom]]:
        """`(program after the pipeline, outputs of the pipeline)`; the first of them are the loss's own that it can make."""
        walker, full = self.walker, self.full.jaxpr
        defined = {v: e for e in full.eqns for v in e.outvars}
        given: dict[Var, Var] = {}  # a full-size value that the pipeline provides -> its microbatch
        final, pipelined = [], []
        for a, b in zip(full.outvars, outvars):
            if isinstance(b, Var) and b in walker.missing:
                final.append(a)
                continue
            new = _compat.new_var(a.aval)
            final.append(new)
            pipelined.append((new, b))
        needed, pending, eqns = (
            set(),
            [a for a, b in zip(final, outvars) if isinstance(b, Var) and b in walker.missing],
            [],
        )
        reasons = [walker.missing[b] for b in outvars if isinstance(b, Var) and b in walker.missing]
        while pending:
            a = pending.pop()
            if not isinstance(a, Var) or a in needed:
                continue
            needed.add(a)
            b = self.micro_of.get(a)
            if b is not None and self.domain[b] == Domain.BOTH and b not in walker.missing:
                given[a] = b
            elif a in defined:
                pending.extend(defined[a].invars)
        for eqn in full.eqns:
            if any(v in needed and v not in given for v in eqn.outvars):
                if eqn.primitive.name in ("dot_general", "conv_general_dilated") and any(
                    isinstance(x, Var) and self._depends(x) == Domain.PARAMETER for x in eqn.invars
                ):
                    # Layers of the model: running them on the whole batch is not what a pipeline is for.
                    raise reasons[0]
                eqns.append(eqn)
        inputs = [*full.invars, *(new for new, _ in pipelined), *given]
        program = make_jaxpr(full.constvars, inputs, final, eqns)
        return ClosedJaxpr(program, self.full.consts), [*(b for _, b in pipelined), *given.values()]

    def _depends(self, full: Var) -> Domain:
        """What a full-size value depends on."""
        if full in self.micro_of:
            return self.domain[self.micro_of[full]]
        both = zip([*self.full.jaxpr.constvars, *self.full.jaxpr.invars], [*self.micro.constvars, *self.micro.invars])
        return next((self.domain[b] for a, b in both if a is full), Domain.CONSTANT)

    def _public(self, status: Status, var: Var) -> Status:
        if isinstance(status, Uniform):
            return Batched(status.axis, 1, var.aval.shape[status.axis] // self.walker.rows_micro)
        return status

    def _union(self, atoms: Iterable[Atom]) -> Domain:
        domain = Domain.CONSTANT
        for atom in atoms:
            if isinstance(atom, Var):
                domain |= self.domain[atom]
        return domain


def undivided(loss: ClosedJaxpr, domains: Sequence[Domain], rows: int) -> MicrobatchedLoss:
    """One microbatch: every value is its own truth."""
    jaxpr = loss.jaxpr
    eqns = [e for e, live in zip(jaxpr.eqns, live_equations(jaxpr.eqns, jaxpr.outvars)) if live]
    numbers = numbers_variable(rows)
    domain: dict[Var, Domain] = dict.fromkeys(jaxpr.constvars, Domain.CONSTANT)
    domain.update((v, Domain(d)) for v, d in zip(jaxpr.invars, domains))
    domain[numbers] = Domain.BATCH
    for eqn in eqns:
        union = Domain.CONSTANT
        for atom in eqn.invars:
            union |= domain[atom] if isinstance(atom, Var) else Domain.CONSTANT
        domain.update((v, union) for v in eqn.outvars)
    pipeline = make_jaxpr(jaxpr.constvars, [*jaxpr.invars, numbers], jaxpr.outvars, eqns)
    results = [_compat.new_var(a.aval) for a in jaxpr.outvars]
    return assembled(
        ClosedJaxpr(make_jaxpr([], jaxpr.invars, [], []), []),
        0,
        ClosedJaxpr(pipeline, loss.consts),
        {v: Shared() for v in variables(pipeline)},
        domain,
        ClosedJaxpr(make_jaxpr([], [*jaxpr.invars, *results], results, []), []),
    )


def assembled(
    precompute: ClosedJaxpr,
    count: int,
    pipeline: ClosedJaxpr,
    status: dict[Var, Status],
    domain: dict[Var, Domain],
    postcompute: ClosedJaxpr,
) -> MicrobatchedLoss:
    jaxpr = pipeline.jaxpr

    def status_of(atom: Any) -> Status:
        return Shared() if isinstance(atom, Literal) else status[atom]

    def domain_of(atom: Any) -> Domain:
        return Domain.CONSTANT if isinstance(atom, Literal) else domain[atom]

    return MicrobatchedLoss(
        precompute=precompute,
        precomputed_status=tuple(map(status_of, jaxpr.invars[len(jaxpr.invars) - 1 - count : -1])),
        pipeline=pipeline,
        pipeline_status=tuple(map(status_of, jaxpr.invars)),
        pipeline_domain=tuple(map(domain_of, jaxpr.invars)),
        out_status=tuple(map(status_of, jaxpr.outvars)),
        out_domain=tuple(map(domain_of, jaxpr.outvars)),
        status=status,
        domain={v: domain[v] for v in status},
        postcompute=postcompute,
    )


def _precompute_program(full: ClosedJaxpr, outvars: Sequence[Var]) -> ClosedJaxpr:
    jaxpr = full.jaxpr
    eqns = [e for e, live in zip(jaxpr.eqns, live_equations(jaxpr.eqns, outvars, keep_effects=False)) if live]
    used = {a for e in eqns for a in e.invars if isinstance(a, Var)} | set(outvars)
    constants = [(v, c) for v, c in zip(jaxpr.constvars, full.consts) if v in used]
    program = make_jaxpr([v for v, _ in constants], jaxpr.invars, outvars, eqns)
    return ClosedJaxpr(program, [c for _, c in constants])


def variables(jaxpr: Jaxpr) -> list[Var]:
    return [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
