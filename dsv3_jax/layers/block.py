"""One decoder layer, and the multi-token prediction layer built on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers import around_attention
from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.attention_interface import AbsorbedQueries, Attention, Form
from dsv3_jax.layers.linear import Linear
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.norm import RMSNorm, norm_dtype
from dsv3_jax.layers.on_mesh import batch_sharded, on_mesh
from dsv3_jax.layers.paged_cache import (
    PAGE_AXES,
    LayerCache,
    LayerPages,
    join_tokens,
    split_tokens,
)
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.quantization import Quantization
from pallas_kernels.dispatch import Implementation, dispatch
from sharding import Layout

_BatchInput = tuple[Float[Array, "_ _ D"], Rotation, LayerCache]
"""Tokens of one batch, their rotation, and its cache, without page arrays."""


class DecoderLayer(nnx.Module):
    """``h = x + attention(norm(x))``, ``y = h + mlp(norm(h))``; residual sums in float32.

    ``mlp`` and the norms may be replaced by any module that maps [B, T, D] to [B, T, D]; see
    docs/change_the_model.md.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dense: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.feed_forward: Implementation = None  # see DeepSeekV3.use_feed_forward
        norms = norm_dtype(config, dtype)
        self.input_layernorm = RMSNorm(D, eps=eps, dtype=norms)
        attention = SparseAttention if config.has_indexer else MultiHeadLatentAttention
        self.self_attn = attention(config, rngs=rngs, dtype=dtype, quantization=quantization)
        self.post_attention_layernorm = RMSNorm(D, eps=eps, dtype=norms)
        self.mlp: Any  # an MLP, a MoE, or a module that replaces it
        if dense:
            self.mlp = MLP(
                D,
                config.intermediate_size,
                std=config.initializer_range,
                rngs=rngs,
                dtype=dtype,
                quantization=quantization,
            )
        else:
            self.mlp = MoE(config, rngs=rngs, dtype=dtype, quantization=quantization)

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Runs whole sequences without a cache. Returns the output, and statistics of an MoE."""
        if self.layout is None:
            return self._forward(x, rotation)
        layout = self.layout

        def body(layer: DecoderLayer, x: Array, rotation: Rotation):
            micro_batches = _split_batch((x, rotation), layout.micro_batches)
            outputs = [layer._forward(*inputs) for inputs in micro_batches]
            (y,), stats = _join_micro_batches([([y], stats) for y, stats in outputs])
            return y, stats

        batch = layout.partition_spec(("batch",))
        out_specs = batch, self._stats_specs(layout)
        return on_mesh(layout, self, body, (batch, batch), out_specs)(x, rotation)

    def _forward(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Does :meth:`__call__` for the sequences on one device."""
        attended, _ = self.self_attn(self.input_layernorm(x), rotation)
        return self._feed_forward(x, attended, None)

    def extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], LayerPages, RoutingStats | None]:
        """Runs T new tokens per sequence after the cached ones.

        Returns the output, the page arrays with the new tokens, and statistics of an MoE.
        """
        (y,), pages, stats = self.extend_batches([x], [rotation], [cache], [form])
        return y, pages, stats

    def extend_batches(
        self,
        xs: Sequence[Float[Array, "_ _ D"]],
        rotations: Sequence[Rotation],
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
        counter: Any = None,
    ) -> tuple[list[Float[Array, "_ _ D"]], LayerPages, RoutingStats | None]:
        """Runs several batches that attend in different forms, see
        :meth:`MultiHeadLatentAttention.extend_batches`. Their caches have the same page arrays.

        Args:
          counter: from :func:`around_attention.shared_counter`. Without a layout only.

        Returns the output of each batch, the page arrays, and statistics of all tokens of an MoE.
        """
        pages = caches[0].pages
        inputs = [
            (x, rotation, cache._replace(pages={}))
            for x, rotation, cache in zip(xs, rotations, caches, strict=True)
        ]
        if self.layout is None:
            return self._extend(inputs, pages, forms, counter)
        layout = self.layout

        def body(layer: DecoderLayer, inputs: list[_BatchInput], pages: LayerPages):
            num_local_pages = next(iter(pages.values())).shape[0]
            inputs = [
                (x, rotation, _with_local_tables(cache, num_local_pages, layout))
                for x, rotation, cache in inputs
            ]
            outputs = []
            # Each micro-batch has its own sequences; all write to the same page arrays.
            for part in _split_batch(inputs, layout.micro_batches):
                ys, pages, stats = layer._extend(part, pages, forms)
                outputs.append((ys, stats))
            ys, stats = _join_micro_batches(outputs)
            return ys, pages, stats

        batch = layout.partition_spec(("batch",))
        pages_specs = {name: layout.partition_spec(PAGE_AXES) for name in pages}
        out_specs = [batch] * len(xs), pages_specs, self._stats_specs(layout)
        in_specs = batch, pages_specs
        return on_mesh(layout, self, body, in_specs, out_specs)(inputs, pages)

    def _extend(
        self,
        inputs: Sequence[_BatchInput],
        pages: LayerPages,
        forms: Sequence[Form],
        counter: Any = None,
    ) -> tuple[list[Float[Array, "_ _ D"]], LayerPages, RoutingStats | None]:
        """Does :meth:`extend_batches` for the sequences on one device."""
        xs, rotations, caches = zip(*inputs, strict=True)
        caches = [cache._replace(pages=pages) for cache in caches]
        x = join_tokens(xs)
        rotation = jax.tree.map(lambda *each: join_tokens(each), *rotations)
        attention: Attention = self.self_attn
        valid = join_tokens([cache.valid for cache in caches])
        queries = self._before_attention(x, rotation, caches, forms, counter)
        if queries is not None:
            pages = queries.pages
            y, stats = self._feed_forward(x, None, valid, None, counter, (queries, caches))
        elif type(attention).extend is MultiHeadLatentAttention.extend:
            normed = self.input_layernorm(x)
            heads, pages = attention.attend_batches(normed, rotation, caches, forms)
            y, stats = self._feed_forward(x, None, valid, heads, counter)
        else:  # a variant, which runs one batch
            normed = self.input_layernorm(x)
            attended, pages = attention.extend(normed, rotation, caches[0], forms[0])
            y, stats = self._feed_forward(x, attended, valid, None, counter)
        return split_tokens(y, caches), pages, stats

    def _before_attention(
        self,
        x: Float[Array, "B T D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
        counter: Any,
    ) -> AbsorbedQueries | None:
        """Returns what a kernel computes before attention, or None if separate operations do."""
        if type(self.self_attn) is not MultiHeadLatentAttention:
            return None
        arrays = x, rotation, caches, forms, counter
        kernel = functools.partial(around_attention.inputs_in_kernel, self, *arrays)
        preferred = around_attention.is_preferred(self, x.shape[0] * x.shape[1])
        return self._dispatch("a layer before attention", lambda: None, kernel, preferred)

    def _feed_forward(
        self,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T D"] | None,
        valid: Bool[Array, "B T"] | None,
        heads: Float[Array, "B T H V"] | None = None,
        counter: Any = None,
        absorbed: tuple[AbsorbedQueries, Sequence[LayerCache]] | None = None,
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Adds attention's output to ``x``, and the MLP's or MoE's output to that sum.

        Args:
          attended: attention's output, or None if ``heads`` has it before its projection.
          counter: see :meth:`extend_batches`.
          absorbed: what attention itself still has to do, or None if ``heads`` or ``attended`` has
            its output.
        """
        attention: Any = self.self_attn

        def separate() -> Any:
            values = heads
            if absorbed is not None:
                values = attention.unfold(attention.attend_absorbed(*absorbed), x.dtype)
            return self._feed_forward_separately(x, attended, valid, values)

        def kernel() -> Any:
            latents = None
            if absorbed is not None and around_attention.merges_parts(self, absorbed[1]):
                latents = attention.attend_in_parts(*absorbed)
            elif absorbed is not None:
                latents = attention.attend_absorbed(*absorbed)
            arrays = x, attended, valid, heads, counter, latents
            return around_attention.in_one_kernel(self, *arrays)

        # Without a cache, a result may be differentiated.
        preferred = attended is None and around_attention.is_preferred(
            self, x.shape[0] * x.shape[1]
        )
        return self._dispatch("a layer after attention", separate, kernel, preferred)

    def _dispatch(
        self,
        name: str,
        separate: Callable[[], Any],
        kernel: Callable[[], Any],
        preferred: bool,
    ) -> Any:
        """Calls what :meth:`DeepSeekV3.use_feed_forward` has selected.

        Args:
          preferred: whether None tries ``"mosaic_gpu"`` first.
        """
        backends = {"separate": separate, "mosaic_gpu": kernel}
        if preferred:
            backends = {"mosaic_gpu": kernel} | backends
        return dispatch(name, backends, self.feed_forward)

    def _feed_forward_separately(
        self,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T D"] | None,
        valid: Bool[Array, "B T"] | None,
        heads: Float[Array, "B T H V"] | None,
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Does :meth:`_feed_forward` by an operation for each of its steps."""
        if attended is None:
            assert heads is not None
            attended = self.self_attn.output(heads)
        norm: Any = self.post_attention_layernorm
        if isinstance(norm, RMSNorm):
            h, normed = norm.add_and_norm(x, attended)
        else:
            h = _add(x, attended)
            normed = norm(h)
        if isinstance(self.mlp, MoE):
            out, stats = self.mlp(normed, valid)
            return _add(h, out), stats
        return _add(h, self.mlp(normed)), None

    def _stats_specs(self, layout: Layout) -> RoutingStats | None:
        """Returns the PartitionSpecs of the layer's statistics."""
        if not isinstance(self.mlp, MoE):
            return None
        batch = layout.partition_spec(("batch",))
        return RoutingStats(PartitionSpec(), batch, batch)  # pyright: ignore


def _split_batch(tree: Any, parts: int) -> list[Any]:
    """Splits the first dimension of every array into ``parts``. Returns as many trees."""
    leaves, structure = jax.tree.flatten(tree)
    split_leaves = [jnp.split(x, parts) for x in leaves]
    return [
        jax.tree.unflatten(structure, [split[i] for split in split_leaves]) for i in range(parts)
    ]


def _join_micro_batches(
    outputs: list[tuple[list[Float[Array, "_ _ D"]], RoutingStats | None]],
) -> tuple[list[Float[Array, "_ _ D"]], RoutingStats | None]:
    """Returns a layer's outputs and statistics for whole batches, from those of micro-batches."""
    if len(outputs) == 1:
        return outputs[0]
    ys = [jnp.concatenate(parts) for parts in zip(*(ys for ys, _ in outputs), strict=True)]
    stats = [each for _, each in outputs if each is not None]
    if not stats:
        return ys, None
    counts, scores, experts = zip(*stats, strict=True)
    total = functools.reduce(jnp.add, counts)
    return ys, RoutingStats(total, jnp.concatenate(scores), jnp.concatenate(experts))


def _with_local_tables(cache: LayerCache, num_local_pages: int, layout: Layout) -> LayerCache:
    """Returns the cache with block tables of the pages on this device, numbered from 0.

    Where n devices share a sequence's tokens, a device has every n-th page of the sequence.
    """
    first = layout.shard_index(PAGE_AXES[0]) * num_local_pages
    n = layout.num_shards("cached_tokens")

    own = cache.block_tables.reshape(len(cache.block_tables), -1, n)
    own = own[..., layout.shard_index("cached_tokens")]
    return cache._replace(block_tables=own - first)


class SharedHead(nnx.Module):
    """The norm before the LM head, which an MTP layer does not share with the model."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        norms = norm_dtype(config, dtype)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=norms)


class MTPLayer(DecoderLayer):
    """Multi-token prediction: from ``h_i`` and token i+1, the hidden state that predicts i+2.

    ``y_i = layer(eh_proj [enorm(embedding of token i+1) | hnorm(h_i)])`` (V3 report, equation 21;
    the checkpoint's order, embedding first). Embedding and LM head are the model's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        super().__init__(config, dense=False, rngs=rngs, dtype=dtype, quantization=quantization)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(D, eps=eps, dtype=norm_dtype(config, dtype))
        self.hnorm = RMSNorm(D, eps=eps, dtype=norm_dtype(config, dtype))
        self.eh_proj = Linear(2 * D, D, std=config.initializer_range, rngs=rngs, dtype=dtype)
        self.shared_head = SharedHead(config, dtype=dtype)

    def join(
        self, hidden: Float[Array, "B T D"], next_embedding: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Returns the layer's input.

        Args:
          hidden: the hidden state of token i.
          next_embedding: the embedding of token i+1.
        """
        joined = jnp.concatenate([self.enorm(next_embedding), self.hnorm(hidden)], axis=-1)
        return batch_sharded(self.layout, "eh_proj", self.eh_proj, joined)

    def extend_newest(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B 1 D"], LayerPages, RoutingStats | None]:
        """Does :meth:`extend`, but only returns the output at the last valid token.

        Of the other tokens the layer computes what it caches, and in a kernel also their queries.
        The output of a sequence without valid tokens is undefined.
        """
        if x.shape[1] == 1:
            return self.extend(x, rotation, cache, form)
        newest = jnp.maximum(jnp.sum(cache.valid, axis=1, dtype=jnp.int32) - 1, 0)

        def select(array: Array) -> Array:
            index = newest.reshape(-1, *(1,) * (array.ndim - 1))
            return jnp.take_along_axis(array, index, axis=1)

        x_newest, rotation_newest = select(x), jax.tree.map(select, rotation)
        newest_cache = cache._replace(
            starts=cache.starts + newest, valid=jnp.any(cache.valid, axis=1, keepdims=True)
        )
        queries = None
        if self.layout is None:
            queries = self._before_attention(x, rotation, [cache], [form], None)
        if queries is not None:
            q_latent, q_rope = select(queries.q_latent), select(queries.q_rope)
            queries = AbsorbedQueries(q_latent, q_rope, queries.pages)
            absorbed = queries, [newest_cache]
            y, stats = self._feed_forward(x_newest, None, newest_cache.valid, absorbed=absorbed)
            return y, queries.pages, stats
        # Nothing uses this output, so that the compiler keeps only what the cache needs. The second
        # call writes the newest token's entry again, with the same value.
        _, pages, _ = self.extend(x, rotation, cache, form)
        newest_cache = newest_cache._replace(pages=pages)
        return self.extend(x_newest, rotation_newest, newest_cache, form)


def _add(x: Float[Array, "B T D"], y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns ``x + y``, summed in float32 and rounded to x's dtype."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
