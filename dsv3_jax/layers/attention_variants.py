"""Latent attention in the five published ways of :mod:`dsv3_jax.attn_impl`, for comparison: all
give the same, and the engine by itself uses ``CC`` for prefill and ``A_CC_ME`` for decode."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.attn_impl import AttnImpl, check_attn_impl
from dsv3_jax.layers.attention import Form, LayerCache, MultiHeadLatentAttention
from dsv3_jax.layers.rope import Rotation, rotate
from pallas_kernels import mla_decode
from sharding import Layout


class MaterializedProjections(NamedTuple):
    """Products of neighbouring projections, head by head, in the activations' dtype. Q is the rank
    of queries, or D where they have none."""

    w_qk: Float[Array, "H C Q"]
    """W_UK' W_UQ: from the query's latent to the key's."""
    w_q_rope: Float[Array, "H R Q"]
    """W_QR as it was: the rotation stands between it and the keys."""
    w_vo: Float[Array, "D H C"]
    """W_O W_UV: from the attended latents to the layer's output."""


def check_variant(attn_impl: AttnImpl | None, layout: Layout | None) -> None:
    """Raises ValueError where a model cannot attend so, on the devices of ``layout``."""
    if attn_impl is None:
        return
    check_attn_impl(attn_impl)
    if layout is not None and attn_impl not in ("CC", "A_CC_ME"):
        raise ValueError(
            f"attn_impl: expected CC or A_CC_ME for a model laid out on a mesh, got {attn_impl}"
        )


def extend(
    attention: MultiHeadLatentAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    cache: LayerCache,
    form: Form,
    attn_impl: AttnImpl,
    materialized: MaterializedProjections | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
    """As :meth:`MultiHeadLatentAttention.extend`, which does it where the engine would attend so
    too: ``expanded`` over a compressed cache, ``CC``, ``A_CC_ME``.

    Args:
      cache: of ``CD``, pages of all heads' keys and values.
      materialized: what ``AM_CC_ME`` multiplies with; None is to make it now.
    """
    if attn_impl == "CD":
        return _cache_decompressed(attention, x, rotation, cache)
    if form == "expanded" or attn_impl == "CC":
        return attention.extend(x, rotation, cache, "expanded")
    if attn_impl == "A_CC":
        return _absorbed_by_heads(attention, x, rotation, cache)
    if attn_impl == "AM_CC_ME":
        products = materialized or materialize(attention, x.dtype)
        return _absorbed_and_materialized(attention, x, rotation, cache, products)
    return attention.extend(x, rotation, cache, "absorbed")


def materialize(attention: MultiHeadLatentAttention, dtype: DTypeLike) -> MaterializedProjections:
    """Summed in float32 of weights in ``dtype``, rounded once: H (C Q + R Q + C D) numbers, 586
    million a layer in DeepSeek-V3, whose attention has 187."""
    c, f32 = attention.config, jnp.float32
    H, K, V = c.num_attention_heads, c.qk_head_dim, c.v_head_dim
    w_uk, w_uv = attention.up_projections(dtype)
    query = attention.q_proj if c.q_lora_rank is None else attention.q_b_proj
    w_q = query.dense(dtype).reshape(H, K, -1)
    w_uq, w_q_rope = w_q[:, : c.qk_nope_head_dim], w_q[:, c.qk_nope_head_dim :]
    w_o = attention.o_proj.dense(dtype).reshape(-1, H, V)
    w_qk = jnp.einsum("hnc,hnq->hcq", w_uk, w_uq, preferred_element_type=f32)
    w_vo = jnp.einsum("dhv,hvc->dhc", w_o, w_uv, preferred_element_type=f32)
    return MaterializedProjections(w_qk.astype(dtype), w_q_rope, w_vo.astype(dtype))


def _cache_decompressed(
    attention: MultiHeadLatentAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    cache: LayerCache,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
    c = attention.config
    H, K = c.num_attention_heads, c.qk_head_dim

    def keys_values(numbers: Float[Array, "B S HKHV"]):
        keys, values = numbers[..., : H * K], numbers[..., H * K :]
        tokens = numbers.shape[:2]
        return keys.reshape(*tokens, H, K), values.reshape(*tokens, H, c.v_head_dim)

    expanded = attention.expand(attention.latents(x, rotation))
    new = jnp.concatenate([part.reshape(*x.shape[:2], -1) for part in expanded], axis=-1)
    cache, share = attention.hold(new, cache)
    q = jnp.concatenate(attention.queries(x, rotation), axis=-1)
    out, _ = attention.attend_by_heads(q, new, cache, share, keys_values)
    return attention.output(out.astype(x.dtype)), cache.pages


def _absorbed_by_heads(
    attention: MultiHeadLatentAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    cache: LayerCache,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
    """Multi-head attention with ``[q_latent | q_rope]`` to a copy of the cached token a head."""
    c, f32 = attention.config, jnp.float32

    def keys_values(latent: Float[Array, "B S CR"]):
        shape = (*latent.shape[:2], c.num_attention_heads, c.latent_dim)
        keys = jnp.broadcast_to(latent[:, :, None], shape)
        return keys, keys[..., : c.kv_lora_rank]

    latent = attention.latents(x, rotation)
    cache, share = attention.hold(latent, cache)
    w_uk, w_uv = attention.up_projections(x.dtype)
    q_nope, q_rope = attention.queries(x, rotation)
    q_latent = jnp.einsum("bthn,hnc->bthc", q_nope, w_uk, preferred_element_type=f32)
    q = jnp.concatenate([q_latent.astype(x.dtype), q_rope], axis=-1)
    out, _ = attention.attend_by_heads(q, latent, cache, share, keys_values)
    out = jnp.einsum("bthc,hvc->bthv", out, w_uv, preferred_element_type=f32)
    return attention.output(out.astype(x.dtype)), cache.pages


def _absorbed_and_materialized(
    attention: MultiHeadLatentAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    cache: LayerCache,
    products: MaterializedProjections,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
    c, f32, dtype = attention.config, jnp.float32, x.dtype
    cache, _ = attention.hold(attention.latents(x, rotation), cache)
    w_qk, w_q_rope, w_vo = products
    of_query = x if c.q_lora_rank is None else attention.q_a_layernorm(attention.q_a_proj(x))
    q_latent = jnp.einsum("btq,hcq->bthc", of_query, w_qk, preferred_element_type=f32)
    q_rope = jnp.einsum("btq,hrq->bthr", of_query, w_q_rope, preferred_element_type=f32)
    out, _ = mla_decode(
        q_latent.astype(dtype),
        rotate(q_rope.astype(dtype), rotation),
        cache.pages,
        cache.block_tables,
        cache.starts + x.shape[1],
        scale=c.softmax_scale,
    )
    out = jnp.einsum("bthc,dhc->btd", out, w_vo, preferred_element_type=f32)
    return out.astype(dtype), cache.pages
