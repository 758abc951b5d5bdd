"""A schedule runs the tasks that its table promises, is refused where it cannot be, and leaves a state that others can take."""

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
from merak_jax.runtime.phase import Phase
from merak_jax.runtime.stage import Stage
from merak_jax.schedules.registry import SCHEDULES, register_schedule
from merak_jax.schedules.task import Task, TaskKind
from tests.parity import make_batch, make_model, mesh_of, state_maker, train_step


class Counted:
    """What stages run, counted where they run it: their tasks in order, and how often each part of a block."""

    def __init__(self):
        self.tasks: dict[int, list[Task]] = {}
        self.blocks: dict[int, Counter] = {}

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
    given_of, shard_map, block_of = Phase._given, jax.shard_map, Stage.block
    # What a part of a block is; made from its inputs, Bi is an R too, while a B does that in one piece.
    kinds = {
        "forward": "F",
        "keep": "F",
        "recompute": "R",
        "backward": "B",
        "pull_back": "B",
        "input_gradient": "Bi",
        "pull_input": "R Bi",
        "weight_gradient": "W",
    }

    def given(self, run, lanes, task):
        made = given_of(self, run, lanes, task)
        about[id(made)] = made, task["m"], task["chunk"]
        return made

    def count_task(name, kind, position):
        method = getattr(Stage, name)

        def run(self, *args, **options):
            given = args[position]
            own = kind
            if name == "backward_loops" and any(splits for _, splits in args[-1]):
                own = TaskKind.BI
            _, m, chunk = about[id(given)]
            blocks = given.visit[:, 1].sum()
            jax.debug.callback(lambda *values: counts.task(own, *values), lax.axis_index("pipe"), m, chunk, blocks)
            return method(self, *args, **options)

        monkeypatch.setattr(Stage, name, run)

    def count_block(self, block):
        for kind in kinds[block.part].split():
            jax.debug.callback(lambda stage, kind=kind: counts.block(kind, stage), lax.axis_index("pipe"))
        return block_of(self, block)

    # JAX cannot lower callbacks where two axes are left to the compiler, and on 1·4·1 these have one device each.
    monkeypatch.setattr(jax, "shard_map", lambda f, *, axis_names, **options: shard_map(f, **options))
    monkeypatch.setattr(Phase, "_given", given)
    monkeypatch.setattr(Stage, "block", count_block)
    count_task("forward_loops", TaskKind.F, 1)
    count_task("recompute", TaskKind.R, 0)
    count_task("backward_loops", TaskKind.B, 1)
    count_task("weights", TaskKind.W, 0)
    return counts


def layers_step(weights, batch):
    """A step of eight small layers: what runs does not depend on what a block holds."""

    def loss(weights):
        x = batch
        for kernel in weights["layers"]:
            x = x + jnp.tanh(x @ kernel)
        return ((x @ weights["head"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


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
    random = np.random.default_rng(0)
    weights = {"layers": [random.normal(size=(4, 4)) for _ in range(8)], "head": random.normal(size=(4, 3))}
    step = merak_jax.parallelize(layers_step, mesh=mesh_of(1, 4, 1), num_microbatches=8, schedule=schedule, form=form)

    jax.block_until_ready(step(weights, random.normal(size=(16, 4))))
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


@pytest.fixture(scope="module")
def two_schedules():
    """`(make_state, {schedule: train step})`: one model whose blocks lie in other places for each schedule."""
    maker, mesh, optimizer = state_maker(make_model(5)), mesh_of(1, 4, 1), optax.sgd(0.1)
    steps = {
        schedule: merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=4, schedule=schedule)
        for schedule in ("zb_v", "interleaved")
    }
    return lambda: maker(optimizer), steps


def test_an_evaluation_reads_the_state_in_the_chunks_of_the_training(two_schedules):

    def evaluate(state, batch):
        return {"logits": state.apply_fn({"params": state.params}, batch["tokens"])}

    make_state, steps = two_schedules
    for schedule, train in steps.items():
        state, _ = train(make_state(), make_batch(0))
        for again in (schedule, "1f1b"):
            step = merak_jax.parallelize(evaluate, mesh=train.mesh, num_microbatches=4, schedule=again)
            found = step(state, make_batch(1))["logits"]
            expected = jax.jit(evaluate)(train.unshard(state), make_batch(1))["logits"]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_a_train_step_takes_the_state_of_another_schedule(two_schedules):
    make_state, steps = two_schedules
    batches, state = [make_batch(0), make_batch(1)], make_state()
    expected = make_state()
    for batch in batches:
        expected, _ = jax.jit(train_step)(expected, batch)
    for step, batch in zip(steps.values(), batches):
        state, _ = step(state, batch)
    for found, wanted in zip(jax.tree.leaves(step.unshard(state).params), jax.tree.leaves(expected.params)):
        assert np.abs(found - wanted).max() <= 1e-12 * max(np.abs(wanted).max(), 1e-2)


def test_an_evaluation_of_states_of_two_schedules_is_refused():
    def evaluate(state, batch, other):
        return state.apply_fn({"params": jax.tree.map(lambda a, b: a + b, state.params, other.params)}, batch["tokens"])

    state, mesh, states = state_maker(make_model(8))(optax.sgd(0.1)), mesh_of(1, 4, 1), []
    for schedule in ("1f1b", "interleaved"):
        step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=4, schedule=schedule)
        step.lower(state, make_batch(0))
        states.append(step.shard(state))
    both = merak_jax.parallelize(evaluate, mesh=mesh, num_microbatches=4)
    with pytest.raises(PlanError, match="stored by train steps with different chunks per stage"):
        both(states[0], make_batch(0), states[1])


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
    assert (again._options.table.name, again._options.table.form) == (
        asked._options.table.name,
        asked._options.table.form,
    )
    assert again._options.table.num_ticks == asked._options.table.num_ticks


def test_more_chunks_than_blocks_is_a_warning():
    maker = state_maker(make_model(4))
    step = merak_jax.parallelize(train_step, mesh=mesh_of(1, 4, 1), num_microbatches=4, schedule="zb_v")
    with pytest.warns(UserWarning, match="4 blocks on 4 stages with 2 chunks each leave 4 chunks empty"):
        step.lower(maker(optax.sgd(0.1)), make_batch(0))
