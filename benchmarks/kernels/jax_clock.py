"""Time stamps of :mod:`benchmarks.kernels.clock` in JAX programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels.clock import INSTRUCTION, KERNEL
from pallas_kernels.hopper.ir import SCALAR, asm, i32, inline

STAMP = jax.ShapeDtypeStruct((128,), jnp.int32)


def stamp(after: jax.Array) -> jax.Array:
    """Returns the clock's value, in every element of ``STAMP``, after ``after`` is available."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def now() -> Any:
        word = asm(INSTRUCTION, "=r", result=i32(), effects=True)
        return mgpu.FragmentedArray.splat(word, (), SCALAR.to_mgpu(), is_signed=True)

    def kernel(after_g: Any, out_g: Any) -> None:
        del after_g
        out_g[...] = jnp.broadcast_to(now(), STAMP.shape)

    kernel.__name__ = KERNEL
    return plgpu.kernel(
        kernel,
        out_type=STAMP,
        grid=(1,),
        grid_names=("one",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(after)
