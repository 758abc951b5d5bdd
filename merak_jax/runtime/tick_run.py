"""Run a loss by a tick table: one scan per phase, one `shard_map` over `pipe` per kind of task."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from merak_jax.partition.chain import stashed_once
from merak_jax.runtime.microbatches import Run
from merak_jax.runtime.stage import Stage, accumulator_dtype, is_differentiable, merge, put, select, take
from merak_jax.schedules.ticks import NONE, TickTable
from merak_jax.tracing.jaxprs import evaluate

if TYPE_CHECKING:
    from merak_jax.runtime.pipeline import Pipeline

P = PartitionSpec


class TickRun(Run):
    """A run by a tick table: one scan per phase, one `shard_map` over `pipe` per kind of task."""

    def __init__(self, pipeline: Pipeline, lanes, shared, rows):
        super().__init__(pipeline, lanes, shared, rows)
        graph = self.graph
        gradient = dict(zip(pipeline.shared, pipeline.shared_gradient))
        self.lanes = self._by_chain(lanes)
        self.lane_gradient = self._by_chain(pipeline.lane_gradient)
        self.lane_specs = self._by_chain(pipeline.lane_specs)
        self.counts = np.array([layout.counts for layout in pipeline.layouts], np.int32).T
        self.stage = Stage(
            graph.chains,
            tuple(map(tuple, self.lane_gradient)),
            graph.chain_shared,
            tuple(gradient[v] for v in graph.chain_shared),
            graph.side_rows,
            stashed_once(graph.chains) if pipeline.differentiated else (True,) * len(graph.carry_avals),
            self.constrain_lane_sums,
        )

    def _by_chain(self, values: Sequence[Any]) -> list[list[Any]]:
        """One entry per lane operand, as one list per chain."""
        feed = iter(values)
        return [list(itertools.islice(feed, len(c.lane_prepare.outvars))) for c in self.graph.chains]

    def prologue(self, shared, rows) -> list[Any]:
        """The first carry of a microbatch."""
        made = iter(
            evaluate(
                self.graph.prologue, [], *self.values(self.graph.prologue_shared, shared), *rows, special=self.unsplit
            )
        )
        given = set(self.graph.prologue_slots)
        return [
            next(made) if n in given else jnp.zeros(aval.shape, aval.dtype)
            for n, aval in enumerate(self.graph.carry_avals)
        ]

    def side(self, rows) -> list[Any]:
        """What the blocks read of a microbatch besides the carry."""
        return evaluate(self.graph.side, [], *self.values(self.graph.side_shared), *rows, special=self.unsplit)

    def constrain_lane_sums(self, sums, number: int, inside_pipe: bool = True):
        """Keep the accumulators of a chain's lane gradients split as their parameters are."""
        specs = select(self.lane_gradient[number], self.lane_specs[number])
        if self.p.mesh.shape["tensor"] == 1 and inside_pipe:
            return sums
        return [self.constrain(x, P(*spec[1:]) if inside_pipe else spec) for x, spec in zip(sums, specs)]

    def zero_lane_sums(self) -> list[list[Any]]:
        found = []
        for number, lanes in enumerate(self.lanes):
            wanted = select(self.lane_gradient[number], lanes)
            sums = [jnp.zeros(x.shape, accumulator_dtype(x.dtype)) for x in wanted]
            found.append(self.constrain_lane_sums(sums, number, inside_pipe=False))
        return found

    def gradients(self):
        """The loss and its gradient by the tick table: one scan per phase."""
        table, avals = self.p.table, self.graph.carry_avals
        assert table is not None
        depth = max(1, int(self.counts.sum(1).max()))
        lead = (self.stages,)
        floats = self.stage.carry_float if self.p.differentiated else [False] * len(avals)
        state = {
            "stash": [
                empty_buffer((*lead, table.num_stash_slots, *(() if same else (depth,)), *a.shape), a.dtype)
                for a, same in zip(avals, self.stage.once)
            ],
            "inbox": [
                empty_buffer((*lead, table.num_cotangent_slots, *a.shape), a.dtype) for a in select(floats, avals)
            ],
            "lanes": self.zero_lane_sums(),
            "block_shared": [
                jnp.zeros((*lead, *v.shape), accumulator_dtype(v.dtype))
                for v in select(self.stage.shared_gradient, self.values(self.stage.shared))
            ],
            "shared": self.zero_shared_sums(),
            "outputs": self.zero_outputs(),
        }
        # What arrived at the end of a tick is stored at the start of the next one: then no buffer is read after it is written,
        # and XLA keeps every write in place.
        state["arrived"] = [empty_buffer((*lead, *a.shape), a.dtype) for a in avals]
        state["returned"] = [empty_buffer((*lead, *a.shape), a.dtype) for a in select(floats, avals)]
        state["arrived"] = self._after_what_is_read_later(state["arrived"])
        for name in ("stash", "inbox", "block_shared", "arrived", "returned"):
            state[name] = [self.constrain(x, P("pipe")) for x in state[name]]
        tables = _columns(table)
        for phase in table.phases:
            columns = {name: column[phase.start : phase.stop] for name, column in tables.items()}
            present = {name: bool((column >= 0).any()) for name, column in columns.items()}
            always = {name: bool((column >= 0).all()) for name, column in columns.items()}

            def tick(state, column, phase=phase, present=present, always=always):
                return self._tick(dict(state), column, phase, present, always), None

            state, _ = lax.scan(tick, state, {name: jnp.asarray(column) for name, column in columns.items()})
        shared = dict(zip([v for v, yes in zip(self.p.shared, self.wanted) if yes], state["shared"]))
        for v, total in zip(select(self.stage.shared_gradient, self.stage.shared), state["block_shared"]):
            shared[v] = shared[v] + total.sum(0)
        return state["outputs"], sum(state["lanes"], []), self.constrain_shared_sums(list(shared.values()))

    def _after_what_is_read_later(self, buffers) -> list[Any]:
        """The same empty buffers, but known only when every small shared value is: the first phase starts after them.

        A token count is summed over `data` and read in the second phase. Left alone, XLA:CPU may run that sum on some devices
        while others are in the first phase's sends, and with few threads neither ends.
        """
        known = jnp.zeros((), jnp.float32)
        for value, spec in zip(self.shared, self.p.shared_specs):
            if spec == P() and value.size and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
                known = known + jnp.ravel(value)[0].real.astype(jnp.float32)
        return [x + known.astype(x.dtype) if is_differentiable(x) else x for x in buffers]

    def _tick(self, state, column, phase, present, always):
        """One tick: store what arrived, F on every stage, the epilogue, B on every stage."""
        if present["store_arrived"]:
            places = [() if same else (0,) for same in self.stage.once]
            state["stash"] = self._receive(state["stash"], state["arrived"], column["store_arrived"], places)
        if present["store_returned"]:
            state["inbox"] = self._receive(
                state["inbox"], state["returned"], column["store_returned"], [()] * len(state["inbox"])
            )
        cotangent = None
        if phase.forward:
            state["stash"], last, state["arrived"] = self._forward(state, column)
        if phase.epilogue:
            m, valid = column["epilogue"], None if always["epilogue"] else column["epilogue"] >= 0
            cotangent = self._run_epilogue(state, last, jnp.maximum(m, 0), valid)
        if phase.backward:
            state["returned"] = self._backward(state, column, cotangent)
        elif cotangent is not None:
            state["inbox"] = self._store_epilogue(state["inbox"], cotangent, column)
        return state

    def _on_stages(self, function, stage_args, whole_args):
        """Run `function(run, stage, own, whole)` on every stage.

        `stage_args` are split over `pipe` in dimension 0, `whole_args` are not; `run` reads the values that blocks need.
        """
        names = list(dict.fromkeys([*self.stage.shared, *self.graph.side_shared]))

        def body(stage_args, whole_args, values):
            own = jax.tree.map(lambda x: x[0], stage_args)
            run = copy.copy(self)
            shared, run.rows, run.first_row = values
            run.value_of = dict(zip(names, shared))
            out = function(run, lax.axis_index("pipe"), own, whole_args)
            return jax.tree.map(lambda x: x[None], out)

        return jax.shard_map(
            body,
            mesh=self._mesh_for_stages(),
            axis_names={"pipe"},
            check_vma=False,
            in_specs=(P("pipe"), P(), P()),
            out_specs=P("pipe"),
        )(stage_args, whole_args, (self.values(names), self.rows, self.first_row))

    def _forward(self, state, column):
        rows = self.microbatch(jnp.maximum(column["prologue"], 0))
        first = self.prologue(None, rows)
        counts = jnp.asarray(self.counts)
        last = self.stages - 1
        shift = [(s, s + 1) for s in range(last)]

        def body(run, stage, own, first):
            m, slot, count = own["m"], jnp.maximum(own["slot"], 0), own["count"]
            arrived = [take(s, slot) if same else take(s, slot, 0) for s, same in zip(own["stash"], self.stage.once)]
            carry = [jnp.where(stage == 0, x, a) for x, a in zip(first, arrived)]
            side = run.side(run.microbatch(jnp.maximum(m, 0)))
            shared = run.values(self.stage.shared)
            # An idle stage runs no block: nothing to discard, and no slot is touched.
            out, stash = self.stage.forward(
                carry, own["lanes"], shared, side, own["stash"], slot, jnp.where(m >= 0, count, 0), m >= 0
            )
            sent = [lax.ppermute(x, "pipe", shift) for x in out]
            return stash, [_only(stage == last, x) for x in out], sent

        stash, out, sent = self._on_stages(
            body,
            {
                "m": column["forward"],
                "slot": column["forward_slot"],
                "count": counts,
                "stash": state["stash"],
                "lanes": self.lanes,
            },
            first,
        )
        return stash, [_sum_over_stages(x) for x in out], sent

    def _run_epilogue(self, state, carry, m, valid):
        """Collect the outputs of a microbatch that left the last stage; the cotangent of its carry."""
        rows, floats = self.microbatch(m), self.stage.carry_float
        if not self.p.differentiated:
            state["outputs"] = self.collect(state["outputs"], self.epilogue(carry, self.shared, rows)[1], m, valid)
            return None

        def loss(carry_part, shared_part):
            return self.epilogue(merge(floats, carry_part, carry), merge(self.wanted, shared_part, self.shared), rows)

        _, pull, new = jax.vjp(loss, select(floats, carry), select(self.wanted, self.shared), has_aux=True)
        cotangent, d_shared = pull(jnp.ones((), self.graph.epilogue.outvars[0].aval.dtype))
        state["outputs"] = self.collect(state["outputs"], new, m, valid)
        state["shared"] = self.add_shared(state["shared"], d_shared, valid)
        return cotangent

    def _store_epilogue(self, inbox, cotangent, column):
        last = self.stages - 1

        def body(run, stage, own, whole):
            cotangent, slot = whole
            return _store(own, cotangent, jnp.where(stage == last, slot, -1))

        return self._on_stages(body, inbox, (list(cotangent), column["epilogue_slot"]))

    def _backward(self, state, column, cotangent):
        counts = jnp.asarray(self.counts)
        shift = [(s, s - 1) for s in range(1, self.stages)]
        last = self.stages - 1

        def body(run, stage, own, whole):
            cotangent, epilogue_slot = whole
            m, slot = own["m"], jnp.maximum(own["slot"], 0)
            inbox = own["inbox"]
            if cotangent is not None:
                inbox = _store(inbox, cotangent, jnp.where(stage == last, epilogue_slot, -1))
            incoming = [take(x, jnp.maximum(own["cotangent_slot"], 0)) for x in inbox]
            side = run.side(run.microbatch(jnp.maximum(m, 0)))
            out, lanes, block_shared = self.stage.backward(
                incoming,
                own["lanes"],
                run.values(self.stage.shared),
                side,
                own["stash"],
                slot,
                jnp.where(m >= 0, own["count"], 0),
                own["lane_sums"],
                own["shared_sums"],
            )
            sent = [lax.ppermute(x, "pipe", shift) for x in out]
            return inbox, [_only((stage == 0) & (m >= 0), x) for x in out], sent, lanes, block_shared

        inbox, out, sent, lanes, block_shared = self._on_stages(
            body,
            {
                "m": column["backward"],
                "slot": column["backward_slot"],
                "cotangent_slot": column["cotangent_slot"],
                "count": counts,
                "stash": state["stash"],
                "inbox": state["inbox"],
                "lanes": self.lanes,
                "lane_sums": state["lanes"],
                "shared_sums": state["block_shared"],
            },
            (None if cotangent is None else list(cotangent), column["epilogue_slot"]),
        )
        state["inbox"], state["lanes"], state["block_shared"] = inbox, lanes, block_shared
        first = [_sum_over_stages(x) for x in out]
        rows, floats = self.microbatch(jnp.maximum(column["prologue_backward"], 0)), self.stage.carry_float

        def prologue(shared_part):
            return select(floats, self.prologue(merge(self.wanted, shared_part, self.shared), rows))

        _, pull = jax.vjp(prologue, select(self.wanted, self.shared))
        state["shared"] = self.add_shared(state["shared"], pull(first)[0])
        return sent

    def _receive(self, buffers, values, slots, places: Sequence[tuple[int, ...]]):
        """Store what arrived, at `[slot, *place]` of each stage's buffers."""

        def store(buffer, value, slot, place):
            # The stage's leading 1 stays, so that the write is in place.
            at = (0, jnp.maximum(slot, 0), *place)
            return put(buffer, jnp.where(slot >= 0, value[0], take(buffer, *at)), *at)

        def body(buffers, values, slots):
            return [store(b, v, slots[0], place) for b, v, place in zip(buffers, values, places)]

        return jax.shard_map(
            body,
            mesh=self._mesh_for_stages(),
            axis_names={"pipe"},
            check_vma=False,
            in_specs=P("pipe"),
            out_specs=P("pipe"),
        )(buffers, values, slots)

    def _mesh_for_stages(self) -> Mesh | None:
        """The mesh of a shard_map over `pipe`: inside the one over `data` it is known."""
        return None if self.data > 1 else self.p.mesh


def _columns(table: TickTable) -> dict[str, np.ndarray]:
    """What a tick reads of the table, `[ticks, P]` or `[ticks]`."""
    columns = {
        name: getattr(table, name)
        for name in (
            "forward",
            "forward_slot",
            "backward",
            "backward_slot",
            "cotangent_slot",
            "epilogue",
            "epilogue_slot",
        )
    }
    # What all devices need to know of stage 0, so that nobody asks stage 0 for it.
    columns["prologue"], columns["prologue_backward"] = table.forward[:, 0], table.backward[:, 0]
    nothing = np.full((1, table.forward.shape[1]), NONE, np.int32)
    columns["store_arrived"] = np.concatenate([nothing, table.receive_forward_slot[:-1]])
    columns["store_returned"] = np.concatenate([nothing, table.receive_backward_slot[:-1]])
    return columns


def _only(here, value) -> Any:
    """`value` on the stage that has it, zeros elsewhere."""
    return jnp.where(here, value, jnp.zeros_like(value))


def _sum_over_stages(values) -> Any:
    """`[P, ...]`, zeros but on one stage, as the value that every stage then has."""
    return values.any(0) if values.dtype == jnp.bool_ else values.sum(0, dtype=values.dtype)


def empty_buffer(shape, dtype) -> Any:
    """A stash or an inbox before anything is in it: its content is never read, which tests check with NaN."""
    return jnp.zeros(shape, dtype)


def _store(buffers, values, slot):
    """Write `values` at `slot` of `buffers`; nothing where `slot` is negative."""
    at = jnp.maximum(slot, 0)
    return [put(b, jnp.where(slot >= 0, x, take(b, at)), at) for b, x in zip(buffers, values)]
