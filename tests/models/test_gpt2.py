"""GPT-2: published parameter counts, scanned layers, causality, precision, loss and sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.models.gpt2 import GPT2, GPT2Config, generate, next_token_loss

TINY = {"vocab_size": 17, "max_length": 8, "num_layers": 3, "num_heads": 2, "width": 8}


def make(seed=0, **changes):
    model = GPT2(GPT2Config(**{**TINY, **changes}))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 17)
    return model, model.init(jax.random.key(seed), tokens)["params"], tokens


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "name, published",
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_parameter_count_is_the_published_one(name, published, scan_layers):
    model = GPT2(GPT2Config.from_name(name, scan_layers=scan_layers))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published


def test_unrolled_blocks_are_named_by_layer_and_kernels_split_by_head():
    _, params, _ = make(tie_head=False)
    assert set(params) == {"token_embedding", "position_embedding", "h_0", "h_1", "h_2", "norm_f", "lm_head"}
    attention = params["h_0"]["attention"]
    assert {attention[name]["kernel"].shape for name in ("query", "key", "value")} == {(8, 2, 4)}
    assert attention["output"]["kernel"].shape == (2, 4, 8)


@pytest.mark.parametrize("tie_head", [True, False])
def test_scanned_and_unrolled_layers_agree(x64, tie_head):
    model, params, tokens = make(tie_head=tie_head, param_dtype=jnp.float64)
    layers = [params.pop(f"h_{layer}") for layer in range(3)]
    stacked = {**params, "h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
    unrolled = {**params, **{f"h_{i}": layer for i, layer in enumerate(layers)}}
    scanned_model, scanned_params, _ = make(tie_head=tie_head, param_dtype=jnp.float64, scan_layers=True)
    assert jax.tree.map(jnp.shape, scanned_params) == jax.tree.map(jnp.shape, stacked)
    logits = model.apply({"params": unrolled}, tokens)
    np.testing.assert_allclose(scanned_model.apply({"params": stacked}, tokens), logits, atol=1e-13)


def test_scanned_layers_start_from_different_weights():
    _, params, _ = make(scan_layers=True)
    kernel = params["h"]["mlp"]["up"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])


def test_a_future_token_does_not_change_earlier_logits():
    model, params, tokens = make()
    before = model.apply({"params": params}, tokens)
    after = model.apply({"params": params}, tokens.at[:, 5].add(1) % 17)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_float64_parameters_compute_in_float64_only(x64, scan_layers):
    model, params, tokens = make(param_dtype=jnp.float64, scan_layers=scan_layers)

    def loss(params):
        return next_token_loss(model.apply({"params": params}, tokens), tokens)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


def test_bfloat16_compute_keeps_float32_parameters_and_a_float32_loss():
    model, params, tokens = make(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = model.apply({"params": params}, tokens)
    assert logits.dtype == jnp.bfloat16
    assert next_token_loss(logits, tokens).dtype == jnp.float32


def test_dropout_depends_on_its_key_and_differs_by_layer():
    model, params, tokens = make(dropout=0.5)

    def run(seed):
        return model.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": jax.random.key(seed)})

    np.testing.assert_array_equal(run(0), run(0))
    assert not np.allclose(run(0), run(1))
    assert not np.allclose(run(0), model.apply({"params": params}, tokens))


def test_loss_is_the_masked_mean_of_minus_log_probability(x64):
    logits = jax.random.normal(jax.random.key(0), (2, 8, 17), jnp.float64)
    targets = jax.random.randint(jax.random.key(1), (2, 8), 0, 17)
    mask = jnp.arange(8) < jnp.array([[3], [8]])
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(next_token_loss(logits, targets), each.mean(), rtol=1e-14)
    np.testing.assert_allclose(next_token_loss(logits, targets, mask), (each * mask).sum() / 11, rtol=1e-14)


def test_greedy_generation_follows_the_full_forward_pass_past_the_window():
    model, params, tokens = make()
    generated = generate(model, params, tokens[:, :3], 9, temperature=0)
    text = np.asarray(tokens[:, :3])
    for _ in range(9):
        logits = model.apply({"params": params}, text[:, -8:])
        text = np.concatenate([text, np.asarray(logits[:, -1]).argmax(-1)[:, None]], axis=1)
    np.testing.assert_array_equal(generated, text[:, 3:])


def test_sampling_is_fixed_by_its_key():
    model, params, tokens = make()
    first, again, other = (
        generate(model, params, tokens, 20, temperature=1.0, rng=jax.random.key(seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="width 10 is not a multiple of num_heads 3"):
        GPT2Config(width=10, num_heads=3)
    with pytest.raises(ValueError, match="unknown GPT-2 size"):
        GPT2Config.from_name("gpt3")
    model, params, _ = make()
    with pytest.raises(ValueError, match="do not fit max_length 8"):
        model.apply({"params": params}, jnp.zeros((1, 9), jnp.int32))
    with pytest.raises(ValueError, match="needs rng"):
        generate(model, params, jnp.zeros((1, 2), jnp.int32), 1)
