"""The models of the parity table, small, with drawn parameters, batches and losses; dropout is on wherever a model has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from merak_jax.models import bert, gpt2, gpt2_nnx, llama, llama_nnx, mixtral, t5, vit
from tests import parity
from tests.parity import LENGTH, PRECISIONS, VOCABULARY

# Weights are drawn about this large: as in the grid of GPT-2, so that the noise of gradients that are zero stays small.
SIZES = {"float64": 0.1, "float32": 0.07, "bfloat16": 0.02}
DROPOUT = 0.1
CLASSES, IMAGE, PATCH = 8, 8, 4


@dataclasses.dataclass(frozen=True)
class Task:
    """A linen model with what it is trained on.

    `make_batch(n, rows)` is the batch of step n; `loss(apply, params, batch, key)` a scalar, `key` that of dropout.
    """

    model: nn.Module
    params: Any
    make_batch: Callable[[int, int], dict]
    loss: Callable


@dataclasses.dataclass(frozen=True)
class ObjectTask:
    """An nnx model with what it is trained on: `make_model()`, and `loss(model, batch)`."""

    make_model: Callable[[], nnx.Module]
    make_batch: Callable[[int, int], dict]
    loss: Callable


def drawn(shapes: Any, precision: str) -> Any:
    """Values for a tree of parameters: scales of norms about 1, everything else about 0, so that no gradient is tiny."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        is_scale = "scale" in jax.tree_util.keystr(path[-1:] if not hasattr(path[-1], "name") else path[-2:])
        return jnp.asarray(is_scale + SIZES[precision] * random.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def types(precision: str) -> dict[str, Any]:
    """The types of the computation and of the parameters, as options of a config."""
    dtype, param_dtype = PRECISIONS[precision]
    return {"dtype": dtype, "param_dtype": param_dtype}


def text_batches(precision: str) -> Callable[[int, int], dict]:
    """Tokens, targets and the mask of rows of unequal length; for bfloat16 few tokens and one target."""
    if precision == "bfloat16":
        return parity.make_coherent_batch
    return lambda n, rows: parity.make_batch(n, rows, dtype=PRECISIONS[precision][0])


def make_task(model: nn.Module, precision: str, make_batch, loss, *inputs) -> Task:
    """`inputs`: one row for `model.init`."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(lambda: model.init(keys, *inputs))["params"]
    return Task(model, drawn(shapes, precision), make_batch, loss)


ONE_ROW = np.ones((1, LENGTH), np.int32)


def next_token_loss(apply, params, batch, key):
    """The masked cross entropy of a language model."""
    logits = apply({"params": params}, batch["tokens"], deterministic=False, rngs={"dropout": key})
    return gpt2.next_token_loss(logits, batch["targets"], batch["mask"])


def gpt2_task(precision: str, **changes) -> Task:
    sizes = dict(vocab_size=VOCABULARY, max_length=2 * LENGTH, num_layers=4, num_heads=4, width=16, dropout=DROPOUT)
    config = gpt2.GPT2Config(**{**sizes, **changes}, **types(precision))
    return make_task(gpt2.GPT2(config), precision, text_batches(precision), next_token_loss, ONE_ROW)


LLAMA = dict(
    vocab_size=VOCABULARY, max_length=2 * LENGTH, num_layers=4, num_heads=4, num_kv_heads=2, width=16, hidden_width=32,
    dropout=DROPOUT,
)  # fmt: skip


def llama_task(precision: str, model=llama.Llama, **changes) -> Task:
    """Two heads of keys and values for four of queries."""
    config = llama.LlamaConfig(**{**LLAMA, **changes}, **types(precision))
    return make_task(model(config), precision, text_batches(precision), next_token_loss, ONE_ROW)


class RematLlama(llama.Llama):
    """Llama whose blocks are recomputed in the backward pass."""

    def block(self, name):
        return nn.remat(llama.Block, static_argnums=(4,))(self.config, name=name)


class LocalBlock(llama.Block):
    """A Llama block whose tokens see themselves and the two before."""

    def __call__(self, x, table, mask, deterministic):
        window = jnp.triu(jnp.ones(mask.shape, bool), -2)
        return super().__call__(x, table, mask & window, deterministic)


class LocalLlama(llama.Llama):
    """Llama with local attention in every second block."""

    def block(self, name):
        block = LocalBlock if int(name.removeprefix("h_")) % 2 else llama.Block
        return block(self.config, name=name)


class SparseMixtral(mixtral.Mixtral):
    """Mixtral with experts in every second block and one SwiGLU in the others."""

    def block(self, name):
        block = mixtral.MixtralBlock if int(name.removeprefix("h_")) % 2 else llama.Block
        return block(self.config, name=name)


def mixtral_task(precision: str, model=mixtral.Mixtral, **changes) -> Task:
    """Two of four experts for each token; the z-loss of the routers is sown by every block."""
    sizes = {**LLAMA, "hidden_width": 16, "num_experts": 4, "router_z_weight": 0.01}
    config = mixtral.MixtralConfig(**{**sizes, **changes}, **types(precision))

    def loss(apply, params, batch, key):
        logits, sown = apply(
            {"params": params}, batch["tokens"], deterministic=False, rngs={"dropout": key}, mutable="losses"
        )
        return mixtral.mixtral_loss(config, logits, sown["losses"], batch["targets"], batch["mask"])

    return make_task(model(config), precision, text_batches(precision), loss, ONE_ROW)


def bert_config(precision: str, **changes) -> bert.BertConfig:
    sizes = dict(vocab_size=VOCABULARY, max_length=2 * LENGTH, num_layers=4, num_heads=2, width=16, dropout=DROPOUT)
    return bert.BertConfig(**{**sizes, **changes}, **types(precision))


def bert_task(precision: str, **changes) -> Task:
    """Masked tokens of padded rows; in bfloat16 sixteen of them.

    With fewer, gradients of scales nearly cancel: with six, one device is 1.8 % from float32 in its worst leaf, and a mesh
    2.9 %; with sixteen, both are at most 1.6 %. With more, XLA:CPU's sum of the bias of the logits, in bfloat16, is too far
    off on one device: with 32, the mesh, which adds the microbatches in float32, differs from it by 2.4 %.
    """
    text = text_batches(precision)

    def make_batch(n, rows):
        batch = text(n, rows)
        valid = batch["mask"].astype(bool)
        is_masked = valid & (np.random.default_rng(n + 50).random(valid.shape) < 0.4)
        if precision == "bfloat16":
            is_masked = valid & (np.arange(valid.shape[1]) < 16 // rows)
        return {"tokens": batch["tokens"], "targets": batch["targets"], "valid": valid, "is_masked": is_masked}

    def loss(apply, params, batch, key):
        logits = apply(
            {"params": params}, batch["tokens"], None, batch["valid"], deterministic=False, rngs={"dropout": key}
        )
        return bert.masked_token_loss(logits, batch["targets"], batch["is_masked"])

    return make_task(bert.BertForMaskedLM(bert_config(precision, **changes)), precision, make_batch, loss, ONE_ROW)


class PairClassifier(nn.Module):
    """The class of a pair of sentences, from BERT's pooled vector."""

    config: bert.BertConfig

    @nn.compact
    def __call__(self, tokens, token_types, valid, deterministic: bool = True):
        _, pooled = bert.Bert(self.config, name="bert")(tokens, token_types, valid, deterministic)
        pooled = nn.Dropout(self.config.dropout)(pooled, deterministic=deterministic)
        types = {"dtype": self.config.dtype, "param_dtype": self.config.param_dtype}
        return nn.Dense(CLASSES, name="classifier", **types)(pooled)


def pair_task(precision: str, **changes) -> Task:
    """Sentence pairs, told apart by their token types; one label a row."""
    text = text_batches(precision)

    def make_batch(n, rows):
        batch, random = text(n, rows), np.random.default_rng(n + 60)
        second = np.arange(LENGTH) >= random.integers(1, LENGTH, (rows, 1))
        labels = random.integers(0, CLASSES, rows).astype(np.int32)
        return {"tokens": batch["tokens"], "types": second.astype(np.int32), "valid": batch["mask"] > 0, "y": labels}

    def loss(apply, params, batch, key):
        logits = apply(
            {"params": params}, batch["tokens"], batch["types"], batch["valid"], False, rngs={"dropout": key}
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    model = PairClassifier(bert_config(precision, **changes))
    return make_task(model, precision, make_batch, loss, ONE_ROW, ONE_ROW, ONE_ROW > 0)


def vit_task(precision: str, **changes) -> Task:
    """Labelled images, with stochastic depth and label smoothing."""
    sizes = dict(
        image_size=IMAGE, patch_size=PATCH, num_classes=CLASSES, num_layers=4, num_heads=4, width=16, dropout=DROPOUT,
        drop_path=0.2,
    )  # fmt: skip
    config = vit.ViTConfig(**{**sizes, **changes}, **types(precision))

    def make_batch(n, rows):
        random = np.random.default_rng(n)
        images = random.normal(size=(rows, IMAGE, IMAGE, 3)).astype(PRECISIONS[precision][0])
        return {"x": images, "y": random.integers(0, CLASSES, rows).astype(np.int32)}

    def loss(apply, params, batch, key):
        logits = apply({"params": params}, batch["x"], deterministic=False, rngs={"dropout": key})
        return vit.class_loss(logits, batch["y"], label_smoothing=0.1)

    image = np.ones((1, IMAGE, IMAGE, 3), PRECISIONS[precision][0])
    return make_task(vit.ViT(config), precision, make_batch, loss, image)


def t5_task(precision: str, **changes) -> Task:
    """Padded source and target rows of unequal length; label smoothing and z-loss."""
    sizes = dict(
        vocab_size=VOCABULARY, num_layers=3, num_heads=2, width=16, head_dim=8, mlp_width=32, num_buckets=8,
        max_distance=16, dropout=DROPOUT,
    )  # fmt: skip
    config = t5.T5Config(**{**sizes, **changes}, **types(precision))
    text = text_batches(precision)

    def make_batch(n, rows):
        source, batch = text(n + 100, rows), text(n, rows)
        return {
            "source": source["tokens"],
            "source_valid": source["mask"] > 0,
            "targets": batch["targets"],
            "valid": batch["mask"] > 0,
        }

    def loss(apply, params, batch, key):
        logits = apply(
            {"params": params},
            batch["source"],
            t5.shift_right(batch["targets"]),
            batch["source_valid"],
            batch["valid"],
            deterministic=False,
            rngs={"dropout": key},
        )
        return t5.sequence_loss(logits, batch["targets"], batch["valid"], label_smoothing=0.1, z_loss=1e-2)

    return make_task(t5.T5(config), precision, make_batch, loss, ONE_ROW, ONE_ROW)


def object_task(make_model, precision: str) -> ObjectTask:
    """`make_model(rngs)` with drawn parameters, trained on text."""

    def make():
        model = make_model(nnx.Rngs(params=0, dropout=1))
        nnx.update(model, drawn(nnx.state(model, nnx.Param), precision))
        return model

    def loss(model, batch):
        return gpt2.next_token_loss(model(batch["tokens"]), batch["targets"], batch["mask"])

    return ObjectTask(make, text_batches(precision), loss)


def gpt2_nnx_task(precision: str, **changes) -> ObjectTask:
    sizes = dict(vocab_size=VOCABULARY, max_length=2 * LENGTH, num_layers=4, num_heads=4, width=16, dropout=DROPOUT)
    config = gpt2.GPT2Config(**{**sizes, **changes}, **types(precision))
    return object_task(lambda rngs: gpt2_nnx.GPT2(config, rngs=rngs), precision)


def llama_nnx_task(precision: str, **changes) -> ObjectTask:
    config = llama.LlamaConfig(**{**LLAMA, **changes}, **types(precision))
    return object_task(lambda rngs: llama_nnx.Llama(config, rngs=rngs), precision)
