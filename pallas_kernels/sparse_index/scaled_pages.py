"""Pages of float8 keys and their scales in one array: all keys of a page, then all its scales.

With keys of D columns, a page of n tokens is uint8 ``[n + s, D]``. Its first n rows are the keys in
float8_e4m3fn. The others are the n float32 scales one after the other, padded with zeros to whole
rows. The page of 64 tokens of 128 columns has 66 rows: 132 bytes per token, and no padding. It is
contiguous, so a kernel copies keys and scales at once. Pages may have more rows, which are ignored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

KEY_DTYPE = jnp.float8_e4m3fn
SCALE_BYTES = 4


def scale_rows(page_size: int, columns: int) -> int:
    """Returns the number of rows that the scales of a page take."""
    return -(-page_size * SCALE_BYTES // columns)


def padded_rows(rows: int, platform: str) -> int:
    """Returns the number of rows that cache pages should have on ``cpu``, ``gpu`` or ``tpu``.

    On a TPU it is a multiple of 8. Otherwise XLA stores the rows of a page far apart, and copies
    all pages before it reads some of them.
    """
    return -(-rows // 8) * 8 if platform == "tpu" else rows


def token_bytes(
    keys: Float[Array, "*batch D"], scales: Float32[Array, "*batch 1"]
) -> UInt8[Array, "*batch bytes"]:
    """Returns the D + 4 bytes of each token: its float8 key and its scale."""
    fields = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (keys, scales))
    return jnp.concatenate([x.reshape(*keys.shape[:-1], -1) for x in fields], axis=-1)


def pages_of(tokens: UInt8[Array, "P page bytes"]) -> UInt8[Array, "P rows D"]:
    """Returns full pages of tokens whose bytes :func:`token_bytes` returned."""
    P, page_size, bytes_each = tokens.shape
    D = bytes_each - SCALE_BYTES
    scales = tokens[..., D:].reshape(P, -1)
    rows = scale_rows(page_size, D)
    scales = jnp.pad(scales, ((0, 0), (0, rows * D - scales.shape[1])))
    return jnp.concatenate([tokens[..., :D], scales.reshape(P, rows, D)], axis=1)


def split(
    pages: UInt8[Array, "*P rows width"], columns: int, page_size: int
) -> tuple[Float[Array, "*P page D"], Float32[Array, "*P page"]]:
    """Returns the keys of D ``columns`` and the scales of pages. Columns past D are ignored."""
    *batch, _, _ = pages.shape
    n, pages = page_size, pages[..., :columns]
    end = n + scale_rows(n, columns)
    scales = pages[..., n:end, :].reshape(*batch, -1)[..., : n * SCALE_BYTES]
    scales = scales.reshape(*batch, n, SCALE_BYTES)
    keys = jax.lax.bitcast_convert_type(pages[..., :n, :], KEY_DTYPE)
    return keys, jax.lax.bitcast_convert_type(scales, jnp.float32)
