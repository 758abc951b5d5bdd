"""The layouts of the models of the package at full size are Megatron's, found on the blocks of a real train step.

Only shapes are traced; of each model four layers of its full width.
"""

import functools
import re
import time
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from merak_jax.models import bert, gpt2, llama, mixtral, t5, vit
from merak_jax.partition.lane_leaves import lane_leaves
from merak_jax.partition.tensor import tensor_layout
from merak_jax.runtime.loss import separate
from merak_jax.tracing.jaxprs import evaluate, slice_program
from merak_jax.tracing.step import trace

ROWS, OF_MICROBATCH = 8, 2
LAYERS = {"num_layers": 4, "dtype": jnp.bfloat16}
SECONDS = 2.0


def tokens(length, dtype=jnp.int32):
    return jax.ShapeDtypeStruct((ROWS, length), dtype)


def next_token(model, length):
    def loss(variables, key, batch):
        logits = model.apply(variables, batch[0], False, rngs={"dropout": key})
        return gpt2.next_token_loss(logits, batch[1])

    return model, loss, (tokens(length),) * 2, 1


def make_gpt2(name):
    config = gpt2.GPT2Config(**{**gpt2.PUBLISHED_SIZES[name], **LAYERS})
    return next_token(gpt2.GPT2(config), 1024)


def make_llama(name):
    return next_token(llama.Llama(llama.LlamaConfig.from_name(name, **LAYERS)), 4096)


def make_mixtral(name):
    config = mixtral.MixtralConfig.from_name(name, **LAYERS)
    model = mixtral.Mixtral(config)

    def loss(variables, key, batch):
        logits, sown = model.apply(variables, batch[0], False, rngs={"dropout": key}, mutable="losses")
        return mixtral.mixtral_loss(config, logits, sown["losses"], batch[1])

    return model, loss, (tokens(4096),) * 2, 1


def make_bert(name):
    model = bert.BertForMaskedLM(bert.BertConfig.from_name(name, **LAYERS))

    def loss(variables, key, batch):
        read, targets, is_masked, valid = batch
        logits = model.apply(variables, read, None, valid, deterministic=False, rngs={"dropout": key})
        return bert.masked_token_loss(logits, targets, is_masked)

    return model, loss, (tokens(512),) * 2 + (tokens(512, jnp.bool_),) * 2, 1


def make_vit(name):
    config = vit.ViTConfig(**{**vit.PUBLISHED_SIZES[name], **LAYERS, "drop_path": 0.2})
    model = vit.ViT(config)

    def loss(variables, key, batch):
        return vit.class_loss(model.apply(variables, batch[0], False, rngs={"dropout": key}), batch[1])

    images = jax.ShapeDtypeStruct((ROWS, 224, 224, 3), jnp.float32)
    return model, loss, (images, jax.ShapeDtypeStruct((ROWS,), jnp.int32)), 1


def make_t5(name):
    model = t5.T5(t5.T5Config.from_name(name, **LAYERS))

    def loss(variables, key, batch):
        source, decoder, source_valid, valid = batch
        shifted = t5.shift_right(decoder)
        logits = model.apply(variables, source, shifted, source_valid, valid, False, rngs={"dropout": key})
        return t5.sequence_loss(logits, decoder, valid)

    return model, loss, (tokens(512), tokens(128), tokens(512, jnp.bool_), tokens(128, jnp.bool_)), 2


class Mlp(nn.Module):
    """Residual layers of two matrices, [rows, 1024]."""

    @nn.compact
    def __call__(self, x):
        for n in range(4):
            hidden = nn.relu(nn.Dense(4096, name=f"h_{n}_up")(x))
            x = x + nn.Dense(1024, name=f"h_{n}_down")(hidden)
        return x


def make_mlp(_):
    def loss(variables, key, batch):
        return jnp.mean((Mlp().apply(variables, batch[0]) - batch[1]) ** 2)

    return Mlp(), loss, (tokens(1024, jnp.float32),) * 2, 1


MAKERS = {"gpt2": make_gpt2, "llama": make_llama, "mixtral": make_mixtral, "bert": make_bert}
MAKERS |= {"vit": make_vit, "t5": make_t5, "mlp": make_mlp}


@functools.cache
def blocks_of(name):
    """Of each chain of blocks with parameters: the chain, the block with what prepares it, positions and names."""
    model, loss, batch, num_inputs = MAKERS[name.split("-")[0]](name)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(lambda *inputs: {"params": model.init(keys, *inputs)["params"]}, *batch[:num_inputs])

    def train_step(variables, key, batch):
        return jax.tree.map(jnp.subtract, variables, jax.grad(loss)(variables, key, batch))

    shapes = (variables, jax.eval_shape(lambda: jax.random.key(0)), batch)
    full, micro = (trace(train_step, shapes, (2,), **rows) for rows in ({}, {"rows": 2 * OF_MICROBATCH}))
    program = separate(full, micro, OF_MICROBATCH, 2, "full_batch")
    paths = dict(zip(full.jaxpr.jaxpr.invars, full.leaf_path))
    flat = program.found.program
    blocks = []
    for chain in program.found.chains:
        leaves = [group[0] for group in lane_leaves(flat, [s.values for s in chain.slots])]
        positions = [chain.num_carry + flat.invars.index(v) for v in leaves]
        names = [paths[full.equation.invars[program.inputs[v].index]] for v in leaves]
        kept = [n for n, path in enumerate(names) if "'params'" in path]
        if kept:
            short = ["/".join(re.findall(r"\w+", names[n].split("h_0")[1])).strip("_") for n in kept]
            blocks.append((chain, _with_preparation(flat, chain), [positions[n] for n in kept], short))
    return blocks


def _with_preparation(flat, chain):
    """A block that reads the inputs of the loss, as the parameters are stored."""
    raw = slice_program(flat.eqns, flat.invars, [s.values[0] for s in chain.slots])

    def block(carry, inputs, shared, rows):
        lanes = evaluate(chain.lane_prepare, [], *evaluate(raw, [], *inputs), *shared)
        return evaluate(chain.body, [], *carry, *lanes, *shared, *rows)

    parts = (chain.body.invars[: chain.num_carry], flat.invars, chain.shared, chain.rows)
    return jax.make_jaxpr(block)(*([jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in vs] for vs in parts))


def check(name, ways, expected, sums, sequence, number=0):
    """The splits by name (all other parameters are whole), the sums by direction and shape, and the token dimension."""
    chain, jaxpr, positions, names = blocks_of(name)[number]
    start = time.process_time()
    layout = tensor_layout(jaxpr, positions, ways, carry_invars=range(chain.num_carry))
    seconds = time.process_time() - start
    print(name, number, ways, sum(c.nbytes for c in layout.collectives), f"{seconds:.3f}")
    assert seconds < SECONDS
    assert {n: d for n, d in zip(names, layout.splits) if d is not None} == expected
    found = Counter((c.direction, c.shape) for c in layout.collectives for _ in range(c.times))
    assert found == Counter(sums)
    assert all(c.dtype == ("float32" if name == "mlp" else "bfloat16") for c in layout.collectives)
    assert layout.sequence == sequence
    # What runs reads what was prepared for it: the same, found there.
    operands = range(chain.num_carry, chain.num_carry + len(chain.lane_prepare.outvars))
    run = tensor_layout(chain.body, operands, ways, carry_invars=range(chain.num_carry))
    assert run.collectives == layout.collectives and run.sequence == sequence


def linear(split, *names, bias=False):
    """Kernels of these layers, with the biases that go with a column split."""
    kernels = {f"{n}/kernel": split for n in names}
    return kernels | {f"{n}/bias": 0 for n in names if bias and split == 1}


def attention(*, bias=False, module="attention", keys=True):
    columns = [f"{module}/{n}" for n in ("query", "key", "value")[: 3 if keys else 1]]
    return linear(1, *columns, bias=bias) | linear(0, f"{module}/output")


def mlp(*columns, bias=False):
    return linear(1, *(f"mlp/{n}" for n in columns), bias=bias) | linear(0, "mlp/down")


def two_each_way(*shape):
    return {("forward", shape): 2, ("backward", shape): 2}


@pytest.mark.parametrize(
    "name, ways, shape",
    [("gpt2-medium", n, (2, 1024, 1024)) for n in (2, 4, 8)]
    + [("gpt2-xl", 5, (2, 1024, 1600))]
    + [("bert-large-uncased", n, (2, 512, 1024)) for n in (2, 4, 8)],
)
def test_gpt2_and_bert_with_biases(name, ways, shape):
    expected = attention(bias=True) | mlp("up", bias=True)
    # 5 divides neither the 1024 tokens nor the 2 rows.
    check(name, ways, expected, two_each_way(*shape), (1 if ways != 5 else None,))


def test_25_heads_do_not_divide_by_4_and_the_mlp_is_split():
    shape = (2, 1024, 1600)
    check("gpt2-xl", 4, mlp("up", bias=True), {("forward", shape): 1, ("backward", shape): 1}, (1,))


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_vit_with_tokens_that_do_not_divide(ways):
    expected = attention(bias=True) | mlp("up", bias=True)
    # 197 tokens of 2 images.
    check("vit-l-16", ways, expected, two_each_way(2, 197, 1024), (0 if ways == 2 else None,))


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_llama_up_to_its_key_heads(ways):
    check("llama-3-8b", ways, attention() | mlp("gate", "up"), two_each_way(2, 4096, 4096), (1,))


def test_llama_beyond_its_key_heads_keeps_keys_and_values_whole():
    sums = {**two_each_way(2, 4096, 4096), ("backward", (2, 4096, 8, 128)): 2}
    check("llama-3-8b", 16, attention(keys=False) | mlp("gate", "up"), sums, (1,))


@pytest.mark.parametrize("ways", [2, 8, 16])
def test_mixtral_splits_the_hidden_width_of_every_expert_and_keeps_the_router_whole(ways):
    # The router sorts its experts, so their dimension stays whole; its gates get their gradient from all parts.
    sums = {**two_each_way(2, 4096, 4096), ("backward", (2, 4096, 8, 1)): 1}
    if ways == 16:
        sums["backward", (2, 4096, 8, 128)] = 2
    experts = {"moe/gate": 2, "moe/up": 2, "moe/down": 1}
    # With the carry go the z-losses: of this block, and of all layers.
    check("mixtral-8x7b", ways, attention(keys=ways != 16) | experts, sums, (1, 1, 2))


@pytest.mark.parametrize("ways", [2, 4, 8, 32])
def test_t5_encoder_and_decoder(ways):
    check("t5-3b", ways, attention() | mlp("up"), two_each_way(2, 512, 1024), (None, 1, None))
    expected = attention() | attention(module="cross_attention") | mlp("up")
    stream, memory = (2, 128, 1024), (2, 512, 1024)
    sums = {("forward", stream): 3, ("backward", stream): 3, ("backward", memory): 1}
    check("t5-3b", ways, expected, sums, (1, None, None), number=1)


@pytest.mark.parametrize("ways", [2, 4])
def test_plain_mlp(ways):
    expected = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}
    shape = (2, 1024)
    sums = {("forward", shape): 1, ("backward", shape): 1}
    check("mlp", ways, expected, sums, (0 if ways == 2 else None,))
