"""T5 in Flax linen: the encoder-decoder of Raffel et al. (2020), in its versions 1.0 and 1.1, and its loss."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

_V1_1: dict[str, Any] = {"gated": True, "tie_head": False}
PUBLISHED_SIZES: dict[str, dict[str, Any]] = {
    "t5-small": {"num_layers": 6, "num_heads": 8, "width": 512, "mlp_width": 2048},
    "t5-base": {"num_layers": 12, "num_heads": 12, "width": 768, "mlp_width": 3072},
    "t5-large": {"num_layers": 24, "num_heads": 16, "width": 1024, "mlp_width": 4096},
    "t5-3b": {"num_layers": 24, "num_heads": 32, "width": 1024, "head_dim": 128, "mlp_width": 16384},
    "t5-11b": {"num_layers": 24, "num_heads": 128, "width": 1024, "head_dim": 128, "mlp_width": 65536},
    "t5-v1.1-small": {"num_layers": 8, "num_heads": 6, "width": 512, "mlp_width": 1024, **_V1_1},
    "t5-v1.1-base": {"num_layers": 12, "num_heads": 12, "width": 768, "mlp_width": 2048, **_V1_1},
    "t5-v1.1-large": {"num_layers": 24, "num_heads": 16, "width": 1024, "mlp_width": 2816, **_V1_1},
    "t5-v1.1-xl": {"num_layers": 24, "num_heads": 32, "width": 2048, "mlp_width": 5120, **_V1_1},
    "t5-v1.1-xxl": {"num_layers": 24, "num_heads": 64, "width": 4096, "mlp_width": 10240, **_V1_1},
}


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and precision of a T5 model; the defaults are t5-small. Encoder and decoder have `num_layers` each.

    `head_dim` is free: heads need not add up to `width`. Version 1.1 is `gated=True` (gated GELU in place of
    ReLU) and `tie_head=False`. `dtype` is the type of the computation; None takes it from the parameters.
    Raises ValueError when `num_buckets` is not an even number >= 4, or `max_distance` <= num_buckets / 2.
    """

    vocab_size: int = 32128
    num_layers: int = 6
    num_heads: int = 8
    width: int = 512
    head_dim: int = 64
    mlp_width: int = 2048
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    gated: bool = False
    tie_head: bool = True
    scan_layers: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(f"num_buckets {self.num_buckets} is not an even number >= 4")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(f"max_distance {self.max_distance} is not above num_buckets / 2 = {self.num_buckets // 2}")

    @classmethod
    def from_name(cls, name: str, **changes) -> T5Config:
        """The published size "t5-small", "t5-v1.1-small" or any other of `PUBLISHED_SIZES`, with `changes` applied."""
        if name not in PUBLISHED_SIZES:
            raise ValueError(f"unknown T5 size {name!r}; known: {', '.join(PUBLISHED_SIZES)}")
        return cls(**{**PUBLISHED_SIZES[name], **changes})


def relative_position_bucket(relative_position, *, bidirectional: bool, num_buckets: int, max_distance: int):
    """The bucket, in [0, num_buckets), of key position minus query position; integers of any shape.

    Half of the buckets hold one distance each, the other half grow logarithmically up to `max_distance`; the
    last one holds all larger distances (paper, section 2.1). `bidirectional` gives keys after the query a
    half of the buckets of their own; otherwise they count as distance 0.
    """
    if bidirectional:
        num_buckets //= 2
        first = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        first = 0
        distance = jnp.maximum(-relative_position, 0)
    starts = jnp.asarray(_bucket_starts(num_buckets, max_distance), distance.dtype)
    return first + jnp.sum(distance[..., None] >= starts[1:], axis=-1, dtype=distance.dtype)


@functools.cache
def _bucket_starts(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket, in exact arithmetic: a rounded logarithm may miss by one bucket."""
    exact = num_buckets // 2
    growing = num_buckets - exact
    starts = list(range(exact + 1))
    for k in range(1, growing):
        distance = starts[-1]
        # distance >= exact * (max_distance / exact) ** (k / growing), without the roots
        while distance**growing * exact**k < max_distance**k * exact**growing:
            distance += 1
        starts.append(distance)
    return tuple(starts)


class PositionBias(nn.Module):
    """A learned number per head and bucket of the relative position, added to attention scores.

    Called with the number of positions; returns [1, heads, queries, keys]. One is made per side of the model
    and read by all blocks of that side.
    """

    config: T5Config
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int):
        config = self.config
        positions = jnp.arange(length)
        buckets = relative_position_bucket(
            positions[None, :] - positions[:, None],
            bidirectional=self.bidirectional,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
        )
        table = nn.Embed(
            config.num_buckets,
            config.num_heads,
            param_dtype=config.param_dtype,
            embedding_init=nn.initializers.normal(config.width**-0.5),
            name="buckets",
        )
        return jnp.transpose(table(buckets), (2, 0, 1))[None]


class Attention(nn.Module):
    """Multi-head attention of `x` [batch, queries, width] to `memory` [batch, keys, width]; the shape of `x`.

    `mask` (true where a key may be read) and `bias` broadcast to [batch, heads, queries, keys]; either may be
    None. Scores are not divided by sqrt(head_dim): the initial query kernels are smaller instead.
    Query, key and value have kernels [width, heads, head_dim]: a dimension that splits into whole heads.
    """

    config: T5Config

    @nn.compact
    def __call__(self, x, memory, mask, bias, deterministic: bool):
        config = self.config

        def project(name, source, stddev):
            features = (config.num_heads, config.head_dim)
            return nn.DenseGeneral(features, name=name, **_dense_options(config, stddev))(source)

        query = project("query", x, (config.width * config.head_dim) ** -0.5)
        key = project("key", memory, config.width**-0.5)
        value = project("value", memory, config.width**-0.5)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        if bias is not None:
            scores = scores + bias.astype(scores.dtype)
        if mask is not None:
            # The least finite number, not minus infinity: a row without any token stays finite.
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = nn.softmax(scores, axis=-1).astype(value.dtype)
        weights = nn.Dropout(config.dropout)(weights, deterministic=deterministic)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        options = _dense_options(config, (config.num_heads * config.head_dim) ** -0.5)
        return nn.DenseGeneral(config.width, axis=(-2, -1), name="output", **options)(attended)


class MLP(nn.Module):
    """ReLU between two dense layers or, with `gated`, GELU(gate) * up before the second; shape preserving."""

    config: T5Config

    @nn.compact
    def __call__(self, x, deterministic: bool):
        config = self.config
        dense = functools.partial(nn.Dense, config.mlp_width, **_dense_options(config, config.width**-0.5))
        hidden = dense(name="up")(x)
        if config.gated:
            hidden = nn.gelu(dense(name="gate")(x), approximate=True) * hidden
        else:
            hidden = nn.relu(hidden)
        hidden = nn.Dropout(config.dropout)(hidden, deterministic=deterministic)
        return nn.Dense(config.width, name="down", **_dense_options(config, config.mlp_width**-0.5))(hidden)


class EncoderBlock(nn.Module):
    """Pre-norm block, [batch, length, width] -> [batch, length, width]; `mask` and `bias` as in `Attention`."""

    config: T5Config

    @nn.compact
    def __call__(self, x, mask, bias, deterministic: bool):
        config = self.config
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        normed = _rms_norm(config, "norm_1")(x)
        x = x + dropout(Attention(config, name="attention")(normed, normed, mask, bias, deterministic))
        return x + dropout(MLP(config, name="mlp")(_rms_norm(config, "norm_2")(x), deterministic))


class DecoderBlock(nn.Module):
    """Pre-norm block that also attends to the encoder's output, [batch, length, width] -> the same.

    `memory` [batch, encoder length, width]; masks and `bias` as in `Attention`.
    """

    config: T5Config

    @nn.compact
    def __call__(self, x, mask, bias, memory, memory_mask, deterministic: bool):
        config = self.config
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        normed = _rms_norm(config, "norm_1")(x)
        x = x + dropout(Attention(config, name="attention")(normed, normed, mask, bias, deterministic))
        normed = _rms_norm(config, "norm_2")(x)
        cross_attention = Attention(config, name="cross_attention")
        x = x + dropout(cross_attention(normed, memory, memory_mask, None, deterministic))
        return x + dropout(MLP(config, name="mlp")(_rms_norm(config, "norm_3")(x), deterministic))


class Encoder(nn.Module):
    """Embedded tokens [batch, length, width] to their representation, the same shape.

    `padding_mask` [batch, 1, 1, length] is true at tokens; None reads every position.
    """

    config: T5Config

    @nn.compact
    def __call__(self, x, padding_mask, deterministic: bool):
        config = self.config
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        bias = PositionBias(config, bidirectional=True, name="position_bias")(x.shape[1])
        x = _apply_blocks(EncoderBlock, config, dropout(x), padding_mask, bias, deterministic)
        return dropout(_rms_norm(config, "norm_f")(x))


class Decoder(nn.Module):
    """Embedded tokens [batch, length, width] to their representation, the same shape; causal.

    `memory` [batch, encoder length, width] is the encoder's output. The masks, of the decoder's tokens
    [batch, 1, 1, length] and of `memory` [batch, 1, 1, encoder length], are true at tokens, or None.
    """

    config: T5Config

    @nn.compact
    def __call__(self, x, padding_mask, memory, memory_mask, deterministic: bool):
        config = self.config
        length = x.shape[1]
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        bias = PositionBias(config, bidirectional=False, name="position_bias")(length)
        mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
        if padding_mask is not None:
            mask = mask & padding_mask
        x = _apply_blocks(DecoderBlock, config, dropout(x), mask, bias, memory, memory_mask, deterministic)
        return dropout(_rms_norm(config, "norm_f")(x))


class T5(nn.Module):
    """The model of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020).

    Parameters: "token_embedding" [vocab, width] of both sides; "encoder" and "decoder", each with
    "position_bias" [num_buckets, heads], blocks "h_0" to "h_{L-1}" (one stack "h" [L, ...] with `scan_layers`)
    and "norm_f"; and, if untied, "lm_head" [width, vocab].
    """

    config: T5Config

    @nn.compact
    def __call__(
        self, tokens, decoder_tokens, padding_mask=None, decoder_padding_mask=None, deterministic: bool = True
    ):
        """Logits [batch, decoder length, vocab] of the token after each of `decoder_tokens`, given `tokens`.

        `tokens` [batch, length] and `decoder_tokens` [batch, decoder length] integers (see `shift_right`).
        The masks have the tokens' shapes, true at tokens and false at padding, which no position reads.
        `deterministic=False` applies dropout and needs a "dropout" rng.
        """
        config = self.config
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        embedding_init = nn.initializers.normal(1.0)
        embed = nn.Embed(
            config.vocab_size, config.width, embedding_init=embedding_init, name="token_embedding", **types
        )
        padding_mask, decoder_padding_mask = (
            None if mask is None else mask.astype(bool)[:, None, None, :]
            for mask in (padding_mask, decoder_padding_mask)
        )
        memory = Encoder(config, name="encoder")(embed(tokens), padding_mask, deterministic)
        decoder = Decoder(config, name="decoder")
        x = decoder(embed(decoder_tokens), decoder_padding_mask, memory, padding_mask, deterministic)
        if config.tie_head:
            # The embedding has entries of size one, so its inner products grow as sqrt(width).
            return embed.attend(x * config.width**-0.5)
        return nn.Dense(config.vocab_size, name="lm_head", **_dense_options(config, config.width**-0.5))(x)


def _apply_blocks(block_class, config: T5Config, x, *side):
    """`x` through `num_layers` blocks, all of which read `side`; for use inside a compact method."""
    if not config.scan_layers:
        for layer in range(config.num_layers):
            x = block_class(config, name=f"h_{layer}")(x, *side)
        return x

    def one_block(block, carry, _):
        return block(carry, *side), None

    scan = nn.scan(
        one_block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=config.num_layers,
    )
    x, _ = scan(block_class(config, name="h"), x, None)
    return x


def _dense_options(config: T5Config, stddev: float) -> dict[str, Any]:
    return {
        "use_bias": False,
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "kernel_init": nn.initializers.normal(stddev),
    }


def _rms_norm(config: T5Config, name: str):
    return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, name=name)


def shift_right(targets, start: int = 0):
    """The decoder's input for `targets` [batch, length]: `start` (T5's padding token), then all but the last."""
    return jnp.pad(targets, ((0, 0), (1, 0)), constant_values=start)[:, :-1]


def sequence_loss(logits, targets, mask=None, *, label_smoothing: float = 0.0, z_loss: float = 0.0):
    """Mean cross entropy in nats, sum(loss * mask) / sum(mask); a scalar, computed in float32 or wider.

    `logits` [batch, length, vocab], `targets` [batch, length] integers, `mask` [batch, length] or None.
    `label_smoothing` is the share of the target distribution that is spread evenly over the vocabulary
    (Szegedy et al. 2016, section 7); `z_loss` weighs log(Z)^2, Z the softmax's denominator, which keeps
    logits near log-probabilities (1e-4 in T5's own training).
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum, not a gather: a vocabulary that is split over devices stays split.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    if label_smoothing:
        target_logit = (1 - label_smoothing) * target_logit + label_smoothing * jnp.mean(logits, axis=-1)
    loss = log_z - target_logit
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    if mask is None:
        return jnp.mean(loss)
    mask = mask.astype(loss.dtype)
    return jnp.sum(loss * mask) / jnp.sum(mask)
