"""Descriptions of a target's devices, from which JAX's compilers compile without the devices."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from jax.experimental import topologies

from dsv3_jax.plan.target import Target
from dsv3_jax.words import how_to_install

# The GPU description that the CUDA plugin requires, a stream_executor GpuTargetConfigProto, with
# NVIDIA's published figures for compute capability 9.0.
_HOPPER = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: 52428800
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
"""


def topology(target: Target) -> list[Any]:
    """Returns devices that programs can be compiled for but not run on.

    Raises:
      ValueError: the compiler is not installed (the message names the extra that has it), it does
        not know the slice, or the target has GPUs that this project has no kernels for.
    """
    if target.platform == "tpu":
        _require("libtpu", "tpu")
        # libtpu reads this when it is loaded. Without it, libtpu claims the machine's TPU for
        # itself.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
        shape = "x".join(map(str, target.sizes))
        description: dict[str, Any] = {"topology_name": f"{target.kind}:{shape}"}
        platform = "tpu"
    else:
        if not target.chip.has_kernels:
            raise ValueError(
                f"--compile: expected TPUs or Hopper GPUs, got {target.name}, for which this"
                " project has no kernels"
            )
        _require("jax_cuda13_plugin", "gpu")
        chip = target.chip
        node_size = min(target.devices, chip.node_size or target.devices)
        shape = f"1x{target.nodes}x{node_size}"
        config = _HOPPER.format(
            bandwidth=chip.memory_bandwidth, memory=chip.memory, name=target.kind.upper()
        )
        description = {"topology_name": shape, "topology": shape, "target_config": config}
        platform = "cuda"
    try:
        return list(topologies.get_topology_desc(platform=platform, **description).devices)
    except Exception as error:
        raise ValueError(f"target: {target.name}: the compiler refuses it: {error}") from None


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"--compile: expected {module} to be installed, which compiles without a device;"
            f" {how_to_install(extra)}"
        )
