"""Llama: published parameter counts, rotary positions, grouped heads, scanned layers, causality and precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.models.llama import Llama, LlamaConfig, grouped_attention, next_token_loss, rotary_table, rotate

TINY = {
    "vocab_size": 17,
    "max_length": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "width": 16,
    "hidden_width": 24,
}
TOKENS = np.random.default_rng(1).integers(0, 17, (2, 8))
# Most of the time of these tests is LLVM's; unoptimised code is made five times faster.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def make(**changes):
    model = Llama(LlamaConfig(**{**TINY, **changes}))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    # Random weights of the right shapes: nothing to compile, and no norm or gate at its neutral initial value.
    random = np.random.default_rng(0)
    return model, jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)


@functools.partial(quick_jit, static_argnums=0)
def apply(model, params, tokens):
    return model.apply({"params": params}, tokens)


@functools.partial(quick_jit, static_argnums=0)
def apply_with_dropout(model, params, seed):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)


@pytest.mark.parametrize(
    "name, published",
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_parameter_count_is_the_published_one(name, published):
    model = Llama(LlamaConfig.from_name(name, scan_layers=True))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published


def test_unrolled_blocks_are_named_by_layer_and_have_no_biases():
    _, params = make()
    assert set(params) == {"token_embedding", "h_0", "h_1", "norm_f", "lm_head"}
    attention = params["h_0"]["attention"]
    assert attention["query"]["kernel"].shape == (16, 4, 4)
    assert attention["key"]["kernel"].shape == attention["value"]["kernel"].shape == (16, 2, 4)
    assert attention["output"]["kernel"].shape == (4, 4, 16)
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert names == {"kernel", "scale", "embedding"}


@pytest.mark.parametrize("tie_head", [True, False])
def test_scanned_and_unrolled_layers_agree(tie_head):
    model, unrolled = make(tie_head=tie_head, param_dtype=jnp.float64)
    scanned_model, scanned_params = make(tie_head=tie_head, param_dtype=jnp.float64, scan_layers=True)
    layers = [unrolled[f"h_{layer}"] for layer in range(2)]
    stacked = {name: leaf for name, leaf in unrolled.items() if not name.startswith("h_")}
    stacked["h"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert jax.tree.map(jnp.shape, scanned_params) == jax.tree.map(jnp.shape, stacked)
    np.testing.assert_allclose(
        apply(scanned_model, stacked, TOKENS), apply(model, unrolled, TOKENS), rtol=1e-11, atol=1e-13
    )


def test_scanned_layers_start_from_different_weights():
    model, _ = make(scan_layers=True)
    kernel = quick_jit(model.init)(jax.random.key(0), TOKENS)["params"]["h"]["mlp"]["up"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])


def test_a_future_token_does_not_change_earlier_logits():
    model, params = make()
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    before = apply(model, params, TOKENS)
    after = apply(model, params, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("rotary_scale", [1.0, 32.0])
def test_rotated_products_depend_on_the_distance_of_positions_only(rotary_scale):
    config = LlamaConfig(**TINY, param_dtype=jnp.float64, rotary_scale=rotary_scale)
    query, key = np.random.default_rng(0).normal(size=(2, 4))
    everywhere = np.ones((1, 8, 1, 1))
    table = rotary_table(config, 8)
    queries, keys = (np.asarray(rotate(x * everywhere, table))[0, :, 0] for x in (query, key))
    products = queries @ keys.T
    for distance in range(-7, 8):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)
    np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-12)
    assert not np.allclose(products[0], products[0, 0])


def test_rotary_angles_are_those_of_the_paper():
    config = LlamaConfig(**TINY, param_dtype=jnp.float64, rotary_base=100.0)
    cosine, sine = rotary_table(config, 5)
    angles = np.arange(5)[:, None] * np.array([1.0, 0.1])
    np.testing.assert_allclose(cosine, np.cos(angles), rtol=1e-14)
    np.testing.assert_allclose(sine, np.sin(angles), rtol=1e-14, atol=1e-16)


def test_scaled_rotary_slows_only_the_slow_pairs():
    config = LlamaConfig.from_name("llama-3.2-1b", param_dtype=jnp.float64)
    plain = LlamaConfig.from_name("llama-3.2-1b", param_dtype=jnp.float64, rotary_scale=1.0)
    # The sine at position 1 of frequencies up to 1 determines them.
    scaled, unscaled = (np.arcsin(rotary_table(c, 2)[1][1]) for c in (config, plain))
    ratio = unscaled / scaled
    turns = 8192 * unscaled / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 4], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[turns < 1], 32, rtol=1e-12)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size and ((1 < between) & (between < 32)).all()


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(2, 8, heads, 4)) for heads in (6, 3, 3))
    mask = np.tri(8, dtype=bool)
    attend = quick_jit(grouped_attention)
    full = attend(query, key.repeat(2, axis=2), value.repeat(2, axis=2), mask)
    np.testing.assert_allclose(attend(query, key, value, mask), full, rtol=1e-13)


def test_grouped_model_equals_the_full_one_with_repeated_kernels():
    model, params = make(param_dtype=jnp.float64)
    full_model, _ = make(param_dtype=jnp.float64, num_kv_heads=4)

    def repeat(path, leaf):
        return jnp.repeat(leaf, 2, axis=1) if {"key", "value"} & {entry.key for entry in path} else leaf

    full = jax.tree_util.tree_map_with_path(repeat, params)
    np.testing.assert_allclose(apply(full_model, full, TOKENS), apply(model, params, TOKENS), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True, "tie_head": True, "rotary_scale": 32.0}])
def test_float64_parameters_compute_in_float64_only(changes):
    model, params = make(param_dtype=jnp.float64, **changes)

    def loss(params):
        return next_token_loss(model.apply({"params": params}, TOKENS), TOKENS)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


def test_bfloat16_compute_keeps_float32_parameters_and_a_float32_loss():
    model, params = make(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = apply(model, params, TOKENS)
    assert logits.dtype == jnp.bfloat16
    assert next_token_loss(logits, TOKENS).dtype == jnp.float32


@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_depends_on_its_key_and_is_off_when_deterministic(scan_layers):
    model, params = make(dropout=0.5, scan_layers=scan_layers)
    without, _ = make(scan_layers=scan_layers)
    first = apply_with_dropout(model, params, 0)
    np.testing.assert_array_equal(apply_with_dropout(model, params, 0), first)
    assert not np.allclose(apply_with_dropout(model, params, 1), first)
    assert not np.allclose(apply(model, params, TOKENS), first)
    np.testing.assert_array_equal(apply(model, params, TOKENS), apply(without, params, TOKENS))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="width 10 is not a multiple of num_heads 3"):
        LlamaConfig(width=10, num_heads=3, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        LlamaConfig(width=16, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="even head dimension, not 3"):
        LlamaConfig(width=12, num_heads=4, num_kv_heads=4)
    with pytest.raises(ValueError, match="unknown Llama size 'llama-9'"):
        LlamaConfig.from_name("llama-9")
    model, params = make()
    with pytest.raises(ValueError, match="do not fit max_length 8"):
        model.apply({"params": params}, jnp.zeros((1, 9), jnp.int32))
