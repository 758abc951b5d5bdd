"""A mesh has Auto axes data, pipe, tensor in this order, keeps the user's device order, and says when devices stay unused."""

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import merak_jax
from merak_jax.errors import MeshError
from merak_jax.mesh import AXES, check_mesh


def devices(count):
    return jax.devices()[:count]


@pytest.mark.parametrize("data, pipe, tensor", list(itertools.product((1, 2), repeat=3)))
def test_make_mesh_has_the_three_axes_in_order_with_tensor_neighbours(data, pipe, tensor):
    mesh = merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor, devices=devices(data * pipe * tensor))
    assert mesh.axis_names == AXES == ("data", "pipe", "tensor")
    assert mesh.devices.shape == (data, pipe, tensor)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == devices(data * pipe * tensor)


def test_make_mesh_takes_numpy_sizes():
    assert merak_jax.make_mesh(data=np.int64(8)).shape["data"] == 8


def test_case_78_a_mesh_smaller_than_the_devices_warns_once_with_both_numbers():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = merak_jax.make_mesh(data=2)
    assert [str(w.message) for w in caught] == ["the mesh uses 2 of 8 devices"]
    assert caught[0].filename == __file__
    assert list(mesh.devices.flat) == devices(2)


def test_a_mesh_that_uses_all_given_devices_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merak_jax.make_mesh(data=2, pipe=2, tensor=2)
        merak_jax.make_mesh(pipe=3, devices=devices(3))


def test_check_mesh_adds_absent_axes_with_size_one():
    mesh = check_mesh(Mesh(np.array(devices(4)), ("pipe",)))
    assert dict(mesh.shape) == {"data": 1, "pipe": 4, "tensor": 1}
    assert list(mesh.devices[0, :, 0]) == devices(4)


def test_check_mesh_keeps_a_mesh_of_make_mesh():
    mesh = merak_jax.make_mesh(data=2, pipe=2, tensor=2)
    assert check_mesh(mesh) == mesh


@settings(max_examples=40, deadline=None)
@given(names=st.permutations(AXES), order=st.permutations(range(8)), data=st.data())
def test_check_mesh_puts_every_device_where_the_users_mesh_has_it(names, order, data):
    used = data.draw(st.integers(1, 3))
    sizes = data.draw(st.sampled_from([s for s in itertools.product((1, 2, 4), repeat=used) if np.prod(s) <= 8]))
    grid = np.array(jax.devices())[list(order)][: int(np.prod(sizes))].reshape(sizes)
    checked = check_mesh(Mesh(grid, tuple(names[:used]), axis_types=(AxisType.Auto,) * used))
    assert checked.axis_names == AXES
    for place in np.ndindex(*sizes):
        coordinates = dict(zip(names, place))
        assert checked.devices[tuple(coordinates.get(a, 0) for a in AXES)] == grid[place]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Manual])
def test_one_axis_that_is_not_auto_is_named(kind):
    mesh = Mesh(np.array(devices(4)).reshape(2, 2), ("data", "pipe"), axis_types=(AxisType.Auto, kind))
    with pytest.raises(MeshError, match=rf"axes \['pipe'\] of the mesh are {kind.name}"):
        check_mesh(mesh)


EMULATED = """
import json, jax, merak_jax
merak_jax.emulate(3)
merak_jax.emulate(5)
found = [len(jax.devices()), jax.devices()[0].platform]
merak_jax.emulate(5)
merak_jax.emulate(2)
print(json.dumps(found))
"""


def test_emulate_makes_cpu_devices_and_may_be_called_again_while_there_are_enough():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", EMULATED],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
        env=clean,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [5, "cpu"]
