"""The latent KV cache: one paged array a layer, of static shape.

A token costs ``kv_lora_rank + qk_rope_head_dim`` numbers a layer (576 in DeepSeek-V3, 1,152 bytes
in bfloat16), whatever the number of heads. Token s of a row stands in page
``block_tables[row, s // page_size]`` at slot ``s % page_size``; a contiguous cache is the table
that counts up. Taking tokens back only lowers ``lengths``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dsv3_jax.config import ModelConfig

PAGE_SIZE = 64  # tokens; the page that Hopper's latent attention kernels work in


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentKVCache:
    """All layers' latents of a batch. Written by ``DeepSeekV3.extend``."""

    pages: tuple[Float[Array, "P page CR"], ...]
    """A layer each: normed latent, then rotated rope key. Unwritten slots hold zeros."""

    block_tables: Int[Array, "B max_pages"]
    """Page numbers of each row, in order; shared by all layers."""

    lengths: Int[Array, " B"]
    """Tokens that the decoder layers hold for each row."""

    mtp_pages: tuple[Float[Array, "P page CR"], ...] = ()
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
        sharding: NamedSharding | None = None,
        count_routing: bool = False,
    ) -> LatentKVCache:
        """An empty cache with room for ``max_len`` tokens in each of ``batch`` rows.

        Args:
          sharding: of pages, along their first axis, in as many parts as rows.
        """
        max_pages = -(-max_len // page_size)
        shape = (batch * max_pages, page_size, config.latent_dim)
        moe_layers = config.num_moe_layers + config.num_nextn_predict_layers
        counted = (moe_layers, config.n_routed_experts) if count_routing else None
        return cls(
            pages=tuple(
                jnp.zeros(shape, dtype, device=sharding) for _ in range(config.num_hidden_layers)
            ),
            block_tables=jnp.arange(batch * max_pages, dtype=jnp.int32).reshape(batch, max_pages),
            lengths=jnp.zeros((batch,), jnp.int32),
            mtp_pages=(jnp.zeros(shape, dtype, device=sharding),) if mtp else (),
            routing_counts=None if counted is None else jnp.zeros(counted, jnp.int32),
        )


def write(
    pages: Float[Array, "P page CR"],
    block_tables: Int[Array, "B max_pages"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    latents: Float[Array, "B T CR"],
) -> Float[Array, "P page CR"]:
    """Stores the latents of ``valid`` tokens at their positions; the others are dropped."""
    P, page_size, _ = pages.shape
    page = jnp.take_along_axis(block_tables, positions // page_size, axis=1, mode="clip")
    page = jnp.where(valid, page, P)  # out of bounds, hence dropped
    return pages.at[page, positions % page_size].set(latents.astype(pages.dtype), mode="drop")
