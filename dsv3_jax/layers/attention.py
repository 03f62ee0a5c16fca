"""Multi-head Latent Attention, expanded and absorbed (DeepSeek-V2 report, section 2.1).

Each token leaves one latent ``c = norm(W_DKV x)``, C wide, and one rope key ``k_R``, R wide, for
all heads. Head h's key is ``[W_UK^h c | k_R]``, its value ``W_UV^h c``. The same sums, two orders:

* expanded: form every head's keys and values. Fewest operations for many queries: prefill and
  training.
* absorbed: fold W_UK into the query and W_UV into the output, and attend to the latents themselves.
  Fewest bytes for few queries: decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import TokenShare, write
from dsv3_jax.layers.context_parallel import attend_share, counted_once, merged
from dsv3_jax.layers.linear import Linear
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.on_mesh import summed
from dsv3_jax.layers.rope import Rotation, rotate
from dsv3_jax.quantization import Quantization
from pallas_kernels import merge_attention, mla_decode, mla_prefill
from sharding import Layout

Form = Literal["expanded", "absorbed"]

# The published code gives these two norms its default and not the config's rms_norm_eps, which
# differs in Moonlight (1e-5).
_LATENT_NORM_EPS = 1e-6

# Cached tokens of all rows that a prefill chunk expands at a time: 335 MB of keys and values in
# DeepSeek-V3. The fewer blocks, the fewer times a float32 result is read and written.
_CONTEXT_TOKENS = 4096


class LayerCache(NamedTuple):
    """One layer's view of the cache while it is extended by T tokens a row."""

    pages: Float[Array, "P page width"]
    block_tables: Int[Array, "B max_pages"]
    starts: Int[Array, " B"]
    """Tokens held before these T, by all devices that share a row."""
    valid: Bool[Array, "B T"]
    """Which of the T are tokens, the rest being padding at the right."""


class UpProjections(NamedTuple):
    """kv_b_proj head by head, in the activations' dtype."""

    w_uk: Float[Array, "H N C"]
    w_uv: Float[Array, "H V C"]


class MultiHeadLatentAttention(nnx.Module):
    """Parameters are named as in the checkpoint; ``q_lora_rank`` null has q_proj alone."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        self.config = config
        D, H, C = config.hidden_size, config.num_attention_heads, config.kv_lora_rank

        def linear(n_in: int, n_out: int) -> Linear:
            return Linear(
                n_in,
                n_out,
                std=config.initializer_range,
                rngs=rngs,
                dtype=dtype,
                quantization=quantization,
            )

        if (Q := config.q_lora_rank) is None:
            self.q_proj = linear(D, H * config.qk_head_dim)
        else:
            self.q_a_proj = linear(D, Q)
            self.q_a_layernorm = RMSNorm(Q, eps=_LATENT_NORM_EPS, dtype=dtype)
            self.q_b_proj = linear(Q, H * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(D, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(C, eps=_LATENT_NORM_EPS, dtype=dtype)
        self.kv_b_proj = linear(C, H * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(H * config.v_head_dim, D)
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out: heads are then the device's
        self._held: UpProjections | None = None

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T CR"]]:
        """Causal self-attention of whole sequences; also the latents that a cache would hold."""
        B, T, _ = x.shape
        latent = self.latents(x, rotation)
        keys, values = self.expand(latent)
        out, _ = mla_prefill(
            jnp.concatenate(self.queries(x, rotation), axis=-1),
            keys,
            values,
            jnp.zeros((B,), jnp.int32),
            jnp.full((B,), T, jnp.int32),
            scale=self.config.softmax_scale,
        )
        return self.output(out), latent

    def extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"]]:
        """Attention of T new tokens a row to the cached ones and themselves; the longer cache."""
        latent = self.latents(x, rotation)
        cache, share = self.hold(latent, cache)
        queries = self.queries(x, rotation)
        if form == "absorbed":
            out, lse = self._attend_absorbed(*queries, latent, cache, share)
        else:
            q = jnp.concatenate(queries, axis=-1)
            out, lse = self.attend_by_heads(q, latent, cache, share, self.expand)
        return self.output(merged(out, lse, self.layout).astype(x.dtype)), cache.pages

    def hold(
        self, new: Float[Array, "B T numbers"], cache: LayerCache
    ) -> tuple[LayerCache, TokenShare]:
        """The cache with what it is to hold of T new tokens a row; this device's share of them."""
        share = TokenShare.of(self.layout, cache.pages.shape[1])
        held, places = share.positions(cache.starts[:, None] + jnp.arange(new.shape[1]))
        pages = write(cache.pages, cache.block_tables, places, cache.valid & held, new)
        return cache._replace(pages=pages), share

    def queries(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        """The rope-free and the rotated part of every head's query."""
        c = self.config
        q = (
            self.q_proj(x)
            if c.q_lora_rank is None
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        )
        q = q.reshape(*x.shape[:2], -1, c.qk_head_dim)
        return q[..., : c.qk_nope_head_dim], rotate(q[..., c.qk_nope_head_dim :], rotation)

    def latents(self, x: Float[Array, "B T D"], rotation: Rotation) -> Float[Array, "B T CR"]:
        """What the cache holds of a token: the normed latent, then the rotated rope key."""
        C = self.config.kv_lora_rank
        compressed = self.kv_a_proj_with_mqa(x)
        return jnp.concatenate(
            [self.kv_a_layernorm(compressed[..., :C]), rotate(compressed[..., C:], rotation)],
            axis=-1,
        )

    def up_projections(self, dtype: DTypeLike) -> UpProjections:
        if self._held is not None:
            return self._held
        c = self.config
        w = self.kv_b_proj.dense(dtype)
        w = w.reshape(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        return UpProjections(w[:, : c.qk_nope_head_dim], w[:, c.qk_nope_head_dim :])

    def hold_up_projections(self, dtype: DTypeLike) -> None:
        """Cuts, and dequantises, kv_b_proj now and not at every absorbed step. Whoever changes the
        weights afterwards starts from a model that does not hold them."""
        self._held = nnx.data(self.up_projections(dtype))

    def expand(
        self, latent: Float[Array, "B S CR"]
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
        """Every head's keys and values of the tokens behind these latents."""
        c = self.config
        B, S, _ = latent.shape
        kv = self.kv_b_proj(latent[..., : c.kv_lora_rank])
        kv = kv.reshape(B, S, -1, c.qk_nope_head_dim + c.v_head_dim)
        k_rope = latent[..., None, c.kv_lora_rank :]
        k_rope = jnp.broadcast_to(k_rope, (*kv.shape[:3], c.qk_rope_head_dim))
        keys = jnp.concatenate([kv[..., : c.qk_nope_head_dim], k_rope], axis=-1)
        return keys, kv[..., c.qk_nope_head_dim :]

    def output(self, out: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        return summed(self.o_proj, out.reshape(*out.shape[:2], -1), self.layout, "heads")

    def _attend_absorbed(
        self,
        q_nope: Float[Array, "B T H N"],
        q_rope: Float[Array, "B T H R"],
        latent: Float[Array, "B T CR"],
        cache: LayerCache,
        share: TokenShare,
    ) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B T H"]]:
        """To the tokens that this device holds, with their log-sum-exp."""
        f32, scale = jnp.float32, self.config.softmax_scale
        w_uk, w_uv = self.up_projections(q_nope.dtype)
        q_latent = jnp.einsum("bthn,hnc->bthc", q_nope, w_uk, preferred_element_type=f32)
        q_latent = q_latent.astype(q_nope.dtype)
        pages, tables = cache.pages, cache.block_tables
        if share.parts == 1:
            # Padded queries count too, so that query t sees exactly the t tokens before it.
            lengths = cache.starts + q_nope.shape[1]
            out, lse = mla_decode(q_latent, q_rope, pages, tables, lengths, scale=scale)
        else:
            starts = cache.starts
            out, lse = attend_share(
                q_latent, q_rope, latent, pages, tables, starts, share, scale=scale
            )
        return jnp.einsum("bthc,hvc->bthv", out, w_uv, preferred_element_type=f32), lse

    def attend_by_heads(
        self,
        q: Float[Array, "B T H K"],
        new: Float[Array, "B T numbers"],
        cache: LayerCache,
        share: TokenShare,
        keys_values: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
        block_tokens: int | None = None,
    ) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
        """The new tokens among themselves, then block by block of what was cached before, as far as
        this device holds it; with their log-sum-exp.

        Args:
          new: what the cache holds of the new tokens.
          keys_values: every head's keys [B, S, H, K] and values [B, S, H, V], of [B, S, numbers].
          block_tokens: of all rows; by default as many as a prefill takes.
        """
        B, T, _, _ = q.shape
        scale = self.config.softmax_scale
        page_size = cache.pages.shape[1]
        block_pages = max(1, (block_tokens or _CONTEXT_TOKENS) // (B * page_size))
        block = block_pages * page_size
        tables = jnp.pad(
            cache.block_tables, ((0, 0), (0, -cache.block_tables.shape[1] % block_pages))
        )
        # Past the room nothing is cached; without a bound the last pages would count twice.
        room = cache.block_tables.shape[1] * page_size
        lengths = jnp.minimum(share.lengths(cache.starts), room)
        everything = jnp.full((B,), block, jnp.int32)  # all queries stand behind the whole block

        def add_block(i: Int[Array, ""], carry: tuple[jax.Array, jax.Array]):
            table = jax.lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
            cached = cache.pages[table][..., : new.shape[-1]].reshape(B, block, -1)
            held = jnp.clip(lengths - i * block, 0, block)
            keys, values = keys_values(cached.astype(q.dtype))
            out, lse = mla_prefill(q, keys, values, everything, held, scale=scale)
            return merge_attention(*carry, out.astype(jnp.float32), lse)

        out, lse = mla_prefill(
            q,
            *keys_values(new),
            jnp.zeros((B,), jnp.int32),
            jnp.full((B,), T, jnp.int32),
            scale=scale,
        )
        blocks = -(-jnp.max(lengths) // block)

        def with_context(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
            total, lse = jax.lax.fori_loop(0, blocks, add_block, (out.astype(jnp.float32), lse))
            return total.astype(out.dtype), lse

        # A prompt's first chunk has none, and then needs no float32 copy.
        lse = counted_once(lse, share)
        return jax.lax.cond(blocks > 0, with_context, lambda *none: none, out, lse)
