"""Mixtral in Flax linen: Llama blocks with a sparse mixture of experts (Jiang et al., 2024), and its losses."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict

from merak_jax.models.gpt2 import next_token_loss
from merak_jax.models.llama import Block, Llama, LlamaConfig

PUBLISHED_SIZES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {},
    "mixtral-8x22b": {
        "max_length": 65536,
        "num_layers": 56,
        "num_heads": 48,
        "width": 6144,
        "hidden_width": 16384,
    },
}


@dataclasses.dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Sizes and precision of a Mixtral model; the defaults are those of Mixtral 8x7B.

    Each token is sent to `experts_per_token` of `num_experts` SwiGLU experts. `router_z_weight` and
    `balance_weight` weigh the two losses of the routers in `mixtral_loss`. The balance loss is a product of two
    means over all tokens, so with it the gradients of parts of a batch no longer add up to that of the batch.
    Raises ValueError when `experts_per_token` is not between 1 and `num_experts`, and as LlamaConfig does.
    """

    max_length: int = 32768
    num_kv_heads: int = 8
    hidden_width: int = 14336
    rotary_base: float = 1e6
    norm_epsilon: float = 1e-5
    num_experts: int = 8
    experts_per_token: int = 2
    router_z_weight: float = 1e-3
    balance_weight: float = 0.0

    published: ClassVar[dict[str, dict[str, Any]]] = PUBLISHED_SIZES

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is not from 1 to {self.num_experts}")


def route(logits, experts_per_token: int):
    """Gates and picks of each token's experts, both [..., experts]: (floats that sum to one, booleans).

    `logits` [..., experts]; exactly `experts_per_token` are picked, the largest, and of equal ones the first. The
    gates are the softmax over the picked ones and zero at all others. No token is dropped, and what a token gets
    does not depend on any other.
    """
    _, picked = jax.lax.top_k(jax.lax.stop_gradient(logits), experts_per_token)
    is_picked = jnp.any(picked[..., None] == jnp.arange(logits.shape[-1]), axis=-2)
    return nn.softmax(jnp.where(is_picked, logits, -jnp.inf), axis=-1), is_picked


class MixtureOfExperts(nn.Module):
    """A gated sum of SwiGLU experts, [batch, length, width] -> the same.

    Parameters: "router" [width, experts]; "gate" and "up" [experts, width, hidden] and "down" [experts, hidden,
    width] of all experts. Every expert computes every token and the gates silence all but the picked ones: exact
    for each token and without a capacity, at num_experts / experts_per_token times the arithmetic of a sparse
    computation and with activations [batch, length, experts, hidden].

    Sows into "losses", [batch, length] in float32 or wider: "router_z", the squared logsumexp of the router's
    logits. With `balance_weight` also, [batch, length, experts], "router_probability" (the softmax over all
    experts) and "router_choice" (1 / experts_per_token where picked).
    """

    config: MixtralConfig

    @nn.compact
    def __call__(self, x):
        config = self.config
        init = nn.initializers.normal(0.02)

        def kernel(name, *shape):
            return self.param(name, init, (config.num_experts, *shape), config.param_dtype)

        gates = self._gates(x, init)
        x, gate, up, down = promote_dtype(
            x,
            kernel("gate", config.width, config.hidden_width),
            kernel("up", config.width, config.hidden_width),
            kernel("down", config.hidden_width, config.width),
            dtype=config.dtype,
        )
        hidden = nn.silu(jnp.einsum("blw,ewh->bleh", x, gate)) * jnp.einsum("blw,ewh->bleh", x, up)
        hidden = hidden * gates[..., None].astype(hidden.dtype)
        return jnp.einsum("bleh,ehw->blw", hidden, down)

    def _gates(self, x, init):
        config = self.config
        # Rounding in a router changes which experts a token sees, so its logits are never below float32.
        dtype = jnp.promote_types(config.dtype or x.dtype, jnp.float32)
        types = {"dtype": dtype, "param_dtype": config.param_dtype}
        logits = nn.Dense(config.num_experts, use_bias=False, kernel_init=init, name="router", **types)(x)
        gates, is_picked = route(logits, config.experts_per_token)
        # Otherwise `init` would return a "losses" collection next to "params".
        if not self.is_initializing():
            self.sow("losses", "router_z", jnp.square(jax.nn.logsumexp(logits, axis=-1)))
            if config.balance_weight:
                self.sow("losses", "router_probability", nn.softmax(logits, axis=-1))
                self.sow("losses", "router_choice", is_picked.astype(dtype) / config.experts_per_token)
        return gates


class MixtralBlock(Block):
    """A Llama block with a mixture of experts for its SwiGLU, [batch, length, width] -> the same."""

    config: MixtralConfig

    def feed_forward(self) -> nn.Module:
        return MixtureOfExperts(self.config, name="moe")


class Mixtral(Llama):
    """The language model of Jiang et al., "Mixtral of Experts" (2024): logits [batch, length, vocab] of tokens.

    `model.apply(variables, tokens, mutable="losses")` returns (logits, {"losses": ...}), what `mixtral_loss` reads.
    """

    config: MixtralConfig

    def block(self, name: str) -> nn.Module:
        return MixtralBlock(self.config, name=name)


def mixtral_loss(config: MixtralConfig, logits, losses, targets, mask=None):
    """Mean cross entropy plus the weighted losses of the routers; a scalar in float32 or wider.

    `logits` [batch, length, vocab]; `losses` the collection that the model sowed; `targets` [batch, length];
    `mask` [batch, length] or None, of every mean over tokens. Raises ValueError when `losses` is empty.
    """
    loss = next_token_loss(logits, targets, mask)
    if config.router_z_weight:
        loss = loss + config.router_z_weight * router_z_loss(losses, mask)
    if config.balance_weight:
        loss = loss + config.balance_weight * balance_loss(losses, mask)
    return loss


def router_z_loss(losses, mask=None):
    """Sum over layers of the mean over tokens of logsumexp(router logits)^2; a scalar (Zoph et al., 2022).

    `losses` and `mask` as in `mixtral_loss`.
    """
    return sum(jnp.sum(_token_mean(value, mask)) for value in _sown(losses, "router_z"))


def balance_loss(losses, mask=None):
    """Sum over layers of experts * sum_e(share of picks of e * mean probability of e); a scalar.

    It is 1 for each layer with even routing (Fedus et al., "Switch Transformers", 2021). `losses` and `mask` as
    in `mixtral_loss`; needs a model with `balance_weight` above 0.
    """
    total = 0
    for choice, probability in zip(_sown(losses, "router_choice"), _sown(losses, "router_probability")):
        share = _token_mean(jnp.moveaxis(choice, -1, 0), mask)
        mean_probability = _token_mean(jnp.moveaxis(probability, -1, 0), mask)
        total = total + choice.shape[-1] * jnp.sum(share * mean_probability)
    return total


def _sown(losses, name: str) -> list:
    """Every value sown as `name`, one for each block, or one [layers, ...] of scanned blocks."""
    found = [value for path, values in flatten_dict(losses).items() if path[-1] == name for value in values]
    if not found:
        raise ValueError(
            f"no {name!r} among the losses; apply the model with mutable='losses' and pass that collection"
        )
    return found


def _token_mean(value, mask):
    """Mean over the last two dimensions, the batch and the length, of the tokens in `mask`."""
    if mask is None:
        return jnp.mean(value, axis=(-2, -1))
    mask = mask.astype(value.dtype)
    return jnp.sum(value * mask, axis=(-2, -1)) / jnp.sum(mask)
