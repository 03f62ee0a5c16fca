"""Per-thread code of the producer over a float8 cache: loads tokens to registers.

:func:`float8_registers.store_half` then scales them and stores them as bfloat16. Its module has the
order of a thread's data. Rope keys are copied as those of a bfloat16 cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.ir import REF, array, asm, const, i32, i64, inline, warp_and_lane
from pallas_kernels.mla_decode.float8_cache import (
    GROUP,
    LATENT,
    ROPE_AT,
    SCALES_AT,
    TOKEN_BYTES,
    dequantize_latent,
)
from pallas_kernels.mla_decode.float8_registers import with_rounded_scales
from pallas_kernels.sparse_mla_decode.gather import PER_THREAD, THREADS, copy_columns

_HALF = LATENT // 2
_PAIRS = 8  # of the 16 tokens of a warp
_WORDS = plgpu.ShapeDtypeStruct((64, 8 * _PAIRS), jnp.int32, layout=plgpu.Layout.WGMMA)
_SCALES = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=PER_THREAD)


def fetch_half(tokens: Any, slots: jax.Array, half: int) -> tuple[jax.Array, jax.Array]:
    """Loads half of the latents (256 columns) of a key block, and their scales.

    The scales of tokens that do not exist are 0, which makes their latents 0: a float8 that is
    unpacked is always finite.

    Args:
      tokens: uint8 [slots, 656] in global memory.
      slots: each thread's token, see :mod:`gather`.
    """

    @inline(REF, PER_THREAD, returns=(_WORDS, _SCALES))
    def fetch(tokens: Any, slots: Any) -> Any:
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(tokens))
        _, lane = warp_and_lane()
        slot = vector.extract(
            slots.registers.item(),
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([0]),
        )
        existing = arith.maxsi(slot, const(0))
        odd = arith.andi(arith.shrui(lane, const(2)), const(1))
        column = arith.ori(
            arith.shli(arith.shrui(lane, const(3)), const(6)),
            arith.shli(arith.andi(lane, const(3)), const(4)),
        )
        words = []
        four = llvm.StructType.get_literal([i32()] * 4)
        text = f"""{{
            .reg .b32 slot;
            .reg .b64 at;
            shfl.sync.idx.b32 slot, $4, $5, 0x1f, 0xffffffff;
            mad.wide.s32 at, slot, {TOKEN_BYTES}, $6;
            ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [at + {half * _HALF}];
        }}"""
        column_base = arith.addi(base, arith.extui(i64(), column))
        for i in range(_PAIRS):
            source = arith.addi(odd, const(2 * i))
            operands = existing, source, column_base
            loaded = asm(text, "=r,=r,=r,=r,r,r,l", *operands, result=four, effects=True)
            words += [llvm.extractvalue(i32(), loaded, [j]) for j in range(4)]
        # One of the 32 scales (16 tokens, 2 groups) per thread.
        group = arith.shli(arith.shrui(lane, const(4)), const(2))
        group_base = arith.addi(base, arith.extui(i64(), group))
        offset = SCALES_AT + half * 4 * (_HALF // GROUP)
        text = f"""{{
            .reg .b64 at;
            .reg .pred there;
            setp.ge.s32 there, $1, 0;
            mad.wide.s32 at, $1, {TOKEN_BYTES}, $2;
            mov.b32 $0, 0;
            @there ld.global.L1::no_allocate.b32 $0, [at + {offset}];
        }}"""
        scale = asm(text, "=&r,r,l", slot, group_base, result=i32(), effects=True)
        two = ir.VectorType.get((2,), i32())
        pairs = [vector.from_elements(two, words[i : i + 2]) for i in range(0, len(words), 2)]
        scales = [vector.broadcast(ir.VectorType.get((1,), i32()), scale)]
        return (
            array(pairs, (64, 2 * len(words)), plgpu.Layout.WGMMA, is_signed=True),
            array(scales, (THREADS,), PER_THREAD, is_signed=True),
        )

    return fetch(tokens, slots)


def copy_rope(rope: Any, tokens: Any, slots: jax.Array) -> None:
    """Starts copying the rope keys of a key block to bfloat16 [64, 64] in shared memory."""
    copy_columns(rope, tokens, slots, ROPE_AT)


def interpreted_tokens(tokens: Any, slots: jax.Array) -> jax.Array:
    """Returns bfloat16 [64, 576], zeros for -1; used by the interpreter."""
    gathered = with_rounded_scales(tokens[...][jnp.maximum(slots, 0)])
    gathered = jnp.concatenate(dequantize_latent(gathered, jnp.bfloat16), axis=-1)
    return jnp.where((slots >= 0)[:, None], gathered, jnp.zeros_like(gathered))
