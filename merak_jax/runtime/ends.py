"""What the ticks of a phase have besides the stages' tasks: sends, what arrives, and the two ends of the path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from merak_jax.runtime.stage import merge, put, select, take

if TYPE_CHECKING:
    from merak_jax.runtime.tick_run import TickRun


class Ends:
    """Sends between stages, prologue and epilogue. What is in no tick of a phase is not in its program."""

    def __init__(self, run: TickRun, parts: frozenset[str], columns: dict[str, np.ndarray]):
        self.run, self.parts, self.stage = run, parts, run.stage
        assert run.p.table is not None
        self.table = run.p.table
        self.present = {name: bool((column >= 0).any()) for name, column in columns.items()}
        self.always = {name: bool((column >= 0).all()) for name, column in columns.items()}
        # What is wanted now and then only is left out of the other ticks; all devices agree on that.
        self.seldom = {
            name: self.table.form == "switched" or len(np.flatnonzero(np.diff(columns[name] >= 0))) > 2
            for name in ("prologue", "epilogue", "prologue_backward")
        }

    def _receive(self, state, column) -> None:
        """Store what arrived at the end of the tick before."""
        for way in self.run.ways:
            if self.present[f"store_arrived{way}"]:
                places = [() if same else (0,) for same in self.stage.once]
                state["stash"] = self.run.receive(
                    state["stash"], state[f"arrived{way}"], column[f"store_arrived{way}"], places
                )
            if self.present[f"store_returned{way}"]:
                state["inbox"] = self.run.receive(
                    state["inbox"], state[f"returned{way}"], column[f"store_returned{way}"], [()] * len(state["inbox"])
                )

    def _sent(self, stage, values, shift: int) -> dict[str, list[Any]]:
        """The values as they arrive, by the way: from the stage before (`shift` 1) or after (-1), and from the other side."""
        stages, table = self.run.stages, self.table
        if table.num_chunks > 1 and not table.folded:
            return {"": [lax.ppermute(x, "pipe", [(s, (s + shift) % stages) for s in range(stages)]) for x in values]}
        found = {}
        for way, step in zip(self.run.ways, (shift, -shift)):
            pairs = [(s, s + step) for s in range(stages) if 0 <= s + step < stages]
            found[way] = [lax.ppermute(x, "pipe", pairs) for x in values]
            if table.folded:
                # The stage at the end of this way has nobody behind it, and sends to itself.
                turn = stage == (0 if step > 0 else stages - 1)
                found[way] = [jnp.where(turn, x, moved) for x, moved in zip(values, found[way])]
        return found

    def _only_if(self, name: str, wanted, function, *operands):
        """`function(*operands)`, and zeros in the ticks that do not need it."""
        if self.present[name] and not self.seldom[name]:
            return function(*operands)

        def zeros(*operands):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, *operands))

        return lax.cond(wanted, function, zeros, *operands) if self.present[name] else zeros(*operands)

    def _add_if(self, name: str, number, function, sums, *operands):
        """`function(*operands, sums)`, whose last result is `sums` with something added; else zeros and `sums` as they are."""
        if self.present[name] and not self.seldom[name]:
            return function(*operands, sums, None if self.always[name] else number >= 0)

        def nothing(*operands):
            *others, _ = jax.eval_shape(function, *operands)
            return *jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), others), operands[-1]

        if not self.present[name]:
            return nothing(*operands, sums)
        return lax.cond(number >= 0, lambda *operands: tuple(function(*operands)), nothing, *operands, sums)

    def _first(self, column) -> list[Any]:
        """The first carry of the microbatch that begins its path in this tick."""
        m, run = column["prologue"], self.run
        return self._only_if(
            "prologue",
            m >= 0,
            lambda m: run.whole(run.prologue(None, run.microbatch(m))),
            jnp.maximum(m, 0),
        )

    def _carry(self, stage, chunk, stash, slot, first) -> list[Any]:
        """The carry that an F begins with: the first one, or what arrived."""
        arrived = [take(s, slot) if same else take(s, slot, 0) for s, same in zip(stash, self.stage.once)]
        return [jnp.where((stage == 0) & (chunk == 0), x, a) for x, a in zip(first, arrived)]

    def _epilogue(self, state, carry, number):
        """Collect the outputs of a microbatch that left the last stage; the cotangent of its carry.

        `carry`: `[P, ...]` each, zeros but on the last stage.
        """
        run, floats = self.run, self.stage.carry_float
        m = jnp.maximum(number, 0)
        valid = None if self.always["epilogue"] else number >= 0
        if not run.p.differentiated:
            new = self._only_if(
                "epilogue",
                number >= 0,
                lambda carry, m: run.epilogue(sum_over_stages(carry), run.shared, run.microbatch(m))[1],
                carry,
                m,
            )
            state["outputs"] = run.collect(state["outputs"], new, m, valid)
            return None

        def gradient(carry, m, sums, valid=None):
            carry, rows = sum_over_stages(carry), run.microbatch(m)

            def loss(carry_part, shared_part):
                return run.epilogue(merge(floats, carry_part, carry), merge(run.wanted, shared_part, run.shared), rows)

            _, pull, new = jax.vjp(loss, select(floats, carry), select(run.wanted, run.shared), has_aux=True)
            cotangent, d_shared = pull(jnp.ones((), run.graph.epilogue.outvars[0].aval.dtype))
            return new, run.whole(cotangent), run.add_shared(sums, d_shared, valid)

        new, cotangent, state["shared"] = self._add_if("epilogue", number, gradient, state["shared"], carry, m)
        state["outputs"] = run.collect(state["outputs"], new, m, valid)
        return cotangent

    def _store_epilogue(self, state, cotangent, column) -> None:
        end_stage, _ = self.table.path[-1]

        def body(run, stage, own, whole):
            cotangent, slot = whole
            return store(own, cotangent, jnp.where(stage == end_stage, slot, -1))

        whole = (list(cotangent), column["epilogue_slot"])
        state["inbox"] = self.run.on_stages(body, state["inbox"], whole)

    def _prologue_backward(self, state, column, cotangent) -> None:
        """Pull the cotangent of the first carry, zeros but on the first stage, back into the shared values."""
        if not self.present["prologue_backward"]:
            return
        run, floats = self.run, self.stage.carry_float
        number = column["prologue_backward"]

        def gradient(cotangent, m, sums, _valid=None):
            rows = run.microbatch(m)

            def prologue(shared_part):
                return select(floats, run.prologue(merge(run.wanted, shared_part, run.shared), rows))

            _, pull = jax.vjp(prologue, select(run.wanted, run.shared))
            # Where no microbatch leaves the first stage the cotangent is zero.
            return (run.add_shared(sums, pull(sum_over_stages(cotangent))[0]),)

        (state["shared"],) = self._add_if(
            "prologue_backward", number, gradient, state["shared"], cotangent, jnp.maximum(number, 0)
        )


def only(here, value) -> Any:
    """`value` on the stage that has it, zeros elsewhere."""
    return jnp.where(here, value, jnp.zeros_like(value))


def sum_over_stages(values) -> list[Any]:
    """Values `[P, ...]`, zeros but on one stage, as every stage then has them."""
    return [x.any(0) if x.dtype == jnp.bool_ else x.sum(0, dtype=x.dtype) for x in values]


def store(buffers, values, slot):
    """Write `values` at `slot` of `buffers`; nothing where `slot` is negative."""
    at = jnp.maximum(slot, 0)
    return [put(b, jnp.where(slot >= 0, x, take(b, at)), at) for b, x in zip(buffers, values)]
