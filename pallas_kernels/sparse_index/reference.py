"""sparse_index in plain JAX: all keys at once, the specification, or block by block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.sparse_index import scaled_pages

_BLOCK_TOKENS = 512


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
) -> Float32[Array, "B T S"]:
    """Gathers every key of the table, then masks."""
    first = jnp.int32(0)
    return score(q, weights, pages, block_tables, lengths, page_size=page_size, first=first)


def blocked(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
) -> Float32[Array, "B T S"]:
    """Scores blocks of keys, and reads pages only as far as the longest sequence reaches.

    :func:`sparse_index` stores a product for every head, query and key: 64 times the result. This
    back-end stores those of one block. It has no gradient; training scores keys that are not paged.
    """
    B, T, _, _ = q.shape
    width, page = block_tables.shape[1], page_size or pages.shape[1]
    block_pages = min(width, max(1, _BLOCK_TOKENS // page))
    block = block_pages * page
    tables = jnp.pad(block_tables, ((0, 0), (0, -width % block_pages)))

    def add_block(i: Int[Array, ""], scores: Float32[Array, "B T S"]) -> Float32[Array, "B T S"]:
        table = jax.lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        of_block = score(q, weights, pages, table, lengths, page_size=page_size, first=i * block)
        return jax.lax.dynamic_update_slice_in_dim(scores, of_block, i * block, axis=2)

    initial = jnp.full((B, T, tables.shape[1] * page), -jnp.inf, jnp.float32)
    # A length may count padding past the table's end.
    blocks = jnp.minimum(-(-jnp.max(lengths) // block), tables.shape[1] // block_pages)
    scores = jax.lax.fori_loop(0, blocks, add_block, initial)
    return scores[..., : width * page]


def score(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B some_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None,
    first: Int[Array, ""],
) -> Float32[Array, "B T S"]:
    """Scores the tokens of a slice of the block table, from position ``first`` on."""
    B, T, _, D = q.shape
    # mode="clip": entries past a sequence's length may be anything. They are masked below.
    keys, scales = pages.at[block_tables].get(mode="clip"), None
    if page_size is not None:
        keys, scales = scaled_pages.split(keys, D, page_size)
        # XLA multiplies no float8 arrays on every platform.
        q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    keys = keys.reshape(B, -1, keys.shape[-1])[..., :D]
    scores = _sum_of_heads(q, weights, keys)
    if scales is not None:
        scores *= scales.reshape(B, 1, -1)
    s = first + jnp.arange(keys.shape[1])
    visible = lengths[:, None] - T + 1 + jnp.arange(T)
    return jnp.where(s < visible[..., None], scores, -jnp.inf)


@jax.custom_vjp
def _sum_of_heads(
    q: Float[Array, "B T J D"], weights: Float32[Array, "B T J"], keys: Float[Array, "B S D"]
) -> Float32[Array, "B T S"]:
    products = _products(q, keys)
    return jnp.einsum("btj,btjs->bts", weights, jax.nn.relu(products))


def _products(q: Float[Array, "B T J D"], keys: Float[Array, "B S D"]) -> Float32[Array, "B T J S"]:
    return jnp.einsum("btjd,bsd->btjs", q, keys, preferred_element_type=jnp.float32)


def _gradients(
    arrays: tuple[jax.Array, ...], d_scores: Float32[Array, "B T S"]
) -> tuple[jax.Array, ...]:
    """Computes the products again, because they are J times the result. The matmuls take the dtype
    of the arguments; autodiff's would be float32."""
    q, weights, keys = arrays
    products = _products(q, keys)
    d_weights = jnp.einsum("bts,btjs->btj", d_scores, jnp.maximum(products, 0))
    d_products = jnp.where(products > 0, weights[..., None] * d_scores[:, :, None], 0)
    d_products = d_products.astype(q.dtype)
    f32 = jnp.float32
    d_q = jnp.einsum("btjs,bsd->btjd", d_products, keys, preferred_element_type=f32)
    d_keys = jnp.einsum("btjs,btjd->bsd", d_products, q, preferred_element_type=f32)
    return d_q.astype(q.dtype), d_weights, d_keys.astype(keys.dtype)


_sum_of_heads.defvjp(lambda *arrays: (_sum_of_heads(*arrays), arrays), _gradients)
