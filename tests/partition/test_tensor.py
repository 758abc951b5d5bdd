"""The tensor split of a block is Megatron's, found without names."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from merak_jax.partition.tensor import tensor_layout, vocabulary_split
from tests.partition.tensor_blocks import (
    ATTENTION,
    BATCH,
    COLUMN,
    HIDDEN,
    MLP,
    NORM,
    ROW,
    SEQUENCE,
    Attention,
    Block,
    GatedMlp,
    Mlp,
    attend,
    layout_of,
    layout_of_linen,
)

CARRY_REDUCED = [((BATCH, SEQUENCE, HIDDEN), "forward")] * 2


def test_mlp_is_column_then_row_parallel():
    layout, splits, reasons = layout_of_linen(Mlp())
    assert splits == MLP
    assert (layout.count("forward"), layout.count("backward")) == (1, 1)
    assert layout.split_flops == layout.flops == 2 * 2 * BATCH * SEQUENCE * HIDDEN * 4 * HIDDEN
    assert "size 64" in reasons["up"]["kernel"] and "split" in reasons["up"]["kernel"]
    assert "residual stream" in reasons["down"]["bias"]


@pytest.mark.parametrize("merged", [False, True])
def test_attention_is_split_over_heads(merged):
    layout, splits, _ = layout_of_linen(Attention(merged=merged), ways=4)
    assert splits == ATTENTION
    assert (layout.count("forward"), layout.count("backward")) == (1, 1)


@pytest.mark.parametrize("merged", [False, True])
def test_pre_norm_block_sums_the_carry_twice(merged):
    layout, splits, _ = layout_of_linen(Block(Attention(merged=merged), Mlp()), ways=4)
    assert splits == {"attention": ATTENTION, "mlp": MLP, "norm1": NORM, "norm2": NORM}
    assert [(c.shape, c.direction) for c in layout.collectives if c.direction == "forward"] == CARRY_REDUCED
    assert layout.count("backward") == 2
    assert layout.split_flops == layout.flops


def test_gated_mlp_splits_both_columns_and_sums_once_each_way():
    layout, splits, _ = layout_of_linen(GatedMlp())
    assert splits == {"gate": {"kernel": 1}, "up": {"kernel": 1}, "down": {"kernel": 0}}
    assert (layout.count("forward"), layout.count("backward")) == (1, 1)


@pytest.mark.parametrize("merged", [False, True])
def test_heads_that_do_not_divide_stay_whole_beside_a_split_mlp(merged):
    layout, splits, reasons = layout_of_linen(Block(Attention(heads=3, merged=merged), Mlp()), ways=2)
    assert set(jax.tree.leaves(splits["attention"])) == {-1} and splits["mlp"] == MLP
    for name in ("q", "k", "v", "out"):
        assert "3 not divisible by 2" in reasons["attention"][name]["kernel"]
    assert layout.count("forward") == 1


@pytest.mark.parametrize("cut", ["split", "slice", "index"])
def test_fused_qkv_cut_along_the_fused_dimension_stays_whole(cut):
    def block(p, x):
        fused = x @ p["qkv"]
        if cut == "split":
            q, k, v = (a.reshape(BATCH, SEQUENCE, 4, 4) for a in jnp.split(fused, 3, axis=-1))
        elif cut == "slice":
            q, k, v = (fused[..., i * 16 : (i + 1) * 16].reshape(BATCH, SEQUENCE, 4, 4) for i in range(3))
        else:
            fused = fused.reshape(BATCH, SEQUENCE, 3, 4, 4)
            q, k, v = (fused[:, :, i] for i in range(3))
        return x + attend(q, k, v).reshape(x.shape) @ p["out"]

    parameters = {"qkv": jnp.zeros((HIDDEN, 48)), "out": jnp.zeros((16, HIDDEN))}
    layout, splits, reasons = layout_of(block, parameters)
    assert splits["qkv"] == -1
    assert "goes through" in reasons["qkv"]
    assert layout.count("forward") <= 1


def test_fused_qkv_with_heads_in_front_is_split():
    def block(p, x):
        q, k, v = jnp.split((x @ p["qkv"]).reshape(BATCH, SEQUENCE, 4, 12), 3, axis=-1)
        return x + attend(q, k, v).reshape(x.shape) @ p["out"]

    _, splits, _ = layout_of(block, {"qkv": jnp.zeros((HIDDEN, 48)), "out": jnp.zeros((16, HIDDEN))})
    assert splits == {"qkv": 1, "out": 0}


@pytest.mark.parametrize("attention", [nn.MultiHeadDotProductAttention, nn.SelfAttention])
@pytest.mark.parametrize("remat", [False, True])
def test_flax_attention_modules_are_split_over_heads(attention, remat):
    block = nn.remat(Block) if remat else Block
    layout, splits, _ = layout_of_linen(block(attention(num_heads=4, deterministic=True), Mlp()), ways=4)
    split = {"query": COLUMN, "key": COLUMN, "value": COLUMN, "out": ROW}
    assert splits["attention"] == split and splits["mlp"] == MLP
    assert (layout.count("forward"), layout.count("backward")) == (2, 2)


def test_nnx_blocks_are_split_alike():
    module = nnx.MultiHeadAttention(4, HIDDEN, decode=False, rngs=nnx.Rngs(0))
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    _, splits, _ = layout_of(lambda p, x: x + nnx.merge(graph, p, rest)(x), parameters)
    expected = {"query": COLUMN, "key": COLUMN, "value": COLUMN, "out": ROW}
    assert nnx.to_pure_dict(splits) == expected


def test_casts_to_bfloat16_between_do_not_matter():
    block = Block(Attention(dtype=jnp.bfloat16), Mlp(dtype=jnp.bfloat16))
    layout, splits, _ = layout_of_linen(block)
    assert splits == {"attention": ATTENTION, "mlp": MLP, "norm1": NORM, "norm2": NORM}
    # Each Dense casts its input anew: still one sum per normed input.
    assert (layout.count("forward"), layout.count("backward")) == (2, 2)
    assert {c.dtype for c in layout.collectives} == {"bfloat16"}


def test_order_and_identity_of_parameters_do_not_matter():
    module = Block(Attention(), Mlp())
    x = jnp.zeros((BATCH, SEQUENCE, HIDDEN))
    parameters = jax.eval_shape(module.init, jax.random.key(0), x)
    leaves, tree = jax.tree.flatten(parameters)
    order = [(7 * i + 3) % len(leaves) for i in range(len(leaves))]
    assert sorted(order) == list(range(len(leaves)))

    def shuffled(*args):
        *shuffled_leaves, carry = args
        back = [None] * len(leaves)
        for place, leaf in zip(order, shuffled_leaves):
            back[place] = leaf
        return module.apply(tree.unflatten(back), carry)

    plain = layout_of_linen(module)[0]
    jaxpr = jax.make_jaxpr(shuffled)(*[leaves[i] for i in order], x)
    layout = tensor_layout(jaxpr, range(len(leaves)), 2)
    assert layout.splits == tuple(plain.splits[i] for i in order)


def test_jaxpr_without_inner_jits_gives_the_same():
    module = Block(Attention(), Mlp())
    x = jnp.zeros((BATCH, SEQUENCE, HIDDEN))
    leaves, tree = jax.tree.flatten(jax.eval_shape(module.init, jax.random.key(0), x))
    traced = jax.make_jaxpr(lambda x, *p: module.apply(tree.unflatten(p), x))(x, *leaves)
    called = jax.make_jaxpr(jax.jit(jaxpr_as_fun(traced)))(x, *leaves)
    assert called.eqns[0].primitive.name == "jit"
    parameters = range(1, 1 + len(leaves))
    assert tensor_layout(called, parameters, 2).splits == tensor_layout(traced, parameters, 2).splits
    plain = tensor_layout(traced, parameters, 2)
    assert [traced.eqns[i].primitive.name for i in plain.activation_splits] == ["dot_general"] * 6
    assert not tensor_layout(called, parameters, 2).activation_splits


def test_side_input_over_heads_does_not_prevent_the_split():
    for shape in [(1, 4, SEQUENCE, SEQUENCE), (BATCH, 1, SEQUENCE, SEQUENCE)]:
        layout, splits, _ = layout_of_linen(Block(Attention(), Mlp()), jnp.zeros(shape))
        assert splits["attention"] == ATTENTION
        assert layout.count("forward") == 2


def test_constants_over_heads_may_be_built_by_any_operation():
    def block(p, x):
        slopes = jnp.concatenate([2.0 ** -jnp.arange(1, 3), 3.0 ** -jnp.arange(1, 3)])
        bias = slopes[:, None, None] * jnp.arange(SEQUENCE)
        q, k, v = (jnp.einsum("bsd,dhf->bshf", x, p[n]) for n in "qkv")
        return x + jnp.einsum("bshf,hfd->bsd", attend(q, k, v, bias), p["o"])

    parameters = {n: jnp.zeros((HIDDEN, 4, 4)) for n in "qkv"} | {"o": jnp.zeros((4, 4, HIDDEN))}
    assert layout_of(block, parameters)[1] == {"q": 1, "k": 1, "v": 1, "o": 0}


@pytest.mark.parametrize("heads, expected", [(4, ATTENTION), (3, None)])
def test_cross_attention_keeps_the_encoder_stream_whole(heads, expected):
    class Cross(nn.Module):
        @nn.compact
        def __call__(self, x, encoded):
            q = nn.DenseGeneral((heads, 4), name="q")(x)
            k, v = (nn.DenseGeneral((heads, 4), name=n)(encoded) for n in "kv")
            y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
            return x + nn.DenseGeneral(HIDDEN, axis=(-2, -1), name="out")(y)

    layout, splits, _ = layout_of_linen(Cross(), jnp.zeros((BATCH, 10, 24)))
    if expected is None:
        assert set(jax.tree.leaves(splits)) == {-1}
    else:
        assert splits == expected
        assert (layout.count("forward"), layout.count("backward")) == (1, 2)


def test_norm_of_queries_and_keys_within_a_head_stays_whole():
    layout, splits, _ = layout_of_linen(Attention(normalize=True))
    assert splits == {**ATTENTION, "q_norm": {"scale": -1}, "k_norm": {"scale": -1}}
    assert layout.count("forward") == 1


def test_norm_over_a_split_dimension_costs_small_sums():
    def block(p, x):
        h = x @ p["up"]
        h = (h - h.mean(-1, keepdims=True)) * p["scale"]
        return x + h @ p["down"]

    parameters = {"up": jnp.zeros((16, 64)), "scale": jnp.zeros(64), "down": jnp.zeros((64, 16))}
    layout, splits, _ = layout_of(block, parameters)
    assert splits == {"up": 1, "scale": 0, "down": 0}
    forward = [c.shape for c in layout.collectives if c.direction == "forward"]
    assert sorted(forward) == [(BATCH, SEQUENCE), (BATCH, SEQUENCE, HIDDEN)]


def test_a_value_is_never_split_twice_and_the_larger_matmuls_win():
    def block(p, x):
        return x + jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    parameters = {"a": jnp.zeros((16, 32)), "b": jnp.zeros((32, 64)), "c": jnp.zeros((64, 16))}
    layout, splits, reasons = layout_of(block, parameters)
    assert splits == {"a": -1, "b": 1, "c": 0}
    assert "not together with class" in reasons["a"]
    assert layout.split_flops == 2 * BATCH * SEQUENCE * (32 * 64 + 64 * 16)


def test_scan_inside_a_block_is_followed_and_counted():
    def block(p, x):
        def add_part(total, _):
            return total + jax.nn.relu(x @ p["up"]) @ p["down"], None

        return x + jax.lax.scan(add_part, jnp.zeros_like(x), None, length=3)[0]

    layout, splits, _ = layout_of(block, {"up": jnp.zeros((16, 64)), "down": jnp.zeros((64, 16))})
    assert splits == {"up": 1, "down": 0}
    assert layout.count("forward") == 3


def test_dimensions_that_meet_control_flow_or_unknown_operations_stay_whole():
    def block(p, x):
        h = jax.lax.cond(x[0, 0, 0] > 0, jnp.tanh, jnp.sin, x @ p["up"])
        return x + h @ p["down"]

    layout, splits, reasons = layout_of(block, {"up": jnp.zeros((16, 64)), "down": jnp.zeros((64, 16))})
    assert splits == {"up": -1, "down": -1}
    assert "goes through `cond`" in reasons["up"]
    assert layout.collectives == ()


def test_dropout_masks_follow_the_split():
    def block(p, x, key):
        h = jax.nn.gelu(x @ p["up"])
        h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 3), 0.9, h.shape), h / 0.9, 0.0)
        return x + h @ p["down"]

    parameters = {"up": jnp.zeros((16, 64)), "down": jnp.zeros((64, 16))}
    assert layout_of(block, parameters, jax.random.key(0))[1] == {"up": 1, "down": 0}


def test_a_tensor_axis_of_one_splits_nothing():
    layout, splits, reasons = layout_of_linen(Mlp(), ways=1)
    assert set(jax.tree.leaves(splits)) == {-1}
    assert "size 1" in reasons["up"]["kernel"]
    assert "reason" in str(layout)


def test_bad_positions_and_sizes_are_named():
    jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match="at least 1"):
        tensor_layout(jaxpr, [1], 0)
    with pytest.raises(ValueError, match="different positions"):
        tensor_layout(jaxpr, [2], 2)
    with pytest.raises(ValueError, match="returns 1 values but takes 0"):
        tensor_layout(jaxpr, [0, 1], 2)


@pytest.mark.parametrize(
    "shape, ways, expected",
    [((50264, 768), 8, 0), ((50257, 768), 8, 1), ((768, 50264), 8, 1), ((64, 64), 4, 0), ((768,), 8, None)]
    + [((7, 9), 2, None), ((), 2, None), ((0, 4), 8, None)],
)
def test_vocabulary_split_takes_the_largest_divisible_dimension(shape, ways, expected):
    assert vocabulary_split(shape, ways) == expected
