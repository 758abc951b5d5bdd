"""Heads of queries that share heads of keys and values are split also where the keys' heads are fewer than T."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from merak_jax.models import llama
from merak_jax.partition.follow import opaque_dimensions
from merak_jax.partition.tensor import tensor_layout
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
    Mlp,
    layout_of,
    layout_of_linen,
)

WHOLE = {"kernel": -1, "bias": -1}
GROUPED = {"q": COLUMN, "k": WHOLE, "v": WHOLE, "out": ROW}
KEYS = (BATCH, SEQUENCE, 2, 4)


class LlamaBlock(nn.Module):
    """A block of Llama: the queries are reshaped into groups, keys and values are not repeated."""

    heads: int = 16
    kv_heads: int = 2

    @nn.compact
    def __call__(self, x):
        sizes = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "width": x.shape[-1], "hidden_width": 160}
        config = llama.LlamaConfig(**sizes)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return llama.Block(config, name="block")(x, llama.rotary_table(config, x.shape[1]), mask, True)


def llama_splits(ways, **heads):
    module = LlamaBlock(**heads)
    layout, splits, reasons = layout_of_linen(module, ways=ways, carry=jnp.zeros((2, 8, 4 * module.heads)))
    assert splits["block"].pop("mlp") == {"gate": {"kernel": 1}, "up": {"kernel": 1}, "down": {"kernel": 0}}
    attention = {n: p["kernel"] for n, p in splits["block"]["attention"].items()}
    return layout, attention, reasons["block"]["attention"]


def test_grouped_query_attention_is_split_over_key_heads():
    layout, splits, _ = layout_of_linen(Attention(kv_heads=2), ways=2)
    assert splits == ATTENTION and not layout.grouped


def test_multi_query_attention_splits_queries_and_keeps_the_single_key_head():
    layout, splits, _ = layout_of_linen(Attention(kv_heads=1))
    assert splits == GROUPED
    assert layout.count("forward") == 1


@pytest.mark.parametrize("merged", [False, True])
def test_fewer_key_heads_than_devices_are_whole_and_the_queries_split(merged):
    # With `merged` the 2 * 4 features of the keys divide by 4, but a part of them is no part of a head.
    layout, splits, reasons = layout_of_linen(Block(Attention(kv_heads=2, merged=merged), Mlp()), ways=4)
    assert splits == {"attention": GROUPED, "mlp": MLP, "norm1": NORM, "norm2": NORM}
    assert "whole, as the 2 groups of 2 that share it are split" in reasons["attention"]["k"]["kernel"]
    assert layout.grouped == {(2, 2)}
    assert layout.count("forward") == 2
    # Two sums of the carry, and the gradients of keys and of values.
    assert sorted(c.shape for c in layout.collectives if c.direction == "backward") == sorted(
        [(BATCH, SEQUENCE, HIDDEN)] * 2 + [KEYS] * 2
    )
    key_flops = 2 * 2 * BATCH * SEQUENCE * HIDDEN * 8
    assert layout.flops - layout.split_flops == key_flops


@pytest.mark.parametrize("ways, grouped", [(2, set()), (4, {(2, 8)}), (8, {(2, 8)}), (16, {(2, 8)})])
def test_groups_of_a_llama_block_are_split_as_far_as_heads_go(ways, grouped):
    layout, splits, _ = llama_splits(ways)
    whole = -1 if grouped else 1
    assert splits == {"query": 1, "key": whole, "value": whole, "output": 0}
    assert layout.grouped == grouped


@pytest.mark.parametrize("heads, kv_heads, ways", [(8, 2, 16), (12, 6, 4), (16, 4, 32)])
def test_parts_that_cut_heads_or_cross_groups_are_replicated(heads, kv_heads, ways):
    layout, splits, reasons = llama_splits(ways, heads=heads, kv_heads=kv_heads)
    assert set(splits.values()) == {-1}
    assert f"{kv_heads} not divisible by {ways}" in reasons["key"]["kernel"]
    assert not layout.grouped and layout.count("forward") == 1


def grouped_block(after=lambda y: y):
    """Attention of 8 heads in groups of 4 whose output, `[batch, sequence, 2, 4, 4]`, goes through `after`."""

    def block(p, x):
        q = jnp.einsum("bsd,dhf->bshf", x, p["q"]).reshape(BATCH, SEQUENCE, 2, 4, 4)
        k, v = (jnp.einsum("bsd,dhf->bshf", x, p[n]) for n in "kv")
        y = jnp.einsum("bhgqk,bkhf->bqhgf", nn.softmax(jnp.einsum("bqhgf,bkhf->bhgqk", q, k)), v)
        return x + jnp.einsum("bshf,hfd->bsd", after(y).reshape(BATCH, SEQUENCE, -1, 4), p["o"])

    return block


def grouped_parameters(heads_out=8):
    shapes = {"q": (HIDDEN, 8, 4), "k": (HIDDEN, 2, 4), "v": (HIDDEN, 2, 4), "o": (heads_out, 4, HIDDEN)}
    return {n: jnp.zeros(s) for n, s in shapes.items()}


def test_values_that_only_look_like_groups_are_followed():
    assert layout_of(grouped_block(), grouped_parameters(), ways=8)[1] == {"q": 1, "k": -1, "v": -1, "o": 0}


@pytest.mark.parametrize(
    "after, heads_out",
    [
        # Sums over the heads of a group, which would be summed over devices.
        (lambda y: y.sum(3, keepdims=True) + 0 * y, 8),
        (lambda y: y.mean(3), 2),
        # Heads of a group exchanged.
        (lambda y: y[:, :, :, ::-1], 8),
        (lambda y: jnp.cumsum(y, 3), 8),
        # Groups within heads: contiguous parts are others.
        (lambda y: jnp.swapaxes(y, 2, 3), 8),
        (lambda y: jnp.roll(y, 1, 2), 8),
    ],
)
def test_operations_across_the_heads_of_a_group_keep_attention_whole(after, heads_out):
    layout, splits, _ = layout_of(grouped_block(after), grouped_parameters(heads_out), ways=8)
    assert set(splits.values()) == {-1}
    assert layout.collectives == () and not layout.grouped


def test_a_weight_per_group_keeps_heads_whole():
    # Its gradient would be summed in parts of the size of a weight.
    def block(p, x):
        q = jnp.einsum("bsd,dhf->bshf", x, p["q"]).reshape(BATCH, SEQUENCE, 2, 4, 4)
        y = jnp.einsum("bshgf,hfe->bshge", q, p["mix"])
        return x + jnp.einsum("bshf,hfd->bsd", y.reshape(BATCH, SEQUENCE, 8, 4), p["o"])

    parameters = {"q": jnp.zeros((HIDDEN, 8, 4)), "mix": jnp.zeros((2, 4, 4)), "o": jnp.zeros((8, 4, HIDDEN))}
    layout, splits, _ = layout_of(block, parameters, ways=4)
    assert splits["q"] != 1 and splits["mix"] != 0 and not layout.grouped


def test_products_of_whole_keys_are_named_for_constraints():
    x = jnp.zeros((2, 8, 64))
    leaves, tree = jax.tree.flatten(jax.eval_shape(LlamaBlock().init, jax.random.key(0), x))
    traced = jax.make_jaxpr(lambda x, *p: LlamaBlock().apply(tree.unflatten(p), x))(x, *leaves)
    layout = tensor_layout(traced, range(1, 1 + len(leaves)), 4)
    whole = [traced.eqns[i].outvars[0].aval.shape for i, d in layout.activation_splits.items() if d is None]
    assert whole == [(2, 8, 2, 4)] * 2


def test_a_reshape_into_groups_works_in_shards_where_the_layout_splits_them():
    eqn = jax.make_jaxpr(lambda q: q.reshape(3, 2, 8, 5))(jnp.zeros((3, 16, 5))).eqns[0]
    assert opaque_dimensions(eqn) == ([[]], [[2]])
    assert opaque_dimensions(eqn, {(2, 8)}) == ([[]], [[]])
    assert opaque_dimensions(eqn, {(4, 4)}) == ([[]], [[2]])
