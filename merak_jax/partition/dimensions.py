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
            self._parent[second] = first
            if second in self._opaque:
                self._opaque.setdefault(first, self._opaque[second])

    def mark_opaque(self, node: int | None, reason: str) -> None:
        """Say that the class of `node` cannot be split, and why."""
        if node is not None:
            self._opaque.setdefault(self.find(node), reason)

    def opaque_reason(self, node: int) -> str | None:
        """Return why the class of `node` cannot be split, None if it can."""
        return self._opaque.get(self.find(node))


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
    """One dot_general, with its floating-point operations per block."""

    lhs: Value
    rhs: Value
    out: Value
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
    # (major, minor) dimensions of one reshape.
    companions: list[tuple[int, int]] = field(default_factory=list)
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
            self.classes.unite(a.nodes[i], b.nodes[j])

    def mark(self, value: Value, dims, reason: str) -> None:
        """Mark dimensions of `value` opaque, unless every device can compute all of it and take its part."""
        if not value.origin & (CARRY | PARAMETER):
            return
        for d in dims:
            self.classes.mark_opaque(value.nodes[d], reason)

    def add_sum(self, value: Value, node: int | None, direction: str, of_product: bool) -> None:
        """Record that `value` is a sum over `tensor` if `node` is split."""
        computed_anywhere = direction == "forward" and not value.origin & (CARRY | PARAMETER)
        if node is not None and not computed_anywhere:
            key = (direction, value.source if direction == "backward" else id(value))
            self.sums.append(Sum(value, node, direction, key, self.times, of_product))
