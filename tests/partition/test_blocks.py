"""Cutting a loss into prologue, equal blocks and epilogue finds the layers and keeps every value."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal

from merak_jax.models.gpt2 import GPT2, GPT2Config
from merak_jax.partition.blocks import dependence, find_blocks
from merak_jax.partition.chain import BATCH, PARAMETER, stashed_once
from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import constants_to_inputs, evaluate, slice_program

W, ROWS = 4, 2


def cut(loss, params, batch):
    """`(graph, flat inputs)` of a loss; the inputs are constants, parameters, batch."""
    closed = inline(jax.make_jaxpr(lambda p, b: jax.tree.leaves(loss(p, b)))(params, batch))
    program, constants = constants_to_inputs(closed)
    kinds = [0] * len(constants) + [PARAMETER] * len(jax.tree.leaves(params)) + [BATCH] * len(jax.tree.leaves(batch))
    graph = find_blocks(program, dict(zip(program.invars, kinds)))
    return graph, [*constants, *map(jnp.asarray, jax.tree.leaves((params, batch)))]


def run(graph, inputs):
    """Evaluate prologue, blocks one after another, epilogue: as the pipeline does, without the pipeline."""
    env = dict(zip(graph.program.invars, inputs))
    inputs_of_program = list(graph.program.invars)

    def value(atom):
        """A value outside the blocks, made of the inputs alone."""
        if isinstance(atom, Literal):
            return atom.val
        program = slice_program(graph.program.eqns, inputs_of_program, [atom])
        return evaluate(program, [], *inputs)[0]

    rows = [env[v] for v in graph.rows_inputs]
    carry = []
    if graph.chains:
        started = evaluate(graph.prologue, [], *map(value, graph.prologue_shared), *rows)
        carry = [
            jnp.full(a.shape, jnp.nan if jnp.issubdtype(a.dtype, jnp.inexact) else 0, a.dtype)
            for a in graph.carry_avals
        ]
        for slot, x in zip(graph.prologue_slots, started, strict=True):
            carry[slot] = x
        side = dict(zip(graph.side_rows, evaluate(graph.side, [], *map(value, graph.side_shared), *rows), strict=True))
    for chain in graph.chains:
        shared = [value(v) for v in chain.shared]
        for k in range(chain.length):
            raw = [value(s.stack)[k] if s.stack is not None else value(s.values[k]) for s in chain.slots]
            lanes = evaluate(chain.lane_prepare, [], *raw, *shared)
            carry = evaluate(chain.body, [], *carry, *lanes, *shared, *(side[v] for v in chain.rows))
    found = evaluate(graph.epilogue, [], *carry, *map(value, graph.epilogue_shared), *rows)
    outputs = dict(zip(graph.epilogue_outputs, found, strict=True))
    return [outputs[n] if n in outputs else value(a) for n, a in enumerate(graph.program.outvars)]


def check(loss, params, batch, length, period=None, compiled=False):
    """The number of blocks, the number of equations of one, and the values."""
    graph, inputs = cut(loss, params, batch)
    found = graph.chain.length if graph.chain is not None else 0
    assert found == length, f"{found} blocks: {graph}"
    if period is not None:
        assert len(graph.chain.body.eqns) == period
    outputs = jax.jit(lambda *xs: run(graph, xs))(*inputs) if compiled else run(graph, inputs)
    for actual, expected in zip(outputs, jax.tree.leaves(loss(params, batch)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
    return graph


def weights(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=s) / 2 for s in shapes]


BATCH_X = {"x": np.random.default_rng(9).normal(size=(ROWS, W))}


def dense_chain(length):
    return {"in": weights((W, W))[0], "layers": weights(*[(W, W)] * length, seed=1), "out": weights((W, W), seed=2)[0]}


def mlp(params, batch):
    x = batch["x"] @ params["in"]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return jnp.sum((x @ params["out"]) ** 2)


@pytest.mark.parametrize("length", [2, 3, 4, 7])
def test_unrolled_layers_are_one_block_each(length):
    graph = check(mlp, dense_chain(length), BATCH_X, length, period=3)
    assert [a.shape for a in graph.chain.carry_avals] == [(ROWS, W)]
    assert len(graph.chain.slots) == 1
    assert graph.prologue_slots == (0,)


def test_one_layer_is_no_chain_and_everything_is_epilogue():
    graph = check(mlp, dense_chain(1), BATCH_X, 0)
    assert len(graph.epilogue.eqns) == len(graph.program.eqns)
    assert "no repeated blocks" in str(graph)


def test_the_first_layer_that_reads_the_batch_itself_is_a_block_too():
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    check(loss, weights(*[(W, W)] * 5), BATCH_X, 5)


def test_a_first_block_that_differs_is_peeled():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for i, w in enumerate(params["layers"]):
            x = jnp.tanh(x @ w) * 2.0 if i == 0 else jax.nn.sigmoid(x @ w) + x
        return jnp.sum(x**2)

    check(loss, dense_chain(5), BATCH_X, 4)


def test_two_kinds_of_layers_in_turn_are_one_block_of_two():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for i, w in enumerate(params["layers"]):
            x = jnp.tanh(x @ w) if i % 2 else jax.nn.sigmoid(x @ w) + x
        return jnp.sum((x @ params["out"]) ** 2)

    check(loss, dense_chain(6), BATCH_X, 3)


def test_weights_used_by_every_block_are_shared_and_not_lanes():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w) * params["scale"]
        return jnp.sum((x @ params["out"]) ** 2)

    graph = check(loss, {**dense_chain(3), "scale": weights((W,))[0]}, BATCH_X, 3)
    assert len(graph.chain.slots) == 1
    assert [v.aval.shape for v in graph.chain.shared] in ([(W,)], [(1, W)], [(ROWS, W)])


def test_one_weight_for_all_layers_is_a_chain_with_shared_weights():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for _ in range(4):
            x = jnp.tanh(x @ params["w"]) + x
        return jnp.sum(x**2)

    graph = check(loss, {"in": weights((W, W))[0], "w": weights((W, W), seed=1)[0]}, BATCH_X, 4)
    assert graph.chain.slots == ()
    assert [v.aval.shape for v in graph.chain.shared] == [(W, W)]


def test_a_tied_table_is_read_before_and_after_the_blocks():
    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).sum()

    params = {"table": weights((9, W))[0], "layers": weights(*[(W, W)] * 3)}
    graph = check(loss, params, {"tokens": np.array([[1, 2], [8, 0]])}, 3)
    assert graph.prologue_shared and graph.epilogue_shared


def test_a_mask_that_all_blocks_read_is_a_side_input():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        mask = jnp.where(batch["keep"], 0.0, -5.0)
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w + mask)
        return jnp.sum(x**2)

    batch = {**BATCH_X, "keep": np.array([[True, False, True, True]] * ROWS)}
    graph = check(loss, dense_chain(3), batch, 3)
    assert len(graph.chain.rows) == 1
    assert graph.side.outvars


def test_a_mask_made_anew_in_every_layer_is_made_once():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w + jnp.where(batch["keep"], 0.0, -5.0))
        return jnp.sum(x**2)

    batch = {**BATCH_X, "keep": np.array([[True, False, True, True]] * ROWS)}
    graph = check(loss, dense_chain(3), batch, 3)
    assert sum(e.primitive.name == "select_n" for e in graph.program.eqns) == 1


def test_a_value_that_skips_the_chain_travels_with_the_carry():
    def loss(params, batch):
        first = x = batch["x"] @ params["in"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
        return jnp.sum((x @ params["out"]) ** 2 + jnp.sin(first))

    graph = check(loss, dense_chain(3), BATCH_X, 3)
    assert graph.chain.num_carry == 2


def test_a_value_that_every_block_reads_travels_with_the_carry():
    def loss(params, batch):
        first = x = batch["x"] @ params["in"]
        for w in params["layers"]:
            x = jnp.tanh(x @ w) + first
        return jnp.sum(x**2)

    graph = check(loss, dense_chain(4), BATCH_X, 4)
    assert graph.chain.num_carry == 2


def test_a_second_carry_that_the_blocks_sum_up_is_found():
    def loss(params, batch):
        x, penalty = batch["x"] @ params["in"], 0.0
        for w in params["layers"]:
            change = jnp.tanh(x @ w)
            x, penalty = x + change, penalty + jnp.sum(change**2)
        return jnp.sum(x**2) + penalty

    graph, inputs = cut(loss, dense_chain(5), BATCH_X)
    assert graph.chain.length >= 4
    np.testing.assert_allclose(run(graph, inputs)[0], loss(dense_chain(5), BATCH_X), rtol=1e-12)


def test_a_hidden_value_of_an_inner_block_that_is_returned_keeps_its_value():
    def loss(params, batch):
        x, seen = batch["x"] @ params["in"], None
        for i, w in enumerate(params["layers"]):
            x = x + jnp.tanh(x @ w)
            seen = x if i == 1 else seen
        return jnp.sum(x**2), seen

    params = dense_chain(6)
    graph, inputs = cut(loss, params, BATCH_X)
    for actual, expected in zip(run(graph, inputs), loss(params, BATCH_X), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_outputs_that_are_inputs_or_of_the_batch_alone_or_of_the_parameters_alone_keep_their_values():
    def loss(params, batch):
        return mlp(params, batch), batch["x"], batch["x"].sum(), params["out"], params["out"].sum(), 3.0

    check(loss, dense_chain(3), BATCH_X, 3)


def attention(x, layer):
    q, k, v = (jnp.tanh(x @ layer[n]) for n in "qkv")
    return x + jax.nn.softmax(q @ k.T) @ v @ layer["o"]


def attention_layers(length):
    return [dict(zip("qkvo", weights(*[(W, W)] * 4, seed=i))) for i in range(length)]


@pytest.mark.parametrize("length", [2, 4])
def test_q_k_v_inside_a_layer_are_not_taken_for_layers(length):
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for layer in params["layers"]:
            x = attention(x, layer)
        return jnp.sum(x**2)

    graph = check(loss, {**dense_chain(0), "layers": attention_layers(length)}, BATCH_X, length)
    assert len(graph.chain.slots) == 4


def test_q_k_v_of_a_single_layer_are_no_chain():
    def loss(params, batch):
        return jnp.sum(attention(batch["x"] @ params["in"], params["layer"]) ** 2)

    check(loss, {"in": weights((W, W))[0], "layer": attention_layers(1)[0]}, BATCH_X, 0)


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_scan_over_stacked_layers_is_a_chain(unroll):
    def loss(params, batch):
        def layer(x, w):
            return x + jnp.tanh(x @ (2 * w)) * params["scale"], None

        x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["stack"], unroll=unroll)
        return jnp.sum(x**2)

    params = {"in": weights((W, W))[0], "scale": weights((W,))[0], "stack": weights((5, W, W))[0]}
    graph = check(loss, params, BATCH_X, 5)
    assert graph.chain.slots[0].stack is not None
    assert any(e.primitive.name == "mul" for e in graph.chain.lane_prepare.eqns)


@pytest.mark.parametrize(("kind", "length"), [("over time", 0), ("reverse", 0), ("uses outputs", 3)])
def test_a_scan_over_layers_is_a_chain_even_if_every_output_is_read_and_other_scans_are_kept_whole(kind, length):
    def loss(params, batch):
        def cell(h, x):
            h = jnp.tanh(h @ params["w"] + x)
            return h, h

        start = batch["x"] @ params["in"]
        if kind == "over time":
            h, _ = jax.lax.scan(cell, start, jnp.broadcast_to(batch["x"], (3, ROWS, W)))
            return jnp.sum(h**2)
        xs = params["stack"]
        h, hs = jax.lax.scan(cell, start, xs, reverse=kind == "reverse")
        return jnp.sum(h**2) + (jnp.sum(hs) if kind == "uses outputs" else 0)

    params = {"in": weights((W, W))[0], "w": weights((W, W), seed=1)[0], "stack": weights((3, W))[0]}
    check(loss, params, BATCH_X, length)


def test_numbers_that_differ_per_layer_are_lanes():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for i, w in enumerate(params["layers"]):
            x = x + jnp.tanh(x @ w) * (0.1 * (i + 1))
        return jnp.sum(x**2)

    graph = check(loss, dense_chain(4), BATCH_X, 4)
    assert len(graph.chain.slots) == 2


def test_casts_and_transposes_of_the_weights_of_each_layer_stay_outside_the_block():
    def loss(params, batch):
        x = batch["x"] @ params["in"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w.T.astype(jnp.float32).astype(jnp.float64))
        return jnp.sum(x**2)

    graph = check(loss, dense_chain(3), BATCH_X, 3)
    assert not any(e.primitive.name in ("transpose", "convert_element_type") for e in graph.chain.body.eqns)
    (group,) = lane_leaves(graph.program, [s.values for s in graph.chain.slots])
    assert len(set(group)) == 3 and set(group) <= set(graph.program.invars)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("length", [2, 4])
def test_the_layers_of_gpt2_are_blocks_of_equal_shape(length, scan_layers):
    config = GPT2Config(
        vocab_size=16,
        max_length=8,
        num_layers=length,
        num_heads=2,
        width=8,
        scan_layers=scan_layers,
        dtype=jnp.float64,
        param_dtype=jnp.float64,
    )
    model = GPT2(config)
    tokens = np.random.default_rng(0).integers(0, 16, (2, 5))
    params = jax.jit(model.init)(jax.random.key(0), tokens)

    def loss(params, batch):
        logits = model.apply(params, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()

    graph = check(jax.jit(loss), params, tokens, length, compiled=True)
    assert [a.shape for a in graph.chain.carry_avals] == [(2, 5, 8)]
    assert graph.chain.source


def test_a_model_of_flax_dense_layers_names_the_users_line_as_the_source():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = nn.tanh(nn.Dense(W, param_dtype=jnp.float64)(x))
            return x

    params = Layers().init(jax.random.key(0), BATCH_X["x"])
    graph = check(lambda p, b: jnp.sum(Layers().apply(p, b["x"]) ** 2), params, BATCH_X, 4)
    assert __file__ in graph.chain.source


def test_dependence_is_the_union_of_what_the_operands_depend_on():
    closed = inline(jax.make_jaxpr(lambda p, b: (p * 2, b + 1, p * b, jnp.zeros(())))(1.0, 2.0))
    program, _ = constants_to_inputs(closed)
    domain = dependence(program, dict(zip(program.invars, [PARAMETER, BATCH])))
    assert [domain[v] for v in program.outvars[:3]] == [PARAMETER, BATCH, PARAMETER | BATCH]


OPERATIONS = {
    "residual": lambda x, w, extra: x + jnp.tanh(x @ w),
    "plain": lambda x, w, extra: jnp.tanh(x @ w),
    "gate": lambda x, w, extra: x * jax.nn.sigmoid(x @ w.T) + 0.5,
    "norm": lambda x, w, extra: (x - x.mean(-1, keepdims=True)) * w[0],
    "mask": lambda x, w, extra: jnp.where(extra["mask"] > 0, x, x @ w),
    "shared": lambda x, w, extra: x @ extra["shared"] + w[1],
    "attention": lambda x, w, extra: x + jax.nn.softmax((x @ w) @ (x @ w.T).T) @ x,
}


@settings(max_examples=40, deadline=None)
@given(
    block=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    length=st.integers(1, 5),
    before=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=2),
    after=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=2),
    skip=st.booleans(),
    hidden=st.booleans(),
)
def test_random_chains_of_random_blocks_keep_their_values(block, length, before, after, skip, hidden):
    operations = [*before, *block * length, *after]
    params = {
        "in": weights((W, W))[0],
        "layers": weights(*[(W, W)] * len(operations), seed=3),
        "shared": weights((W, W), seed=4)[0],
    }
    batch = {**BATCH_X, "mask": np.array([[1, 0, 1, 0]] * ROWS)}

    def loss(params, batch):
        first = x = batch["x"] @ params["in"]
        middle = x
        for i, (name, w) in enumerate(zip(operations, params["layers"])):
            x = OPERATIONS[name](x, w, {"mask": batch["mask"], "shared": params["shared"]})
            middle = x if i == len(operations) // 2 else middle
        total = jnp.sum(jnp.cos(x))
        total += jnp.sum(first) if skip else 0
        return (total, middle) if hidden else (total, x)

    graph, inputs = cut(loss, params, batch)
    if length >= 2 and not hidden:
        assert graph.chain is not None
    for actual, expected in zip(run(graph, inputs), jax.tree.leaves(loss(params, batch)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def tower(layers, x, read=None):
    for w in layers:
        x = x + jnp.tanh((x if read is None else x * read) @ w)
    return x


def two_towers(length_a, length_b):
    return {
        "first": weights(*[(W, W)] * length_a),
        "second": weights(*[(W, W)] * length_b, seed=1),
        "norm": weights((W,), seed=2)[0],
        "table": weights((7, W), seed=3)[0],
        "head": weights((W, 3), seed=4)[0],
    }


@pytest.mark.parametrize("lengths", [(3, 4), (4, 2)])
def test_an_encoder_and_a_decoder_that_reads_its_output_are_two_chains(lengths):
    """Case 7: every block of the second chain reads what the first one returns."""

    def loss(p, b):
        memory = tower(p["first"], b["x"] @ p["table"][:W]) * p["norm"]
        y = tower(p["second"], p["table"][b["ids"]], memory)
        return jnp.sum((y @ p["head"]) ** 2), jnp.sum(memory, 1), y

    graph, inputs = cut(loss, two_towers(*lengths), {**BATCH_X, "ids": np.array([2, 5])})
    assert [c.length for c in graph.chains] == [lengths[0], 1, lengths[1]]
    assert len(graph.carry_avals) <= 4
    for actual, expected in zip(run(graph, inputs), loss(two_towers(*lengths), {**BATCH_X, "ids": np.array([2, 5])})):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def test_layers_of_two_kinds_after_each_other_are_two_chains_on_one_carry():
    def loss(p, b):
        x = tower(p["first"], b["x"] * p["norm"])
        for w in p["second"]:
            x = x + jnp.sin(x @ w) @ w.T
        return jnp.sum(x @ p["head"])

    graph, inputs = cut(loss, two_towers(3, 3), BATCH_X)
    assert [c.length for c in graph.chains] == [3, 3]
    assert len(graph.carry_avals) == 1
    np.testing.assert_allclose(run(graph, inputs)[0], loss(two_towers(3, 3), BATCH_X), rtol=1e-12)


def test_a_value_before_all_chains_that_is_read_after_them_keeps_its_slot():
    def loss(p, b):
        first = b["x"] * p["norm"]
        a = tower(p["first"], first)
        y = tower(p["second"], jnp.cos(a) + first)
        return jnp.sum(y * first) + jnp.sum(a @ p["head"])

    graph, inputs = cut(loss, two_towers(4, 3), BATCH_X)
    assert [c.length for c in graph.chains if c.length > 1] == [4, 3]
    np.testing.assert_allclose(run(graph, inputs)[0], loss(two_towers(4, 3), BATCH_X), rtol=1e-12)


def test_masks_that_each_block_draws_of_the_batch_are_made_in_the_block():
    def loss(p, b):
        x = b["x"] * p["norm"]
        for n, w in enumerate(p["first"]):
            x = x + jnp.where(b["x"] * (n + 0.5) > 0.1, jnp.tanh(x @ w), 0.0)
        return jnp.sum(x)

    graph = check(loss, two_towers(4, 2), BATCH_X, 4)
    assert not graph.side.eqns


@pytest.mark.parametrize("scanned", [False, True])
def test_values_of_every_block_that_are_read_after_the_blocks_are_collected(scanned):
    def loss(p, b):
        x, seen = b["x"] * p["norm"], []
        if scanned:

            def body(x, w):
                y = x + jnp.tanh(x @ w)
                return y, jnp.sum(y**2, 1)

            x, seen = jax.lax.scan(body, x, jnp.stack(p["first"]))
            seen = list(seen)
        else:
            for w in p["first"]:
                x = x + jnp.tanh(x @ w)
                seen.append(jnp.sum(x**2, 1))
        return jnp.sum(x @ p["head"]) + sum((n + 1) * jnp.sum(s) for n, s in enumerate(seen)), seen[1]

    graph = check(loss, two_towers(4, 2), BATCH_X, 4)
    assert [stashed_once(graph.chains)[n] for n, a in enumerate(graph.carry_avals) if a.shape == (4, ROWS)] == [True]
