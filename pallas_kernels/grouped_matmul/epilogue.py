"""What becomes of a tile's sums: SwiGLU, float8 with a scale a row, and the way to memory.

A warpgroup has 64 rows of sums in its registers, four threads to a row. A row's largest value takes
two exchanges among these four; where the other half of a block of 128 columns is the other
warpgroup's, the two swap theirs through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.block_quant.reference import FLOAT8, FLOAT8_MAX, SMALLEST_AMAX
from pallas_kernels.mosaic_ir import (
    REF,
    SCALAR,
    asm,
    const,
    i64,
    inline,
    warp_and_lane,
    wgmma_row,
    word,
)

ROWS = 64  # of a warpgroup at once
_STORES = (32, 16, 8, 4, 2, 1)  # rows of the stores that write fewer
_ROW = plgpu.Layout.WGMMA.reduce(1)


def gated(sums: tuple[jax.Array, ...], columns: int) -> tuple[jax.Array, ...]:
    """silu of the first matrix' ``columns`` times the second's."""
    if len(sums) == 1:
        gates, ups = [sums[0][:, :columns]], [sums[0][:, columns:]]
    else:
        gates, ups = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    return tuple(gate * up / (1 + jnp.exp(-gate)) for gate, up in zip(gates, ups, strict=True))


def quantized(values: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float8 [64, columns] and its scales [64], ``amax`` being the rows' largest.

    As block_quant, but for a product where that divides: a last bit of float32, which moves a value
    only where it stands between two of float8. None passes 448, so that nothing is clipped.
    """
    amax = jnp.maximum(amax, SMALLEST_AMAX)
    factors = lax.broadcast_in_dim(FLOAT8_MAX / amax, values.shape, (0,))
    return (values * factors).astype(FLOAT8), amax / FLOAT8_MAX


class Halves:
    """Each of two warpgroups has half of a block's columns: the rows' maxima over both."""

    def __init__(self, memory: Any, both: Any) -> None:
        self.memory, self.both = memory, both

    @staticmethod
    def scratch() -> list[Any]:
        """Two sets: who is a tile ahead does not write what the other has yet to read, for one
        barrier a tile keeps them from being two ahead."""
        return [plgpu.SMEM((2, 2, ROWS), jnp.float32), plgpu.Barrier(num_arrivals=2)]

    def maximum(self, mine: jax.Array, warpgroup: jax.Array, tile: jax.Array) -> jax.Array:
        """Of float32 [64] in both warpgroups; ``tile`` counts the calls."""
        maxima = self.memory.at[tile & 1]
        maxima[warpgroup] = mine
        plgpu.barrier_arrive(self.both)
        plgpu.barrier_wait(self.both)
        return jnp.maximum(mine, plgpu.layout_cast(maxima[1 - warpgroup], _ROW))


def store_rows(staged: Any, out: Any, keep: jax.Array, row: jax.Array, columns: Any) -> None:
    """The first ``keep`` rows of 64: at once, or by stores of 32 to 1 rows in one group."""

    @pl.when(keep == ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(row, ROWS), columns])

    @pl.when((keep > 0) & (keep < ROWS))
    def _() -> None:
        def store(done: Any, rows: int) -> None:
            plgpu.copy_smem_to_gmem(
                staged.at[pl.ds(done, rows)],
                out.at[pl.ds(row + done, rows), columns],
                commit_group=False,
            )

        _in_parts(keep, _STORES, store)
        plgpu.commit_smem_to_gmem_group()


def _in_parts(keep: jax.Array, sizes: tuple[int, ...], store: Callable[[Any, int], None]) -> None:
    """``store(first, rows)`` of parts of ``keep`` rows, each of another power of two."""
    done: Any = 0
    for rows in sizes:

        @pl.when((keep & rows) != 0)
        def _(done: Any = done, rows: int = rows) -> None:
            store(done, rows)

        done = done + (keep & rows)


def store_scales(
    out: Any,
    scales: jax.Array,
    keep: jax.Array,
    row: jax.Array,
    column: jax.Array,
    *,
    on_gpu: bool,
) -> None:
    """The first ``keep`` of 64 rows' scales to ``out`` [rows, columns] in global memory."""
    if not on_gpu:

        def store(done: Any, rows: int) -> None:
            first = jnp.asarray(done, jnp.int32)
            out[pl.ds(row + first, rows), column] = lax.dynamic_slice(scales, (first,), (rows,))

        _in_parts(keep, (ROWS, *_STORES), store)
        return

    @inline(REF, _ROW, SCALAR, SCALAR, SCALAR)
    def write(out: Any, scales: Any, keep: Any, row: Any, column: Any) -> None:
        columns = ir.MemRefType(out.type).shape[1]
        _, lane = warp_and_lane()
        fourth = arith.andi(lane, const(3))  # of those who hold this row; the first writes
        mine, start = wgmma_row(), mgpu.utils.memref_ptr(out)
        for half, register in enumerate(scales.registers.flat):
            r = arith.addi(mine, const(8 * half))
            place = arith.muli(arith.addi(word(row), r), const(columns))
            place = arith.addi(place, word(column))
            to = mgpu.utils.getelementptr(start, [place], ir.F32Type.get())
            value = vector.extract(register, dynamic_position=[], static_position=[0])
            text = """{
                .reg .pred p;
                setp.lt.s32 p, $2, $3;
                setp.eq.and.s32 p, $4, 0, p;
                @p st.global.f32 [$0], $1;
            }"""
            words = llvm.ptrtoint(i64(), to), value, r, word(keep), fourth
            asm(text, "l,f,r,r,r,~{memory}", *words, effects=True)

    write(out, scales, keep, row, column)
