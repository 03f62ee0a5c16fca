"""Linear maps with weights as published: [out, in]; dense, or float8 or integers with scales."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from dsv3_jax.quantization import BlockQuantization, IntegerQuantization, Quantization
from pallas_kernels import (
    block_dequant,
    block_quant,
    grouped_matmul,
    integer_quant,
    quantized_matmul,
    target,
)
from pallas_kernels.matmul import matmul, matmuls, sum_dtype

FEW_TOKENS = 64
"""Input rows per matrix, on average, up to which activations are not rounded to float8.

A matmul with so few rows takes the time to read the matrix, so float8 activations save nothing."""


class WeightArgs(TypedDict):
    """Arguments of a module for its weights: random numbers, their dtype, their quantization."""

    rngs: nnx.Rngs
    dtype: DTypeLike
    quantization: Quantization | None


class Weight(nnx.Module):
    """One matrix, or a stack of them, of shape [..., out, in].

    ``weight`` is of ``dtype``. With ``quantization`` it is narrower and dequantised where it is
    used: float8_e4m3fn with float32 scales ``weight_scale_inv``, or int8, or pairs of int4 (uint8
    [..., out, in / 2]), with scales ``weight_scale``. One scale belongs to a block of the matrix:
    the scales are [..., ceil(out / rows), ceil(in / columns)].
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
        self.float8_activations = False  # see DeepSeekV3.use_float8_activations
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
    def can_take_float8_activations(self) -> bool:
        """Whether activations can be rounded to float8: for float8 weights, and for stacks of int4
        weights. Single int4 matrices are multiplied in bfloat16, which XLA does as fast."""
        match self.quantization:
            case BlockQuantization():
                return True
            case IntegerQuantization(bits=4):
                return self.weight.ndim > 2
        return False

    @property
    def scale_name(self) -> str:
        """Name of the scales' attribute. Only quantised weights have it."""
        float8 = isinstance(self.quantization, BlockQuantization)
        return "weight_scale_inv" if float8 else "weight_scale"

    @property
    def scale(self) -> Float32[Array, "*stack rows columns"]:
        """Scales of the blocks of ``block_shape``. Only quantised weights have them."""
        return getattr(self, self.scale_name)[...]

    def uses_float8_activations(self, rows: int) -> bool:
        """Returns whether activations are rounded to float8 before the matmul, for this number of
        rows of all matrices of the stack together."""
        matrices = math.prod(self.weight.shape[:-2])
        return self.float8_activations and rows > FEW_TOKENS * matrices

    def quantize_activations(
        self, x: Float[Array, "M K"]
    ) -> tuple[Float[Array, "M K"], Float32[Array, "M Kb"]]:
        """Returns ``x`` in float8, and its scales for the same column blocks as the weight's."""
        scale_fmt: Any = "float32"
        if isinstance(self.quantization, BlockQuantization):
            scale_fmt = self.quantization.scale_fmt
        return block_quant(x, (1, self.block_shape[1]), scale_fmt=scale_fmt)

    def dense(self, dtype: DTypeLike) -> Float[Array, "*stack out in"]:
        """Returns the weight's values in ``dtype``."""
        if self.quantization is None:
            return self.weight[...].astype(dtype)
        return block_dequant(self.weight[...], self.scale, self.block_shape, dtype)

    def replace_weight(self, weight: Float[Array, "*stack out in"]) -> None:
        """Sets the weight, which is then not quantised."""
        if self.quantization is not None:
            delattr(self, self.scale_name)
        self.weight, self.quantization = nnx.Param(weight), None


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
        """Returns ``y`` in ``out_dtype``, by default the dtype of ``x``."""
        out_dtype = out_dtype or x.dtype
        if self.uses_float8_activations(M := math.prod(x.shape[:-1])):
            values, x_scale = self.quantize_activations(x.reshape(M, -1))
            sizes, matrix, scale = jnp.full((1,), M), self.weight[...][None], self.scale[None]
            y = grouped_matmul(values, matrix, sizes, x_scale, scale, block_shape=self.block_shape)
            return y.reshape(*x.shape[:-1], -1).astype(out_dtype)
        if self.quantization is not None:
            weight, scale = self.weight[...], self.scale
            return quantized_matmul(
                x, weight, scale, block_shape=self.block_shape, out_dtype=out_dtype
            )
        return matmul(x, self.weight[...].astype(x.dtype), jnp.dtype(out_dtype))


def linears(x: Float[Array, "*batch in"], *modules: Any) -> tuple[Float[Array, "*batch _"], ...]:
    """Returns ``module(x)`` for each module. Those that are a :class:`Linear` without quantization
    have one matmul for the gradient by ``x``, and one for those by their weights."""
    if any(type(module) is not Linear or module.quantization is not None for module in modules):
        return tuple(module(x) for module in modules)
    return matmuls(x, tuple(module.weight[...].astype(x.dtype) for module in modules))


class Embedding(nnx.Module):
    """Looks up rows of ``weight`` [W, D] by token id."""

    def __init__(self, rows: int, width: int, *, std: float, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = nnx.Param(
            (jax.random.normal(rngs.params(), (rows, width), jnp.float32) * std).astype(dtype)
        )

    def __call__(self, tokens: jax.Array) -> Float[Array, "*batch D"]:
        """Returns the embeddings of ``tokens``."""
        return _rows(self.weight[...], tokens)


@jax.custom_vjp
def _rows(weight: Float[Array, "W D"], tokens: jax.Array) -> Float[Array, "*batch D"]:
    """Returns ``weight[tokens]``. Its gradient begins with zeros that depend on the cotangent: XLA
    would write others early in the backward pass, and keep them until its end."""
    return weight[tokens]


def _rows_forward(weight: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    return weight[tokens], (weight, tokens)


def _rows_backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    weight, tokens = saved
    zero, cotangent = jax.lax.optimization_barrier((jnp.zeros((), weight.dtype), cotangent))
    return jnp.broadcast_to(zero, weight.shape).at[tokens].add(cotangent), None


_rows.defvjp(_rows_forward, _rows_backward)


def per_head_matmul(
    x: Float[Array, "B T H K"], weight: Float[Array, "H _ _"], *, contracted: int, dtype: DTypeLike
) -> Float[Array, "B T H N"]:
    """Multiplies each head by its own matrix. The sum over the dimension ``contracted`` of
    ``weight`` is in float32, and rounded once to ``dtype``."""
    B, T, H, K = x.shape
    out = jax.lax.dot_general(
        x.reshape(B * T, H, K),
        weight,
        (((2,), (contracted,)), ((1,), (0,))),
        preferred_element_type=sum_dtype(dtype),
    )
    if target.platform() == "gpu":
        # A batched matmul's heads come first. In memory its tokens do, as the next operation has
        # them: XLA would otherwise write the result and then transpose it.
        out = with_layout_constraint(out, ArrayLayout(major_to_minor=(1, 0, 2)))
    return out.transpose(1, 0, 2).reshape(B, T, H, -1).astype(dtype)
