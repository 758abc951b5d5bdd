"""Values of single blocks that are read later: each block writes its own into an array that travels with the carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import Atom


def block_number(k: int) -> Literal:
    """The number of a block, as an operand."""
    value = np.int32(k)
    return Literal(value, aval_of((), np.int32))


def aval_of(shape: Sequence[int], dtype: Any) -> Any:
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


def collect(aval: Any, value: Var, number: Var, length: int) -> tuple[Var, list[JaxprEqn], Var]:
    """`(buffer [L, ...] that a block gets, equations that write its value at its number, the buffer after the last block)`."""
    whole = aval_of((length, *aval.shape), aval.dtype)
    buffer = _compat.new_var(whole)

    def write(buffer, value, number):
        return jax.lax.dynamic_update_slice(buffer, value[None], [number, *[np.int32(0)] * value.ndim])

    return buffer, _spliced(write, [buffer, value, number]), _compat.new_var(whole)


def taken(buffer: Var, k: int, result: Var) -> list[JaxprEqn]:
    """Equations for the value of block k, under the name that it has in the program."""
    return _spliced(lambda x: jax.lax.squeeze(jax.lax.slice_in_dim(x, k, k + 1), (0,)), [buffer], result)
