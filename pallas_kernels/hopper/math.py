"""Approximate math, and constants of a softmax in base 2."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.hopper.ir import array, asm, float_pair, inline, item
from pallas_kernels.hopper.tiles import WGMMA

LOG2E = math.log2(math.e)
NO_SCORE = -1e30  # initial running maximum: finite, because -inf - -inf would be NaN

_SIGMOID = """{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}"""  # the constants are -log2(e) and 1


def approximate_sigmoid(x: jax.Array, *, on_gpu: bool) -> jax.Array:
    """Returns ``1 / (1 + exp(-x))`` in four instructions, with a relative error of some 2^-21.

    The exact exponential and division take about twenty. Two of the four are those of special
    function units, which take eight cycles for a warp, as many as all others together.

    Args:
      x: float32 [64, columns] in the WGMMA layout.
    """
    if not on_gpu:
        return 1 / (1 + jnp.exp(-x))
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)

    @inline(WGMMA, returns=result)
    def sigmoid(x):
        f32, pairs = ir.F32Type.get(), x.registers.flat
        results = [
            [asm(_SIGMOID, "=f,f", item(pair, i), result=f32) for i in range(2)] for pair in pairs
        ]
        return array([float_pair(*both) for both in results], x.shape, WGMMA)

    return sigmoid(x)
