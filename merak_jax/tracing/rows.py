"""Walk the two matched programs together, give every value its status, rewrite what has to count once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import NotSeparableError
from merak_jax.tracing import indexing as _indexing  # noqa: F401 (registers its rules)
from merak_jax.tracing import nested
from merak_jax.tracing import shape_rules as _shape_rules  # noqa: F401 (registers its rules)
from merak_jax.tracing.jaxprs import evaluate, make_jaxpr, slice_program
from merak_jax.tracing.matching import open_jaxpr, same_program
from merak_jax.tracing.separability import RULES, Batched, Partial, Shared, Status, Uniform, is_rows

Atom = Any  # a variable or a literal

# Equations that can give the batch dimension to a value which had none.
_CREATORS = frozenset({"broadcast_in_dim", "iota", "random_bits", "random_split", "tile"})

WAYS_OUT = (
    "Microbatches would not give the numbers of the full batch. Three ways out: run the batch whole "
    "(num_microbatches=1 on a mesh with data=1), take every microbatch as a batch of its own (semantics='per_microbatch': "
    "other numbers), or rewrite the loss as a sum over rows (divided by counts that depend on the batch only)."
)


def differing_axes(full: Any, micro: Any) -> list[int]:
    """The axes along which two abstract values have different sizes."""
    return [i for i, (a, b) in enumerate(zip(full.shape, micro.shape)) if a != b]


@dataclass
class Walked:
    """A nested program, statuses of its outputs, and whether its last input is the row numbers."""

    jaxpr: Any
    status: list[Status]
    uses_numbers: bool

    def with_numbers(self, rows: int) -> Walked:
        """The same with an unused last input, unless it reads the row numbers already."""
        if self.uses_numbers:
            return self
        return Walked(
            _with_invars(self.jaxpr, [*open_jaxpr(self.jaxpr).invars, numbers_variable(rows)]), self.status, True
        )

    def numbers_at(self, index: int) -> Walked:
        """The same with the row numbers moved to position `index`."""
        *others, numbers = open_jaxpr(self.jaxpr).invars
        return Walked(_with_invars(self.jaxpr, [*others[:index], numbers, *others[index:]]), self.status, True)


def _with_invars(jaxpr: Any, invars: list[Var]) -> Any:
    inner = open_jaxpr(jaxpr)
    new = make_jaxpr(inner.constvars, invars, inner.outvars, inner.eqns)
    return ClosedJaxpr(new, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else new


def numbers_variable(rows: int) -> Var:
    """A variable for the numbers, uint32 [rows], that the rows of a microbatch have in the whole batch."""
    return _compat.new_var(jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((rows,), np.uint32)).in_avals[0])


@dataclass
class Walker:
    """Statuses of the values of one program (nested programs get their own walker).

    Attributes:
      rows_full, rows_micro: rows of the full batch and of a microbatch.
      numbers: the input that numbers the rows of the microbatch, uint32 [b].
      may_gate: whether equations that read `numbers` may be added.
      own: every microbatch is a batch of its own: what couples its rows is fine, and nothing counts only once.
      within: what to say instead of an equation's own line, in a program that has none.
      status: of each variable of the microbatch program that the pipeline can have.
      missing: variables that it can't have, and why.
      eqns: the rewritten program so far.
    """

    rows_full: int
    rows_micro: int
    may_gate: bool = True
    own: bool = False
    within: str = ""
    numbers: Var = field(init=False)
    uses_numbers: bool = False
    status: dict[Var, Status] = field(default_factory=dict)
    missing: dict[Var, NotSeparableError] = field(default_factory=dict)
    eqns: list[JaxprEqn] = field(default_factory=list)
    seen: list[tuple[JaxprEqn, JaxprEqn]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = numbers_variable(self.rows_micro)

    def read(self, atom: Atom) -> Status:
        """The status of an operand; raises what was found when its variable was made, if it is missing."""
        if isinstance(atom, Literal):
            return Shared()
        if atom in self.missing:
            raise self.missing[atom]
        return self.status[atom]

    def place(self, eqn: JaxprEqn) -> str:
        """The user's line of an equation, or the last one before it: cached library code has none."""
        if self.within:
            return self.within
        for candidate in (eqn, *(e for e, _ in reversed(self.seen))):
            line = _compat.source_line(candidate)
            if line and line != "an unknown line":
                return f"{'At' if candidate is eqn else 'After'} {line}"
        return "At an unknown line"

    def step(self, full: JaxprEqn, micro: JaxprEqn) -> list[Status]:
        """Add one matched equation to the program, or raise NotSeparableError and add nothing."""
        if not self.own:
            return self._proved(full, micro)
        try:
            found = self._proved(full, micro)
        except NotSeparableError:
            self.eqns.append(micro)
            found = [self._by_shape(a.aval, b.aval) for a, b in zip(full.outvars, micro.outvars)]
        found = [Shared() if isinstance(s, Partial) else s for s in found]
        self.status.update(zip(micro.outvars, found))
        return found

    def _by_shape(self, full: Any, micro: Any) -> Status:
        """Rows along the one axis that follows the batch, if there is one; else a value of the microbatch's own."""
        axes = differing_axes(full, micro)
        status = Batched(axes[0], 1, max(1, full.shape[axes[0]] // self.rows_full)) if len(axes) == 1 else Shared()
        return status if self.consistent(status, full, micro) else Shared()

    def _proved(self, full: JaxprEqn, micro: JaxprEqn) -> list[Status]:
        self.seen.append((full, micro))
        op = Equation(self, full, micro, [self.read(a) for a in micro.invars])
        if all(isinstance(s, Shared) for s in op.status) and same_program(full, micro):
            result: Any = Shared()
        elif op.name not in RULES:
            op.fail(f"how the primitive `{op.name}` treats the rows of the batch is not known")
        elif not any(is_rows(s) or isinstance(s, Partial) for s in op.status) and not (
            op.name in _CREATORS or _holds_programs(micro)
        ):
            op.fail("a value that every row shares is shaped by the number of rows")
        else:
            result = RULES[op.name](op)
        statuses = result if isinstance(result, list) else [result] * len(micro.outvars)
        for a, b, status in zip(full.outvars, micro.outvars, statuses):
            if not self.consistent(status, a.aval, b.aval):
                op.fail(f"the result of `{op.name}` has the batch in two dimensions, or rows that are not in the batch")
        op.finish()
        self.status.update(zip(micro.outvars, statuses))
        return statuses

    def consistent(self, status: Status, full: Any, micro: Any) -> bool:
        """Whether the shapes in both programs agree with a status."""
        axes = differing_axes(full, micro)
        if not is_rows(status):
            return not axes
        if axes != [status.axis]:
            return False
        share, rest = divmod(full.shape[status.axis], self.rows_full)
        if rest or micro.shape[status.axis] != share * self.rows_micro:
            return False
        return not isinstance(status, Batched) or status.outer * status.inner == share

    def program(self, full: Jaxpr, micro: Jaxpr, statuses: Sequence[Status], sums: Sequence[bool]) -> Walked:
        """Walk a whole nested program; outputs flagged in `sums` that are shared count once."""
        self.status.update(zip(micro.invars, statuses))
        self.status.update((v, Shared()) for v in micro.constvars)
        for a, b in zip(full.eqns, micro.eqns):
            self.step(a, b)
        outvars, found = list(micro.outvars), [self.read(a) for a in micro.outvars]
        for i, wanted in enumerate(sums):
            if wanted and isinstance(found[i], Shared):
                outvars[i], found[i] = (
                    self.once(outvars[i], self.seen[-1][1] if self.seen else None),
                    Partial(),
                )
        changed = self.uses_numbers or len(self.eqns) != len(micro.eqns)
        changed = changed or any(a is not b for a, b in zip(self.eqns, micro.eqns))
        if not changed and all(a is b for a, b in zip(outvars, micro.outvars)):
            return Walked(micro, found, False)
        invars = [*micro.invars, self.numbers] if self.uses_numbers else micro.invars
        return Walked(make_jaxpr(micro.constvars, invars, outvars, self.eqns), found, self.uses_numbers)

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero: counting it many times does no harm."""
        if isinstance(atom, Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        for _, eqn in reversed(self.seen):
            if atom in eqn.outvars:
                return eqn.primitive.name in ("broadcast_in_dim", "convert_element_type") and self.is_zero(
                    eqn.invars[0]
                )
        return False

    def once(self, atom: Atom, near: JaxprEqn | None) -> Atom:
        """A shared value as a sum over microbatches: itself in the first one, zero in the others."""
        if self.is_zero(atom):
            return atom
        if not self.may_gate:
            line = self.place(near) if near is not None else self.within
            raise NotSeparableError(
                "A term that does not depend on the batch is added to a sum over the batch inside a function "
                f"with a custom derivative or a nested call: move it out. {line}. {WAYS_OUT}"
            )
        self.uses_numbers = True

        def gate(numbers, value):
            return lax.select_n(numbers[0] == 0, lax.full_like(value, 0), value)

        return self.insert(gate, [self.numbers, atom], near, Partial())

    def insert(self, function: Callable, operands: Sequence[Atom], near: JaxprEqn | None, status: Status) -> Var:
        """Add the equations of a small function of `operands`; returns its result."""
        avals = [a.aval for a in operands]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands))
        for eqn in jaxpr.eqns:
            invars = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars))
            source = {} if near is None else {"source_info": near.source_info}
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, **source))
            self.status.update((v, self._inserted_status(v, status)) for v in outvars)
        result = env[jaxpr.outvars[0]]
        self.status[result] = status
        return result

    def _inserted_status(self, var: Var, status: Status) -> Status:
        return status if is_rows(status) and var.aval.ndim > status.axis else Shared()


def _holds_programs(eqn: JaxprEqn) -> bool:
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    return any(isinstance(v, Jaxpr | ClosedJaxpr) for v in values)


class Equation:
    """One matched equation, as a rule sees it: statuses of its operands, ways to fail and to rewrite it."""

    def __init__(self, walker: Walker, full: JaxprEqn, micro: JaxprEqn, status: list[Status]):
        self.walker, self.full, self.micro, self.status = walker, full, micro, status
        self.name, self.params = micro.primitive.name, micro.params
        self.rows_full = walker.rows_full
        self._once: set[int] = set()
        self._operands = list(micro.invars)
        self._new_params: dict[str, Any] = {}
        self._inserts: list[Callable[[], None]] = []
        self._numbers_at: int | None = None
        self._replacement: JaxprEqn | None = None

    def ndim(self, i: int) -> int:
        return self.micro.invars[i].aval.ndim

    def fail(self, what: str, error: type[NotSeparableError] = NotSeparableError) -> NoReturn:
        """Raise an error that says what, where, and how to get out."""
        shape = ", ".join(v.aval.str_short() for v in self.full.outvars) or "no result"
        raise error(
            f"The loss is not a sum over microbatches: {what}. {self.walker.place(self.full)}, "
            f"`{self.name}` with result {shape} for the full batch. {WAYS_OUT}"
        )

    def refuse_partial(self) -> None:
        """Fail if an operand is a sum over the batch."""
        if not any(isinstance(s, Partial) for s in self.status):
            return
        if any(is_rows(s) for s in self.status):
            self.fail(
                f"`{self.name}` mixes a sum over the batch with the rows of the batch, as batch normalization does"
            )
        if sum(isinstance(s, Partial) for s in self.status) > 1:
            self.fail(f"`{self.name}` of two sums over the batch is not the sum of the microbatches' own")
        self.fail(f"`{self.name}` of a sum over the batch is not the sum of the `{self.name}`s of the microbatches")

    def new_batch_axis(self) -> int:
        """The axis that the batch has in the result of an equation whose operands have none."""
        axes = differing_axes(self.full.outvars[0].aval, self.micro.outvars[0].aval)
        if len(axes) != 1:
            self.fail("a value has the batch in two dimensions")
        return axes[0]

    def layout(self, rows: Batched | Uniform) -> Batched:
        """A batched status with the order of its rows spelled out (for the first operand)."""
        if isinstance(rows, Batched):
            return rows
        return Batched(rows.axis, 1, self.full.invars[0].aval.shape[rows.axis] // self.rows_full)

    # -- rewriting

    def count_once(self, i: int) -> None:
        """Operand `i` is shared: replace it by one whose sum over microbatches is the value."""
        if self.walker.own:
            return
        if not self.walker.may_gate and not self.walker.is_zero(self.micro.invars[i]):
            self.walker.once(self.micro.invars[i], self.micro)
        self._once.add(i)

    def insert_numbers(self, position: int) -> None:
        """Give the equation the row numbers as an operand at `position`."""
        self._numbers_at = position

    def set_params(self, **params: Any) -> None:
        self._new_params.update(params)

    def draw(self, primitive: Any, **params: Any) -> None:
        """Replace a random draw by `primitive(key, row numbers)`."""
        if not self.walker.may_gate:
            self.fail(
                "random numbers are drawn along the batch inside a function with a custom derivative: draw them outside"
            )
        self.walker.uses_numbers = True
        operands = [self.micro.invars[0], self.walker.numbers]
        self._replacement = self.micro.replace(primitive=primitive, invars=operands, params=params)

    def own_rows(self, i: int, operand: Batched | Uniform, column: int) -> Batched | None:
        """Recognise `x[arange(B), …]`: `column` of the indices in operand `i` numbers the rows.

        Returns the rows of the index operand, after replacing the row numbers by those within the microbatch.
        """
        if self.layout(operand) != Batched(operand.axis):
            return None
        pieces = self._index_columns(self.micro.invars[i], 1), self._index_columns(self.full.invars[i], 0)
        if column >= len(pieces[0]):
            return None
        found = [self._constant(p[column], side) for p, side in zip(pieces, (1, 0))]
        numbers = [n for n in found if n is not None and n.ndim > 0 and n.shape[-1] == 1]
        if len(numbers) < 2:
            return None
        axes = [a for a in range(numbers[0].ndim - 1) if numbers[1].shape[a] != numbers[0].shape[a]]
        if len(axes) != 1 or numbers[1].shape[axes[0]] != self.rows_full:
            return None
        axis = axes[0]
        for n in numbers:
            rows = np.arange(n.shape[axis]).reshape([-1 if a == axis else 1 for a in range(n.ndim)])
            if not np.array_equal(n, np.broadcast_to(rows, n.shape)):
                return None
        others = [p for k, p in enumerate(pieces[0]) if k != column]
        if any(is_rows(s) and s not in (Batched(axis), Uniform(axis)) for s in map(self.walker.read, others)):
            return None

        def insert():
            dtype, shape = numbers[0].dtype, numbers[0].shape

            def indices(*columns):
                own = lax.broadcasted_iota(dtype, shape, axis)
                return lax.concatenate([*columns[:column], own, *columns[column:]], len(shape) - 1)

            self._operands[i] = self.walker.insert(indices, others, self.micro, Batched(axis))

        self._inserts.append(insert)
        return Batched(axis)

    def _index_columns(self, atom: Atom, side: int) -> list[Atom]:
        for pair in reversed(self.walker.seen):
            eqn = pair[side]
            if atom in eqn.outvars:
                if eqn.primitive.name == "concatenate" and eqn.params["dimension"] == atom.aval.ndim - 1:
                    return list(eqn.invars) if all(a.aval.shape[-1] == 1 for a in eqn.invars) else []
                break
        return [atom]

    def _constant(self, atom: Atom, side: int) -> np.ndarray | None:
        try:
            program = slice_program([pair[side] for pair in self.walker.seen], [], [atom])
        except KeyError:
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(evaluate(program, [])[0])

    def finish(self) -> None:
        """Add the equation, rewritten where the rule asked for it, to the program."""
        for insert in self._inserts:
            insert()
        for i in sorted(self._once):
            self._operands[i] = self.walker.once(self.micro.invars[i], self.micro)
        if self._numbers_at is not None:
            self._operands.insert(self._numbers_at, self.walker.numbers)
            self.walker.uses_numbers = True
        eqn = self.micro
        if self._replacement is not None:
            self.walker.eqns.append(self._replacement)
            return
        if self._operands != list(eqn.invars):
            eqn = eqn.replace(invars=self._operands)
        if any(v is not self.params[k] for k, v in self._new_params.items()):
            eqn = eqn.replace(params={**self.params, **self._new_params})
        self.walker.eqns.append(eqn)

    # -- nested programs

    def walk(
        self, param: str, statuses: Sequence[Status], *, index: int | None = None,
        sums: Sequence[bool] = (), may_gate: bool = True,
    ) -> Walked:  # fmt: skip
        """Walk the program in `param` (or the `index`-th in it) on operands of the given statuses."""
        full, micro = self.full.params[param], self.params[param]
        if index is not None:
            full, micro = full[index], micro[index]
        walker = self.inner_walker(may_gate=may_gate)
        walked = walker.program(open_jaxpr(full), open_jaxpr(micro), statuses, sums)
        if walked.jaxpr is open_jaxpr(micro):
            return Walked(micro, walked.status, False)
        if isinstance(micro, ClosedJaxpr):
            return Walked(ClosedJaxpr(walked.jaxpr, micro.consts), walked.status, walked.uses_numbers)
        return walked

    def inner_walker(self, *, may_gate: bool) -> Walker:
        """A walker for a program inside this equation."""
        return Walker(self.rows_full, self.walker.rows_micro, may_gate and self.walker.may_gate, self.walker.own)

    def fixpoint(self, carry: Sequence[Status], walk: Callable[[list[Status]], Walked]) -> tuple[list[Status], Walked]:
        """The statuses of a loop's carry that are true at every turn, and the body walked on them."""
        carry = list(carry)
        while True:
            inner = walk(carry)
            joined = [nested.join(self, a, b) for a, b in zip(carry, inner.status)]
            if joined == carry:
                return carry, inner
            carry = joined
