"""Per-thread code of the float8 kernel: loads a key block's bytes from global memory to registers,
and stores them to shared memory as bfloat16.

A key block has 64 tokens, and warp w handles tokens 16 w to 16 w + 15. A warp loads 256 columns of
two tokens at a time, 16 bytes per thread. Shared memory is tiled by 8 tokens and 64 columns with a
128-byte swizzle: the 16-byte chunk c of a token is stored at chunk ``c ^ token % 8`` of its row. A
quarter of a warp, which stores in one transaction, has four threads of an even and four of an odd
token. Each stores 16 of its 32 bytes at a time, so that the eight stores use different banks.
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

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    i32,
    i64,
    inline,
    item,
    shared_address,
    warp_and_lane,
    word,
)
from pallas_kernels.hopper.tiles import TILES, WGMMA
from pallas_kernels.mla_decode.float8_cache import (
    GROUP,
    LATENT,
    ROPE,
    ROPE_AT,
    SCALES_AT,
    TOKEN_BYTES,
)
from pallas_kernels.mla_decode.schedule import BLOCK

HALF = LATENT // 2
_TOKENS = BLOCK // 4  # per warp
_PAIRS = _TOKENS // 2
_TILE_COLUMNS = 64  # of a swizzled tile
_TOGETHER = 4  # loads that are unpacked before any is stored
_SCALE_BYTES = 4 * (HALF // GROUP)  # of half of a token
_ROPE_COPIES = _TOKENS // 4  # per thread: 8 threads copy a token's 128 bytes
# Layouts of a thread's data as arrays of a warpgroup: four words per load, and a scale word.
_WORDS = WGMMA
_SCALE_WORD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def _words(loads: int) -> Any:
    return plgpu.ShapeDtypeStruct((64, 8 * loads), jnp.int32, layout=_WORDS)


def fetch_half(page: Any, half: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads half of the latents (256 columns) of a page [64, 656], and their scales.

    Args:
      half: 0 or 1, or a scalar.
    """

    scale_words = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_SCALE_WORD)
    constant, scalars = (half, ()) if isinstance(half, int) else (0, (half,))

    def times_half(address: Any, bytes_: int, half: tuple[Any, ...]) -> Any:
        """Adds ``half * bytes_`` to an address. A constant half is added in the instructions."""
        return _offset_pointer(address, arith.muli(word(*half), const(bytes_))) if half else address

    @inline(REF, *[SCALAR for _ in scalars], returns=(_words(_PAIRS), scale_words))
    def fetch(page: Any, *half: Any):
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        warp, lane = warp_and_lane()
        first = arith.muli(warp, const(_TOKENS))
        token = arith.addi(first, _bit(lane, 2))
        column = arith.ori(
            arith.shli(arith.shrui(lane, const(3)), const(6)),
            arith.shli(_low(lane, 2), const(4)),
        )
        address = _offset_pointer(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), column))
        address = times_half(address, HALF, half)
        words = [
            w for i in range(_PAIRS) for w in _load(address, constant * HALF + i * 2 * TOKEN_BYTES)
        ]
        # One of the 32 scales (16 tokens, 2 groups) per thread.
        token = arith.addi(first, _low(lane, 4))
        group = arith.shli(arith.shrui(lane, const(4)), const(2))
        address = _offset_pointer(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), group))
        address = times_half(address, _SCALE_BYTES, half)
        offset = SCALES_AT + constant * _SCALE_BYTES
        text = f"ld.global.L1::no_allocate.b32 $0, [$1 + {offset}];"
        scale = asm(text, "=r,l", address, result=i32(), effects=True)
        scale_register = vector.broadcast(ir.VectorType.get((1,), i32()), scale)
        return pack_words(words), array([scale_register], (128,), _SCALE_WORD, is_signed=True)

    return fetch(page, *scalars)


def prefetch_rope(page: Any) -> None:
    """Prefetches the rope keys of a page [64, 656] into the L2 cache."""

    @inline(REF)
    def prefetch(page: Any):
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        thread = _low(mgpu.utils.thread_idx(), 7)
        token, end = (
            arith.shrui(thread, const(1)),
            arith.muli(_low(thread, 1), const(2 * ROPE - 16)),
        )
        address = _offset_pointer(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), end))
        asm(f"prefetch.global.L2 [$0 + {ROPE_AT}];", "l", address, effects=True)

    prefetch(page)


def copy_rope(tile: Any, page: Any) -> None:
    """Starts copying the rope keys of a page [64, 656] to a tile [64, 64] in shared memory.

    :func:`wait_rope_copies` waits for the copies.
    """

    @inline(TILES, REF)
    def copy(tile: Any, page: Any):
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        warp, lane = warp_and_lane()
        token, chunk = arith.shrui(lane, const(3)), arith.shli(_low(lane, 3), const(4))
        row = arith.addi(arith.muli(warp, const(_TOKENS)), token)
        source = _offset_pointer(base, arith.addi(arith.muli(row, const(TOKEN_BYTES)), chunk))
        row = arith.addi(arith.muli(warp, const(2 * 1024)), arith.shli(token, const(7)))
        chunk = arith.xori(chunk, arith.shli(token, const(4)))
        address = arith.addi(shared_address(tile), arith.addi(row, chunk))
        for i in range(_ROPE_COPIES):
            text = f"""{{
                .reg .b32 p;
                xor.b32 p, $0, {64 * (i % 2)};
                cp.async.cg.shared.global [p + {(i // 2) * 1024 + (i % 2) * 512}],
                    [$1 + {ROPE_AT + i * 4 * TOKEN_BYTES}], 16;
            }}"""
            asm(text, "r,l", address, source, effects=True)

    copy(tile, page)


def wait_rope_copies() -> None:
    """Waits for the copies that this thread has started."""

    @inline()
    def wait():
        asm("cp.async.wait_all;", "", effects=True)

    wait()


def prefetch_page(page: Any) -> None:
    """Prefetches a page [64, 656] into the L2 cache."""

    @inline(REF)
    def prefetch(page: Any):
        address = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(page))
        leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
        text = f"@$1 cp.async.bulk.prefetch.L2.global [$0], {BLOCK * TOKEN_BYTES};"
        asm(text, "l,b", address, leader, effects=True)

    prefetch(page)


def store_half(tile: Any, words: jax.Array, scales: jax.Array, tokens: jax.Array) -> None:
    """Stores ``words`` times their scales as bfloat16 [64, 256] in shared memory.

    Tokens from index ``tokens`` on are zeroed, whatever they contain. The scale is rounded to
    bfloat16. A float8 NaN becomes 480 times its scale.
    """

    @inline(TILES, _WORDS, _SCALE_WORD, SCALAR)
    def store(tile: Any, words: Any, scales: Any, tokens: Any):
        _, lane = warp_and_lane()
        column = arith.shli(arith.shrui(lane, const(3)), const(10))
        address = arith.addi(shared_address(tile), column)
        _store_scaled(address, HALF // _TILE_COLUMNS, words, scales, tokens)

    store(tile, words, scales, tokens)


def store_slices(
    memory: Any, ring_start: jax.Array, stage: jax.Array, ring: int,
    words: jax.Array, scales: jax.Array, tokens: jax.Array,
) -> None:  # fmt: skip
    """Stores half of a key block as :func:`store_half` does, in four stages of a ring buffer.

    Args:
      memory: stages [n, 64, 64] in shared memory.
      ring_start: index of the ring buffer's first stage.
      stage: stage of the half's first 64 columns, counted from ``ring_start``. The following ones
        wrap around.
      ring: number of stages of the ring buffer.
    """

    @inline(TILES, SCALAR, SCALAR, _WORDS, _SCALE_WORD, SCALAR)
    def store(memory: Any, start: Any, stage: Any, words: Any, scales: Any, tokens: Any):
        _, lane = warp_and_lane()
        at = arith.addi(word(stage), arith.shrui(lane, const(3)))
        wraps = arith.cmpi(arith.CmpIPredicate.sge, at, const(ring))
        at = arith.select(wraps, arith.subi(at, const(ring)), at)
        offset = arith.muli(arith.addi(word(start), at), const(BLOCK * _TILE_COLUMNS * 2))
        _store_scaled(arith.addi(shared_address(memory), offset), 1, words, scales, tokens)

    start = jnp.asarray(ring_start, jnp.int32)
    store(memory, start, stage, words, scales, tokens)


def _store_scaled(address: Any, tile_columns: int, words: Any, scales: Any, tokens: Any) -> None:
    """Scales and stores a thread's words.

    Args:
      address: of the thread's 64 columns of the key block, whose tiles [8, 64] are ``tile_columns``
        tiles apart.
    """
    eight_tokens = tile_columns * 8 * _TILE_COLUMNS * 2  # bytes
    warp, lane = warp_and_lane()
    scale_word = item(scales.registers.item(), 0)
    token = arith.addi(arith.muli(warp, const(_TOKENS)), _low(lane, 4))
    scale = factor_of(scale_word, token, tokens)
    odd = _bit(lane, 2)
    source_lane = arith.ori(arith.andi(lane, const(16)), odd)  # lane of the first pair's scale
    row = arith.addi(arith.muli(warp, const(2 * eight_tokens)), arith.shli(odd, const(7)))
    chunk = arith.ori(arith.shli(_low(lane, 2), const(5)), arith.shli(odd, const(4)))
    address = arith.addi(address, arith.addi(row, chunk))
    words = words_of(words)
    for first in range(0, _PAIRS, _TOGETHER):
        stores = []
        for i in range(first, first + _TOGETHER):
            text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
            source = arith.addi(source_lane, const(2 * i))
            factor = asm(text, "=r,r,r", scale, source, result=i32(), effects=True)
            for j in range(2):
                two = words[4 * i + 2 * j : 4 * i + 2 * j + 2]
                four = [unpack_pair(each, factor, pair) for each in two for pair in range(2)]
                offset = (i // 4) * eight_tokens + (i % 4) * 256
                stores.append((32 * (i % 4) + 16 * j, offset, four))
        store_all(address, stores)


def _low(x: Any, bits: int) -> Any:
    return arith.andi(x, const(2**bits - 1))


def _bit(x: Any, number: int) -> Any:
    return _low(arith.shrui(x, const(number)), 1)


def _offset_pointer(pointer: Any, bytes_: Any) -> Any:
    return arith.addi(pointer, arith.extui(i64(), bytes_))


def _load(pointer: Any, offset: int) -> list[Any]:
    text = f"ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    four = llvm.StructType.get_literal([i32()] * 4)
    loaded = asm(text, "=r,=r,=r,=r,l", pointer, result=four, effects=True)
    return [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]


def store_all(pointer: Any, stores: list[tuple[int, int, list[Any]]]) -> None:
    """Stores four words at each ``(pointer ^ flipped) + offset``.

    All stores are one block of assembly. With separate ones the compiler assigns the same registers
    to all of them, and waits for each store before the next.
    """
    text, words = ["{ .reg .b32 p;"], []
    for flipped, offset, four in stores:
        names = ", ".join(f"${len(words) + i + 1}" for i in range(4))
        text.append(f"xor.b32 p, $0, {flipped}; st.shared.v4.b32 [p + {offset}], {{{names}}};")
        words += four
    asm(" ".join([*text, "}"]), ",".join("r" * (len(words) + 1)), pointer, *words, effects=True)


def factor_of(scale: Any, token: Any, tokens: Any) -> Any:
    """Returns two bfloat16 copies of a float32 scale times 2^120, or 0 if ``token >= tokens``.

    float8 bits, placed in a bfloat16, are 2^-120 times their value.
    """
    text = """{
        .reg .f32 s; .reg .pred p;
        mov.b32 s, $1;
        mul.f32 s, s, 0f7B800000;
        setp.lt.s32 p, $2, $3;
        selp.f32 s, s, 0f00000000, p;
        cvt.rn.bf16x2.f32 $0, s, s;
    }"""
    return asm(text, "=r,r,r,r", scale, token, word(tokens), result=i32())


def unpack_pair(word: Any, factor: Any, pair: int) -> Any:
    """Converts two of a word's four float8_e4m3fn to bfloat16 and multiplies them by ``factor``.

    They are bytes 2 * pair and 2 * pair + 1. A sign-extended byte, shifted left by 4, has all its
    bits where bfloat16 has them, plus copies of the sign bit that are masked out.
    """
    text = """{
        .reg .b32 w;
        prmt.b32 w, $1, 0, BYTES;
        shl.b32 w, w, 4;
        and.b32 w, w, 0x87F087F0;
        mul.rn.bf16x2 $0, w, $2;
    }""".replace("BYTES", "0xB3A2" if pair else "0x9180")
    return asm(text, "=r,r,r", word, factor, result=i32())


def pack_words(words: list[Any]) -> Any:
    """Makes an array of a thread's words."""
    two = ir.VectorType.get((2,), i32())
    pairs = [vector.from_elements(two, words[i : i + 2]) for i in range(0, len(words), 2)]
    return array(pairs, (64, 2 * len(words)), _WORDS, is_signed=True)


def words_of(words: Any) -> list[Any]:
    """Returns the words of an array that :func:`pack_words` made."""
    return [item(register, i) for register in words.registers.flat for i in range(2)]


def with_rounded_scales(tokens: jax.Array) -> jax.Array:
    """Rounds the scales of tokens as :func:`store_half` does; used by the interpreter."""
    words = tokens[..., SCALES_AT:ROPE_AT].reshape(*tokens.shape[:-1], -1, 4)
    # Not by a pair of casts, which XLA may elide.
    scales = lax.reduce_precision(lax.bitcast_convert_type(words, jnp.float32), 8, 7)
    fields = (
        tokens[..., :SCALES_AT],
        lax.bitcast_convert_type(scales, jnp.uint8),
        tokens[..., ROPE_AT:],
    )
    return jnp.concatenate([field.reshape(*tokens.shape[:-1], -1) for field in fields], axis=-1)
