"""GPT-2 and Llama in nnx: the linen models' numbers and parameter counts, one shared tied Param, causality and dropout."""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from merak_jax.models import gpt2, gpt2_nnx, llama, llama_nnx

TOKENS = np.random.default_rng(1).integers(0, 17, (2, 8))
TINY = {"vocab_size": 17, "max_length": 8, "num_layers": 2}
# Most of the time of these tests is LLVM's; unoptimised code is made five times faster.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model in nnx and in linen; `whole`: the size that is small enough to be built whole."""

    nnx_model: Any
    linen_model: Any
    config: Any
    module: ModuleType
    tiny: dict
    published: dict
    whole: str

    def make(self, **changes):
        model = nnx.eval_shape(lambda: self.nnx_model(self.config(**{**self.tiny, **changes}), rngs=nnx.Rngs(0)))
        # Random weights of the right shapes: nothing to compile, and no norm or bias at its neutral initial value.
        random = np.random.default_rng(0)
        nnx.update(
            model, jax.tree.map(lambda p: jnp.asarray(random.normal(0, 0.5, p.shape), p.dtype), nnx.state(model))
        )
        return model

    def abstract(self, name, **changes):
        config = self.config.from_name(name, **changes)
        return nnx.eval_shape(lambda: self.nnx_model(config, rngs=nnx.Rngs(0)))


KINDS = {
    "gpt2": Kind(
        gpt2_nnx.GPT2,
        gpt2.GPT2,
        gpt2.GPT2Config,
        gpt2_nnx,
        {**TINY, "num_heads": 2, "width": 8},
        {
            "gpt2": 124_439_808,
            "gpt2-medium": 354_823_168,
            "gpt2-large": 774_030_080,
            "gpt2-xl": 1_557_611_200,
        },
        "gpt2",
    ),
    "llama": Kind(
        llama_nnx.Llama,
        llama.Llama,
        llama.LlamaConfig,
        llama_nnx,
        {**TINY, "num_heads": 4, "num_kv_heads": 2, "width": 16, "hidden_width": 24},
        {
            "llama-7b": 6_738_415_616,
            "llama-13b": 13_015_864_320,
            "llama-3-8b": 8_030_261_248,
            "llama-3-70b": 70_553_706_496,
            "llama-3.2-1b": 1_235_814_400,
        },
        "llama-3.2-1b",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@functools.partial(quick_jit, static_argnums=0)
def _apply(graph, state, tokens):
    model = nnx.merge(graph, state)
    return model(tokens), nnx.state(model)


def apply(model, tokens):
    logits, state = _apply(*nnx.split(model), tokens)
    nnx.update(model, state)
    return logits


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def linen_tree(state):
    """The state of an nnx model as the tree of the linen one's parameters."""
    params = nnx.to_pure_dict(state)
    blocks = params.pop("h")
    return {**params, **{f"h_{layer}": block for layer, block in blocks.items()}}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in KINDS.values() for name in kind.published])
def test_parameter_count_is_the_published_one(kind, name):
    # One block of many equal ones, for time.
    model = kind.abstract(name, num_layers=1)
    assert count(model) + (kind.config.from_name(name).num_layers - 1) * count(model.h[0]) == kind.published[name]


def test_parameter_count_of_a_whole_model_is_the_published_one(kind):
    assert count(kind.abstract(kind.whole)) == kind.published[kind.whole]


@pytest.mark.parametrize("tie_head", [True, False])
def test_logits_and_gradients_are_those_of_the_linen_model(kind, tie_head):
    model = kind.make(tie_head=tie_head, param_dtype=jnp.float64)
    linen, next_token_loss = kind.linen_model(model.config), kind.module.next_token_loss
    graph, state = nnx.split(model)
    params = linen_tree(state)
    expected_shapes = jax.eval_shape(linen.init, jax.random.key(0), TOKENS)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected_shapes)

    def linen_loss(params):
        logits = linen.apply({"params": params}, TOKENS)
        return next_token_loss(logits, TOKENS), logits

    def loss(state):
        logits = nnx.merge(graph, state)(TOKENS)
        return next_token_loss(logits, TOKENS), logits

    (value, logits), grads = quick_jit(jax.value_and_grad(loss, has_aux=True))(state)
    (linen_value, linen_logits), linen_grads = quick_jit(jax.value_and_grad(linen_loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, linen_logits, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(value, linen_value, rtol=1e-13)
    for leaf, linen_leaf in zip(jax.tree.leaves(linen_tree(grads)), jax.tree.leaves(linen_grads), strict=True):
        np.testing.assert_allclose(leaf, linen_leaf, rtol=1e-10, atol=1e-13)


def test_tied_head_is_the_one_param_of_the_embedding(kind):
    model, width = kind.make(tie_head=True), kind.tiny["width"]
    leaves = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model))]
    assert leaves.count((17, width)) == 1 and (width, 17) not in leaves
    before = apply(model, TOKENS)
    # A row that no input token uses is read by the head alone.
    embedding = model.token_embedding.embedding
    unused = next(token for token in range(17) if token not in TOKENS)
    raised = np.array(embedding[...])
    raised[unused] += 1
    embedding[...] = raised
    changed = (np.asarray(apply(model, TOKENS)) != np.asarray(before)).any((0, 1))
    np.testing.assert_array_equal(np.flatnonzero(changed), [unused])


def test_a_model_without_dropout_holds_parameters_only(kind):
    assert not jax.tree.leaves(nnx.state(kind.make(), nnx.RngState))


def test_a_future_token_does_not_change_earlier_logits(kind):
    model = kind.make()
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    before, after = apply(model, TOKENS), apply(model, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_float64_parameters_compute_in_float64_only(kind):
    graph, state = nnx.split(kind.make(param_dtype=jnp.float64))

    def loss(state):
        return kind.module.next_token_loss(nnx.merge(graph, state)(TOKENS), TOKENS)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(state))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


def test_bfloat16_compute_keeps_float32_parameters_and_a_float32_loss(kind):
    model = kind.make(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    logits = apply(model, TOKENS)
    assert logits.dtype == jnp.bfloat16
    assert kind.module.next_token_loss(logits, TOKENS).dtype == jnp.float32


def test_dropout_depends_on_its_key_and_count_and_is_off_in_eval(kind):
    without = kind.make()

    def dropped(seed):
        model = kind.nnx_model(kind.config(**kind.tiny, dropout=0.5), rngs=nnx.Rngs(params=0, dropout=seed))
        nnx.update(model, nnx.state(without))
        return model

    model = dropped(0)
    first, second = apply(model, TOKENS), apply(model, TOKENS)
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(apply(dropped(0), TOKENS), first)
    assert not np.allclose(apply(dropped(1), TOKENS), first)
    model.eval()
    np.testing.assert_array_equal(apply(model, TOKENS), apply(without, TOKENS))


def test_wrong_options_are_refused(kind):
    with pytest.raises(ValueError, match="scan_layers is an option of the linen"):
        kind.make(scan_layers=True)
    with pytest.raises(ValueError, match="do not fit max_length 8"):
        kind.make()(jnp.zeros((1, 9), jnp.int32))
