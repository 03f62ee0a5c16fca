"""The KV cache: a pool of pages, the block tables and lengths of a batch, and routing counts.

A :class:`PagePool` holds page arrays and knows no sequences. :class:`SequenceTables` assign its
pages to the sequences of a batch. :class:`LatentKVCache` joins both for one batch.

Token s of sequence b is cached in page ``block_tables[b, s // page_size]`` at slot
``s % page_size``; a contiguous cache is a table that counts up. Rejected tokens are removed by
lowering ``lengths``.

DeepSeek's attention caches an array "latent" per layer: the normalised latent followed by the
rotated rope key, ``kv_lora_rank + qk_rope_head_dim`` numbers per token (576 in DeepSeek-V3, 1,152
bytes in bfloat16) whatever the number of heads. Sparse attention also caches the keys of its
indexer, see :mod:`dsv3_jax.layers.indexer`.

On a mesh, a sequence's pages are on the devices that run the sequence. Where n devices share its
tokens, page p is on device ``p % n`` of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.indexer import index_cache_spec
from dsv3_jax.layers.paged_cache import (
    PAGE_AXES,
    Form,
    LayerCacheSpec,
    LayerPages,
    latent_cache_spec,
    tokens_per_page,
)
from dsv3_jax.quantization import CacheDtype
from pallas_kernels import target
from sharding import Layout

DEFAULT_PAGE_SIZE = 64
"""Tokens per page: the page size that the Hopper attention kernels take."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The page arrays of a model's layers. :meth:`DeepSeekV3.cache_spec` returns it."""

    layers: tuple[LayerCacheSpec, ...]
    """One entry per decoder layer."""
    mtp: tuple[LayerCacheSpec, ...] = ()
    """One entry for the MTP layer that drafts, or none."""

    @classmethod
    def of_config(
        cls,
        config: ModelConfig,
        dtype: DTypeLike,
        *,
        mtp: bool = False,
        cache_dtype: CacheDtype | None = None,
        float8_activations: bool = False,
    ) -> CacheSpec:
        """Returns the spec of every model of this config and dtype, without building one.

        Args:
          cache_dtype: see :meth:`DeepSeekV3.use_cache_dtype`.
          float8_activations: see :meth:`DeepSeekV3.use_float8_activations`.

        Raises:
          ValueError: the model has no indexer for ``fp8_index``, or sizes that ``cache_dtype`` does
            not allow.
        """
        if cache_dtype == "fp8_index" and not config.has_indexer:
            kind = config.model_type
            raise ValueError(f"cache_dtype fp8_index: expected a model with indexers, got {kind}")
        float8_keys = float8_activations or cache_dtype is not None
        layer = latent_cache_spec(config, dtype, float8=cache_dtype == "fp8")
        layer |= index_cache_spec(config, dtype, float8=float8_keys)
        return cls((layer,) * config.num_hidden_layers, (layer,) if mtp else ())

    def page_bytes(self, page_size: int, platform: str) -> int:
        """Returns the bytes of a page in all layers, on ``cpu``, ``gpu`` or ``tpu``."""
        arrays = (array for layer in (*self.layers, *self.mtp) for array in layer.values())
        return sum(array.page_bytes(page_size, platform) for array in arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagePool:
    """The page arrays of all layers. Page p of every array belongs to the same sequence."""

    layers: tuple[LayerPages, ...]
    """Named arrays [P, rows, width] of each decoder layer. Written by ``DeepSeekV3.extend``."""
    mtp: tuple[LayerPages, ...] = ()
    """Named arrays of the MTP layer that drafts, or empty. Written by ``DeepSeekV3.extend_mtp``.
    Its caller tracks the number of valid positions."""

    @classmethod
    def empty(
        cls,
        spec: CacheSpec,
        num_pages: int,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
        layout: Layout | None = None,
        platform: str | None = None,
    ) -> PagePool:
        """Returns ``num_pages`` pages of zeros in every array.

        Args:
          layout: the layout over whose devices pages are sharded.
          platform: the platform whose kernels read the pages: ``cpu``, ``gpu`` or ``tpu``. By
            default that of the layout's devices, or of the default device.
        """
        platform = platform or (layout and layout.platform) or target.platform()
        sharding = None if layout is None else layout.sharding(PAGE_AXES)

        def arrays(layers: Sequence[LayerCacheSpec]) -> tuple[LayerPages, ...]:
            return tuple(
                {
                    name: jnp.zeros(
                        (num_pages, *array.page_shape(page_size, platform)),
                        array.dtype,
                        device=sharding,
                    )
                    for name, array in layer.items()
                }
                for layer in layers
            )

        return cls(arrays(spec.layers), arrays(spec.mtp))

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return tokens_per_page(self.layers[0])

    def check_spec(self, spec: CacheSpec) -> None:
        """Raises ValueError unless the pool has the page arrays that ``spec`` lists."""
        for arrays, expected in zip(self.layers, spec.layers, strict=True):
            widths = {name: array.shape[-1] for name, array in arrays.items()}
            rows = {name: array.shape[1] for name, array in arrays.items()}
            shapes = {
                name: [array.page_shape(self.page_size, platform) for platform in ("cpu", "tpu")]
                for name, array in expected.items()
            }
            allowed = {name: sorted({shape[1] for shape in each}) for name, each in shapes.items()}
            if widths.keys() != allowed.keys() or any(
                (rows[name], width) not in shapes[name] for name, width in widths.items()
            ):
                expected_arrays = ", ".join(
                    f"{name} of {' or '.join(map(str, each))} columns"
                    + (" with scales" if expected[name].is_scaled else "")
                    for name, each in allowed.items()
                )
                got = ", ".join(
                    f"{name} of {width}" + (" with scales" if rows[name] > self.page_size else "")
                    for name, width in widths.items()
                )
                raise ValueError(
                    f"cache: expected page arrays {expected_arrays}, got {got};"
                    " DeepSeekV3.cache_spec returns what the model caches"
                )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceTables:
    """The pages and lengths of the B sequences of a batch. All layers share them."""

    block_tables: Int[Array, "B max_pages"]
    """Page numbers of each sequence, in order. Where n devices share a sequence's tokens, n divides
    ``max_pages``."""
    lengths: Int[Array, " B"]
    """Tokens of each sequence that the decoder layers have cached. A length past
    :meth:`LatentKVCache.max_length` counts tokens that were dropped. Written by
    ``DeepSeekV3.extend``."""

    @classmethod
    def contiguous(
        cls, batch: int, pages_per_device: int, layout: Layout | None = None
    ) -> SequenceTables:
        """Returns tables of ``batch`` empty sequences, each with consecutive pages of its own:
        ``pages_per_device`` on each of the devices of the pool's layout that share its tokens."""
        batch_parts, token_parts = _parts(layout)
        numbers = jnp.arange(batch * token_parts * pages_per_device, dtype=jnp.int32)
        by_device = numbers.reshape(batch_parts, token_parts, -1, pages_per_device)
        return cls(
            block_tables=jnp.moveaxis(by_device, 1, 3).reshape(batch, -1),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    @property
    def max_pages(self) -> int:
        """Pages per sequence."""
        return self.block_tables.shape[1]


class TokenBatch(NamedTuple):
    """New tokens of B sequences, T each, that attend in the same form."""

    tokens: Int[Array, "B T"]
    """Padded at the right."""
    counts: Int[Array, " B"]
    """Number of tokens of each sequence."""
    sequences: SequenceTables
    """Pages, and lengths before these tokens."""
    form: Form
    """``expanded`` for many tokens per sequence, ``absorbed`` for few; the results are equal. With
    ``expanded``, XLA makes a GPU's host wait in every layer, for the number of cached tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentKVCache:
    """The cache of one batch: a pool, all of whose pages belong to the batch, and its tables."""

    pool: PagePool
    sequences: SequenceTables
    routing_counts: Int[Array, "L_moe E"] | None = None
    """Number of tokens that chose each expert so far, rejected drafts included. One entry per MoE
    layer in order, those of MTP layers last. None if routing is not counted. Written by
    ``DeepSeekV3.extend`` and ``extend_mtp``."""

    @classmethod
    def init(
        cls,
        spec: CacheSpec,
        batch: int,
        max_len: int,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
        layout: Layout | None = None,
        platform: str | None = None,
    ) -> LatentKVCache:
        """Returns an empty cache with room for ``max_len`` tokens in each of ``batch`` sequences.

        Args:
          layout: see :meth:`PagePool.empty`.
          platform: see :meth:`PagePool.empty`.

        Raises:
          ValueError: a size is below 1, or the batch does not divide over the layout's devices.
        """
        for name, size in (("batch", batch), ("max_len", max_len), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"{name}: expected 1 or more, got {size}")
        batch_parts, token_parts = _parts(layout)
        if batch % batch_parts:
            raise ValueError(f"batch: expected a multiple of {batch_parts} devices, got {batch}")
        pages_per_device = -(-max_len // (page_size * token_parts))
        num_pages = batch * token_parts * pages_per_device
        return cls(
            pool=PagePool.empty(
                spec, num_pages, page_size=page_size, layout=layout, platform=platform
            ),
            sequences=SequenceTables.contiguous(batch, pages_per_device, layout),
        )

    @property
    def block_tables(self) -> Int[Array, "B max_pages"]:
        """See :class:`SequenceTables`."""
        return self.sequences.block_tables

    @property
    def lengths(self) -> Int[Array, " B"]:
        """See :class:`SequenceTables`."""
        return self.sequences.lengths

    @property
    def capacity(self) -> int:
        """Number of tokens that one sequence's pages hold, on all devices together."""
        return self.sequences.max_pages * self.pool.page_size

    def max_length(self, config: ModelConfig) -> int:
        """Returns the greatest length of a sequence: the capacity or ``max_position_embeddings``.
        Tokens past it are dropped: they reach neither the cache nor an expert."""
        return min(self.capacity, config.max_position_embeddings)

    def valid(
        self,
        tokens: Int[Array, "B T"],
        starts: Int[Array, " B"],
        counts: Int[Array, " B"],
        config: ModelConfig,
    ) -> Bool[Array, "B T"]:
        """Returns True for tokens, False for padding and for tokens past the maximum length.
        Sequence b has ``counts[b]`` of them, from its position ``starts[b]`` on."""
        room = self.max_length(config) - starts
        return jnp.arange(tokens.shape[1]) < jnp.minimum(counts, room)[:, None]

    def with_lengths(self, lengths: Int[Array, " B"]) -> LatentKVCache:
        """Returns the cache with other lengths. A lower length removes the last tokens."""
        return dataclasses.replace(
            self, sequences=dataclasses.replace(self.sequences, lengths=lengths)
        )

    def add_routing_counts(
        self, first_layer: int, counts: Sequence[Int[Array, " E"]]
    ) -> LatentKVCache:
        """Adds the counts of consecutive MoE layers from ``first_layer`` on, if routing is
        counted."""
        if self.routing_counts is None or not counts:
            return self
        layers = slice(first_layer, first_layer + len(counts))
        total = self.routing_counts.at[layers].add(jnp.stack(counts))
        return dataclasses.replace(self, routing_counts=total)


def _parts(layout: Layout | None) -> tuple[int, int]:
    """Returns the numbers of devices that share the batch, and that share a sequence's tokens."""
    if layout is None:
        return 1, 1
    return layout.num_shards("batch"), layout.num_shards("cached_tokens")
