"""What each dimension of each parameter counts, and from that how the model lies on a mesh.

Names of axes are the model's; which of them a mesh splits is for :mod:`sharding.rules` to say.
"""

from __future__ import annotations

import math

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from dsv3_jax.config import ModelConfig
from dsv3_jax.parameter_path import ParameterPath, dotted
from dsv3_jax.quantization import IntegerQuantization, Quantization
from sharding import Layout, Rules
from sharding.expert_parallel import check_exchange
from sharding.fsdp import fsdp_sharding

# By the name of the module that holds the parameter: of its weight, [out, in].
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
    "gate": ("expert_score", "hidden"),
    "gate_proj": ("ffn", "hidden"),
    "up_proj": ("ffn", "hidden"),
    "down_proj": ("hidden", "ffn"),
}
_INNER = {"experts": "expert_ffn", "shared_experts": "shared_ffn"}
_SCALES = ("weight_scale_inv", "weight_scale")


def logical_axes(path: ParameterPath) -> tuple[str, ...]:
    """The axes of the parameter at ``path`` in the tree of a model.

    Heads are rows of N + R or N + V a head, or columns of V; latent is C, or C + R. A scale has
    its weight's axes.
    """
    owner, module, leaf = (str(part) for part in ("", *path)[-3:])
    if module == "_absorbed":  # UpProjections of attention
        return "heads", "head_dim", "latent"
    if module == "replicas":  # log2phy, logcnt
        return ("expert_score", "replica")[: 2 if leaf == "log2phy" else 1]
    axes = _AXES[module]
    if leaf == "e_score_correction_bias":
        return axes[:1]
    axes = tuple(_INNER.get(owner, axis) if axis == "ffn" else axis for axis in axes)
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
    """How every parameter of ``model``, or of a module in it, lies on ``mesh``, by its path;
    shapes are enough.

    A quantised weight is cut between blocks alone, and its scales with it. Scales of whole rows
    belong to every part of their row, and are cut by rows only.

    Args:
      fsdp_axes: as of :class:`~sharding.Layout`; without it, how they lie where they are used.
      prefix: path of ``model`` in the whole, where names below it do not say what its axes are.

    Raises:
      ValueError: a parameter cannot lie as ``rules`` and ``fsdp_axes`` say; the message names it.
        ``fsdp_axes`` for quantised weights.
    """
    if fsdp_axes and quantization is not None:
        raise ValueError(
            f"fsdp_axes: expected weights without quantization, got {type(quantization).__name__}"
        )
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    out: dict[ParameterPath, NamedSharding] = {}
    for path, variable in flat.items():
        # What is held beside the parameters, such as attention's up-projections, is no variable.
        value = variable if isinstance(variable, jax.Array) else variable.get_value()
        shape = value.shape
        axes: tuple[str | None, ...] = logical_axes((*prefix, *path))
        name = dotted((*prefix, *path))
        block = None
        if quantization is not None:
            if path[-1] in _SCALES and _is_one_a_row(quantization):
                axes = (*axes[:-1], None)
            elif any((*path[:-1], scale) in flat for scale in _SCALES if path[-1] == "weight"):
                block = (*(1,) * (len(shape) - 2), *_stored_block(quantization))
        out[path] = rules.sharding(mesh, name, shape, axes, block)
        if isinstance(variable, nnx.Param):
            out[path] = fsdp_sharding(name, shape, out[path], fsdp_axes)
    return out


def check_layout(config: ModelConfig, layout: Layout, experts: int | None = None) -> None:
    """Raises ValueError, or NotImplementedError for an exchange that the platform lacks, where
    layers of this shape cannot run as ``layout`` says, whatever their parameters.

    Args:
      experts: places for experts, if not one each.
    """
    heads, parts = config.num_attention_heads, layout.num_shards("heads")
    if heads % parts:
        raise ValueError(
            f"num_attention_heads: expected whole heads on each of {parts} devices of mesh axis"
            f" {' x '.join(layout.mesh_axes('heads'))}, got {heads}"
        )
    for axis in ("batch", "heads"):
        if shared := [a for a in layout.mesh_axes("cached_tokens") if a in layout.mesh_axes(axis)]:
            raise ValueError(
                f"rules: expected axes 'cached_tokens' and {axis!r} over different mesh axes, got"
                f" both over {shared[0]}: devices that share a row's tokens run the same queries"
            )
    for axis in ("hidden", "joined_hidden", "q_rank", "latent", "head_dim", "expert_score"):
        if layout.num_shards(axis) > 1:
            raise ValueError(
                f"rules: expected axis {axis!r} on every device whole, got it over mesh axis"
                f" {' x '.join(layout.mesh_axes(axis))}: layers do not sum over it"
            )
    check_exchange(
        layout.mesh,
        layout.exchange,
        num_experts=experts or config.n_routed_experts,
        exchange_axes=layout.exchange_axes,
        reduce_axes=layout.reduce_axes,
        float8=layout.float8_dispatch,
        hidden_size=config.hidden_size,
    )


def _is_one_a_row(quantization: Quantization) -> bool:
    return isinstance(quantization, IntegerQuantization) and quantization.group_size is None


def _stored_block(quantization: Quantization) -> tuple[int, int]:
    """Rows and stored columns that a border may not part: two int4 are one."""
    if not isinstance(quantization, IntegerQuantization):
        return quantization.weight_block_size
    columns = quantization.group_size or 1
    return 1, math.lcm(columns, 2) // 2 if quantization.bits == 4 else columns
