"""Blocks split as the layout says compile to the all-reduces it predicts, and gather nothing large."""

import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from merak_jax.models import llama
from merak_jax.partition.tensor import tensor_layout
from merak_jax.tracing.jaxprs import evaluate, evaluate_equation

MOVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
DIMENSIONS = r"\[([\d,]*)\]"
OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


class Block(nn.Module):
    """Four heads for the keys and for the queries."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))


class Grouped(nn.Module):
    """A block of Llama: two heads of keys and values for `heads` of queries."""

    heads: int

    @nn.compact
    def __call__(self, x):
        sizes = {"num_heads": self.heads, "num_kv_heads": 2, "width": 128, "hidden_width": 320}
        config = llama.LlamaConfig(**sizes, param_dtype=x.dtype)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return llama.Block(config)(x, llama.rotary_table(config, x.shape[1]), mask, True)


def compiled(block, shape, ways):
    """The layout of a block, and what its forward pass and its gradient move: a Counter of "kind:shapes" each."""
    x = jax.random.normal(jax.random.key(1), shape, jnp.float64)
    shapes = jax.eval_shape(block.init, jax.random.key(0), x)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    leaves = [jax.random.normal(k, a.shape, jnp.float64) / 8 for k, a in zip(keys, leaves)]
    traced = jax.make_jaxpr(lambda x, *leaves: block.apply(tree.unflatten(leaves), x))(x, *leaves)
    layout = tensor_layout(traced, range(1, 1 + len(leaves)), ways)
    mesh = jax.make_mesh((ways,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ways])
    whole = [id(traced.eqns[i]) for i, d in layout.activation_splits.items() if d is None]

    def constrained(eqn, operands):
        if id(eqn) in whole:
            return [jax.lax.with_sharding_constraint(evaluate_equation(eqn, operands)[0], NamedSharding(mesh, P()))]

    def forward(special, x, *leaves):
        return evaluate(traced.jaxpr, traced.consts, x, *leaves, special=special)[0]

    def backward(special, x, *leaves):
        return jax.grad(lambda args: jnp.sum(forward(special, *args) ** 2))((x, *leaves))

    specs = [P() if d is None else P(*[None] * d, "tensor") for d in layout.splits]
    where = [NamedSharding(mesh, s) for s in (P(), *specs)]
    args = [jax.device_put(a, s) for a, s in zip((x, *leaves), where)]
    moved = []
    for f, out in ((forward, where[0]), (backward, tuple(where))):
        step = jax.jit(f, static_argnums=0, in_shardings=where, out_shardings=out, compiler_options=OPTIONS)
        program = step.lower(constrained, *args).compile()
        found = re.findall(f"= (.*?) ({MOVES})(?:-start)?[(]", program.as_text())
        moved.append(Counter(f"{kind}:{'+'.join(re.findall(DIMENSIONS, shapes))}" for shapes, kind in found))
        expected = jax.tree.leaves(jax.device_get(jax.jit(f, static_argnums=0)(None, x, *leaves)))
        got = jax.tree.leaves(jax.device_get(program(*args)))
        scale = max(abs(a).max() for a in expected)
        assert max(abs(a - b).max() for a, b in zip(got, expected, strict=True)) < 1e-12 * scale
    return layout, *moved


@pytest.mark.parametrize("ways", [2, 4])
def test_compiled_block_has_two_all_reduces_each_way_and_gathers_nothing(ways):
    layout, forward, both = compiled(Block(), (2, 32, 64), ways)
    assert (layout.count("forward"), layout.count("backward")) == (2, 2)
    carry = "2,32,64"
    assert forward == {f"all-reduce:{carry}": 2}
    # On CPU the input gradients of query, key and value are one all-reduce of a tuple.
    assert both == {f"all-reduce:{carry}": 3, f"all-reduce:{carry}+{carry}+{carry}": 1}


@pytest.mark.parametrize("heads, ways", [(4, 4), (16, 8)])
def test_compiled_grouped_heads_move_beside_the_carry_only_gradients_of_keys_and_values(heads, ways):
    layout, forward, both = compiled(Grouped(heads), (2, 24, 128), ways)
    # The gradients of the two key heads and of their values are summed too.
    assert (layout.count("forward"), layout.count("backward")) == (2, 4)
    carry, features = "2,24,128", str(128 // heads)
    assert forward == {f"all-reduce:{carry}": 2}
    # On CPU the input gradients of gate and up are one all-reduce of a tuple.
    whole = {f"all-reduce:{carry}": 3, f"all-reduce:{carry}+{carry}": 1}
    assert {move: n for move, n in both.items() if carry in move} == whole
    # They are summed within a group, then gathered: [batch, sequence, key heads, features] in some order.
    others = [move.split(":") for move in both.elements() if carry not in move]
    assert {kind for kind, _ in others} == {"all-reduce", "all-gather"}
    for kind, key_heads in (("all-reduce", "1"), ("all-gather", "2")):
        arrays = [shape for k, shapes in others if k == kind for shape in shapes.split("+")]
        assert [sorted(shape.split(",")) for shape in arrays] == [sorted(["2", "24", key_heads, features])] * 2
