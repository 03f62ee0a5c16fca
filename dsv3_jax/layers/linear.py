"""Linear maps with weights as published: [out, in], dense or float8 with block scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.config import BlockQuantization
from pallas_kernels import block_dequant, block_quant


class Weight(nnx.Module):
    """One matrix, or a stack of them, of shape [..., out, in].

    ``weight`` holds ``dtype``, or float8_e4m3fn with float32 ``weight_scale_inv``
    [..., ceil(out / block), ceil(in / block)] where ``quantization`` is given. Float8 weights are
    dequantised where they are used.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: BlockQuantization | None = None,
    ):
        weight = jax.random.normal(rngs.params(), shape, jnp.float32) * std
        self.quantization = quantization
        if quantization is None:
            self.weight = nnx.Param(weight.astype(dtype))
        else:
            values, scale = block_quant(weight, quantization.weight_block_size)
            self.weight = nnx.Param(values)
            self.weight_scale_inv = nnx.Param(scale)

    def dense(self, dtype: DTypeLike) -> Float[Array, "*stack out in"]:
        """The weight's values in ``dtype``."""
        if self.quantization is None:
            return self.weight[...].astype(dtype)
        return block_dequant(
            self.weight[...], self.weight_scale_inv[...], self.quantization.weight_block_size, dtype
        )


class Linear(Weight):
    """``y[o] = sum_i weight[o, i] x[i]``, summed in float32, without bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: BlockQuantization | None = None,
    ):
        super().__init__(
            (out_features, in_features), std=std, rngs=rngs, dtype=dtype, quantization=quantization
        )

    def __call__(
        self, x: Float[Array, "*batch in"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch out"]:
        y = jnp.einsum("...i,oi->...o", x, self.dense(x.dtype), preferred_element_type=jnp.float32)
        return y.astype(out_dtype or x.dtype)


class Embedding(nnx.Module):
    """Rows of ``weight`` [W, D], looked up by token id."""

    def __init__(self, rows: int, width: int, *, std: float, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = nnx.Param(
            (jax.random.normal(rngs.params(), (rows, width), jnp.float32) * std).astype(dtype)
        )

    def __call__(self, tokens: jax.Array) -> Float[Array, "*batch D"]:
        return self.weight[...][tokens]
