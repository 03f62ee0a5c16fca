"""swiglu on GPUs: one kernel for the few tokens of decoding, two matmuls of XLA for many."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul.mosaic_gpu import check_few_tokens
from pallas_kernels.grouped_swiglu.mosaic_gpu import grouped_swiglu
from pallas_kernels.grouped_swiglu.reference import silu_multiply
from pallas_kernels.hopper import require_hopper
from pallas_kernels.matmul import matmul
from pallas_kernels.quantized_matmul.reference import Matrix
from pallas_kernels.target import platform

# Rows for which the kernel is faster than XLA's matmuls if the matrices are not quantized
# (64 rows: 14 us instead of 17.5 on an H200; 256 rows: 28.7 instead of 25). Large matrices have no
# lower limit: for one row by two of them, XLA took more than twice as long as reading them takes.
_MIN_ROWS, _MAX_ROWS = 32, 128
_LARGE = 2**24  # elements of a matrix


def one_kernel(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"] | None,
    up_scale: Float32[Array, "Fb Kb"] | None,
    *,
    block_shape: tuple[int, int],
    interpret: Any = None,
) -> Float[Array, "*batch F"]:
    """swiglu as grouped_swiglu of one group, on Hopper GPUs. With quantized matrices, the results
    of both matmuls are rounded to bfloat16. Raises NotImplementedError for no Hopper GPU, x not
    bfloat16, what grouped_swiglu refuses, and numbers of rows for which XLA is as fast."""
    require_hopper(interpret)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {x.dtype}")
    M = math.prod(x.shape[:-1])
    least = 1 if gate.size >= _LARGE else _MIN_ROWS
    if gate_scale is not None:
        check_few_tokens(M, 1, gate.dtype)
    elif not least <= M <= _MAX_ROWS:
        raise NotImplementedError(
            f"takes {least} to {_MAX_ROWS} rows by such bfloat16 matrices, got {M}: XLA's matmuls"
            " are as fast"
        )
    rows, sizes = x.reshape(M, x.shape[-1]), jnp.full((1,), M, jnp.int32)
    scales = [None if scale is None else scale[None] for scale in (gate_scale, up_scale)]
    options: Any = {"block_shape": block_shape, "interpret": interpret}
    out = grouped_swiglu(rows, gate[None], up[None], sizes, None, *scales, **options)
    return out.reshape(*x.shape[:-1], gate.shape[0])


def two_matmuls(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"] | None,
    up_scale: Float32[Array, "Fb Kb"] | None,
    *,
    block_shape: tuple[int, int],
) -> Float[Array, "*batch F"]:
    """swiglu of many rows, as two matmuls that XLA does not merge. Raises NotImplementedError if
    not on a GPU, for scales, and for up to 128 rows: XLA compiles one matmul without a copy."""
    del block_shape
    if platform() != "gpu":
        raise NotImplementedError(f"is for GPUs, this is {platform()}")
    if gate_scale is not None or up_scale is not None:
        raise NotImplementedError("takes matrices without scales")
    if (rows := math.prod(x.shape[:-1])) <= _MAX_ROWS:
        raise NotImplementedError(f"takes {_MAX_ROWS + 1} rows or more, got {rows}")
    return multiply_apart(x, gate, up)


def multiply_apart(
    x: Float[Array, "*batch K"], gate: Float[Array, "F K"], up: Float[Array, "F K"]
) -> Float[Array, "*batch F"]:
    """Does :func:`two_matmuls` on any platform. XLA merges matmuls that share an operand. For that
    it joins ``gate`` and ``up`` into one matrix, each time anew, unless it compiles the matmul
    itself: with 512 rows it calls cuBLAS, and copies the 23 MB of a layer's shared experts first. A
    barrier keeps it from merging them."""
    gated = matmul(x, gate, x.dtype)
    product = matmul(jax.lax.optimization_barrier(x), up, x.dtype)
    return silu_multiply(gated, product).astype(x.dtype)
