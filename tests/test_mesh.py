import jax
import pytest
from jax.sharding import AxisType

from sharding import AXES, make_mesh


def test_axes_have_the_sizes_asked_for():
    mesh = make_mesh(data=2, expert=4)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 2, "expert": 4, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_part_of_the_devices():
    assert make_mesh(tensor=2, devices=jax.devices()[:2]).devices.size == 2


@pytest.mark.parametrize("sizes", [{}, {"data": 3}, {"data": 8, "expert": 2}, {"tensor": 0}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="multiply to 8 devices, got data="):
        make_mesh(**sizes)
