"""GPT-2 in Flax nnx: the model of gpt2.py (Radford et al., 2019), with its config and its loss."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from flax import nnx

from merak_jax.models.gpt2 import GPT2Config, _normal, _residual_stddev
from merak_jax.models.gpt2 import next_token_loss as next_token_loss


class Attention(nnx.Module):
    """Causal multi-head self-attention, [batch, length, width] -> [batch, length, width].

    Query, key and value have kernels [width, heads, head_dim]: a dimension that splits into whole heads.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        heads = (config.num_heads, config.head_dim)
        project = functools.partial(
            nnx.LinearGeneral, config.width, heads, kernel_init=_normal(0.02), rngs=rngs, **types
        )
        self.query = project()
        self.key = project()
        self.value = project()
        self.output = nnx.LinearGeneral(
            heads, config.width, axis=(-2, -1), kernel_init=_normal(_residual_stddev(config)), rngs=rngs, **types
        )
        self.dropout = _dropout(config, rngs)

    def __call__(self, x, mask):
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(self.config.head_dim)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = self.dropout(nnx.softmax(scores, axis=-1).astype(value.dtype))
        return self.output(jnp.einsum("bhqk,bkhd->bqhd", weights, value))


class MLP(nnx.Module):
    """Two dense layers, 4 x width in between, with GELU in its tanh form; shape preserving."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        self.up = linear(config.width, 4 * config.width, kernel_init=_normal(0.02))
        self.down = linear(4 * config.width, config.width, kernel_init=_normal(_residual_stddev(config)))

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """Pre-norm transformer block, [batch, length, width] -> [batch, length, width]."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.norm_1 = _layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm_2 = _layer_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = _dropout(config, rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm_1(x), mask))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT2(nnx.Module):
    """The language model of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    Attributes named as the parameters of the linen model, but for the blocks, a list `h`. A tied head reads the
    one Param `token_embedding.embedding` [vocab, width]. `rngs` needs the streams "params" and, with dropout,
    "dropout"; dropout is on until `model.eval()`.
    Raises ValueError for `scan_layers`, which only the linen model has.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        if config.scan_layers:
            raise ValueError("scan_layers is an option of the linen GPT2; the nnx model keeps its blocks in a list")
        self.config = config
        embed = functools.partial(nnx.Embed, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        self.token_embedding = embed(config.vocab_size, config.width, embedding_init=_normal(0.02))
        self.position_embedding = embed(config.max_length, config.width, embedding_init=_normal(0.01))
        self.dropout = _dropout(config, rngs)
        self.h = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm_f = _layer_norm(config, rngs)
        if not config.tie_head:
            self.lm_head = nnx.Linear(
                config.width,
                config.vocab_size,
                use_bias=False,
                kernel_init=_normal(0.02),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

    def __call__(self, tokens):
        """Logits [batch, length, vocab] of the token after each of `tokens` [batch, length] (integers).

        Raises ValueError when length > max_length.
        """
        config = self.config
        length = tokens.shape[-1]
        if length > config.max_length:
            raise ValueError(f"{length} tokens do not fit max_length {config.max_length}")
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(jnp.arange(length)))
        mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
        for block in self.h:
            x = block(x, mask)
        x = self.norm_f(x)
        return self.token_embedding.attend(x) if config.tie_head else self.lm_head(x)


def _layer_norm(config: GPT2Config, rngs: nnx.Rngs):
    return nnx.LayerNorm(
        config.width,
        epsilon=config.layer_norm_epsilon,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _dropout(config: GPT2Config, rngs: nnx.Rngs):
    # Without dropout the model's state holds parameters only, no random streams.
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
