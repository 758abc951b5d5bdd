"""The program of a tick: the tasks of each stage, and the sends between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from merak_jax.runtime.ends import Ends, only, store
from merak_jax.runtime.loops import Loops, run_loops, run_paired
from merak_jax.runtime.stage import NO_POOL, Given, Pool, take

if TYPE_CHECKING:
    from merak_jax.runtime.tick_run import TickRun

# What each kind of task reads of the table: the column of its microbatch, and its slots.
_COLUMNS = {
    "F": ("forward", {"slot": "forward_slot", "keep_slot": "keep_slot"}),
    "R": ("recompute", {"slot": "recompute_slot", "keep_slot": "recompute_keep_slot"}),
    "B": (
        "backward",
        {
            "slot": "backward_slot",
            "cotangent_slot": "cotangent_slot",
            "residual_slot": "residual_slot",
            "saved_slot": "saved_slot",
        },
    ),
    "W": ("weight", {"slot": "weight_slot", "saved_slot": "weight_saved_slot"}),
}


class Phase(Ends):
    """The program of the ticks of one phase: on each stage an F, an R, a B or Bi, and a W, one after the other.

    All stages run the same loops over blocks; of a task that a stage does not have, the loop turns no times. That is so in switched
    ticks too, where a stage has one task: XLA:CPU copies every buffer in each branch of a `lax.switch`, and loops write in place.
    """

    def __init__(self, run: TickRun, parts: frozenset[str], columns: dict[str, np.ndarray]):
        super().__init__(run, parts, columns)
        here = columns["backward"] >= 0
        ways = np.stack([columns["residual_slot"][here] >= 0, columns["saved_slot"][here] >= 0], axis=1)
        self.backward_modes = [(bool(reads), bool(splits)) for reads, splits in np.unique(ways, axis=0)]
        self.reads = any(reads for reads, _ in self.backward_modes)
        self.splits = any(splits for _, splits in self.backward_modes)
        self.always_keeps = bool((columns["keep_slot"] >= 0)[columns["forward"] >= 0].all())
        self.keeps = self.present["keep_slot"]
        self.in_one_loop = run.p.paired and {"F", "B"} <= parts

    def tick(self, state, column):
        """One tick: store what arrived, then the tasks."""
        state = dict(state)
        self._receive(state, column)
        tasks = {
            kind: {
                "m": column[name],
                "chunk": column[f"{name}_chunk"],
                "visit": self._visit(column[f"{name}_chunk"]),
                **{key: column[source] for key, source in sources.items()},
            }
            for kind, (name, sources) in _COLUMNS.items()
            if kind in self.parts
        }
        if self.table.form == "switched" or self.in_one_loop:
            self._together(state, column, tasks)
        else:
            self._after_each_other(state, column, tasks)
        return state, None

    def _after_each_other(self, state, column, tasks) -> None:
        """F, its send and the epilogue, then what goes back and its send."""
        cotangent = None
        if "F" in self.parts:

            def forward(run, stage, own, first):
                own, out = self._forward(run, stage, own, first)
                return {
                    "new": self._changed(own, "F"),
                    "last": self._last(stage, own, out),
                    "sent": self._sent(stage, out, 1),
                }

            result = self.run.on_stages(forward, self._own(state, tasks, "F"), self._first(column))
            self._update(state, result)
            if "E" in self.parts:
                cotangent = self._epilogue(state, result["last"], column["epilogue"])
        if not self.parts & {"R", "B", "W"}:
            if cotangent is not None:
                self._store_epilogue(state, cotangent, column)
            return
        end_stage, _ = self.table.path[-1]

        def back(run, stage, own, whole):
            cotangent, slot = whole
            if cotangent is not None:
                own = {**own, "inbox": store(own["inbox"], cotangent, jnp.where(stage == end_stage, slot, -1))}
            own, out = self._backward(run, own)
            result: dict[str, Any] = {"new": self._changed(own, "RBW")}
            if "B" in self.parts:
                result |= {"first": self._start(stage, own, out), "returned": self._sent(stage, out, -1)}
            return result

        whole = (None if cotangent is None else list(cotangent), column["epilogue_slot"])
        result = self.run.on_stages(back, self._own(state, tasks, "RBW"), whole)
        self._update(state, result)
        if "B" in self.parts:
            self._prologue_backward(state, column, result["first"])

    def _together(self, state, column, tasks) -> None:
        """All tasks of each stage, then the sends, then the epilogue: no stage waits for another one's task."""

        def body(run, stage, own, first):
            out: list[Any] = []
            back: list[Any] = []
            if self.in_one_loop:
                own, out, back = self._both(run, stage, own, first)
            else:
                if "F" in self.parts:
                    own, out = self._forward(run, stage, own, first)
                if self.parts & {"R", "B", "W"}:
                    own, back = self._backward(run, own)
            result: dict[str, Any] = {"new": self._changed(own, "FRBW")}
            if "F" in self.parts:
                result |= {"last": self._last(stage, own, out), "sent": self._sent(stage, out, 1)}
            if "B" in self.parts:
                result |= {"first": self._start(stage, own, back), "returned": self._sent(stage, back, -1)}
            return result

        first = self._first(column) if "F" in self.parts else []
        result = self.run.on_stages(body, self._own(state, tasks, "FRBW"), first)
        self._update(state, result)
        if "E" in self.parts:
            cotangent = self._epilogue(state, result["last"], column["epilogue"])
            self._store_epilogue(state, cotangent, column)
        if "B" in self.parts:
            self._prologue_backward(state, column, result["first"])

    def _visit(self, chunk):
        """Per stage the visit of a chunk: int `[P, chains, 2]`, no blocks where the chunk is negative."""
        visits = jnp.asarray(self.run.visits)
        own = visits[jnp.arange(self.run.stages), jnp.maximum(chunk, 0)]
        return jnp.where((chunk >= 0)[:, None, None], own, jnp.zeros_like(own))

    def _given(self, run: TickRun, lanes, task) -> Given:
        side = run.side(run.microbatch(jnp.maximum(task["m"], 0)))
        return Given(lanes, run.values(self.stage.shared), side, task["visit"])

    # Buffers: those that some tasks read, and those that they change.

    def _own(self, state, tasks, kinds: str) -> dict[str, Any]:
        names = {"stash", *self._changes(kinds)}
        if self.reads and "B" in kinds:
            names.add("residuals")
        own = {name: state[name] for name in sorted(names)}
        return own | {"operands": self.run.lanes, "tasks": {k: task for k, task in tasks.items() if k in kinds}}

    def _changes(self, kinds: str) -> set[str]:
        found = set()
        if "F" in kinds and "F" in self.parts:
            found |= {"stash", *(["residuals"] if self.keeps else [])}
        if set(kinds) & {"R", "B", "W"} & self.parts:
            found |= {"lanes", "block_shared", "inbox"}
            found |= {"residuals"} if "R" in self.parts else set()
            found |= {"saved"} if self.splits or "W" in self.parts else set()
        return found

    def _changed(self, own, kinds: str) -> dict[str, Any]:
        return {name: own[name] for name in sorted(self._changes(kinds))}

    def _update(self, state, result) -> None:
        state.update(result["new"])
        for name, sent in (("arrived", "sent"), ("returned", "returned")):
            state.update({f"{name}{way}": values for way, values in result.get(sent, {}).items()})

    # Tasks: each takes what a stage has, and returns it changed.

    def _forward(self, run, stage, own, first) -> tuple[dict[str, Any], list[Any]]:
        """F; also the carry that it ends with. An idle stage runs no block: no slot is touched."""
        return self._after_forward(own, run_loops(self.stage, self._forward_loops(run, stage, own, first)))

    def _forward_loops(self, run, stage, own, first) -> Loops:
        task, slot = own["tasks"]["F"], jnp.maximum(own["tasks"]["F"]["slot"], 0)
        return self.stage.forward_loops(
            self._carry(stage, task["chunk"], own["stash"], slot, first),
            self._given(run, own["operands"], task),
            own["stash"],
            slot,
            task["m"] >= 0,
            Pool(own["residuals"], task["keep_slot"]) if self.keeps else NO_POOL,
            self.keeps and self.always_keeps,
        )

    def _after_forward(self, own, result) -> tuple[dict[str, Any], list[Any]]:
        out, stash, kept = result
        return {**own, "stash": stash, **({"residuals": kept} if self.keeps else {})}, out

    def _backward(self, run, own) -> tuple[dict[str, Any], list[Any]]:
        """R, B or Bi, and W, as far as the phase has them; also the cotangent that B ends with, none where it has no B."""
        own = self._recompute(run, own)
        out: list[Any] = []
        if "B" in self.parts:
            result = run_loops(self.stage, self._backward_loops(run, own), *self._read(own["stash"], own))
            own, out = self._after_backward(own, result)
        return self._weights(run, own), out

    def _recompute(self, run, own) -> dict[str, Any]:
        if "R" not in self.parts:
            return own
        task = own["tasks"]["R"]
        residuals = self.stage.recompute(
            self._given(run, own["operands"], task),
            own["stash"],
            jnp.maximum(task["slot"], 0),
            Pool(own["residuals"], task["keep_slot"]),
        )
        return {**own, "residuals": residuals}

    def _backward_loops(self, run, own) -> Loops:
        task = own["tasks"]["B"]
        return self.stage.backward_loops(
            [take(x, jnp.maximum(task["cotangent_slot"], 0)) for x in own["inbox"]],
            self._given(run, own["operands"], task),
            jnp.maximum(task["slot"], 0),
            own["lanes"],
            own["block_shared"],
            task["residual_slot"] if self.reads else -1,
            Pool(own["saved"], task["saved_slot"]) if self.splits else NO_POOL,
            self.backward_modes,
        )

    def _read(self, stash, own) -> tuple[Any, Any]:
        """What B reads: the stash and the residuals."""
        return stash, own["residuals"] if self.reads else ()

    def _after_backward(self, own, result) -> tuple[dict[str, Any], list[Any]]:
        out, lanes, shared, saved = result
        return {**own, "lanes": lanes, "block_shared": shared, **({"saved": saved} if self.splits else {})}, out

    def _weights(self, run, own) -> dict[str, Any]:
        if "W" not in self.parts:
            return own
        task = own["tasks"]["W"]
        lanes, shared = self.stage.weights(
            self._given(run, own["operands"], task),
            own["stash"],
            jnp.maximum(task["slot"], 0),
            own["lanes"],
            own["block_shared"],
            Pool(own["saved"], task["saved_slot"]),
        )
        return {**own, "lanes": lanes, "block_shared": shared}

    def _both(self, run, stage, own, first) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """F and B in one loop over blocks: what F ends with, and what B ends with."""
        own = self._recompute(run, own)
        layers = {n for n, chain in enumerate(self.stage.chains) if chain.length > 1}

        def read(forward):
            _, stash, kept = forward
            return self._read(stash, {**own, "residuals": kept} if self.keeps else own)

        forward, backward = run_paired(
            self.stage, self._forward_loops(run, stage, own, first), self._backward_loops(run, own), layers, read
        )
        own, out = self._after_forward(own, forward)
        own, back = self._after_backward(own, backward)
        return self._weights(run, own), out, back

    def _last(self, stage, own, out) -> list[Any]:
        """The carry that leaves the last visit of the path; zeros on other stages."""
        end_stage, end_chunk = self.table.path[-1]
        return [only((stage == end_stage) & (own["tasks"]["F"]["chunk"] == end_chunk), x) for x in out]

    def _start(self, stage, own, back) -> list[Any]:
        """The cotangent that leaves the first visit of the path; zeros on other stages."""
        return [only((stage == 0) & (own["tasks"]["B"]["chunk"] == 0), x) for x in back]
