"""Follow dimensions through a jaxpr: which dimension of which value must be split together with which other.

Every dimension of every value is a node of a union-find structure. An equation unites the dimensions that run
along each other, marks the ones it cannot work on in shards as opaque, and reports the sums over `tensor`
that a split would cost.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

# Where a value comes from; a value may have several origins.
CARRY, PARAMETER, SIDE = 1, 2, 4

_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p
    logistic lt lt_to max min mul name ne neg nextafter not or polygamma population_count pow real
    reduce_precision rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta""".split()
)
# Primitives whose output is its operand in another shape or dtype: their gradients are summed as one.
_SAME_VALUE = frozenset("convert_element_type copy copy_p name reshape squeeze transpose".split())
_CALLS = frozenset(
    """jit pjit closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr""".split()
)


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


def follow_dimensions(jaxpr, origins: Sequence[int]) -> Dimensions:
    """Walk over a block.

    Args:
      jaxpr: `jax.extend.core.ClosedJaxpr` or `Jaxpr` of one block. `jit`, `remat`, `custom_jvp`, `custom_vjp`
        and `scan` are entered; dimensions that meet `cond`, `while` or an unknown primitive are opaque.
      origins: for each input CARRY, PARAMETER or SIDE.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = Dimensions()
    found.inputs = [found.new_value(v.aval, origin) for v, origin in zip(jaxpr.invars, origins, strict=True)]
    found.outputs = _walk(found, jaxpr, found.inputs, top=True)
    return found


def _walk(found: Dimensions, jaxpr, args, top: bool = False) -> list[Value]:
    # A fresh environment per call: the same inner jaxpr object may be called from several places.
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update((v, found.new_value(v.aval, 0)) for v in jaxpr.constvars)

    def read(atom):
        return found.new_value(atom.aval, 0) if isinstance(atom, jex_core.Literal) else env[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        operands = [read(a) for a in eqn.invars]
        inner = _inner(eqn) if name in _CALLS else None
        if inner is not None:
            outs = _walk(found, inner, operands)
        elif name == "scan":
            outs = _scan(found, eqn, operands)
        else:
            origin = _origin(operands)
            source = operands[0].source if name in _SAME_VALUE else None
            outs = [found.new_value(v.aval, origin, source) for v in eqn.outvars]
            rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name, _unknown)
            rule(found, eqn, operands, outs)
        if top and name == "dot_general":
            found.product_outputs[index] = outs[0]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _origin(operands: Sequence[Value]) -> int:
    return functools.reduce(operator.or_, (operand.origin for operand in operands), 0)


def _inner(eqn):
    """Return the jaxpr of a call whose inner inputs are its operands, None otherwise."""
    inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if inner is None:
        return None
    inner = getattr(inner, "jaxpr", inner)
    same = [v.aval.shape for v in inner.invars] == [v.aval.shape for v in eqn.invars]
    return inner if same else None


def _scan(found: Dimensions, eqn, operands) -> list[Value]:
    num_consts, num_carry, length = (eqn.params[k] for k in ("num_consts", "num_carry", "length"))
    inner = eqn.params["jaxpr"].jaxpr
    origin = _origin(operands)

    end = num_consts + num_carry
    consts, init, xs = operands[:num_consts], operands[num_consts:end], operands[end:]
    carry = [found.new_value(v.aval, origin) for v in inner.invars[num_consts:end]]
    rows = [found.new_value(v.aval, x.origin) for v, x in zip(inner.invars[end:], xs, strict=True)]
    for x, row in zip(xs, rows, strict=True):
        found.mark(x, (0,), "scanned over")
        found.unite(x, row, [(d + 1, d) for d in range(len(row.shape))])

    times, found.times = found.times, found.times * length
    inner_outs = _walk(found, inner, [*consts, *carry, *rows])
    found.times = times

    outs = [found.new_value(v.aval, origin) for v in eqn.outvars]
    for position, (out, inner_out) in enumerate(zip(outs, inner_outs, strict=True)):
        if position < num_carry:
            same = [(d, d) for d in range(len(out.shape))]
            found.unite(out, inner_out, same)
            found.unite(carry[position], inner_out, same)
            found.unite(init[position], inner_out, same)
        else:
            found.mark(out, (0,), "stacked by a scan")
            found.unite(out, inner_out, [(d + 1, d) for d in range(len(inner_out.shape))])
    return outs


def _through(eqn) -> str:
    return f"goes through `{eqn.primitive.name}`"


def _unknown(found: Dimensions, eqn, operands, outs) -> None:
    for value in (*operands, *outs):
        found.mark(value, range(len(value.shape)), _through(eqn))


def _bitcast(found: Dimensions, eqn, operands, outs) -> None:
    rule = _elementwise if operands[0].shape == outs[0].shape else _unknown
    rule(found, eqn, operands, outs)


def _fresh(found: Dimensions, eqn, operands, outs) -> None:
    """The output can be made in shards, whatever the operands."""


def _elementwise(found: Dimensions, eqn, operands, outs) -> None:
    out = outs[0]
    for operand in operands:
        if operand.shape:
            found.unite(operand, out, [(d, d) for d in range(len(out.shape))])
        _broadcast_sums(found, operand, out, range(len(operand.shape)))


def _broadcast_sums(found: Dimensions, operand: Value, out: Value, kept) -> None:
    """A value repeated along a split dimension gets a gradient that is summed over it."""
    kept = {d for d, node in zip(kept, operand.nodes, strict=True) if node is not None}
    if operand.needs_gradient and operand.origin & (CARRY | PARAMETER):
        for d, node in enumerate(out.nodes):
            if d not in kept:
                found.add_sum(operand, node, "backward", of_product=False)


def _broadcast_in_dim(found: Dimensions, eqn, operands, outs) -> None:
    mapped = [int(d) for d in eqn.params["broadcast_dimensions"]]
    found.unite(operands[0], outs[0], list(enumerate(mapped)))
    _broadcast_sums(found, operands[0], outs[0], mapped)


def _transpose(found: Dimensions, eqn, operands, outs) -> None:
    found.unite(operands[0], outs[0], [(int(src), dst) for dst, src in enumerate(eqn.params["permutation"])])


def _squeeze(found: Dimensions, eqn, operands, outs) -> None:
    gone = {int(d) % len(operands[0].shape) for d in eqn.params["dimensions"]}
    left = [d for d in range(len(operands[0].shape)) if d not in gone]
    found.unite(operands[0], outs[0], [(src, dst) for dst, src in enumerate(left)])


def _reshape(found: Dimensions, eqn, operands, outs) -> None:
    operand, out = operands[0], outs[0]
    if math.prod(operand.shape) == 0:
        return _unknown(found, eqn, operands, outs)
    for sources, targets in _reshape_groups(operand.shape, out.shape):
        # Equal contiguous blocks of a merged dimension are equal contiguous blocks of its major factor.
        found.unite(operand, out, [(sources[0], targets[0])])
        for value, dims in ((operand, sources), (out, targets)):
            major = value.shape[dims[0]]
            found.companions += [(value.nodes[dims[0]], value.nodes[d]) for d in dims[1:]]
            found.mark(value, dims[1:], f"reshaped together with a dimension of {major} in front of it")


def _reshape_groups(before, after) -> list[tuple[list[int], list[int]]]:
    """Cut two shapes into the smallest runs of equal element count; dimensions of size 1 are left out."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    groups = []
    while left:
        sources, targets = [left.pop(0)], [right.pop(0)]
        a, b = before[sources[0]], after[targets[0]]
        while a != b:
            if a < b:
                sources.append(left.pop(0))
                a *= before[sources[-1]]
            else:
                targets.append(right.pop(0))
                b *= after[targets[-1]]
        groups.append((sources, targets))
    return groups


def _dot_general(found: Dimensions, eqn, operands, outs) -> None:
    lhs, rhs = operands
    out = outs[0]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    found.unite(lhs, rhs, list(zip([*lhs_contract, *lhs_batch], [*rhs_contract, *rhs_batch], strict=True)))
    lhs_free = [d for d in range(len(lhs.shape)) if d not in (*lhs_contract, *lhs_batch)]
    rhs_free = [d for d in range(len(rhs.shape)) if d not in (*rhs_contract, *rhs_batch)]
    for value, dims, start in (
        (lhs, lhs_batch, 0),
        (lhs, lhs_free, len(lhs_batch)),
        (rhs, rhs_free, len(lhs_batch) + len(lhs_free)),
    ):
        found.unite(value, out, [(d, start + i) for i, d in enumerate(dims)])

    flops = 2 * math.prod(out.shape) * math.prod(lhs.shape[d] for d in lhs_contract) * found.times
    found.products.append(Product(lhs, rhs, out, flops))
    for d in lhs_contract:
        found.add_sum(out, lhs.nodes[d], "forward", of_product=True)
    # The gradient of one operand contracts over the free dimensions of the other.
    for value, other, free in ((lhs, rhs, rhs_free), (rhs, lhs, lhs_free)):
        if value.needs_gradient:
            for d in free:
                found.add_sum(value, other.nodes[d], "backward", of_product=True)


def _reduce(found: Dimensions, eqn, operands, outs) -> None:
    axes = {int(d) for d in eqn.params["axes"]}
    left = [d for d in range(len(operands[0].shape)) if d not in axes]
    found.unite(operands[0], outs[0], [(src, dst) for dst, src in enumerate(left)])
    if eqn.primitive.name.startswith("arg"):
        found.mark(operands[0], axes, _through(eqn))
    for d in axes:
        found.add_sum(outs[0], operands[0].nodes[d], "forward", of_product=False)


def _along(*params: str) -> Callable:
    """Make a rule for operations that work along the axes named by `params` and keep all others."""

    def rule(found: Dimensions, eqn, operands, outs) -> None:
        axes: set[int] = set()
        for param in params:
            axis = eqn.params[param]
            axes.update(int(a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
        for value in (*operands, *outs):
            found.mark(value, [d for d in axes if d < len(value.shape)], _through(eqn))
        kept = [(d, d) for d in range(len(outs[0].shape)) if d not in axes]
        for a, b in itertools.pairwise((*operands, *outs)):
            found.unite(a, b, kept)

    return rule


def _windows(found: Dimensions, eqn, operands, outs) -> None:
    """Cut out, pad or overwrite a part: the dimensions that keep their size are kept, the others opaque."""
    big, small = operands[0], outs[0]
    if eqn.primitive.name == "dynamic_update_slice":
        small = operands[1]
        found.unite(big, outs[0], [(d, d) for d in range(len(big.shape))])
    kept = [d for d in range(len(big.shape)) if big.shape[d] == small.shape[d]]
    if eqn.primitive.name == "pad":
        # Padding at one end and cutting at the other also keeps the size.
        kept = [d for d in kept if tuple(eqn.params["padding_config"][d]) == (0, 0, 0)]
    found.unite(big, small, [(d, d) for d in kept])
    changed = [d for d in range(len(big.shape)) if d not in kept]
    for value in (big, small):
        found.mark(value, changed, _through(eqn))


def _stack(found: Dimensions, eqn, operands, outs) -> None:
    axis = int(eqn.params["axis"]) % len(outs[0].shape)
    found.mark(outs[0], (axis,), _through(eqn))
    for operand in operands:
        found.unite(operand, outs[0], [(d, d + (d >= axis)) for d in range(len(operand.shape))])


def _gather(found: Dimensions, eqn, operands, outs) -> None:
    operand, indices = operands
    out = outs[0]
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = iter(d for d in range(len(out.shape)) if d not in numbers.offset_dims)
    for index_dim in range(len(indices.shape) - 1):
        out_dim = next(batch)
        found.unite(indices, out, [(index_dim, out_dim)])
        if index_dim in numbers.start_indices_batching_dims:
            where = numbers.start_indices_batching_dims.index(index_dim)
            found.unite(operand, out, [(numbers.operand_batching_dims[where], out_dim)])
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(operand.shape)) if d not in removed]
    looked_up = list(numbers.collapsed_slice_dims)
    for d, out_dim in zip(windows, sorted(numbers.offset_dims), strict=True):
        if sizes[d] == operand.shape[d]:
            found.unite(operand, out, [(d, out_dim)])
        else:
            looked_up.append(d)
            found.mark(out, (out_dim,), _through(eqn))
    found.mark(operand, looked_up, _through(eqn))


def _barrier(found: Dimensions, eqn, operands, outs) -> None:
    for operand, out in zip(operands, outs, strict=True):
        found.unite(operand, out, [(d, d) for d in range(len(out.shape))])


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "argmax": _reduce,
    "argmin": _reduce,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "sort": _along("dimension"),
    "top_k": _along("axis"),
    "rev": _along("dimensions"),
    "stack": _stack,
    "gather": _gather,
    "optimization_barrier": _barrier,
    "bitcast_convert_type": _bitcast,
    **{"reduce_" + name: _reduce for name in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **{"cum" + name: _along("axis") for name in ("sum", "max", "min", "prod", "logsumexp")},
    **{name: _windows for name in ("slice", "dynamic_slice", "dynamic_update_slice", "pad")},
    "iota": _fresh,
    **dict.fromkeys(("random_bits", "random_rows", "random_microbatch"), _fresh),
}
