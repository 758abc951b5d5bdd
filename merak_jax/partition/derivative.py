"""The derivative of a block, cut into the programs that a pipeline runs at different times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var

from merak_jax.partition.chain import Chain
from merak_jax.partition.rings import without_repeats
from merak_jax.partition.splits import WHOLE, BlockLayout, Splits, follow_splits
from merak_jax.tracing.inline import inline, opened
from merak_jax.tracing.jaxprs import Atom, constants_to_inputs, defining_equations, evaluate, slice_program


@dataclasses.dataclass(frozen=True, eq=False)
class BlockForward:
    """A block that is only run forward: `forward` maps `[*constants, *operands]` to the next carry."""

    forward: Jaxpr
    num_carry: int
    constants: tuple[Any, ...] = ()

    @classmethod
    def of(cls, chain: Chain) -> BlockForward:
        """The forward of a chain's block."""
        return cls(opened(chain.body), chain.num_carry)

    def splits(self, layout: BlockLayout) -> Splits:
        """Where its values are over `tensor`."""
        places, tokens = layout.inputs(len(self.forward.invars), self.num_carry)
        return follow_splits(self.forward, places, tokens, layout)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockDerivative:
    """Forward and backward of one block, as one program, and its slices.

    All slices read `operands` (carry, lanes, shared, rows of `Chain.body`) and what is named:

    - `forward`: `-> carry`;
    - `keep`: `-> [*carry, *residuals]`, a forward that keeps what its backward will read;
    - `recompute`: `-> residuals`;
    - `backward`: `[*residuals, *cotangent] -> [*carry cotangent, *lane gradients, *shared gradients]`;
    - `input_gradient`: `[*residuals, *cotangent] -> [*carry cotangent, *saved]`;
    - `pull_back`, `pull_input`: `backward` and `input_gradient` that make the residuals again: `cotangent -> ...`;
    - `weight_gradient`: `saved -> [*lane gradients, *shared gradients]`.

    Residuals are what the forward makes of the carry or of the rows and the backward reads. What depends on parameters only is
    made again instead: kept, it would be a copy of the parameters for each microbatch. A remat in the block is opened: its
    backward is one equation, of which no W could be cut off, and the pipeline recomputes the block anyway. (A scan in the block
    stays whole: where parameters are its constants, Bi makes their gradients too.)
    """

    whole: Jaxpr
    num_constants: int
    constants: tuple[Any, ...]
    num_operands: int
    num_carry: int
    num_cotangents: int
    kept_inputs: frozenset[Var]

    @classmethod
    def of(
        cls, chain: Chain, floats: Sequence[bool], lane_gradient: Sequence[bool], shared_gradient: Sequence[bool]
    ) -> BlockDerivative:
        """The derivative of a chain's block.

        `floats`: which carry values have cotangents; `lane_gradient`, `shared_gradient`: for which operands gradients are wanted.
        """
        body = opened(chain.body)
        operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        cotangents = [operands[n] for n, yes in enumerate(floats) if yes]
        wanted = [*floats, *lane_gradient, *shared_gradient, *(False for _ in chain.rows)]

        def whole(operands, cotangents):
            def block(differentiated):
                feed = iter(differentiated)
                out = evaluate(body, [], *(next(feed) if yes else x for yes, x in zip(wanted, operands)))
                return [x for x, yes in zip(out, floats) if yes], out

            _, pull, out = jax.vjp(block, [x for x, yes in zip(operands, wanted) if yes], has_aux=True)
            return [*out, *pull(list(cotangents))[0]]

        jaxpr, constants = constants_to_inputs(inline(jax.make_jaxpr(whole)(operands, cotangents)))
        jaxpr = without_repeats(jaxpr)
        first = len(constants)
        rows = jaxpr.invars[first + len(operands) - len(chain.rows) : first + len(operands)]
        return cls(
            jaxpr,
            first,
            tuple(constants),
            len(operands),
            chain.num_carry,
            len(cotangents),
            frozenset([*jaxpr.invars[first : first + chain.num_carry], *rows]),
        )

    @functools.cached_property
    def _operands(self) -> list[Var]:
        return list(self.whole.invars[: self.num_constants + self.num_operands])

    @functools.cached_property
    def cotangents(self) -> list[Var]:
        return list(self.whole.invars[self.num_constants + self.num_operands :])

    @functools.cached_property
    def outputs(self) -> tuple[list[Atom], list[Atom], list[Atom]]:
        """The next carry; the cotangent of the carry; the gradients of lanes and shared values."""
        out, n = list(self.whole.outvars), self.num_carry
        return out[:n], out[n : n + self.num_cotangents], out[n + self.num_cotangents :]

    def splits(self, layout: BlockLayout, floats: Sequence[bool], local: Sequence[bool]) -> Splits:
        """Where its values are over `tensor`. `local`: of which gradients every device may keep its own part."""
        first = self.num_constants
        places, tokens = layout.inputs(self.num_operands, self.num_carry)
        cotangents = [n for n, yes in enumerate(floats) if yes]
        return follow_splits(
            self.whole,
            [*[WHOLE] * first, *places, *(places[n] for n in cotangents)],
            [*[None] * first, *tokens, *(tokens[n] for n in cotangents)],
            layout,
            kept={*self.residual_vars, *self.saved_vars},
            gradients={v for v, yes in zip(self.outputs[2], local, strict=True) if yes and isinstance(v, Var)},
        )

    def _reached(self, starts: Iterable[Var]) -> set[Var]:
        """All variables that depend on `starts`, themselves included."""
        found = set(starts)
        for eqn in self.whole.eqns:
            if any(isinstance(a, Var) and a in found for a in eqn.invars):
                found.update(eqn.outvars)
        return found

    def _frontier(self, outputs: Sequence[Atom], stops: Any) -> list[Var]:
        """Going back from `outputs`, the variables at which `stops` says to stop, in order of their definition."""
        defined, operands = defining_equations(self.whole.eqns), set(self._operands)
        found: dict[Var, None] = {}
        seen: set[Var] = set()
        pending = [a for a in outputs if isinstance(a, Var)]
        while pending:
            var = pending.pop()
            if var in seen or var in operands:
                continue
            seen.add(var)
            if stops(var):
                found[var] = None
            elif var in defined:
                pending += [a for a in self.whole.eqns[defined[var][0]].invars if isinstance(a, Var)]
        return sorted(found, key=lambda v: defined.get(v, (-1, 0)))

    @functools.cached_property
    def residual_vars(self) -> list[Var]:
        """What the forward keeps for the backward."""
        backward, forward = self._reached(self.cotangents), self._reached(self.kept_inputs)

        def stops(var: Var) -> bool:
            return var not in backward and var in forward and not _is_key(var)

        _, inputs, weights = self.outputs
        return self._frontier([*inputs, *weights], stops)

    @functools.cached_property
    def saved_vars(self) -> list[Var]:
        """What Bi leaves for W: residuals and cotangents that gradients of parameters are made of."""
        residuals, cotangents = set(self.residual_vars), set(self.cotangents)
        _, inputs, weights = self.outputs
        early = slice_program(self.whole.eqns, [*self._operands, *residuals, *cotangents], inputs)
        made = {v for eqn in early.eqns for v in eqn.outvars} & self._reached(cotangents)
        return self._frontier(weights, lambda v: v in residuals or v in cotangents or v in made)

    def _slice(self, more: Sequence[Var], outputs: Sequence[Atom]) -> Jaxpr:
        return slice_program(self.whole.eqns, [*self._operands, *more], outputs)

    @functools.cached_property
    def forward(self) -> Jaxpr:
        return self._slice([], self.outputs[0])

    @functools.cached_property
    def keep(self) -> Jaxpr:
        return self._slice([], [*self.outputs[0], *self.residual_vars])

    @functools.cached_property
    def recompute(self) -> Jaxpr:
        return self._slice([], self.residual_vars)

    @functools.cached_property
    def backward(self) -> Jaxpr:
        _, inputs, weights = self.outputs
        return self._slice([*self.residual_vars, *self.cotangents], [*inputs, *weights])

    @functools.cached_property
    def input_gradient(self) -> Jaxpr:
        _, inputs, _ = self.outputs
        return self._slice([*self.residual_vars, *self.cotangents], [*inputs, *self.saved_vars])

    @functools.cached_property
    def pull_back(self) -> Jaxpr:
        _, inputs, weights = self.outputs
        return self._slice(self.cotangents, [*inputs, *weights])

    @functools.cached_property
    def pull_input(self) -> Jaxpr:
        _, inputs, _ = self.outputs
        return self._slice(self.cotangents, [*inputs, *self.saved_vars])

    @functools.cached_property
    def weight_gradient(self) -> Jaxpr:
        return self._slice(self.saved_vars, self.outputs[2])


def _is_key(var: Var) -> bool:
    return jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended)
