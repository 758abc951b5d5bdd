"""Rules for equations that hold programs: loops, conditionals, remat, functions with custom derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import ClosedJaxpr

from merak_jax.errors import MerakError, NotSeparableError
from merak_jax.tracing import derivatives
from merak_jax.tracing.matching import merge
from merak_jax.tracing.separability import Batched, Partial, Shared, Status, Uniform, is_rows, rule


def join(op, a: Status, b: Status) -> Status:
    """The status that is true of a value which is sometimes `a` and sometimes `b`."""
    if a == b:
        return a
    if {type(a), type(b)} == {Shared, Partial}:
        return Partial()
    if is_rows(a) and is_rows(b) and a.axis == b.axis and Uniform in (type(a), type(b)):
        return a if isinstance(a, Batched) else b
    return op.fail(f"a value of `{op.name}` depends on the batch in one way in one place and in another way elsewhere")


def _sums(statuses: Sequence[Status]) -> list[bool]:
    return [isinstance(s, Partial) for s in statuses]


@rule("remat2", "checkpoint")
def _remat(op):
    inner = op.walk("jaxpr", op.status)
    op.set_params(jaxpr=inner.jaxpr)
    if inner.uses_numbers:
        op.insert_numbers(len(op.status))
    return inner.status


@rule("jit", "pjit", "closed_call", "core_call")
def _call(op):
    return op.walk("jaxpr" if "jaxpr" in op.params else "call_jaxpr", op.status, may_gate=False).status


@rule("scan")
def _scan(op):
    first_carry = op.params["num_consts"]
    first_slice = first_carry + op.params["num_carry"]
    consts, slices = op.status[:first_carry], []
    for status in op.status[first_slice:]:
        if is_rows(status):
            if status.axis == 0:
                op.fail("a scan goes over the rows of the batch")
            status = replace(status, axis=status.axis - 1)
        slices.append(status)
    if op.full.params["length"] != op.params["length"]:
        op.fail("a loop makes one turn per row of the batch")
    carry, inner = op.fixpoint(
        op.status[first_carry:first_slice],
        lambda carry: op.walk("jaxpr", [*consts, *carry, *slices], sums=_sums(carry)),
    )
    _start_once(op, first_carry, carry)
    if inner.uses_numbers:
        op.insert_numbers(first_carry)
        inner = inner.numbers_at(first_carry)
        op.set_params(num_consts=first_carry + 1)
    op.set_params(jaxpr=inner.jaxpr)
    stacked = inner.status[len(carry) :]
    return [*carry, *(replace(s, axis=s.axis + 1) if is_rows(s) else s for s in stacked)]


@rule("while")
def _while(op):
    first_body = op.params["cond_nconsts"]
    first_carry = first_body + op.params["body_nconsts"]
    consts = op.status[first_body:first_carry]
    carry, inner = op.fixpoint(
        op.status[first_carry:], lambda carry: op.walk("body_jaxpr", [*consts, *carry], sums=_sums(carry))
    )
    test = op.walk("cond_jaxpr", [*op.status[:first_body], *carry], may_gate=False)
    if not isinstance(test.status[0], Shared):
        op.fail("the number of turns of a loop depends on the batch")
    _start_once(op, first_carry, carry)
    op.set_params(cond_jaxpr=test.jaxpr)
    if inner.uses_numbers:
        op.insert_numbers(first_carry)
        inner = inner.numbers_at(len(consts))
        op.set_params(body_nconsts=len(consts) + 1)
    op.set_params(body_jaxpr=inner.jaxpr)
    return carry


def _start_once(op, first_carry: int, carry: Sequence[Status]) -> None:
    for i, status in enumerate(carry):
        if isinstance(status, Partial) and isinstance(op.status[first_carry + i], Shared):
            op.count_once(first_carry + i)


@rule("cond")
def _cond(op):
    if not isinstance(op.status[0], Shared):
        op.fail("the branch that is taken depends on the batch")
    count = len(op.params["branches"])
    joined = op.walk("branches", op.status[1:], index=0).status
    for i in range(1, count):
        other = op.walk("branches", op.status[1:], index=i).status
        joined = [join(op, a, b) for a, b in zip(joined, other)]
    branches = [op.walk("branches", op.status[1:], index=i, sums=_sums(joined)) for i in range(count)]
    if any(b.uses_numbers for b in branches):
        op.insert_numbers(len(op.status))
        branches = [b.with_numbers(op.walker.rows_micro) for b in branches]
    op.set_params(branches=tuple(b.jaxpr for b in branches))
    return joined


@rule("custom_linear_solve")
def _linear_solve(op):
    """A x = b and its transpose, each as a program that applies A and one that solves; all must agree on the rows."""
    lengths, jaxprs = op.params["const_lengths"], op.params["jaxprs"]
    consts, start = {}, 0
    for name in jaxprs._fields:
        count = getattr(lengths, name)
        consts[name] = op.status[start : start + count]
        start += count
    right = op.status[start:]
    found, programs = right, dict.fromkeys(jaxprs._fields)
    for name in ("solve", "matvec", "transpose_solve", "vecmat"):
        if getattr(jaxprs, name) is None:
            continue
        walked = op.walk("jaxprs", [*consts[name], *found], index=jaxprs._fields.index(name), may_gate=False)
        found = [join(op, a, b) for a, b in zip(walked.status, found)]
        programs[name] = walked.jaxpr
    op.set_params(jaxprs=jaxprs._replace(**programs))
    return found


# -- custom derivatives: the function itself, then the rule that is used when it is differentiated


@rule("custom_jvp_call")
def _custom_jvp(op):
    outputs = op.walk("call_jaxpr", op.status, may_gate=False).status
    full, micro = _rules(op, derivatives.tangent_rule)
    inputs = op.status[op.params["num_consts"] :]
    tangents = [s for s, zero in zip(inputs, micro.zeros) if not zero]
    found = _walk_derivative(op, full.program, micro.program, [*inputs, *tangents])
    _check_derivative(op, found, [*outputs, *(s for s, zero in zip(outputs, micro.out_zeros) if not zero)])
    return outputs


@rule("custom_vjp_call")
def _custom_vjp(op):
    outputs = op.walk("call_jaxpr", op.status, may_gate=False).status
    full, micro = _rules(op, derivatives.backward_rule)
    inputs = op.status[op.params["num_consts"] :]
    made = _walk_derivative(op, full.forward, micro.forward, inputs)
    _check_derivative(op, made[micro.num_new :], outputs)
    # Sums and shared values change places in the backward direction.
    statuses = [*micro.residuals(made[: micro.num_new], op.status), *(_dual(s) for s in outputs)]
    sums = [isinstance(inputs[i], Shared) for i in micro.places]
    found = _walk_derivative(op, full.backward, micro.backward, statuses, sums)
    _check_derivative(op, found, [_dual(inputs[i]) for i in micro.places])
    return outputs


def _dual(status: Status) -> Status:
    if isinstance(status, Shared):
        return Partial()
    return Shared() if isinstance(status, Partial) else status


def _rules(op, extract):
    try:
        return extract(op.full), extract(op.micro)
    except MerakError:
        raise
    except Exception as error:
        return op.fail(f"the derivative rule of a `{op.name}` can't be traced alone ({type(error).__name__}: {error})")


def _walk_derivative(op, full: ClosedJaxpr, micro: ClosedJaxpr, statuses, sums: Sequence[bool] = ()) -> list[Status]:
    place = op.walker.place(op.full)
    try:
        merged = merge(full.jaxpr, micro.jaxpr, exact_literals=True)
    except NotSeparableError as error:
        raise NotSeparableError(f"In the derivative rule of the `{op.name}` {place}: {error}") from None
    walker = op.inner_walker(may_gate=False)
    walker.within = f"In a derivative rule. {place}"
    return walker.program(full.jaxpr, merged, statuses, sums).status


def _check_derivative(op, found: Sequence[Status], expected: Sequence[Status]) -> None:
    for a, b in zip(found, expected):
        # Rows that are all the same are rows in any order.
        if a != b and not (is_rows(a) and is_rows(b) and a.axis == b.axis and Uniform in (type(a), type(b))):
            op.fail("a custom derivative rule couples the rows of the batch, or counts them more than once")
