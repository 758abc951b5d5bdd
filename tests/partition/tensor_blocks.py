"""Small blocks in Flax linen and their tensor layout, by name."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from merak_jax.partition.tensor import tensor_layout

BATCH, SEQUENCE, HIDDEN = 2, 6, 16


def layout_of(block, parameters, *side, ways=2, carry=None, fixed=()):
    """Return (layout, tree of splits, tree of reasons) of `block(parameters, carry, *side)`.

    -1 in the trees is None, which a tree would swallow. `fixed`: (path of a parameter, dimension) pairs.
    """
    carry = jnp.zeros((BATCH, SEQUENCE, HIDDEN)) if carry is None else carry
    with_paths, tree = jax.tree_util.tree_flatten_with_path(parameters)
    paths, leaves = (
        [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in with_paths],
        [v for _, v in with_paths],
    )

    def flat(carry, *rest):
        return block(tree.unflatten(rest[: len(leaves)]), carry, *rest[len(leaves) :])

    jaxpr = jax.make_jaxpr(flat)(carry, *leaves, *side)
    given = {paths.index(path): dim for path, dim in fixed}
    layout = tensor_layout(jaxpr, range(1, 1 + len(leaves)), ways, fixed=given)
    splits = [-1 if s is None else s for s in layout.splits]
    return layout, tree.unflatten(splits), tree.unflatten(layout.reasons)


def layout_of_linen(module, *side, ways=2, carry=None, fixed=()):
    carry = jnp.zeros((BATCH, SEQUENCE, HIDDEN)) if carry is None else carry
    parameters = jax.eval_shape(module.init, jax.random.key(0), carry, *side)["params"]

    def block(p, x, *s):
        return module.apply({"params": p}, x, *s)

    return layout_of(block, parameters, *side, ways=ways, carry=carry, fixed=fixed)


class Mlp(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4 * HIDDEN, name="up", dtype=self.dtype)(x)
        return nn.Dense(HIDDEN, name="down", dtype=self.dtype)(nn.gelu(h))


class GatedMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.silu(nn.Dense(48, name="gate", use_bias=False)(x))
        return nn.Dense(HIDDEN, name="down", use_bias=False)(gate * nn.Dense(48, name="up", use_bias=False)(x))


class Attention(nn.Module):
    """Separate q, k, v; `merged` projects to heads·features and reshapes; fewer `kv_heads` are repeated."""

    heads: int = 4
    kv_heads: int | None = None
    merged: bool = False
    features: int = 4
    dtype: object = None
    normalize: bool = False

    @nn.compact
    def __call__(self, x, bias=None):
        kv_heads = self.kv_heads or self.heads

        def project(name, heads):
            if self.merged:
                y = nn.Dense(heads * self.features, name=name, dtype=self.dtype)(x)
                return y.reshape(*x.shape[:-1], heads, self.features)
            return nn.DenseGeneral((heads, self.features), name=name, dtype=self.dtype)(x)

        q, k, v = project("q", self.heads), project("k", kv_heads), project("v", kv_heads)
        if self.normalize:
            q, k = nn.RMSNorm(name="q_norm")(q), nn.RMSNorm(name="k_norm")(k)
        k, v = (jnp.repeat(a, self.heads // kv_heads, axis=2) for a in (k, v))
        return self.finish(x, attend(q, k, v, bias))

    def finish(self, x, y):
        if self.merged:
            return nn.Dense(x.shape[-1], name="out", dtype=self.dtype)(y.reshape(*x.shape[:-1], -1))
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out", dtype=self.dtype)(y)


def attend(q, k, v, bias=None):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    if bias is not None:
        scores = scores + bias
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(jnp.where(mask, scores, -1e9)).astype(v.dtype), v)


class Block(nn.Module):
    attention: nn.Module
    mlp: nn.Module

    @nn.compact
    def __call__(self, x, *side):
        x = x + self.attention(nn.LayerNorm(name="norm1")(x), *side)
        return x + self.mlp(nn.LayerNorm(name="norm2")(x))


COLUMN = {"kernel": 1, "bias": 0}
ROW = {"kernel": 0, "bias": -1}
NORM = {"scale": -1, "bias": -1}
MLP = {"up": COLUMN, "down": ROW}
ATTENTION = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "out": ROW}
