"""Give a program traced at one number of rows another one.

JAX writes other equations where a dimension has size 1 (`take_along_axis` drops it), so a program for one row
can't be traced. It is extrapolated from two traces: every size in a program is linear in the number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError
from merak_jax.tracing import derivatives
from merak_jax.tracing.jaxprs import like, make_jaxpr
from merak_jax.tracing.matching import SHAPE_PARAMS, merge


def resized(full: Jaxpr, other: Jaxpr, rows_full: int, rows_other: int, rows: int) -> Jaxpr:
    """`other` for `rows` rows; it must match `full` equation by equation (see `merge`).

    Raises NotSeparableError where a size is not linear in the number of rows.
    """
    return _Resizer(rows_full, rows_other, rows).program(full, other)


class _Resizer:
    def __init__(self, rows_full: int, rows_other: int, rows: int):
        self.step, self.offset = rows_full - rows_other, rows - rows_other
        self.rows = (rows_full, rows_other, rows)
        self.at: JaxprEqn | None = None  # the equation at work

    def size(self, a: Any, b: Any) -> Any:
        if isinstance(a, tuple | list):
            return tuple(self.size(x, y) for x, y in zip(a, b))
        if a == b:
            return b
        slope, rest = divmod(int(a) - int(b), self.step)
        if rest or int(b) + slope * self.offset < 0:
            raise NotSeparableError(
                f"a size is {a} for {self.rows[0]} rows and {b} for {self.rows[1]}, which is not linear in the number of rows"
                f"{f', at {_compat.source_line(self.at)}' if self.at else ''}; a microbatch of {self.rows[2]} rows has no such size"
            )
        return int(b) + slope * self.offset

    def aval(self, a: Any, b: Any) -> Any:
        shape = self.size(tuple(a.shape), tuple(b.shape))
        return b if shape == b.shape else b.update(shape=shape)

    def program(self, full: Jaxpr, other: Jaxpr) -> Jaxpr:
        new: dict[Var, Any] = {}

        def define(full_vars, other_vars) -> list[Var]:
            made = [_compat.new_var(self.aval(a.aval, b.aval)) for a, b in zip(full_vars, other_vars)]
            new.update(zip(other_vars, made))
            return made

        def read(atom):
            return atom if isinstance(atom, Literal) else new[atom]

        constvars, invars = define(full.constvars, other.constvars), define(full.invars, other.invars)
        eqns: list[JaxprEqn] = []
        for a, b in zip(full.eqns, other.eqns):
            self.at = b
            operands = [read(x) for x in b.invars]
            eqns.append(self.equation(a, b, operands, define(a.outvars, b.outvars)))
        return make_jaxpr(constvars, invars, [read(x) for x in other.outvars], eqns)

    def equation(self, a: JaxprEqn, b: JaxprEqn, operands: list, outvars: list[Var]) -> JaxprEqn:
        params = {key: self.param(a, key, value, b.params[key]) for key, value in a.params.items()}
        if b.primitive.name == "custom_jvp_call":
            rules = [derivatives.tangent_rule(e) for e in (a, b)]
            program = self.derivative(rules[0].program, rules[1].program)
            made = derivatives.custom_jvp_equation(params["call_jaxpr"], replace(rules[1], program=program))
            params = made.params
        elif b.primitive.name == "custom_vjp_call":
            both = [derivatives.backward_rule(e) for e in (a, b)]
            forward = self.derivative(both[0].forward, both[1].forward)
            backward = self.derivative(both[0].backward, both[1].backward)
            rule = replace(both[1], forward=forward, backward=backward)
            params = derivatives.custom_vjp_equation(params["call_jaxpr"], rule).params
        return b.replace(invars=operands, outvars=outvars, params=params)

    def param(self, eqn: JaxprEqn, key: str, a: Any, b: Any) -> Any:
        if isinstance(a, ClosedJaxpr):
            return ClosedJaxpr(self.program(a.jaxpr, b.jaxpr), b.consts)
        if isinstance(a, Jaxpr):
            return self.program(a, b)
        if isinstance(a, tuple | list) and any(isinstance(x, Jaxpr | ClosedJaxpr) for x in a):
            return like(a, [self.param(eqn, key, x, y) for x, y in zip(a, b)])
        return self.size(a, b) if key in SHAPE_PARAMS.get(eqn.primitive.name, ()) else b

    def derivative(self, a: ClosedJaxpr, b: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self.program(a.jaxpr, merge(a.jaxpr, b.jaxpr, exact_literals=True)), b.consts)
