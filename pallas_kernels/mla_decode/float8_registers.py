"""Per-thread code for float8 caches: a key block's bytes to bfloat16 for the tensor cores.

There are two ways. The kernels for tiles of 64 query rows unpack from global memory to shared
memory (:func:`fetch_half`, :func:`store_half`), where both matmuls read the block. The scored
kernel copies bytes to shared memory, and from there unpacks operands in registers
(:func:`load_words`, :func:`unpack`), which :func:`store_values` then stores for the other matmul.

A key block has 64 tokens, and warp w handles tokens 16 w to 16 w + 15. Shared memory has tiles of 8
tokens by 64 columns with a 128-byte swizzle: the 16-byte chunk c of a token is at chunk ``c ^ token
% 8`` of its row. A quarter of a warp stores in one transaction, and must not use a bank twice.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, BFloat16

from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.ir import (
    INT32,
    REF,
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    global_address,
    i32,
    i64,
    inline,
    item,
    numbers_of,
    scalar,
    shared_address,
    single,
    value_of,
    warp_and_lane,
    words_of,
)
from pallas_kernels.hopper.split_kv import BLOCK
from pallas_kernels.hopper.tiles import TILES, WGMMA
from pallas_kernels.mla_decode.float8_cache import (
    GROUP,
    LATENT,
    ROPE,
    ROPE_AT,
    SCALES_AT,
    TOKEN_BYTES,
    dequantize_latent,
)

HALF = LATENT // 2
_TOKENS = BLOCK // 4  # per warp
_PAIRS = _TOKENS // 2
_TOGETHER = 4  # loads that are unpacked before any is stored
_SCALE_BYTES = 4 * (HALF // GROUP)  # of half of a token
_ROPE_COPIES = _TOKENS // 4  # per thread: 8 threads copy a token's 128 bytes
# Layouts of a thread's data as arrays of a warpgroup: four words per load, and a scale word.
_WORDS = WGMMA
_SCALE_WORD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def _words(loads: int) -> Any:
    return plgpu.ShapeDtypeStruct((64, 8 * loads), jnp.int32, layout=_WORDS)


def fetch_half(page: Ref, half: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads half 0 or 1 of the latents (256 columns) of a page [64, 656], and their scales. A warp
    loads 256 columns of two tokens at a time, 16 bytes per thread."""

    scale_words = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_SCALE_WORD)
    constant, scalars = (half, ()) if isinstance(half, int) else (0, (half,))

    def times_half(address: Any, bytes_: int, half: tuple[Any, ...]) -> Any:
        """Adds ``half * bytes_`` to an address. A constant half is added in the instructions."""
        if not half:
            return address
        return _offset_pointer(address, arith.muli(value_of(*half), const(bytes_)))

    @inline(REF, *[SCALAR for _ in scalars], returns=(_words(_PAIRS), scale_words))
    def fetch(page: ir.Value, *half: Any):
        base = global_address(page)
        warp, lane = warp_and_lane()
        first = arith.muli(warp, const(_TOKENS))
        token = arith.addi(first, _bit(lane, 2))
        column = arith.ori(
            arith.shli(arith.shrui(lane, const(3)), const(6)), arith.shli(_low(lane, 2), const(4))
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
        scale = single(asm(text, "=r,l", address, result=i32(), effects=True))
        return pack_words(words), array([scale], (128,), _SCALE_WORD, is_signed=True)

    return fetch(page, *scalars)


def prefetch_rope(page: Ref) -> None:
    """Prefetches the rope keys of a page [64, 656] into the L2 cache."""

    @inline(REF).on(page)
    def _(page: ir.Value):
        base = global_address(page)
        thread = _low(mgpu.utils.thread_idx(), 7)
        token = arith.shrui(thread, const(1))
        end = arith.muli(_low(thread, 1), const(2 * ROPE - 16))
        address = _offset_pointer(base, arith.addi(arith.muli(token, const(TOKEN_BYTES)), end))
        asm(f"prefetch.global.L2 [$0 + {ROPE_AT}];", "l", address, effects=True)


def copy_rope(tile: Ref, page: Ref) -> None:
    """Starts copying the rope keys of a page [64, 656] to a tile [64, 64] in shared memory, see
    :func:`wait_rope_copies`."""

    @inline(TILES, REF).on(tile, page)
    def _(tile: ir.Value, page: ir.Value):
        base = global_address(page)
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


def wait_rope_copies() -> None:
    """Waits for the copies that this thread has started."""

    @inline().on()
    def _():
        asm("cp.async.wait_all;", "", effects=True)


def prefetch_page(page: Ref) -> None:
    """Prefetches a page [64, 656] into the L2 cache."""

    @inline(REF).on(page)
    def _(page: ir.Value):
        address = global_address(page)
        leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
        text = f"@$1 cp.async.bulk.prefetch.L2.global [$0], {BLOCK * TOKEN_BYTES};"
        asm(text, "l,b", address, leader, effects=True)


def store_half(tile: Ref, words: jax.Array, scales: jax.Array, tokens: Index) -> None:
    """Stores ``words`` times their scales as bfloat16 [64, 256] in shared memory.

    A quarter of a warp has four threads of an even and four of an odd token. Each stores 16 of its
    32 bytes at a time, so that the eight stores use different banks.

    Tokens from index ``tokens`` on are zeroed, whatever they contain. The scale is rounded to
    bfloat16. A float8 NaN becomes 480 times its scale."""

    @inline(TILES, _WORDS, _SCALE_WORD, SCALAR).on(tile, words, scales, tokens)
    def _(tile: ir.Value, words: Registers, scales: Registers, tokens: Registers):
        eight_tokens = HALF * 8 * 2  # bytes
        warp, lane = warp_and_lane()
        column = arith.shli(arith.shrui(lane, const(3)), const(10))
        address = arith.addi(shared_address(tile), column)
        scale_word = item(scales.registers.item(), 0)
        token = arith.addi(arith.muli(warp, const(_TOKENS)), _low(lane, 4))
        scale = factor_of(scale_word, token, tokens)
        odd = _bit(lane, 2)
        source_lane = arith.ori(arith.andi(lane, const(16)), odd)  # of the first pair's scale
        row = arith.addi(arith.muli(warp, const(2 * eight_tokens)), arith.shli(odd, const(7)))
        chunk = arith.ori(arith.shli(_low(lane, 2), const(5)), arith.shli(odd, const(4)))
        address = arith.addi(address, arith.addi(row, chunk))
        all_words = numbers_of(words)
        for first in range(0, _PAIRS, _TOGETHER):
            stores = []
            for i in range(first, first + _TOGETHER):
                text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
                source = arith.addi(source_lane, const(2 * i))
                factor = asm(text, "=r,r,r", scale, source, result=i32(), effects=True)
                for j in range(2):
                    two = all_words[4 * i + 2 * j : 4 * i + 2 * j + 2]
                    four = [unpack_pair(each, factor, pair) for each in two for pair in range(2)]
                    offset = (i // 4) * eight_tokens + (i % 4) * 256
                    stores.append((32 * (i % 4) + 16 * j, offset, four))
            store_all(address, stores)


def _low(x: ir.Value, bits: int) -> ir.Value:
    return arith.andi(x, const(2**bits - 1))


def _bit(x: ir.Value, number: int) -> ir.Value:
    return _low(arith.shrui(x, const(number)), 1)


def _offset_pointer(pointer: ir.Value, bytes_: ir.Value) -> ir.Value:
    return arith.addi(pointer, arith.extui(i64(), bytes_))


def _load(pointer: ir.Value, offset: int) -> list[ir.Value]:
    text = f"ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return asm_numbers(text, "=r,=r,=r,=r,l", pointer, kind=i32(), count=4)


def store_all(pointer: ir.Value, stores: list[tuple[int, int, list[ir.Value]]]) -> None:
    """Stores four words at each ``(pointer ^ flipped) + offset``, in one block of assembly. In
    separate ones the compiler assigns the same registers to all stores, and waits for each."""
    text, words = ["{ .reg .b32 p;"], []
    for flipped, offset, four in stores:
        names = ", ".join(f"${len(words) + i + 1}" for i in range(4))
        text.append(f"xor.b32 p, $0, {flipped}; st.shared.v4.b32 [p + {offset}], {{{names}}};")
        words += four
    asm(" ".join([*text, "}"]), ",".join("r" * (len(words) + 1)), pointer, *words, effects=True)


def factor_of(scale: ir.Value, token: ir.Value, tokens: Registers) -> ir.Value:
    """Returns two bfloat16 copies of a float32 scale times 2^120, or 0 if ``token >= tokens``.
    float8 bits, placed in a bfloat16, are 2^-120 times their value."""
    text = """{
        .reg .f32 s; .reg .pred p;
        mov.b32 s, $1;
        mul.f32 s, s, 0f7B800000;
        setp.lt.s32 p, $2, $3;
        selp.f32 s, s, 0f00000000, p;
        cvt.rn.bf16x2.f32 $0, s, s;
    }"""
    return asm(text, "=r,r,r,r", scale, token, value_of(tokens), result=i32())


def unpack_pair(word: ir.Value, factor: ir.Value, pair: int) -> ir.Value:
    """Converts bytes 2 * pair and 2 * pair + 1 of a word from float8_e4m3fn to bfloat16, times
    ``factor``. A sign-extended byte, shifted left by 4, has its bits where bfloat16 has them, and
    more sign bits, which are masked out."""
    text = """{
        .reg .b32 w;
        prmt.b32 w, $1, 0, BYTES;
        shl.b32 w, w, 4;
        and.b32 w, w, 0x87F087F0;
        mul.rn.bf16x2 $0, w, $2;
    }""".replace("BYTES", "0xB3A2" if pair else "0x9180")
    return asm(text, "=r,r,r", word, factor, result=i32())


def pack_words(words: list[Any]) -> Any:
    two = ir.VectorType.get((2,), i32())
    pairs = [vector.from_elements(two, words[i : i + 2]) for i in range(0, len(words), 2)]
    return array(pairs, (64, 2 * len(words)), _WORDS, is_signed=True)


def unpacked_page(page: jax.Array, tokens: Index) -> tuple[jax.Array, jax.Array]:
    """Returns the latents of a page, zero from token ``tokens`` on, and its rope keys, as the
    kernels unpack them. For the interpreter."""
    latent, rope = dequantize_latent(with_rounded_scales(page), jnp.bfloat16)
    valid = jnp.arange(BLOCK)[:, None] < tokens
    return jnp.where(valid, latent, jnp.zeros_like(latent)), rope


def with_rounded_scales(tokens: jax.Array) -> jax.Array:
    """Rounds the scales of tokens as :func:`store_half` does; used by the interpreter."""
    words = tokens[..., SCALES_AT:ROPE_AT].reshape(*tokens.shape[:-1], -1, 4)
    # Not by a pair of casts, which XLA may elide.
    scales = lax.reduce_precision(lax.bitcast_convert_type(words, jnp.float32), 8, 7)
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    fields = tokens[..., :SCALES_AT], scales, tokens[..., ROPE_AT:]
    return jnp.concatenate([field.reshape(*tokens.shape[:-1], -1) for field in fields], axis=-1)


# ---- the scored kernel ---------------------------------------------------------------------------
#
# Thread ``lane`` has two tokens of an operand of 64 tokens and 64 columns, ``lane // 4`` and
# ``lane // 4 + 8`` of the warp's, and 4 of each 16 columns. Which columns these are is free as long
# as the queries agree: they are those of the 16 bytes that the thread loads, so that nothing moves
# between threads. :func:`permute_queries` has the order. In odd tiles of the values, chunk c is at
# ``c ^ 2`` before the swizzle. Without it, two threads of a quarter of a warp would use the same
# banks. :func:`transposed.store_transposed` undoes it. Loads have no bank conflicts, because a
# token's 656 bytes are 16 more than a multiple of 128.

WARP_TOKENS = 16
QUARTER_BYTES = WARP_TOKENS * TOKEN_BYTES
"""Bytes of a warp's tokens, which are one stage of the scored kernel's ring buffer."""

COLUMNS = 64  # latent columns of an operand
_TILE_BYTES = 64 * 2 * COLUMNS
_EIGHT_WORDS = plgpu.ShapeDtypeStruct((64, 16), jnp.int32, layout=WGMMA)
"""Type of eight words per thread."""
_OPERAND = plgpu.ShapeDtypeStruct((64, COLUMNS), jnp.bfloat16, layout=WGMMA)


def permute_queries(
    q_latent: BFloat16[Array, "B M C"], q_rope: BFloat16[Array, "B M R"]
) -> tuple[BFloat16[Array, "B M C"], BFloat16[Array, "B M R"]]:
    """Permutes the columns of queries to the order of the keys in a scorer's operands. Thread t of
    four has 32 consecutive columns of each group of 128 latent columns, or 16 of the 64 rope
    columns. A matmul instruction takes four of them from each thread, as two pairs."""
    B, M, C = q_latent.shape
    latent = q_latent.reshape(B, M, C // GROUP, 4, 8, 2, 2).transpose(0, 1, 2, 4, 5, 3, 6)
    rope = q_rope.reshape(B, M, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5)
    return latent.reshape(q_latent.shape), rope.reshape(q_rope.shape)


def warp_index() -> jax.Array:
    """Returns the number of the thread's warp in its warpgroup."""

    @inline(returns=INT32)
    def index() -> Registers:
        return scalar(arith.remui(mgpu.utils.warp_idx(), const(4)))

    return index()


def load_words(ring: Ref, stage: jax.Array, unit: int) -> jax.Array:
    """Loads the float8 latents of operand ``unit`` of eight: 16 bytes of each of two tokens. The
    warp's ``stage`` is one of the ring, uint8 [stages, 16, 656]."""

    @inline(REF, SCALAR, returns=_EIGHT_WORDS)
    def load(ring: ir.Value, stage: Registers) -> Registers:
        group, half = divmod(unit, 2)
        address = _token_address(ring, stage)
        return pack_words(_load_rows(address, GROUP * group + 16 * half))

    return load(ring, stage)


def load_factors(ring: Ref, stage: jax.Array, tokens: Index) -> jax.Array:
    """Loads the factors of two tokens, four each, see :func:`factor_of`. Those of tokens from index
    ``tokens`` of the page on are 0."""

    @inline(REF, SCALAR, SCALAR, returns=_EIGHT_WORDS)
    def load(ring: ir.Value, stage: Registers, tokens: Registers) -> Registers:
        warp, lane = warp_and_lane()
        first = arith.addi(arith.shli(warp, const(4)), arith.shrui(lane, const(2)))
        address = _token_address(ring, stage, column_bytes=0)
        return pack_words(
            [
                factor_of(scale, arith.addi(first, const(8 * (i // 4))), tokens)
                for i, scale in enumerate(_load_rows(address, SCALES_AT))
            ]
        )

    return load(ring, stage, tokens)


def when_loaded(words: jax.Array, zero: jax.Array, number: jax.Array) -> jax.Array:
    """Returns ``number`` when the words are in registers; ``zero`` is 0, which the compiler does
    not know. A barrier does not wait for the loads before it, so a copy could overwrite what they
    read."""

    @inline(WGMMA, SCALAR, SCALAR, returns=INT32)
    def add_nothing(words: Registers, zero: Registers, number: Registers) -> Registers:
        all_words = functools.reduce(arith.ori, numbers_of(words))
        return scalar(arith.addi(value_of(number), arith.andi(all_words, value_of(zero))))

    return add_nothing(words, zero, number)


def unpack(words: jax.Array, factors: jax.Array, unit: int) -> jax.Array:
    """Returns operand ``unit``, bfloat16 [64, 64], of its words and the tokens' factors."""

    @inline(WGMMA, WGMMA, returns=_OPERAND)
    def convert(words: Registers, factors: Registers) -> Registers:
        of_words, of_factors = numbers_of(words), numbers_of(factors)
        rows = [
            [
                unpack_pair(each, of_factors[4 * row + unit // 2], pair)
                for each in of_words[4 * row : 4 * row + 4]
                for pair in range(2)
            ]
            for row in range(2)
        ]
        return _operand(rows)

    return convert(words, factors)


def load_rope(ring: Ref, stage: jax.Array) -> jax.Array:
    """Loads the rope keys of a page as an operand, bfloat16 [64, 64]."""

    @inline(REF, SCALAR, returns=_OPERAND)
    def load(ring: ir.Value, stage: Registers) -> Registers:
        address = _token_address(ring, stage)
        first, second = (_load_rows(address, ROPE_AT + 16 * half) for half in range(2))
        return _operand([first[4 * row : 4 * row + 4] + second[4 * row : 4 * row + 4]
                         for row in range(2)])  # fmt: skip

    return load(ring, stage)


def store_values(slot: Ref, operand: jax.Array, unit: int) -> None:
    """Stores operand ``unit`` in a slot for values, [8, 64, 64] in shared memory."""

    @inline(TILES, WGMMA).on(slot, operand)
    def _(slot: ir.Value, operand: Registers) -> None:
        warp, lane = warp_and_lane()
        row, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        odd_tile = arith.shrui(quarter, const(1))
        chunk = arith.xori(
            arith.shli(arith.andi(quarter, const(1)), const(2)), arith.shli(odd_tile, const(1))
        )
        token = arith.addi(arith.shli(warp, const(4)), row)
        offset = arith.addi(
            arith.muli(odd_tile, const(_TILE_BYTES)),
            arith.ori(arith.shli(token, const(7)), arith.shli(arith.xori(chunk, row), const(4))),
        )
        address = arith.addi(shared_address(slot), offset)
        words = words_of(operand)
        group, half = divmod(unit, 2)
        stores = []
        for row_half in range(2):
            pairs = [words[4 * (p // 2) + 2 * (p % 2) + row_half] for p in range(8)]
            for e in range(2):
                flipped = 16 * (2 * half + e)
                offset = 2 * group * _TILE_BYTES + 1024 * row_half
                stores.append((flipped, offset, pairs[4 * e : 4 * e + 4]))
        store_all(address, stores)


def _token_address(ring: ir.Value, stage: Registers, column_bytes: int = 32) -> ir.Value:
    """Returns the address of the thread's first token, at ``column_bytes`` times ``lane % 4``."""
    _, lane = warp_and_lane()
    row, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    address = arith.addi(shared_address(ring), arith.muli(value_of(stage), const(QUARTER_BYTES)))
    address = arith.addi(address, arith.muli(row, const(TOKEN_BYTES)))
    return arith.addi(address, arith.muli(quarter, const(column_bytes)))


def _load_rows(address: ir.Value, offset: int) -> list[ir.Value]:
    """Loads 16 bytes at ``offset`` of each of the thread's two tokens, as eight words."""
    words = []
    for row in range(2):
        text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset + 8 * row * TOKEN_BYTES}];"
        words += asm_numbers(text, "=r,=r,=r,=r,r,~{memory}", address, kind=i32(), count=4)
    return words


def _operand(rows: list[list[Any]]) -> Any:
    """Makes an operand of the eight pairs of each of a thread's two tokens."""
    upper, lower = rows
    flat = [x for p in range(8) for x in (upper[p], lower[p])]
    bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())
    return array([llvm.bitcast(bf16x2, pair) for pair in flat], (64, COLUMNS), WGMMA)
