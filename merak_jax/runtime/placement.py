"""Where the values of a stage's blocks are on the devices along `tensor`, and what goes round them.

Blocks run in loops that stages turn differently often: uneven stages, idle ones, ticks that switch. A sum over `tensor` in them is
right, as only the devices of one stage take part. In a collective-permute all devices of the program take part on XLA:CPU, and
wait for those that idle. XLA makes one where it cuts or joins values along a dimension that it chose to split: so what the
layout keeps whole is said at every equation that cannot work in shards, and XLA has nothing left to choose there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from merak_jax import _compat
from merak_jax.partition.dimension_rules import ELEMENTWISE, FRESH
from merak_jax.partition.follow import opaque_dimensions
from merak_jax.partition.interleave import Gathered, Join, Step, interleave, read_as, steps_of
from merak_jax.partition.rings import GatherRing, Item, ScatterRing, arrange
from merak_jax.partition.splits import FREE, LOCAL, SUM, WHOLE, Place, Split, Splits
from merak_jax.runtime.overlap import AXIS, gather_products, on_tensor, scatter_products
from merak_jax.runtime.stage import select
from merak_jax.tracing.jaxprs import evaluate, evaluate_equation, like

if TYPE_CHECKING:
    from merak_jax.runtime.tick_run import TickRun

P = PartitionSpec


class Placement:
    """Says, inside the shard_map over `pipe`, how values of blocks are split over `tensor`."""

    def __init__(self, run: TickRun):
        self.run, self.active = run, run.p.mesh.shape[AXIS] > 1
        self.rings = run.p.rings
        self._rewritten: dict[int, tuple[Any, Any]] = {}
        self._arranged: dict[int, tuple[Jaxpr, list[Item]]] = {}

    def operands(self, values: Sequence[Any], number: int) -> list[Any]:
        """What a block of a chain reads: the carry and parameters as the layout splits them, all else whole."""
        carry, lanes = self.run.graph.chains[number].num_carry, self.run.lane_specs[number]
        others = len(values) - carry - len(lanes)
        specs = [*self.run.carry_specs, *(P(*spec[2:]) for spec in lanes), *[P()] * others]
        return self._placed(values, specs)

    def carry(self, values: Sequence[Any]) -> list[Any]:
        """Values of the carry, as every block takes and leaves them."""
        return self._placed(values, self.run.carry_specs)

    def cotangents(self, values: Sequence[Any]) -> list[Any]:
        """Cotangents of the carry's real values."""
        return self._placed(values, select(self.run.stage.carry_float, self.run.carry_specs))

    def lane_sums(self, sums: Sequence[Any], number: int) -> list[Any]:
        """Accumulators of a chain's lane gradients, `[N, ...]`, split as their parameters are."""
        return self._placed(sums, [P(*spec[1:]) for spec in self.run.lane_sum_specs[number]])

    def stored(self, values: Sequence[Any], variables: Sequence[Var], number: int) -> list[Any]:
        """Residuals of a chain's blocks, as their variables are placed."""
        return [self._at(x, self.run.p.splits[number].of(v)) if self.active else x for x, v in zip(values, variables)]

    def evaluate(self, program: Jaxpr, operands: Sequence[Any], number: int) -> list[Any]:
        """The outputs of a program of a chain's block on operands."""
        if not self.active:
            return evaluate(program, [], *operands)
        splits, env = self.run.p.splits[number], dict(zip(program.invars, operands))
        wholes: dict[Var, Any] = {}

        def read(atom):
            return atom.val if isinstance(atom, Literal) else env[atom]

        def whole(var):
            if var not in wholes:
                wholes[var] = self._at(env[var], WHOLE)
            return wholes[var]

        for item in self._items(program, splits):
            if isinstance(item, GatherRing | ScatterRing):
                results = self._ring(item, [read(a) for a in item.invars], splits)
            else:
                given = [whole(a) if splits.needs_whole(item, n) else read(a) for n, a in enumerate(item.invars)]
                results = self._equation(item, given, splits)
            env.update(zip(item.outvars, results))
        return [read(a) for a in program.outvars]

    def evaluate_both(self, parts: Sequence[tuple[Jaxpr, Sequence[Any], int]]) -> list[list[Any]]:
        """The outputs of two programs, each with its operands and chain, run in one order: collectives beside matmuls.

        A barrier holds both together, or the compiler, which sees no reason to, would put the matmul elsewhere. Collectives follow
        each other: those that do not are combined, and then hide behind nothing.
        """
        if not self.active:
            return [self.evaluate(*part) for part in parts]
        env: dict[Any, Any] = {}
        steps: list[Step] = []
        for stream, (program, operands, number) in enumerate(parts):
            env.update(((stream, v), x) for v, x in zip(program.invars, operands))
            steps += steps_of(stream, program, self.run.p.splits[number])

        def read(step: Step) -> list[Any]:
            return [a.val if isinstance(a, Literal) else env[step.stream, a] for a in step.reads]

        def run(step: Step, given: Sequence[Any]) -> list[Any]:
            splits, item = self.run.p.splits[parts[step.stream][2]], step.item
            if isinstance(item, JaxprEqn):
                return self._equation(item, given, splits, settle=False)
            return [self._at(given[0], WHOLE if isinstance(item, Gathered) else splits.settled[item.var])]

        latest: Any = None  # what the latest collective made
        for entry in interleave(steps):
            for step in entry if isinstance(entry, Join) else (entry,):
                given = read(step)
                if step.is_collective:
                    if latest is not None:
                        given, env[latest] = lax.optimization_barrier((given, env[latest]))
                    latest = (step.stream, step.item)
                env.update(((step.stream, new), x) for new, x in zip(step.makes, run(step, given)))
            if isinstance(entry, Join):
                self._hold(env, [(step.stream, new) for step in entry for new in step.makes])
        return [
            [
                a.val if isinstance(a, Literal) else env[n, read_as(a, self.run.p.splits[number])]
                for a in program.outvars
            ]
            for n, (program, _, number) in enumerate(parts)
        ]

    def _hold(self, env: dict[Any, Any], keys: Sequence[Any]) -> None:
        """All these values wait for each other."""
        keys = [key for key in keys if self._can_be_split(env[key])]
        env.update(zip(keys, lax.optimization_barrier([env[key] for key in keys])))

    def _items(self, program: Jaxpr, splits: Splits) -> Sequence[Item]:
        if self.rings is None:
            return program.eqns
        if id(program) not in self._arranged:
            self._arranged[id(program)] = program, arrange(program, splits)
        return self._arranged[id(program)][1]

    def _ring(self, ring: GatherRing | ScatterRing, operands: Sequence[Any], splits: Splits) -> list[Any]:
        assert self.rings is not None
        if isinstance(ring, ScatterRing):
            specs = [spec for p in ring.products for spec in _taken(p.eqn, splits)]
            return [
                scatter_products(
                    self.rings, ring, operands, [*specs, spec_of(splits.of(ring.value), ring.value.aval.ndim)]
                )
            ]
        specs = [spec_of(splits.of(ring.value), ring.value.aval.ndim)]
        specs += [_taken(p.eqn, splits)[1 - p.side] for p in ring.products]
        specs += [spec_of(splits.of(v), v.aval.ndim) for v in ring.outvars]
        return gather_products(self.rings, ring, operands[0], operands[1:], specs)

    def _equation(self, eqn: JaxprEqn, operands: Sequence[Any], splits: Splits, settle: bool = True) -> list[Any]:
        places = [splits.place.get(v, FREE) for v in eqn.outvars]
        if LOCAL in places:
            return self._local(eqn, operands, splits)
        results = self._anywhere(eqn, operands, splits.grouped) or evaluate_equation(eqn, operands)
        if eqn.primitive.name in FRESH:
            return results
        if eqn.primitive.name in ELEMENTWISE and SUM not in places:
            return results
        wanted = [splits.of(v) if settle or p is not SUM else SUM for v, p in zip(eqn.outvars, places)]
        return [self._at(x, p) for x, p in zip(results, wanted)]

    def _local(self, eqn: JaxprEqn, operands: Sequence[Any], splits: Splits) -> list[Any]:
        """Each device's own part of a sum, `[T, ...]`, or what becomes of it."""
        if any(splits.of(a) is LOCAL for a in eqn.invars):
            return jax.vmap(lambda *x: evaluate_equation(eqn, x))(*operands)
        return on_tensor(
            lambda *x: [y[None] for y in evaluate_equation(eqn, x)],
            _taken(eqn, splits),
            [P(AXIS)] * len(eqn.outvars),
        )(*operands)

    def _placed(self, values: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        return [self.run.constrain(v, s) if self._can_be_split(v) else v for v, s in zip(values, specs)]

    def _at(self, value: Any, place: Place) -> Any:
        """A value where it should be; not said for parts of sums and for what no dimension tells."""
        if not self._can_be_split(value) or place in (SUM, FREE, LOCAL):
            return value
        return self.run.constrain(value, spec_of(place, value.ndim))

    def _can_be_split(self, value: Any) -> bool:
        return self.active and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)

    # Equations that cannot work in shards, also those inside of others.

    def _anywhere(self, eqn: JaxprEqn, operands: Sequence[Any], grouped=frozenset()) -> list[Any] | None:
        """The results of an equation with what it cannot work on in shards whole; None where it can work on all."""
        before, after = opaque_dimensions(eqn, grouped)
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
            made = jax.make_jaxpr(lambda *args: evaluate(jaxpr, constants, *args, special=self._anywhere))(
                *(v.aval for v in jaxpr.invars)
            )
            if isinstance(value, Jaxpr):
                # An open program has no place for constants.
                made = value if made.consts else made.jaxpr
            self._rewritten[id(value)] = value, made
        return self._rewritten[id(value)][1]


def _taken(eqn: JaxprEqn, splits: Splits) -> list[PartitionSpec]:
    """How the operands of an equation are split for it."""
    return [spec_of(splits.operand(eqn, n), a.aval.ndim) for n, a in enumerate(eqn.invars)]


def spec_of(place: Place, ndim: int) -> PartitionSpec:
    """How a value is split over `tensor`."""
    return P(*(AXIS if d == place.dimension else None for d in range(ndim))) if isinstance(place, Split) else P()


def _cuts(program: Jaxpr | ClosedJaxpr) -> bool:
    """Whether some equation in a program cannot work in shards along some dimension."""
    eqns = program.jaxpr.eqns if isinstance(program, ClosedJaxpr) else program.eqns
    return any(any(map(any, opaque_dimensions(eqn))) or any(map(_cuts, _compat.sub_jaxprs(eqn))) for eqn in eqns)
