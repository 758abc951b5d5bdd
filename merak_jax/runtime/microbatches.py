"""What a run of the pipeline reads and sums: values of one microbatch, accumulators, outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from merak_jax.runtime.rows import rows_back, rows_first
from merak_jax.runtime.stage import accumulator_dtype, is_differentiable, put, select, take
from merak_jax.tracing.jaxprs import evaluate, evaluate_equation
from merak_jax.tracing.microbatch import Batched, Partial

if TYPE_CHECKING:
    from merak_jax.runtime.pipeline import Pipeline

P = PartitionSpec


class Run:
    """One trace of a pipeline on a data shard: the values that all its microbatches read, and what they add up."""

    def __init__(self, pipeline: Pipeline, lanes, shared, rows):
        self.p, self.graph, self.lanes, self.shared, self.rows = pipeline, pipeline.graph, lanes, shared, rows
        self.value_of = dict(zip(pipeline.shared, shared))
        self.data = pipeline.mesh.shape["data"]
        local = pipeline.rows // self.data
        self.size = local // pipeline.num_microbatches
        self.first_row = lax.axis_index("data").astype(jnp.uint32) * local if self.data > 1 else jnp.uint32(0)
        self.stages = pipeline.mesh.shape["pipe"]
        self.wanted = pipeline.shared_gradient

    # Values of one microbatch.

    def microbatch(self, m) -> list[Any]:
        """The rows inputs of microbatch `m`, at microbatch shape."""
        feed = iter(self.rows)
        numbers = (
            self.first_row + jnp.asarray(m).astype(jnp.uint32) * self.size + jnp.arange(self.size, dtype=jnp.uint32)
        )

        def rows(status):
            value = take(next(feed), m)
            return rows_back(value, status) if isinstance(status, Batched) else value

        return [numbers if status is None else rows(status) for status in self.p.rows_status]

    def values(self, variables, shared=None) -> list[Any]:
        value_of = self.value_of if shared is None else dict(zip(self.p.shared, shared))
        return [value_of[v] for v in variables]

    def epilogue(self, carry, shared, rows) -> tuple[Any, list[Any]]:
        """`(loss, all outputs)` of a microbatch."""
        operands = [*carry, *self.values(self.graph.epilogue_shared, shared), *rows]
        outputs = evaluate(self.graph.epilogue, [], *operands, special=self.unsplit)
        return outputs[0] if outputs else None, outputs

    def unsplit(self, eqn, operands) -> list[Any] | None:
        """Keep whole what is sorted: XLA's partitioner aborts on the scatter in the derivative of a sort of split values."""
        if eqn.primitive.name not in ("sort", "top_k"):
            return None
        results = evaluate_equation(eqn, [self.constrain(x, P()) for x in operands])
        return [self.constrain(x, P()) for x in results]

    # Sharding of what is accumulated.

    def constrain(self, value, spec):
        if all(self.p.mesh.shape[a] == 1 for a in ("pipe", "tensor")):
            return value
        context = jax.sharding.get_abstract_mesh()
        return lax.with_sharding_constraint(value, NamedSharding(self.p.mesh if context.empty else context, spec))

    def whole(self, values) -> list[Any]:
        """Values whole on every device, gathered here and not, as the compiler may choose, wherever a tick could read them."""
        return [v if jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended) else self.constrain(v, P()) for v in values]

    def constrain_shared_sums(self, sums):
        """Keep the accumulators of shared gradients split as the shared values are."""
        return [self.constrain(x, spec) for x, spec in zip(sums, select(self.wanted, self.p.shared_specs))]

    def add_shared(self, sums, gradients, valid=None):
        """Add one microbatch's gradients of the shared values to what is accumulated."""
        if valid is not None:
            gradients = [jnp.where(valid, g, jnp.zeros_like(g)) for g in gradients]
        return self.constrain_shared_sums([a + g.astype(a.dtype) for a, g in zip(sums, gradients)])

    def zero_shared_sums(self) -> list[Any]:
        return self.constrain_shared_sums(
            [jnp.zeros(v.shape, accumulator_dtype(v.dtype)) for v in select(self.wanted, self.shared)]
        )

    def zero_outputs(self) -> list[Any]:
        """Sums start at zero; rows are collected per microbatch."""
        avals = [a.aval for a in self.graph.epilogue.outvars]
        return [
            jnp.zeros(aval.shape, _sum_dtype(aval.dtype))
            if isinstance(status, Partial)
            else jnp.zeros((self.p.num_microbatches, *_rows_shape(aval, status)), aval.dtype)
            for aval, status in zip(avals, self.p.output_status)
        ]

    def collect(self, outputs, new, m, valid=None) -> list[Any]:
        """Add one microbatch's outputs to what is collected."""
        result = []
        for total, value, status in zip(outputs, new, self.p.output_status):
            if isinstance(status, Partial):
                value = value.astype(total.dtype)
                result.append(total + (value if valid is None else jnp.where(valid, value, jnp.zeros_like(value))))
            else:
                rows = rows_first(value, status, total.shape[1])
                result.append(put(total, rows if valid is None else jnp.where(valid, rows, take(total, m)), m))
        return result


def _sum_dtype(dtype) -> Any:
    """Sums are wide while they are added up and reduced: XLA:CPU aborts on some all-reduces of 16 bits."""
    if is_differentiable(jax.ShapeDtypeStruct((), dtype)):
        return accumulator_dtype(dtype)
    wide = {"i": jnp.int32, "u": jnp.uint32}.get(np.dtype(dtype).kind)
    return dtype if wide is None else jnp.promote_types(dtype, wide)


def _rows_shape(aval, status: Batched) -> tuple[int, ...]:
    """Shape of a value with its rows in front."""
    rows = aval.shape[status.axis] // (status.outer * status.inner)
    if status.axis == 0 and status.outer == status.inner == 1:
        return aval.shape
    rest = (*aval.shape[: status.axis], status.outer, status.inner, *aval.shape[status.axis + 1 :])
    return (rows, *rest)
