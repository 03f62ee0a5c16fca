"""A token and its routing in one row of integers, so that one collective carries both."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt

from pallas_kernels import block_dequant, block_quant

FLOAT8_BLOCK = (1, 128)
"""Columns of a token under one scale; DeepSeek's activations use the same."""


@dataclasses.dataclass(frozen=True)
class Parcel:
    """The row of one token: values, scales (float8 alone), experts, weights; bit for bit.

    A row is made of unsigned integers as wide as a travelling value, so the values, which are most
    of it, need no shuffling; the rest is cut into pieces of that width.
    """

    hidden_size: int
    experts_per_token: int
    dtype: np.dtype
    """Of the tokens, before and behind the exchange."""
    float8: bool

    def pack(
        self,
        tokens: Float[Array, "M D"],
        experts: Int32[Array, "M K"],
        weights: Float32[Array, "M K"],
    ) -> UInt[Array, "M W"]:
        if self.float8:
            parts = (*block_quant(tokens, FLOAT8_BLOCK), experts, weights)
        else:
            parts = (tokens, experts, weights)
        carrier = jnp.dtype(f"uint{8 * parts[0].dtype.itemsize}")
        pieces = [jax.lax.bitcast_convert_type(part, carrier) for part in parts]
        return jnp.concatenate([piece.reshape(len(tokens), -1) for piece in pieces], axis=1)

    def unpack(
        self, rows: UInt[Array, "M W"]
    ) -> tuple[Float[Array, "M D"], Int32[Array, "M K"], Float32[Array, "M K"]]:
        """The tokens (float8: rounded once, to ``dtype`` again), experts and weights of rows."""
        K, D = self.experts_per_token, self.hidden_size
        layout = [(D, self.dtype), (K, jnp.int32), (K, jnp.float32)]
        if self.float8:
            layout[:1] = [(D, jnp.float8_e4m3fn), (D // FLOAT8_BLOCK[1], jnp.float32)]
        parts, start = [], 0
        for columns, dtype in layout:
            width = jnp.dtype(dtype).itemsize // rows.dtype.itemsize
            piece = rows[:, start : start + columns * width]
            if width > 1:
                piece = piece.reshape(len(rows), columns, width)
            parts.append(jax.lax.bitcast_convert_type(piece, dtype))
            start += columns * width
        if self.float8:
            values, scale, experts, weights = parts
            return block_dequant(values, scale, FLOAT8_BLOCK, self.dtype), experts, weights
        tokens, experts, weights = parts
        return tokens, experts, weights
