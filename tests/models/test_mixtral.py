"""Mixtral: published parameter counts, exact routing, the losses of the routers, scanned layers and precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from merak_jax.models.gpt2 import next_token_loss
from merak_jax.models.mixtral import (
    Mixtral,
    MixtralConfig,
    MixtureOfExperts,
    balance_loss,
    mixtral_loss,
    route,
    router_z_loss,
)

TINY = {
    "vocab_size": 17,
    "max_length": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "width": 16,
    "hidden_width": 24,
    "num_experts": 4,
}
MASK = np.arange(8) < np.array([[3], [8]])
TOKENS = np.random.default_rng(1).integers(0, 17, (2, 8))
# Most of the time of these tests is LLVM's; unoptimised code is made five times faster.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def make(**changes):
    model = Mixtral(MixtralConfig(**{**TINY, **changes}))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    # Random weights of the right shapes: nothing to compile, and no norm or gate at its neutral initial value.
    random = np.random.default_rng(0)
    return model, jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)


@functools.partial(quick_jit, static_argnums=0)
def apply(model, params, tokens):
    logits, sown = model.apply({"params": params}, tokens, mutable="losses")
    return logits, sown["losses"]


@functools.partial(quick_jit, static_argnums=0)
def apply_with_dropout(model, params, seed):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)


@functools.cache
def apply_moe():
    """The parameters of one mixture, what it gives for `x` and what it sows."""
    moe = MixtureOfExperts(MixtralConfig(**TINY, param_dtype=jnp.float64, balance_weight=0.5))
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 8, 16))
    shapes = jax.eval_shape(moe.init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: random.normal(0, 0.5, leaf.shape), shapes)
    output, sown = quick_jit(functools.partial(moe.apply, mutable="losses"))({"params": params}, x)
    return params, x, output, sown["losses"]


@pytest.mark.parametrize("name, published", [("mixtral-8x7b", 46_702_792_704), ("mixtral-8x22b", 140_620_634_112)])
def test_parameter_count_is_the_published_one(name, published):
    model = Mixtral(MixtralConfig.from_name(name, scan_layers=True))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert set(shapes) == {"params"}
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published


@pytest.mark.parametrize("experts_per_token", [1, 2, 3, 8])
def test_each_token_gets_exactly_k_experts_and_gates_that_sum_to_one(experts_per_token):
    logits = np.random.default_rng(0).normal(size=(5, 7, 8))
    gates, picked = (np.asarray(x) for x in route(logits, experts_per_token))
    np.testing.assert_array_equal((gates > 0).sum(-1), experts_per_token)
    np.testing.assert_array_equal(gates > 0, picked)
    np.testing.assert_allclose(gates.sum(-1), 1, rtol=1e-14)
    smallest_picked = np.where(picked, logits, np.inf).min(-1)
    assert (np.where(picked, -np.inf, logits).max(-1) < smallest_picked).all()


def test_equal_logits_still_pick_exactly_k_experts():
    gates, picked = (np.asarray(x) for x in route(np.zeros((3, 8)), 2))
    np.testing.assert_array_equal(picked.sum(-1), 2)
    np.testing.assert_array_equal(gates, picked / 2)


def test_gates_have_the_gradient_of_the_softmax_over_the_picked_experts():
    logits = np.array([0.3, -1.0, 2.0, 1.5])
    jacobian = quick_jit(jax.jacobian(lambda logits: route(logits, 2)[0]))(logits)
    gates = np.exp(logits[2:]) / np.exp(logits[2:]).sum()
    expected = np.zeros((4, 4))
    expected[2:, 2:] = np.diag(gates) - np.outer(gates, gates)
    np.testing.assert_allclose(jacobian, expected, atol=1e-15)


def test_mixture_is_the_gated_sum_of_the_picked_experts():
    params, x, output, losses = apply_moe()
    router, gate, up, down = params["router"]["kernel"], params["gate"], params["up"], params["down"]

    def expert(e, token):
        gated = token @ gate[e]
        return (gated / (1 + np.exp(-gated)) * (token @ up[e])) @ down[e]

    for row in range(2):
        for position in range(8):
            token = x[row, position]
            logits = token @ router
            picked = np.argsort(logits)[-2:]
            gates = np.exp(logits[picked]) / np.exp(logits[picked]).sum()
            expected = sum(g * expert(e, token) for g, e in zip(gates, picked))
            np.testing.assert_allclose(output[row, position], expected, rtol=1e-10, atol=1e-12)
            z = np.log(np.exp(logits).sum()) ** 2
            np.testing.assert_allclose(losses["router_z"][0][row, position], z, rtol=1e-12)


def test_a_row_does_not_depend_on_the_other_rows():
    model, params = make(param_dtype=jnp.float64)
    logits, losses = apply(model, params, TOKENS)
    for row in range(2):
        row_logits, row_losses = apply(model, params, TOKENS[row : row + 1])
        np.testing.assert_allclose(row_logits[0], logits[row], rtol=1e-12)
        np.testing.assert_allclose(
            row_losses["h_1"]["moe"]["router_z"][0][0], losses["h_1"]["moe"]["router_z"][0][row], rtol=1e-12
        )


@pytest.mark.parametrize("mask", [None, MASK])
def test_z_loss_is_the_sum_over_layers_of_the_masked_mean(mask):
    z = np.random.default_rng(0).random((3, 2, 8))
    unrolled = {f"h_{layer}": {"moe": {"router_z": (jnp.asarray(z[layer]),)}} for layer in range(3)}
    scanned = {"h": {"moe": {"router_z": (jnp.asarray(z),)}}}
    weight = np.ones((2, 8)) if mask is None else mask
    expected = sum((layer * weight).sum() / weight.sum() for layer in z)
    np.testing.assert_allclose(router_z_loss(unrolled, mask), expected, rtol=1e-14)
    np.testing.assert_allclose(router_z_loss(scanned, mask), expected, rtol=1e-14)


@pytest.mark.parametrize("mask", [None, MASK])
def test_balance_loss_is_that_of_switch_transformers(mask):
    params, x, _, losses = apply_moe()
    logits = x @ params["router"]["kernel"]
    keep = np.ones((2, 8), bool) if mask is None else mask
    logits = logits[keep]
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = np.bincount(np.argsort(logits, axis=-1)[:, -2:].ravel(), minlength=4) / (2 * len(logits))
    expected = 4 * (share * probability.mean(0)).sum()
    np.testing.assert_allclose(balance_loss(losses, mask), expected, rtol=1e-12)


def test_balance_loss_of_even_routing_is_one_for_each_layer():
    even = {"router_choice": (jnp.full((3, 2, 8, 4), 0.25),), "router_probability": (jnp.full((3, 2, 8, 4), 0.25),)}
    np.testing.assert_allclose(balance_loss({"h": {"moe": even}}), 3, rtol=1e-14)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("balance_weight", [0.0, 0.25])
def test_loss_is_the_cross_entropy_plus_the_weighted_router_losses(mask, balance_weight):
    model, params = make(param_dtype=jnp.float64, router_z_weight=0.5, balance_weight=balance_weight)
    logits, losses = apply(model, params, TOKENS)
    expected = next_token_loss(logits, TOKENS, mask) + 0.5 * router_z_loss(losses, mask)
    if balance_weight:
        expected += balance_weight * balance_loss(losses, mask)
    loss = mixtral_loss(model.config, logits, losses, TOKENS, mask)
    np.testing.assert_allclose(loss, expected, rtol=1e-14)


def test_losses_that_were_not_collected_are_missed():
    model, params = make()
    logits, _ = apply(model, params, TOKENS)
    with pytest.raises(ValueError, match="mutable='losses'"):
        mixtral_loss(model.config, logits, {}, TOKENS)


@pytest.mark.parametrize("balance_weight", [0.0, 0.25])
def test_scanned_and_unrolled_layers_agree(balance_weight):
    options = {"param_dtype": jnp.float64, "balance_weight": balance_weight}
    model, unrolled = make(**options)
    scanned_model, scanned_params = make(scan_layers=True, **options)
    layers = [unrolled[f"h_{layer}"] for layer in range(2)]
    stacked = {name: leaf for name, leaf in unrolled.items() if not name.startswith("h_")}
    stacked["h"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert jax.tree.map(jnp.shape, scanned_params) == jax.tree.map(jnp.shape, stacked)
    logits, losses = apply(model, unrolled, TOKENS)
    scanned_logits, scanned_losses = apply(scanned_model, stacked, TOKENS)
    np.testing.assert_allclose(scanned_logits, logits, rtol=1e-11, atol=1e-13)
    loss = mixtral_loss(model.config, logits, losses, TOKENS, MASK)
    scanned_loss = mixtral_loss(model.config, scanned_logits, scanned_losses, TOKENS, MASK)
    np.testing.assert_allclose(scanned_loss, loss, rtol=1e-12)


def test_a_future_token_does_not_change_earlier_logits():
    model, params = make()
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    before, _ = apply(model, params, TOKENS)
    after, _ = apply(model, params, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_float64_parameters_compute_in_float64_only(scan_layers):
    model, params = make(param_dtype=jnp.float64, scan_layers=scan_layers, balance_weight=0.25)

    def loss(params):
        logits, sown = model.apply({"params": params}, TOKENS, mutable="losses")
        return mixtral_loss(model.config, logits, sown["losses"], TOKENS)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params))
    assert "f64" in text
    assert "f32" not in text and "bf16" not in text


def test_bfloat16_compute_keeps_float32_parameters_routers_and_loss():
    model, params = make(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits, losses = apply(model, params, TOKENS)
    assert logits.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(losses)} == {jnp.dtype("float32")}
    assert mixtral_loss(model.config, logits, losses, TOKENS).dtype == jnp.float32


def test_dropout_depends_on_its_key_and_is_off_when_deterministic():
    model, params = make(dropout=0.5)
    first = apply_with_dropout(model, params, 0)
    np.testing.assert_array_equal(apply_with_dropout(model, params, 0), first)
    assert not np.allclose(apply_with_dropout(model, params, 1), first)
    without, _ = make()
    np.testing.assert_array_equal(apply(model, params, TOKENS)[0], apply(without, params, TOKENS)[0])


def test_wrong_sizes_are_refused():
    for experts_per_token in (0, 9):
        with pytest.raises(ValueError, match=f"experts_per_token {experts_per_token} is not from 1 to 8"):
            MixtralConfig(experts_per_token=experts_per_token)
    with pytest.raises(ValueError, match="num_heads 32 is not a multiple of num_kv_heads 5"):
        MixtralConfig(num_kv_heads=5)
    with pytest.raises(ValueError, match="unknown Mixtral size 'mixtral'; known: mixtral-8x7b, mixtral-8x22b"):
        MixtralConfig.from_name("mixtral")
