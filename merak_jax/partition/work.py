"""How much work a program is: what matters is the ratio between blocks, so only products are counted exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from merak_jax import _compat


def flops(jaxpr: Jaxpr) -> int:
    """Floating-point operations of one run: 2mnk for products and convolutions, one per element for everything else."""
    return sum(equation_flops(e) for e in jaxpr.eqns)


def equation_flops(eqn: JaxprEqn) -> int:
    """Floating-point operations of one equation, programs inside it included."""
    inner = _compat.sub_jaxprs(eqn)
    if inner:
        turns = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        return turns * max(flops(j) for j in inner)
    size = sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(eqn.invars[0].aval.shape[d] for d in contracting)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * size * math.prod(kernel) // max(1, out_features)
    return size


def products(eqn: JaxprEqn) -> int:
    """Products and convolutions in one equation, programs inside it included."""
    inner = sum(products(e) for j in _compat.sub_jaxprs(eqn) for e in j.eqns)
    return inner + (eqn.primitive.name in ("dot_general", "conv_general_dilated"))


def balanced_counts(costs: Sequence[float], lengths: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """For chains of `lengths` blocks that cost `costs` each, how many of each chain's blocks every stage runs.

    Stages hold consecutive blocks. The largest cost of a stage is as small as possible, then the costs are as even as
    possible, then earlier stages hold more. Returns one tuple of P counts per chain.
    """
    blocks = [c for c, length in enumerate(lengths) for _ in range(length)]
    total = np.concatenate([[0.0], np.cumsum([costs[c] for c in blocks])])
    n = len(blocks)
    load = total[None, :] - total[:, None]  # of blocks i to j, at [i, j]
    possible = np.arange(n + 1)[:, None] <= np.arange(n + 1)[None, :]
    # worst[i]: the smallest largest load when blocks i to n are on the stages considered so far, the last ones.
    worst = np.where(np.arange(n + 1) == n, 0.0, np.inf)
    for _ in range(stages):
        worst = np.where(possible, np.maximum(load, worst[None, :]), np.inf).min(1)
    allowed = possible & (load <= worst[0] * (1 + 1e-9))
    squares = np.where(np.arange(n + 1) == n, 0.0, np.inf)
    choices = []
    for _ in range(stages):
        cost = np.where(allowed, load**2 + squares[None, :], np.inf)
        best = cost.min(1)
        # The last of the equally good ends: the earliest stage gets more.
        good = cost <= best[:, None] * (1 + 1e-9) + 1e-12
        choices.append(np.where(good, np.arange(n + 1)[None, :], -1).max(1))
        squares = best
    ends, at = [], 0
    for end in reversed(choices):
        at = int(end[at])
        ends.append(at)
    stage_blocks = [blocks[a:b] for a, b in zip([0, *ends[:-1]], ends)]
    return [tuple(own.count(c) for own in stage_blocks) for c in range(len(lengths))]
