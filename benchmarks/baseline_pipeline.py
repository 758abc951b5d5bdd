"""The pipeline that a JAX user writes by hand today: GPipe as one scan over ticks, differentiated, remat per block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from merak_jax.models.gpt2 import GPT2, Block, GPT2Config, next_token_loss

P = PartitionSpec
HEADS = ("last", "split", "replicated")

# Megatron: query, key, value and up split their outputs, output and down their inputs; the rest is whole.
_TENSOR_DIMENSION = {
    ("query", "kernel"): 1,
    ("key", "kernel"): 1,
    ("value", "kernel"): 1,
    ("query", "bias"): 0,
    ("key", "bias"): 0,
    ("value", "bias"): 0,
    ("output", "kernel"): 0,
    ("up", "kernel"): 1,
    ("up", "bias"): 0,
    ("down", "kernel"): 0,
}


def stack_blocks(params: dict, config: GPT2Config, stages: int) -> dict:
    """GPT2's parameters with the blocks stacked: `{"blocks": [stages, blocks per stage, ...], "shared": the rest}`."""
    blocks = [params[f"h_{n}"] for n in range(config.num_layers)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs).reshape(stages, -1, *xs[0].shape), *blocks)
    return {"blocks": stacked, "shared": {k: v for k, v in params.items() if not k.startswith("h_")}}


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """The stacks over `pipe` and, as Megatron does, `tensor`; the vocabulary over `tensor`; the rest whole."""

    def spec(path, leaf):
        names = [getattr(k, "key", getattr(k, "name", None)) for k in path]
        if "blocks" in names:
            split = _TENSOR_DIMENSION.get(tuple(names[-2:]))
            return P("pipe", None, *("tensor" if d == split else None for d in range(leaf.ndim - 2)))
        return P("tensor") if "token_embedding" in names else P()

    return jax.tree_util.tree_map_with_path(lambda path, leaf: NamedSharding(mesh, spec(path, leaf)), state)


def pipeline_loss(config: GPT2Config, mesh: Mesh, num_microbatches: int, head: str = "last"):
    """`loss(params, tokens, targets)` of stacked parameters, computed by GPipe; tokens and targets `[batch, length]`.

    `head`: where norm, logits and loss run: behind a `cond` on the last stage ("last"), every stage on its share of the
    microbatches ("split"), or on all stages with the last one's result kept ("replicated").
    """
    stages = mesh.shape["pipe"]
    block = Block(config)
    embed = nn.Embed(config.vocab_size, config.width)
    norm = nn.LayerNorm(epsilon=config.layer_norm_epsilon)

    def one_block(x, params):
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        return block.apply({"params": params}, x, mask, True)

    @jax.checkpoint
    def head_loss(shared, x, targets):
        x = norm.apply({"params": shared["norm_f"]}, x)
        logits = embed.apply({"params": shared["token_embedding"]}, x, method="attend")
        return next_token_loss(logits, targets)

    def mean_loss(shared, hidden, targets):
        def add(total, both):
            return total + head_loss(shared, *both), None

        total, _ = lax.scan(add, jnp.zeros(()), (hidden, targets))
        return total / num_microbatches

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        axis_names={"data", "pipe"},
        check_vma=False,
        in_specs=({"blocks": P("pipe"), "shared": P()}, P("data"), P("data")),
        out_specs=P(("data", "pipe")),
    )
    def local_losses(params, tokens, targets):
        stage, shared = lax.axis_index("pipe"), params["shared"]
        own_blocks = jax.tree.map(lambda x: x[0], params["blocks"])
        tokens, targets = (x.reshape(num_microbatches, -1, x.shape[-1]) for x in (tokens, targets))
        length = tokens.shape[-1]

        def first_carry(tokens):
            return (
                embed.apply({"params": shared["token_embedding"]}, tokens)
                + shared["position_embedding"]["embedding"][:length]
            )

        def tick(received, tokens):
            x = jnp.where(stage == 0, first_carry(tokens), received)
            x, _ = lax.scan(lambda x, p: (jax.checkpoint(one_block)(x, p), None), x, own_blocks)
            return lax.ppermute(x, "pipe", [(s, s + 1) for s in range(stages - 1)]), x

        padded = jnp.concatenate([tokens, jnp.zeros((stages - 1, *tokens.shape[1:]), tokens.dtype)])
        _, sent = lax.scan(tick, jnp.zeros((*tokens.shape[1:], config.width)), padded)
        hidden, is_last = sent[stages - 1 :], stage == stages - 1
        if head == "last":
            loss = lax.cond(is_last, mean_loss, lambda *_: jnp.zeros(()), shared, hidden, targets)
        elif head == "split":
            hidden = lax.psum_scatter(jnp.where(is_last, hidden, 0), "pipe", tiled=True)
            share = num_microbatches // stages
            loss = mean_loss(shared, hidden, lax.dynamic_slice_in_dim(targets, stage * share, share))
        else:
            loss = jnp.where(is_last, mean_loss(shared, hidden, targets), 0)
        return loss[None]

    def loss(params, tokens, targets):
        return local_losses(params, tokens, targets).sum() / mesh.shape["data"]

    return loss


def pipelined_step(
    config: GPT2Config,
    mesh: Mesh,
    num_microbatches: int,
    tx: optax.GradientTransformation,
    head: str = "last",
    compiler_options: dict | None = None,
):
    """`(place, step)`: `place(params)` makes a TrainState on the mesh of GPT2's parameters; `step(state, batch)` is jitted.

    `batch`: `{"tokens", "targets"}`, `[batch, length]` each; the step returns `(state, loss)` and donates the state.
    """
    model = GPT2(config)

    def create(params):
        return TrainState.create(apply_fn=model.apply, params=stack_blocks(params, config, mesh.shape["pipe"]), tx=tx)

    def shardings_of(params):
        return state_shardings(jax.eval_shape(create, params), mesh)

    def place(params):
        return jax.jit(create, out_shardings=shardings_of(params))(params)

    loss = pipeline_loss(config, mesh, num_microbatches, head)
    shapes = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], jax.random.key(0))
    state, rows = shardings_of(shapes), NamedSharding(mesh, P("data"))

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state.params, batch["tokens"], batch["targets"])
        return state.apply_gradients(grads=gradients), value

    return place, jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(state, {"tokens": rows, "targets": rows}),
        out_shardings=(state, None),
        compiler_options=compiler_options,
    )


def accumulated_step(model: GPT2, num_microbatches: int):
    """`step(state, batch)` on one device: gradients of the unrolled model summed over microbatches by one scan."""

    def step(state, batch):
        def loss(params, batch):
            return next_token_loss(model.apply({"params": params}, batch["tokens"]), batch["targets"])

        def add(sums, batch):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(state.params, batch)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        batch = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        sums, _ = lax.scan(add, zeros, batch)
        value, gradients = jax.tree.map(lambda x: x / num_microbatches, sums)
        return state.apply_gradients(grads=gradients), value

    return step
