"""BERT in Flax linen: the bidirectional encoder of Devlin et al. (2018), its masked-token head and its loss."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

PUBLISHED_SIZES = {
    "bert-base-uncased": {"num_layers": 12, "num_heads": 12, "width": 768},
    "bert-large-uncased": {"num_layers": 24, "num_heads": 16, "width": 1024},
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and precision of a BERT model; the defaults are the base size with the uncased English vocabulary.

    `dtype` is the type of the computation; None takes it from the parameters (`param_dtype`).
    Raises ValueError when `width` is not a multiple of `num_heads`.
    """

    vocab_size: int = 30522
    max_length: int = 512
    num_token_types: int = 2
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.1
    scan_layers: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    layer_norm_epsilon: float = 1e-12

    def __post_init__(self):
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @classmethod
    def from_name(cls, name: str, **changes) -> BertConfig:
        """The published size "bert-base-uncased" or "bert-large-uncased", with `changes` applied."""
        if name not in PUBLISHED_SIZES:
            raise ValueError(f"unknown BERT size {name!r}; known: {', '.join(PUBLISHED_SIZES)}")
        return cls(**{**PUBLISHED_SIZES[name], **changes})


class Attention(nn.Module):
    """Multi-head self-attention in both directions, [batch, length, width] -> [batch, length, width].

    `mask` [batch, 1, 1, length] is true at the positions that may be read; None reads them all.
    Query, key and value have kernels [width, heads, head_dim]: a dimension that splits into whole heads.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, x, mask, deterministic: bool):
        config = self.config
        project = functools.partial(nn.DenseGeneral, **_dense_options(config))
        query, key, value = (
            project(features=(config.num_heads, config.head_dim), name=name)(x) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        if mask is not None:
            # The least finite number, not minus infinity: a row without any token stays finite.
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = nn.softmax(scores, axis=-1).astype(value.dtype)
        weights = nn.Dropout(config.dropout)(weights, deterministic=deterministic)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return project(features=config.width, axis=(-2, -1), name="output")(attended)


class MLP(nn.Module):
    """Two dense layers, 4 x width in between, with GELU in its exact form; shape preserving."""

    config: BertConfig

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, **_dense_options(self.config))
        x = nn.gelu(dense(4 * self.config.width, name="up")(x), approximate=False)
        return dense(self.config.width, name="down")(x)


class Block(nn.Module):
    """Post-norm transformer block, [batch, length, width] -> [batch, length, width]; `mask` as in `Attention`."""

    config: BertConfig

    @nn.compact
    def __call__(self, x, mask, deterministic: bool):
        config = self.config
        dropout = functools.partial(nn.Dropout(config.dropout), deterministic=deterministic)
        attended = Attention(config, name="attention")(x, mask, deterministic)
        x = _layer_norm(config, "norm_1")(x + dropout(attended))
        return _layer_norm(config, "norm_2")(x + dropout(MLP(config, name="mlp")(x)))


class Bert(nn.Module):
    """The encoder of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018).

    Parameters: "token_embedding" [vocab, width], "position_embedding" [max_length, width], "type_embedding"
    [num_token_types, width], "norm_embedding", blocks "h_0" to "h_{L-1}" (one stack "h" [L, ...] with
    `scan_layers`) and, with `pooler`, the dense layer "pooler" [width, width].
    """

    config: BertConfig
    pooler: bool = True

    def setup(self):
        self.token_embedding = _embed(self.config, self.config.vocab_size)

    @nn.compact
    def __call__(self, tokens, token_types=None, padding_mask=None, deterministic: bool = True):
        """Hidden states [batch, length, width] of `tokens`, and the pooled first one [batch, width].

        `tokens` [batch, length] integers; `token_types` the same, all 0 when None; `padding_mask`
        [batch, length] is true at tokens and false at padding, which no position reads. The pooled vector
        is tanh(dense(first hidden state)); None without `pooler`.
        `deterministic=False` applies dropout and needs a "dropout" rng.
        Raises ValueError when length > max_length.
        """
        config = self.config
        length = tokens.shape[-1]
        if length > config.max_length:
            raise ValueError(f"{length} tokens do not fit max_length {config.max_length}")
        if token_types is None:
            token_types = jnp.zeros_like(tokens)
        positions = _embed(config, config.max_length, name="position_embedding")
        types = _embed(config, config.num_token_types, name="type_embedding")
        x = self.token_embedding(tokens) + positions(jnp.arange(length)) + types(token_types)
        x = _layer_norm(config, "norm_embedding")(x)
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        mask = None if padding_mask is None else padding_mask.astype(bool)[:, None, None, :]
        if config.scan_layers:
            x = self._scanned_blocks(x, mask, deterministic)
        else:
            for layer in range(config.num_layers):
                x = Block(config, name=f"h_{layer}")(x, mask, deterministic)
        if not self.pooler:
            return x, None
        return x, jnp.tanh(nn.Dense(config.width, name="pooler", **_dense_options(config))(x[:, 0]))

    def attend(self, x):
        """Inner products of `x` [..., width] with the token embeddings, [..., vocab]."""
        return self.token_embedding.attend(x)

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


class BertForMaskedLM(nn.Module):
    """BERT without pooler, with the head that predicts masked tokens (paper, section 3.1).

    Parameters: "bert" as in `Bert`; the head's "transform" [width, width], "norm_transform" and "decoder_bias"
    [vocab]. The head's decoder is the token embedding.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, tokens, token_types=None, padding_mask=None, deterministic: bool = True):
        """Logits [batch, length, vocab] of the token at each position; arguments as in `Bert.__call__`."""
        config = self.config
        bert = Bert(config, pooler=False, name="bert")
        x, _ = bert(tokens, token_types, padding_mask, deterministic)
        x = nn.Dense(config.width, name="transform", **_dense_options(config))(x)
        x = _layer_norm(config, "norm_transform")(nn.gelu(x, approximate=False))
        logits = bert.attend(x)
        bias = self.param("decoder_bias", nn.initializers.zeros, (config.vocab_size,), config.param_dtype)
        return logits + bias.astype(logits.dtype)


def _dense_options(config: BertConfig) -> dict[str, Any]:
    return {
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "kernel_init": nn.initializers.truncated_normal(0.02),
    }


def _embed(config: BertConfig, size: int, name: str | None = None):
    return nn.Embed(
        size,
        config.width,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nn.initializers.truncated_normal(0.02),
        name=name,
    )


def _layer_norm(config: BertConfig, name: str):
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, name=name
    )


def masked_token_loss(logits, targets, is_masked):
    """Cross entropy in nats of the masked tokens, sum over them / number of them; a scalar, in float32 or wider.

    `logits` [batch, length, vocab]; `targets` [batch, length] integers, of any valid value where nothing is
    masked; `is_masked` [batch, length] is true at the tokens to predict. NaN when there are none.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum, not a gather: a vocabulary that is split over devices stays split.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - target_logit
    is_masked = is_masked.astype(loss.dtype)
    return jnp.sum(loss * is_masked) / jnp.sum(is_masked)
