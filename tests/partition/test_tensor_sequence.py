"""The residual stream is split along its tokens between matmuls, where T divides them."""

import jax
import jax.numpy as jnp
import pytest

from merak_jax.partition.tensor import tensor_layout
from tests.partition.tensor_blocks import Attention, Block, Mlp, layout_of_linen


def layout_of_carry(block, *shapes, ways=4, dtypes=None):
    """The layout of `block(w, *carry)`, `w` [8, 8] its parameter."""
    dtypes = dtypes or [jnp.float32] * len(shapes)
    carry = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes)]
    jaxpr = jax.make_jaxpr(block)(jax.ShapeDtypeStruct((8, 8), jnp.float32), *carry)
    return tensor_layout(jaxpr, [0], ways)


@pytest.mark.parametrize(
    "shape, ways, expected, words",
    [
        ((2, 8, 16), 4, 1, "8 tokens are split, 2 on each device"),
        ((8, 4, 16), 4, 0, "8 tokens"),
        ((4, 4, 16), 4, 0, "4 tokens"),
        # The batch where the sequence does not divide.
        ((8, 197, 16), 4, 0, "8 tokens"),
        ((3, 197, 16), 4, None, "3 is not divisible by 4; 197 is not divisible by 4; 16 is contracted with weights"),
        ((24, 16), 4, 0, "24 tokens"),
    ],
)
def test_the_largest_token_dimension_that_divides(shape, ways, expected, words):
    module = Block(Attention(), Mlp()) if len(shape) == 3 else Mlp()
    layout = layout_of_linen(module, ways=ways, carry=jnp.zeros(shape))[0]
    assert layout.sequence == (expected,)
    assert words in layout.sequence_reason and words in str(layout)


def test_a_tensor_axis_of_one_splits_no_tokens():
    assert layout_of_linen(Mlp(), ways=1)[0].sequence == (None,)


def test_all_floats_of_the_carry_that_have_the_tokens_are_split_and_nothing_else():
    def block(w, x, loss, count, total):
        return x + jnp.tanh(x @ w), loss + jnp.sum(x, axis=2), count + 1, total + jnp.sum(x)

    shapes = ((2, 16, 8), (2, 16), (2, 16), ())
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    assert layout_of_carry(block, *shapes, dtypes=dtypes).sequence == (1, 1, None, None)


def test_values_that_the_block_does_not_change_do_not_choose():
    # An encoder's output, longer than the decoder's tokens, in the carry.
    def block(w, x, memory):
        scores = jnp.einsum("bqd,bkd->bqk", x @ w, memory)
        return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), memory), memory

    assert layout_of_carry(block, (2, 8, 8), (2, 64, 8)).sequence == (1, None)
    assert layout_of_carry(block, (4, 6, 8), (4, 64, 8)).sequence == (0, 0)


def test_a_dimension_mixed_by_weights_or_twice_on_a_value_is_no_token_dimension():
    def mixed(w, x):
        return x + jnp.einsum("bsd,st->btd", x, w)

    layout = layout_of_carry(mixed, (4, 8, 24))
    assert layout.sequence == (2,)

    def pairs(w, x):
        return x + jnp.swapaxes(x, 1, 2) @ jnp.ones((8, 8)) + x @ w

    layout = layout_of_carry(pairs, (3, 8, 8))
    assert layout.sequence == (None,)


def test_a_block_without_weights_splits_nothing():
    layout = layout_of_carry(lambda w, x: x * w[0], (2, 8, 8))
    assert layout.sequence == (None,) and "no matmul with weights" in layout.sequence_reason
