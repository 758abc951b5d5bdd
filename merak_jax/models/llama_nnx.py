"""Llama in Flax nnx: the model of llama.py (Touvron et al., 2023), with its config and its loss."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx

from merak_jax.models.gpt2 import next_token_loss as next_token_loss
from merak_jax.models.llama import LlamaConfig, grouped_attention, rotary_table, rotate


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions, [batch, length, width] -> the same.

    `query` has the kernel [width, heads, head_dim], `key` and `value` [width, kv_heads, head_dim], `output`
    [heads, head_dim, width]; no biases.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        project = functools.partial(nnx.LinearGeneral, **_dense_options(config), rngs=rngs)
        heads = (config.num_heads, config.head_dim)
        kv_heads = (config.num_kv_heads, config.head_dim)
        self.query = project(config.width, heads)
        self.key = project(config.width, kv_heads)
        self.value = project(config.width, kv_heads)
        self.output = project(heads, config.width, axis=(-2, -1))
        self.dropout = _dropout(config, rngs)

    def __call__(self, x, table, mask):
        query, key = rotate(self.query(x), table), rotate(self.key(x), table)
        return self.output(grouped_attention(query, key, self.value(x), mask, self.dropout))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), `hidden_width` in between, no biases; shape preserving (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, **_dense_options(config), rngs=rngs)
        self.gate = linear(config.width, config.hidden_width)
        self.up = linear(config.width, config.hidden_width)
        self.down = linear(config.hidden_width, config.width)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm transformer block, [batch, length, width] -> the same; `table` and `mask` are side inputs."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.norm_1 = _rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm_2 = _rms_norm(config, rngs)
        self.mlp = SwiGLU(config, rngs=rngs)
        self.dropout = _dropout(config, rngs)

    def __call__(self, x, table, mask):
        x = x + self.dropout(self.attention(self.norm_1(x), table, mask))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Llama(nnx.Module):
    """The language model of Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).

    Attributes named as the parameters of the linen model, but for the blocks, a list `h`. A tied head reads the
    one Param `token_embedding.embedding` [vocab, width]. `rngs` needs the streams "params" and, with dropout,
    "dropout"; dropout is on until `model.eval()`.
    Raises ValueError for `scan_layers`, which only the linen model has.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        if config.scan_layers:
            raise ValueError("scan_layers is an option of the linen Llama; the nnx model keeps its blocks in a list")
        self.config = config
        self.token_embedding = nnx.Embed(
            config.vocab_size,
            config.width,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.h = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm_f = _rms_norm(config, rngs)
        if not config.tie_head:
            self.lm_head = nnx.Linear(config.width, config.vocab_size, **_dense_options(config), rngs=rngs)

    def __call__(self, tokens):
        """Logits [batch, length, vocab] of the token after each of `tokens` [batch, length] (integers).

        Raises ValueError when length > max_length.
        """
        config = self.config
        length = tokens.shape[-1]
        if length > config.max_length:
            raise ValueError(f"{length} tokens do not fit max_length {config.max_length}")
        x = self.token_embedding(tokens)
        table = rotary_table(config, length)
        mask = jnp.tril(jnp.ones((length, length), bool))
        for block in self.h:
            x = block(x, table, mask)
        x = self.norm_f(x)
        return self.token_embedding.attend(x) if config.tie_head else self.lm_head(x)


def _dense_options(config: LlamaConfig) -> dict:
    return {
        "use_bias": False,
        "kernel_init": nnx.initializers.normal(0.02),
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
    }


def _rms_norm(config: LlamaConfig, rngs: nnx.Rngs):
    return nnx.RMSNorm(
        config.width, epsilon=config.norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
    )


def _dropout(config: LlamaConfig, rngs: nnx.Rngs):
    # Without dropout the model's state holds parameters only, no random streams.
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
