"""Per-thread code of the scorers: float8 keys from shared memory to operands, and those to values.

A scorer has a page of 64 tokens in shared memory as it is cached, 656 bytes per token. Warp w
handles tokens 16 w to 16 w + 15. In an operand of 64 tokens and 64 columns, thread ``lane`` has two
tokens, ``lane // 4`` and ``lane // 4 + 8`` of the warp's, and 4 of each 16 columns. Which columns
these are is free as long as the queries agree: they are those of the 16 bytes that the thread
loads, so that nothing moves between threads. :func:`permute_queries` has the order.

The same registers are stored for the other matmul, as tokens by columns in tiles of [64, 64] with a
128-byte swizzle: the 16-byte chunk c of a token is stored at chunk ``c ^ token % 8`` of its row. In
odd tiles chunk c is at ``c ^ 2`` before that. Without it, two threads of a quarter of a warp would
use the same banks. :func:`few_queries_registers.store` undoes it.

Loads have no bank conflicts, because a token's 656 bytes are 16 more than a multiple of 128.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    i32,
    inline,
    scalar,
    shared_address,
    warp_and_lane,
    word,
)
from pallas_kernels.hopper.tiles import TILES, WGMMA
from pallas_kernels.mla_decode.float8_cache import GROUP, ROPE_AT, SCALES_AT, TOKEN_BYTES
from pallas_kernels.mla_decode.float8_registers import (
    factor_of,
    pack_words,
    store_all,
    unpack_pair,
    words_of,
)

WARP_TOKENS = 16
PIECE_BYTES = WARP_TOKENS * TOKEN_BYTES
"""Bytes of a warp's tokens, which are one stage of the ring buffer."""

COLUMNS = 64
"""Latent columns of an operand."""

_TILE_BYTES = 64 * 2 * COLUMNS
_WORDS = plgpu.ShapeDtypeStruct((64, 16), jnp.int32, layout=WGMMA)
"""Type of eight words per thread."""
_OPERAND = plgpu.ShapeDtypeStruct((64, COLUMNS), jnp.bfloat16, layout=WGMMA)


def permute_queries(
    q_latent: BFloat16[Array, "B M C"], q_rope: BFloat16[Array, "B M R"]
) -> tuple[BFloat16[Array, "B M C"], BFloat16[Array, "B M R"]]:
    """Permutes the columns of queries to the order of the keys in a scorer's operands.

    Thread t of four has 32 consecutive columns of each group of 128 latent columns, or 16 of the 64
    rope columns. A matmul instruction takes four of them from each thread, as two pairs.
    """
    B, M, C = q_latent.shape
    latent = q_latent.reshape(B, M, C // GROUP, 4, 8, 2, 2).transpose(0, 1, 2, 4, 5, 3, 6)
    rope = q_rope.reshape(B, M, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5)
    return latent.reshape(q_latent.shape), rope.reshape(q_rope.shape)


def warp_index() -> jax.Array:
    """Returns the number of the thread's warp in its warpgroup."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def index() -> Any:
        return scalar(arith.remui(mgpu.utils.warp_idx(), const(4)))

    return index()


def load_words(ring: Any, stage: jax.Array, unit: int) -> jax.Array:
    """Loads the float8 latents of operand ``unit`` of eight: 16 bytes of each of two tokens.

    Args:
      ring: uint8 [stages, 16, 656] in shared memory.
      stage: the stage of this thread's warp.
    """

    @inline(REF, SCALAR, returns=_WORDS)
    def load(ring: Any, stage: Any) -> Any:
        group, half = divmod(unit, 2)
        address = _token_address(ring, stage)
        return pack_words(_load_rows(address, GROUP * group + 16 * half))

    return load(ring, stage)


def load_factors(ring: Any, stage: jax.Array, tokens: jax.Array) -> jax.Array:
    """Loads the factors of two tokens, four each, see :func:`float8_registers.factor_of`.

    Those of tokens from index ``tokens`` of the page on are 0.
    """

    @inline(REF, SCALAR, SCALAR, returns=_WORDS)
    def load(ring: Any, stage: Any, tokens: Any) -> Any:
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
    """Returns ``number``, when the words are in registers.

    A barrier does not wait for the loads before it, and a copy that waits for the barrier could
    overwrite what they have not read yet.

    Args:
      zero: 0, which the compiler does not know.
    """

    @inline(WGMMA, SCALAR, SCALAR, returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def add_nothing(words: Any, zero: Any, number: Any) -> Any:
        all_words = functools.reduce(arith.ori, words_of(words))
        return scalar(arith.addi(word(number), arith.andi(all_words, word(zero))))

    return add_nothing(words, zero, number)


def unpack(words: jax.Array, factors: jax.Array, unit: int) -> jax.Array:
    """Returns operand ``unit``, bfloat16 [64, 64], of its words and the tokens' factors."""

    @inline(WGMMA, WGMMA, returns=_OPERAND)
    def convert(words: Any, factors: Any) -> Any:
        words, factors = words_of(words), words_of(factors)
        rows = [
            [
                unpack_pair(each, factors[4 * row + unit // 2], pair)
                for each in words[4 * row : 4 * row + 4]
                for pair in range(2)
            ]
            for row in range(2)
        ]
        return _operand(rows)

    return convert(words, factors)


def load_rope(ring: Any, stage: jax.Array) -> jax.Array:
    """Loads the rope keys of a page as an operand, bfloat16 [64, 64]."""

    @inline(REF, SCALAR, returns=_OPERAND)
    def load(ring: Any, stage: Any) -> Any:
        address = _token_address(ring, stage)
        first, second = (_load_rows(address, ROPE_AT + 16 * half) for half in range(2))
        return _operand([first[4 * row : 4 * row + 4] + second[4 * row : 4 * row + 4]
                         for row in range(2)])  # fmt: skip

    return load(ring, stage)


def store_values(slot: Any, operand: jax.Array, unit: int) -> None:
    """Stores operand ``unit`` in a slot for values, [8, 64, 64] in shared memory."""

    @inline(TILES, WGMMA)
    def store(slot: Any, operand: Any) -> None:
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
        words = [llvm.bitcast(i32(), pair) for pair in operand.registers.flat]
        group, half = divmod(unit, 2)
        stores = []
        for row_half in range(2):
            pairs = [words[4 * (p // 2) + 2 * (p % 2) + row_half] for p in range(8)]
            for e in range(2):
                flipped = 16 * (2 * half + e)
                offset = 2 * group * _TILE_BYTES + 1024 * row_half
                stores.append((flipped, offset, pairs[4 * e : 4 * e + 4]))
        store_all(address, stores)

    store(slot, operand)


def _token_address(ring: Any, stage: Any, column_bytes: int = 32) -> Any:
    """Returns the address of the thread's first token, at ``column_bytes`` times ``lane % 4``."""
    _, lane = warp_and_lane()
    row, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    address = arith.addi(shared_address(ring), arith.muli(word(stage), const(PIECE_BYTES)))
    address = arith.addi(address, arith.muli(row, const(TOKEN_BYTES)))
    return arith.addi(address, arith.muli(quarter, const(column_bytes)))


def _load_rows(address: Any, offset: int) -> list[Any]:
    """Loads 16 bytes at ``offset`` of each of the thread's two tokens, as eight words."""
    four = llvm.StructType.get_literal([i32()] * 4)
    words = []
    for row in range(2):
        text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset + 8 * row * TOKEN_BYTES}];"
        loaded = asm(text, "=r,=r,=r,=r,r,~{memory}", address, result=four, effects=True)
        words += [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]
    return words


def _operand(rows: list[list[Any]]) -> Any:
    """Makes an operand of the eight pairs of each of a thread's two tokens."""
    upper, lower = rows
    flat = [x for p in range(8) for x in (upper[p], lower[p])]
    bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())
    return array([llvm.bitcast(bf16x2, pair) for pair in flat], (64, COLUMNS), WGMMA)
