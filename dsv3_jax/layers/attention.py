"""Multi-head Latent Attention, expanded and absorbed (DeepSeek-V2 report, section 2.1).

Each token leaves one latent ``c = norm(W_DKV x)`` of width C and one rope key ``k_R`` of width R,
which all heads share. Head h's key is ``[W_UK^h c | k_R]``, its value ``W_UV^h c``. The same sums
are computed in two orders:

* expanded: compute every head's keys and values. This takes the fewest operations for many queries:
  prefill and training.
* absorbed: fold W_UK into the query and W_UV into the output, and attend to the latents themselves.
  This reads the fewest bytes for few queries: decode, and short prefill chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.cached_attention import (
    attend_by_heads,
    attend_local,
    group_tables,
    join_groups,
    merge_devices,
    split_groups,
)
from dsv3_jax.layers.linear import Linear, WeightArgs, linears, per_head_matmul
from dsv3_jax.layers.norm import RMSNorm, norm_dtype
from dsv3_jax.layers.on_mesh import sharded_linear
from dsv3_jax.layers.paged_cache import (
    AppendedTokens,
    Form,
    LayerCache,
    LayerCacheSpec,
    LayerPages,
    append_batches,
    float8_latents,
    join_tokens,
    latent_cache_spec,
    read_latents,
    split_tokens,
)
from dsv3_jax.layers.rope import Rotation, rotate
from pallas_kernels import mla_decode, mla_decode_whole_sequences, mla_prefill, target
from pallas_kernels.hopper.split_kv import Schedule
from sharding import Layout, gather_tokens, map_balanced

# The published code gives these two norms its default and not the config's rms_norm_eps, which
# differs in Moonlight (1e-5).
_LATENT_NORM_EPS = 1e-6


class Attention(Protocol):
    """The methods that a decoder layer and a model call."""

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], Array]:
        """Returns causal self-attention of whole sequences, from ``rotation.first_keys`` on, and
        what a cache would store."""
        ...

    def extend_batches(
        self,
        x: Float[Array, "_ _ D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "_ _ D"], LayerPages]:
        """Returns attention of new tokens to the cached ones of their sequences and themselves.

        The second result is the page arrays with the new tokens.

        Args:
          x: the tokens of all batches, see :func:`join_tokens`.
          caches: one for each batch, with the same page arrays.
          forms: the form of each batch.
        """
        ...

    def cache_spec(self, dtype: DTypeLike) -> LayerCacheSpec:
        """Returns the page arrays that the layer caches, for activations of ``dtype``."""
        ...

    def precompute_for_decode(self, dtype: DTypeLike) -> None:
        """Computes once what every decode step needs from the weights."""
        ...


class UpProjections(NamedTuple):
    """The parts of kv_b_proj for each head, in the activations' dtype."""

    w_uk: Float[Array, "H N C"]
    w_uv: Float[Array, "H V C"]


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head Latent Attention, an :class:`Attention`.

    Parameters are named as in the checkpoint. A model whose ``q_lora_rank`` is null has only
    q_proj. On a mesh, H is the number of heads on the device.
    """

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        self.config = config
        D, H, C = config.hidden_size, config.num_attention_heads, config.kv_lora_rank

        norm: Any = {"eps": _LATENT_NORM_EPS, "dtype": norm_dtype(config, weights["dtype"])}

        def linear(n_in: int, n_out: int) -> Linear:
            return Linear(n_in, n_out, std=config.initializer_range, **weights)

        if (Q := config.q_lora_rank) is None:
            self.q_proj = linear(D, H * config.qk_head_dim)
        else:
            self.q_a_proj = linear(D, Q)
            self.q_a_layernorm = RMSNorm(Q, **norm)
            self.q_b_proj = linear(Q, H * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(D, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(C, **norm)
        self.kv_b_proj = linear(C, H * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(H * config.v_head_dim, D)
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.whole_sequences = False  # see DeepSeekV3.attend_to_whole_sequences
        self.float8_latents = False  # see DeepSeekV3.use_cache_dtype
        self._absorbed: UpProjections | None = None

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T CR"]]:
        """Returns causal self-attention of whole sequences, and the latents of their tokens."""
        first = self.q_proj if self.config.q_lora_rank is None else self.q_a_proj
        projected, compressed = linears(x, first, self.kv_a_proj_with_mqa)
        latents = self._latents(compressed, rotation)
        latent = read_latents(self.config, self._stored(latents), x.dtype)
        if self.config.q_lora_rank is not None:
            projected = self.q_b_proj(self.q_a_layernorm(projected))
        queries = jnp.concatenate(self._parts(projected, rotation), axis=-1)
        if self.layout is not None and self.layout.num_shards("tokens") > 1:
            return self.output(self._attend_sharded(self.layout, queries, latent, rotation)), latent
        keys, values = self.expand(latent)
        first_keys, scale = rotation.first_keys, self.config.softmax_scale
        out, _ = mla_prefill(queries, keys, values, first_keys=first_keys, scale=scale)
        return self.output(out), latent

    def _attend_sharded(
        self,
        layout: Layout,
        queries: Float[Array, "B T H K"],
        latent: Float[Array, "B T CR"],
        rotation: Rotation,
    ) -> Float[Array, "B T H V"]:
        """Returns causal self-attention of this device's part of whole sequences. Latents are
        gathered, a tenth of the keys and values, which every device expands for itself."""
        keys, values = self.expand(gather_tokens(layout, latent))

        def attend(some: tuple[Array, Array | None], start: Array) -> Array:
            queries, first_keys = some
            starts = jnp.full(queries.shape[:1], start, jnp.int32)
            scale = self.config.softmax_scale
            return mla_prefill(queries, keys, values, starts, None, first_keys, scale=scale)[0]

        return map_balanced(layout, attend, (queries, rotation.first_keys))

    def extend_batches(
        self,
        x: Float[Array, "_ _ D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "_ _ D"], LayerPages]:
        """See :class:`Attention`. All projections process the tokens of all batches together, so
        that weights are read once."""
        heads, pages = self.attend(x, rotation, caches, forms)
        return self.output(heads), pages

    def attend(
        self,
        x: Float[Array, "_ _ D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "_ _ H V"], LayerPages]:
        """Does :meth:`extend_batches` without the output projection."""
        query_latent = self.query_latent(x)  # [_, _, Q]
        q_nope, q_rope = self.queries(query_latent, rotation)  # [_, _, H, N], [_, _, H, R]
        appended = self._append(x, query_latent, rotation, caches)
        pages = appended[0].cache.pages
        if "expanded" not in forms:
            out, lse = self.attend_latents(self._fold(q_nope), q_rope, appended)
            out = merge_devices(self.unfold(out, x.dtype), lse, self.layout)  # [_, _, H, V]
            return out.astype(x.dtype), pages
        outputs = []
        for i, batch in enumerate(appended):
            batch_nope, batch_rope = (split_tokens(q, caches)[i] for q in (q_nope, q_rope))
            if forms[i] == "absorbed":
                out, lse = self._attend_absorbed(self._fold(batch_nope), batch_rope, batch)
                out = self.unfold(out, x.dtype)  # [B, T, H, V]
            else:
                out, lse = self._attend_expanded(batch_nope, batch_rope, batch)
            outputs.append(merge_devices(out, lse, self.layout).astype(x.dtype))
        return join_tokens(outputs), pages

    def attend_latents(
        self,
        q_latent: Float[Array, "_ _ H C"],
        q_rope: Float[Array, "_ _ H R"],
        appended: Sequence[AppendedTokens],
    ) -> tuple[Float[Array, "_ _ H C"], Float32[Array, "_ _ H"]]:
        """Attends in absorbed form, so that one matmul for all batches is on each side of it."""
        caches = [batch.cache for batch in appended]
        q_latents, q_ropes = (split_tokens(q, caches) for q in (q_latent, q_rope))
        outs, lses = zip(
            *(
                self._attend_absorbed(q, q_rope, batch)
                for q, q_rope, batch in zip(q_latents, q_ropes, appended, strict=True)
            ),
            strict=True,
        )
        return join_tokens(outs), join_tokens(lses)

    def cache_spec(self, dtype: DTypeLike) -> LayerCacheSpec:
        """Returns the array that the layer caches, see :func:`latent_cache_spec`."""
        return latent_cache_spec(self.config, dtype, float8=self.float8_latents)

    def precompute_for_decode(self, dtype: DTypeLike) -> None:
        """Computes :meth:`up_projections` now instead of at every absorbed step. Code that changes
        the weights later must start from a model without them."""
        self._absorbed = nnx.data(self.up_projections(dtype))

    def query_latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Q"]:
        """Returns the input of the query up-projection: the normed output of q_a_proj, or ``x``."""
        if self.config.q_lora_rank is None:
            return x
        return self.q_a_layernorm(self.q_a_proj(x))

    def queries(
        self, query_latent: Float[Array, "B T Q"], rotation: Rotation
    ) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        """Returns the part of every head's query without rope, and the rotated part."""
        up_proj = self.q_proj if self.config.q_lora_rank is None else self.q_b_proj
        return self._parts(up_proj(query_latent), rotation)

    def _parts(
        self, q: Float[Array, "B T HK"], rotation: Rotation
    ) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        c = self.config
        q = q.reshape(*q.shape[:2], -1, c.qk_head_dim)
        return q[..., : c.qk_nope_head_dim], rotate(q[..., c.qk_nope_head_dim :], rotation)

    def latents(self, x: Float[Array, "B T D"], rotation: Rotation) -> Float[Array, "B T CR"]:
        """Returns the normed latent of each token, then its rope key."""
        return self._latents(self.kv_a_proj_with_mqa(x), rotation)

    def _latents(
        self, compressed: Float[Array, "B T CR"], rotation: Rotation
    ) -> Float[Array, "B T CR"]:
        C = self.config.kv_lora_rank
        return jnp.concatenate(
            [self.kv_a_layernorm(compressed[..., :C]), rotate(compressed[..., C:], rotation)],
            axis=-1,
        )

    def stored_latents(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> Float[Array, "B T CR"] | UInt8[Array, "B T bytes"]:
        """Returns what the cache stores for each token, see :func:`latent_cache_spec`."""
        return self._stored(self.latents(x, rotation))

    def _stored(
        self, latents: Float[Array, "B T CR"]
    ) -> Float[Array, "B T CR"] | UInt8[Array, "B T bytes"]:
        return float8_latents(self.config, latents) if self.float8_latents else latents

    def up_projections(self, dtype: DTypeLike) -> UpProjections:
        """Returns W_UK and W_UV in ``dtype``, precomputed or cut from kv_b_proj."""
        if self._absorbed is not None:
            return self._absorbed
        c = self.config
        w = self.kv_b_proj.dense(dtype)
        w = w.reshape(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        return UpProjections(w[:, : c.qk_nope_head_dim], w[:, c.qk_nope_head_dim :])

    def expand(
        self, latent: Float[Array, "B S CR"]
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
        """Returns every head's keys and values of tokens with these latents."""
        c = self.config
        B, S, _ = latent.shape
        kv = self.kv_b_proj(latent[..., : c.kv_lora_rank])
        kv = kv.reshape(B, S, -1, c.qk_nope_head_dim + c.v_head_dim)
        k_rope = latent[..., None, c.kv_lora_rank :]
        k_rope = jnp.broadcast_to(k_rope, (*kv.shape[:3], c.qk_rope_head_dim))
        keys = jnp.concatenate([kv[..., : c.qk_nope_head_dim], k_rope], axis=-1)
        return keys, kv[..., c.qk_nope_head_dim :]

    def output(self, out: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        """Returns the output projection of all heads, summed over the devices that share them."""
        return sharded_linear(self.o_proj, out.reshape(*out.shape[:2], -1), self.layout, "heads")

    def _fold(self, q_nope: Float[Array, "B T H N"]) -> Float[Array, "B T H C"]:
        """Returns the queries multiplied by W_UK, summed in float32, in their own dtype."""
        w_uk, _ = self.up_projections(q_nope.dtype)
        if q_nope.dtype == jnp.bfloat16 and target.platform() == "cpu":
            # XLA's CPU compiler refuses this matmul in bfloat16 unless the matrix comes first.
            f32 = jnp.float32
            out = jnp.einsum("hnc,bthn->bthc", w_uk, q_nope, preferred_element_type=f32)
            return out.astype(q_nope.dtype)
        return per_head_matmul(q_nope, w_uk, contracted=1, dtype=q_nope.dtype)

    def unfold(self, out: Float[Array, "B T H C"], dtype: DTypeLike) -> Float[Array, "B T H V"]:
        """Returns attention's output multiplied by W_UV, summed in float32: in ``dtype``, or in
        float32 where devices merge their parts of it."""
        _, w_uv = self.up_projections(dtype)
        merged = self.layout is not None and self.layout.num_shards("cached_tokens") > 1
        return per_head_matmul(out, w_uv, contracted=2, dtype=jnp.float32 if merged else dtype)

    def _append(
        self,
        x: Float[Array, "_ _ D"],
        query_latent: Float[Array, "_ _ Q"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
    ) -> list[AppendedTokens]:
        """Writes to the cache what it stores of the new tokens. Returns those of each batch."""
        return append_batches({"latent": self.stored_latents(x, rotation)}, caches, self.layout)

    def _attend_expanded(
        self,
        q_nope: Float[Array, "B T H N"],
        q_rope: Float[Array, "B T H R"],
        batch: AppendedTokens,
    ) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
        """Returns attention in the expanded form on this device, and its log-sum-exp."""
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        latent, pages = batch.entries["latent"], batch.cache.pages["latent"]

        def keys_values(stored: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.expand(read_latents(self.config, stored, q.dtype))

        scale = self.config.softmax_scale
        return attend_by_heads(q, latent, pages, batch.cache, batch.shard, keys_values, scale=scale)

    def _attend_absorbed(
        self,
        q_latent: Float[Array, "B T H C"],
        q_rope: Float[Array, "B T H R"],
        batch: AppendedTokens,
        schedule: Schedule | None = None,
    ) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
        """Returns attention to the latents on this device, and its log-sum-exp. ``schedule`` is
        that of mla_decode, if the caller has computed it."""
        scale = self.config.softmax_scale
        cache, shard = batch.cache, batch.shard
        pages, tables, starts = cache.pages["latent"], cache.block_tables, cache.starts
        if shard.num_shards == 1:
            arrays, own = self.decode_arguments(q_latent, q_rope, cache)
            schedule = schedule if own is None else own
            groups = mla_decode(*arrays, scale=scale, schedule=schedule)
            out, lse = (join_groups(each, q_latent.shape[1]) for each in groups)
        else:
            latent = batch.entries["latent"]
            out, lse = attend_local(
                q_latent, q_rope, latent, pages, tables, starts, shard, scale=scale
            )
        return out, lse

    def decode_arguments(
        self, q_latent: Float[Array, "B T H C"], q_rope: Float[Array, "B T H R"], cache: LayerCache
    ) -> tuple[tuple[Array, ...], Schedule | None]:
        """Returns the arrays for mla_decode, and its schedule, or None for its own."""
        tables, lengths = group_tables(cache.block_tables, cache.starts, cache.valid)
        schedule = None
        if self.whole_sequences:
            schedule = mla_decode_whole_sequences(lengths, max_pages=tables.shape[1])
        split = split_groups(q_latent), split_groups(q_rope)
        return (*split, cache.pages["latent"], tables, lengths), schedule
