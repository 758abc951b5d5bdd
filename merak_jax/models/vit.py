"""The Vision Transformer in Flax linen: Dosovitskiy et al. (2020), with stochastic depth, and its loss."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

PUBLISHED_SIZES = {
    "vit-b-16": {"patch_size": 16, "num_layers": 12, "num_heads": 12, "width": 768},
    "vit-b-32": {"patch_size": 32, "num_layers": 12, "num_heads": 12, "width": 768},
    "vit-l-16": {"patch_size": 16, "num_layers": 24, "num_heads": 16, "width": 1024},
    "vit-h-14": {"patch_size": 14, "num_layers": 32, "num_heads": 16, "width": 1280},
}


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes and precision of a Vision Transformer; the defaults are ViT-B/16 for ImageNet. Images are square.

    `drop_path` is the last block's rate of stochastic depth; the rate grows linearly with the block's number.
    `dtype` is the type of the computation; None takes it from the parameters (`param_dtype`).
    Raises ValueError when `image_size` is not a multiple of `patch_size`, `width` not one of `num_heads`, or
    `drop_path` is not in [0, 1).
    """

    image_size: int = 224
    patch_size: int = 16
    num_classes: int = 1000
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0
    drop_path: float = 0.0
    scan_layers: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    layer_norm_epsilon: float = 1e-6

    def __post_init__(self):
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path {self.drop_path} is not in [0, 1)")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def drop_path_rates(self) -> tuple[float, ...]:
        """The rate of each block, `drop_path` * 1/L, 2/L, ... 1 (Huang et al. 2016, section 3)."""
        return tuple(self.drop_path * layer / self.num_layers for layer in range(1, self.num_layers + 1))

    @classmethod
    def from_name(cls, name: str, **changes) -> ViTConfig:
        """The published size "vit-b-16", "vit-b-32", "vit-l-16" or "vit-h-14", with `changes` applied."""
        if name not in PUBLISHED_SIZES:
            raise ValueError(f"unknown ViT size {name!r}; known: {', '.join(PUBLISHED_SIZES)}")
        return cls(**{**PUBLISHED_SIZES[name], **changes})


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drops a residual branch `x` [batch, ...] whole, row by row.

    `rate`, a scalar in [0, 1), may be an array; a kept row is divided by 1 - rate. None drops nothing.
    """

    @nn.compact
    def __call__(self, x, rate, deterministic: bool):
        if rate is None or deterministic:
            return x
        keep = 1 - jnp.asarray(rate, jnp.promote_types(x.dtype, jnp.float32))
        is_kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (x.shape[0],) + (1,) * (x.ndim - 1))
        return jnp.where(is_kept, x / keep.astype(x.dtype), 0)


class Attention(nn.Module):
    """Multi-head self-attention, [batch, length, width] -> [batch, length, width].

    Query, key and value have kernels [width, heads, head_dim]: a dimension that splits into whole heads.
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, x, deterministic: bool):
        config = self.config
        project = functools.partial(nn.DenseGeneral, **_dense_options(config))
        query, key, value = (
            project(features=(config.num_heads, config.head_dim), name=name)(x) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        weights = nn.softmax(scores, axis=-1).astype(value.dtype)
        weights = nn.Dropout(config.dropout)(weights, deterministic=deterministic)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return project(features=config.width, axis=(-2, -1), name="output")(attended)


class MLP(nn.Module):
    """Two dense layers, 4 x width in between, with GELU in its exact form; shape preserving."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x, deterministic: bool):
        config = self.config
        dense = functools.partial(nn.Dense, **_dense_options(config))
        x = nn.gelu(dense(4 * config.width, name="up")(x), approximate=False)
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        return dense(config.width, name="down")(x)


class Block(nn.Module):
    """Pre-norm block, [batch, length, width] -> the same; `drop_path` is the rate of `DropPath` or None."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x, drop_path, deterministic: bool):
        config = self.config

        def residual(branch):
            branch = nn.Dropout(config.dropout)(branch, deterministic=deterministic)
            return DropPath()(branch, drop_path, deterministic)

        x = x + residual(Attention(config, name="attention")(_layer_norm(config, "norm_1")(x), deterministic))
        return x + residual(MLP(config, name="mlp")(_layer_norm(config, "norm_2")(x), deterministic))


class ViT(nn.Module):
    """The classifier of Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020).

    Parameters: "patch_embedding" with kernel [patch, patch, channels, width], "class_token" [1, 1, width],
    "position_embedding" [1, 1 + patches, width], blocks "h_0" to "h_{L-1}" (one stack "h" [L, ...] with
    `scan_layers`), "norm_f" and "head" [width, classes].
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, images, deterministic: bool = True):
        """Logits [batch, classes] of `images` [batch, image_size, image_size, channels], floating point.

        `deterministic=False` applies dropout and stochastic depth, and needs a "dropout" rng.
        Raises ValueError for images of another size.
        """
        config = self.config
        if images.shape[1:3] != (config.image_size, config.image_size):
            raise ValueError(
                f"images of {images.shape[1]} x {images.shape[2]} pixels, not image_size {config.image_size}"
            )
        x = nn.Conv(
            config.width,
            kernel_size=(config.patch_size, config.patch_size),
            strides=(config.patch_size, config.patch_size),
            padding="VALID",
            name="patch_embedding",
            **_dense_options(config),
        )(images)
        x = x.reshape(*x.shape[:1], config.num_patches, config.width)
        class_token = self.param("class_token", nn.initializers.zeros, (1, 1, config.width), config.param_dtype)
        positions = self.param(
            "position_embedding",
            nn.initializers.normal(0.02),
            (1, 1 + config.num_patches, config.width),
            config.param_dtype,
        )
        # The class token joins the positions before it meets the images: no copy of it per row.
        first = positions + jnp.pad(class_token, ((0, 0), (0, config.num_patches), (0, 0)))
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0))) + first.astype(x.dtype)
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        x = self._blocks(x, deterministic)
        x = _layer_norm(config, "norm_f")(x[:, 0])
        return nn.Dense(config.num_classes, name="head", **_dense_options(config))(x)

    def _blocks(self, x, deterministic):
        config = self.config
        rates = None
        if config.drop_path and not deterministic:
            # An array, also for blocks that are not scanned: all blocks have the same equations.
            rates = jnp.asarray(config.drop_path_rates, jnp.promote_types(x.dtype, jnp.float32))
        if not config.scan_layers:
            for layer in range(config.num_layers):
                x = Block(config, name=f"h_{layer}")(x, None if rates is None else rates[layer], deterministic)
            return x

        def one_block(block, carry, rate):
            return block(carry, rate, deterministic), None

        scan = nn.scan(
            one_block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.num_layers,
        )
        x, _ = scan(Block(config, name="h"), x, rates)
        return x


def _dense_options(config: ViTConfig) -> dict[str, Any]:
    return {
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "kernel_init": nn.initializers.truncated_normal(0.02),
    }


def _layer_norm(config: ViTConfig, name: str):
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, name=name
    )


def class_loss(logits, labels, mask=None, *, label_smoothing: float = 0.0):
    """Mean cross entropy in nats, sum(loss * mask) / sum(mask); a scalar, computed in float32 or wider.

    `logits` [batch, classes], `labels` [batch] integers, `mask` [batch] or None. `label_smoothing` is the share
    of the target distribution that is spread evenly over the classes (Szegedy et al. 2016, section 7).
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum, not a gather: classes that are split over devices stay split.
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    label_logit = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    if label_smoothing:
        label_logit = (1 - label_smoothing) * label_logit + label_smoothing * jnp.mean(logits, axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - label_logit
    if mask is None:
        return jnp.mean(loss)
    mask = mask.astype(loss.dtype)
    return jnp.sum(loss * mask) / jnp.sum(mask)
