"""Train a byte-level GPT-2 on real text with data, pipeline and tensor parallelism in one program.

Without options: 3 million parameters on Python's own help texts, over 2 x 2 x 2 devices, which a machine
without accelerators emulates. Ends with losses, a sample, pictures and a proof against the single-device step.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

# The proof runs in processes of its own, which need GPU memory that JAX would otherwise take whole.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import proof
import report
from flax.training.train_state import TrainState
from text_data import VOCABULARY, DataError, TextData, read_text

import merak_jax
from merak_jax.errors import MerakError
from merak_jax.models.gpt2 import GPT2, GPT2Config, generate, next_token_loss

HELD_OUT_BATCHES = 8
SAMPLE_BYTES = 300


def train_step(state, batch):
    """An ordinary Flax train step: nothing in it knows about devices."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["targets"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.global_norm(grads)}


def make_model(args) -> GPT2:
    return GPT2(
        GPT2Config(
            vocab_size=VOCABULARY,
            max_length=args.seq,
            num_layers=args.layers,
            num_heads=args.heads,
            width=args.width,
            dtype=jnp.bfloat16 if args.dtype == "bfloat16" else None,
            param_dtype=jnp.float64 if args.dtype == "float64" else jnp.float32,
        )
    )


def make_optimizer(args) -> optax.GradientTransformation:
    """AdamW under a warmed-up cosine; only kernels decay, not biases, norms and embeddings."""
    warmup = max(1, args.steps // 10)
    learning_rate = optax.warmup_cosine_decay_schedule(
        args.lr / warmup, args.lr, warmup, max(args.steps, warmup + 1), end_value=args.lr / 10
    )

    def is_kernel(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=is_kernel),
    )


def make_create_state(model, optimizer):
    def create_state(rng):
        tokens = jnp.zeros((1, model.config.max_length), jnp.int32)
        params = model.init(rng, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return create_state


def parallel_options(args) -> dict:
    data, pipe, tensor = args.mesh
    return {
        "mesh": merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor),
        "num_microbatches": args.microbatches,
        "schedule": args.schedule,
    }


def train(args, data):
    """Train for `args.steps` steps or until Ctrl-C; returns step, state, losses [steps], stopped."""
    step = merak_jax.parallelize(train_step, **parallel_options(args))
    create_state = make_create_state(make_model(args), make_optimizer(args))
    losses = []
    with InterruptFlag() as interrupt:
        state = step.init(create_state, jax.random.key(args.seed))
        step.lower(state, data.train_batch(0))
        print(step.plan, flush=True)
        with report.TrainingProgress(args.steps) as progress:
            for number in range(args.steps):
                if interrupt.stopped:
                    break
                state, metrics = step(state, data.train_batch(number))
                losses.append(float(metrics["loss"]))
                progress.advance(losses[-1], args.batch * args.seq)
    return step, state, losses, interrupt.stopped


class InterruptFlag(contextlib.AbstractContextManager):
    """Makes the first Ctrl-C set `stopped`, so that no step is cut while it owns the donated state."""

    def __enter__(self):
        self.stopped = False
        self._previous = signal.signal(signal.SIGINT, self._stop)
        return self

    def _stop(self, *_):
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._previous)


def summarize(args, data, step, state, losses) -> None:
    """Print final losses and a sample, write the pictures into `args.out`, and say where they are."""
    model = make_model(args)
    params = jax.device_put(jax.device_get(step.unshard(state).params), jax.devices()[0])

    @jax.jit
    def held_out_loss(params, batch):
        return next_token_loss(model.apply({"params": params}, batch["tokens"]), batch["targets"])

    batches = data.held_out_batches(HELD_OUT_BATCHES)
    held_out = float(np.mean([held_out_loss(params, batch) for batch in batches]))
    last = losses[-10:]
    print(f"trained {len(losses)} of {args.steps} steps")
    print(f"train loss     {report.describe_loss(float(np.mean(last)))} (mean of the last {len(last)} steps)")
    print(f"held-out loss  {report.describe_loss(held_out)}")

    prompt = data.held_out_part[: max(1, args.seq // 2)]
    tokens = np.frombuffer(prompt, np.uint8)[None]
    sampled = generate(model, params, tokens, SAMPLE_BYTES, temperature=0.8, rng=jax.random.key(args.seed + 1))
    sample = bytes(np.asarray(sampled[0], np.uint8)).decode(errors="replace")
    print(f"\nsample, after the held-out text {prompt.decode(errors='replace')!r}:\n{sample}\n")

    timeline = args.out / "timeline.svg"
    step.plan.draw(str(timeline))
    curve = report.write_loss_curve(losses, held_out, args.out)
    print(f"wrote {curve} and {timeline}")


def use_devices(number: int) -> None:
    """Emulate `number` CPU devices unless there are as many accelerators; must come before JAX starts."""
    if count_accelerators() < number:
        merak_jax.emulate(number)


def count_accelerators() -> int:
    patterns = ("nvidia[0-9]*", "accel*", "vfio/[0-9]*", "kfd", "dxg")
    has_driver = any(glob.glob(f"/dev/{pattern}") for pattern in patterns)
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not has_driver:
        return 0
    # Asking JAX in this process would start it, and then it's too late to emulate.
    ask = "import jax; devices = jax.devices(); print(0 if devices[0].platform == 'cpu' else len(devices))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    return int(answer.stdout) if answer.returncode == 0 else 0


class DefaultsHelp(argparse.HelpFormatter):
    """Adds the default to the help of every option that has one."""

    def _get_help_string(self, action):
        has_default = action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if has_default else action.help


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with exit code 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def mesh_sizes(text: str) -> list[int]:
    sizes = text.split(",")
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not data,pipe,tensor, for example 2,2,2")
    return [positive(size.strip()) for size in sizes]


def make_parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=DefaultsHelp)
    add = parser.add_argument
    add("--data", type=Path, help="text file or folder of text files, instead of Python's help topics")
    add("--mesh", type=mesh_sizes, default="2,2,2", help="data,pipe,tensor parallel sizes")
    add("--data-parallel", type=positive, help="size of the data axis, instead of --mesh's")
    add("--pipe", type=positive, help="number of pipeline stages, instead of --mesh's")
    add("--tensor", type=positive, help="size of the tensor axis, instead of --mesh's")
    add("--microbatches", type=positive, default=4, help="microbatches per step")
    add("--schedule", choices=["1f1b", "gpipe"], default="1f1b", help="pipeline schedule")
    add("--batch", type=positive, default=16, help="sequences per step")
    add("--steps", type=positive, default=250, help="training steps")
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--width", type=positive, default=256, help="features per token")
    add("--heads", type=positive, default=8, help="attention heads")
    add("--seq", type=positive, default=64, help="bytes per sequence")
    add("--lr", type=float, default=2e-3, help="largest learning rate")
    add("--dtype", choices=list(proof.BARS), default="float32", help="bfloat16 keeps float32 parameters")
    add("--seed", type=int, default=0, help="of the initial weights, the data order and the sample")
    add("--out", type=Path, default=Path("out"), help="folder for the pictures")
    add("--no-proof", action="store_true", help="leave out the comparison with the single-device step")
    add("--proof-only", action="store_true", help="only compare one step at --dtype; prints JSON")
    return parser


def parse_arguments(parser: Parser, argv):
    args = parser.parse_args(argv)
    chosen = (args.data_parallel, args.pipe, args.tensor)
    args.mesh = [size or default for size, default in zip(chosen, args.mesh)]
    rows = args.mesh[0] * args.microbatches
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if args.batch % rows:
        parser.error(
            f"--batch {args.batch} is not a multiple of {rows} = data-parallel {args.mesh[0]} x "
            f"--microbatches {args.microbatches}"
        )
    if args.seed < 0:
        parser.error(f"--seed {args.seed} is negative")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is not a positive number")
    return args


def prove(argv, args) -> int:
    precisions = list(dict.fromkeys([args.dtype, "float64"]))
    try:
        line, passed = proof.prove(__file__, argv, precisions)
    except RuntimeError as error:
        line, passed = f"PROOF FAILED: {error}", False
    print(line)
    return 0 if passed else 1


def run(parser, argv) -> int:
    args = parse_arguments(parser, argv)
    data = TextData(read_text(args.data), args.batch, args.seq, args.seed)
    if not args.proof_only:
        args.out.mkdir(parents=True, exist_ok=True)
    use_devices(args.mesh[0] * args.mesh[1] * args.mesh[2])
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    if args.proof_only:
        create_state = make_create_state(make_model(args), proof.gradient_keeper())
        rng = jax.random.key(args.seed)
        options = parallel_options(args)
        print(json.dumps(proof.compare(train_step, create_state, rng, data.train_batch(0), **options)))
        return 0
    step, state, losses, stopped = train(args, data)
    if losses:
        summarize(args, data, step, state, losses)
    if stopped:
        print(f"stopped by Ctrl-C after {len(losses)} of {args.steps} steps")
        return 130
    return 0 if args.no_proof else prove(argv, args)


def main() -> int:
    parser = make_parser()
    try:
        return run(parser, sys.argv[1:])
    except (DataError, MerakError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
