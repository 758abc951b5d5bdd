"""GPT-2 in Flax linen: the decoder-only transformer of Radford et al. (2019), with its loss and a sampler."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

PUBLISHED_SIZES = {
    "gpt2": {"num_layers": 12, "num_heads": 12, "width": 768},
    "gpt2-medium": {"num_layers": 24, "num_heads": 16, "width": 1024},
    "gpt2-large": {"num_layers": 36, "num_heads": 20, "width": 1280},
    "gpt2-xl": {"num_layers": 48, "num_heads": 25, "width": 1600},
}


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Sizes and precision of a GPT-2 model; the defaults are the smallest published one.

    `dtype` is the type of the computation; None takes it from the parameters (`param_dtype`).
    Raises ValueError when `width` is not a multiple of `num_heads`.
    """

    vocab_size: int = 50257
    max_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0
    tie_head: bool = True
    scan_layers: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self):
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @classmethod
    def from_name(cls, name: str, **changes) -> GPT2Config:
        """The published size "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl", with `changes` applied."""
        if name not in PUBLISHED_SIZES:
            raise ValueError(f"unknown GPT-2 size {name!r}; known: {', '.join(PUBLISHED_SIZES)}")
        return cls(**{**PUBLISHED_SIZES[name], **changes})


def _normal(stddev: float):
    return nn.initializers.normal(stddev)


class Attention(nn.Module):
    """Causal multi-head self-attention, [batch, length, width] -> [batch, length, width].

    Query, key and value have kernels [width, heads, head_dim]: a dimension that splits into whole heads.
    """

    config: GPT2Config

    @nn.compact
    def __call__(self, x, mask, deterministic: bool):
        config = self.config
        project = functools.partial(
            nn.DenseGeneral, dtype=config.dtype, param_dtype=config.param_dtype, kernel_init=_normal(0.02)
        )
        query, key, value = (
            project(features=(config.num_heads, config.head_dim), name=name)(x) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = nn.softmax(scores, axis=-1).astype(value.dtype)
        weights = nn.Dropout(config.dropout)(weights, deterministic=deterministic)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return project(
            features=config.width, axis=(-2, -1), kernel_init=_normal(_residual_stddev(config)), name="output"
        )(attended)


class MLP(nn.Module):
    """Two dense layers, 4 x width in between, with GELU in its tanh form; shape preserving."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x):
        config = self.config
        dense = functools.partial(nn.Dense, dtype=config.dtype, param_dtype=config.param_dtype)
        x = dense(4 * config.width, kernel_init=_normal(0.02), name="up")(x)
        x = nn.gelu(x, approximate=True)
        return dense(config.width, kernel_init=_normal(_residual_stddev(config)), name="down")(x)


class Block(nn.Module):
    """Pre-norm transformer block, [batch, length, width] -> [batch, length, width]."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x, mask, deterministic: bool):
        config = self.config
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        attended = Attention(config, name="attention")(_layer_norm(config, "norm_1")(x), mask, deterministic)
        x = x + dropout(attended)
        return x + dropout(MLP(config, name="mlp")(_layer_norm(config, "norm_2")(x)))


class GPT2(nn.Module):
    """The language model of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    Parameters: "token_embedding" [vocab, width], "position_embedding" [max_length, width], blocks "h_0" to
    "h_{L-1}" (one stack "h" [L, ...] with `scan_layers`), "norm_f" and, if untied, "lm_head" [width, vocab].
    """

    config: GPT2Config

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
        embed = nn.Embed(config.vocab_size, config.width, embedding_init=_normal(0.02), name="token_embedding", **types)
        positions = nn.Embed(
            config.max_length, config.width, embedding_init=_normal(0.01), name="position_embedding", **types
        )
        x = embed(tokens) + positions(jnp.arange(length))
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
        if config.scan_layers:
            x = self._scanned_blocks(x, mask, deterministic)
        else:
            for layer in range(config.num_layers):
                x = Block(config, name=f"h_{layer}")(x, mask, deterministic)
        x = _layer_norm(config, "norm_f")(x)
        if config.tie_head:
            return embed.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, kernel_init=_normal(0.02), name="lm_head", **types)(x)

    def _scanned_blocks(self, x, mask, deterministic):
        def one_block(block, carry, _):
            return block(carry, mask, deterministic), None

        scan = nn.scan(
            one_block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.num_layers,
        )
        x, _ = scan(Block(self.config, name="h"), x, None)
        return x


def _layer_norm(config: GPT2Config, name: str):
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, name=name
    )


def _residual_stddev(config: GPT2Config) -> float:
    """Scale of the two projections of a block that write to the residual stream (paper, section 2.3)."""
    return 0.02 / math.sqrt(2 * config.num_layers)


def next_token_loss(logits, targets, mask=None):
    """Mean cross entropy in nats, sum(loss * mask) / sum(mask); a scalar, computed in float32 or wider.

    `logits` [batch, length, vocab], `targets` [batch, length] integers, `mask` [batch, length] or None.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum, not a gather: a vocabulary that is split over devices stays split.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - target_logit
    if mask is None:
        return jnp.mean(loss)
    mask = mask.astype(loss.dtype)
    return jnp.sum(loss * mask) / jnp.sum(mask)


def generate(model: GPT2, params, prompt, num_tokens: int, *, temperature: float = 1.0, rng=None):
    """Sample `num_tokens` tokens after `prompt` [batch, length]; returns them, [batch, num_tokens] int32.

    Reads the last `max_length` tokens, in one window of fixed shape, so it compiles once for a model, a
    prompt shape and a `num_tokens`. `temperature` 0 takes the likeliest token and needs no `rng`.
    Raises ValueError for an empty prompt, a negative temperature, or a missing `rng`.
    """
    prompt = jnp.asarray(prompt, jnp.int32)[:, -model.config.max_length :]
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token")
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is negative")
    if temperature > 0 and rng is None:
        raise ValueError("sampling at a temperature above 0 needs rng=jax.random.key(...)")
    rng = jax.random.key(0) if rng is None else rng
    return _sample(model, num_tokens, temperature == 0, params, prompt, temperature, rng)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(model, num_tokens, greedy, params, prompt, temperature, rng):
    window_length = model.config.max_length
    batch, prompt_length = prompt.shape
    # Attention is causal, so what stands after the filled part of the window cannot change what is read.
    window = jnp.zeros((batch, window_length), jnp.int32).at[:, :prompt_length].set(prompt)

    def one_token(carry, key):
        window, filled = carry
        logits = model.apply({"params": params}, window)
        logits = jax.lax.dynamic_index_in_dim(logits, filled - 1, axis=1, keepdims=False)
        if greedy:
            token = jnp.argmax(logits, axis=-1)
        else:
            token = jax.random.categorical(key, logits.astype(jnp.float32) / temperature)
        token = token.astype(jnp.int32)
        full = filled == window_length
        window = jnp.where(full, jnp.roll(window, -1, axis=1), window)
        place = jnp.where(full, window_length - 1, filled)
        return (window.at[:, place].set(token), place + 1), token

    start = (window, jnp.asarray(prompt_length, jnp.int32))
    _, tokens = jax.lax.scan(one_token, start, jax.random.split(rng, num_tokens))
    return tokens.T
