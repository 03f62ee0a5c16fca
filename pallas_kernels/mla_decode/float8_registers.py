"""What a thread of the float8 kernel does in its own registers: fetch a block's bytes from global
memory, and write them to shared memory as bfloat16.

A block is 64 tokens; warp w has tokens 16 w to 16 w + 16. Two tokens of a warp are read together,
256 columns of each, 16 bytes a thread. Shared memory has tiles of 8 tokens by 64 columns, in whose
128-byte rows a piece of 16 bytes stands in place ``piece ^ token % 8``. A quarter of a warp, which
writes at once, has four threads of an even and four of an odd token, so the 16 bytes that each
writes of its 32 fall into different banks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mla_decode.float8_cache import (
    GROUP,
    LATENT,
    ROPE,
    ROPE_AT,
    SCALES_AT,
    TOKEN_BYTES,
)
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mosaic_ir import REF, SCALAR, array, asm, const, i32, i64, inline, warp_and_lane

HALF = LATENT // 2
_TOKENS = BLOCK // 4  # of a warp
_PAIRS = _TOKENS // 2
_TOGETHER = 4  # loads whose words are unpacked before any is stored
_ROPE_COPIES = _TOKENS // 4  # of a thread: 8 threads copy a token's 128 bytes
# What a thread holds, as arrays of a warpgroup: four words a load, and a word of scales.
_WORDS = plgpu.Layout.WGMMA
_LONE_WORD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
_TILES = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _words(loads: int) -> Any:
    return plgpu.ShapeDtypeStruct((64, 8 * loads), jnp.int32, layout=_WORDS)


def fetch_half(page: Any, half: int) -> tuple[jax.Array, jax.Array]:
    """Bytes of 256 latent columns of a page [64, 656] in global memory, and their scales."""

    scale_words = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_LONE_WORD)

    @inline(REF, returns=(_words(_PAIRS), scale_words))
    def fetch(page: Any):
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        warp, lane = warp_and_lane()
        first = arith.muli(warp, const(_TOKENS))
        token = arith.addi(first, _bit(lane, 2))
        column = arith.ori(
            arith.shli(arith.shrui(lane, const(3)), const(6)),
            arith.shli(_low(lane, 2), const(4)),
        )
        at = _moved(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), column))
        words = [w for i in range(_PAIRS) for w in _load(at, half * HALF + i * 2 * TOKEN_BYTES)]
        # Each of the 32 scales of 16 tokens and 2 groups in one thread.
        token = arith.addi(first, _low(lane, 4))
        group = arith.shli(arith.shrui(lane, const(4)), const(2))
        at = _moved(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), group))
        offset = SCALES_AT + half * 4 * (HALF // GROUP)
        text = f"ld.global.L1::no_allocate.b32 $0, [$1 + {offset}];"
        scale = asm(text, "=r,l", at, result=i32(), effects=True)
        lone = vector.broadcast(ir.VectorType.get((1,), i32()), scale)
        return _pairs(words), array([lone], (128,), _LONE_WORD, is_signed=True)

    return fetch(page)


def announce_rope(page: Any) -> None:
    """A page's [64, 656] rope keys are wanted in the L2 cache."""

    @inline(REF)
    def announce(page: Any):
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        thread = _low(mgpu.utils.thread_idx(), 7)
        token, end = (
            arith.shrui(thread, const(1)),
            arith.muli(_low(thread, 1), const(2 * ROPE - 16)),
        )
        at = _moved(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), end))
        asm(f"prefetch.global.L2 [$0 + {ROPE_AT}];", "l", at, effects=True)

    announce(page)


def copy_rope(tile: Any, page: Any) -> None:
    """Rope keys of a page [64, 656] to bfloat16 [64, 64] in shared memory; see rope_copied."""

    @inline(_TILES, REF)
    def copy(tile: Any, page: Any):
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        warp, lane = warp_and_lane()
        token, piece = arith.shrui(lane, const(3)), arith.shli(_low(lane, 3), const(4))
        row = arith.addi(arith.muli(warp, const(_TOKENS)), token)
        source = _moved(base, arith.addi(arith.muli(row, const(TOKEN_BYTES)), piece))
        row = arith.addi(arith.muli(warp, const(2 * 1024)), arith.shli(token, const(7)))
        piece = arith.xori(piece, arith.shli(token, const(4)))
        at = arith.addi(_shared(tile), arith.addi(row, piece))
        for i in range(_ROPE_COPIES):
            text = f"""{{
                .reg .b32 p;
                xor.b32 p, $0, {64 * (i % 2)};
                cp.async.cg.shared.global [p + {(i // 2) * 1024 + (i % 2) * 512}],
                    [$1 + {ROPE_AT + i * 4 * TOKEN_BYTES}], 16;
            }}"""
            asm(text, "r,l", at, source, effects=True)

    copy(tile, page)


def rope_copied() -> None:
    """Waits for what this thread copied."""

    @inline()
    def wait():
        asm("cp.async.wait_all;", "", effects=True)

    wait()


def store_half(tile: Any, words: jax.Array, scales: jax.Array, tokens: jax.Array) -> None:
    """``words`` times their scales to bfloat16 [64, 256] in shared memory.

    Tokens from number ``tokens`` on become zeros, whatever they hold. The scale is rounded to
    bfloat16. A NaN of float8 becomes 480 times its scale.
    """

    @inline(_TILES, _WORDS, _LONE_WORD, SCALAR)
    def store(tile: Any, words: Any, scales: Any, tokens: Any):
        warp, lane = warp_and_lane()
        word = vector.extract(
            scales.registers.item(),
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([0]),
        )
        token = arith.addi(arith.muli(warp, const(_TOKENS)), _low(lane, 4))
        # Two copies of the scale, times 2^120: a float8's bits as bfloat16's are 2^-120 as large.
        text = """{
            .reg .f32 s; .reg .pred p;
            mov.b32 s, $1;
            mul.f32 s, s, 0f7B800000;
            setp.lt.s32 p, $2, $3;
            selp.f32 s, s, 0f00000000, p;
            cvt.rn.bf16x2.f32 $0, s, s;
        }"""
        scale = asm(text, "=r,r,r,r", word, token, tokens.registers.item(), result=i32())
        odd = _bit(lane, 2)
        holder = arith.ori(arith.andi(lane, const(16)), odd)  # of the scale of the first pair
        row = arith.addi(arith.muli(warp, const(2 * 4 * 1024)), arith.shli(odd, const(7)))
        column = arith.shli(arith.shrui(lane, const(3)), const(10))
        piece = arith.ori(arith.shli(_low(lane, 2), const(5)), arith.shli(odd, const(4)))
        at = arith.addi(_shared(tile), arith.addi(arith.addi(row, column), piece))
        words = _singles(words)
        for first in range(0, _PAIRS, _TOGETHER):
            stores = []
            for i in range(first, first + _TOGETHER):
                text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
                source = arith.addi(holder, const(2 * i))
                factor = asm(text, "=r,r,r", scale, source, result=i32(), effects=True)
                for j in range(2):
                    two = words[4 * i + 2 * j : 4 * i + 2 * j + 2]
                    four = [_times(word, factor, pair) for word in two for pair in range(2)]
                    offset = (i // 4) * 4 * 1024 + (i % 4) * 256
                    stores.append((32 * (i % 4) + 16 * j, offset, four))
            _store_all(at, stores)

    store(tile, words, scales, tokens)


def show(interpret: Any = None) -> None:
    """What is known to be written in shared memory, to this thread's tensor core products."""
    if interpret is not None:
        plgpu.commit_smem()
        return

    @inline()
    def fence():
        asm("fence.proxy.async.shared::cta;", "", effects=True)

    fence()


def _low(x: Any, bits: int) -> Any:
    return arith.andi(x, const(2**bits - 1))


def _bit(x: Any, number: int) -> Any:
    return _low(arith.shrui(x, const(number)), 1)


def _moved(pointer: Any, bytes_: Any) -> Any:
    return arith.addi(pointer, arith.extui(i64(), bytes_))


def _shared(tile: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(tile))


def _load(pointer: Any, offset: int) -> list[Any]:
    text = f"ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    four = llvm.StructType.get_literal([i32()] * 4)
    loaded = asm(text, "=r,=r,=r,=r,l", pointer, result=four, effects=True)
    return [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]


def _store_all(pointer: Any, stores: list[tuple[int, int, list[Any]]]) -> None:
    """Stores of four words each at ``(pointer ^ flipped) + offset``; one instruction to the
    compiler, which else puts all into the same registers and waits for each store before the
    next."""
    text, words = ["{ .reg .b32 p;"], []
    for flipped, offset, four in stores:
        names = ", ".join(f"${len(words) + i + 1}" for i in range(4))
        text.append(f"xor.b32 p, $0, {flipped}; st.shared.v4.b32 [p + {offset}], {{{names}}};")
        words += four
    asm(" ".join([*text, "}"]), ",".join("r" * (len(words) + 1)), pointer, *words, effects=True)


def _times(word: Any, factor: Any, pair: int) -> Any:
    """bfloat16 of bytes 2 pair and 2 pair + 1 of four float8_e4m3fn, times the factor's halves.

    A byte with its sign repeated above it, moved up by 4, has all its bits where bfloat16 has them,
    and copies of the sign between the first two.
    """
    text = """{
        .reg .b32 w;
        prmt.b32 w, $1, 0, BYTES;
        shl.b32 w, w, 4;
        and.b32 w, w, 0x87F087F0;
        mul.rn.bf16x2 $0, w, $2;
    }""".replace("BYTES", "0xB3A2" if pair else "0x9180")
    return asm(text, "=r,r,r", word, factor, result=i32())


def _pairs(words: list[Any]) -> Any:
    two = ir.VectorType.get((2,), i32())
    pairs = [vector.from_elements(two, words[i : i + 2]) for i in range(0, len(words), 2)]
    return array(pairs, (64, 2 * len(words)), _WORDS, is_signed=True)


def _singles(words: Any) -> list[Any]:
    def at(i: int) -> Any:
        return ir.DenseI64ArrayAttr.get([i])

    return [
        vector.extract(register, dynamic_position=[], static_position=at(i))
        for register in words.registers.flat
        for i in range(2)
    ]


def with_rounded_scales(tokens: jax.Array) -> jax.Array:
    """Bytes whose scales are those that :func:`store_half` multiplies by, for the interpreter."""
    words = tokens[..., SCALES_AT:ROPE_AT].reshape(*tokens.shape[:-1], -1, 4)
    # Not by casts, which XLA may take for superfluous.
    scales = lax.reduce_precision(lax.bitcast_convert_type(words, jnp.float32), 8, 7)
    parts = (
        tokens[..., :SCALES_AT],
        lax.bitcast_convert_type(scales, jnp.uint8),
        tokens[..., ROPE_AT:],
    )
    return jnp.concatenate([part.reshape(*tokens.shape[:-1], -1) for part in parts], axis=-1)
