"""Memory, bandwidth and peak FLOP/s of the devices that the planner knows.

A device is what JAX counts as one: a TPU7x chip is two devices. Rates are the makers' peaks. No
program reaches them, so that a quotient by them is a lower bound on time.
"""

from __future__ import annotations

import dataclasses

_GIB, _MIB = 2**30, 2**20

# Usable share of the memory that the TPU compiler reports. Its heap cannot pack the arrays of a
# large model without gaps (benchmarks/results/plan_compiled.json).
_PACKED = 0.993

CUDA = 1536 * _MIB
"""Part of the memory reported by nvidia-smi that CUDA's context and libraries take, in bytes."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one device."""

    memory: int
    """Memory usable by a program, in bytes."""
    memory_bandwidth: float
    """Peak memory bandwidth, in bytes/s."""
    bf16_flops: float
    """Peak dense bfloat16 matmul rate, in FLOP/s."""
    fp8_flops: float | None
    """Peak dense float8 matmul rate, in FLOP/s. None if the device multiplies float8 values in
    bfloat16."""
    link_bandwidth: float
    """Bandwidth to the other devices of the node, in bytes/s in one direction. A device can send
    and receive at this rate at the same time."""
    node_size: int | None = None
    """Number of devices per node, that is, joined by ``link_bandwidth``. None if all devices
    are."""
    internode_bandwidth: float = 0.0
    """Bandwidth of one device to other nodes, in bytes/s in one direction."""
    l2_bandwidth: float | None = None
    """Rate of reads from the second-level cache, in bytes/s. None if it is not known."""
    has_kernels: bool = True
    """Whether this project's Pallas kernels run on it. The GPU kernels need a Hopper GPU."""


_HOPPER_L2 = 7e12
"""No data sheet has it. 4,000 bytes per clock of 1.755 GHz, near what microbenchmarks report."""

# NVIDIA: data sheets of the SXM modules (H100, H200, A100), of DGX B200 and of GB200 NVL72, divided
# by the number of GPUs. FLOP/s are dense: half of the figures with sparsity. The H800 is an H100
# with 400 GB/s of NVLink. The H20 has no public data sheet; its figures are those that its vendors
# list. One direction is half of NVLink's figure. Memory is what nvidia-smi reports. Between nodes:
# one adapter per GPU, 400 Gb/s InfiniBand as in the DeepSeek-V3 report, section 3.1, and in DGX
# B200 and GB200 NVL72; 200 Gb/s in DGX A100.
_H100 = Chip(
    81_559 * _MIB - CUDA,
    3.35e12,
    989.4e12,
    1978.9e12,
    450e9,
    8,
    50e9,
    l2_bandwidth=_HOPPER_L2,
)
_A100 = Chip(81_920 * _MIB - CUDA, 2.039e12, 312e12, None, 300e9, 8, 25e9, has_kernels=False)
_B200 = Chip(183_359 * _MIB - CUDA, 8e12, 2250e12, 4500e12, 900e9, 8, 50e9, has_kernels=False)

CHIPS: dict[str, Chip] = {
    "h100": _H100,
    "h200": dataclasses.replace(_H100, memory=143_771 * _MIB - CUDA, memory_bandwidth=4.8e12),
    "h800": dataclasses.replace(_H100, link_bandwidth=200e9),
    "h20": dataclasses.replace(
        _H100,
        l2_bandwidth=None,  # it has fewer multiprocessors
        memory=97_871 * _MIB - CUDA,
        memory_bandwidth=4e12,
        bf16_flops=148e12,
        fp8_flops=296e12,
    ),
    "a100-40gb": dataclasses.replace(_A100, memory=40_960 * _MIB - CUDA, memory_bandwidth=1.555e12),
    "a100-80gb": _A100,
    "b200": _B200,
    # The 72 GPUs of a rack are one NVLink domain.
    "gb200": dataclasses.replace(
        _B200,
        memory=189_471 * _MIB - CUDA,
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        node_size=72,
    ),
    # TPUs: Google Cloud's page of each version gives HBM bandwidth, peak compute and inter-chip
    # bandwidth per chip (v5e 400, v5p 1,200, v6e 800, TPU7x 1,200 GB/s in both directions together;
    # one direction is half). Memory is what libtpu 0.0.42 reports.
    "v5e": Chip(int(_PACKED * 15.75 * _GIB), 819e9, 197e12, None, 200e9),
    "v5p": Chip(int(_PACKED * 95.74 * _GIB), 2765e9, 459e12, None, 600e9),
    "v6e": Chip(int(_PACKED * 31.25 * _GIB), 1640e9, 918e12, None, 400e9),
    # Half a chip: JAX counts each half as a device.
    "tpu7x": Chip(int(_PACKED * 94.75 * _GIB), 7380e9 / 2, 2307e12 / 2, 4614e12 / 2, 600e9 / 2),
}
"""Devices by the kind that a target names."""
