"""Choose which dimension of which parameter of a block is split over `tensor`: Megatron's, without names.

Dimensions that run along each other form classes (`dimensions.py`). A class may be split if every device can
then work on its own part and only values of the size of a projection are summed over `tensor`
(`candidates.py`). Among the sets of classes that never split one value twice, the choice is exact, and its order
of wishes strict: the fewest matmul flops left unsplit, then the fewest bytes summed over `tensor`, then the most
elements of parameters split. Flops come first because they are what the devices are for, and what is summed
is bounded by the rule on projections.

Column- and row-parallel linear layers: Shoeybi et al. 2019, "Megatron-LM", section 3. The residual stream
stays whole in what is chosen here; `TensorLayout.sequence` says where it can be split between matmuls, after
Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from merak_jax.partition.candidates import Candidates, choose, residual_stream
from merak_jax.partition.class_splits import sums_of
from merak_jax.partition.dimensions import CARRY, PARAMETER, SIDE, Value
from merak_jax.partition.follow import follow_dimensions
from merak_jax.partition.sequence import split_sequence


@dataclass(frozen=True)
class AllReduce:
    """A sum over `tensor` that the split causes: shape and dtype of the value, direction, times per block."""

    shape: tuple[int, ...]
    dtype: str
    direction: str
    times: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the values summed, all `times` together."""
        return self.times * math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TensorLayout:
    """How the parameters of one block are split over `tensor`.

    Attributes:
      splits: for each parameter the dimension that is split, None if it is replicated.
      reasons: for each parameter why, in words.
      collectives: the predicted all-reduces of one block and microbatch. The gradient of a value that several
        projections read counts once: XLA:GPU adds the parts first, XLA:CPU sums them as one tuple.
      activation_splits: position of a top-level `dot_general` equation to the dimension of its output that is
        split: the values to constrain where GSPMD should not be left to guess. None: the output stays whole,
        though it runs along what is split: keys and values of fewer heads than T.
      sequence: for each value of the carry the dimension along which it can be split over `tensor` between
        matmuls (sequence parallelism), None if it stays whole.
      sequence_reason: why, in words.
      grouped: sizes (groups, heads in a group) of reshapes behind which both dimensions are split together,
        for `opaque_dimensions`.
      split_flops, flops: floating-point operations of the forward matmuls that are split, and of all.
    """

    splits: tuple[int | None, ...]
    reasons: tuple[str, ...]
    collectives: tuple[AllReduce, ...]
    activation_splits: Mapping[int, int | None]
    sequence: tuple[int | None, ...]
    sequence_reason: str
    grouped: frozenset[tuple[int, int]]
    split_flops: int
    flops: int

    def count(self, direction: str) -> int:
        """Return the number of all-reduces `direction` ("forward" or "backward") per block and microbatch."""
        return sum(c.times for c in self.collectives if c.direction == direction)

    def __str__(self) -> str:
        lines = [f"{'parameter':>9}  {'split':>5}  reason"]
        for i, (split, reason) in enumerate(zip(self.splits, self.reasons, strict=True)):
            lines.append(f"{i:>9}  {'-' if split is None else split:>5}  {reason}")
        for c in self.collectives:
            lines.append(f"{c.times} x {c.direction} all-reduce of {c.dtype}{list(c.shape)}, {c.nbytes} bytes")
        dims = ", ".join("-" if d is None else str(d) for d in self.sequence)
        lines.append(f"sequence of the carry ({dims}): {self.sequence_reason}")
        lines.append(f"split {self.split_flops} of {self.flops} matmul flops")
        return "\n".join(lines)


def tensor_layout(
    jaxpr,
    parameter_invars: Sequence[int],
    tensor_size: int,
    *,
    carry_invars: Sequence[int] | None = None,
    fixed: Mapping[int, int | None] = types.MappingProxyType({}),
) -> TensorLayout:
    """Find the column/row split of one block.

    Args:
      jaxpr: `jax.extend.core.ClosedJaxpr` or `Jaxpr` of the block at the sizes of one microbatch; it returns
        the new carry.
      parameter_invars: positions of the block's parameters among the inputs.
      tensor_size: T, the size of the `tensor` axis.
      carry_invars: positions of the carry, in the order of the outputs; by default the first inputs that are
        no parameters, one per output. All other inputs are side inputs.
      fixed: position in `parameter_invars` to the dimension that the user wants split, or None: whole. It is
        done as given. The class of a dimension that can be split is split with it, and nothing that conflicts;
        otherwise, and with None, a class that would split the parameter in another way is not split at all.

    Returns:
      A `TensorLayout` whose `splits` and `reasons` follow `parameter_invars`. Under GSPMD any split computes
      the same; what cannot be split without moving data is replicated, with the reason.

    Raises:
      ValueError: `tensor_size` is below 1; positions are out of range, overlap or do not fit the outputs; a
        position or dimension of `fixed` does not exist, or T does not divide the dimension.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    parameter_invars = tuple(parameter_invars)
    if carry_invars is None:
        others = (i for i in range(len(inner.invars)) if i not in set(parameter_invars))
        carry_invars = [i for i, _ in zip(others, inner.outvars, strict=False)]
    _check(inner, parameter_invars, tensor_size, carry_invars, fixed)

    origins = [SIDE] * len(inner.invars)
    for i in parameter_invars:
        origins[i] = PARAMETER
    for i in carry_invars:
        origins[i] = CARRY
    found = follow_dimensions(jaxpr, origins)
    carry = [found.inputs[i] for i in carry_invars]
    stream = residual_stream(found, carry)
    parameters = [found.inputs[i] for i in parameter_invars]

    candidates = Candidates(found, stream, parameters, tensor_size)
    given = _take_given(candidates, parameters, fixed)
    chosen = choose(candidates, given)
    own = {i: d if tensor_size > 1 else None for i, d in fixed.items()}
    names = {c: f"class {n} (size {candidates.size(c)})" for n, c in enumerate(candidates.order)}
    changed = [inner.invars[i] is not out for i, out in zip(carry_invars, inner.outvars, strict=True)]
    sequence, sequence_reason = split_sequence(found, carry, changed, chosen, tensor_size)
    return TensorLayout(
        splits=tuple(own[i] if i in own else candidates.dimension_in(p, chosen) for i, p in enumerate(parameters)),
        reasons=tuple(
            "given by the user" if i in own else _reason(candidates, p, chosen, names) for i, p in enumerate(parameters)
        ),
        collectives=tuple(
            AllReduce(s.value.shape, str(s.value.dtype), s.direction, s.times)
            for s in sums_of(found, [candidates.splits[c] for c in chosen])
        ),
        activation_splits={
            position: candidates.dimension_in(out, chosen)
            for position, out in found.product_outputs.items()
            if candidates.constrained(out, chosen)
        },
        sequence=sequence,
        sequence_reason=sequence_reason,
        grouped=frozenset().union(*(candidates.splits[c].grouped for c in chosen)),
        split_flops=sum(candidates.flops[c] for c in chosen),
        flops=sum(p.flops for p in found.products),
    )


def _check(inner, parameter_invars, tensor_size: int, carry_invars, fixed: Mapping[int, int | None]) -> None:
    if tensor_size < 1:
        raise ValueError(f"tensor_size must be at least 1, got {tensor_size}.")
    positions = [*parameter_invars, *carry_invars]
    if len(set(positions)) < len(positions) or not set(positions) <= set(range(len(inner.invars))):
        raise ValueError(
            f"parameter_invars {list(parameter_invars)} and carry_invars {list(carry_invars)} must be "
            f"different positions among the {len(inner.invars)} inputs of the block."
        )
    if len(carry_invars) != len(inner.outvars):
        raise ValueError(f"The block returns {len(inner.outvars)} values but takes {len(carry_invars)} as carry.")
    for i, d in fixed.items():
        if not 0 <= i < len(parameter_invars):
            raise ValueError(f"fixed names parameter {i}, but there are {len(parameter_invars)} parameters.")
        shape = inner.invars[parameter_invars[i]].aval.shape
        if d is not None and not 0 <= d < len(shape):
            raise ValueError(f"fixed splits dimension {d} of parameter {i}, which has the shape {shape}.")
        if d is not None and shape[d] % tensor_size:
            raise ValueError(
                f"fixed splits dimension {d} of parameter {i}, but its size {shape[d]} is not divisible by "
                f"tensor_size {tensor_size}."
            )


def _take_given(candidates: Candidates, parameters: Sequence[Value], fixed: Mapping[int, int | None]) -> set[int]:
    """Return the classes to split for the dimensions in `fixed`; what they rule out is not splittable after."""
    for i in (i for i, d in fixed.items() if d is None):
        for c in candidates.split_on(parameters[i]):
            candidates.why_not.setdefault(c, f"parameter {i} is kept whole by the user")
    given: set[int] = set()
    for i, d in fixed.items():
        if d is None or (node := parameters[i].nodes[d]) is None:
            continue
        c = candidates.found.classes.find(node)
        if c not in candidates.why_not and node in candidates.splits[c].nodes and not candidates.conflicts[c] & given:
            given.add(c)
            continue
        for other in set(candidates.split_on(parameters[i])) - given:
            candidates.why_not.setdefault(other, f"parameter {i} is split along dimension {d} by the user")
    return given


def vocabulary_split(shape: Sequence[int], ways: int) -> int | None:
    """Choose the split dimension of a parameter outside the blocks (embedding, head, position table, norm).

    Args:
      shape: the parameter's shape, for example `[vocabulary, hidden]`.
      ways: number of parts, P·T: tables are split over `pipe` and `tensor` together.

    Returns:
      The largest dimension divisible by `ways`, the first of equals. None, replicated, if there is none or if
      the array has fewer than two dimensions: a norm's scale is not worth a collective.
    """
    fitting = [d for d, n in enumerate(shape) if n > 0 and n % ways == 0]
    if len(shape) < 2 or not fitting:
        return None
    return max(fitting, key=lambda d: (shape[d], -d))


def _reason(candidates: Candidates, parameter: Value, chosen: frozenset[int], names: Mapping[int, str]) -> str:
    found = candidates.found
    if candidates.dimension_in(parameter, chosen) is not None:
        return f"{names[next(c for c in found.classes_of(parameter) if c in chosen)]}: split"
    if not found.classes_of(parameter):
        return "no split dimension: it has one element"
    parts = []
    for d, node in enumerate(parameter.nodes):
        if node is not None:
            c = found.classes.find(node)
            why = candidates.why_not.get(c)
            if c in chosen:
                groups = ", ".join(f"{n} groups of {heads}" for n, heads in sorted(candidates.splits[c].grouped))
                why = f"whole, as the {groups} that share it are split"
            elif why is None:
                rivals = ", ".join(names[r] for r in sorted(candidates.conflicts[c] & chosen))
                why = f"not together with {rivals}"
            parts.append(f"{d} (size {parameter.shape[d]}): {why}")
    return "no split dimension: " + "; ".join(parts)
