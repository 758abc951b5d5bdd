"""Lane k of a packed array is block k: packing and unpacking are inverse, the padding is zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak_jax.partition.lanes import LaneLayout, even_counts

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any).map(tuple)


def values_for(layout, shape=(2, 3)):
    random = np.random.default_rng(0)
    return [random.normal(size=shape) for _ in range(layout.num_lanes)]


@settings(max_examples=25, deadline=None)
@given(COUNTS, st.sampled_from([(), (3,), (2, 3)]))
def test_unpacking_gives_back_what_was_packed(counts, shape):
    layout = LaneLayout(counts)
    values = values_for(layout, shape)
    packed = layout.pack(values)
    assert packed.shape == (len(counts), max(counts), *shape)
    for lane, value in enumerate(values):
        np.testing.assert_array_equal(layout.unpack(packed, lane), value)
    np.testing.assert_array_equal(layout.unpack_stack(packed), np.stack(values))
    np.testing.assert_array_equal(layout.pack_stack(np.stack(values)), packed)
    np.testing.assert_array_equal(np.asarray(packed)[~layout.valid], 0)


@settings(max_examples=60, deadline=None)
@given(COUNTS)
def test_blocks_stand_in_order_stage_after_stage(counts):
    layout = LaneLayout(counts)
    assert [s for s, _ in layout.places] == sorted(s for s, _ in layout.places)
    assert all(index < counts[stage] for stage, index in layout.places)
    assert [layout.places.index((s, i)) for s in range(len(counts)) for i in range(counts[s])] == list(
        range(sum(counts))
    )
    assert layout.valid.sum() == layout.num_lanes == sum(counts)
    assert layout.is_full == (len(set(counts)) == 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(2, 3), st.booleans(), st.data())
def test_chunks_stand_on_their_stages_and_lose_no_block(stages, chunks, folded, data):
    counts = tuple(
        data.draw(st.lists(st.integers(0, 3), min_size=stages * chunks, max_size=stages * chunks).filter(any))
    )
    layout = LaneLayout(counts, chunks, folded)
    values = values_for(layout, (2,))
    packed = layout.pack(values)
    np.testing.assert_array_equal(layout.unpack_stack(packed), np.stack(values))
    np.testing.assert_array_equal(np.asarray(packed)[~layout.valid], 0)
    assert sum(layout.per_stage) == layout.num_lanes and len(set(layout.places)) == layout.num_lanes
    # Along the path, visit after visit, the blocks are those of the model in order.
    along = []
    for chunk in range(chunks):
        for s in range(stages):
            stage = stages - 1 - s if folded and chunk % 2 else s
            first, count = layout.visits[stage, chunk]
            along += [(stage, first + i) for i in range(count)]
    assert tuple(along) == layout.places


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 8))
def test_even_counts_differ_by_at_most_one_and_lose_no_block(blocks, stages):
    counts = even_counts(blocks, stages)
    assert len(counts) == stages
    assert sum(counts) == blocks
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


def test_a_layout_without_blocks_has_depth_one():
    layout = LaneLayout((0, 0))
    assert (layout.depth, layout.num_lanes, layout.is_full) == (1, 0, False)


@pytest.mark.parametrize("counts", [(2, 2), (2, 1)])
def test_packing_works_inside_jit_and_keeps_the_type(counts):
    layout = LaneLayout(counts)
    values = [jnp.full((3,), k, jnp.bfloat16) for k in range(layout.num_lanes)]
    packed = jax.jit(layout.pack)(values)
    assert packed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(jax.jit(layout.unpack_stack)(packed), np.stack(values))


@pytest.mark.parametrize("counts", [(2, 2), (2, 1)])
def test_random_keys_and_booleans_and_integers_can_be_packed(counts):
    layout = LaneLayout(counts)
    keys = list(jax.random.split(jax.random.key(3), layout.num_lanes))
    packed = layout.pack(keys)
    for lane, key in enumerate(keys):
        np.testing.assert_array_equal(jax.random.key_data(layout.unpack(packed, lane)), jax.random.key_data(key))
    flags = [np.array(lane % 2 == 0) for lane in range(layout.num_lanes)]
    np.testing.assert_array_equal(layout.unpack_stack(layout.pack(flags)), flags)
    assert layout.pack(flags).dtype == np.bool_
    assert layout.pack(list(range(layout.num_lanes))).dtype == np.int64


def test_plain_numbers_are_packed_without_a_device_program():
    assert isinstance(LaneLayout((2, 2)).pack([1.0, 2.0, 3.0, 4.0]), np.ndarray)


def test_the_gradient_of_padding_is_dropped():
    layout = LaneLayout((2, 1))
    grads = jax.grad(lambda xs: jnp.sum(layout.pack(xs) * jnp.array([[1.0, 2.0], [3.0, 100.0]])))([1.0, 1.0, 1.0])
    assert [float(g) for g in grads] == [1.0, 2.0, 3.0]


def test_the_mask_broadcasts_against_a_packed_array():
    layout = LaneLayout((2, 1))
    np.testing.assert_array_equal(layout.mask(4)[:, :, 0, 0], [[True, True], [True, False]])
    assert layout.mask(2).shape == (2, 2)
