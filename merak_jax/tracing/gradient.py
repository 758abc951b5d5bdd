"""Find the user's gradient call: while tracing, each `vjp` becomes one `loss_and_grad` equation.

A step without one is an `evaluation` equation as a whole."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, Var
from jax.interpreters import ad, batching

from merak_jax import _compat
from merak_jax.errors import GradientCallError
from merak_jax.tracing.inline import inline

loss_and_grad_p = Primitive("loss_and_grad")
loss_and_grad_p.multiple_results = True


def loss_and_grad_avals(jaxpr: ClosedJaxpr, num_constants: int) -> list:
    """Abstract results `[loss, *aux, *gradients]` of the equation; operands are `[*constants, *differentiated]`."""
    return [*jaxpr.out_avals, *jaxpr.in_avals[num_constants:]]


@loss_and_grad_p.def_abstract_eval
def _abstract(*_, jaxpr: ClosedJaxpr, num_constants: int, source: str):
    return loss_and_grad_avals(jaxpr, num_constants)


def _transformed(what: str, source: str) -> NoReturn:
    raise GradientCallError(
        f"the gradient at {source} is taken under {what}; call it once, directly in the train step, with the whole batch"
    )


# A loop over microbatches or examples that is written with jax.vmap, and derivatives of gradients.
batching.primitive_batchers[loss_and_grad_p] = lambda *_, source, **__: _transformed("jax.vmap", source)
ad.primitive_jvps[loss_and_grad_p] = lambda *_, source, **__: _transformed("jax.jvp or another derivative", source)

evaluation_p = Primitive("evaluation")
evaluation_p.multiple_results = True


@evaluation_p.def_abstract_eval
def _evaluation_abstract(*_, jaxpr: ClosedJaxpr, num_constants: int, source: str):
    return list(jaxpr.out_avals)


@contextlib.contextmanager
def captured_gradient_calls() -> Iterator[None]:
    """While active, `jax.grad` and its relatives record a `loss_and_grad` equation, however they were imported.

    A gradient taken inside the loss (a gradient penalty) is left as it is. Where the step says where values live is left out.
    """
    inside_loss = False

    def replacement(original, fun, *primals, has_aux):
        nonlocal inside_loss
        if inside_loss:
            return original(fun, *primals, has_aux=has_aux)
        leaves, tree = jax.tree.flatten(primals)
        leaves = [x if isinstance(x, jax.core.Tracer) else jnp.asarray(x) for x in leaves]

        # JAX's own errors name the user's function.
        @functools.wraps(_compat.wrapped_function(fun), updated=())
        def loss_and_aux(*primals):
            out = fun(*primals)
            return out if has_aux else (out, ())

        inside_loss = True
        try:
            closed, shapes = jax.make_jaxpr(loss_and_aux, return_shape=True)(*jax.tree.unflatten(tree, leaves))
        finally:
            inside_loss = False
        closed = inline(closed)
        loss_shape, aux_shape = shapes
        loss_leaves = jax.tree.leaves(loss_shape)
        if len(loss_leaves) != 1 or loss_leaves[0].shape != ():
            hint = (
                "return its mean or its sum"
                if len(loss_leaves) == 1
                else "if it returns (loss, aux), pass has_aux=True"
            )
            raise GradientCallError(
                f"the function differentiated at {_compat.calling_line()} must return one scalar, but "
                f"returns {jax.tree.map(lambda x: x.str_short() if hasattr(x, 'str_short') else str(x.shape), loss_shape)}; {hint}"
            )
        constants = list(closed.consts)
        converted = _constants_first(closed)
        results: list = loss_and_grad_p.bind(
            *constants, *leaves, jaxpr=converted, num_constants=len(constants), source=_compat.calling_line()
        )
        # What the loss only passes on (nnx.grad returns the whole model) is what went in, not a result of the pipeline.
        passed = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*constants, *leaves]))
        for n, atom in enumerate(closed.jaxpr.outvars[1:], 1):
            if isinstance(atom, Var) and atom in passed:
                results[n] = passed[atom]
        loss = jax.tree.unflatten(jax.tree.structure(loss_shape), results[:1])
        num_aux = len(jax.tree.leaves(aux_shape))
        aux = jax.tree.unflatten(jax.tree.structure(aux_shape), results[1 : 1 + num_aux])
        gradients = results[1 + num_aux :]

        def pull_back(cotangent):
            seed = jax.tree.leaves(cotangent)[0]
            one = not isinstance(seed, jax.core.Tracer) and np.all(np.asarray(seed) == 1)

            def gradient(leaf, value):
                if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                    return np.zeros(np.shape(leaf), jax.dtypes.float0)
                return value if one else value * jnp.asarray(seed).astype(value.dtype)

            return jax.tree.unflatten(tree, [gradient(x, g) for x, g in zip(leaves, gradients)])

        return (loss, pull_back, aux) if has_aux else (loss, pull_back)

    def left_out(name: str, line: str) -> None:
        warnings.warn(
            f"`{name}` at {line} is left out of the parallel step: its plan says where values live, and no number changes",
            stacklevel=2,
        )

    with _compat.replaced_vjp(replacement), _compat.separate_trace_cache(), _compat.without_placement(left_out):
        yield


def _constants_first(closed: ClosedJaxpr) -> ClosedJaxpr:
    from merak_jax.tracing.jaxprs import constants_to_inputs

    jaxpr, _ = constants_to_inputs(closed)
    return ClosedJaxpr(jaxpr, [])
