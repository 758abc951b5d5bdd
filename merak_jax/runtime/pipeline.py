"""Run the loss and its gradient microbatch by microbatch, by a tick table or on one stage."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from merak_jax.partition.blocks import BlockGraph
from merak_jax.partition.derivative import BlockDerivative, BlockForward
from merak_jax.partition.lanes import LaneLayout
from merak_jax.partition.splits import BlockLayout, Split, Splits
from merak_jax.partition.tensor import TensorLayout
from merak_jax.runtime.microbatches import Run
from merak_jax.runtime.overlap import Rings
from merak_jax.runtime.rows import rows_back, rows_first
from merak_jax.runtime.stage import is_differentiable, merge, select
from merak_jax.runtime.tick_run import TickRun
from merak_jax.schedules.tick_table import TickTable
from merak_jax.tracing.microbatch import Batched, Partial, Shared

P = PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A loss cut into blocks, ready to run on a mesh.

    `rows_status`: per rows input of the graph its Batched status, or None for the numbers of the rows in the batch;
    Shared where the whole batch is the one microbatch.
    `output_status`: per epilogue output. `shared`: the variables of the shared values, in the order they are given;
    `shared_gradient`, `lane_gradient`: which shared values and which lane operands gradients are wanted for.
    `shared_specs`, `lane_specs`: their sharding, lanes as `[P, N, ...]`. Lane operands of all chains are one list; `layouts`
    says per chain how many blocks each stage has.
    """

    graph: BlockGraph
    layouts: tuple[LaneLayout, ...]
    mesh: Mesh
    num_microbatches: int
    table: TickTable | None
    rows: int
    rows_status: tuple[Batched | Shared | None, ...]
    output_status: tuple[Any, ...]
    shared: tuple[Any, ...]
    shared_gradient: tuple[bool, ...]
    shared_specs: tuple[PartitionSpec, ...]
    lane_gradient: tuple[bool, ...]
    lane_specs: tuple[PartitionSpec, ...]
    differentiated: bool = True
    carry_specs: tuple[PartitionSpec, ...] = ()
    rings: Rings | None = None
    paired: bool = False
    blocks: tuple[BlockForward | BlockDerivative, ...] = ()
    splits: tuple[Splits, ...] = ()

    def with_blocks(
        self, layouts: Sequence[TensorLayout | None], tokens: Sequence[int | None], sequence: bool
    ) -> Pipeline:
        """The same with the programs of its blocks, and where their values are over `tensor`.

        `layouts`: of each chain, where `tensor` splits its parameters; `tokens`: the dimension of each value of the carry along
        which it can be split; `sequence`: whether it is.

        Derivatives are traced here, outside of any mesh: made while the step is traced, their constants would belong to its mesh.
        """
        if self.table is None:
            return self
        chains = self.graph.chains
        wanted = {v for v, yes in zip(self.shared, self.shared_gradient) if yes}
        # Chains add to one sum of a value that several read: every device's own part, if all of them make such parts.
        readers = Counter(v for chain in chains for v in chain.shared)
        floats = [is_differentiable(aval) for aval in self.graph.carry_avals]
        gradient, specs = iter(self.lane_gradient), iter(self.lane_specs)
        blocks: list[BlockForward | BlockDerivative] = []
        splits = []
        for chain, split in zip(chains, layouts):
            lanes = chain.lane_prepare.outvars
            lane_gradient = [next(gradient) for _ in lanes]
            layout = BlockLayout(
                lanes=tuple(_tensor_dimension(next(specs)) for _ in lanes),
                tokens=tuple(tokens),
                sequence=sequence,
                deals=sequence or self.rings is not None,
                grouped=frozenset() if split is None else split.grouped,
                size=self.mesh.shape["tensor"],
            )
            if not self.differentiated:
                block = BlockForward.of(chain)
                blocks.append(block)
                splits.append(block.splits(layout))
                continue
            derivative = BlockDerivative.of(chain, floats, lane_gradient, [v in wanted for v in chain.shared])
            local = [True] * sum(lane_gradient) + [readers[v] == 1 for v in chain.shared if v in wanted]
            blocks.append(derivative)
            splits.append(derivative.splits(layout, floats, local))
        carry_specs = tuple(
            P(*(("tensor" if d == place.dimension else None) for d in range(len(aval.shape))))
            if isinstance(place, Split)
            else P()
            for place, aval in zip(layout.carry(), self.graph.carry_avals)
        )
        return dataclasses.replace(self, blocks=tuple(blocks), splits=tuple(splits), carry_specs=carry_specs)

    def __call__(self, lanes: Sequence[Any], shared: Sequence[Any], batch: Sequence[Any]):
        """`(outputs of the epilogue over the whole batch, lane gradients, shared gradients)`.

        `lanes`: `[P, N, ...]` operands of the block; `shared`: one value per `self.shared`; `batch`: the rows inputs at full
        size, without the row numbers. Gradients come for the wanted operands, in accumulator precision.
        """
        data = self.mesh.shape["data"]
        statuses = [s for s in self.rows_status if s is not None]
        rows = [rows_first(x, s, self.rows) if isinstance(s, Batched) else x for x, s in zip(batch, statuses)]
        local_rows = self.rows // data
        size = local_rows // self.num_microbatches

        def local(lanes, shared, rows):
            rows = [
                x.reshape(self.num_microbatches, size, *x.shape[1:]) if isinstance(s, Batched) else x[None]
                for x, s in zip(rows, statuses)
            ]
            run = _WholeRun if self.table is None else TickRun
            outputs, lane_sums, shared_sums = run(self, lanes, shared, rows).gradients()
            sums = [o for o, s in zip(outputs, self.output_status) if isinstance(s, Partial)]
            if data > 1:
                lane_sums, shared_sums, sums = lax.psum((lane_sums, shared_sums, sums), "data")
            feed = iter(sums)
            outputs = [
                next(feed) if isinstance(s, Partial) else o.reshape(local_rows, *o.shape[2:])
                for o, s in zip(outputs, self.output_status)
            ]
            return outputs, lane_sums, shared_sums

        if data > 1:
            out_specs = [P() if isinstance(s, Partial) else P("data") for s in self.output_status]
            local = jax.shard_map(
                local,
                mesh=self.mesh,
                axis_names={"data"},
                check_vma=False,
                in_specs=(P(), P(), P("data")),
                out_specs=(out_specs, P(), P()),
            )
        outputs, lane_sums, shared_sums = local(list(lanes), list(shared), rows)
        outputs = [
            o.astype(a.aval.dtype) if isinstance(s, Partial) else rows_back(o, s)
            for o, s, a in zip(outputs, self.output_status, self.graph.epilogue.outvars)
        ]
        return outputs, lane_sums, shared_sums


def _tensor_dimension(spec: PartitionSpec) -> int | None:
    """The dimension of one block's operand that is split over `tensor`; `spec`: of all blocks', `[P, N, ...]`."""
    return next((d for d, axis in enumerate(spec[2:]) if axis == "tensor"), None)


class _WholeRun(Run):
    """A run on one stage: the loss as the user wrote it, F and B of a microbatch after each other."""

    def gradients(self):
        """The loss and its gradient with all blocks on one stage."""

        if not self.p.differentiated:
            return self.outputs(), [], []

        def loss(shared_part, m):
            return self.epilogue([], merge(self.wanted, shared_part, self.shared), self.microbatch(m))

        gradient = jax.value_and_grad(loss, has_aux=True)

        def body(state, m):
            outputs, sums = state
            (_, new), gradients = gradient(select(self.wanted, self.shared), m)
            return (self.collect(outputs, new, m), self.add_shared(sums, gradients)), None

        state = (self.zero_outputs(), self.zero_shared_sums())
        state, _ = lax.scan(body, state, jnp.arange(self.p.num_microbatches))
        return state[0], [], state[1]

    def outputs(self) -> list[Any]:
        """The outputs alone."""

        def body(outputs, m):
            return self.collect(outputs, self.epilogue([], self.shared, self.microbatch(m))[1], m), None

        return lax.scan(body, self.zero_outputs(), jnp.arange(self.p.num_microbatches))[0]
