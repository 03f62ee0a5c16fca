"""What a device has: memory, and how fast it reads, multiplies and talks to the others.

Of one device as JAX counts them: a TPU7x chip is two. Rates are the makers' peaks, which no program
reaches: what is divided by them is a bound.
"""

from __future__ import annotations

import dataclasses

_GIB, _MIB = 2**30, 2**20

# Of what the TPU compiler says that a program can have: its heap does not pack a large model's
# arrays without gaps (benchmarks/results/plan_compiled.json).
_PACKED = 0.993

# Of what nvidia-smi says there is, for CUDA's context and libraries.
_CUDA = 1536 * _MIB


@dataclasses.dataclass(frozen=True)
class Chip:
    memory: int
    """Bytes that a program can have."""
    bandwidth: float
    """Bytes of memory a second."""
    bf16: float
    """Operations a second of dense bfloat16 matrices."""
    fp8: float | None
    """The same of float8; None: its units have none, and bfloat16's multiply."""
    link: float
    """Bytes a second that a device can send to its neighbours, while it receives as many."""
    node: int | None = None
    """Devices that ``link`` joins; None: all."""
    between_nodes: float = 0.0
    """Bytes a second and device to other nodes."""
    kernels: bool = True
    """Whether this project's Pallas kernels run on it. Those for GPUs need a Hopper GPU."""


# NVIDIA: data sheets of the SXM modules (H100, H200, A100), of DGX B200 and of GB200 NVL72, divided
# by their GPUs. FLOP/s are dense: half of what the sheets give with sparsity. The H800 is an H100
# with 400 GB/s of NVLink. The H20 has no public data sheet; its figures are those that its vendors
# list. One way is half of NVLink's figure. Memory: what nvidia-smi reports. Between nodes: one
# adapter a GPU, 400 Gb/s InfiniBand as in the DeepSeek-V3 report, section 3.1, and in DGX B200 and
# GB200 NVL72; 200 Gb/s in DGX A100.
_H100 = Chip(81_559 * _MIB - _CUDA, 3.35e12, 989.4e12, 1978.9e12, 450e9, 8, 50e9)
_A100 = Chip(81_920 * _MIB - _CUDA, 2.039e12, 312e12, None, 300e9, 8, 25e9, kernels=False)
_B200 = Chip(183_359 * _MIB - _CUDA, 8e12, 2250e12, 4500e12, 900e9, 8, 50e9, kernels=False)

CHIPS: dict[str, Chip] = {
    "h100": _H100,
    "h200": dataclasses.replace(_H100, memory=143_771 * _MIB - _CUDA, bandwidth=4.8e12),
    "h800": dataclasses.replace(_H100, link=200e9),
    "h20": dataclasses.replace(
        _H100, memory=97_871 * _MIB - _CUDA, bandwidth=4e12, bf16=148e12, fp8=296e12
    ),
    "a100-40gb": dataclasses.replace(_A100, memory=40_960 * _MIB - _CUDA, bandwidth=1.555e12),
    "a100-80gb": _A100,
    "b200": _B200,
    # 72 GPUs of a rack are one NVLink domain.
    "gb200": dataclasses.replace(
        _B200, memory=189_471 * _MIB - _CUDA, bf16=2500e12, fp8=5000e12, node=72
    ),
    # TPUs: Google Cloud's pages of each version: HBM bandwidth, peak compute, and inter-chip
    # bandwidth of a chip, of which one way is half (v5e 400, v5p 1,200, v6e 800, TPU7x 1,200 GB/s
    # both ways). Memory by libtpu 0.0.42.
    "v5e": Chip(int(_PACKED * 15.75 * _GIB), 819e9, 197e12, None, 200e9),
    "v5p": Chip(int(_PACKED * 95.74 * _GIB), 2765e9, 459e12, None, 600e9),
    "v6e": Chip(int(_PACKED * 31.25 * _GIB), 1640e9, 918e12, None, 400e9),
    # A half of a chip, as its own device.
    "tpu7x": Chip(int(_PACKED * 94.75 * _GIB), 7380e9 / 2, 2307e12 / 2, 4614e12 / 2, 600e9 / 2),
}
