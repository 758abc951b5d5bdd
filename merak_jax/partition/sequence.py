"""Find the dimension along which the residual stream can be split over `tensor` between matmuls.

Sequence parallelism: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2. Norms, dropouts
and residual sums work on each token alone, so any dimension will do that no projection contracts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp

from merak_jax.partition.dimensions import Dimensions, Value


def split_sequence(
    found: Dimensions, carry: Sequence[Value], changed: Sequence[bool], chosen: Collection[int], ways: int
) -> tuple[tuple[int | None, ...], str]:
    """Choose the token dimension of the carry.

    Args:
      found: what the walk over the block found, with each carry united with the output that replaces it.
      carry: the values of the carry.
      changed: which of them the block changes: only their dimensions are candidates.
      chosen: the classes that are split over `tensor` inside the block.
      ways: T, the size of the `tensor` axis.

    Returns:
      For each value of the carry the dimension that is split, None if it stays whole, and the reason in words.
      Of the dimensions that fit, the largest, of equals the first; all floating-point values that have it
      are split along it.
    """
    whole = (None,) * len(carry)
    if ways == 1:
        return whole, "the tensor axis has size 1"
    weighted = [p for p in found.products if p.lhs.is_weight or p.rhs.is_weight]
    if not weighted:
        # Nothing tells its features from its tokens.
        return whole, "no matmul with weights in the block"
    floats = [jax.dtypes.issubdtype(v.dtype, jnp.inexact) for v in carry]
    contracted = {c for product in weighted for c in found.contracted(product)}
    find = found.classes.find
    sizes: dict[int, set[int]] = {}
    twice: set[int] = set()
    for value in carry:
        twice |= {c for c, n in Counter(found.classes_of(value)).items() if n > 1}
        for size, node in zip(value.shape, value.nodes, strict=True):
            if node is not None:
                sizes.setdefault(find(node), set()).add(size)
    why_not: list[str] = []
    fitting: dict[int, int] = {}
    for value, is_float, changes in zip(carry, floats, changed, strict=True):
        for size, node in zip(value.shape, value.nodes, strict=True):
            if node is None or not is_float or not changes:
                continue
            c = find(node)
            indivisible = sorted(n for n in sizes[c] if n % ways)
            if c in contracted:
                why_not.append(f"{size} is contracted with weights")
            elif c in chosen:
                why_not.append(f"{size} is split inside the block")
            elif c in twice:
                why_not.append(f"{size} is twice on one value")
            elif indivisible:
                why_not.append(f"{indivisible[0]} is not divisible by {ways}")
            else:
                fitting[c] = max(size, fitting.get(c, 0))
    if not fitting:
        return whole, "no dimension fits: " + ("; ".join(dict.fromkeys(why_not)) or "no floating-point value changes")
    best = max(fitting, key=lambda c: fitting[c])
    dims = tuple(
        next((d for d, n in enumerate(v.nodes) if is_float and n is not None and find(n) == best), None)
        for v, is_float in zip(carry, floats, strict=True)
    )
    return dims, f"{fitting[best]} tokens are split, {fitting[best] // ways} on each device"
