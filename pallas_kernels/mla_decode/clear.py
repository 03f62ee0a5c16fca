"""Zeroes the values past a sequence's last token in its last page.

P is zero there, but the page may contain infinities or NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.hopper.ir import SCALAR, asm, const, inline, shared_address, word
from pallas_kernels.hopper.tiles import TILES, WGMMA
from pallas_kernels.mla_decode.schedule import BLOCK

_TILE = 64  # columns of a swizzled tile: 128 contiguous bytes of a token
_ROWS, _PASSES = 16, 4  # tokens that a warpgroup clears per pass, with eight threads each


def clear_tokens(values: Any, columns: Any, token: jax.Array, *, interpret: Any = None) -> None:
    """Zeroes the tokens from index ``token`` on.

    A whole warpgroup calls it, and has to fence its writes before the tensor cores read them.

    Args:
      values: [BLOCK, width] in shared memory, tiled by (8, 64) and swizzled.
      columns: the columns to clear, a ``pl.ds``.
    """
    width, starts = values.shape[1], range(0, columns.size, _TILE)
    if interpret is not None:
        for start in starts:
            columns_ref = values.at[:, pl.ds(columns.start + start, _TILE)]
            place = plgpu.broadcasted_iota(jnp.int32, (BLOCK, _TILE), 0, layout=WGMMA)
            old = plgpu.layout_cast(columns_ref[...], WGMMA)
            columns_ref[...] = jnp.where(place < token, old, jnp.zeros_like(old))
        return
    # Whole 64-column tiles of a token are cleared, so the swizzle within them does not matter. One
    # block of assembly, so that its addresses occupy no registers before or after it.
    eight_tokens = 8 * width * 2  # bytes
    text = [
        "{ .reg .b32 thread, place, at, z; .reg .pred p;",
        "mov.b32 z, 0;",
        "mov.u32 thread, %tid.x;",
        "bfe.u32 place, thread, 3, 4;",  # token among 16
        f"shr.u32 at, place, 3; mul.lo.u32 at, at, {eight_tokens};",
        "add.u32 at, at, $0;",
        "and.b32 thread, thread, 63;",  # 16 bytes per thread, eight tokens together
        "shl.b32 thread, thread, 4;",
        "add.u32 at, at, thread;",
    ]
    for step in range(_PASSES):
        text.append("setp.ge.s32 p, place, $1;")
        for start in starts:
            offset = 2 * step * eight_tokens + start // _TILE * 1024
            text.append(f"@p st.shared.v4.b32 [at + {offset}], {{z, z, z, z}};")
        text.append(f"add.u32 place, place, {_ROWS};")
    text.append("}")

    @inline(TILES, SCALAR, SCALAR)
    def clear(ref: Any, first_column: Any, token: Any) -> None:
        base = shared_address(ref)
        # A tile of eight tokens by 64 columns takes 1,024 bytes, so a column takes 16.
        base = arith.addi(base, arith.shli(word(first_column), const(4)))
        asm("\n".join(text), "r,r,~{memory}", base, word(token), effects=True)

    clear(values, jnp.asarray(columns.start, jnp.int32), token)
