"""Every schedule gives the numbers of one device, and runs the tasks that its table promises."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import merak_jax
from merak_jax.errors import PlanError
from merak_jax.planning.plan import Plan
from merak_jax.runtime import tick_run
from merak_jax.runtime.phase import Phase
from merak_jax.runtime.placement import Placement
from merak_jax.runtime.stage import Stage
from merak_jax.schedules.registry import SCHEDULES, register_schedule
from merak_jax.schedules.task import Task, TaskKind
from tests import zoo
from tests.parity import make_batch, make_model, mesh_of, state_maker, train_step
from tests.zoo import ZooCell, schedule_cells


def dealt() -> list[ZooCell]:
    """Cells in which every schedule runs merged and switched, and forms, meshes and numbers of microbatches meet each other."""

    def pairs(cell: ZooCell) -> set:
        values = (cell.form, cell.mesh, f"M={cell.num_microbatches}")
        # Paired ticks are merged ticks with another table.
        own = {(cell.schedule_name, cell.form)} if cell.form != "paired" else set()
        return own | set(itertools.combinations(values, 2))

    found, cells = [], schedule_cells()
    missing = set().union(*map(pairs, cells))
    while missing:
        # Of equals the one whose mesh and number of microbatches were dealt least.
        dealt_often = Counter(value for cell in found for value in (cell.mesh, cell.num_microbatches))
        best = max(
            cells,
            key=lambda cell: (len(missing & pairs(cell)), -dealt_often[cell.mesh] - dealt_often[cell.num_microbatches]),
        )
        found.append(best)
        missing -= pairs(best)
    return found


# Two chains, experts, values that differ per block, objects, remat: what a schedule may stumble over.
OTHERS = [
    ZooCell("T5, label smoothing, z-loss", (1, 4, 2), 4, "float64", "interleaved", "merged", 2),
    ZooCell("T5 1.1, scanned, gated, untied", (2, 2, 2), 4, "float64", "shifted_critical_path"),
    ZooCell("Mixtral, router z-loss", (1, 4, 1), 4, "float64", "zb_h1"),
    ZooCell("Mixtral, every second block dense", (1, 2, 1), 8, "float64", "zb_v"),
    ZooCell("ViT, stochastic depth", (2, 2, 2), 4, "float64", "zb_v"),
    ZooCell("ViT, scanned", (1, 2, 2), 4, "float64", "interleaved", "switched", 2),
    ZooCell("Llama, blocks recomputed", (1, 4, 1), 4, "float64", "zb_h1", "switched"),
    ZooCell("Llama in nnx", (2, 2, 2), 4, "float64", "interleaved", "merged", 2),
    ZooCell("GPT-2, outputs of every row", (1, 2, 1), 2, "float64", "last_no_recompute", "merged"),
]


@pytest.mark.parametrize("cell", dealt() + OTHERS, ids=str)
def test_a_schedule_gives_the_numbers_of_one_device(cell):
    zoo.check(cell)


@pytest.mark.parametrize(
    "schedule, form",
    [
        ("shifted_critical_path", "switched"),
        ("last_no_recompute", "merged"),
        ("zb_h1", "merged"),
        ("zb_v", "switched"),
        ("interleaved", "paired"),
    ],
)
def test_what_bubbles_and_unused_slots_hold_does_not_matter(schedule, form, monkeypatch):
    made = []

    def polluted(shape, dtype):
        made.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 113, dtype)

    monkeypatch.setattr(tick_run, "empty_buffer", polluted)
    zoo.check(ZooCell(zoo.DEEP.name, (1, 4, 1), 4, "float64", schedule, form))
    assert made, "the pipeline made no buffer by empty_buffer"


class Counted:
    """What stages run, counted where they run it: their tasks in order, and how often each part of a block."""

    def __init__(self):
        self.tasks: dict[int, list[Task]] = {}
        self.blocks: dict[int, Counter] = {}
        self.inside = 0  # of a function that runs a block as a part of its own work

    def task(self, kind, stage, microbatch, chunk, blocks):
        if blocks:
            self.tasks.setdefault(int(stage), []).append(Task(kind, int(microbatch), int(chunk)))

    def block(self, kind, stage):
        self.blocks.setdefault(int(stage), Counter())[kind] += 1


@pytest.fixture
def counted(monkeypatch):
    """Counts of a step on 1·4·1 that is made afterwards."""
    counts = Counted()
    about: dict[int, tuple] = {}
    given_of, shard_map, evaluate, pull_back_of = Phase._given, jax.shard_map, Placement.evaluate, Stage.pull_back
    kinds = {"keep": "F", "recompute": "R", "backward": "B", "input_gradient": "Bi", "weight_gradient": "W"}

    def given(self, run, lanes, task):
        made = given_of(self, run, lanes, task)
        about[id(made)] = made, task["m"], task["chunk"]
        return made

    def count_task(name, kind, position):
        method = getattr(Stage, name)

        def run(self, *args, **options):
            given = args[position]
            own = kind
            if name == "backward" and any(splits for _, splits in (args[-1] if len(args) > 8 else ())):
                own = TaskKind.BI
            _, m, chunk = about[id(given)]
            blocks = given.visit[:, 1].sum()
            jax.debug.callback(lambda *values: counts.task(own, *values), lax.axis_index("pipe"), m, chunk, blocks)
            return method(self, *args, **options)

        monkeypatch.setattr(Stage, name, run)

    def count_block(kind):
        if not counts.inside:
            jax.debug.callback(lambda stage: counts.block(kind, stage), lax.axis_index("pipe"))

    def count_program(self, program, operands):
        kind = "F"
        for derivative in self.run.stage.derivatives:
            kind = next((kinds[name] for name in kinds if program is getattr(derivative, name)), kind)
        count_block(kind)
        return evaluate(self, program, operands)

    def count_pull_back(self, *args, **options):
        count_block("B")
        counts.inside += 1
        try:
            return pull_back_of(self, *args, **options)
        finally:
            counts.inside -= 1

    # JAX cannot lower callbacks where two axes are left to the compiler, and on 1·4·1 these have one device each.
    monkeypatch.setattr(jax, "shard_map", lambda f, *, axis_names, **options: shard_map(f, **options))
    monkeypatch.setattr(Phase, "_given", given)
    monkeypatch.setattr(Placement, "evaluate", count_program)
    monkeypatch.setattr(Stage, "pull_back", count_pull_back)
    count_task("forward", TaskKind.F, 1)
    count_task("recompute", TaskKind.R, 0)
    count_task("backward", TaskKind.B, 1)
    count_task("weights", TaskKind.W, 0)
    return counts


@pytest.mark.parametrize(
    "schedule, form",
    [
        ("shifted_critical_path", "switched"),
        ("1f1b", "switched"),
        ("1f1b", "merged"),
        ("zb_h1", "switched"),
        ("zb_h1", "merged"),
        ("early_recompute", "switched"),
        ("last_no_recompute", "merged"),
        ("interleaved", "merged"),
        ("interleaved", "switched"),
        ("zb_v", "switched"),
    ],
)
def test_what_the_table_promises_is_what_runs(counted, schedule, form):
    maker = state_maker(make_model(8))
    step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 4, 1), num_microbatches=8, schedule=schedule, form=form)

    jax.block_until_ready(step(maker(optax.sgd(0.1)), make_batch(0)))
    jax.effects_barrier()
    table = step.plan.table
    (layout,) = step._latest.program.chain_layouts
    for stage in range(4):
        ran, promised = counted.tasks[stage], table.order(stage)
        assert Counter(ran) == Counter(promised)
        if form == "switched":
            assert tuple(ran) == promised
        held = list(itertools.accumulate((t.kind is TaskKind.F) - (t.kind in (TaskKind.B, TaskKind.W)) for t in ran))
        assert max(held) == table.in_flight()[stage] == step.plan.stages[stage].in_flight
        blocks = Counter()
        for tick in range(table.num_ticks):
            for task in table.tasks(tick, stage):
                own = int(layout.visits[stage, task.chunk, 1])
                blocks[str(task.kind)] += own
                # Bi is cut from residuals; without an R before it makes them itself. A B does that in one piece.
                blocks["R"] += own * (task.kind is TaskKind.BI and table.recomputes_inside(tick, stage))
        assert counted.blocks[stage] == blocks
    if schedule == "shifted_critical_path":
        assert table.in_flight() == [4, 3, 3, 1]
        assert not any(task.kind is TaskKind.R for task in counted.tasks[3])


def test_an_evaluation_reads_the_state_in_the_chunks_of_the_training():

    def evaluate(state, batch):
        return {"logits": state.apply_fn({"params": state.params}, batch["tokens"])}

    mesh = mesh_of(1, 4, 1)
    for schedule in ("interleaved", "zb_v"):
        maker = state_maker(make_model(5))
        train = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=4, schedule=schedule)
        state, _ = train(maker(optax.sgd(0.1)), make_batch(0))
        for again in (schedule, "1f1b"):
            step = merak_jax.parallelize(evaluate, mesh=mesh, num_microbatches=4, schedule=again)
            found = step(state, make_batch(1))["logits"]
            expected = jax.jit(evaluate)(train.unshard(state), make_batch(1))["logits"]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


GOOD = "F0 F1 F2 F3 B0 B1 B2 B3"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"schedule": "zigzag"}, "schedule 'zigzag' is unknown; known: 1f1b"),
        ({"schedule": "shifted_critical_path", "num_microbatches": 2}, "needs at least 4 microbatches here, got 2"),
        ({"schedule": "1f1b", "num_chunks": 2}, "has one chunk per stage, got num_chunks=2"),
        ({"schedule": "interleaved", "num_chunks": 2.0}, "needs a number of chunks, got 2.0"),
        ({"schedule": "1f1b", "form": "spiral"}, "form 'spiral' is unknown; known: 'merged', 'paired', 'switched'"),
        ({"rows": ["F0 F1 F2 F3 B0 B1 B2", GOOD, GOOD, GOOD]}, "stage 0: B3 occurs 0 times"),
        ({"rows": [GOOD, "F0 B1 F1 F2 F3 B0 B2 B3", GOOD, GOOD]}, "stage 1: B1 comes before F1"),
        ({"rows": [GOOD, GOOD, "F0 F1 F2 F3 W0 Bi0 B1 B2 B3", GOOD]}, "stage 2: W0 comes before Bi0"),
        (
            {"rows": ["F0 B0 F1 B1 F2 B2 F3 B3", "F1 F0 B0 B1 F2 B2 F3 B3", GOOD, GOOD]},
            "never ends: F1 of stage 0 waits for B0 of stage 0.*F0 of stage 1.*F1 of stage 0",
        ),
        ({"rows": [GOOD, GOOD]}, "4 stages but 2 orders"),
        ({"rows": ["F0 F1 F2 F3"] * 4}, "'own' has no B"),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error_before_anything_is_traced(options, message):
    def never(state, batch):
        raise AssertionError("traced")

    rows = options.pop("rows", None)
    register_schedule("own", lambda p, m: rows)
    try:
        with pytest.raises(PlanError, match=message):
            merak_jax.parallelize(never, mesh=mesh_of(1, 4, 1), **{"num_microbatches": 4, "schedule": "own", **options})
    finally:
        SCHEDULES.pop("own")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_of_one_stage_can_be_printed_and_taken_for_more_stages(name):
    maker = state_maker(make_model(4))
    one = merak_jax.parallelize(train_step, mesh=mesh_of(1, 1, 1), num_microbatches=4, schedule=name)
    one.lower(maker(optax.sgd(0.1)), make_batch(0))
    assert name in str(one.plan) and one.plan.table.num_ticks == 4
    again = merak_jax.parallelize(train_step, mesh=mesh_of(1, 2, 1), plan=Plan.from_json(one.plan.to_json()))
    asked = merak_jax.parallelize(train_step, mesh=mesh_of(1, 2, 1), num_microbatches=4, schedule=name)
    assert (again._table.name, again._table.form) == (asked._table.name, asked._table.form)
    assert again._table.num_ticks == asked._table.num_ticks


def test_more_chunks_than_blocks_is_a_warning():
    maker = state_maker(make_model(4))
    step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 4, 1), num_microbatches=4, schedule="zb_v")
    with pytest.warns(UserWarning, match="4 blocks on 4 stages with 2 chunks each leave 4 chunks empty"):
        step.lower(maker(optax.sgd(0.1)), make_batch(0))


def test_a_train_step_takes_the_state_of_another_schedule():
    maker, batches = state_maker(make_model(8)), [make_batch(0), make_batch(1)]
    expected = maker(optax.sgd(0.1))
    for batch in batches:
        expected, _ = jax.jit(train_step)(expected, batch)
    state = maker(optax.sgd(0.1))
    for schedule, batch in zip(("zb_v", "interleaved"), batches):
        step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 4, 1), num_microbatches=4, schedule=schedule)
        state, _ = step(state, batch)
    for found, wanted in zip(jax.tree.leaves(step.unshard(state).params), jax.tree.leaves(expected.params)):
        assert np.abs(found - wanted).max() <= 1e-12 * max(np.abs(wanted).max(), 1e-2)


def test_an_evaluation_of_states_of_two_schedules_is_refused():
    def evaluate(state, batch, other):
        return state.apply_fn({"params": jax.tree.map(lambda a, b: a + b, state.params, other.params)}, batch["tokens"])

    maker, mesh, states = state_maker(make_model(8)), mesh_of(1, 4, 1), []
    for schedule in ("1f1b", "interleaved"):
        step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=4, schedule=schedule)
        states.append(step(maker(optax.sgd(0.1)), make_batch(0))[0])
    both = merak_jax.parallelize(evaluate, mesh=mesh, num_microbatches=4)
    with pytest.raises(PlanError, match="stored by train steps with different chunks per stage"):
        both(states[0], make_batch(0), states[1])
