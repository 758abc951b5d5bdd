"""Match the program of the full batch with that of one microbatch, equation by equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError
from merak_jax.tracing.jaxprs import like, make_jaxpr


class ProgramsDifferError(NotSeparableError):
    """The step traced for two numbers of rows is not the same program twice."""


# Parameters that carry the shape of a result; every other one must be the same in both programs.
SHAPE_PARAMS: dict[str, frozenset[str]] = {
    "broadcast_in_dim": frozenset({"shape"}),
    "reshape": frozenset({"new_sizes"}),
    "iota": frozenset({"shape"}),
    "tile": frozenset({"reps"}),
    "empty": frozenset({"shape"}),
    "slice": frozenset({"start_indices", "limit_indices"}),
    "split": frozenset({"sizes"}),
    "gather": frozenset({"slice_sizes"}),
    "dynamic_slice": frozenset({"slice_sizes"}),
    "random_bits": frozenset({"shape"}),
    "random_split": frozenset({"shape"}),
    "rng_bit_generator": frozenset({"shape"}),
    "scan": frozenset({"length"}),
}


def merge(full: Jaxpr, micro: Jaxpr, *, exact_literals: bool = False) -> Jaxpr:
    """`micro` with the literals of `full` (the 1/B of a mean stays 1/B), at every depth.

    Args:
      full: the program traced at the full batch.
      micro: the same program traced at one microbatch.
      exact_literals: refuse literals that differ (where they could not be replaced).

    Raises:
      NotSeparableError: the two are not the same program up to shapes and literals.
    """
    counts = [(len(j.constvars), len(j.invars), len(j.outvars)) for j in (full, micro)]
    if counts[0] != counts[1]:
        raise _different(f"{counts[0]} constants, inputs, outputs against {counts[1]}")
    micro_of: dict[Var, Var] = dict(zip([*full.constvars, *full.invars], [*micro.constvars, *micro.invars]))

    def merge_atom(a: Any, b: Any, where: Callable[[], str]) -> Any:
        if isinstance(a, Literal) != isinstance(b, Literal):
            raise _different(f"a constant in one, a computed value in the other{where()}")
        if not isinstance(a, Literal):
            if micro_of.get(a) is not b:
                raise _different(f"an operand comes from different equations{where()}")
            return b
        if a.aval.dtype != b.aval.dtype or a.aval.shape != b.aval.shape:
            raise _different(f"constants {a.aval} and {b.aval}{where()}")
        if equal_values(a.val, b.val):
            return b
        if exact_literals:
            raise NotSeparableError(
                f"A custom derivative holds a number that depends on the batch size ({a.val} against "
                f"{b.val}){where()}; pass it to the function as an argument."
            )
        return a

    eqns = []
    for a, b in zip(full.eqns, micro.eqns):

        def where(b: JaxprEqn = b) -> str:
            return f", at {_compat.source_line(b)}"

        if a.primitive is not b.primitive:
            raise _different(f"`{a.primitive}` in one, `{b.primitive}` in the other{where()}")
        if len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            sizes = [f"{len(e.invars)} operands and {len(e.outvars)} results" for e in (a, b)]
            raise _different(f"`{a.primitive}` has {sizes[0]} in one, {sizes[1]} in the other{where()}")
        invars = [merge_atom(x, y, where) for x, y in zip(a.invars, b.invars)]
        params = _merge_params(a, b, where, exact_literals)
        micro_of.update(zip(a.outvars, b.outvars))
        eqns.append(b.replace(invars=invars, params=params))
    if len(full.eqns) != len(micro.eqns):
        shorter = min(len(full.eqns), len(micro.eqns))
        extra = max(full.eqns, micro.eqns, key=len)[shorter]
        raise _different(
            f"{len(full.eqns)} equations against {len(micro.eqns)}, the first extra one is "
            f"`{extra.primitive}` at {_compat.source_line(extra)}"
        )
    outvars = [merge_atom(a, b, lambda: ", in the outputs") for a, b in zip(full.outvars, micro.outvars)]
    return make_jaxpr(micro.constvars, micro.invars, outvars, eqns)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The jaxpr of a nested program, whether it is closed or not."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def same_program(full: JaxprEqn, micro: JaxprEqn) -> bool:
    """Whether an equation computes the same function of its operands in both programs.

    Never true of `custom_vjp_call`: its backward rule has to be looked at too.
    """
    if full.primitive.name == "custom_vjp_call":
        return False
    if any(a.aval.shape != b.aval.shape for a, b in zip(full.outvars, micro.outvars)):
        return False
    return all(_same_value(full.params[key], micro.params[key]) for key in full.params)


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and any(isinstance(x, Jaxpr | ClosedJaxpr) for x in a):
        return all(_same_value(x, y) for x, y in zip(a, b))
    if isinstance(a, Jaxpr | ClosedJaxpr):
        return all(same_program(x, y) for x, y in zip(open_jaxpr(a).eqns, open_jaxpr(b).eqns))
    return _is_function(a) or equal_values(a, b)


def _merge_params(a: JaxprEqn, b: JaxprEqn, where: Callable[[], str], exact: bool) -> dict[str, Any]:
    exact = exact or a.primitive.name in ("custom_jvp_call", "custom_vjp_call")
    merged = dict(b.params)
    for key, value in a.params.items():
        other = b.params.get(key)
        if isinstance(value, Jaxpr | ClosedJaxpr):
            merged[key] = _merge_nested(value, other, where, exact)
        elif isinstance(value, tuple | list) and any(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
            merged[key] = like(value, [v and _merge_nested(v, w, where, exact) for v, w in zip(value, other)])
        elif _is_function(value) and _is_function(other):
            continue  # a rule or a policy: two traces never give the same object
        elif not equal_values(value, other) and not _follows_shapes(a, b, key):
            raise _different(f"`{a.primitive}` has {key}={value} in one, {key}={other} in the other{where()}")
    return merged


def _follows_shapes(a: JaxprEqn, b: JaxprEqn, key: str) -> bool:
    """Whether a parameter may differ because shapes do; where a slice begins may differ only along an axis that does."""
    if key not in SHAPE_PARAMS.get(a.primitive.name, ()):
        return False
    if a.primitive.name != "slice":
        return True
    sizes = zip(a.invars[0].aval.shape, b.invars[0].aval.shape, strict=True)
    return all(x == y or n != m for (n, m), x, y in zip(sizes, a.params[key], b.params[key]))


def _merge_nested(a: Any, b: Any, where: Callable[[], str], exact: bool) -> Any:
    merged = merge(open_jaxpr(a), open_jaxpr(b), exact_literals=exact)
    if not isinstance(b, ClosedJaxpr):
        return merged
    for x, y in zip(a.consts, b.consts):
        if np.shape(x) != np.shape(y) or (exact and not equal_values(x, y)):
            raise _different(f"a constant array depends on the batch size{where()}")
    return ClosedJaxpr(merged, a.consts)


def _is_function(value: Any) -> bool:
    return callable(value) or hasattr(value, "call_wrapped")


def equal_values(a: Any, b: Any) -> bool:
    """Whether two constants or parameters are the same; NaN is itself."""
    if a is b:
        return True
    try:
        if isinstance(a, float | complex | np.ndarray | np.generic):
            return bool(np.array_equal(a, b, equal_nan=np.issubdtype(np.asarray(a).dtype, np.inexact)))
        return bool(a == b)
    except (TypeError, ValueError):
        return False


def _different(what: str) -> ProgramsDifferError:
    return ProgramsDifferError(
        f"Traced with the full batch and with one microbatch, the loss gives two different programs: {what}. "
        "Either an operation takes a share of the rows (top_k(x, rows // 2)): it couples the rows, and the batch can only be run "
        "whole (num_microbatches=1 on a mesh with data=1). Or Python code in the loss depends on the batch size, or draws Python "
        "or numpy random numbers while it is traced: use jax.random and operations that are the same for every batch size."
    )
