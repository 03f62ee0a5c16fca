"""The public quantized_matmul: rows times the transpose of one quantized matrix."""

from __future__ import annotations

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.quantized_matmul import one_group, reference

BACKENDS = {
    "mosaic_gpu": one_group.on_hopper,
    "mosaic_tpu": one_group.on_tpu,
    "reference": reference.quantized_matmul,
}


def quantized_matmul(
    x: Float[Array, "*batch K"],
    weight: reference.Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch N"]:
    """Computes ``out[..., n] = sum_k weight[n, k] x[..., k]``, summed in float32.

    The gradient by ``x`` rounds the cotangent to x's dtype, and dequantizes the matrix again.

    Args:
      x: bfloat16 or float32.
      weight: float8_e4m3fn or int8 [N, K], or int4 as uint8 [N, K / 2], packed as by
        :func:`pallas_kernels.integer_quant`.
      scale: one scale per block of ``block_shape``, which multiplies the values. The last blocks
        along N and K may be partial.
      block_shape: (rows of N, columns of K) that share a scale.
      out_dtype: dtype of the result, by default x's. A back-end may round to x's dtype first.

    Raises:
      ValueError: x and weight differ in K, or the scale's shape is not ceil(shape / block).
      NotImplementedError: the named back-end does not support these arguments.
    """
    reference.check_shapes(x, weight, scale, block_shape)
    options = {"block_shape": block_shape, "out_dtype": x.dtype if out_dtype is None else out_dtype}
    return dispatch("quantized_matmul", BACKENDS, implementation, x, weight, scale, **options)
