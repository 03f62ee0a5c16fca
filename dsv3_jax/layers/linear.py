"""Linear maps with weights as published: [out, in], dense, float8 or integers with scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from dsv3_jax.config import BlockQuantization, Quantization
from pallas_kernels import block_dequant, block_quant, integer_quant, quantized_matmul


class Weight(nnx.Module):
    """One matrix, or a stack of them, of shape [..., out, in].

    ``weight`` holds ``dtype``, or with ``quantization`` narrow numbers that are dequantised where
    they are used: float8_e4m3fn beside float32 ``weight_scale_inv``, or int8, or int4 in pairs
    (uint8 [..., out, in / 2]), beside ``weight_scale``. A scale stands for a block:
    [..., ceil(out / rows), ceil(in / columns)].
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        weight = jax.random.normal(rngs.params(), shape, jnp.float32) * std
        self.quantization = quantization
        if quantization is None:
            self.weight = nnx.Param(weight.astype(dtype))
            return
        self.block_shape = quantization.block_shape(shape[-1])
        if isinstance(quantization, BlockQuantization):
            values, scale = block_quant(weight, self.block_shape)
            self.weight_scale_inv = nnx.Param(scale)
        else:
            values, scale = integer_quant(weight, quantization.bits, quantization.group_size)
            self.weight_scale = nnx.Param(scale)
        self.weight = nnx.Param(values)

    @property
    def scale(self) -> Float32[Array, "*stack rows columns"]:
        """One a block of ``block_shape``; quantized weights alone have it."""
        float8 = isinstance(self.quantization, BlockQuantization)
        return (self.weight_scale_inv if float8 else self.weight_scale)[...]

    def dense(self, dtype: DTypeLike) -> Float[Array, "*stack out in"]:
        """The weight's values in ``dtype``."""
        if self.quantization is None:
            return self.weight[...].astype(dtype)
        return block_dequant(self.weight[...], self.scale, self.block_shape, dtype)


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
        quantization: Quantization | None = None,
    ):
        super().__init__(
            (out_features, in_features), std=std, rngs=rngs, dtype=dtype, quantization=quantization
        )

    def __call__(
        self, x: Float[Array, "*batch in"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch out"]:
        out_dtype = out_dtype or x.dtype
        if self.quantization is not None:
            weight, scale = self.weight[...], self.scale
            return quantized_matmul(
                x, weight, scale, block_shape=self.block_shape, out_dtype=out_dtype
            )
        y = jnp.einsum("...i,oi->...o", x, self.dense(x.dtype), preferred_element_type=jnp.float32)
        return y.astype(out_dtype)


class Embedding(nnx.Module):
    """Rows of ``weight`` [W, D], looked up by token id."""

    def __init__(self, rows: int, width: int, *, std: float, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = nnx.Param(
            (jax.random.normal(rngs.params(), (rows, width), jnp.float32) * std).astype(dtype)
        )

    def __call__(self, tokens: jax.Array) -> Float[Array, "*batch D"]:
        return self.weight[...][tokens]
