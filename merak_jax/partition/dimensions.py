"""Follow dimensions through a jaxpr: which dimension of which value must be split together with which other.

Every dimension of every value is a node of a union-find structure. An equation unites the dimensions that run
along each other, marks the ones it cannot work on in shards as opaque, and reports the sums over `tensor`
that a split would cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

# Where a value comes from; a value may have several origins.
CARRY, PARAMETER, SIDE = 1, 2, 4


class Classes:
    """Union-find over dimensions: a node is an int, or None for a dimension of size 1, never split."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.sizes: list[int] = []
        self._opaque: dict[int, str] = {}
        self._only_minor: set[int] = set()

    def new(self, size: int) -> int | None:
        """Make a node for a dimension of `size` elements."""
        if size == 1:
            return None
        self._parent.append(len(self._parent))
        self.sizes.append(size)
        return len(self._parent) - 1

    def find(self, node: int) -> int:
        """Return the representative of `node`'s class."""
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def unite(self, a: int | None, b: int | None) -> None:
        """Say that dimensions `a` and `b` are split together or not at all."""
        if a is None or b is None:
            return
        first, second = sorted((self.find(a), self.find(b)))
        if first != second:
            only_minor = all(n in self._only_minor or n not in self._opaque for n in (first, second))
            self._parent[second] = first
            if second in self._opaque:
                self._opaque.setdefault(first, self._opaque[second])
            self._only_minor -= {first, second}
            if only_minor and first in self._opaque:
                self._only_minor.add(first)

    def mark_opaque(self, node: int | None, reason: str, minor: bool = False) -> None:
        """Say that the class of `node` cannot be split, and why; `minor`: by itself, as a minor factor of a reshape."""
        if node is None:
            return
        root = self.find(node)
        if not minor:
            self._only_minor.discard(root)
        elif root not in self._opaque:
            self._only_minor.add(root)
        self._opaque.setdefault(root, reason)

    def opaque_reason(self, node: int) -> str | None:
        """Return why the class of `node` cannot be split, None if it can."""
        return self._opaque.get(self.find(node))

    def is_cut(self, node: int) -> bool:
        """Whether the class of `node` is opaque for another reason than being a minor factor of reshapes."""
        root = self.find(node)
        return root in self._opaque and root not in self._only_minor


@dataclass(frozen=True, eq=False)
class Value:
    """One array: a node per dimension, where it comes from, and the value that it is a view or cast of."""

    shape: tuple[int, ...]
    dtype: Any
    nodes: tuple[int | None, ...]
    origin: int
    source: int

    @property
    def is_weight(self) -> bool:
        """Whether it is computed from parameters alone."""
        return self.origin == PARAMETER

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        extended = jax.dtypes.issubdtype(self.dtype, jax.dtypes.extended)
        return math.prod(self.shape) * (1 if extended else self.dtype.itemsize)

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient flows into it: real numbers that depend on something."""
        return self.origin != 0 and jax.dtypes.issubdtype(self.dtype, jnp.inexact)


@dataclass(frozen=True, eq=False)
class Product:
    """One dot_general, with the nodes of `lhs` that it contracts and its floating-point operations per block."""

    lhs: Value
    rhs: Value
    out: Value
    contracted: tuple[int | None, ...]
    flops: int


@dataclass(frozen=True, eq=False)
class Sum:
    """`value` becomes a sum over `tensor` if `node` is split; sums that are done at once share a `key`."""

    value: Value
    node: int
    direction: str  # "forward" or "backward"
    key: object
    times: int
    of_product: bool

    @property
    def nbytes(self) -> int:
        """Bytes summed, all `times` together."""
        return self.times * self.value.nbytes


@dataclass
class Dimensions:
    """All that a walk over one block's jaxpr finds out."""

    classes: Classes = field(default_factory=Classes)
    values: list[Value] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    # Position of a top-level dot_general -> its output.
    product_outputs: dict[int, Value] = field(default_factory=dict)
    # (major, minor, place of the minor behind the major) of one reshape.
    companions: list[tuple[int, int, int]] = field(default_factory=list)
    # Pairs of dimensions that an equation united.
    edges: list[tuple[int, int]] = field(default_factory=list)
    times: int = 1

    def new_value(self, aval, origin: int, source: int | None = None) -> Value:
        """Make a value with fresh nodes for the array or abstract value `aval`."""
        shape = tuple(int(n) for n in aval.shape)
        nodes = tuple(self.classes.new(n) for n in shape)
        value = Value(shape, aval.dtype, nodes, origin, len(self.values) if source is None else source)
        self.values.append(value)
        return value

    def unite(self, a: Value, b: Value, dims: Sequence[tuple[int, int]]) -> None:
        """Unite dimension i of `a` with dimension j of `b` for each (i, j)."""
        for i, j in dims:
            first, second = a.nodes[i], b.nodes[j]
            self.classes.unite(first, second)
            if first is not None and second is not None:
                self.edges.append((first, second))

    def mark(self, value: Value, dims, reason: str, minor: bool = False) -> None:
        """Mark dimensions of `value` opaque, unless every device can compute all of it and take its part."""
        if not value.origin & (CARRY | PARAMETER):
            return
        for d in dims:
            self.classes.mark_opaque(value.nodes[d], reason, minor)

    def classes_of(self, value: Value) -> list[int]:
        """Return the class of each dimension of `value` that has more than one element."""
        return [self.classes.find(n) for n in value.nodes if n is not None]

    def contracted(self, product: Product) -> set[int]:
        """Return the classes that `product` contracts."""
        return {self.classes.find(n) for n in product.contracted if n is not None}

    def add_sum(self, value: Value, node: int | None, direction: str, of_product: bool) -> None:
        """Record that `value` is a sum over `tensor` if `node` is split."""
        computed_anywhere = direction == "forward" and not value.origin & (CARRY | PARAMETER)
        if node is not None and not computed_anywhere:
            key = (direction, value.source if direction == "backward" else id(value))
            self.sums.append(Sum(value, node, direction, key, self.times, of_product))
