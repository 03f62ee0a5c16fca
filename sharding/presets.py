"""Layouts by name: what is split over how many devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sharding.layout import Layout
from sharding.mesh import abstract_mesh, make_mesh
from sharding.names import Exchange, LayoutName
from sharding.rules import DEFAULT_RULES, Rules

_WHOLE = dict.fromkeys(DEFAULT_RULES.table)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Rules, and the sizes of a mesh's axes for a number of devices."""

    rules: Rules
    axes: Callable[[int], dict[str, int]]
    devices: int | None = None
    """The number it is made for; None: any."""
    multiple: int = 1
    """What the number of devices divides by."""
    redundant_experts: int = 0
    """Replicas beside one of each expert that the published deployment has."""
    storage: tuple[str, ...] = ()
    """See :class:`~sharding.Layout`. With it, ``data`` may take a part of the devices."""


_DATA_AND_EXPERTS = Rules({**_WHOLE, "batch": "expert", "expert": "expert"})

PRESETS: dict[LayoutName, Preset] = {
    "single": Preset(Rules(_WHOLE), lambda n: {}, devices=1),
    # Attention, dense layers and LM head by requests, as DeepSeek serves; experts apart.
    "dp_attention_ep": Preset(_DATA_AND_EXPERTS, lambda n: {"expert": n}),
    # Heads, inner widths and words apart: every device has all requests and a part of each matrix.
    "tensor_parallel": Preset(
        Rules({**DEFAULT_RULES.table, "batch": None, "expert": None}), lambda n: {"tensor": n}
    ),
    # The same, but for experts, which stay whole: widths of 2,048 are 16 blocks of 128.
    "tp_attention_ep": Preset(
        Rules({**DEFAULT_RULES.table, "batch": None, "expert": "tensor", "expert_ffn": None}),
        lambda n: {"tensor": n},
    ),
    # The same, but for attention: one long request's cache over all devices, heads whole.
    "context_parallel": Preset(
        Rules(
            {
                **DEFAULT_RULES.table,
                "batch": None,
                "cached_tokens": "tensor",
                "heads": None,
                "expert": "tensor",
                "expert_ffn": None,
            }
        ),
        lambda n: {"tensor": n},
    ),
    # For training: tokens over all devices, experts along their own axis, and of every matrix, its
    # gradient and its moments no copies (FSDP): each is gathered where a layer uses it.
    "train": Preset(
        Rules({**_WHOLE, "batch": ("data", "expert"), "expert": "expert"}),
        lambda n: {"expert": n},
        storage=("data", "expert"),
    ),
    # For TPU pods and for nodes of eight: matrices apart over eight neighbours, requests over such
    # groups, experts over all.
    "tpu_pod": Preset(
        Rules(
            {
                **DEFAULT_RULES.table,
                "batch": "expert",
                "expert": ("expert", "tensor"),
                "expert_ffn": None,
            }
        ),
        lambda n: {"expert": n // 8, "tensor": 8},
        multiple=8,
    ),
    # The least unit of Kimi K2 in float8 with 128k tokens (its deployment guide), not by tensors.
    "kimi_k2_ep16": Preset(_DATA_AND_EXPERTS, lambda n: {"expert": n}, devices=16),
    # DeepSeek's published units of four and of 18 nodes (V3/R1 inference system overview).
    "deepseek_prefill_ep32": Preset(
        _DATA_AND_EXPERTS, lambda n: {"expert": n}, devices=32, redundant_experts=32
    ),
    "deepseek_decode_ep144": Preset(
        _DATA_AND_EXPERTS, lambda n: {"expert": n}, devices=144, redundant_experts=32
    ),
}


def make_layout(
    name: str,
    *,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
    exchange: Exchange = "all_gather",
    float8_dispatch: bool = False,
    bfloat16_combine: bool = False,
    micro_batches: int = 1,
    expert_devices: int | None = None,
) -> Layout:
    """The layout of that name over ``devices``, by default all there are ("single": the first).

    Args:
      expert_devices: of "train", over how many devices one set of experts is spread, and their
        tokens exchanged. It divides the number of experts and of devices; the quotient is the axis
        ``data``, along which sets of experts are stored in parts as all else is. None: over all.

    Raises:
      ValueError: no such name, another number of devices than it is made for, or
        ``expert_devices`` that does not divide it or is not this layout's to choose.
    """
    found: Any = jax.devices() if devices is None else devices
    if name == "single" and devices is None:
        found = found[:1]
    preset = _preset(name, len(found))
    sizes = preset.axes(len(found))
    if expert_devices is not None:
        if not preset.storage:
            raise ValueError(f"expert_devices: expected None for {name}, got {expert_devices}")
        if expert_devices < 1 or len(found) % expert_devices:
            raise ValueError(
                f"expert_devices: expected a divisor of {len(found)} devices, got {expert_devices}"
            )
        sizes = {"data": len(found) // expert_devices, "expert": expert_devices}
    mesh = make_mesh(**sizes, devices=found)
    return Layout(
        mesh,
        preset.rules,
        exchange,
        float8_dispatch,
        micro_batches,
        preset.storage,
        bfloat16_combine,
    )


def abstract_layout(
    name: str,
    devices: int,
    *,
    exchange: Exchange = "all_gather",
    float8_dispatch: bool = False,
    bfloat16_combine: bool = False,
    micro_batches: int = 1,
) -> Layout:
    """The same over so many devices that are not here: to ask what each of them would hold.

    Raises:
      ValueError: as :func:`make_layout`.
    """
    preset = _preset(name, devices)
    mesh = abstract_mesh(**preset.axes(devices))
    return Layout(
        mesh,
        preset.rules,
        exchange,
        float8_dispatch,
        micro_batches,
        preset.storage,
        bfloat16_combine,
    )


def _preset(name: str, devices: int) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"name: expected one of {', '.join(PRESETS)}; got {name!r}")
    preset = PRESETS[name]
    if preset.devices not in (None, devices):
        number = "1 device" if preset.devices == 1 else f"{preset.devices} devices"
        raise ValueError(f"{name}: expected {number}, got {devices}")
    if devices % preset.multiple:
        raise ValueError(f"{name}: expected a multiple of {preset.multiple} devices, got {devices}")
    return preset
