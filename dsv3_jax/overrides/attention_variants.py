"""The five published attention variants of :mod:`dsv3_jax.attn_impl`, for comparison.

All compute the same function. The default attention uses ``CC`` for prefill and ``A_CC_ME`` for
decode, so ``A_CC_ME`` is the default itself. Each other variant is a subclass of it with the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.attn_impl import AttnImpl, cached_numbers, check_attn_impl
from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.cached_attention import attend_by_heads
from dsv3_jax.layers.paged_cache import (
    CachedArray,
    Form,
    LayerCache,
    LayerCacheSpec,
    LayerPages,
    append,
    join_tokens,
    split_tokens,
)
from dsv3_jax.layers.rope import Rotation, rotate
from pallas_kernels import mla_decode
from sharding import Layout

# Cached tokens per sequence that a decode step attends to at a time, as in mla_decode on CPUs:
# their keys and values stay in a core's cache.
_STEP_TOKENS = 256


class _Variant(MultiHeadLatentAttention):
    """An attention that runs one batch at a time, and prefills as the default does."""

    def extend_batches(
        self,
        x: Float[Array, "_ _ D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "_ _ D"], LayerPages]:
        """Runs the batches one after the other. No sequence may have tokens in two of them."""
        arrays = x, rotation.cos, rotation.sin
        xs, cosines, sines = (split_tokens(each, caches) for each in arrays)
        pages, outputs = caches[0].pages, []
        for x, cos, sin, cache, form in zip(xs, cosines, sines, caches, forms, strict=True):
            out, pages = self._extend(x, Rotation(cos, sin), cache._replace(pages=pages), form)
            outputs.append(out)
        return join_tokens(outputs), pages

    def _extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        """Returns attention of one batch, and the page arrays with its tokens."""
        if form == "expanded":
            return super().extend_batches(x, rotation, (cache,), (form,))
        return self._decode(x, rotation, cache)

    def _decode(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        """Does :meth:`_extend` for a decode step."""
        raise NotImplementedError

    def _attend(
        self,
        q: Float[Array, "B T H K"],
        name: str,
        new: Float[Array, "B T _"],
        cache: LayerCache,
        keys_values: Callable[[Array], tuple[Array, Array]],
        block_tokens: int | None,
    ) -> tuple[Float[Array, "B T H V"], LayerPages]:
        """Caches ``new`` in the array of that name, and attends with a key and a value per head, as
        :func:`attend_by_heads` does."""
        cache, shard = append({name: new}, cache, None)
        scale, pages = self.config.softmax_scale, cache.pages
        out, _ = attend_by_heads(
            q, new, pages[name], cache, shard, keys_values, scale=scale, block_tokens=block_tokens
        )
        return out, pages


class ExpandingAttention(_Variant):
    """``CC``: decode computes all keys and values again from the cached latents."""

    def _decode(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        latent = self.latents(x, rotation)
        q = jnp.concatenate(self.queries(self.query_latent(x), rotation), axis=-1)
        block_tokens = _STEP_TOKENS * len(x)
        out, pages = self._attend(q, "latent", latent, cache, self.expand, block_tokens)
        return self.output(out.astype(x.dtype)), pages

    def precompute_for_decode(self, dtype: DTypeLike) -> None:
        """Does nothing: no step uses the absorbed projections."""


class DecompressedAttention(_Variant):
    """``CD``: every head's key and value are cached, in one array "keys_values"."""

    def _extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        keys, values = self.expand(self.latents(x, rotation))
        q = jnp.concatenate(self.queries(self.query_latent(x), rotation), axis=-1)
        B, T, _, _ = q.shape
        new = jnp.concatenate([keys.reshape(B, T, -1), values.reshape(B, T, -1)], axis=-1)
        block_tokens = None if form == "expanded" else _STEP_TOKENS * B
        out, pages = self._attend(q, "keys_values", new, cache, self._split_heads, block_tokens)
        return self.output(out.astype(x.dtype)), pages

    def cache_spec(self, dtype: DTypeLike) -> LayerCacheSpec:
        """Returns one array: all heads' keys [H K], then all heads' values [H V]."""
        return {"keys_values": CachedArray(cached_numbers(self.config, "CD"), dtype)}

    def precompute_for_decode(self, dtype: DTypeLike) -> None:
        """Does nothing: no step uses the absorbed projections."""

    def _split_heads(
        self, cached: Float[Array, "B S HKHV"]
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
        """Returns the keys and values of S cached tokens."""
        (B, S, _), H = cached.shape, self.config.num_attention_heads
        keys, values = jnp.split(cached, [H * self.config.qk_head_dim], axis=-1)
        return keys.reshape(B, S, H, -1), values.reshape(B, S, H, -1)


class CopyingAttention(_Variant):
    """``A_CC``: absorbed, with a copy of the cached latents for each head."""

    def _decode(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        f32 = jnp.float32
        latent = self.latents(x, rotation)
        q_nope, q_rope = self.queries(self.query_latent(x), rotation)
        w_uk, w_uv = self.up_projections(x.dtype)
        q_latent = jnp.einsum("bthn,hnc->bthc", q_nope, w_uk, preferred_element_type=f32)
        q = jnp.concatenate([q_latent.astype(x.dtype), q_rope], axis=-1)
        block_tokens = _STEP_TOKENS * len(x)
        out, pages = self._attend(q, "latent", latent, cache, self._copies, block_tokens)
        out = jnp.einsum("bthc,hvc->bthv", out, w_uv, preferred_element_type=f32)
        return self.output(out.astype(x.dtype)), pages

    def _copies(
        self, latent: Float[Array, "B S CR"]
    ) -> tuple[Float[Array, "B S H CR"], Float[Array, "B S H C"]]:
        """Returns each head's copy of the cached tokens as keys, and their latents as values."""
        c = self.config
        shape = (*latent.shape[:2], c.num_attention_heads, c.latent_dim)
        keys = jnp.broadcast_to(latent[:, :, None], shape)
        return keys, keys[..., : c.kv_lora_rank]


class MaterializedProjections(NamedTuple):
    """Matrix products of neighbouring projections of each head, in the activations' dtype. Q is the
    rank of the queries, or D without q_a_proj."""

    w_qk: Float[Array, "H C Q"]  # W_UK' W_UQ: from the query's latent to the key's
    w_q_rope: Float[Array, "H R Q"]  # W_QR unchanged: the rotation comes between it and the keys
    w_vo: Float[Array, "D H C"]  # W_O W_UV: from the attended latents to the layer's output


class MaterializedAttention(_Variant):
    """``AM_CC_ME``: absorbed, with neighbouring projections multiplied into one matrix."""

    _materialized: MaterializedProjections | None = None

    def _decode(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        f32, dtype = jnp.float32, x.dtype
        latent = self.latents(x, rotation)
        w_qk, w_q_rope, w_vo = self._materialized or materialize(self, dtype)
        cache, _ = append({"latent": latent}, cache, None)
        query = self.query_latent(x)
        q_latent = jnp.einsum("btq,hcq->bthc", query, w_qk, preferred_element_type=f32)
        q_rope = jnp.einsum("btq,hrq->bthr", query, w_q_rope, preferred_element_type=f32)
        out, _ = mla_decode(
            q_latent.astype(dtype),
            rotate(q_rope.astype(dtype), rotation),
            cache.pages["latent"],
            cache.block_tables,
            cache.starts + x.shape[1],
            scale=self.config.softmax_scale,
        )
        out = jnp.einsum("bthc,dhc->btd", out, w_vo, preferred_element_type=f32)
        return out.astype(dtype), cache.pages

    def precompute_for_decode(self, dtype: DTypeLike) -> None:
        """Computes :func:`materialize` now instead of at every step."""
        self._materialized = nnx.data(materialize(self, dtype))


def materialize(attention: MultiHeadLatentAttention, dtype: DTypeLike) -> MaterializedProjections:
    """Returns the multiplied projections, summed in float32 and rounded once: H (C Q + R Q + C D)
    numbers, 583 million per layer in DeepSeek-V3, where all of an attention have 187 million."""
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


_CLASSES: dict[AttnImpl | None, type[MultiHeadLatentAttention]] = {
    None: MultiHeadLatentAttention,
    "CD": DecompressedAttention,
    "CC": ExpandingAttention,
    "A_CC": CopyingAttention,
    "A_CC_ME": MultiHeadLatentAttention,
    "AM_CC_ME": MaterializedAttention,
}


def set_variant(attention: MultiHeadLatentAttention, attn_impl: AttnImpl | None) -> None:
    """Makes an attention compute as ``attn_impl`` does; None is the default. The subclasses add
    neither parameters nor settings, so the object changes its class only. Sparse attention has no
    variants."""
    if attention.config.has_indexer:
        return
    # Not an ordinary assignment, which nnx would record as an attribute of the module.
    object.__setattr__(attention, "__class__", _CLASSES[attn_impl])


def check_variant(config: ModelConfig, attn_impl: AttnImpl | None, layout: Layout | None) -> None:
    """Raises ValueError unless ``attn_impl`` is a variant of this model that runs on ``layout``."""
    if attn_impl is None:
        return
    check_attn_impl(attn_impl)
    if config.has_indexer:
        raise ValueError(
            f"attn_impl: expected None for {config.model_type}, whose attention is sparse, got"
            f" {attn_impl}"
        )
    if layout is not None and attn_impl != "A_CC_ME":
        raise ValueError(
            f"attn_impl: expected A_CC_ME for a model laid out on a mesh, got {attn_impl}"
        )
