"""Latent attention in the five published ways of :mod:`dsv3_jax.attn_impl`, for comparison: all
give the same, and the engine by itself uses ``CC`` for prefill and ``A_CC_ME`` for decode."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.attn_impl import AttnImpl, check_attn_impl
from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.attention import Form, LayerCache, MultiHeadLatentAttention
from dsv3_jax.layers.rope import Rotation, rotate
from pallas_kernels import mla_decode
from sharding import Layout

# Cached tokens of a row that a step attends to at a time, as mla_decode does on CPUs: their keys
# and values stay in a core's cache.
_STEP_TOKENS = 256


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
    if layout is not None and attn_impl != "A_CC_ME":
        raise ValueError(
            f"attn_impl: expected A_CC_ME for a model laid out on a mesh, got {attn_impl}"
        )


def extend(
    attention: MultiHeadLatentAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    cache: LayerCache,
    form: Form,
    attn_impl: AttnImpl,
    materialized: MaterializedProjections | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
    """As :meth:`MultiHeadLatentAttention.extend`, which does what the engine would do too:
    ``expanded`` over a compressed cache, and ``A_CC_ME``.

    Args:
      cache: of ``CD``, pages of all heads' keys and values.
      materialized: what ``AM_CC_ME`` multiplies with; None is to make it now.
    """
    if attn_impl == "A_CC_ME" or (form == "expanded" and attn_impl != "CD"):
        return attention.extend(x, rotation, cache, form)
    latent = attention.latents(x, rotation)
    if attn_impl == "AM_CC_ME":
        products = materialized or materialize(attention, x.dtype)
        return _absorbed_and_materialized(attention, x, latent, rotation, cache, products)
    c, f32 = attention.config, jnp.float32
    q_nope, q_rope = attention.queries(x, rotation)
    new, keys_values = latent, attention.expand
    absorbed = attention.up_projections(x.dtype) if attn_impl == "A_CC" else None
    if absorbed is not None:
        q_nope = jnp.einsum("bthn,hnc->bthc", q_nope, absorbed.w_uk, preferred_element_type=f32)
        keys_values = functools.partial(_copies, c)
    elif attn_impl == "CD":
        new = jnp.concatenate(
            [part.reshape(*x.shape[:2], -1) for part in attention.expand(latent)], axis=-1
        )
        keys_values = functools.partial(_cut, c)
    cache, share = attention.hold(new, cache)
    q = jnp.concatenate([q_nope.astype(x.dtype), q_rope], axis=-1)
    block_tokens = None if form == "expanded" else _STEP_TOKENS * len(x)
    out, _ = attention.attend_by_heads(q, new, cache, share, keys_values, block_tokens)
    if absorbed is not None:
        out = jnp.einsum("bthc,hvc->bthv", out, absorbed.w_uv, preferred_element_type=f32)
    return attention.output(out.astype(x.dtype)), cache.pages


def materialize(attention: MultiHeadLatentAttention, dtype: DTypeLike) -> MaterializedProjections:
    """Summed in float32 of weights in ``dtype``, rounded once: H (C Q + R Q + C D) numbers, 583
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


def _copies(
    config: ModelConfig, latent: Float[Array, "B S CR"]
) -> tuple[Float[Array, "B S H CR"], Float[Array, "B S H C"]]:
    """The cached tokens once a head, as its keys; the latent part is its values."""
    shape = (*latent.shape[:2], config.num_attention_heads, config.latent_dim)
    keys = jnp.broadcast_to(latent[:, :, None], shape)
    return keys, keys[..., : config.kv_lora_rank]


def _cut(
    config: ModelConfig, cached: Float[Array, "B S HKHV"]
) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Keys and values out of a decompressed cache."""
    (B, S, _), H = cached.shape, config.num_attention_heads
    keys, values = jnp.split(cached, [H * config.qk_head_dim], axis=-1)
    return keys.reshape(B, S, H, -1), values.reshape(B, S, H, -1)


def _absorbed_and_materialized(
    attention: MultiHeadLatentAttention,
    x: Float[Array, "B T D"],
    latent: Float[Array, "B T CR"],
    rotation: Rotation,
    cache: LayerCache,
    products: MaterializedProjections,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
    c, f32, dtype = attention.config, jnp.float32, x.dtype
    cache, _ = attention.hold(latent, cache)
    w_qk, w_q_rope, w_vo = products
    query = x if c.q_lora_rank is None else attention.q_a_layernorm(attention.q_a_proj(x))
    q_latent = jnp.einsum("btq,hcq->bthc", query, w_qk, preferred_element_type=f32)
    q_rope = jnp.einsum("btq,hrq->bthr", query, w_q_rope, preferred_element_type=f32)
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
