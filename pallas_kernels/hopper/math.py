"""Approximate math, and constants of a softmax in base 2."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper.ir import array, asm, float_pair, inline, item
from pallas_kernels.hopper.tiles import WGMMA

LOG2E = math.log2(math.e)
NO_SCORE = -1e30
"""Initial running maximum: finite, because -inf - -inf would be NaN."""

_SIGMOID = """{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}"""  # the constants are -log2(e) and 1

# The sigmoids of $2 and $3. The constants are -log2(e), 62 and 1.
_TWO_SIGMOIDS = """{
    .reg .f32 a, b, t;
    mul.f32 a, $2, 0fBFB8AA3B;
    mul.f32 b, $3, 0fBFB8AA3B;
    min.f32 a, a, 0f42780000;
    min.f32 b, b, 0f42780000;
    ex2.approx.ftz.f32 a, a;
    ex2.approx.ftz.f32 b, b;
    add.f32 a, a, 0f3F800000;
    add.f32 b, b, 0f3F800000;
    mul.f32 t, a, b;
    rcp.approx.ftz.f32 t, t;
    mul.f32 $0, t, b;
    mul.f32 $1, t, a;
}"""


def approximate_sigmoid(x: jax.Array, *, on_gpu: bool, in_pairs: bool = False) -> jax.Array:
    """Returns ``1 / (1 + exp(-x))`` in four instructions, with a relative error of some 2^-21.

    The exact exponential and division take about twenty. Two of the four are those of special
    function units, which take eight cycles for a warp, as many as all others together.

    Args:
      x: float32 [64, columns] in the WGMMA layout.
      in_pairs: whether two sigmoids share a reciprocal, ``1 / a = b / (a b)``, so that they take
        three special functions instead of four. The result is at least 2^-62.
    """
    if not on_gpu:
        return 1 / (1 + jnp.exp(-x))
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)

    @inline(WGMMA, returns=result)
    def sigmoid(x):
        f32, pairs = ir.F32Type.get(), x.registers.flat
        if in_pairs:
            both = llvm.StructType.get_literal([f32, f32])
            asms = [
                asm(_TWO_SIGMOIDS, "=f,=f,f,f", item(pair, 0), item(pair, 1), result=both)
                for pair in pairs
            ]
            numbers = [[llvm.extractvalue(f32, two, [i]) for i in range(2)] for two in asms]
            return array([float_pair(*two) for two in numbers], x.shape, WGMMA)
        results = [
            [asm(_SIGMOID, "=f,f", item(pair, i), result=f32) for i in range(2)] for pair in pairs
        ]
        return array([float_pair(*both) for both in results], x.shape, WGMMA)

    return sigmoid(x)
