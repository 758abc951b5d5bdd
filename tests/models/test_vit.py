"""ViT: published parameter counts, scanned layers, precision, dropout, stochastic depth and loss."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.models.vit import DropPath, ViT, ViTConfig, class_loss

# Unoptimized code compiles several times faster, above all the random bits.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TINY = {"image_size": 6, "patch_size": 2, "num_classes": 5, "num_layers": 2, "num_heads": 2, "width": 8}


def make(**changes):
    """A model, and parameters in [-1, 1): every bias counts, and attention is far from even."""
    model = ViT(ViTConfig(**{**TINY, **changes}))
    images = np.random.default_rng(1).normal(size=(4, 6, 6, 3))
    images = images.astype(changes.get("param_dtype", np.float32))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(-1, 1, leaf.shape), leaf.dtype), shapes)
    return model, params, images


@functools.cache
def jitted(**changes):
    """The model's `apply` without dropout, compiled once for all tests that call it on the same shapes."""
    return quick_jit(ViT(ViTConfig(**{**TINY, **changes})).apply)


def stacked(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@pytest.mark.parametrize(
    "name, scan_layers, published",
    [
        ("vit-b-16", False, 86_567_656),
        ("vit-b-32", True, 88_224_232),
        ("vit-l-16", True, 304_326_632),
        ("vit-h-14", True, 632_045_800),
    ],
)
def test_parameter_count_is_the_published_one(name, scan_layers, published):
    model = ViT(ViTConfig.from_name(name, scan_layers=scan_layers))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3), jnp.float32))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published


def numpy_norm(x, params):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"] + params["bias"]


def numpy_vit(params, images):
    batch, kernel = len(images), params["patch_embedding"]["kernel"]
    patches = [images[:, i : i + 2, j : j + 2] for i in range(0, 6, 2) for j in range(0, 6, 2)]
    patches = np.stack([patch.reshape(batch, 12) @ kernel.reshape(12, 8) for patch in patches], axis=1)
    class_token = np.repeat(params["class_token"], batch, axis=0)
    x = np.concatenate([class_token, patches + params["patch_embedding"]["bias"]], axis=1)
    x = x + params["position_embedding"]
    for block in (params["h_0"], params["h_1"]):
        attention, mlp = block["attention"], block["mlp"]
        normed = numpy_norm(x, block["norm_1"])
        query, key, value = (
            np.einsum("blw,whd->bhld", normed, attention[name]["kernel"]) + attention[name]["bias"][:, None]
            for name in ("query", "key", "value")
        )
        weights = np.exp(query @ key.swapaxes(-1, -2) / 2)
        mixed = weights / weights.sum(-1, keepdims=True) @ value
        x = x + np.einsum("bhld,hdw->blw", mixed, attention["output"]["kernel"]) + attention["output"]["bias"]
        hidden = numpy_norm(x, block["norm_2"]) @ mlp["up"]["kernel"] + mlp["up"]["bias"]
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return numpy_norm(x[:, 0], params["norm_f"]) @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_those_of_the_paper_written_in_numpy(scan_layers):
    _, params, images = make(param_dtype=jnp.float64)
    assert params["h_0"]["attention"]["query"]["kernel"].shape == (8, 2, 4)
    expected = numpy_vit(jax.tree.map(np.asarray, params), images)
    # The rates are there to be ignored.
    changes = {"param_dtype": jnp.float64, "scan_layers": scan_layers, "dropout": 0.3, "drop_path": 0.3}
    if scan_layers:
        params["h"] = stacked([params.pop(f"h_{layer}") for layer in range(2)])
        _, scanned_params, _ = make(**changes)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, scanned_params)
    np.testing.assert_allclose(jitted(**changes)({"params": params}, images), expected, rtol=1e-10, atol=1e-10)


def test_scanned_layers_start_from_different_weights():
    model, _, images = make(scan_layers=True)
    kernel = quick_jit(lambda: model.init(jax.random.key(0), images)["params"]["h"]["mlp"]["up"]["kernel"])()
    assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_float64_parameters_compute_in_float64_only(scan_layers):
    model, params, images = make(param_dtype=jnp.float64, scan_layers=scan_layers, dropout=0.1, drop_path=0.2)
    rngs = {"dropout": jax.random.key(0)}

    def loss(params):
        logits = model.apply({"params": params}, images, deterministic=False, rngs=rngs)
        return class_loss(logits, jnp.arange(4), jnp.arange(4) > 1, label_smoothing=0.1)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


@pytest.mark.parametrize("scan_layers", [False, True])
def test_bfloat16_compute_keeps_float32_parameters_and_a_float32_loss(scan_layers):
    model, params, images = make(dtype=jnp.bfloat16, scan_layers=scan_layers, drop_path=0.2)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}

    def run(params):
        return model.apply({"params": params}, images, False, rngs={"dropout": jax.random.key(0)})

    logits = jax.eval_shape(run, params)
    assert logits.dtype == jnp.bfloat16
    assert jax.eval_shape(class_loss, logits, jnp.arange(4)).dtype == jnp.float32


@pytest.mark.parametrize("scan_layers, rates", [(False, {"dropout": 0.2}), (True, {"drop_path": 0.5})])
def test_randomness_depends_on_its_key(scan_layers, rates):
    model, params, images = make(scan_layers=scan_layers, **rates)

    @quick_jit
    def run(seed):
        return model.apply({"params": params}, images, deterministic=False, rngs={"dropout": jax.random.key(seed)})

    np.testing.assert_array_equal(run(0), run(0))
    assert not np.allclose(run(0), run(1))


def test_drop_path_rate_grows_linearly_to_the_last_block():
    np.testing.assert_allclose(ViTConfig(num_layers=4, drop_path=0.2).drop_path_rates, [0.05, 0.1, 0.15, 0.2])
    assert ViTConfig(num_layers=3).drop_path_rates == (0, 0, 0)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_each_block_drops_whole_branches_of_rows_at_its_own_rate(scan_layers):
    sizes = {"image_size": 2, "num_layers": 3, "width": 12, "num_classes": 12}
    model = ViT(ViTConfig(**{**TINY, **sizes}, scan_layers=scan_layers, drop_path=0.6))
    rows = 4000
    images = jnp.zeros((rows, 2, 2, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    # Each of the six branches adds a vector of its own, which the head shows wherever it was kept.
    vectors = (np.eye(12)[::2] - np.eye(12)[1::2]).reshape(3, 2, 12)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    params["norm_f"]["scale"] += 1
    params["head"]["kernel"] += np.eye(12, dtype=np.float32)
    for layer in range(3):
        block = jax.tree.map(lambda leaf, i=layer: leaf[i], params["h"]) if scan_layers else params[f"h_{layer}"]
        for bias, vector in zip((block["attention"]["output"]["bias"], block["mlp"]["down"]["bias"]), vectors[layer]):
            bias += vector.astype(np.float32)
    rngs = {"dropout": jax.random.key(3)}
    logits = quick_jit(lambda: model.apply({"params": params}, images, deterministic=False, rngs=rngs))()
    dropped = np.asarray(logits)[:, ::2] == 0
    rates = np.repeat([0.2, 0.4, 0.6], 2)
    # Each branch at its rate, each two of them apart, all within five standard deviations.
    wanted = np.where(np.eye(6, dtype=bool), rates, np.outer(rates, rates))
    together = dropped.T.astype(float) @ dropped / rows
    assert np.all(np.abs(together - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / rows))


def test_a_kept_branch_is_divided_by_the_chance_to_keep_it():
    x = jnp.ones((100, 2, 3), jnp.float64)
    run = quick_jit(lambda rate: DropPath().apply({}, x, rate, False, rngs={"dropout": jax.random.key(0)}))
    assert set(np.unique(run(0.75))) == {0.0, 4.0}
    np.testing.assert_array_equal(run(0.0), x)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_masked_mean_against_the_smoothed_labels(smoothing):
    logits = np.random.default_rng(0).normal(size=(6, 5))
    labels = np.array([0, 4, 2, 2, 1, 3])
    mask = np.array([1, 1, 0, 1, 0, 0])
    wanted = (1 - smoothing) * np.eye(5)[labels] + smoothing / 5
    each = -(wanted * np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))).sum(-1)
    loss = quick_jit(functools.partial(class_loss, label_smoothing=smoothing))
    np.testing.assert_allclose(loss(logits, labels), each.mean(), rtol=1e-12)
    np.testing.assert_allclose(loss(logits, labels, mask), (each * mask).sum() / 3, rtol=1e-12)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="image_size 30 is not a multiple of patch_size 16"):
        ViTConfig(image_size=30)
    with pytest.raises(ValueError, match="width 10 is not a multiple of num_heads 3"):
        ViTConfig(width=10, num_heads=3)
    with pytest.raises(ValueError, match="drop_path 1 is not in"):
        ViTConfig(drop_path=1)
    with pytest.raises(ValueError, match="unknown ViT size"):
        ViTConfig.from_name("vit-x-1")
    with pytest.raises(ValueError, match="images of 8 x 8 pixels, not image_size 6"):
        ViT(ViTConfig(**TINY)).init(jax.random.key(0), jnp.zeros((1, 8, 8, 3), jnp.float32))
