"""Named layouts: their sharded logical axes and the sizes of their meshes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from sharding.layout import Layout
from sharding.mesh import abstract_mesh, make_mesh
from sharding.names import Exchange, LayoutName
from sharding.rules import DEFAULT_RULES, Rules

_UNSHARDED = dict.fromkeys(DEFAULT_RULES.table)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A layout for any suitable number of devices."""

    rules: Rules
    mesh_sizes: Callable[[int], dict[str, int]]
    """Returns the size of each mesh axis for a number of devices."""
    num_devices: int | None = None
    """The only number of devices that the preset allows, or None."""
    device_multiple: int = 1
    """Number that the number of devices must be a multiple of."""
    redundant_experts: int = 0
    """Number of expert replicas, beyond one per expert, in the published deployment."""
    fsdp_axes: tuple[str, ...] = ()
    """See :attr:`sharding.Layout.fsdp_axes`. If not empty, :func:`make_layout` accepts
    ``expert_devices`` and ``context_devices``."""


_DATA_AND_EXPERTS = Rules({**_UNSHARDED, "batch": "expert", "expert": "expert"})

PRESETS: dict[LayoutName, Preset] = {
    "single": Preset(Rules(_UNSHARDED), lambda n: {}, num_devices=1),
    # Data parallelism for attention, dense layers and LM head; expert parallelism for MoE layers.
    # DeepSeek serves its models this way.
    "dp_attention_ep": Preset(_DATA_AND_EXPERTS, lambda n: {"expert": n}),
    # Heads, hidden widths of MLPs and the vocabulary are sharded. Every device runs all sequences.
    "tensor_parallel": Preset(
        Rules({**DEFAULT_RULES.table, "batch": None, "expert": None}), lambda n: {"tensor": n}
    ),
    # As tensor_parallel, but with whole experts on each device: a width of 2,048 has only 16 blocks
    # of 128.
    "tp_attention_ep": Preset(
        Rules({**DEFAULT_RULES.table, "batch": None, "expert": "tensor", "expert_ffn": None}),
        lambda n: {"tensor": n},
    ),
    # As tp_attention_ep, but the cached tokens of each sequence are sharded instead of the heads,
    # so that one long sequence fits.
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
    # For training. The batch is sharded over data and expert, the tokens of each sequence over
    # tensor (context parallelism), experts over their own axis. Matrices, gradients and moments are
    # stored sharded (FSDP) over all devices, and gathered where a layer uses them.
    "train": Preset(
        Rules(
            {
                **_UNSHARDED,
                "batch": ("data", "expert"),
                "tokens": "tensor",
                "expert": "expert",
            }
        ),
        lambda n: {"expert": n},
        fsdp_axes=("data", "expert", "tensor"),
    ),
    # For TPU pods and nodes of eight GPUs: tensor parallelism within groups of eight neighbours,
    # data parallelism over the groups, expert parallelism over all devices.
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
        device_multiple=8,
    ),
    # Smallest unit for Kimi K2 in float8 with 128k tokens according to its deployment guide, which
    # shards tensors; here experts are sharded instead.
    "kimi_k2_ep16": Preset(_DATA_AND_EXPERTS, lambda n: {"expert": n}, num_devices=16),
    # DeepSeek's published units of 4 and of 18 nodes (DeepSeek-V3/R1 Inference System Overview).
    "deepseek_prefill_ep32": Preset(
        _DATA_AND_EXPERTS, lambda n: {"expert": n}, num_devices=32, redundant_experts=32
    ),
    "deepseek_decode_ep144": Preset(
        _DATA_AND_EXPERTS, lambda n: {"expert": n}, num_devices=144, redundant_experts=32
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
    context_devices: int | None = None,
) -> Layout:
    """Returns the layout of that name over ``devices``.

    Args:
      name: a key of :data:`PRESETS`.
      devices: None takes all devices, or for "single" the first.
      exchange: collective that moves tokens to experts, see :class:`Layout`.
      float8_dispatch: whether tokens travel in float8, see :class:`Layout`.
      bfloat16_combine: whether partial sums travel in bfloat16, see :class:`Layout`.
      micro_batches: number of micro-batches per device, see :class:`Layout`.
      expert_devices: only for "train". Number of devices that share one set of experts and exchange
        tokens; it must divide the number of experts, and that of devices divided by
        ``context_devices``. The quotient is the size of the mesh axis ``data``, along which expert
        weights are stored sharded like all other parameters. None shares one set of experts among
        as many devices as possible.
      context_devices: only for "train". Number of devices that share each sequence: it is divided
        into as many parts, and the devices of different parts do not share experts. None for 1.

    Raises:
      ValueError: the name is unknown, the preset does not allow the number of devices,
        ``context_devices`` does not divide it, ``expert_devices`` does not divide the quotient, or
        the preset has neither.
    """
    if devices is None:
        devices = jax.devices()[:1] if name == "single" else jax.devices()
    preset = _preset(name, len(devices))
    sizes = _mesh_sizes(name, len(devices), expert_devices, context_devices)
    mesh = make_mesh(**sizes, devices=devices)
    return _layout(preset, mesh, exchange, float8_dispatch, bfloat16_combine, micro_batches)


def abstract_layout(
    name: str,
    num_devices: int,
    *,
    exchange: Exchange = "all_gather",
    float8_dispatch: bool = False,
    bfloat16_combine: bool = False,
    micro_batches: int = 1,
    expert_devices: int | None = None,
    context_devices: int | None = None,
) -> Layout:
    """Returns the layout of that name over an abstract mesh, to compute what a device would hold.

    Raises:
      ValueError: as :func:`make_layout`.
    """
    preset = _preset(name, num_devices)
    sizes = _mesh_sizes(name, num_devices, expert_devices, context_devices)
    mesh = abstract_mesh(**sizes)
    return _layout(preset, mesh, exchange, float8_dispatch, bfloat16_combine, micro_batches)


def _mesh_sizes(
    name: str, num_devices: int, expert_devices: int | None, context_devices: int | None
) -> dict[str, int]:
    """Returns the size of each mesh axis; see :func:`make_layout`."""
    preset = _preset(name, num_devices)
    for option, value in {
        "expert_devices": expert_devices,
        "context_devices": context_devices,
    }.items():
        if value is not None and not preset.fsdp_axes:
            raise ValueError(f"{option}: expected None for {name}, got {value}")
    if expert_devices is None and context_devices is None:
        return preset.mesh_sizes(num_devices)
    context = 1 if context_devices is None else context_devices
    if context < 1 or num_devices % context:
        raise ValueError(
            f"context_devices: expected a divisor of {num_devices} devices, got {context}"
        )
    groups = num_devices // context
    experts = groups if expert_devices is None else expert_devices
    if experts < 1 or groups % experts:
        by_context = f" / {context} (context_devices)" if context > 1 else ""
        raise ValueError(
            f"expert_devices: expected a divisor of {num_devices} devices{by_context}, got"
            f" {experts}"
        )
    return {"data": groups // experts, "expert": experts, "tensor": context}


def _layout(
    preset: Preset,
    mesh: Mesh | AbstractMesh,
    exchange: Exchange,
    float8_dispatch: bool,
    bfloat16_combine: bool,
    micro_batches: int,
) -> Layout:
    return Layout(
        mesh,
        preset.rules,
        exchange=exchange,
        float8_dispatch=float8_dispatch,
        micro_batches=micro_batches,
        fsdp_axes=preset.fsdp_axes,
        bfloat16_combine=bfloat16_combine,
    )


def _preset(name: str, num_devices: int) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"name: expected one of {', '.join(PRESETS)}; got {name!r}")
    preset = PRESETS[name]
    if preset.num_devices not in (None, num_devices):
        number = "1 device" if preset.num_devices == 1 else f"{preset.num_devices} devices"
        raise ValueError(f"{name}: expected {number}, got {num_devices}")
    if num_devices % preset.device_multiple:
        raise ValueError(
            f"{name}: expected a multiple of {preset.device_multiple} devices, got {num_devices}"
        )
    return preset
