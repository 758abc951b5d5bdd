"""The cells of the parity matrix: one GPT-2 training run per combination of options, and a small set that covers all pairs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import merak_jax
from merak_jax.models.gpt2 import GPT2, GPT2Config, next_token_loss
from tests.helper import Differences, Run, differences, run_on_mesh, run_on_one_device, worst_leaf

MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (1, 4, 2), (1, 2, 4), (2, 4, 1), (1, 8, 1))
MICROBATCHES = ("1", "P-1", "P", "8")
DEPTHS = (3, 4, 5, 8)
LAYERS = ("unrolled", "scanned")
HEADS = ("tied", "untied")
SCHEDULES = ("gpipe", "1f1b")
MASKS = ("ragged", "one microbatch masked")
OPTIMIZERS = ("sgd", "adamw")
# Found by trying: most seeds give 17 cells or more, this one 15, and no choice gives fewer.
SEED = 100
# precision: (type of the computation, type of the parameters)
PRECISIONS = {
    "float64": (jnp.float64, jnp.float64),
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.float32),
    "all bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
LENGTH, VOCABULARY = 8, 32


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of options. `mesh`: sizes of data, pipe, tensor; `microbatches`: a count or its rule in terms of P."""

    mesh: tuple[int, int, int]
    microbatches: str
    depth: int
    layers: str
    head: str
    schedule: str
    mask: str
    optimizer: str
    precision: str = "float64"

    def __str__(self) -> str:
        return "-".join(
            [
                self.mesh_name,
                f"M={self.microbatches}",
                f"L={self.depth}",
                self.layers,
                self.head,
                self.schedule,
                self.mask.replace(" ", "_"),
                self.optimizer,
                self.precision.replace(" ", "_"),
            ]
        )

    @property
    def mesh_name(self) -> str:
        return "x".join(map(str, self.mesh))

    @property
    def num_microbatches(self) -> int:
        pipe = self.mesh[1]
        return {"1": 1, "P-1": pipe - 1, "P": pipe, "8": 8}[self.microbatches]

    @property
    def bar(self) -> str:
        """The precision whose bar the cell must meet."""
        return self.precision.removeprefix("all ")

    @property
    def is_valid(self) -> bool:
        """No zero microbatches, and no batch without a single unmasked token."""
        return self.num_microbatches > 0 and (self.mask == "ragged" or self.num_microbatches * self.mesh[0] > 1)

    @property
    def rows(self) -> int:
        """B: 16, or the next smaller size that M = 3 or M = 7 divides; few sizes, so that cells share references."""
        step = 2 * self.num_microbatches if self.num_microbatches in (3, 7) else 16
        return 16 // step * step

    @property
    def demands(self) -> list:
        """What this cell covers: its mesh, and pairs of the options that may be in each other's way.

        Other schedules and optimizers meet the meshes in the tables of models and schedules, whose cells in the suite also have
        four layers on all numbers of stages, with fewer microbatches, as many, and more.
        """
        data, pipe, tensor = sizes = [("data", self.mesh[0]), ("pipe", self.mesh[1]), ("tensor", self.mesh[2])]
        # Fewer microbatches than stages, as many, or more.
        fill = ("fill", int(np.sign(self.num_microbatches - self.mesh[1])))
        depth = ("depth", self.depth)
        styles = [("layers", self.layers), ("head", self.head), ("mask", self.mask)]
        training = [("schedule", self.schedule), ("optimizer", self.optimizer)]
        pairs = [
            *itertools.combinations(sizes, 2),
            *itertools.product([*sizes, fill, depth], styles),
            *itertools.combinations([*styles, *training], 2),
            *itertools.product(training, [fill]),
            *itertools.product([data, tensor], [fill]),
            (pipe, ("microbatches", self.num_microbatches)),
        ]
        if self.depth != 4:
            pairs += [(pipe, depth), (fill, depth)]
        return [self.mesh, *pairs]


def all_cells() -> list[Cell]:
    """The full product in float64, without the combinations that make no sense."""
    product = itertools.product(MESHES, MICROBATCHES, DEPTHS, LAYERS, HEADS, SCHEDULES, MASKS, OPTIMIZERS)
    return [cell for cell in itertools.starmap(Cell, product) if cell.is_valid]


def covering_cells(cells: list[Cell], seed: int = SEED) -> list[Cell]:
    """Few of `cells` that together cover every demand that any of them covers: greedy, ties broken by a seed."""
    demands = {d: n for n, d in enumerate(dict.fromkeys(d for cell in cells for d in cell.demands))}
    covers = np.zeros((len(cells), len(demands)), bool)
    for n, cell in enumerate(cells):
        covers[n, [demands[d] for d in cell.demands]] = True
    # AdamW costs more to compile and fewer cells have it.
    cost = np.array([0.5 * (cell.optimizer == "adamw") for cell in cells])
    rng = np.random.default_rng(seed)
    missing, chosen = np.ones(len(demands), np.float32), []
    while missing.any():
        chosen.append(int(np.argmax(covers @ missing - cost + 0.4 * rng.random(len(cells)))))
        missing[covers[chosen[-1]]] = 0
    return [cells[n] for n in sorted(chosen)]


def mesh_of(data: int, pipe: int, tensor: int):
    """A mesh on the first devices."""
    return merak_jax.make_mesh(
        data=data, pipe=pipe, tensor=tensor, devices=jax.devices()[: math.prod((data, pipe, tensor))]
    )


def make_model(
    depth: int = 3, layers: str = "unrolled", head: str = "tied", precision: str = "float64", **changes
) -> GPT2:
    """A GPT-2 of width 16, with 4 heads and 32 tokens."""
    dtype, param_dtype = PRECISIONS[precision]
    sizes = dict(vocab_size=VOCABULARY, max_length=2 * LENGTH, num_layers=depth, num_heads=4, width=16)
    return GPT2(
        GPT2Config(
            **{**sizes, **changes},
            tie_head=head == "tied",
            scan_layers=layers == "scanned",
            dtype=dtype,
            param_dtype=param_dtype,
        )
    )


def state_maker(model: GPT2, state_class: type[TrainState] = TrainState, size: float = 0.1, **fields):
    """`make_state(tx)` for a model: weights and biases of about `size` and scales of about 1, so that no gradient is tiny."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        return jnp.asarray((path[-1].key == "scale") + size * rng.standard_normal(leaf.shape), leaf.dtype)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return lambda tx: state_class.create(apply_fn=model.apply, params=params, tx=tx, **fields)


def train_step(state, batch):
    """A step with a masked mean; its metrics are the loss, the norm of the gradients and the number of tokens."""

    def loss(params):
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["targets"], batch["mask"])

    value, gradients = jax.value_and_grad(loss)(state.params)
    metrics = {"loss": value, "grad_norm": optax.global_norm(gradients), "num_tokens": batch["mask"].sum()}
    return state.apply_gradients(grads=gradients), metrics


def make_batch(
    n: int, rows: int = 16, data: int = 1, num_microbatches: int = 1, mask: str = "ragged", dtype=jnp.float64
):
    """The batch of step n: random tokens; rows of every length from 1 to all; perhaps a microbatch of only masked tokens."""
    rng = np.random.default_rng(n)
    lengths = rng.integers(1, LENGTH + 1, rows)
    valid = np.arange(LENGTH) < lengths[:, None]
    if mask != "ragged":
        shards = valid.reshape(data, num_microbatches, -1, LENGTH)
        if num_microbatches > 1:
            shards[:, n % num_microbatches] = False
        else:
            shards[n % data] = False
    tokens = rng.integers(0, VOCABULARY, (2, rows, LENGTH)).astype(np.int32)
    return {"tokens": tokens[0], "targets": tokens[1], "mask": valid.astype(dtype)}


def make_coherent_batch(n: int, rows: int = 4, **_):
    """A batch for bfloat16: few tokens and one target, so that the terms of a gradient add up instead of cancelling.

    XLA:CPU sums the bfloat16 terms of a bias gradient in bfloat16. With 16 x 8 tokens and random targets, one device that gets
    the same rows in another order differs from itself by 4 to 10 % in its worst leaf; with 4 x 4 tokens and one target, by
    1.5 %; with 16 rows of 4, by up to 3.3 %, of 2, by up to 1.9 %. `reordering_noise` measures it.
    """
    length = 4 if rows <= 4 else 2
    batch = {name: value[:, :length] for name, value in make_batch(n, rows, dtype=jnp.float32).items()}
    return {**batch, "targets": np.full_like(batch["targets"], 7), "mask": np.ones_like(batch["mask"])}


def make_optimizer(name: str) -> optax.GradientTransformation:
    """Plain SGD, or a usual chain: clipping by global norm, warm-up and cosine decay, no weight decay on biases and norms."""
    if name == "sgd":
        return optax.sgd(0.5)

    def decayed(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)

    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, warmup_steps=2, decay_steps=8)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, eps=1e-3, weight_decay=0.1, mask=decayed))


@functools.cache
def _maker(depth: int, layers: str, head: str, precision: str):
    """The size of the weights: in the narrow precisions, such that rounding noise in a structurally zero gradient stays small.

    The noise in the gradient of the key bias falls with the fourth power of the size, other gradients with its square. In
    float32 with 0.1, one device that accumulates the gradients of eight microbatches itself is at 92 % of the bar; with
    0.07 all real gradients are still larger than the floor of `worst_leaf`.
    """
    size = {"float64": 0.1, "float32": 0.07}.get(precision, 0.02)
    return state_maker(make_model(depth, layers, head, precision), size=size)


@functools.cache
def _optimizer(name: str) -> optax.GradientTransformation:
    return make_optimizer(name)


# One jitted step for all references: models and optimizers are kept, so that equal ones compile once.
_reference_step = jax.jit(train_step)


def _setting(cell: Cell) -> dict:
    """What both runs of a cell get: state maker, batch maker, optimizer, number of steps."""
    maker = _maker(cell.depth, cell.layers, cell.head, cell.precision)
    if cell.bar == "bfloat16":
        step = cell.mesh[0] * cell.num_microbatches
        batches = functools.partial(make_coherent_batch, rows=step * math.ceil(4 / step))
        # One step: rounding makes the parameters after it differ, and the next gradients are taken elsewhere.
        return dict(make_state=maker, make_batch=batches, optimizer=_optimizer(cell.optimizer), steps=1)
    batches = functools.partial(
        make_batch,
        rows=cell.rows,
        data=cell.mesh[0],
        num_microbatches=cell.num_microbatches,
        mask=cell.mask,
        dtype=PRECISIONS[cell.precision][0],
    )
    return dict(make_state=maker, make_batch=batches, optimizer=_optimizer(cell.optimizer))


def reference(cell: Cell) -> Run:
    """The single-device run of a cell."""
    return run_on_one_device(_reference_step, **_setting(cell))


def reordering_noise(cell: Cell) -> float:
    """How much the gradients of one device depend on the order of the rows of the batch: worst leaf over three orders."""
    setting, expected, worst = _setting(cell), reference(cell).gradients, 0.0
    for seed in range(3):

        def reordered(n, seed=seed):
            batch = setting["make_batch"](n)
            order = np.random.default_rng(seed).permutation(len(batch["tokens"]))
            return {name: value[order] for name, value in batch.items()}

        run = run_on_one_device(_reference_step, **{**setting, "make_batch": reordered, "steps": 1})
        worst = max(worst, worst_leaf(run.gradients, expected)[0])
    return worst


def parallel(cell: Cell) -> Run:
    """The parallel run of a cell."""
    return run_on_mesh(
        train_step,
        mesh=mesh_of(*cell.mesh),
        num_microbatches=cell.num_microbatches,
        schedule=cell.schedule,
        **_setting(cell),
    )


def compare(cell: Cell) -> Differences:
    """How far the parallel run of a cell is from the single-device run."""
    return differences(parallel(cell), reference(cell))


def through_sgd(cell: Cell, actual: Run, expected: Run) -> tuple[float, str]:
    """The worst leaf of the parameters after one step of SGD (rate 0.5) with the gradients of either run, and its path.

    Weaker than to compare the gradients themselves: rounding noise in a gradient that is zero by the structure of the model
    does not count.
    """
    parameters = _maker(cell.depth, cell.layers, cell.head, cell.precision)(optax.sgd(0.5)).params

    def stepped(run: Run):
        return jax.device_get(jax.tree.map(lambda p, g: p - 0.5 * g.astype(p.dtype), parameters, run.gradients))

    return worst_leaf(stepped(actual), stepped(expected), floor=0.0)


def check(cell: Cell) -> None:
    """Assert parity for a cell."""
    lines = compare(cell).over(cell.bar)
    assert not lines, "\n".join(lines)
