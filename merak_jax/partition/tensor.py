"""Choose which dimension of which parameter of a block is split over `tensor`: Megatron's, without names.

Dimensions that run along each other form classes (`dimensions.py`). A class may be split if every device can
then work on its own part and only values of the size of a projection are summed over `tensor`. Among the sets
of classes that never split one value twice, the one that splits most matmul work is chosen; ties go to the
fewest bytes summed.

Column- and row-parallel linear layers: Shoeybi et al. 2019, "Megatron-LM", section 3. The residual stream
stays whole: splitting it over the sequence is Korthikanti et al. 2022, "Reducing Activation Recomputation",
section 4.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from merak_jax.partition.dimensions import CARRY, PARAMETER, SIDE, Dimensions, Sum, Value
from merak_jax.partition.follow import follow_dimensions


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
        split: the values to constrain where GSPMD should not be left to guess.
      split_flops, flops: floating-point operations of the forward matmuls that are split, and of all.
    """

    splits: tuple[int | None, ...]
    reasons: tuple[str, ...]
    collectives: tuple[AllReduce, ...]
    activation_splits: Mapping[int, int]
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
        lines.append(f"split {self.split_flops} of {self.flops} matmul flops")
        return "\n".join(lines)


def tensor_layout(
    jaxpr, parameter_invars: Sequence[int], tensor_size: int, *, carry_invars: Sequence[int] | None = None
) -> TensorLayout:
    """Find the column/row split of one block.

    Args:
      jaxpr: `jax.extend.core.ClosedJaxpr` or `Jaxpr` of the block at the sizes of one microbatch; it returns
        the new carry.
      parameter_invars: positions of the block's parameters among the inputs.
      tensor_size: T, the size of the `tensor` axis.
      carry_invars: positions of the carry, in the order of the outputs; by default the first inputs that are
        no parameters, one per output. All other inputs are side inputs.

    Returns:
      A `TensorLayout` whose `splits` and `reasons` follow `parameter_invars`. Under GSPMD any split computes
      the same; what cannot be split without moving data is replicated, with the reason.

    Raises:
      ValueError: `tensor_size` is below 1, or positions are out of range, overlap or do not fit the outputs.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    parameter_invars = tuple(parameter_invars)
    if carry_invars is None:
        others = (i for i in range(len(inner.invars)) if i not in set(parameter_invars))
        carry_invars = [i for i, _ in zip(others, inner.outvars, strict=False)]
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

    origins = [SIDE] * len(inner.invars)
    for i in parameter_invars:
        origins[i] = PARAMETER
    for i in carry_invars:
        origins[i] = CARRY
    found = follow_dimensions(jaxpr, origins)
    stream = _residual_stream(found, [found.inputs[i] for i in carry_invars])
    parameters = [found.inputs[i] for i in parameter_invars]

    classes = _Candidates(found, stream, parameters, tensor_size)
    chosen = _choose(classes)
    names = {c: f"class {n} (size {classes.size(c)})" for n, c in enumerate(classes.order)}
    split_flops = sum(classes.flops[c] for c in chosen)
    return TensorLayout(
        splits=tuple(_dimension_in(found, p, chosen) for p in parameters),
        reasons=tuple(_reason(classes, p, chosen, names) for p in parameters),
        collectives=tuple(
            AllReduce(s.value.shape, str(s.value.dtype), s.direction, s.times) for s in classes.sums_of(chosen)
        ),
        activation_splits={
            position: dim
            for position, out in found.product_outputs.items()
            if (dim := _dimension_in(found, out, chosen)) is not None
        },
        split_flops=split_flops,
        flops=sum(p.flops for p in found.products),
    )


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


class _Candidates:
    """The classes that hold a parameter dimension: why one cannot be split, or what splitting it brings."""

    def __init__(self, found: Dimensions, stream: set[int], parameters: Sequence[Value], tensor_size: int) -> None:
        self.found = found
        find = found.classes.find
        self.members: dict[int, list[int]] = {}
        for node, size in enumerate(found.classes.sizes):
            self.members.setdefault(find(node), []).append(size)
        self.order = list(dict.fromkeys(c for p in parameters for c in _classes_of(found, p)))
        self.flops: Counter[int] = Counter()
        for product in found.products:
            for c in {c for v in (product.lhs, product.rhs, product.out) for c in _classes_of(found, v)}:
                self.flops[c] += product.flops
        self.parameter_elements: Counter[int] = Counter()
        for p in parameters:
            for c in set(_classes_of(found, p)):
                self.parameter_elements[c] += math.prod(p.shape)

        self.conflicts: dict[int, set[int]] = {c: set() for c in self.order}
        twice: set[int] = set()
        for value in found.values:
            here = Counter(_classes_of(found, value))
            twice |= {c for c, n in here.items() if n > 1}
            for c in here:
                if c in self.conflicts:
                    self.conflicts[c] |= here.keys() - {c}

        too_large = _sums_larger_than_a_projection(found)
        self.why_not: dict[int, str] = {}
        for c in self.order:
            indivisible = sorted(n for n in self.members[c] if n % tensor_size)
            opaque = found.classes.opaque_reason(c)
            if tensor_size == 1:
                self.why_not[c] = "the tensor axis has size 1"
            elif c in stream:
                self.why_not[c] = "residual stream"
            elif opaque:
                self.why_not[c] = opaque
            elif c in twice:
                self.why_not[c] = "twice on one value"
            elif indivisible:
                self.why_not[c] = f"{indivisible[0]} not divisible by {tensor_size}"
            elif not self.flops[c]:
                self.why_not[c] = "no matmul along it"
            elif c in too_large:
                self.why_not[c] = f"would all-reduce a value of shape {too_large[c]}"

    def size(self, c: int) -> int:
        """Return the number of units to deal out: heads, where heads are merged with their features."""
        return min(self.members[c])

    def sums_of(self, chosen: Iterable[int]) -> list[Sum]:
        """Return the sums over `tensor` that splitting the classes `chosen` causes, each once."""
        chosen = set(chosen)
        sums = {s.key: s for s in self.found.sums if self.found.classes.find(s.node) in chosen}
        return list(sums.values())

    def gain(self, chosen: Sequence[int]) -> tuple[int, int, int]:
        """Return what is maximised: matmul flops split, then minus bytes summed, then elements split."""
        summed = sum(s.times * s.value.nbytes for s in self.sums_of(chosen))
        return sum(self.flops[c] for c in chosen), -summed, sum(self.parameter_elements[c] for c in chosen)


def _choose(classes: _Candidates) -> frozenset[int]:
    """Return the best set of classes without conflicts: exact, by branch and bound.

    Without conflicts no dot_general has two split classes, so the flops of classes add up.
    """
    candidates = sorted((c for c in classes.order if c not in classes.why_not), key=lambda c: -classes.flops[c])
    best: tuple[tuple[int, int, int], tuple[int, ...]] = ((0, 0, 0), ())

    def search(chosen: tuple[int, ...], rest: list[int]) -> None:
        nonlocal best
        gain = classes.gain(chosen)
        if gain > best[0]:
            best = (gain, chosen)
        if not rest or gain[0] + sum(classes.flops[c] for c in rest) < best[0][0]:
            return
        first, *others = rest
        search((*chosen, first), [c for c in others if c not in classes.conflicts[first]])
        # Leaving out a class that conflicts with nothing left only loses its flops.
        if any(c in classes.conflicts[first] for c in others):
            search(chosen, others)

    search((), candidates)
    return frozenset(best[1])


def _classes_of(found: Dimensions, value: Value) -> list[int]:
    return [found.classes.find(n) for n in value.nodes if n is not None]


def _dimension_in(found: Dimensions, value: Value, chosen: frozenset[int]) -> int | None:
    return next((d for d, n in enumerate(value.nodes) if n is not None and found.classes.find(n) in chosen), None)


def _residual_stream(found: Dimensions, carry: Sequence[Value]) -> set[int]:
    """Unite each carry with the output that replaces it and return the classes that stay whole.

    A side input that projections read (an encoder's output) is a stream too, where they contract it.
    """
    for before, after in zip(carry, found.outputs, strict=True):
        if before.shape == after.shape:
            found.unite(before, after, [(d, d) for d in range(len(before.shape))])
    stream = {c for v in (*carry, *found.outputs) for c in _classes_of(found, v)}
    of_side_inputs = {c for v in found.inputs if v.origin == SIDE for c in _classes_of(found, v)}
    for product in found.products:
        for operand, weight in ((product.lhs, product.rhs), (product.rhs, product.lhs)):
            if weight.is_weight and operand.origin & SIDE and not operand.origin & CARRY:
                contracted = set(_classes_of(found, operand)) - set(_classes_of(found, product.out))
                stream |= contracted & of_side_inputs
    return stream


def _sums_larger_than_a_projection(found: Dimensions) -> dict[int, tuple[int, ...]]:
    """Return the classes whose split would sum a value of more tokens than any projection, and its shape.

    This keeps the features of a head whole: splitting them would sum attention scores,
    `[batch, heads, query, key]`, where splitting the heads sums `[batch, sequence, hidden]`.
    """
    find = found.classes.find
    with_weights = [p for p in found.products if p.lhs.is_weight or p.rhs.is_weight]
    features = {c for p in with_weights for v in (p.lhs, p.rhs) if v.is_weight for c in _classes_of(found, v)}
    # What a feature dimension is reshaped into (heads and their features) are features.
    before = -1
    while before != len(features):
        before = len(features)
        for major, minor in found.companions:
            if {find(major), find(minor)} & features:
                features.add(find(minor))

    def tokens(value: Value) -> int:
        return math.prod(found.classes.sizes[n] for n in value.nodes if n is not None and find(n) not in features)

    most = max((tokens(v) for p in with_weights for v in (p.lhs, p.rhs, p.out)), default=0)
    return {
        find(s.node): s.value.shape
        for s in found.sums
        if (s.of_product or s.direction == "forward") and tokens(s.value) > most
    }


def _reason(classes: _Candidates, parameter: Value, chosen: frozenset[int], names: Mapping[int, str]) -> str:
    own = _classes_of(classes.found, parameter)
    for c in own:
        if c in chosen:
            return f"{names[c]}: split"
    if not own:
        return "no split dimension: it has one element"
    parts = []
    for d, node in enumerate(parameter.nodes):
        if node is not None:
            c = classes.found.classes.find(node)
            why = classes.why_not.get(c)
            if why is None:
                rivals = ", ".join(names[r] for r in classes.conflicts[c] & chosen)
                why = f"not together with {rivals}"
            parts.append(f"{d} (size {parameter.shape[d]}): {why}")
    return "no split dimension: " + "; ".join(parts)
