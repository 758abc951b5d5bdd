"""BERT: published parameter counts, scanned layers, padding, precision, dropout and the masked-token loss."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.models.bert import Bert, BertConfig, BertForMaskedLM, masked_token_loss

# Unoptimized code compiles several times faster, above all the random bits.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TINY = {"vocab_size": 17, "max_length": 8, "num_layers": 2, "num_heads": 2, "width": 8}


def make(**changes):
    """A model, and parameters in [-1, 1): every bias counts, and attention is far from even."""
    model = BertForMaskedLM(BertConfig(**{**TINY, **changes}))
    tokens = np.random.default_rng(1).integers(0, 17, (2, 8))
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(-1, 1, leaf.shape), leaf.dtype), shapes)
    return model, params, tokens


@functools.cache
def jitted(**changes):
    """The model's `apply` without dropout, compiled once for all tests that call it on the same shapes."""
    return quick_jit(BertForMaskedLM(BertConfig(**{**TINY, **changes})).apply)


def stacked(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def count(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    "name, scan_layers, with_pooler, masked_lm",
    [("bert-base-uncased", False, 109_482_240, 109_514_298), ("bert-large-uncased", True, 335_141_888, 335_174_458)],
)
def test_parameter_count_is_the_published_one(name, scan_layers, with_pooler, masked_lm):
    config = BertConfig.from_name(name, scan_layers=scan_layers)
    assert count(Bert(config)) == with_pooler
    assert count(BertForMaskedLM(config)) == masked_lm


def test_kernels_split_by_head_and_the_head_has_no_decoder_kernel():
    _, params, _ = make()
    assert set(params) == {"bert", "transform", "norm_transform", "decoder_bias"}
    assert set(params["bert"]) == {
        "token_embedding", "position_embedding", "type_embedding", "norm_embedding", "h_0", "h_1"
    }  # fmt: skip
    assert params["bert"]["h_0"]["attention"]["query"]["kernel"].shape == (8, 2, 4)
    assert params["bert"]["h_0"]["attention"]["output"]["kernel"].shape == (2, 4, 8)


def numpy_norm(x, params):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * params["scale"] + params["bias"]


def numpy_gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def numpy_bert(bert, tokens, types, mask):
    embeddings = [bert[f"{name}_embedding"]["embedding"] for name in ("token", "position", "type")]
    x = embeddings[0][tokens] + embeddings[1][: tokens.shape[1]] + embeddings[2][types]
    x = numpy_norm(x, bert["norm_embedding"])
    for block in (bert["h_0"], bert["h_1"]):
        attention, mlp = block["attention"], block["mlp"]
        query, key, value = (
            np.einsum("blw,whd->bhld", x, attention[name]["kernel"]) + attention[name]["bias"][:, None]
            for name in ("query", "key", "value")
        )
        weights = np.exp(query @ key.swapaxes(-1, -2) / 2) * mask[:, None, None]
        mixed = weights / weights.sum(-1, keepdims=True) @ value
        mixed = np.einsum("bhld,hdw->blw", mixed, attention["output"]["kernel"]) + attention["output"]["bias"]
        x = numpy_norm(x + mixed, block["norm_1"])
        hidden = numpy_gelu(x @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = numpy_norm(x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"], block["norm_2"])
    return x


def numpy_masked_lm(params, *inputs):
    x, embedding = numpy_bert(params["bert"], *inputs), params["bert"]["token_embedding"]["embedding"]
    x = numpy_gelu(x @ params["transform"]["kernel"] + params["transform"]["bias"])
    return numpy_norm(x, params["norm_transform"]) @ embedding.T + params["decoder_bias"]


@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_those_of_the_paper_written_in_numpy(scan_layers):
    _, params, tokens = make(param_dtype=jnp.float64)
    types = np.arange(8) // 5 * np.ones((2, 1), int)
    mask = np.arange(8) < np.array([[5], [8]])
    expected = numpy_masked_lm(jax.tree.map(np.asarray, params), tokens, types, mask)
    if scan_layers:
        params["bert"]["h"] = stacked([params["bert"].pop(f"h_{layer}") for layer in range(2)])
        _, scanned_params, _ = make(param_dtype=jnp.float64, scan_layers=True)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, scanned_params)
    run = jitted(param_dtype=jnp.float64, scan_layers=scan_layers)
    np.testing.assert_allclose(run({"params": params}, tokens, types, mask), expected, rtol=1e-10, atol=1e-10)


def test_scanned_layers_start_from_different_weights():
    model, _, tokens = make(scan_layers=True)
    kernel = quick_jit(lambda: model.init(jax.random.key(0), tokens)["params"]["bert"]["h"]["mlp"]["up"]["kernel"])()
    assert not np.allclose(kernel[0], kernel[1])


def test_pooled_vector_reads_the_first_hidden_state():
    _, params, tokens = make(param_dtype=jnp.float64)
    bert = Bert(BertConfig(**TINY, param_dtype=jnp.float64))
    kernel, bias = np.random.default_rng(3).normal(size=(8, 8)), np.arange(8.0)
    # Without types and mask, all types are 0 and all positions are read.
    expected = numpy_bert(jax.tree.map(np.asarray, params["bert"]), tokens, np.zeros_like(tokens), np.ones((2, 8)))
    params = {**params["bert"], "pooler": {"kernel": kernel, "bias": bias}}
    hidden, pooled = quick_jit(bert.apply)({"params": params}, tokens)
    np.testing.assert_allclose(hidden, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(pooled, np.tanh(expected[:, 0] @ kernel + bias), rtol=1e-10, atol=1e-10)


def test_without_pooler_there_is_no_pooled_vector():
    bert = Bert(BertConfig(**TINY), pooler=False)
    (_, pooled), variables = jax.eval_shape(bert.init_with_output, jax.random.key(0), jnp.zeros((2, 8), int))
    assert pooled is None
    assert "pooler" not in variables["params"]


def changed(tokens, index):
    """A copy of `tokens` with others at `index`."""
    tokens = tokens.copy()
    tokens[index] = tokens[index] % 16 + 1
    return tokens


def test_padding_changes_nothing_elsewhere_and_tokens_do_in_both_directions():
    model, params, tokens = make(param_dtype=jnp.float64)
    types, mask = np.zeros((2, 8), int), np.arange(8) < np.array([[5], [8]])

    def run(tokens, mask):
        return np.asarray(jitted(param_dtype=jnp.float64)({"params": params}, tokens, types, mask))

    before = run(tokens, mask)
    np.testing.assert_array_equal(before[0, :5], run(changed(tokens, np.s_[0, 5:]), mask)[0, :5])
    after = run(changed(tokens, np.s_[:, 3]), mask)
    assert np.all(np.abs(before - after).max(-1) > 1e-6)
    assert np.all(np.isfinite(run(tokens, np.zeros((2, 8), bool))))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_float64_parameters_compute_in_float64_only(scan_layers):
    model, params, tokens = make(param_dtype=jnp.float64, scan_layers=scan_layers)
    rngs = {"dropout": jax.random.key(0)}

    def loss(params):
        logits = model.apply({"params": params}, tokens, None, tokens > 2, deterministic=False, rngs=rngs)
        return masked_token_loss(logits, tokens, tokens > 5)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


def test_bfloat16_compute_keeps_float32_parameters_and_a_float32_loss():
    model, params, tokens = make(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = jax.eval_shape(model.apply, {"params": params}, tokens, None, tokens > 2)
    assert logits.dtype == jnp.bfloat16
    assert jax.eval_shape(masked_token_loss, logits, tokens, tokens > 2).dtype == jnp.float32


@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_depends_on_its_key(scan_layers):
    model, params, tokens = make(scan_layers=scan_layers)

    @quick_jit
    def run(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, tokens, deterministic=False, rngs=rngs)

    np.testing.assert_array_equal(run(0), run(0))
    assert not np.allclose(run(0), run(1))


def test_loss_is_the_mean_over_masked_tokens_of_minus_log_probability():
    logits = np.random.default_rng(0).normal(size=(2, 8, 17))
    targets = np.random.default_rng(1).integers(0, 17, (2, 8))
    masked = np.zeros((2, 8), bool)
    masked[0, [1, 4, 6]] = masked[1, 7] = True
    total = 0.0
    for row, place in np.argwhere(masked):
        scores = logits[row, place]
        total -= np.log(np.exp(scores[targets[row, place]]) / np.exp(scores).sum())
    np.testing.assert_allclose(quick_jit(masked_token_loss)(logits, targets, masked), total / 4, rtol=1e-12)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="width 10 is not a multiple of num_heads 3"):
        BertConfig(width=10, num_heads=3)
    with pytest.raises(ValueError, match="unknown BERT size"):
        BertConfig.from_name("bert-tiny")
    with pytest.raises(ValueError, match="do not fit max_length 8"):
        BertForMaskedLM(BertConfig(**TINY)).init(jax.random.key(0), jnp.zeros((1, 9), jnp.int32))
