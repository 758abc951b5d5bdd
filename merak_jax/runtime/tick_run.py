"""Run a loss by a tick table: one scan per phase, one `shard_map` over `pipe` per kind of task."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from merak_jax.partition.chain import stashed_once
from merak_jax.partition.derivative import BlockDerivative
from merak_jax.partition.splits import LOCAL
from merak_jax.runtime.columns import columns_of
from merak_jax.runtime.microbatches import Run
from merak_jax.runtime.phase import Phase
from merak_jax.runtime.placement import Placement, spec_of
from merak_jax.runtime.stage import Stage, accumulator_dtype, is_differentiable, put, select, take
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
        self.carry_specs = pipeline.carry_specs
        self.lane_sum_specs = [
            [P("pipe", None, "tensor") if is_local else spec for is_local, spec in zip(self._local(number)[0], specs)]
            for number, specs in enumerate(map(select, self.lane_gradient, self.lane_specs))
        ]
        # [P, V, chains, 2]: the first lane and the number of blocks of each visit.
        self.visits = np.stack([layout.visits for layout in pipeline.layouts], axis=2)
        self.stage = Stage(
            graph.chains,
            tuple(map(tuple, self.lane_gradient)),
            graph.chain_shared,
            tuple(gradient[v] for v in graph.chain_shared),
            graph.side_rows,
            stashed_once(graph.chains) if pipeline.differentiated else (True,) * len(graph.carry_avals),
            Placement(self),
            pipeline.blocks,
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

    def _local(self, number: int) -> tuple[list[bool], list[bool]]:
        """Of the gradients of a chain's lanes, and of the shared values it reads, which every device has its own part of."""
        block = self.p.blocks[number]
        if not isinstance(block, BlockDerivative):
            return [], []
        places = [self.p.splits[number].of(v) is LOCAL for v in block.outputs[2]]
        lanes = sum(self.lane_gradient[number])
        return places[:lanes], places[lanes:]

    def zero_lane_sums(self) -> list[list[Any]]:
        """Accumulators `[P, N, ...]`, `[P, N, T, ...]` of parts."""
        found = []
        for number, lanes in enumerate(self.lanes):
            wanted, (local, _) = select(self.lane_gradient[number], lanes), self._local(number)
            sums = [
                jnp.zeros((*x.shape[:2], *self._parts(is_local), *x.shape[2:]), accumulator_dtype(x.dtype))
                for x, is_local in zip(wanted, local)
            ]
            found.append([self.constrain(x, s) for x, s in zip(sums, self.lane_sum_specs[number])])
        return found

    def _parts(self, is_local: bool) -> tuple[int, ...]:
        return (self.p.mesh.shape["tensor"],) if is_local else ()

    @functools.cached_property
    def local_shared(self) -> list[bool]:
        """Which gradients of shared values every device has its own part of."""
        local = set()
        for number, chain in enumerate(self.graph.chains):
            read = [v for v in chain.shared if v in set(select(self.stage.shared_gradient, self.stage.shared))]
            local |= {v for v, yes in zip(read, self._local(number)[1]) if yes}
        return [v in local for v in select(self.stage.shared_gradient, self.stage.shared)]

    @property
    def ways(self) -> tuple[str, ...]:
        """From which sides boundaries arrive: from the usual one, and where chunks go forth and back from the other one too."""
        assert self.p.table is not None
        return ("", "_back") if self.p.table.folded else ("",)

    def _pools(self, slots: int, kind: str) -> list[list[Any]]:
        """Per chain, buffers `[P, slots, n, ...]` for one value of each block of a visit."""
        if not slots:
            return []
        depths = self.visits[..., 1].max((0, 1)).tolist()
        return [
            [empty_buffer((self.stages, slots, max(1, depth), *v.aval.shape), v.aval.dtype) for v in getattr(d, kind)]
            for d, depth in zip(self.stage.blocks, depths)
        ]

    def gradients(self):
        """The loss and its gradient by the tick table: one scan per phase."""
        table, avals = self.p.table, self.graph.carry_avals
        assert table is not None
        depth = max(1, int(self.visits[..., 1].sum(2).max()))
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
                jnp.zeros((*lead, *self._parts(is_local), *v.shape), accumulator_dtype(v.dtype))
                for v, is_local in zip(
                    select(self.stage.shared_gradient, self.values(self.stage.shared)), self.local_shared
                )
            ],
            "shared": self.zero_shared_sums(),
            "outputs": self.zero_outputs(),
            "residuals": self._pools(table.num_residual_slots, "residual_vars"),
            "saved": self._pools(table.num_saved_slots, "saved_vars"),
        }
        # What arrived at the end of a tick is stored at the start of the next one: then no buffer is read after it is written,
        # and XLA keeps every write in place.
        for name, types in (("arrived", avals), ("returned", select(floats, avals))):
            for way in self.ways:
                state[name + way] = [empty_buffer((*lead, *a.shape), a.dtype) for a in types]
        state["arrived"] = self._after_what_is_read_later(state["arrived"])
        specs = self._buffer_specs()
        for name, values in state.items():
            if name in specs:
                state[name] = jax.tree.map(self.constrain, values, specs[name])
        tables = columns_of(table)
        for phase in table.phases:
            columns = {name: column[phase.start : phase.stop] for name, column in tables.items()}
            phase_run = Phase(self, phase.parts, columns)
            state, _ = lax.scan(phase_run.tick, state, {name: jnp.asarray(column) for name, column in columns.items()})
        shared = dict(zip([v for v, yes in zip(self.p.shared, self.wanted) if yes], state["shared"]))
        names = select(self.stage.shared_gradient, self.stage.shared)
        for v, total, is_local in zip(names, state["block_shared"], self.local_shared):
            shared[v] = shared[v] + total.sum((0, 1) if is_local else 0)
        lanes = [
            x.sum(2) if is_local else x
            for number, sums in enumerate(state["lanes"])
            for x, is_local in zip(sums, self._local(number)[0])
        ]
        return state["outputs"], lanes, self.constrain_shared_sums(list(shared.values()))

    def _buffer_specs(self) -> dict[str, Any]:
        """How buffers are split: over `pipe`, and as the values in them are over `tensor`."""

        def after(spec: PartitionSpec, lead: int) -> PartitionSpec:
            return P("pipe", *[None] * (lead - 1), *spec)

        floats = self.stage.carry_float if self.p.differentiated else [False] * len(self.carry_specs)
        gradients = select(floats, self.carry_specs)
        specs = {
            "stash": [after(s, 2 if same else 3) for s, same in zip(self.carry_specs, self.stage.once)],
            "inbox": [after(s, 2) for s in gradients],
            "block_shared": [P("pipe", "tensor") if is_local else P("pipe") for is_local in self.local_shared],
        }
        for name, own in (("arrived", self.carry_specs), ("returned", gradients)):
            specs.update((f"{name}{way}", [after(s, 1) for s in own]) for way in self.ways)
        table = self.p.table
        assert table is not None
        for name, slots, kind in (
            ("residuals", table.num_residual_slots, "residual_vars"),
            ("saved", table.num_saved_slots, "saved_vars"),
        ):
            specs[name] = (
                [
                    [after(spec_of(splits.of(v), v.aval.ndim), 3) for v in getattr(block, kind)]
                    for block, splits in zip(self.stage.blocks, self.p.splits)
                ]
                if slots
                else []
            )
        return specs

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

    def on_stages(self, function, stage_args, whole_args):
        """Run `function(run, stage, own, whole)` on every stage.

        `stage_args` are split over `pipe` in dimension 0, `whole_args` are not; `run` reads the values that blocks need.
        """
        names = list(dict.fromkeys([*self.stage.shared, *self.graph.side_shared]))
        # Not `lax.axis_index`: with loops over `tensor` inside, XLA finds some of its instructions ambiguous.
        numbers = jnp.arange(self.stages, dtype=jnp.int32)

        def body(number, stage_args, whole_args, values):
            own = jax.tree.map(lambda x: x[0], stage_args)
            run = copy.copy(self)
            shared, run.rows, run.first_row = values
            run.value_of = dict(zip(names, shared))
            out = function(run, number[0], own, whole_args)
            return jax.tree.map(lambda x: x[None], out)

        return jax.shard_map(
            body,
            mesh=self._mesh_for_stages(),
            axis_names={"pipe"},
            check_vma=False,
            in_specs=(P("pipe"), P("pipe"), P(), P()),
            out_specs=P("pipe"),
        )(numbers, stage_args, whole_args, (self.values(names), self.rows, self.first_row))

    def receive(self, buffers, values, slots, places: Sequence[tuple[int, ...]]):
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


def empty_buffer(shape, dtype) -> Any:
    """A stash or an inbox before anything is in it: its content is never read, which tests check with NaN."""
    return jnp.zeros(shape, dtype)
