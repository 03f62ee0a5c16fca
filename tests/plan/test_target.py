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
        ("gpu:a100-80gbx16", 16, 2),
        ("gpu:gb200x72", 72, 1),  # a rack is one NVLink domain
    ],
)
def test_devices(name, devices, nodes):
    target = Target.parse(name)
    assert (target.devices, target.nodes) == (devices, nodes)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("h100x16", "gpu:h100x16"),
        ("h200", "gpu:h200x1"),
        ("gpu:h200", "gpu:h200x1"),
        ("H200x8", "gpu:h200x8"),
        ("a100-40gbx8", "gpu:a100-40gbx8"),
        ("v5p:4x4x8", "tpu:v5p:4x4x8"),
        ("tpu7x:2x2x1", "tpu:tpu7x:2x2x1"),
    ],
)
def test_short_names(short, name):
    assert Target.parse(short) == Target.parse(name)
    assert Target.parse(short).name == name


@pytest.mark.parametrize(
    ("theirs", "name", "devices", "hosts"),
    [
        ("8xH200", "gpu:h200x8", 8, 1),
        ("8 x H200", "gpu:h200x8", 8, 1),
        ("2x8xH200", "gpu:h200x16", 16, 2),
        ("H100:8", "gpu:h100x8", 8, 1),
        ("h100*4", "gpu:h100x4", 4, 1),
        ("H200-8", "gpu:h200x8", 8, 1),
        ("DGX H100", "gpu:h100x8", 8, 1),
        ("2x DGX H200", "gpu:h200x16", 16, 2),
        ("4xHGX-H100", "gpu:h100x32", 32, 4),
        ("HGX H100 4-GPU", "gpu:h100x4", 4, 1),
        ("DGX B200", "gpu:b200x8", 8, 1),
        ("DGX A100-80GB", "gpu:a100-80gbx8", 8, 1),
        ("NVIDIA H100 80GB HBM3", "gpu:h100x1", 1, 1),
        ("NVIDIA-A100-SXM4-40GB", "gpu:a100-40gbx1", 1, 1),
        ("8x H100 SXM5", "gpu:h100x8", 8, 1),
        ("GB200 NVL72", "gpu:gb200x72", 72, 18),
        ("a3-ultragpu-8g", "gpu:h200x8", 8, 1),
        ("2xa3-megagpu-8g", "gpu:h100x16", 16, 2),
        ("p5en.48xlarge", "gpu:h200x8", 8, 1),
        # Accelerator types of v5p and TPU7x count TensorCores, two to a chip.
        ("v5p-8", "tpu:v5p:2x2x1", 4, 1),
        ("v5p-16", "tpu:v5p:2x2x2", 8, 2),
        ("v5p-128", "tpu:v5p:4x4x4", 64, 16),
        ("v5p-256", "tpu:v5p:4x4x8", 128, 32),
        ("v5p-12288", "tpu:v5p:16x16x24", 6144, 1536),
        ("tpu7x-128", "tpu:tpu7x:4x4x4", 128, 16),
        ("Ironwood-8", "tpu:tpu7x:2x2x1", 8, 1),
        ("tpu7x-2x2x2", "tpu:tpu7x:2x2x2", 16, 2),
        # Those of v5e and v6e count chips.
        ("v5e-16", "tpu:v5e:4x4", 16, 4),
        ("v5litepod-8", "tpu:v5e:2x4", 8, 1),
        ("v6e-256", "tpu:v6e:16x16", 256, 64),
        ("v6e-1", "tpu:v6e:1x1", 1, 1),
        ("tpu-v6e-slice:4x8", "tpu:v6e:4x8", 32, 8),
        ("tpu-v5p-slice:4x4x4", "tpu:v5p:4x4x4", 64, 16),
    ],
)
def test_names_of_others(theirs, name, devices, hosts):
    target = Target.parse(theirs)
    assert (target.name, target.devices, target.hosts) == (name, devices, hosts)
    assert target.devices_of_host * (hosts - 1) < devices <= target.devices_of_host * hosts


def test_every_name_of_ours_stays():
    """No name of others takes the place of one of ours."""
    for kind in CHIPS:
        name = f"tpu:{kind}:4x4" if kind in ("v5e", "v6e") else f"tpu:{kind}:4x4x4"
        name = name if kind in ("v5e", "v5p", "v6e", "tpu7x") else f"gpu:{kind}x4"
        assert Target.parse(name).name == name
        assert Target.parse(name.partition(":")[2]).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "expected a number of GPUs, such as h200x8"),
        ("8xb300", "expected a kind among h100, h200, .*; got 'b300'; did you mean b200"),
        ("DGX A100", r"got 'a100'; did you mean a100-40gb or a100-80gb\?$"),
        ("v4-8", "expected a kind among .*; got 'v4-8'"),
        ("v5p-7", r"expected a number of TensorCores of v5p \(two to a chip\) that a slice can"),
        ("v5p-24", "that a slice can have, got 'v5p-24'"),
        ("v6e-3", "expected a number of chips of v6e that a slice can have, got 'v6e-3'"),
        ("v6e-512", "expected a number of chips of v6e that a slice can have"),
        ("v5p-99999999999999", "that a slice can have"),
        ("gpu:b300x8", r"expected a kind among h100, h200, .*; got 'b300'; did you mean b200"),
        ("a100x8", r"got 'a100'; did you mean a100-40gb or a100-80gb\?$"),
        ("gpu:v5ex4", "expected a kind among h100, .*gb200; got 'v5e'"),
        ("tpu:v8e:2x2", r"expected a kind among v5e, v5p, v6e, tpu7x; got 'v8e'; did you mean v"),
        ("h2000x8", r"did you mean h200"),
        ("v5p", "expected .*, or the chips of a TPU slice, .*; got 'v5p', but v5p is a TPU"),
        ("v5px8", "got 'v5px8', but v5p is a TPU"),
        ("h200:2x2", "got 'h200:2x2', but h200 is a GPU"),
        ("gpu:h200x0", "expected 1 device or more"),
        ("tpu:v5e:4x4x4", "expected 2 dimensions and at most 256 chips for v5e"),
        ("tpu:v6e:16x32", "expected 2 dimensions and at most 256"),
    ],
)
def test_a_name_that_is_refused(name, message):
    with pytest.raises(ValueError, match="^target: .*" + message) as refused:
        Target.parse(name)
    assert "\n" not in str(refused.value)


def test_doubling():
    names, target = [], Target.parse("tpu:v5e:8x8")
    while target is not None:
        names.append(target.name)
        target = target.doubled()
    assert names == ["tpu:v5e:8x8", "tpu:v5e:16x8", "tpu:v5e:16x16"]
    bigger = Target.parse("gpu:h200x4").doubled()
    assert bigger is not None
    assert bigger.name == "gpu:h200x8"
    assert Target.parse("h200x2048").doubled() is None


def test_chips_are_plausible():
    for name, chip in CHIPS.items():
        assert 10e9 < chip.memory < 300e9, name
        assert 10 < chip.bf16_flops / chip.memory_bandwidth < 1000, name
        assert chip.fp8_flops is None or chip.fp8_flops == pytest.approx(
            2 * chip.bf16_flops, rel=1e-3
        ), name
        assert (chip.node_size is None) == (chip.internode_bandwidth == 0), name


def test_chips_as_published():
    """Per GPU, from the aggregates of NVIDIA's pages: DGX B200 (8 GPUs: 64 TB/s, 72 PFLOP/s of
    sparse fp8, 14.4 TB/s of NVLink both ways), GB200 NVL72 (576 TB/s, 720 PFLOP/s, 130 TB/s)."""
    b200, gb200, a100 = CHIPS["b200"], CHIPS["gb200"], CHIPS["a100-80gb"]
    assert (b200.fp8_flops, gb200.fp8_flops) == (72e15 / 8 / 2, 720e15 / 72 / 2)
    assert (8 * b200.memory_bandwidth, 72 * gb200.memory_bandwidth) == (64e12, 576e12)
    assert 8 * 2 * b200.link_bandwidth == 14.4e12
    assert 72 * 2 * gb200.link_bandwidth == pytest.approx(130e12, rel=0.01)
    assert (a100.bf16_flops, a100.fp8_flops, 2 * a100.link_bandwidth) == (312e12, None, 600e9)
    assert CHIPS["a100-40gb"].memory_bandwidth == 1.555e12


def test_only_hopper_gpus_have_kernels():
    without = {name for name, chip in CHIPS.items() if not chip.has_kernels}
    assert without == {"a100-40gb", "a100-80gb", "b200", "gb200"}
