"""Make and check the (data, pipe, tensor) mesh; emulate devices on a CPU."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from merak_jax import _compat
from merak_jax.errors import EmulationError, MeshError

AXES = ("data", "pipe", "tensor")


def make_mesh(*, data: int = 1, pipe: int = 1, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """A mesh of Auto axes `data`, `pipe`, `tensor`, in this order, over the first `data * pipe * tensor` devices.

    Raises MeshError when a size is not a positive integer or the devices are too few; warns when some stay unused.
    """
    sizes = {"data": data, "pipe": pipe, "tensor": tensor}
    for name, size in sizes.items():
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
            raise MeshError(f"{name}={size!r} must be a positive integer")
    devices = list(jax.devices() if devices is None else devices)
    needed = math.prod(sizes.values())
    if needed > len(devices):
        raise MeshError(
            f"data={data} x pipe={pipe} x tensor={tensor} needs {needed} devices, but there are {len(devices)} "
            f"({devices[0].platform}); make an axis smaller, or call merak_jax.emulate({needed}) before the first use of JAX"
        )
    if needed < len(devices):
        warnings.warn(f"the mesh uses {needed} of {len(devices)} devices", stacklevel=2)
    grid = np.array(devices[:needed]).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def check_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes in the order data, pipe, tensor; absent axes get size 1. Device order along each axis is kept.

    Raises MeshError for unknown axis names and for Explicit or Manual axes.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh must be a jax.sharding.Mesh (see merak_jax.make_mesh), got {type(mesh).__name__}")
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise MeshError(
            f"the mesh has axes {tuple(mesh.axis_names)}; {unknown} are unknown: use data, pipe and tensor, "
            "as merak_jax.make_mesh(data=..., pipe=..., tensor=...) does"
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    wrong = [name for name, kind in kinds.items() if kind != AxisType.Auto]
    if wrong:
        raise MeshError(
            f"axes {wrong} of the mesh are {kinds[wrong[0]].name}; ordinary Flax code needs Auto axes: pass "
            "axis_types=(AxisType.Auto,) * n to jax.make_mesh, or use merak_jax.make_mesh"
        )
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    devices = np.transpose(mesh.devices, order)
    shape = tuple(mesh.shape.get(name, 1) for name in AXES)
    return Mesh(devices.reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def emulate(num_devices: int = 8) -> None:
    """Make `num_devices` CPU devices in this process, for tests and laptops; call it before the first use of JAX.

    Once JAX runs, it can't be changed: EmulationError when there are fewer devices or none of a CPU, a warning when more.
    """
    if _compat.backend_initialised():
        have = jax.devices()
        if have[0].platform == "cpu" and len(have) >= num_devices:
            if len(have) > num_devices:
                warnings.warn(f"JAX already runs with {len(have)} CPU devices, not {num_devices}", stacklevel=2)
            return
        raise EmulationError(
            f"JAX already runs with {len(have)} {have[0].platform} device(s); merak_jax.emulate({num_devices}) must come before "
            "the first JAX array or jax.devices() call"
        )
    # A collective that waits for other devices blocks a thread of XLA:CPU's pool. With one thread per device, two collectives
    # that do not depend on each other can block all of them; measured: such a program ends with two per device.
    os.environ.setdefault("PJRT_NPROC", str(2 * num_devices))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
