"""The latent KV cache: one paged array a layer, of static shape.

A token costs ``kv_lora_rank + qk_rope_head_dim`` numbers a layer (576 in DeepSeek-V3, 1,152 bytes
in bfloat16), whatever the number of heads. Token s of a row stands in page
``block_tables[row, s // page_size]`` at slot ``s % page_size``; a contiguous cache is the table
that counts up. Taking tokens back only lowers ``lengths``.

Pages may be wider than tokens: a TPU's kernel reads whole groups of 128 columns, 640 for 576.
With ``attn_impl="CD"`` they hold every head's key and value instead, for comparison alone.

On a mesh a row's pages lie on the row's devices. Where several share its tokens, they have its
pages in turns: whatever the length, what they hold differs by a page at most.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dsv3_jax.attn_impl import AttnImpl, cached_numbers
from dsv3_jax.config import ModelConfig
from pallas_kernels import target
from pallas_kernels.mla_decode.api import page_width
from sharding import Layout

PAGE_SIZE = 64  # tokens; the page that Hopper's latent attention kernels work in

PAGES = (("batch", "cached_tokens"),)
"""Logical axes of an array of pages: what its first dimension counts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentKVCache:
    """All layers' latents of a batch. Written by ``DeepSeekV3.extend``."""

    pages: tuple[Float[Array, "P page width"], ...]
    """A layer each: normed latent, then rotated rope key. What is not written holds zeros. Of
    ``attn_impl="CD"``: all heads' keys [H K], then all heads' values [H V]."""

    block_tables: Int[Array, "B max_pages"]
    """Page numbers of each row, in order; shared by all layers. Where n devices share a row's
    tokens, page p of a row lies on the one of index ``p % n``, and n divides ``max_pages``."""

    lengths: Int[Array, " B"]
    """Tokens that the decoder layers hold for each row. A length past :meth:`limit` counts tokens
    that were dropped."""

    mtp_pages: tuple[Float[Array, "P page width"], ...] = ()
    """The first MTP layer's, under the same tables, where it drafts; else empty. How many places
    of a row it holds is for its caller to know. Written by ``DeepSeekV3.extend_mtp``."""

    routing_counts: Int[Array, "L_moe E"] | None = None
    """Tokens that chose each expert so far, refused drafts among them: of the MoE layers in order,
    those of MTP layers last. None is not to count. Written as the pages are."""

    @classmethod
    def init(
        cls,
        config: ModelConfig,
        batch: int,
        max_len: int,
        *,
        dtype: DTypeLike,
        page_size: int = PAGE_SIZE,
        mtp: bool = False,
        layout: Layout | None = None,
        count_routing: bool = False,
        platform: str | None = None,
        attn_impl: AttnImpl | None = None,
    ) -> LatentKVCache:
        """An empty cache with room for ``max_len`` tokens in each of ``batch`` rows.

        Args:
          layout: on which pages lie apart; its parts of the batch divide ``batch``.
          platform: whose kernels read the pages, ``cpu``, ``gpu`` or ``tpu``; by default that of
            the layout's devices, or of the default device.
          attn_impl: of the model, see :meth:`dsv3_jax.DeepSeekV3.use_attn_impl`.

        Raises:
          ValueError: a size below 1, or a batch that does not divide over the layout's devices.
        """
        for name, size in (("batch", batch), ("max_len", max_len), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"{name}: expected 1 or more, got {size}")
        rows_apart, tokens_apart = (
            (1, 1)
            if layout is None
            else (layout.num_shards("batch"), layout.num_shards("cached_tokens"))
        )
        if batch % rows_apart:
            raise ValueError(f"batch: expected a multiple of {rows_apart} devices, got {batch}")
        pages_apart = -(-max_len // (page_size * tokens_apart))  # of a row, on each device
        numbers = jnp.arange(batch * tokens_apart * pages_apart, dtype=jnp.int32)
        by_device = numbers.reshape(rows_apart, tokens_apart, -1, pages_apart)
        sharding = None if layout is None else layout.sharding(PAGES)
        platform = platform or (layout and layout.platform) or target.platform()
        shape = (numbers.size, page_size, page_width(cached_numbers(config, attn_impl), platform))
        moe_layers = config.num_moe_layers + config.num_nextn_predict_layers
        counted = (moe_layers, config.n_routed_experts) if count_routing else None
        return cls(
            pages=tuple(
                jnp.zeros(shape, dtype, device=sharding) for _ in range(config.num_hidden_layers)
            ),
            block_tables=jnp.moveaxis(by_device, 1, 3).reshape(batch, -1),
            lengths=jnp.zeros((batch,), jnp.int32),
            mtp_pages=(jnp.zeros(shape, dtype, device=sharding),) if mtp else (),
            routing_counts=None if counted is None else jnp.zeros(counted, jnp.int32),
        )

    @property
    def room(self) -> int:
        """Tokens that the pages of one sequence hold, those of all devices together."""
        return self.block_tables.shape[1] * self.pages[0].shape[1]

    def limit(self, config: ModelConfig) -> int:
        """Most tokens of one sequence: its room, or ``max_position_embeddings`` if that is less.
        Later tokens are dropped: they reach neither the cache nor an expert."""
        return min(self.room, config.max_position_embeddings)

    def check_width(self, config: ModelConfig, attn_impl: AttnImpl | None) -> None:
        """Raises ValueError where it was made for another ``attn_impl``, or another model."""
        numbers, width = cached_numbers(config, attn_impl), self.pages[0].shape[-1]
        widths = sorted({page_width(numbers, platform) for platform in ("cpu", "tpu")})
        if width not in widths:
            raise ValueError(
                f"cache: expected pages of {' or '.join(map(str, widths))} columns for attn_impl"
                f" {attn_impl}, got {width}; LatentKVCache.init takes attn_impl too"
            )


class TokenShare(NamedTuple):
    """Which of a row's tokens a device holds, where ``parts`` devices have its pages in turns."""

    page_size: int
    parts: int = 1
    part: int | Int[Array, ""] = 0

    @classmethod
    def of(cls, layout: Layout | None, page_size: int) -> TokenShare:
        """This device's, inside :meth:`sharding.Layout.local`."""
        if layout is None:
            return cls(page_size)
        return cls(
            page_size, layout.num_shards("cached_tokens"), layout.shard_index("cached_tokens")
        )

    def lengths(self, lengths: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """How many tokens it holds of rows of these lengths: its first ones, without gaps."""
        rounds, rest = jnp.divmod(lengths, self.parts * self.page_size)
        ragged = jnp.clip(rest - self.part * self.page_size, 0, self.page_size)
        return rounds * self.page_size + ragged

    def positions(
        self, positions: Int[Array, "*rows"]
    ) -> tuple[Bool[Array, "*rows"], Int[Array, "*rows"]]:
        """Whether it holds these tokens; if so, their positions among its own."""
        page, slot = jnp.divmod(positions, self.page_size)
        return page % self.parts == self.part, page // self.parts * self.page_size + slot


def write(
    pages: Float[Array, "P page width"],
    block_tables: Int[Array, "B max_pages"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    latents: Float[Array, "B T CR"],
) -> Float[Array, "P page width"]:
    """Stores the latents of ``valid`` tokens at their positions.

    The others are dropped, and so are positions past the table's end and pages that the table does
    not name with a number from 0 to P - 1: nothing but the sequence's own slots changes.
    """
    P, page_size, width = pages.shape
    latents = jnp.pad(latents, ((0, 0), (0, 0), (0, width - latents.shape[-1])))
    number, room = positions // page_size, block_tables.shape[1]
    page = jnp.take_along_axis(block_tables, number, axis=1, mode="clip")
    # P is out of bounds, hence dropped; a negative number would count from the end.
    page = jnp.where(valid & (number < room) & (page >= 0), page, P)
    return pages.at[page, positions % page_size].set(latents.astype(pages.dtype), mode="drop")
