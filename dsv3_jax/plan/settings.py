"""Values of a deployment's settings that a search tries, in the order in which it prefers them."""

from __future__ import annotations

from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from sharding import PRESETS, Exchange, LayoutName

SMALLEST_CHUNK = 16
"""Fewest prompt tokens at a time that a search proposes for prefill."""

# ragged_all_to_all stands last: XLA's moved 3 GB/s inside a node of H200s.
_EXCHANGES: tuple[Exchange, ...] = ("all_gather", "all_to_all", "one_sided", "ragged_all_to_all")


def layouts(target: Target) -> tuple[LayoutName, ...]:
    """Names of the layouts for serving that are made for this number of devices. Of several names
    for the same layout the first."""
    devices, seen, found = target.devices, [], []
    for name, preset in PRESETS.items():
        other_size = preset.num_devices not in (None, devices) or devices % preset.device_multiple
        if preset.fsdp_axes or other_size or (name == "single") != (devices == 1):
            continue
        same = preset.rules.table, preset.mesh_sizes(devices), preset.redundant_experts
        if same not in seen:
            seen.append(same)
            found.append(name)
    return tuple(found)


def exchanges(target: Target) -> tuple[Exchange, ...]:
    """Exchanges that the target can run. ``one_sided`` needs Hopper GPUs of one process, which has
    those of a node at the most."""
    one_sided = target.platform == "gpu" and target.chip.kernels and target.nodes == 1
    return tuple(each for each in _EXCHANGES if one_sided or each != "one_sided")


def rounds_activations(plan: Deployment) -> bool:
    """Whether float8 activations can gain anything: float8 weights, and kernels and units that
    multiply in float8."""
    chip = plan.target.chip
    return plan.quantization == "fp8" and chip.kernels and chip.fp8 is not None
