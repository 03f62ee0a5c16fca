"""Decoder layers of few tokens in two long-running kernels, one on each side of attention itself.

``pallas_kernels.attention_inputs`` is everything before it, ``pallas_kernels.feed_forward``
everything after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dsv3_jax.layers.attention_interface import AbsorbedQueries, Form
from dsv3_jax.layers.linear import Weight
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.paged_cache import LayerCache, new_slots
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.router import routing_rule
from dsv3_jax.quantization import INT4, INT8, BlockQuantization
from pallas_kernels import attention_inputs, feed_forward
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer.plan import PART_COLUMNS
from pallas_kernels.decoder_layer.reference import Chosen, Matrices, Projection, Router
from pallas_kernels.decoder_layer.stream import MOST_TOKENS
from pallas_kernels.hopper import require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.mla_decode.parts import Parts
from sharding import Layout

MOST_BYTES = 256 * 2**20
"""Weights in bfloat16 up to which the kernels are preferred. In Moonlight, the second half of a
layer reads 147 MB of them for one token. Larger layers have been measured in float8 only, V3's."""

MOST_PREFERRED = 2
"""Tokens up to which the kernels are preferred."""

MOST_PREFERRED_IF_SMALL = 4
"""Tokens up to which they are preferred in quantized layers that read SMALL_BYTES or less."""

SMALL_BYTES = 128 * 2**20
"""Four tokens gained 3 % in Moonlight's float8 layers (74 MB for one token) and 20 % in int4 (37
MB), and lost 11 % in DeepSeek-V2's int4 layers (138 MB)."""

MOST_PREFERRED_IF_MEDIUM = 5
"""Tokens up to which they are preferred in layers in bfloat16 that read MEDIUM_BYTES."""

MEDIUM_BYTES = range(4 * 2**20, 32 * 2**20)
"""A model of 346 M parameters, whose layers read 13 MB for one token, took 9 % less time for a step
with four drafts and 20 % less with two. The demo's layers, 1 MB, gained nothing."""

MOST_MERGED = 8192
"""Positions of a block table up to which the second kernel merges attention's parts. Each program
merges those of its heads, which takes longer than a kernel for all heads if there are many."""


@runtime_checkable
class Layer(Protocol):
    """The attributes of a decoder layer that this module reads."""

    layout: Layout | None
    input_layernorm: RMSNorm
    self_attn: Any
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE


def is_preferred(layer: Layer, tokens: int) -> bool:
    """Returns whether the kernels should be tried first for this number of tokens."""
    if tokens > MOST_TOKENS or not _runs(layer.layout) or _replaced(layer) is not None:
        return False
    size = read_bytes(layer)
    if layer.self_attn.o_proj.quantization is None:
        most = MOST_PREFERRED_IF_MEDIUM if size in MEDIUM_BYTES else MOST_PREFERRED
        return tokens <= most and size <= MOST_BYTES
    return tokens <= (MOST_PREFERRED_IF_SMALL if size <= SMALL_BYTES else MOST_PREFERRED)


def merges_parts(layer: Layer, caches: Sequence[LayerCache]) -> bool:
    """Returns whether the second kernel should merge attention's parts."""
    room = caches[0].block_tables.shape[1] * caches[0].page_size
    fits = layer.self_attn.config.kv_lora_rank % PART_COLUMNS == 0
    return fits and len(caches) == 1 and room <= MOST_MERGED


def shared_counter(layout: Layout | None, tokens: int) -> Any:
    """Returns the counter that the kernels of all layers share, or None if none can run.

    With a counter each, XLA would copy a constant for every layer.
    """
    if layout is not None or tokens > MOST_TOKENS or not _runs(layout):
        return None
    return jax.new_ref(new_counter())


def _runs(layout: Layout | None) -> bool:
    try:
        require_hopper()
    except NotImplementedError:
        return False
    return layout is None or layout.mesh.size == 1


def _replaced(layer: Any) -> str | None:
    """Returns the first module that replaces one of the model's own, or None. The kernels read
    weights, and would not call it."""
    kinds = {"input_layernorm": RMSNorm, "post_attention_layernorm": RMSNorm, "mlp": (MLP, MoE)}
    for path, module in nnx.iter_modules(layer):
        name = ".".join(map(str, path))
        is_own = type(module).__module__.startswith(f"{__package__}.") or type(module) is nnx.List
        if path and not (is_own and isinstance(module, kinds.get(name, nnx.Module))):
            return f"{type(module).__name__} in {name}"
    return None


def _check_modules(layer: Layer) -> None:
    """Raises NotImplementedError if a module of the layer has been replaced."""
    if (replaced := _replaced(layer)) is not None:
        raise NotImplementedError(f"takes layers of the model's own modules, got {replaced}")


def read_bytes(layer: Layer) -> int:
    """Returns the bytes of the weights that one token reads in the layer's second half."""
    mlp, o_proj = layer.mlp, _size(layer.self_attn.o_proj)
    if isinstance(mlp, MLP):
        return _mlp_size(mlp) + o_proj
    config = mlp.config
    routed = _mlp_size(mlp.experts) // config.n_routed_experts * config.num_experts_per_tok
    shared = _mlp_size(mlp.shared_experts) if config.n_shared_experts else 0
    return routed + shared + o_proj + _size(mlp.gate)


def _mlp_size(mlp: Any) -> int:
    return sum(map(_size, (mlp.gate_proj, mlp.up_proj, mlp.down_proj)))


def _size(module: Any) -> int:
    weight = module.weight
    return math.prod(weight.shape) * weight.dtype.itemsize


def inputs_in_kernel(
    layer: Layer,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    caches: Sequence[LayerCache],
    forms: Sequence[Form],
    counter: Any = None,
) -> AbsorbedQueries:
    """Returns the queries for attention, and the cache with the new tokens.

    Args:
      x: the layer's input: the tokens of all batches, see :func:`join_tokens`.
      caches, forms: one for each batch.
      counter: from :func:`shared_counter`.

    Raises:
      NotImplementedError: the kernel does not take the layer, the number of tokens, or this device.
    """
    _check_modules(layer)
    attention = layer.self_attn
    weights = _attention_weights(layer, x, forms)
    flat = (each.reshape(-1, each.shape[-1]) for each in (x, *rotation))
    x_rows, cos, sin = flat
    slots = [new_slots(cache).reshape(-1) for cache in caches]
    q_latent, q_rope, pages = attention_inputs(
        x_rows,
        weights,
        cos,
        sin,
        caches[0].pages["latent"],
        jnp.concatenate(slots),
        eps=layer.input_layernorm.eps,
        latent_eps=attention.kv_a_layernorm.eps,
        counter=counter,
        implementation="mosaic_gpu",
    )
    q_latent, q_rope = (q.reshape(*x.shape[:-1], *q.shape[1:]) for q in (q_latent, q_rope))
    return AbsorbedQueries(q_latent, q_rope, {"latent": pages})


def _attention_weights(
    layer: Layer, x: Float[Array, "B T D"], forms: Sequence[Form]
) -> AttentionWeights:
    """Returns the weights before attention. It raises as :func:`inputs_in_kernel`."""
    attention = layer.self_attn
    if layer.layout is not None or "expanded" in forms or attention.float8_latents:
        raise NotImplementedError(
            "takes layers without a layout, attention in absorbed form, and caches that are not in"
            " float8"
        )
    without_rank = attention.config.q_lora_rank is None
    return AttentionWeights(
        norm=layer.input_layernorm.weight[...],
        q_proj=projection(attention.q_proj if without_rank else attention.q_b_proj),
        kv_a_proj=projection(attention.kv_a_proj_with_mqa),
        kv_a_norm=attention.kv_a_layernorm.weight[...],
        w_uk=attention.up_projections(x.dtype).w_uk,
        q_a_proj=None if without_rank else projection(attention.q_a_proj),
        q_a_norm=None if without_rank else attention.q_a_layernorm.weight[...],
    )


def in_one_kernel(
    layer: Layer,
    x: Float[Array, "B T D"],
    attended: Float[Array, "B T D"] | None,
    valid: Bool[Array, "B T"] | None,
    heads: Float[Array, "B T H V"] | None,
    counter: Any = None,
    latents: Float[Array, "B T H C"] | Parts | None = None,
) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
    """Does :meth:`DecoderLayer._feed_forward` in one kernel. ``valid`` only affects the statistics.

    Args:
      counter: from :func:`shared_counter`.
      latents: attention's output before W_UV, which may be in parts, or None if ``heads`` or
        ``attended`` has it.

    Raises:
      NotImplementedError: the kernel does not take the layer, the number of tokens, or this device.
    """
    if layer.layout is not None and layer.layout.mesh.size > 1:
        raise NotImplementedError(f"takes layers on one device, got {layer.layout.mesh.size}")
    _check_modules(layer)
    arrays, options = arguments(layer)
    rows = x.reshape(-1, x.shape[-1])
    if latents is not None:
        options["w_uv"] = layer.self_attn.up_projections(x.dtype).w_uv
    if attended is None:
        options["o_proj"] = projection(layer.self_attn.o_proj)
    given: Any = next(each for each in (attended, heads, latents) if each is not None)
    y, chosen = feed_forward(
        rows,
        **arrays,
        **options,
        attended=given if isinstance(given, Parts) else given.reshape(len(rows), -1),
        counter=counter,
        implementation="mosaic_gpu",
    )
    return y.reshape(x.shape), _stats(chosen, valid)


def _stats(chosen: Chosen | None, valid: Bool[Array, "B T"] | None) -> RoutingStats | None:
    if chosen is None:
        return None
    E = chosen.scores.shape[1]
    if valid is None:
        slots = chosen.experts.reshape(-1)
    else:
        slots = jnp.where(valid.reshape(-1, 1), chosen.experts, E).reshape(-1)
    counts = jnp.zeros((E,), jnp.int32).at[slots].add(1, mode="drop")
    return RoutingStats(counts, chosen.scores, chosen.experts)


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


def projection(linear: Weight) -> Projection:
    """Returns a projection for the kernels. It raises as :func:`arguments`."""
    return Projection(linear.weight[...], _scales(linear))


def _matrices(mlp: Any) -> Matrices:
    weights: tuple[Weight, ...] = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    gate, up, down = (weight.weight[...] for weight in weights)
    return Matrices(gate, up, down, _scales(*weights))


def _scales(*weights: Weight) -> tuple[Array, ...]:
    quantization = weights[0].quantization
    if quantization is None:
        return ()
    is_float8 = isinstance(quantization, BlockQuantization) and weights[0].block_shape == (128, 128)
    if not is_float8 and quantization not in (INT8, INT4):
        raise NotImplementedError(
            "takes matrices without quantization, in float8 with blocks of 128x128, in int8 with a"
            f" scale for each row, or in int4 with blocks of 1x128, got {quantization}"
        )
    return tuple(weight.scale for weight in weights)
