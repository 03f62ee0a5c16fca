"""Packs a token and its routing into one row of integers, so that one collective carries both."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt

from pallas_kernels import block_dequant, block_quant

FLOAT8_BLOCK = (1, 128)
"""Rows and columns under one float8 scale of the tokens, as for DeepSeek's activations."""


@dataclasses.dataclass(frozen=True)
class TokenPacker:
    """Format of packed tokens: hidden state, float8 scales if any, expert numbers, weights.

    A packed token is a row of unsigned integers as wide as one element of the hidden state. The
    hidden state is most of the row and is only reinterpreted; the other fields are split into
    pieces of that width. Packing keeps every bit, except that ``float8`` rounds the hidden state.
    """

    hidden_size: int
    experts_per_token: int
    dtype: np.dtype
    """Dtype of the tokens before packing and after unpacking."""
    float8: bool
    """Whether packed hidden states are float8_e4m3fn, with one float32 scale per 128 columns."""

    def pack(
        self,
        tokens: Float[Array, "M D"],
        experts: Int32[Array, "M K"],
        weights: Float32[Array, "M K"],
    ) -> UInt[Array, "M W"]:
        """Packs tokens, their expert numbers and their weights."""
        if self.float8:
            fields = (*block_quant(tokens, FLOAT8_BLOCK), experts, weights)
        else:
            fields = (tokens, experts, weights)
        carrier = jnp.dtype(f"uint{8 * fields[0].dtype.itemsize}")
        columns = [jax.lax.bitcast_convert_type(field, carrier) for field in fields]
        return jnp.concatenate([field.reshape(len(tokens), -1) for field in columns], axis=1)

    def unpack(
        self, rows: UInt[Array, "M W"]
    ) -> tuple[Float[Array, "M D"], Int32[Array, "M K"], Float32[Array, "M K"]]:
        """Returns the tokens, expert numbers and weights of packed rows.

        With ``float8`` the product of value and scale is rounded once, to ``dtype``.
        """
        K, D = self.experts_per_token, self.hidden_size
        field_types = [(D, self.dtype), (K, jnp.int32), (K, jnp.float32)]
        if self.float8:
            field_types[:1] = [(D, jnp.float8_e4m3fn), (D // FLOAT8_BLOCK[1], jnp.float32)]
        fields, start = [], 0
        for columns, dtype in field_types:
            width = jnp.dtype(dtype).itemsize // rows.dtype.itemsize
            field = rows[:, start : start + columns * width]
            if width > 1:
                field = field.reshape(len(rows), columns, width)
            fields.append(jax.lax.bitcast_convert_type(field, dtype))
            start += columns * width
        if self.float8:
            values, scale, experts, weights = fields
            return block_dequant(values, scale, FLOAT8_BLOCK, self.dtype), experts, weights
        tokens, experts, weights = fields
        return tokens, experts, weights
