"""Logical axes of every parameter dimension, and the shardings that follow from them.

A logical axis such as ``heads`` belongs to the model. :mod:`sharding.rules` maps it to mesh axes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from dsv3_jax.config import ModelConfig
from dsv3_jax.parameter_path import ParameterPath, dotted
from dsv3_jax.quantization import IntegerQuantization, Quantization
from sharding import Layout, Placement, Rules
from sharding.expert_parallel import check_exchange
from sharding.fsdp import fsdp_sharding

# Logical axes of a module's weight [out, in], by the name of the module.
_AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("vocab", "hidden"),
    "lm_head": ("vocab", "hidden"),
    "norm": ("hidden",),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "enorm": ("hidden",),
    "hnorm": ("hidden",),
    "eh_proj": ("hidden", "joined_hidden"),
    "q_proj": ("heads", "hidden"),
    "q_a_proj": ("q_rank", "hidden"),
    "q_a_layernorm": ("q_rank",),
    "q_b_proj": ("heads", "q_rank"),
    "kv_a_proj_with_mqa": ("latent", "hidden"),
    "kv_a_layernorm": ("latent",),
    "kv_b_proj": ("heads", "latent"),
    "o_proj": ("hidden", "heads"),
    "wq_b": ("indexer", "q_rank"),
    "wk": ("indexer", "hidden"),
    "k_norm": ("indexer",),
    "weights_proj": ("indexer", "hidden"),
    "gate": ("expert_score", "hidden"),
    "gate_proj": ("ffn", "hidden"),
    "up_proj": ("ffn", "hidden"),
    "down_proj": ("hidden", "ffn"),
}
_FFN_AXES = {"experts": "expert_ffn", "shared_experts": "shared_ffn"}
_SCALES = ("weight_scale_inv", "weight_scale")
_FACTORS = {"lora_a": 1, "lora_b": 0}
"""Dimension that a factor of a low-rank update shares with its weight. The other has no axis."""


def logical_axes(path: ParameterPath) -> tuple[str | None, ...]:
    """Returns one logical axis per dimension of the parameter at ``path`` in the tree of a model.

    The ``heads`` axis has N + R or N + V entries per head in rows of a projection, and V in the
    columns of ``o_proj``. The ``latent`` axis has C entries, or C + R with the rope key. The
    ``indexer`` axis is the output of any projection of an indexer. A scale has the axes of its
    weight.

    Raises:
      ValueError: the parameter is not of a module of this model, but of one that replaces it.
    """
    owner, module, leaf = (str(key) for key in ("", *path)[-3:])
    if module == "_absorbed":  # attention's copy of kv_b_proj, split by head
        return "heads", "head_dim", "latent"
    if module == "replicas":  # log2phy, logcnt
        return ("expert_score", "replica")[: 2 if leaf == "log2phy" else 1]
    if module not in _AXES:
        raise ValueError(
            f"{dotted(path)}: expected a parameter of the model's own modules on a mesh; a module"
            " that replaces one runs on one device"
        )
    axes: tuple[str | None, ...] = _AXES[module]
    if leaf == "e_score_correction_bias":
        return axes[:1]
    axes = tuple(_FFN_AXES.get(owner, axis) if axis == "ffn" else axis for axis in axes)
    if leaf in _FACTORS:  # [r, in] and [out, r]
        return tuple(axis if i == _FACTORS[leaf] else None for i, axis in enumerate(axes))
    return ("expert", *axes) if owner == "experts" else axes


def parameter_shardings(
    model: nnx.Module,
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    quantization: Quantization | None = None,
    *,
    fsdp_axes: tuple[str, ...] = (),
    prefix: ParameterPath = (),
) -> dict[ParameterPath, NamedSharding]:
    """Returns the sharding of every parameter of a model, or of one of its modules, by path.

    Shardings never split a quantization block, and a block scale is sharded like its weight. An
    integer weight with one scale per row has scales that are sharded by rows only, because every
    shard of a row needs its scale.

    Args:
      model: module whose parameters may be arrays or only shapes.
      fsdp_axes: mesh axes over which parameters are stored sharded (FSDP), as in
        :class:`~sharding.Layout`. Empty for the shardings that layers compute with.
      prefix: path of ``model`` in the whole model. It is needed where the paths inside a module do
        not determine the axes.

    Raises:
      ValueError: ``rules`` or ``fsdp_axes`` cannot shard a parameter, which the message names; or
        ``fsdp_axes`` is given for quantized weights.
    """
    if fsdp_axes and quantization is not None:
        raise ValueError(
            f"fsdp_axes: expected weights without quantization, got {type(quantization).__name__}"
        )
    is_integer = isinstance(quantization, IntegerQuantization)
    has_scale_per_row = is_integer and quantization.group_size is None
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    shardings: dict[ParameterPath, NamedSharding] = {}
    # Most layers are alike: V3 has 1,500 parameters of 20 kinds.
    by_kind: dict[Hashable, NamedSharding] = {}
    for path, variable in flat.items():
        # Precomputed arrays, such as attention's up-projections, are no variables.
        value = variable if isinstance(variable, jax.Array) else variable.get_value()
        shape = value.shape
        axes = logical_axes((*prefix, *path))
        name = dotted((*prefix, *path))
        block = None
        if quantization is not None:
            if path[-1] in _SCALES and has_scale_per_row:
                axes = (*axes[:-1], None)
            elif any((*path[:-1], scale) in flat for scale in _SCALES if path[-1] == "weight"):
                block = (*(1,) * (len(shape) - 2), *_stored_block(quantization))
        is_param = isinstance(variable, nnx.Param)
        kind = (shape, axes, block, is_param)
        if kind not in by_kind:
            sharding = rules.sharding(mesh, name, shape, axes, block)
            if is_param:
                sharding = fsdp_sharding(name, shape, sharding, fsdp_axes)
            by_kind[kind] = sharding
        shardings[path] = by_kind[kind]
    return shardings


def check_layout(config: ModelConfig, layout: Layout, expert_slots: int | None = None) -> None:
    """Raises ValueError if layers of this shape, with this number of slots of experts (by default
    one of each), cannot run on ``layout``, and NotImplementedError if the platform lacks the
    exchange."""
    heads, devices = config.num_attention_heads, layout.num_shards("heads")
    if heads % devices:
        raise ValueError(
            f"num_attention_heads: expected whole heads on each of {devices} devices of mesh axis"
            f" {' x '.join(layout.mesh_axes('heads'))}, got {heads}"
        )
    for axis in ("batch", "heads"):
        if shared := [a for a in layout.mesh_axes("cached_tokens") if a in layout.mesh_axes(axis)]:
            raise ValueError(
                f"rules: expected axes 'cached_tokens' and {axis!r} over different mesh axes, got"
                f" both over {shared[0]}: devices that share the tokens of a sequence run the same"
                " queries"
            )
    for axis in layout.rules.table:
        shared = set(layout.mesh_axes("tokens")) & set(layout.mesh_axes(axis))
        if axis != "tokens" and shared:
            raise ValueError(
                f"rules: expected axes 'tokens' and {axis!r} over different mesh axes, got both"
                f" over {min(shared)}: layers sum over devices with the same tokens"
            )
    if config.has_indexer and layout.num_shards("tokens") > 1:
        raise ValueError(
            f"context_devices: expected none for sparse attention, {config.model_type}, got"
            f" {layout.num_shards('tokens')}"
        )
    whole = "hidden", "joined_hidden", "q_rank", "latent", "head_dim", "expert_score", "indexer"
    for axis in whole:
        if layout.num_shards(axis) > 1:
            raise ValueError(
                f"rules: expected axis {axis!r} on every device whole, got it over mesh axis"
                f" {' x '.join(layout.mesh_axes(axis))}: layers do not sum over it"
            )
    check_exchange(
        layout.mesh,
        layout.exchange,
        num_experts=expert_slots or config.n_routed_experts,
        exchange_axes=layout.exchange_axes,
        reduce_axes=layout.reduce_axes,
        float8=layout.float8_dispatch,
        hidden_size=config.hidden_size,
    )


def check_placement(placement: Placement, layers: int, experts: int, layout: Layout | None) -> None:
    """Raises ValueError if ``placement`` has other numbers of layers or experts, or its slots do
    not divide over the devices of ``layout``."""
    if not isinstance(placement, Placement):
        raise ValueError(
            f"placement: expected a Placement, got {type(placement).__name__};"
            " Placement.from_phy2log makes one"
        )
    placement.check()
    (L, P), E = placement.phy2log.shape, placement.logcnt.shape[1]
    if (layers, experts) != (L, E):
        raise ValueError(
            f"placement: expected {layers} layers of {experts} experts, got {L} of {E}"
        )
    if layout is not None and P % (parts := layout.num_shards("expert")):
        raise ValueError(f"placement: expected slots that divide over {parts} devices, got {P}")


def _stored_block(quantization: Quantization) -> tuple[int, int]:
    """Returns the rows and stored columns that must stay on one device. One of int4 holds two
    values."""
    if not isinstance(quantization, IntegerQuantization):
        return quantization.weight_block_size
    columns = quantization.group_size or 1
    return 1, math.lcm(columns, 2) // 2 if quantization.bits == 4 else columns
