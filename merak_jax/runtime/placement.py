"""Where the values of a stage's blocks are on the devices along `tensor`.

Blocks run in loops that stages turn differently often: uneven stages, idle ones, ticks that switch. A sum over `tensor` in them is
right, as only the devices of one stage take part. In a collective-permute all devices of the program take part on XLA:CPU, and
wait for those that idle. XLA makes one where it cuts or joins values along a dimension that it chose to split: so what the
layout keeps whole is said at every equation that cannot work in shards, and XLA has nothing left to choose there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from merak_jax import _compat
from merak_jax.partition.follow import opaque_dimensions
from merak_jax.runtime.stage import select
from merak_jax.tracing.jaxprs import evaluate, evaluate_equation, like

if TYPE_CHECKING:
    from merak_jax.runtime.tick_run import TickRun

P = PartitionSpec


class Placement:
    """Says, inside the shard_map over `pipe`, how values of blocks are split over `tensor`."""

    def __init__(self, run: TickRun):
        self.run, self.active = run, run.p.mesh.shape["tensor"] > 1
        self._rewritten: dict[int, tuple[Any, Any]] = {}

    def operands(self, values: Sequence[Any], number: int) -> list[Any]:
        """What a block of a chain reads: parameters as the layout splits them, all else whole."""
        carry, lanes = self.run.graph.chains[number].num_carry, self.run.lane_specs[number]
        others = len(values) - carry - len(lanes)
        return self._placed(values, [*[P()] * carry, *(P(*spec[2:]) for spec in lanes), *[P()] * others])

    def whole(self, values: Sequence[Any]) -> list[Any]:
        """Carries and their cotangents: whole on every device of the stage."""
        return self._placed(values, [P()] * len(values))

    def lane_sums(self, sums: Sequence[Any], number: int) -> list[Any]:
        """Accumulators of a chain's lane gradients, `[N, ...]`, split as their parameters are."""
        specs = select(self.run.lane_gradient[number], self.run.lane_specs[number])
        return self._placed(sums, [P(*spec[1:]) for spec in specs])

    def evaluate(self, program: Jaxpr, operands: Sequence[Any]) -> list[Any]:
        """The outputs of a program on operands; what its equations cannot work on in shards is whole there."""
        return evaluate(program, [], *operands, special=self._equation if self.active else None)

    def _placed(self, values: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        return [self.run.constrain(v, s) if self._can_be_split(v) else v for v, s in zip(values, specs)]

    def _can_be_split(self, value: Any) -> bool:
        return self.active and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)

    def _equation(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
        before, after = opaque_dimensions(eqn)
        rewritten = self._inside(eqn)
        if rewritten is eqn and not any(before) and not any(after):
            return None
        known = [isinstance(a, Literal) for a in eqn.invars]
        operands = [x if k else self._whole_along(x, dims) for x, dims, k in zip(operands, before, known)]
        return [self._whole_along(x, dims) for x, dims in zip(evaluate_equation(rewritten, operands), after)]

    def _whole_along(self, value: Any, dims: Sequence[int]) -> Any:
        if not dims or not self._can_be_split(value):
            return value
        return self.run.constrain(value, P(*(None if d in dims else P.UNCONSTRAINED for d in range(value.ndim))))

    def _inside(self, eqn: JaxprEqn) -> JaxprEqn:
        """The equation with the same said in its programs."""
        params = {name: self._program(value) for name, value in eqn.params.items()}
        return eqn.replace(params=params) if any(params[name] is not v for name, v in eqn.params.items()) else eqn

    def _program(self, value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
            new = [self._program(v) for v in value]
            return like(value, new) if any(a is not b for a, b in zip(new, value)) else value
        if not isinstance(value, Jaxpr | ClosedJaxpr) or not _cuts(value):
            return value
        if id(value) not in self._rewritten:
            jaxpr, constants = (value.jaxpr, value.consts) if isinstance(value, ClosedJaxpr) else (value, [])
            made = jax.make_jaxpr(lambda *args: evaluate(jaxpr, constants, *args, special=self._equation))(
                *(v.aval for v in jaxpr.invars)
            )
            if isinstance(value, Jaxpr):
                # An open program has no place for constants.
                made = value if made.consts else made.jaxpr
            self._rewritten[id(value)] = value, made
        return self._rewritten[id(value)][1]


def _cuts(program: Jaxpr | ClosedJaxpr) -> bool:
    """Whether some equation in a program cannot work in shards along some dimension."""
    eqns = program.jaxpr.eqns if isinstance(program, ClosedJaxpr) else program.eqns
    return any(any(map(any, opaque_dimensions(eqn))) or any(map(_cuts, _compat.sub_jaxprs(eqn))) for eqn in eqns)
