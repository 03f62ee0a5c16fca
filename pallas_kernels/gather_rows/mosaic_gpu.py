"""gather_rows of many rows on Hopper GPUs.

XLA copies one number per thread and computes its index each time: at 15,360 rows of 2,048 numbers
its kernel writes 0.45 TB/s. Here each warpgroup copies whole rows, 16 bytes per thread and
instruction, and loads several rows before it stores the first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Num

from pallas_kernels.dispatch import with_gradients_of
from pallas_kernels.gather_rows import reference
from pallas_kernels.hopper import Ref, multiprocessors, require_hopper
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.tiles import load_with_layout

_THREADS = 128
_VECTOR_BYTES = 16  # of a load
_BYTES_IN_FLIGHT = 256  # per thread, which holds them in 64 registers
_MIN_ROWS = 512  # XLA's kernel is as fast for fewer
_WIDTHS = 1, 2  # bytes of a number


def gather_rows(
    x: Num[Array, "M D"], rows: Int[Array, " N"], *, interpret: Any = None
) -> Num[Array, "N D"]:
    """Implements :func:`pallas_kernels.gather_rows`. Its gradient is the reference's. Raises
    NotImplementedError for no Hopper GPU, fewer than 512 rows, numbers of more than two bytes, or
    rows that 128 threads cannot copy in parts of at least eight bytes."""
    require_hopper(interpret)
    (N,), (_, D), size = rows.shape, x.shape, x.dtype.itemsize
    if N < _MIN_ROWS:
        raise NotImplementedError(f"takes {_MIN_ROWS} rows or more, got {N}")
    if size not in _WIDTHS:
        raise NotImplementedError(f"takes numbers of one or two bytes, got {x.dtype}")
    if D % _THREADS or vector_size(D, size) * size < _VECTOR_BYTES // 2:
        raise NotImplementedError(
            f"takes rows of a multiple of {8 * _THREADS} bytes, got {D * size}"
        )
    copy = functools.partial(copy_rows, interpret=interpret)
    return with_gradients_of(reference.gather_rows, copy)(x, rows)


def vector_size(D: int, itemsize: int) -> int:
    """Returns how many numbers a thread copies with one instruction."""
    return math.gcd(D // _THREADS, _VECTOR_BYTES // itemsize)


@lowered_once("interpret")
def copy_rows(
    x: Num[Array, "M D"], rows: Int[Array, " N"], *, interpret: Any = None
) -> Num[Array, "N D"]:
    """Returns ``x[rows]`` from a kernel."""
    (N,), (M, D) = rows.shape, x.shape
    most = max(1, _BYTES_IN_FLIGHT * _THREADS // (D * x.dtype.itemsize))
    # Short inputs get a CTA per row, so that every multiprocessor has a few.
    per_cta = min(most, max(1, N // (4 * multiprocessors())))
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=vector_size(D, x.dtype.itemsize))

    def gather_rows(x_g: Ref, rows_g: Ref, out_g: Ref) -> None:
        overlap_preceding_kernel(interpret=interpret)
        first = jax.lax.axis_index("cta") * per_cta
        # The last CTA copies its last row several times.
        targets = [jnp.minimum(first + i, N - 1) for i in range(per_cta)]
        sources = [jnp.clip(rows_g[target], 0, M - 1) for target in targets]
        copies = [load_with_layout(x_g.at[source], layout) for source in sources]
        for target, row in zip(targets, copies, strict=True):
            out_g[target] = row

    return plgpu.kernel(
        gather_rows,
        out_type=jax.ShapeDtypeStruct((N, D), x.dtype),
        grid=(-(-N // per_cta),),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, rows)
