"""The whole parallel step: packed states in, the pipelined loss, the re-rolled update, packed states out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from merak_jax.partition.lanes import LaneLayout
from merak_jax.runtime.evaluation import Evaluation
from merak_jax.runtime.loss import LossProgram
from merak_jax.runtime.pipeline import Pipeline
from merak_jax.runtime.reroll import Rerolled
from merak_jax.runtime.sharding import Shardings
from merak_jax.runtime.stage import is_differentiable, merge, select
from merak_jax.runtime.state import StateLayout
from merak_jax.schedules.tick_table import TickTable
from merak_jax.tracing.jaxprs import evaluate
from merak_jax.tracing.microbatch import Batched
from merak_jax.tracing.step import TracedStep


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """Everything that running a step needs. `function(states, others)` -> `(new states, other outputs)`, to be jitted."""

    traced: TracedStep
    loss: LossProgram
    layouts: dict[int, StateLayout]
    chain_layouts: tuple[LaneLayout, ...]
    table: TickTable | None
    pipeline: Pipeline
    shardings: Shardings
    update: Rerolled
    prepare: Rerolled
    lane_groups: dict[tuple[Var, ...], LaneLayout]
    stack_inputs: dict[Var, LaneLayout]
    state_outputs: dict[int, tuple[int, ...]]

    @property
    def returned(self) -> dict[int, StateLayout]:
        """The layouts of the stored arguments that the step returns."""
        return {n: layout for n, layout in self.layouts.items() if n in self.state_outputs}

    # The step.

    def __call__(self, states: Sequence[Sequence[Any]], others: Sequence[Any]):
        """New arrays of each packed argument that the step returns, and the step's other outputs, flat.

        `states`: stored arrays of the packed arguments in argument order; `others`: leaves of the other arguments.
        """
        traced, operands = self.traced, self.traced.equation.invars
        lanes, stacks, whole = self._given(states, others)
        before = self.update.start(
            [lanes.get(g) for g in self.update.lanes], [stacks.get(v) for v in self.update.stacks], whole
        )
        outputs, gradients = self._loss_and_gradients(before)
        results = traced.equation.outvars
        count = len(results) - (len(operands) - traced.num_loss_constants)
        whole.update(zip(results[:count], outputs))
        for group, value in gradients.items():
            if isinstance(group, tuple):
                lanes[group] = value
            elif group in self.update.stacks:
                stacks[group] = value
            else:
                whole[group] = value
        after = self.update.start([lanes[g] for g in self.update.lanes], [stacks[v] for v in self.update.stacks], whole)
        return self._results(after)

    def _given(self, states, others):
        """The arguments by variable: packed groups, packed stacks, whole leaves."""
        jaxpr, traced = self.traced.jaxpr, self.traced
        whole: dict[Var, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts))
        lanes: dict[tuple, Any] = {}
        stacks: dict[Var, Any] = {}
        arrays = dict(zip(self.layouts, states))
        feed = iter(others)
        leaves: dict[int, list[Var]] = {}
        for var, argument in zip(jaxpr.jaxpr.invars, traced.leaf_argument):
            if argument in self.layouts:
                leaves.setdefault(argument, []).append(var)
            else:
                whole[var] = next(feed)
        for argument, layout in self.layouts.items():
            for number, value in enumerate(arrays[argument]):
                members = layout.leaves_of(number)
                lane = layout.places[members[0]].lane
                if lane is None:
                    whole[leaves[argument][members[0]]] = value
                elif lane == -1:
                    stacks[leaves[argument][members[0]]] = value
                else:
                    members.sort(key=lambda i: layout.places[i].lane or 0)
                    lanes[tuple(leaves[argument][i] for i in members)] = value
        return lanes, stacks, whole

    def _loss_and_gradients(self, before: Evaluation):
        """The loss's outputs over the whole batch, and the gradients by group, stack or variable of the step."""
        inputs = _LossInputs(self, before)
        graph, pipeline = self.loss.graph, self.pipeline
        given, wanted = inputs.prepared()
        chosen = tuple(select(flags, values) for flags, values in zip(wanted, given))

        def prepare(chosen):
            """What depends on parameters only, once per step: lane operands, shared values, outputs without the batch."""
            lanes, stacks, single = (merge(f, c, v) for f, c, v in zip(wanted, chosen, given))
            ev = self.prepare.start(lanes, stacks, dict(zip(inputs.single, single)))
            lane_values = self._lane_operands(ev)
            shared_values = [ev.whole(v) for v in pipeline.shared]
            rest = {n: ev.whole(a) for n, a in enumerate(graph.program.outvars) if self._is_prepared_output(n)}
            made = (select(pipeline.lane_gradient, lane_values), select(pipeline.shared_gradient, shared_values))
            return made, (lane_values, shared_values, rest)

        made, pull, (lane_values, shared_values, rest) = jax.vjp(prepare, chosen, has_aux=True)
        lane_values = self.shardings.constrain(lane_values, pipeline.lane_specs)
        shared_values = self.shardings.constrain(shared_values, pipeline.shared_specs)
        batch = [inputs.value(v) for v in graph.rows_inputs if self.loss.inputs[v].kind != "numbers"]
        pipelined, *sums = pipeline(lane_values, shared_values, batch)
        (gradients,) = pull(jax.tree.map(lambda s, m: s.astype(m.dtype), tuple(sums), made))
        piped = dict(zip(graph.epilogue_outputs, pipelined))
        outputs = [
            piped[n] if n in piped else self._all_rows(n, rest[n]) if n in rest else inputs.value(a)
            for n, a in enumerate(graph.program.outvars)
        ]
        outputs = self._postcompute(before, outputs)
        return outputs, inputs.by_result(wanted, gradients)

    def _postcompute(self, before: Evaluation, outputs: Sequence[Any]) -> list[Any]:
        """The loss's outputs from those of the pipeline."""
        post = self.loss.loss.postcompute
        operands = self.traced.equation.invars
        read = {a for e in post.jaxpr.eqns for a in e.invars if isinstance(a, Var)} | {
            a for a in post.jaxpr.outvars if isinstance(a, Var)
        }
        values = [before.whole(a) if v in read else None for v, a in zip(post.jaxpr.invars, operands)]
        return evaluate(post.jaxpr, post.consts, *values, *outputs)

    def _all_rows(self, n: int, value: Any) -> Any:
        """An output that reads no row, with the rows of the whole batch where it has those of a microbatch: they are all alike."""
        status, pipeline = self.loss.loss.out_status[n], self.pipeline
        if not isinstance(status, Batched):
            return value
        count = pipeline.num_microbatches * pipeline.mesh.shape["data"]
        return jnp.tile(value, [count if axis == status.axis else 1 for axis in range(value.ndim)])

    def _is_prepared_output(self, n: int) -> bool:
        """Whether an output of the loss comes from parameters and constants alone."""
        atom = self.loss.graph.program.outvars[n]
        return n not in self.loss.graph.epilogue_outputs and not (
            isinstance(atom, Var) and atom in self.loss.rows_status
        )

    def _lane_operands(self, ev: Evaluation) -> list[Any]:
        """The lane operands of all chains, one chain after the other."""
        values: list[Any] = []
        for chain, layout in zip(self.loss.graph.chains, self.chain_layouts):
            raw = [
                ev.packed(s.values, layout) if s.stack is None else ev.packed_stack(s.stack, layout)
                for s in chain.slots
            ]
            if chain.lane_prepare.eqns or len(chain.lane_prepare.outvars) != len(raw):
                read = {a for e in chain.lane_prepare.eqns for a in e.invars if isinstance(a, Var)}
                shared = [ev.whole(v) if v in read else None for v in chain.shared]
                shielded = [v is not None and layout.needs_shield(v) for v in shared]
                shared = [layout.spread(v) if yes else v for v, yes in zip(shared, shielded)]

                def prepare(lane, shared, chain=chain):
                    return evaluate(chain.lane_prepare, [], *lane, *shared)

                axes = (0, [0 if yes else None for yes in shielded])
                raw = jax.vmap(jax.vmap(prepare, axes), axes)(raw, shared)
            values += raw
        return values

    def _results(self, after: Evaluation):
        """The step's outputs: states packed, everything else whole and flat."""
        outvars = self.traced.jaxpr.jaxpr.outvars
        new_states = []
        taken: set[int] = set()
        for argument, layout in self.returned.items():
            positions = self.state_outputs[argument]
            taken.update(positions)
            arrays = []
            for number in range(len(layout.specs)):
                members = sorted(layout.leaves_of(number), key=lambda i: layout.places[i].lane or 0)
                atoms = [outvars[positions[i]] for i in members]
                lane = layout.places[members[0]].lane
                if lane is None:
                    arrays.append(_typed(after.whole(atoms[0]), layout.avals[members[0]]))
                elif lane == -1:
                    arrays.append(after.packed_stack(atoms[0], layout.lane_layout(number)))
                else:
                    arrays.append(after.packed(atoms, layout.lane_layout(number)))
            new_states.append(self.shardings.constrain(arrays, layout.specs))
        rest = [_typed(after.whole(a), a.aval) for n, a in enumerate(outvars) if n not in taken]
        return new_states, rest


def _typed(value: Any, aval: Any) -> Any:
    return (
        jnp.asarray(value, aval.dtype)
        if isinstance(value, (bool, int, float)) or not hasattr(value, "dtype")
        else value
    )


class _LossInputs:
    """The inputs of the pipelined loss, from the values of the step before its gradient call."""

    def __init__(self, step: StepProgram, before: Evaluation):
        self.step, self.before = step, before
        self.loss, self.traced = step.loss, step.traced
        self.operands = step.traced.equation.invars
        program = self.loss.graph.program
        grouped = {v for g in step.lane_groups for v in g} | set(step.stack_inputs)
        read = {a for e in program.eqns for a in e.invars if isinstance(a, Var)}
        read |= {a for a in program.outvars if isinstance(a, Var)}
        self.single = [v for v in program.invars if v in read and v not in grouped and v not in self.loss.rows_status]
        self.precomputed = self._precompute()

    def _precompute(self) -> list[Any]:
        """What the loss needs of the whole batch at once."""
        program = self.loss.loss.precompute
        if not program.jaxpr.outvars:
            return []
        read = {a for e in program.jaxpr.eqns for a in e.invars if isinstance(a, Var)}
        read |= {a for a in program.jaxpr.outvars if isinstance(a, Var)}
        values = [self.before.whole(a) if v in read else None for v, a in zip(program.jaxpr.invars, self.operands)]
        return evaluate(program.jaxpr, program.consts, *values)

    def operand(self, var: Var) -> int | None:
        """The position of an input among the operands of the gradient call."""
        source = self.loss.inputs[var]
        return source.index if source.kind == "operand" else None

    def value(self, var: Var) -> Any:
        """The whole value of an input."""
        source = self.loss.inputs[var]
        if source.kind == "constant":
            return self.loss.constants[source.index]
        if source.kind == "precomputed":
            return self.precomputed[source.index]
        return self.before.whole(self.operands[source.index])

    def prepared(self) -> tuple[Any, Any]:
        """`(values, whether gradients are wanted)` of lane groups (packed), stacks (packed) and single inputs."""
        step = self.step

        def group(variables, layout) -> Any:
            if self.operand(variables[0]) is None:
                return layout.pack([self.value(v) for v in variables])
            return self.before.packed([self.operands[self.loss.inputs[v].index] for v in variables], layout)

        def stack(var: Var, layout) -> Any:
            at = self.operand(var)
            return (
                layout.pack_stack(jnp.asarray(self.value(var)))
                if at is None
                else self.before.packed_stack(self.operands[at], layout)
            )

        def wanted(var: Var) -> bool:
            at = self.operand(var)
            return at is not None and at >= self.traced.num_loss_constants and is_differentiable(var.aval)

        values = (
            [group(g, layout) for g, layout in step.lane_groups.items()],
            [stack(v, layout) for v, layout in step.stack_inputs.items()],
            [self.value(v) for v in self.single],
        )
        flags = (
            [wanted(g[0]) for g in step.lane_groups],
            [wanted(v) for v in step.stack_inputs],
            [wanted(v) for v in self.single],
        )
        return values, flags

    def by_result(self, wanted, gradients) -> dict[Any, Any]:
        """Gradients by what they are called in the step; parameters that the loss does not read get zeros."""
        first = self.traced.num_loss_constants
        results = self.traced.equation.outvars[len(self.traced.equation.outvars) - (len(self.operands) - first) :]

        def result(var: Var) -> Var:
            return results[self.loss.inputs[var].index - first]

        sources = (list(self.step.lane_groups), list(self.step.stack_inputs), self.single)
        found: dict[Any, Any] = {}
        for names, flags, values in zip(sources, wanted, gradients):
            for name, value in zip(select(flags, names), values):
                found[tuple(result(v) for v in name) if isinstance(name, tuple) else result(name)] = value
        covered = {v for key in found for v in (key if isinstance(key, tuple) else (key,))}
        found.update((v, jnp.zeros(v.aval.shape, v.aval.dtype)) for v in results if v not in covered)
        return found
