"""Llama in Flax linen: rotary positions, grouped-query attention, SwiGLU and RMSNorm (Touvron et al., 2023)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import linen as nn

from merak_jax.models.gpt2 import next_token_loss as next_token_loss

_LLAMA_3 = {"vocab_size": 128256, "max_length": 8192, "rotary_base": 500000.0}

PUBLISHED_SIZES: dict[str, dict[str, Any]] = {
    "llama-7b": {},
    "llama-13b": {"num_layers": 40, "num_heads": 40, "num_kv_heads": 40, "width": 5120, "hidden_width": 13824},
    "llama-2-70b": {
        "max_length": 4096,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "width": 8192,
        "hidden_width": 28672,
        "norm_epsilon": 1e-5,
    },
    "llama-3-8b": {**_LLAMA_3, "num_kv_heads": 8, "hidden_width": 14336, "norm_epsilon": 1e-5},
    "llama-3-70b": {
        **_LLAMA_3,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "width": 8192,
        "hidden_width": 28672,
        "norm_epsilon": 1e-5,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "max_length": 131072,
        "num_layers": 16,
        "num_kv_heads": 8,
        "width": 2048,
        "hidden_width": 8192,
        "norm_epsilon": 1e-5,
        "tie_head": True,
        "rotary_scale": 32.0,
    },
}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and precision of a Llama model; the defaults are those of the first 7B model.

    `num_kv_heads` heads of keys and values are shared by `num_heads` heads of queries. `hidden_width` is that of
    SwiGLU. `rotary_scale` above 1 stretches the slow rotations (see `rotary_table`). `dropout` is applied to the
    attention weights and to what each block adds to the residual stream; the published models use none.
    `dtype` is the type of the computation; None takes it from the parameters (`param_dtype`).
    Raises ValueError when `width` is not a multiple of `num_heads`, or `num_heads` not one of `num_kv_heads`, or
    the head dimension is odd.
    """

    vocab_size: int = 32000
    max_length: int = 2048
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    width: int = 4096
    hidden_width: int = 11008
    dropout: float = 0.0
    tie_head: bool = False
    scan_layers: bool = False
    rotary_base: float = 10000.0
    rotary_scale: float = 1.0
    norm_epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32

    published: ClassVar[dict[str, dict[str, Any]]] = PUBLISHED_SIZES

    def __post_init__(self):
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"rotary embeddings need an even head dimension, not {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @classmethod
    def from_name(cls, name: str, **changes) -> Self:
        """The published size `name` (a key of `published`), with `changes` applied."""
        if name not in cls.published:
            family = cls.__name__.removesuffix("Config")
            raise ValueError(f"unknown {family} size {name!r}; known: {', '.join(cls.published)}")
        return cls(**{**cls.published[name], **changes})


def rotary_table(config: LlamaConfig, length: int):
    """Cosines and sines of the rotary position embedding, each [length, head_dim / 2], in float32 or wider.

    Pair i at position p turns by p * base^(-2i / head_dim) (Su et al., "RoFormer", 2021). With `rotary_scale` s
    above 1, as in Llama 3.1 and later (Grattafiori et al., 2024): of the 8192 positions of the original training,
    pairs that turn less than once turn s times slower, pairs that turn more than 4 times stay, and in between
    the two frequencies are mixed.
    """
    dtype = jnp.promote_types(config.dtype or config.param_dtype, jnp.float32)
    exponents = jnp.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    frequencies = config.rotary_base**-exponents
    if config.rotary_scale != 1:
        turns = 8192 * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - 1) / (4 - 1), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / config.rotary_scale)
    angles = jnp.arange(length, dtype=dtype)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x, table):
    """Turn each pair of `x` [batch, length, heads, head_dim] by the angle of its position; same shape and type.

    `table` is that of `rotary_table`. Feature i is paired with feature i + head_dim / 2, as in the converted
    checkpoints; the paper pairs neighbours, which is the same up to a fixed order of the features.
    """
    cosine, sine = (part[:, None, :] for part in table)
    first, second = jnp.split(x, 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def grouped_attention(query, key, value, mask, dropout=lambda weights: weights):
    """Attention in which a group of query heads shares one head of keys and values (Ainslie et al., 2023).

    `query` [batch, length, heads, head_dim], `key` and `value` [batch, length, kv_heads, head_dim], `mask`
    [length, length], true where a query (first) may read a key; returns [batch, length, heads, head_dim].
    Query head h reads head h // (heads / kv_heads). The softmax is in float32 or wider; `dropout` maps its result.
    """
    head_dim, kv_heads = query.shape[-1], key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], kv_heads, query.shape[-2] // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key) / math.sqrt(head_dim)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = dropout(nn.softmax(scores, axis=-1).astype(value.dtype))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(query.shape)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions, [batch, length, width] -> the same.

    "query" has the kernel [width, heads, head_dim], "key" and "value" [width, kv_heads, head_dim], "output"
    [heads, head_dim, width]; no biases.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x, table, mask, deterministic: bool):
        config = self.config
        project = functools.partial(
            nn.DenseGeneral,
            use_bias=False,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=nn.initializers.normal(0.02),
        )
        query = project((config.num_heads, config.head_dim), name="query")(x)
        key = project((config.num_kv_heads, config.head_dim), name="key")(x)
        value = project((config.num_kv_heads, config.head_dim), name="value")(x)
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        attended = grouped_attention(rotate(query, table), rotate(key, table), value, mask, dropout)
        return project(config.width, axis=(-2, -1), name="output")(attended)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), `hidden_width` in between, no biases; shape preserving (Shazeer, 2020)."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x):
        config = self.config
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=nn.initializers.normal(0.02),
        )
        gate = dense(config.hidden_width, name="gate")(x)
        up = dense(config.hidden_width, name="up")(x)
        return dense(config.width, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block, [batch, length, width] -> the same; `table` and `mask` are side inputs.

    A subclass may put another layer in place of SwiGLU by overriding `feed_forward`.
    """

    config: LlamaConfig

    def feed_forward(self) -> nn.Module:
        """The second layer of the block, a module from [batch, length, width] to the same."""
        return SwiGLU(self.config, name="mlp")

    @nn.compact
    def __call__(self, x, table, mask, deterministic: bool):
        config = self.config
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        normed = _rms_norm(config, "norm_1")(x)
        x = x + dropout(Attention(config, name="attention")(normed, table, mask, deterministic))
        return x + dropout(self.feed_forward()(_rms_norm(config, "norm_2")(x)))


class Llama(nn.Module):
    """The language model of Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).

    Also Llama 2 (Touvron et al., 2023) and Llama 3 (Grattafiori et al., 2024). Parameters: "token_embedding"
    [vocab, width], blocks "h_0" to "h_{L-1}" (one stack "h" [L, ...] with `scan_layers`), "norm_f" and, unless
    tied, "lm_head" [width, vocab]. A subclass may use other blocks by overriding `block`.
    """

    config: LlamaConfig

    def block(self, name: str) -> nn.Module:
        """A block called `name`."""
        return Block(self.config, name=name)

    @nn.compact
    def __call__(self, tokens, deterministic: bool = True):
        """Logits [batch, length, vocab] of the token after each of `tokens` [batch, length] (integers).

        `deterministic=False` applies dropout and needs a "dropout" rng.
        Raises ValueError when length > max_length.
        """
        config = self.config
        length = tokens.shape[-1]
        if length > config.max_length:
            raise ValueError(f"{length} tokens do not fit max_length {config.max_length}")
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocab_size, config.width, embedding_init=init, name="token_embedding", **types)
        x = embed(tokens)
        table = rotary_table(config, length)
        mask = jnp.tril(jnp.ones((length, length), bool))
        if config.scan_layers:
            x = self._scanned_blocks(x, table, mask, deterministic)
        else:
            for layer in range(config.num_layers):
                x = self.block(f"h_{layer}")(x, table, mask, deterministic)
        x = _rms_norm(config, "norm_f")(x)
        if config.tie_head:
            return embed.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, kernel_init=init, name="lm_head", **types)(x)

    def _scanned_blocks(self, x, table, mask, deterministic):
        def one_block(block, carry, _):
            return block(carry, table, mask, deterministic), None

        scan = nn.scan(
            one_block,
            variable_axes={"params": 0, "losses": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.num_layers,
        )
        x, _ = scan(self.block("h"), x, None)
        return x


def _rms_norm(config: LlamaConfig, name: str):
    return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, name=name)
