"""Construction of meshes."""

import dataclasses
import inspect

import jax
import pytest
from jax.sharding import AxisType

from sharding import MESH_AXES, make_mesh


def test_axes_have_the_given_sizes():
    mesh = make_mesh(data=2, expert=4)
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"data": 2, "expert": 4, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_subset_of_the_devices():
    assert make_mesh(tensor=2, devices=jax.devices()[:2]).devices.size == 2


@pytest.mark.parametrize("sizes", [{}, {"data": 3}, {"data": 8, "expert": 2}, {"tensor": 0}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="multiply to 8 devices, got data="):
        make_mesh(**sizes)


# Without the type checker, which requires a jax Device.
unchecked = inspect.unwrap(make_mesh)


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a device that a mesh reads."""

    platform: str
    device_kind: str
    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0

    @property
    def id(self) -> int:
        return 16 * self.coords[0] + self.coords[1]


def test_a_dimension_of_a_slice_is_split_in_two():
    """The 32 x 8 mesh of tpu_pod needs this on a v6e slice of 16 x 16."""
    chips = [Device("tpu", "TPU v6 lite", (x, y, 0)) for x in range(16) for y in range(16)]
    mesh = unchecked(data=32, tensor=8, devices=chips)
    assert mesh.devices.shape == (32, 1, 8)
    assert {chip.id for chip in mesh.devices.flat} == set(range(256))


def test_several_slices_are_refused_and_several_hosts_of_gpus_are_not():
    with pytest.raises(ValueError, match="TPUs of one slice, got 2 slices"):
        unchecked(data=2, devices=[Device("tpu", "TPU v6 lite", (0, i, 0), i) for i in range(2)])
    hosts = [Device("gpu", "NVIDIA H200", (0, i, 0), i) for i in range(2)]
    assert [gpu.id for gpu in unchecked(data=2, devices=hosts).devices.flat] == [0, 1]
