"""Hugging Face's Flax models, as they are, with the train step of its examples: the numbers of one device.

The weights are random and the configurations tiny. The models take `dtype=`; parameters are float64 where it is.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import traverse_util
from flax.training.common_utils import onehot
from flax.training.train_state import TrainState
from transformers.models.t5 import modeling_flax_t5

import merak_jax
from tests.helper import assert_same_as_single_device
from tests.parity import mesh_of

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY, LENGTH, ROWS, PAD = 40, 8, 8, 1
SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2, intermediate_size=32)


class StateWithDropout(TrainState):
    dropout_rng: jax.Array


def parameters_of(model, dtype):
    """Scales of about 1 and all else, biases too, of about 0.1, so that no gradient is tiny."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        is_scale = path[-1].key == "scale" or any("norm" in key.key for key in path[-2:]) and path[-1].key == "weight"
        return jnp.asarray(is_scale + 0.1 * rng.standard_normal(leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(draw, model.params_shape_tree)


def without_norms_and_biases(params):
    """What weight decay applies to, found by name as the examples of `transformers` do."""
    flat = traverse_util.flatten_dict(params)
    norms = {path[-2:] for name in ("layernorm", "layer_norm", "ln") for path in flat if name in "".join(path).lower()}
    return traverse_util.unflatten_dict({path: path[-1] != "bias" and path[-2:] not in norms for path in flat})


WARM_UP = optax.join_schedules([optax.linear_schedule(1e-2, 5e-2, 2), optax.linear_schedule(5e-2, 0.0, 8)], [2])
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(WARM_UP, eps=1e-3, weight_decay=0.1, mask=without_norms_and_biases)
)


def tokens(rng):
    return rng.integers(3, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)


def padding(rng):
    return (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, ROWS)[:, None]).astype(np.int32)


def make_batch(n):
    rng = np.random.default_rng(n)
    inputs, attention = tokens(rng), padding(rng)
    hidden = rng.random(inputs.shape) < 0.3
    hidden[:, 0] = True
    return {
        "input_ids": np.where(attention, inputs, PAD),
        "attention_mask": attention,
        "labels": np.where(hidden & (attention > 0), tokens(rng), -100),
    }


def make_pairs_batch(n):
    """An encoder's and a decoder's input, padded differently."""
    rng = np.random.default_rng(n)
    labels, valid = tokens(rng), padding(rng)
    labels = np.where(valid, labels, PAD)
    return {
        "input_ids": tokens(rng),
        "attention_mask": padding(rng),
        "decoder_input_ids": np.pad(labels[:, :-1], ((0, 0), (1, 0))),
        "decoder_attention_mask": valid,
        "labels": labels,
    }


def masked_language_step(state, batch):
    """A sum over the labelled tokens is differentiated, and the gradient divided by their number."""
    dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)
    labels = batch.pop("labels")

    def loss_fn(params):
        logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
        label_mask = jnp.where(labels > 0, 1.0, 0.0)
        loss = optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])) * label_mask
        return loss.sum(), label_mask.sum()

    (loss, num_labels), grad = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grad = jax.tree_util.tree_map(lambda x: x / num_labels, grad)
    new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
    return new_state, {"loss": loss / num_labels, "learning_rate": WARM_UP(state.step)}


def causal_language_step(state, batch):
    """A masked mean over the shifted tokens."""
    dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def loss_fn(params):
        logits = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, train=True)[0]
        shift_logits, shift_labels = logits[..., :-1, :], batch["input_ids"][..., 1:]
        loss = optax.softmax_cross_entropy(shift_logits, onehot(shift_labels, shift_logits.shape[-1]))
        valid = batch["attention_mask"][..., 1:]
        return (loss * valid).sum() / valid.sum()

    loss, grad = jax.value_and_grad(loss_fn)(state.params)
    new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
    return new_state, {"loss": loss, "learning_rate": WARM_UP(state.step)}


def smoothed_pairs_step(state, batch):
    """Label smoothing over the valid tokens of the decoder."""
    dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

    def loss_fn(params):
        labels, valid = batch.pop("labels"), batch["decoder_attention_mask"]
        logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
        confidence = 0.9
        low = (1.0 - confidence) / (VOCABULARY - 1)
        best = -(confidence * math.log(confidence) + (VOCABULARY - 1) * low * math.log(low + 1e-20))
        soft = onehot(labels, VOCABULARY, on_value=confidence, off_value=low)
        loss = (optax.softmax_cross_entropy(logits, soft) - best) * valid
        return loss.sum(), valid.sum()

    (loss, num_labels), grad = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grad = jax.tree_util.tree_map(lambda x: x / num_labels, grad)
    new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
    return new_state, {"loss": loss / num_labels, "learning_rate": WARM_UP(state.step)}


def assert_same(model_class, config, train_step, mesh, num_microbatches, batches=make_batch, precision="float64"):
    dtype = jnp.dtype(precision)
    model = model_class(config, input_shape=(1, LENGTH), dtype=dtype, _do_init=False)
    params = parameters_of(model, dtype)

    def make_state(tx):
        key = jax.random.PRNGKey(5)
        return StateWithDropout.create(apply_fn=model.__call__, params=params, tx=tx, dropout_rng=key)

    return assert_same_as_single_device(
        train_step,
        make_state,
        batches,
        mesh_of(*mesh),
        optimizer=OPTIMIZER,
        precision=precision,
        num_microbatches=num_microbatches,
    )


def test_gpt2_has_the_numbers_of_one_device():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=16, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=2
    )
    assert_same(transformers.FlaxGPT2LMHeadModel, config, causal_language_step, (1, 4, 1), 4)


# A mask of heads per layer; the decoder is tied to the embedding.
HEAD_MASK = np.array([[1.0, 0.5], [0.0, 1.0], [0.25, 2.0], [1.0, 1.0]])


class BertWithHeadMask(transformers.FlaxBertForMaskedLM):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, head_mask=jnp.asarray(HEAD_MASK), **kwargs)


def test_bert_with_a_head_mask_and_a_tied_decoder_has_the_numbers_of_one_device():
    config = transformers.BertConfig(**SIZES, num_hidden_layers=4, max_position_embeddings=2 * LENGTH)
    assert config.tie_word_embeddings
    assert_same(BertWithHeadMask, config, masked_language_step, (2, 2, 2), 2)


def test_albert_whose_layers_are_one_layer_has_the_numbers_of_one_device():
    config = transformers.AlbertConfig(
        **SIZES,
        embedding_size=8,
        num_hidden_layers=3,
        max_position_embeddings=2 * LENGTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    assert_same(transformers.FlaxAlbertForMaskedLM, config, masked_language_step, (2, 2, 1), 2)


T5 = transformers.T5Config(
    vocab_size=VOCABULARY,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=3,
    num_heads=2,
    relative_attention_num_buckets=8,
    pad_token_id=PAD,
    decoder_start_token_id=0,
)


@pytest.fixture
def old_names_of_clip(monkeypatch):
    """The T5 of `transformers` calls `jnp.clip(x, a_max=...)`; JAX has since renamed `a_min` and `a_max`."""
    clip = jnp.clip

    def old_clip(x, min=None, max=None, *, a_min=None, a_max=None):
        return clip(x, a_min if min is None else min, a_max if max is None else max)

    monkeypatch.setattr(jnp, "clip", old_clip)


class WideT5LayerNorm(modeling_flax_t5.FlaxT5LayerNorm):
    """The norm of T5 without its cast of the variance to float32, whatever the model's type."""

    def __call__(self, hidden_states):
        variance = jnp.power(hidden_states, 2).mean(axis=-1, keepdims=True)
        return self.weight * (hidden_states / jnp.sqrt(variance + self.eps))


@pytest.mark.usefixtures("old_names_of_clip")
def test_t5_has_the_numbers_of_one_device(monkeypatch):
    """All of it in float64: as it is, its norms round to float32 whatever the type of the model."""
    monkeypatch.setattr(modeling_flax_t5, "FlaxT5LayerNorm", WideT5LayerNorm)
    assert_same(
        transformers.FlaxT5ForConditionalGeneration, T5, smoothed_pairs_step, (1, 2, 2), 2, batches=make_pairs_batch
    )


@pytest.mark.usefixtures("old_names_of_clip")
def test_both_layers_of_a_t5_of_two_are_blocks():
    """The first layer of each stack makes the position bias, with the padding in it, that the second reads."""
    config = transformers.T5Config(**{**T5.to_dict(), "num_layers": 2, "num_decoder_layers": 2})
    model = transformers.FlaxT5ForConditionalGeneration(config, _do_init=False)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 1)))
    state = jax.eval_shape(
        lambda params: StateWithDropout.create(
            apply_fn=model.__call__, params=params, tx=OPTIMIZER, dropout_rng=jax.random.key(1)
        ),
        params,
    )
    step = merak_jax.parallelize(smoothed_pairs_step, mesh=mesh_of(1, 2, 1), num_microbatches=2)
    step.lower(state, make_pairs_batch(0))
    assert str(step.plan).count("2 blocks of") == 2


@pytest.mark.usefixtures("old_names_of_clip")
def test_t5_as_it_is_has_the_numbers_of_one_device_in_float32():
    assert_same(
        transformers.FlaxT5ForConditionalGeneration,
        T5,
        smoothed_pairs_step,
        (2, 2, 1),
        2,
        batches=make_pairs_batch,
        precision="float32",
    )
