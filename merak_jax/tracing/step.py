"""Trace a train step once, on abstract values, into one flat jaxpr with one `loss_and_grad` equation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from merak_jax import _compat
from merak_jax.errors import BatchError, GradientCallError, MerakError, TraceError
from merak_jax.tracing.gradient import captured_gradient_calls, evaluation_p
from merak_jax.tracing.inline import inline
from merak_jax.tracing.jaxprs import constants_to_inputs, make_jaxpr


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A train step as a flat jaxpr over the leaves of its arguments.

    `jaxpr`: the step; constants, then one input per leaf. `loss_eqn`: the position of its `loss_and_grad` equation, or of the
    one `evaluation` equation where the step takes no gradient.
    `loss`: the differentiated function, flat, inputs `[constants..., differentiated leaves...]`; for an evaluation the step.
    `leaf_argument`, `leaf_path`, `leaf_rows`: per input leaf its argument number, its path, and whether dimension 0 is the batch.
    `source`: the `file:line (function)` where the user defined the step, or its text.
    """

    jaxpr: ClosedJaxpr
    loss_eqn: int
    loss: ClosedJaxpr
    num_loss_constants: int
    in_trees: tuple[Any, ...]
    out_tree: Any
    leaf_argument: tuple[int, ...]
    leaf_path: tuple[str, ...]
    leaf_keys: tuple[tuple[Any, ...], ...]
    leaf_rows: tuple[bool, ...]
    rows: int
    source: str

    @property
    def equation(self) -> JaxprEqn:
        return self.jaxpr.jaxpr.eqns[self.loss_eqn]

    @property
    def is_evaluation(self) -> bool:
        return self.equation.primitive is evaluation_p


def unwrap(train_step: Callable) -> Callable:
    """The Python function below `jax.jit`, whose cached trace would hide the gradient call. TraceError for `jax.pmap`."""
    if inspect.isfunction(train_step) and hasattr(train_step, "lower"):
        raise TraceError(
            "the train step is wrapped in jax.pmap, which gives every device its own batch; pass the function "
            "itself, with the whole batch and an unreplicated state, and remove lax.pmean and lax.psum from it"
        )
    while hasattr(train_step, "__wrapped__") and hasattr(train_step, "lower"):
        train_step = train_step.__wrapped__
    return train_step


def source_of(train_step: Callable) -> str:
    """Where the step is defined: `file:line (name)`."""
    function = inspect.unwrap(train_step)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code is not None else repr(function)


def python_random_state() -> tuple:
    """The state of Python's and of NumPy's own random numbers, to compare."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, tuple(keys), *rest


def static_arguments(train_step: Callable) -> tuple[int, ...]:
    """The positions of the arguments that are static under the jits which `unwrap` removes."""
    found: set[int] = set()
    while hasattr(train_step, "__wrapped__") and hasattr(train_step, "lower"):
        found.update(_compat.static_arguments(train_step))
        train_step = train_step.__wrapped__
    return tuple(sorted(found))


def abstract(tree: Any, name: str = "the value") -> Any:
    """`tree` with a ShapeDtypeStruct (weak types kept) for each leaf; TraceError, with its name, for what is no array."""

    def leaf(path, x):
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
        try:
            aval = jax.typeof(jax.numpy.asarray(x) if isinstance(x, (bool, int, float, complex)) else x)
        except TypeError as error:
            kind = f"{type(x).__name__}{f' of {x.dtype}' if hasattr(x, 'dtype') else ''}"
            raise TraceError(
                f"{name}{jax.tree_util.keystr(path)} is a {kind}, not an array of numbers or a number; keep other values out of "
                "the state and the batch, and bind options first: merak_jax.parallelize(functools.partial(train_step, ...))"
            ) from error
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def batch_rows(batch_leaves: Sequence[tuple[str, Any]]) -> tuple[int, list[bool]]:
    """`(B, which leaves carry rows)`: every array leaf has the batch in dimension 0, scalars and keys have none.

    Raises BatchError when leaves disagree on B or when no leaf has rows.
    """

    def is_typed_key(leaf):
        return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    def is_raw_key(leaf):
        return leaf.dtype == jax.numpy.uint32 and leaf.shape in ((2,), (4,))

    # A short uint32 vector may be labels or a raw key: it is a key where the other leaves have another number of rows.
    plain = {leaf.shape[0] for _, leaf in batch_leaves if leaf.ndim and not is_typed_key(leaf) and not is_raw_key(leaf)}
    has_rows = [
        leaf.ndim > 0 and not is_typed_key(leaf) and (not is_raw_key(leaf) or not plain or leaf.shape[0] in plain)
        for _, leaf in batch_leaves
    ]
    sizes = {path: leaf.shape[0] for (path, leaf), rows in zip(batch_leaves, has_rows) if rows}
    if not sizes:
        raise BatchError("the batch has no array with a leading batch dimension; pass arrays [batch, ...]")
    if len(set(sizes.values())) > 1:
        first_of = {size: path for path, size in reversed(sizes.items())}
        listing = ", ".join(f"{path}: {size}" for size, path in list(first_of.items())[:4])
        raise BatchError(
            f"the leaves of the batch disagree on the size of dimension 0, the batch ({listing}); pass values that "
            "have no batch dimension as another argument of the train step"
        )
    return next(iter(sizes.values())), has_rows


def trace(
    train_step: Callable, args: Sequence[Any], batch_argnums: Sequence[int], rows: int | None = None
) -> TracedStep:
    """Trace `train_step(*args)` (arrays or abstract values); with `rows`, as if the batch had that many rows.

    Raises GradientCallError when the step takes more than one gradient, or none although it changes the weights in its state.
    """
    args = tuple(abstract(a) for a in args)
    flat, leaf_argument, leaf_path, leaf_keys = [], [], [], []
    for number, arg in enumerate(args):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            flat.append(leaf)
            leaf_argument.append(number)
            leaf_keys.append(tuple(keys))
            leaf_path.append(jax.tree_util.keystr(keys))
    batch = [i for i, number in enumerate(leaf_argument) if number in batch_argnums]
    size, has_rows = batch_rows([(f"argument {leaf_argument[i]}{leaf_path[i]}", flat[i]) for i in batch])
    leaf_rows = [False] * len(flat)
    for i, yes in zip(batch, has_rows):
        leaf_rows[i] = yes
        if yes and rows is not None:
            flat[i] = jax.ShapeDtypeStruct((rows, *flat[i].shape[1:]), flat[i].dtype, weak_type=flat[i].weak_type)
    in_trees = tuple(jax.tree.structure(a) for a in args)

    # A new function for every trace, so that no earlier trace of it is used again; JAX's own errors name the user's.
    @functools.wraps(train_step)
    def fresh_step(*args):
        return train_step(*args)

    abstract_args, start = [], 0
    for tree in in_trees:
        abstract_args.append(jax.tree.unflatten(tree, flat[start : start + tree.num_leaves]))
        start += tree.num_leaves
    try:
        with captured_gradient_calls():
            closed, out_shape = jax.make_jaxpr(fresh_step, return_shape=True)(*abstract_args)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"the train step names a mesh axis at {_compat.failing_line(error)}, as code for jax.pmap does "
            f"({str(error).splitlines()[0]}); remove lax.pmean, lax.psum and axis_name= from it: the step sees the whole batch"
        ) from error
    except (TypeError, ValueError, AssertionError) as error:
        if rows is None or isinstance(error, MerakError):
            raise
        other = _other_rows(train_step, args, batch_argnums, size)
        raise TraceError(
            f"the train step works for a batch of {size} rows but not for one of {rows} rows, as which it is "
            f"traced to cut it into microbatches: at {_compat.failing_line(error)}, {error}; take sizes from the batch, "
            "not from constants; an operation that needs all rows at once (a top_k or a permutation of the batch) couples "
            f"them, and the batch can only be run whole (num_microbatches=1 on a mesh with data=1){other}"
        ) from error
    flat_program = inline(closed)
    closed = _without_dead_equations(flat_program)
    position = _the_gradient_call(closed.jaxpr)
    if position is None:
        unused = [e for e in flat_program.jaxpr.eqns if e.primitive.name == "loss_and_grad"]
        if unused:
            raise GradientCallError(
                f"the train step takes no gradient that it uses: the result of the call at {unused[0].params['source']} does "
                "not reach what the step returns; return the new state"
            )
        first = [v for v, number in zip(closed.jaxpr.invars, leaf_argument) if number == 0]
        for start in _places(jax.tree.structure(out_shape), in_trees[0]):
            _check_evaluation(first, closed.jaxpr.outvars[start : start + len(first)])
        closed, position = _as_evaluation(closed), 0
    eqn = closed.jaxpr.eqns[position]
    loss = inline(eqn.params["jaxpr"])
    _check_effects([*closed.jaxpr.eqns, *loss.jaxpr.eqns])
    return TracedStep(
        jaxpr=closed,
        loss_eqn=position,
        loss=loss,
        num_loss_constants=eqn.params["num_constants"],
        in_trees=in_trees,
        out_tree=jax.tree.structure(out_shape),
        leaf_argument=tuple(leaf_argument),
        leaf_path=tuple(leaf_path),
        leaf_keys=tuple(leaf_keys),
        leaf_rows=tuple(leaf_rows),
        rows=rows if rows is not None else size,
        source=source_of(train_step),
    )


def _other_rows(train_step: Callable, args: Sequence[Any], batch_argnums: Sequence[int], size: int) -> str:
    """Advice, if arguments that were not said to be the batch, or leaves of the state, have as many rows as it has."""

    def has_rows(arg):
        return any(leaf.ndim and leaf.shape[0] == size for leaf in jax.tree.leaves(arg))

    rest = range(max(batch_argnums) + 1, len(args))
    missed = [n for n in rest if has_rows(args[n])]
    if not missed:
        found = [
            f"argument {n}{jax.tree_util.keystr(keys)}"
            for n in range(min(batch_argnums))
            for keys, leaf in jax.tree_util.tree_flatten_with_path(args[n])[0]
            if leaf.ndim and leaf.shape[0] == size
        ]
        # Where many leaves have this size it is that of the model.
        return (
            f"; if {', '.join(found)} holds a value per row, it belongs into the batch" if 0 < len(found) <= 3 else ""
        )
    try:
        names = list(inspect.signature(train_step).parameters)
    except (TypeError, ValueError):
        names = []
    shown = ", ".join(f"`{names[n]}`" if n < len(names) else f"number {n}" for n in missed)
    return (
        f"; argument {shown} has {size} rows too: if it is part of the batch, say "
        f"batch_argnums={(*sorted(batch_argnums), *missed)}"
    )


def _check_effects(eqns: Sequence[JaxprEqn]) -> None:
    """Prints for debugging are left out, with a warning; TraceError for callbacks that the step's meaning depends on."""
    for eqn in eqns:
        if not eqn.effects:
            continue
        line = _compat.source_line(eqn)
        if all("Debug" in type(effect).__name__ for effect in eqn.effects):
            warnings.warn(f"the parallel step leaves out the debug print or callback at {line}", stacklevel=2)
        else:
            raise TraceError(
                f"`{eqn.primitive.name}` at {line} has side effects, which a step that runs in microbatches on many "
                "devices would repeat; move it out of the train step"
            )


def _without_dead_equations(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop equations that no output needs; a gradient call that only feeds dropped values goes with them."""
    jaxpr = closed.jaxpr
    live = {a for a in jaxpr.outvars if isinstance(a, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(a for a in eqn.invars if isinstance(a, Var))
    return ClosedJaxpr(make_jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, kept[::-1]), closed.consts)


def _the_gradient_call(jaxpr: Jaxpr) -> int | None:
    found = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "loss_and_grad"]
    nested = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "loss_and_grad" and _holds_gradient_call(eqn)]
    if nested:
        raise GradientCallError(
            f"the gradient is taken inside a `{nested[0].primitive.name}` at {_compat.source_line(nested[0])}; "
            "call it once, directly in the train step: an accumulation loop is replaced by num_microbatches="
        )
    if not found:
        return None
    if len(found) > 1:
        lines = list(dict.fromkeys(jaxpr.eqns[i].params["source"] for i in found))
        fix = (
            "call it once, with the whole batch: an accumulation loop is replaced by num_microbatches="
            if len(lines) == 1
            else "sum the losses and differentiate once, or wrap one step per loss"
        )
        raise GradientCallError(
            f"the train step takes {len(found)} gradients ({'; '.join(lines)}); exactly one can be pipelined: {fix}"
        )
    return found[0]


def _check_evaluation(first: Sequence[Var], new: Sequence[Any]) -> None:
    """Raise GradientCallError for a step without a gradient that returns its first argument with other weights: it trains.

    Metrics in a state may change; they are small.
    """

    def size(pairs):
        return sum(math.prod(a.aval.shape) for a, _ in pairs if jax.numpy.issubdtype(a.aval.dtype, jax.numpy.inexact))

    pairs = list(zip(first, new))
    if any(a.aval.shape != b.aval.shape for a, b in pairs):
        return
    changed = size([(a, b) for a, b in pairs if a is not b])
    if changed and 10 * changed > size(pairs):
        raise GradientCallError(
            "the train step takes no gradient (no jax.grad, jax.value_and_grad or jax.vjp was called, or its result is not "
            "used), but it changes its state; an evaluation step returns what it computes, not a new state"
        )


def _places(out_tree: Any, tree: Any) -> list[int]:
    """Where, among the flat outputs, a tree of this structure stands at the top of what the step returns."""
    if out_tree == tree:
        return [0]
    children = jax.tree_util.treedef_children(out_tree)
    starts = list(itertools.accumulate((c.num_leaves for c in children), initial=0))
    return [start for child, start in zip(children, starts) if child == tree and tree.num_leaves]


def _as_evaluation(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The step as one equation; what it returns untouched goes past it."""
    jaxpr = closed.jaxpr
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    made = [n for n, a in enumerate(jaxpr.outvars) if not isinstance(a, Literal) and a not in inputs]
    inner, _ = constants_to_inputs(closed)
    inner = inline(ClosedJaxpr(make_jaxpr([], inner.invars, [inner.outvars[n] for n in made], inner.eqns), []))
    results = [_compat.new_var(jaxpr.outvars[n].aval) for n in made]
    operands = [*jaxpr.constvars, *jaxpr.invars]
    template = jax.make_jaxpr(
        lambda *xs: evaluation_p.bind(*xs, jaxpr=inner, num_constants=len(operands), source="the step")
    )(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands))
    eqn = template.jaxpr.eqns[0].replace(invars=operands, outvars=results)
    outvars = list(jaxpr.outvars)
    for n, v in zip(made, results):
        outvars[n] = v
    return ClosedJaxpr(make_jaxpr(jaxpr.constvars, jaxpr.invars, outvars, [eqn]), closed.consts)


def _holds_gradient_call(eqn: JaxprEqn) -> bool:
    for inner in _compat.sub_jaxprs(eqn):
        if any(e.primitive.name == "loss_and_grad" or _holds_gradient_call(e) for e in inner.eqns):
            return True
    return False
