"""The packed state reads like the user's tree, is read-only, and comes back bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.errors import StateError
from merak_jax.runtime.state import DeferredState, PackedState

WIDTH, LAYERS = 4, 3


class Tower(nn.Module):
    """Embedding, three equal blocks, head."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, WIDTH, name="embed")(tokens)
        for i in range(LAYERS):
            x = x + nn.tanh(nn.Dense(WIDTH, name=f"h_{i}")(x))
        return nn.Dense(8, name="head")(x)


MODEL, OPTIMIZER = Tower(), optax.adam(1e-2)


class AveragedState(TrainState):
    """A TrainState with an average of the parameters and a random key."""

    average: dict
    key: jax.Array


def create_state(seed=0):
    params = MODEL.init(jax.random.key(seed), jnp.zeros((1, 3), jnp.int32))["params"]
    return AveragedState.create(
        apply_fn=MODEL.apply, params=params, tx=OPTIMIZER, average=params, key=jax.random.key(7)
    )


def train_step(state, batch):
    def loss(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    state = state.apply_gradients(grads=grads)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
    return state.replace(average=average), {"loss": value}


def make_batch():
    random = np.random.default_rng(0)
    return {"x": random.integers(0, 8, (4, 3)), "y": random.integers(0, 8, (4, 3))}


def data_of(tree):
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(getattr(x, "dtype", np.float64), jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(data_of(actual), data_of(expected), strict=True):
        np.testing.assert_array_equal(a, e)
        assert np.asarray(a).dtype == np.asarray(e).dtype


@pytest.fixture(scope="module")
def original():
    """The user's state; its average is the same arrays as its parameters."""
    return create_state()


@pytest.fixture(scope="module")
def step(original):
    """Two uneven stages, two tensor shards, traced but not compiled."""
    mesh = merak_jax.make_mesh(pipe=2, tensor=2, devices=jax.devices()[:4])
    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=2)
    step.lower(original, make_batch())
    return step


@pytest.fixture(scope="module")
def packed(step, original):
    return step.shard(original)


@pytest.fixture(scope="module")
def trained(step, original):
    """The state after one step."""
    return step(original, make_batch())[0]


def test_attributes_and_keys_read_as_in_the_users_tree(packed, original):
    assert packed.step == original.step == 0
    for name in (*(f"h_{i}" for i in range(LAYERS)), "embed", "head"):
        assert_same_bits(packed.params[name], original.params[name])
    assert_same_bits(packed.opt_state, original.opt_state)
    assert_same_bits(packed.opt_state[0].mu["h_2"]["kernel"], original.opt_state[0].mu["h_2"]["kernel"])
    np.testing.assert_array_equal(jax.random.key_data(packed.key), jax.random.key_data(original.key))


def test_what_is_no_leaf_is_the_users_own_object(packed, original):
    assert packed.tx == original.tx
    assert packed.apply_fn == original.apply_fn
    logits = packed.apply_fn({"params": packed.params}, make_batch()["x"])
    np.testing.assert_allclose(
        logits, original.apply_fn({"params": original.params}, make_batch()["x"]), rtol=1e-5, atol=1e-6
    )


def test_what_the_users_tree_lacks_is_missing_here_too(packed):
    with pytest.raises(AttributeError, match="velocity"):
        packed.velocity  # noqa: B018
    with pytest.raises(KeyError, match="h_9"):
        packed.params["h_9"]
    assert not hasattr(packed, "__array__")


def test_a_dictionary_state_is_read_by_key_and_by_iteration():
    mesh = merak_jax.make_mesh(pipe=2, devices=jax.devices()[:2])
    step = merak_jax.parallelize(dictionary_step, mesh=mesh, num_microbatches=2)
    state = {"weights": create_state().params, "step": jnp.int32(3)}
    step.lower(state, make_batch())
    packed = step.shard(state)
    assert packed["step"] == 3
    assert_same_bits(packed["weights"]["h_1"], state["weights"]["h_1"])
    assert set(packed.keys()) == set(state)
    assert_same_bits(dict(packed.items())["weights"], state["weights"])
    assert "dict sharded over mesh 1·2·1" in repr(packed)


def dictionary_step(state, batch):
    def loss(params):
        logits = MODEL.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    grads = jax.grad(loss)(state["weights"])
    return {"weights": jax.tree.map(lambda p, g: p - g, state["weights"], grads), "step": state["step"] + 1}, None


def test_methods_of_the_users_class_see_arrays(packed, original):
    zeros = jax.tree.map(jnp.zeros_like, original.params)
    stepped = packed.apply_gradients(grads=zeros, average=original.average)
    assert stepped.step == 1
    assert_same_bits(stepped.params["h_0"], original.params["h_0"])
    replaced = packed.replace(step=5)
    assert replaced.step == 5
    assert_same_bits(replaced.params, original.params)


def test_repr_says_type_mesh_and_sizes(packed, original):
    text = repr(packed)
    assert text.startswith("<AveragedState sharded over mesh 1·2·2:")
    assert f"{len(jax.tree.leaves(original))} leaves" in text
    assert "bytes" in text


def test_shard_then_unshard_gives_the_same_bits(step, packed, original):
    back = step.unshard(packed)
    assert isinstance(back, AveragedState)
    assert_same_bits(back.params, original.params)
    assert_same_bits(back.average, original.average)
    assert_same_bits(back.opt_state, original.opt_state)
    assert back.step == 0
    assert_same_bits(step.unshard(step.shard(back)), back)


def test_sharding_a_packed_state_again_keeps_it(step, packed):
    assert step.shard(packed) is packed


def test_unshard_leaves_a_plain_tree_alone(step, original):
    assert step.unshard(original) is original


def test_it_is_a_pytree_of_its_stored_arrays(packed):
    leaves, tree = jax.tree.flatten(packed)
    assert all(isinstance(x, jax.Array) for x in leaves)
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, PackedState)
    assert_same_bits(again.params["h_0"], packed.params["h_0"])
    doubled = jax.tree.map(lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else 2 * x, packed)
    np.testing.assert_array_equal(doubled.params["h_1"]["kernel"], 2 * packed.params["h_1"]["kernel"])
    assert jax.tree.structure(doubled) == tree
    assert jax.jit(lambda s: s.step)(packed) == 0


def test_it_is_read_only(packed):
    with pytest.raises(AttributeError, match="read-only"):
        packed.step = 3
    with pytest.raises(TypeError, match="read-only"):
        packed["step"] = 3
    with pytest.raises(AttributeError, match="read-only"):
        packed._arrays = []


def test_blocks_are_stored_together_split_over_pipe(packed):
    (kernels, *_) = [x for x in jax.tree.leaves(packed) if x.shape == (2, 2, WIDTH, WIDTH)]
    assert "pipe" in kernels.sharding.spec[:1]
    assert {s.data.shape[0] for s in kernels.addressable_shards} == {1}
    np.testing.assert_array_equal(np.asarray(kernels)[1, 1], 0)


def test_every_stored_array_is_placed_on_the_whole_mesh(packed, step):
    for array in jax.tree.leaves(packed):
        assert array.sharding.device_set == set(step.mesh.devices.flat)


def test_an_average_that_is_the_same_arrays_survives_donation(original, trained, step):
    assert original.average["h_0"]["kernel"] is original.params["h_0"]["kernel"]
    for leaf in jax.tree.leaves(original):
        if isinstance(leaf, jax.Array):
            assert not leaf.is_deleted()
    expected, _ = jax.jit(train_step)(original, make_batch())
    for a, e in zip(data_of(step.unshard(trained)), data_of(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-3, atol=1e-5)
    assert np.abs(trained.average["h_0"]["kernel"] - trained.params["h_0"]["kernel"]).max() > 1e-4


def test_a_packed_state_given_to_a_donating_step_is_gone_and_the_new_one_is_not(step, original):
    packed = step.shard(original)
    new, _ = step(packed, make_batch())
    assert any(x.is_deleted() for x in jax.tree.leaves(packed))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))
    assert new.step == 1


def test_a_state_moves_between_plans(step, packed, original):
    mesh = merak_jax.make_mesh(pipe=3, devices=jax.devices()[:3])
    other = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=2)
    other.lower(original, make_batch())
    moved = other.shard(packed)
    assert moved._layout != packed._layout
    assert_same_bits(other.unshard(moved).params, original.params)
    assert_same_bits(step.unshard(step.shard(moved)).opt_state, original.opt_state)


def test_another_structure_or_shape_is_refused_with_the_leaf(step, original):
    with pytest.raises(StateError, match="another structure"):
        step.shard(original.params)
    wrong = {**original.params, "h_1": {**original.params["h_1"], "bias": jnp.zeros(9)}}
    with pytest.raises(StateError, match=r"\.params\['h_1'\]\['bias'\] has shape \(9,\), planned for \(4,\)"):
        step.shard(original.replace(params=wrong))


def test_init_is_deferred_and_reads_like_the_state_it_will_make(step, original):
    deferred = step.init(create_state, 0)
    assert isinstance(deferred, DeferredState)
    assert "AveragedState" in repr(deferred) and "first step" in repr(deferred)
    assert jax.tree.structure(deferred.params) == jax.tree.structure(original.params)
    np.testing.assert_array_equal(deferred.params["h_2"]["kernel"], jax.jit(create_state)(0).params["h_2"]["kernel"])


def test_init_makes_the_values_that_the_users_initialiser_makes(step):
    made = step.unshard(step.shard(step.init(create_state, 5)))
    expected = jax.jit(create_state)(5)
    assert_same_bits(made.params, expected.params)
    assert_same_bits(made.opt_state, expected.opt_state)
    assert len({np.asarray(made.params[f"h_{i}"]["kernel"]).tobytes() for i in range(LAYERS)}) == LAYERS
