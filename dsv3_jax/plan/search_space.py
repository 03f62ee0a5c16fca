"""Values that a search tries for each setting of a deployment, in order of preference."""

from __future__ import annotations

from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from sharding import PRESETS, Exchange, LayoutName

SMALLEST_CHUNK = 16
"""Smallest prefill chunk that a search proposes, in tokens per sequence."""

# ragged_all_to_all comes last: XLA's moved 3 GB/s inside a node of H200s.
_EXCHANGES: tuple[Exchange, ...] = ("all_gather", "all_to_all", "one_sided", "ragged_all_to_all")


def layouts(target: Target) -> tuple[LayoutName, ...]:
    """Returns the names of the serving layouts that exist for this number of devices.

    If several names stand for the same layout, only the first is returned.
    """
    devices, seen, names = target.devices, [], []
    for name, preset in PRESETS.items():
        other_size = preset.num_devices not in (None, devices) or devices % preset.device_multiple
        if preset.fsdp_axes or other_size or (name == "single") != (devices == 1):
            continue
        same = preset.rules.table, preset.mesh_sizes(devices), preset.redundant_experts
        if same not in seen:
            seen.append(same)
            names.append(name)
    return tuple(names)


def exchanges(target: Target) -> tuple[Exchange, ...]:
    """Returns the exchanges that run on the target.

    ``one_sided`` needs Hopper GPUs in one process, and a process has at most the GPUs of one node.
    """
    one_sided = target.platform == "gpu" and target.chip.has_kernels and target.nodes == 1
    return tuple(name for name in _EXCHANGES if one_sided or name != "one_sided")


def can_use_float8_activations(deployment: Deployment) -> bool:
    """Returns whether float8 activations could make the deployment faster or smaller.

    They need float8 or int4 weights, kernels that take float8 activations, and float8 matmul units.
    """
    chip = deployment.target.chip
    takes_them = deployment.quantization in ("fp8", "int4")
    return takes_them and chip.has_kernels and chip.fp8_flops is not None
