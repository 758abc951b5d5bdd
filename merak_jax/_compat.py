"""The one door to private JAX and Flax: each function here has a test, nothing else imports `jax._src`."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import api as _api
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.dispatch import device_put_p as _device_put_p
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.pjit import sharding_constraint_p as _sharding_constraint_p
from jax.experimental.xla_metadata import set_xla_metadata

# Files whose lines mean nothing to the user; the models of this package are read like the user's own.
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSIDE = tuple(
    _HERE + part for part in ("tracing", "partition", "planning", "runtime", "objects", "parallelize.py", "_compat.py")
)


@contextlib.contextmanager
def replaced_vjp(replacement: Callable) -> Iterator[Callable]:
    """While active, every `jax.grad`, `jax.value_and_grad`, `jax.vjp` calls `replacement(original, fun, *primals, has_aux)`."""
    original, public = _api.vjp, jax.vjp

    def call(fun, *primals, has_aux=False, **_):
        return replacement(original, fun, *primals, has_aux=has_aux)

    _api.vjp = call
    jax.vjp = call
    try:
        yield original
    finally:
        _api.vjp = original
        jax.vjp = public


def no_new_cache_entry() -> Any:
    """A context: what is compiled in it is not written to JAX's persistent compilation cache."""
    return _config.persistent_cache_min_compile_time_secs(float("inf"))


def wrapped_function(fun: Any) -> Any:
    """The function in what `jax.grad` hands to `jax.vjp`."""
    if getattr(fun, "__module__", "") != "jax._src.api_util":
        return fun
    return inspect.getclosurevars(fun).nonlocals.get("f", fun)


@contextlib.contextmanager
def without_placement(warn: Callable[[str, str], None]) -> Iterator[None]:
    """While active, `with_sharding_constraint` and `device_put` of traced values do nothing but `warn(name, line)`.

    Their results would carry the mesh that they name in their types, and everything made of them too.
    """

    def constrained(value, **_):
        warn("with_sharding_constraint", calling_line())
        return value

    def put(*values, devices, **params):
        if not any(isinstance(x, _core.Tracer) for x in values):
            return _core.Primitive.bind(_device_put_p, *values, devices=devices, **params)
        if any(device is not None for device in devices):
            warn("device_put", calling_line())
        return list(values)

    with _bound(_sharding_constraint_p, constrained), _bound(_device_put_p, put):
        yield


@contextlib.contextmanager
def _bound(primitive, bind: Callable) -> Iterator[None]:
    """While active, the primitive binds by this function; may be nested."""
    before = vars(primitive).get("bind")
    primitive.bind = bind
    try:
        yield
    finally:
        if before is None:
            vars(primitive).pop("bind", None)
        else:
            primitive.bind = before


def source_line(eqn) -> str:
    """The user's `file:line (function)` that made an equation; where a library made it for the user, that line second."""
    return _describe_frames(list(_source_info.user_frames(eqn.source_info.traceback)))


def has_source(eqn) -> bool:
    """Whether the equation knows a line outside JAX."""
    return next(_source_info.user_frames(eqn.source_info.traceback), None) is not None


def source_of(eqn) -> Any:
    """A context in which new equations get the lines of this one."""
    return _source_info.user_context(eqn.source_info.traceback)


def calling_line() -> str:
    """The user's line that is running now."""
    return _describe_frames(list(_source_info.user_frames(_source_info.current().traceback)))


def static_arguments(function: Any) -> tuple[int, ...]:
    """The positions of the arguments that a `jax.jit` or `nnx.jit` around a function takes as static."""
    found = getattr(getattr(function, "_jit_info", function), "static_argnums", None)
    return (found,) if isinstance(found, int) else tuple(found or ())


def failing_line(error: BaseException) -> str:
    """The user's line where an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [
        _source_info.Frame(f.filename, f.name, f.lineno, 0, f.lineno, 0)
        for f in reversed(frames)
        if f.lineno is not None and _source_info.is_user_filename(f.filename)
    ]
    return _describe_frames(found)


def _describe_frames(frames) -> str:
    """Frames come innermost first."""

    def show(frame):
        return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"

    frames = [f for f in frames if not f.file_name.startswith(_INSIDE)]
    own = [f for f in frames if f"{os.sep}site-packages{os.sep}" not in f.file_name]
    if not frames:
        return "an unknown line"
    if not own or own[0] is frames[0]:
        return show((own or frames)[0])
    return f"{show(own[0])}, through {show(frames[0])}"


def new_var(aval):
    """A fresh jaxpr variable of abstract value `aval`."""
    return _core.Var(aval)


def remove_dead_equations(jaxpr, used_outputs: Sequence[bool]):
    """`(jaxpr without dead equations and outputs, used_inputs)`; all inputs are kept in the jaxpr."""
    new, used = _partial_eval.dce_jaxpr(jaxpr, list(used_outputs), instantiate=True)
    return new, used


def backend_initialised() -> bool:
    """Whether a JAX device has been touched in this process."""
    return _xla_bridge.backends_are_initialized()


def no_debug_info():
    """The debug info of a jaxpr that no Python function made."""
    return _core.DebugInfo("merak_jax", "merak_jax", None, None)


@contextlib.contextmanager
def separate_trace_cache() -> Iterator[None]:
    """Traces made inside are not shared with traces made outside: a jit that already ran is traced anew, and back."""
    with set_xla_metadata(merak_trace="on"):
        yield


def sub_jaxprs(eqn) -> list:
    """The jaxprs among an equation's parameters (bodies of loops, branches, custom rules)."""
    return list(_core.jaxprs_in_params(eqn.params))


class _RawValue:
    """In the place of the slot `nnx.Variable._raw_value`: whoever reads a value of `deferred_type` gets its `read()`."""

    def __init__(self, slot, deferred_type: Any):
        self.slot, self.deferred_type = slot, deferred_type
        self.local = _VariableReads()

    def __get__(self, variable, owner=None):
        if variable is None:
            return self
        value: Any = self.slot.__get__(variable, owner)
        local = self.local
        if local.guards and id(variable) in local.guards[-1]:
            local.guards[-1][id(variable)]()
        if type(value) is self.deferred_type and not local.paused:
            # The slot keeps the deferred value, so that it is known whether the user has set another one.
            return value.read()
        return value

    def __set__(self, variable, value) -> None:
        self.slot.__set__(variable, value)


class _VariableReads(threading.local):
    """How this thread reads variables: `paused` leaves deferred values as they are, `guards` refuses some variables."""

    def __init__(self):
        self.paused = 0
        self.guards: list[dict[int, Callable[[], None]]] = []


def _raw_value_door() -> _RawValue | None:
    from flax import nnx

    door = vars(nnx.Variable)["_raw_value"]
    return door if isinstance(door, _RawValue) else None


def allow_deferred_values(deferred_type: Any) -> None:
    """From now on an `nnx.Variable` may hold an object of `deferred_type`: whoever reads its raw value gets `read()` of it."""
    from flax import nnx

    if _raw_value_door() is None:
        # Nothing public stands between a Variable and its array: `on_get_value` hooks are part of its graphdef, what is not a
        # jax.Array is refused by jax.jit and jnp.sum, and a subclass of the Variable's type is another pytree type.
        nnx.Variable._raw_value = _RawValue(vars(nnx.Variable)["_raw_value"], deferred_type)


def set_variable(variable, value) -> None:
    """Set the raw value of an `nnx.Variable`, deferred or not, past its hooks."""
    object.__setattr__(variable, "_raw_value", value)


@contextlib.contextmanager
def unread_variables() -> Iterator[None]:
    """While active, this thread sees deferred values of variables as they are."""
    door = _raw_value_door()
    if door is not None:
        door.local.paused += 1
    try:
        yield
    finally:
        if door is not None:
            door.local.paused -= 1


@contextlib.contextmanager
def guarded_variables(refuse: dict[int, Callable[[], None]]) -> Iterator[None]:
    """While active, reading a variable calls `refuse[id(variable)]`, which may raise; after `allow_deferred_values`."""
    door = _raw_value_door()
    assert door is not None
    door.local.guards.append(refuse)
    try:
        yield
    finally:
        door.local.guards.pop()
