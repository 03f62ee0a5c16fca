"""The second half of a decoder layer as one operation, ``pallas_kernels.feed_forward``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dsv3_jax.layers.linear import Weight
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.router import routing_rule
from dsv3_jax.quantization import BlockQuantization
from pallas_kernels import feed_forward
from pallas_kernels.decoder_layer.reference import Matrices, Projection, Router
from sharding import Layout


@runtime_checkable
class Layer(Protocol):
    """The attributes of a decoder layer that this module reads."""

    layout: Layout | None
    self_attn: Any
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE


def in_one_kernel(
    layer: Layer,
    x: Float[Array, "B T D"],
    attended: Float[Array, "B T D"] | None,
    valid: Bool[Array, "B T"] | None,
    heads: Float[Array, "B T H V"] | None,
) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
    """Does :meth:`DecoderLayer._feed_forward` in one kernel. ``valid`` only affects the statistics.

    Raises:
      NotImplementedError: the kernel does not take the layer, the number of tokens, or this device.
    """
    if layer.layout is not None and layer.layout.mesh.size > 1:
        raise NotImplementedError(f"takes layers on one device, got {layer.layout.mesh.size}")
    arrays, options = arguments(layer)
    rows = x.reshape(-1, x.shape[-1])
    if attended is None:
        assert heads is not None
        attended, options["o_proj"] = heads, projection(layer.self_attn.o_proj)
    y, chosen = feed_forward(
        rows,
        **arrays,
        **options,
        attended=attended.reshape(len(rows), -1),
        implementation="mosaic_gpu",
    )
    y = y.reshape(x.shape)
    if chosen is None:
        return y, None
    E = chosen.scores.shape[1]
    if valid is None:
        slots = chosen.experts.reshape(-1)
    else:
        slots = jnp.where(valid.reshape(-1, 1), chosen.experts, E).reshape(-1)
    counts = jnp.zeros((E,), jnp.int32).at[slots].add(1, mode="drop")
    return y, RoutingStats(counts, chosen.scores, chosen.experts)


def arguments(layer: Layer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the layer's arrays and options for feed_forward.

    Raises:
      NotImplementedError: the operation has no such weights, or experts have several slots.
    """
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    arrays: dict[str, Any] = {"norm": norm.weight[...], "router": None, "routed": None}
    if isinstance(mlp, MLP):
        return arrays | {"shared": _matrices(mlp)}, {"rule": None, "eps": norm.eps}
    if mlp.replicas is not None:
        raise NotImplementedError("takes experts in their own order, got placed experts")
    gate, config = mlp.gate, mlp.config
    bias = gate.e_score_correction_bias[...] if config.topk_method == "noaux_tc" else None
    arrays["router"] = Router(gate.weight[...], bias)
    arrays["routed"] = _matrices(mlp.experts)
    arrays["shared"] = _matrices(mlp.shared_experts) if config.n_shared_experts else None
    return arrays, {"rule": routing_rule(config), "eps": norm.eps}


def projection(o_proj: Weight) -> Projection:
    """Returns the projection of attention's output for feed_forward. It raises as that."""
    return Projection(o_proj.weight[...], _scales(o_proj))


def _matrices(mlp: Any) -> Matrices:
    weights: tuple[Weight, ...] = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    gate, up, down = (weight.weight[...] for weight in weights)
    return Matrices(gate, up, down, _scales(*weights))


def _scales(*weights: Weight) -> tuple[Array, ...]:
    quantization = weights[0].quantization
    if quantization is None:
        return ()
    if not isinstance(quantization, BlockQuantization) or weights[0].block_shape != (128, 128):
        raise NotImplementedError(
            f"takes matrices without quantization or in float8 with blocks of 128x128, got"
            f" {quantization}"
        )
    return tuple(weight.scale for weight in weights)
