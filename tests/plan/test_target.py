"""Names of devices, and the table of chips."""

import pytest

from dsv3_jax.plan.chips import CHIPS
from dsv3_jax.plan.target import Target


@pytest.mark.parametrize(
    ("name", "devices", "nodes"),
    [
        ("gpu:h200x4", 4, 1),
        ("gpu:h800x144", 144, 18),
        ("tpu:v5p:4x4x8", 128, 1),
        ("tpu:v5e:16x16", 256, 1),
        ("tpu:tpu7x:4x4x4", 128, 1),  # 64 chips of two devices
    ],
)
def test_devices(name, devices, nodes):
    found = Target.parse(name)
    assert (found.devices, found.nodes) == (devices, nodes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h200x4", "expected gpu:KINDxDEVICES or tpu:KIND:AxB"),
        ("gpu:h200", "expected gpu:KINDxDEVICES"),
        ("gpu:b300x8", "expected gpu of h100, h200, h800; got 'b300'"),
        ("gpu:v5ex4", "expected gpu of h100"),
        ("tpu:v8e:2x2", "expected tpu of v5e, v5p, v6e, tpu7x; got 'v8e'"),
        ("gpu:h200x0", "expected 1 device or more"),
        ("tpu:v5e:4x4x4", "expected 2 dimensions of 256 chips at most for v5e"),
        ("tpu:v6e:16x32", "expected 2 dimensions of 256"),
    ],
)
def test_what_there_is_not(name, says):
    with pytest.raises(ValueError, match="target: " + says):
        Target.parse(name)


def test_doubling():
    names, target = [], Target.parse("tpu:v5e:8x8")
    while target is not None:
        names.append(target.name)
        target = target.doubled()
    assert names == ["tpu:v5e:8x8", "tpu:v5e:16x8", "tpu:v5e:16x16"]
    bigger = Target.parse("gpu:h200x4").doubled()
    assert bigger is not None
    assert bigger.name == "gpu:h200x8"


def test_chips_are_what_they_are():
    for name, chip in CHIPS.items():
        assert 10e9 < chip.memory < 300e9, name
        assert 10 < chip.bf16 / chip.bandwidth < 1000, name
        assert chip.fp8 is None or chip.fp8 == pytest.approx(2 * chip.bf16, rel=1e-3), name
        assert (chip.node is None) == (chip.between_nodes == 0), name
