"""T5: published parameter counts, position buckets, masks, causality, precision, dropout and loss."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.models.t5 import T5, T5Config, relative_position_bucket, sequence_loss, shift_right

# Unoptimized code compiles several times faster, above all the random bits.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TINY = {
    "vocab_size": 17, "num_layers": 2, "num_heads": 2, "width": 6, "head_dim": 4, "mlp_width": 10,
    "num_buckets": 8, "max_distance": 6,
}  # fmt: skip
V1_1 = {"gated": True, "tie_head": False}


def make(**changes):
    """A model, and parameters in [-1, 1): every bias counts, and attention is far from even."""
    model = T5(T5Config(**{**TINY, **changes}))
    rng = np.random.default_rng(1)
    tokens, decoder_tokens = (rng.integers(1, 17, (2, length)) for length in (7, 5))
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, decoder_tokens)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(-1, 1, leaf.shape), leaf.dtype), shapes)
    return model, params, tokens, decoder_tokens


@functools.cache
def jitted(**changes):
    """The model's `apply` without dropout, compiled once for all tests that call it on the same shapes."""
    return quick_jit(T5(T5Config(**{**TINY, **changes})).apply)


def stacked(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@pytest.mark.parametrize(
    "name, published",
    [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
        ("t5-v1.1-small", 76_961_152),
        ("t5-v1.1-base", 247_577_856),
        ("t5-v1.1-large", 783_150_080),
        ("t5-v1.1-xl", 2_849_757_184),
        ("t5-v1.1-xxl", 11_135_332_352),
    ],
)
def test_parameter_count_is_the_published_one(name, published):
    model = T5(T5Config.from_name(name, scan_layers=True))
    tokens = jnp.zeros((1, 8), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published


def test_position_tables_are_one_per_side_and_kernels_split_by_head():
    _, params, _, _ = make(**V1_1)
    assert set(params) == {"token_embedding", "encoder", "decoder", "lm_head"}
    for side in ("encoder", "decoder"):
        assert set(params[side]) == {"position_bias", "h_0", "h_1", "norm_f"}
        assert params[side]["position_bias"]["buckets"]["embedding"].shape == (8, 2)
        assert params[side]["h_0"]["attention"]["query"]["kernel"].shape == (6, 2, 4)
    assert set(params["decoder"]["h_0"]) == {"norm_1", "attention", "norm_2", "cross_attention", "norm_3", "mlp"}


def slow_bucket(relative_position, bidirectional, num_buckets, max_distance):
    first, distance = 0, -relative_position
    if bidirectional:
        num_buckets //= 2
        if relative_position > 0:
            first, distance = num_buckets, relative_position
    distance = max(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    # The small number: where the exact logarithm is an integer, its rounded value may be just below.
    growth = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact) + 1e-9
    return first + min(exact + int(growth), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 6), (4, 100), (64, 40), (10, 1000)])
def test_buckets_are_those_of_the_paper(bidirectional, num_buckets, max_distance):
    positions = np.arange(-1100, 1101)
    options = {"bidirectional": bidirectional, "num_buckets": num_buckets, "max_distance": max_distance}
    buckets = quick_jit(lambda p: relative_position_bucket(p, **options))(positions)
    np.testing.assert_array_equal(buckets, [slow_bucket(int(p), **options) for p in positions])


def numpy_norm(x, params):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"]


def numpy_attention(params, x, memory, mask, bias):
    query = np.einsum("blw,whd->bhld", x, params["query"]["kernel"])
    key, value = (np.einsum("blw,whd->bhld", memory, params[name]["kernel"]) for name in ("key", "value"))
    weights = np.exp(query @ key.swapaxes(-1, -2) + bias) * mask
    return np.einsum("bhld,hdw->blw", weights / weights.sum(-1, keepdims=True) @ value, params["output"]["kernel"])


def numpy_mlp(params, x):
    up = x @ params["up"]["kernel"]
    if "gate" in params:
        gate = x @ params["gate"]["kernel"]
        hidden = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    else:
        hidden = np.maximum(up, 0)
    return hidden @ params["down"]["kernel"]


def numpy_bias(side, length, bidirectional):
    table = side["position_bias"]["buckets"]["embedding"]
    rows = [[table[slow_bucket(k - q, bidirectional, 8, 6)] for k in range(length)] for q in range(length)]
    return np.moveaxis(np.array(rows), -1, 0)


def numpy_t5(params, tokens, decoder_tokens, mask, decoder_mask):
    embedding, encoder, decoder = params["token_embedding"]["embedding"], params["encoder"], params["decoder"]
    mask, decoder_mask = mask[:, None, None], decoder_mask[:, None, None]
    memory, bias = embedding[tokens], numpy_bias(encoder, tokens.shape[1], True)
    for block in (encoder["h_0"], encoder["h_1"]):
        normed = numpy_norm(memory, block["norm_1"])
        memory = memory + numpy_attention(block["attention"], normed, normed, mask, bias)
        memory = memory + numpy_mlp(block["mlp"], numpy_norm(memory, block["norm_2"]))
    memory = numpy_norm(memory, encoder["norm_f"])
    length = decoder_tokens.shape[1]
    x, bias = embedding[decoder_tokens], numpy_bias(decoder, length, False)
    for block in (decoder["h_0"], decoder["h_1"]):
        normed = numpy_norm(x, block["norm_1"])
        causal = np.tri(length) * decoder_mask
        x = x + numpy_attention(block["attention"], normed, normed, causal, bias)
        x = x + numpy_attention(block["cross_attention"], numpy_norm(x, block["norm_2"]), memory, mask, 0)
        x = x + numpy_mlp(block["mlp"], numpy_norm(x, block["norm_3"]))
    x = numpy_norm(x, decoder["norm_f"])
    return x @ params["lm_head"]["kernel"] if "lm_head" in params else x @ embedding.T / np.sqrt(6)


@pytest.mark.parametrize("scan_layers, version", [(False, {}), (True, V1_1)], ids=["v1.0", "v1.1 scanned"])
def test_logits_are_those_of_the_paper_written_in_numpy(scan_layers, version):
    _, params, tokens, decoder_tokens = make(param_dtype=jnp.float64, **version)
    mask = np.arange(7) < np.array([[4], [7]])
    decoder_mask = np.arange(5) < np.array([[5], [3]])
    inputs = (tokens, decoder_tokens, mask, decoder_mask)
    expected = numpy_t5(jax.tree.map(np.asarray, params), *inputs)
    if scan_layers:
        for side in ("encoder", "decoder"):
            params[side]["h"] = stacked([params[side].pop(f"h_{layer}") for layer in range(2)])
        _, scanned_params, _, _ = make(param_dtype=jnp.float64, scan_layers=True, **version)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, scanned_params)
    run = jitted(param_dtype=jnp.float64, scan_layers=scan_layers, **version)
    np.testing.assert_allclose(run({"params": params}, *inputs), expected, rtol=1e-10, atol=1e-10)


def test_scanned_layers_start_from_different_weights():
    model, _, *inputs = make(scan_layers=True)

    @quick_jit
    def kernels():
        params = model.init(jax.random.key(0), *inputs)["params"]
        return [params[side]["h"]["mlp"]["up"]["kernel"] for side in ("encoder", "decoder")]

    for kernel in kernels():
        assert not np.allclose(kernel[0], kernel[1])


def changed(tokens, index):
    """A copy of `tokens` with others at `index`."""
    tokens = tokens.copy()
    tokens[index] = tokens[index] % 16 + 1
    return tokens


def test_masks_and_causality():
    _, params, tokens, decoder_tokens = make(param_dtype=jnp.float64)
    mask = np.arange(7) < np.array([[4], [7]])
    decoder_mask = np.ones((2, 5), bool)
    decoder_mask[0, 1] = False

    def run(*inputs):
        return np.asarray(jitted(param_dtype=jnp.float64, scan_layers=False)({"params": params}, *inputs))

    before = run(tokens, decoder_tokens, mask, decoder_mask)
    # padding of the encoder is read by no position of either side
    after = run(changed(tokens, np.s_[0, 4:]), decoder_tokens, mask, decoder_mask)
    np.testing.assert_array_equal(before, after)
    # each other token of the encoder is read by all of the decoder
    after = run(changed(tokens, np.s_[:, 3]), decoder_tokens, mask, decoder_mask)
    assert np.all(np.abs(before - after).max(-1) > 1e-6)
    # padding of the decoder is read by no other position
    after = run(tokens, changed(decoder_tokens, np.s_[0, 1]), mask, decoder_mask)
    others = np.array([0, 2, 3, 4])
    np.testing.assert_array_equal(before[:, others], after[:, others])
    # a token of the decoder is read from its own position on
    after = run(tokens, changed(decoder_tokens, np.s_[:, 2]), mask, decoder_mask)
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert np.all(np.abs(before - after)[:, 2:].max(-1) > 1e-6)
    assert np.all(np.isfinite(run(tokens, decoder_tokens, np.zeros_like(mask), np.zeros_like(decoder_mask))))


@pytest.mark.parametrize("scan_layers, version", [(False, {}), (True, V1_1)], ids=["v1.0", "v1.1 scanned"])
def test_float64_parameters_compute_in_float64_only(scan_layers, version):
    model, params, tokens, targets = make(param_dtype=jnp.float64, scan_layers=scan_layers, **version)

    def loss(params):
        inputs = (tokens, shift_right(targets), tokens > 2, targets > 2)
        rngs = {"dropout": jax.random.key(0)}
        logits = model.apply({"params": params}, *inputs, deterministic=False, rngs=rngs)
        return sequence_loss(logits, targets, targets > 2, label_smoothing=0.1, z_loss=1e-4)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


def test_bfloat16_compute_keeps_float32_parameters_and_a_float32_loss():
    model, params, tokens, targets = make(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = jax.eval_shape(model.apply, {"params": params}, tokens, targets)
    assert logits.dtype == jnp.bfloat16
    assert jax.eval_shape(sequence_loss, logits, targets).dtype == jnp.float32


def test_dropout_depends_on_its_key():
    model, params, *inputs = make(scan_layers=True)

    @quick_jit
    def run(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, *inputs, deterministic=False, rngs=rngs)

    np.testing.assert_array_equal(run(0), run(0))
    assert not np.allclose(run(0), run(1))


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.3, 0.01)])
def test_loss_is_the_masked_mean_against_the_smoothed_targets(smoothing, z_loss):
    logits = np.random.default_rng(0).normal(size=(2, 5, 17))
    targets = np.random.default_rng(1).integers(0, 17, (2, 5))
    mask = np.arange(5) < np.array([[2], [5]])
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = (1 - smoothing) * np.eye(17)[targets] + smoothing / 17
    each = -(wanted * (logits - log_z)).sum(-1) + z_loss * log_z[..., 0] ** 2
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    loss = quick_jit(functools.partial(sequence_loss, **options))
    np.testing.assert_allclose(loss(logits, targets), each.mean(), rtol=1e-12)
    np.testing.assert_allclose(loss(logits, targets, mask), (each * mask).sum() / 7, rtol=1e-12)


def test_the_decoder_reads_the_start_token_and_all_targets_but_the_last():
    shifted = shift_right(jnp.array([[5, 6, 7], [8, 9, 1]]), start=2)
    np.testing.assert_array_equal(shifted, [[2, 5, 6], [2, 8, 9]])


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="num_buckets 7 is not an even number >= 4"):
        T5Config(num_buckets=7)
    with pytest.raises(ValueError, match="max_distance 16 is not above"):
        T5Config(max_distance=16)
    with pytest.raises(ValueError, match="unknown T5 size"):
        T5Config.from_name("t5-huge")
