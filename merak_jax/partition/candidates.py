"""Which classes of dimensions may be split over `tensor`, what each brings, and the exact choice among them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from merak_jax.partition.class_splits import ClassSplit, ClassSplits, sums_of
from merak_jax.partition.dimensions import CARRY, SIDE, Dimensions, Sum, Value

# Matmul flops split, minus bytes summed, elements of parameters split.
Gain = tuple[int, int, int]


class Candidates:
    """The classes that hold a parameter dimension: why one cannot be split, or what splitting it brings.

    Attributes:
      order: the classes, in the order of the parameters.
      splits: where each is split.
      why_not: why one cannot be split, in words.
      conflicts: the classes that share a value with one: a value is split once.
      flops: floating-point operations of the forward matmuls that each splits.
    """

    def __init__(self, found: Dimensions, stream: set[int], parameters: Sequence[Value], ways: int) -> None:
        self.found, self.ways = found, ways
        self.order = list(dict.fromkeys(c for p in parameters for c in found.classes_of(p)))
        cutter = ClassSplits(found, ways, stream)
        self.splits = {c: cutter.of(c) for c in self.order}
        self.flops: Counter[int] = Counter()
        for product in found.products:
            for c in {c for v in (product.lhs, product.rhs, product.out) for c in self.split_on(v)}:
                self.flops[c] += product.flops
        self.elements: Counter[int] = Counter()
        for p in parameters:
            for c in set(self.split_on(p)):
                self.elements[c] += math.prod(p.shape)

        self.conflicts: dict[int, set[int]] = {c: set() for c in self.order}
        twice: set[int] = set()
        for value in found.values:
            here = Counter(found.classes_of(value))
            twice |= {c for c, n in here.items() if n > 1}
            for c in here:
                if c in self.conflicts:
                    self.conflicts[c] |= here.keys() - {c}

        self.sums = {c: sums_of(found, [split]) for c, split in self.splits.items()}
        too_large = _sums_larger_than_a_projection(found, self.sums, self.splits)
        self.why_not: dict[int, str] = {}
        for c in self.order:
            opaque = found.classes.opaque_reason(c)
            indivisible = self.splits[c].why_not
            if ways == 1:
                self.why_not[c] = "the tensor axis has size 1"
            elif c in stream:
                self.why_not[c] = "residual stream"
            elif opaque:
                self.why_not[c] = opaque
            elif c in twice:
                self.why_not[c] = "twice on one value"
            elif indivisible:
                self.why_not[c] = indivisible
            elif not self.flops[c]:
                self.why_not[c] = "no matmul along it"
            elif c in too_large:
                self.why_not[c] = f"would all-reduce a value of shape {too_large[c]}"

    def split_on(self, value: Value) -> list[int]:
        """Return the classes of which one would split `value`."""
        find = self.found.classes.find
        nodes = [n for n in value.nodes if n is not None]
        return [c for n in nodes if (c := find(n)) in self.splits and n in self.splits[c].nodes]

    def dimension_in(self, value: Value, chosen: Collection[int]) -> int | None:
        """Return the dimension of `value` that is split if the classes `chosen` are; None if the value is whole."""
        find = self.found.classes.find
        for d, n in enumerate(value.nodes):
            if n is not None and find(n) in chosen and n in self.splits[find(n)].nodes:
                return d if not value.shape[d] % self.ways else None
        return None

    def constrained(self, value: Value, chosen: Collection[int]) -> bool:
        """Return whether `value` is split along one dimension if `chosen` are, or whole along groups of heads."""
        on_chosen = [n for n in value.nodes if n is not None and self.found.classes.find(n) in chosen]
        is_whole = not any(n in self.splits[self.found.classes.find(n)].nodes for n in on_chosen)
        return bool(on_chosen) and (is_whole or self.dimension_in(value, chosen) is not None)

    def size(self, c: int) -> int:
        """Return the number of units to deal out: heads, where heads are merged with their features."""
        split = self.splits[c]
        grouped = [groups * heads for groups, heads in split.grouped]
        nodes = split.nodes or (c,)
        return min(grouped or [self.found.classes.sizes[n] for n in nodes])

    def gain(self, chosen: Collection[int]) -> Gain:
        """Return what is maximised: matmul flops split, then minus bytes summed, then elements split."""
        summed: dict[object, int] = {}
        for s in (s for c in chosen for s in self.sums[c]):
            summed[s.key] = max(s.nbytes, summed.get(s.key, 0))
        return sum(self.flops[c] for c in chosen), -sum(summed.values()), sum(self.elements[c] for c in chosen)


def choose(candidates: Candidates, given: Collection[int] = ()) -> frozenset[int]:
    """Return the best set of classes without conflicts that has `given`: exact, by branch and bound.

    Without conflicts no dot_general has two split classes, so the flops of classes add up. Parts that neither
    conflict nor share a sum are searched one by one: their gains add up too.
    """
    given = frozenset(given)
    out = given | {c for g in given for c in candidates.conflicts[g]}
    free = [c for c in candidates.order if c not in candidates.why_not and c not in out]
    chosen = given
    for part in _independent_parts(candidates, free):
        chosen |= _choose_part(candidates, part, given)
    return chosen


def _independent_parts(candidates: Candidates, free: Iterable[int]) -> list[list[int]]:
    """Group classes that conflict or share a sum, over others if need be."""
    parts: list[tuple[list[int], set[object]]] = []
    for c in free:
        members, keys = [c], {s.key for s in candidates.sums[c]}
        apart = []
        for others, their_keys in parts:
            if keys & their_keys or candidates.conflicts[c] & set(others):
                members, keys = others + members, keys | their_keys
            else:
                apart.append((others, their_keys))
        parts = [*apart, (members, keys)]
    return [members for members, _ in parts]


def _choose_part(candidates: Candidates, part: Sequence[int], given: frozenset[int]) -> frozenset[int]:
    conflicts, flops = candidates.conflicts, candidates.flops
    best: tuple[Gain, frozenset[int]] = (candidates.gain(given), given)

    def bound(rest: Sequence[int]) -> int:
        """No set of classes from `rest` splits more flops: of classes that all conflict, one can be split."""
        total, left = 0, list(rest)
        while left:
            clique: list[int] = []
            for c in left:
                if all(c in conflicts[other] for other in clique):
                    clique.append(c)
            total += max(flops[c] for c in clique)
            left = [c for c in left if c not in clique]
        return total

    def search(chosen: frozenset[int], rest: list[int]) -> None:
        nonlocal best
        gain = candidates.gain(chosen)
        if gain > best[0]:
            best = (gain, chosen)
        # More classes never take bytes away.
        most = (gain[0] + bound(rest), gain[1], gain[2] + sum(candidates.elements[c] for c in rest))
        if not rest or most <= best[0]:
            return
        first, *others = rest
        search(chosen | {first}, [c for c in others if c not in conflicts[first]])
        # Leaving out a class that conflicts with nothing left only loses its flops.
        if any(c in conflicts[first] for c in others):
            search(chosen, others)

    search(given, sorted(part, key=lambda c: (-flops[c], candidates.order.index(c))))
    return best[1]


def residual_stream(found: Dimensions, carry: Sequence[Value]) -> set[int]:
    """Unite each carry with the output that replaces it and return the classes that stay whole.

    A side input that projections read (an encoder's output) is a stream too, where they contract it.
    """
    for before, after in zip(carry, found.outputs, strict=True):
        if before.shape == after.shape:
            found.unite(before, after, [(d, d) for d in range(len(before.shape))])
    stream = {c for v in (*carry, *found.outputs) for c in found.classes_of(v)}
    of_side_inputs = {c for v in found.inputs if v.origin == SIDE for c in found.classes_of(v)}
    for product in found.products:
        for operand, weight in ((product.lhs, product.rhs), (product.rhs, product.lhs)):
            if weight.is_weight and operand.origin & SIDE and not operand.origin & CARRY:
                stream |= found.contracted(product) & of_side_inputs
    return stream


def _sums_larger_than_a_projection(
    found: Dimensions, sums: Mapping[int, Sequence[Sum]], splits: Mapping[int, ClassSplit]
) -> dict[int, tuple[int, ...]]:
    """Return the classes whose split would sum a value of more tokens than any projection, and its shape.

    This keeps the features of a head whole: splitting them would sum attention scores,
    `[batch, heads, query, key]`, where splitting the heads sums `[batch, sequence, hidden]`.
    """
    find = found.classes.find
    with_weights = [p for p in found.products if p.lhs.is_weight or p.rhs.is_weight]
    features = {c for p in with_weights for v in (p.lhs, p.rhs) if v.is_weight for c in found.classes_of(v)}
    # What a feature dimension is reshaped into (heads and their features) are features.
    before = -1
    while before != len(features):
        before = len(features)
        for major, minor, _ in found.companions:
            if {find(major), find(minor)} & features:
                features.add(find(minor))

    def tokens(value: Value) -> int:
        return math.prod(found.classes.sizes[n] for n in value.nodes if n is not None and find(n) not in features)

    projected = [v for p in with_weights for v in (p.lhs, p.rhs, p.out)]
    most = max(map(tokens, projected), default=0)
    most_elements = max((math.prod(v.shape) for v in projected if not v.is_weight), default=0)

    def is_too_large(s: Sum, split: ClassSplit) -> bool:
        # Gradients of keys or values that heads in groups share: rotated, their features are of no parameter.
        if find(s.node) in split.minors:
            return math.prod(s.value.shape) > most_elements
        return (s.of_product or s.direction == "forward") and tokens(s.value) > most

    return {c: s.value.shape for c, of_class in sums.items() for s in of_class if is_too_large(s, splits[c])}
