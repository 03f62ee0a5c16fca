"""Per-thread code of sparse_mla_decode's producer: looks tokens up and copies them.

A key block has 64 tokens, and warp w handles tokens 16 w to 16 w + 15. Lane l has the index of
token 16 w + l % 16, in one register. TMA cannot gather rows on Hopper, so each thread copies 16
bytes at a time by cp.async: eight threads copy 128 bytes of a token, which are one row of a
swizzled tile. Copies of tokens that do not exist read nothing and write zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    asm_numbers,
    const,
    i32,
    i64,
    inline,
    item,
    scalar,
    shared_address,
    value_of,
    warp_and_lane,
)
from pallas_kernels.mla_decode.float8_cache import (
    GROUP,
    LATENT,
    SCALES_AT,
    TOKEN_BYTES,
    dequantize_latent,
)
from pallas_kernels.mla_decode.float8_registers import pack_words, with_rounded_scales

PER_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)  # layout of one number per thread
THREADS = 128
_TOKENS = 16  # per warp and key block
_PASSES = 4  # a warp copies 128 bytes of four tokens per instruction
_TILE_BYTES = 8 * 128  # of a swizzled tile: eight tokens, 64 columns
_TILES = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
_NUMBERS = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=PER_THREAD)
_PAIRS = 8  # of the 16 tokens of a warp
_WORDS = plgpu.ShapeDtypeStruct((64, 8 * _PAIRS), jnp.int32, layout=plgpu.Layout.WGMMA)


def load_indices(indices: Any, block: jax.Array) -> jax.Array:
    """Loads each thread's index of key block ``block`` of all queries, from [queries, indices]."""

    @inline(REF, SCALAR, returns=_NUMBERS)
    def load(indices: Any, block: Any) -> Any:
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(indices))
        token = arith.addi(arith.muli(value_of(block), const(4 * _TOKENS)), _token())
        return _number(_load(base, token))

    return load(indices, block)


def find_slots(tables: Any, sequence: jax.Array, indices: jax.Array, page: int, pages: int) -> Any:
    """Returns ``page number * page + slot`` of each thread's token, or -1 if its index, from
    :func:`load_indices`, is. Entries of ``tables`` [B, max_pages] are clipped to the pool of
    ``pages``."""
    max_pages = tables.shape[1]

    @inline(REF, SCALAR, PER_THREAD, returns=_NUMBERS)
    def find(tables: Any, sequence: Any, indices: Any) -> Any:
        index = _only(indices)
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(tables))
        entry = arith.minui(arith.divui(index, const(page)), const(max_pages - 1))
        entry = arith.addi(arith.muli(value_of(sequence), const(max_pages)), entry)
        number = arith.maxsi(arith.minsi(_load(base, entry), const(pages - 1)), const(0))
        slot = arith.addi(arith.muli(number, const(page)), arith.remui(index, const(page)))
        exists = arith.cmpi(arith.CmpIPredicate.sge, index, const(0))
        return _number(arith.select(exists, slot, const(-1)))

    return find(tables, jnp.asarray(sequence, jnp.int32), indices)


def prefetch_tokens(tokens: Any, slots: jax.Array) -> None:
    """Prefetches the tokens [slots, width] in these slots into the L2 cache, one instruction
    each."""
    size = tokens.shape[1] * jnp.dtype(tokens.dtype).itemsize

    @inline(REF, PER_THREAD)
    def prefetch(tokens: Any, slots: Any) -> None:
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(tokens))
        _, lane = warp_and_lane()
        text = f"""{{
            .reg .b64 at;
            .reg .pred there;
            setp.ge.s32 there, $0, 0;
            setp.lt.and.s32 there, $1, {_TOKENS}, there;
            mad.wide.s32 at, $0, {size}, $2;
            @there cp.async.bulk.prefetch.L2.global [at], {size};
        }}"""
        asm(text, "r,r,l", _only(slots), lane, base, effects=True)

    prefetch(tokens, slots)


def write_penalties(penalties: Any, slots: jax.Array) -> None:
    """Stores what is added to each token's scores, float32 [64] in shared memory: 0, or -inf if the
    token does not exist."""

    @inline(REF, PER_THREAD)
    def write(penalties: Any, slots: Any) -> None:
        at = arith.addi(shared_address(penalties), arith.shli(_token(), const(2)))
        text = """{
            .reg .b32 penalty;
            .reg .pred there;
            setp.ge.s32 there, $1, 0;
            selp.b32 penalty, 0, 0xFF800000, there;
            st.shared.b32 [$0], penalty;
        }"""
        asm(text, "r,r", at, _only(slots), effects=True)

    write(penalties, slots)


def copy_columns(tile: Any, tokens: Any, slots: jax.Array, first: int) -> None:
    """Starts copying columns of a key block, from byte ``first`` of a token on, to a swizzled
    bfloat16 tile [64, columns]. :func:`arrive_when_copied` signals their arrival."""
    columns, token_bytes = tile.shape[1], tokens.shape[1] * jnp.dtype(tokens.dtype).itemsize
    tiles = columns // 64

    @inline(_TILES, REF, PER_THREAD)
    def copy(tile: Any, tokens: Any, slots: Any) -> None:
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(tokens))
        warp, lane = warp_and_lane()
        token, chunk = arith.shrui(lane, const(3)), arith.andi(lane, const(7))
        row = arith.addi(
            arith.muli(warp, const(2 * tiles * _TILE_BYTES)), arith.shli(token, const(7))
        )
        swizzled = arith.shli(arith.xori(chunk, token), const(4))
        target = arith.addi(shared_address(tile), arith.addi(row, swizzled))
        text = [
            "{ .reg .b32 lane, slot, size, even, odd; .reg .b64 from; .reg .pred there;",
            "mov.b32 even, $0; xor.b32 odd, $0, 64;",
        ]
        for i in range(_PASSES):  # tokens 4 i + lane / 8 of the warp
            text.append(f"""
                add.s32 lane, $2, {4 * i};
                shfl.sync.idx.b32 slot, $1, lane, 0x1f, 0xffffffff;
                setp.ge.s32 there, slot, 0;
                selp.b32 size, 16, 0, there;
                max.s32 slot, slot, 0;
                mad.wide.s32 from, slot, {token_bytes}, $3;""")
            for j in range(tiles):
                to = (i // 2 * tiles + j) * _TILE_BYTES + i % 2 * 512
                text.append(f"""
                cp.async.cg.shared.global.L2::256B [{("even", "odd")[i % 2]} + {to}],
                    [from + {first + 128 * j}], 16, size;""")
        text.append("}")
        source = arith.addi(base, arith.extui(i64(), arith.shli(chunk, const(4))))
        operands = target, _only(slots), token, source
        asm("\n".join(text), "r,r,r,l,~{memory}", *operands, effects=True)

    copy(tile, tokens, slots)


def fetch_half(tokens: Any, slots: jax.Array, half: int) -> tuple[jax.Array, jax.Array]:
    """Loads half of the latents (256 columns) of a float8 key block, and their scales.

    :func:`float8_registers.store_half` then scales them and stores them as bfloat16. Its module has
    the order of a thread's data. The scales of tokens that do not exist are 0, which makes their
    latents 0: a float8 that is unpacked is always finite.

    Args:
      tokens: uint8 [slots, 656] in global memory.
      slots: each thread's token, see the module.
    """

    @inline(REF, PER_THREAD, returns=(_WORDS, _NUMBERS))
    def fetch(tokens: Any, slots: Any) -> Any:
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(tokens))
        _, lane = warp_and_lane()
        slot = _only(slots)
        existing = arith.maxsi(slot, const(0))
        odd = arith.andi(arith.shrui(lane, const(2)), const(1))
        column = arith.ori(
            arith.shli(arith.shrui(lane, const(3)), const(6)),
            arith.shli(arith.andi(lane, const(3)), const(4)),
        )
        words = []
        text = f"""{{
            .reg .b32 slot;
            .reg .b64 at;
            shfl.sync.idx.b32 slot, $4, $5, 0x1f, 0xffffffff;
            mad.wide.s32 at, slot, {TOKEN_BYTES}, $6;
            ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [at + {half * LATENT // 2}];
        }}"""
        column_base = arith.addi(base, arith.extui(i64(), column))
        for i in range(_PAIRS):
            source = arith.addi(odd, const(2 * i))
            operands = existing, source, column_base
            words += asm_numbers(text, "=r,=r,=r,=r,r,r,l", *operands, kind=i32(), count=4)
        # One of the 32 scales (16 tokens, 2 groups) per thread.
        group = arith.shli(arith.shrui(lane, const(4)), const(2))
        group_base = arith.addi(base, arith.extui(i64(), group))
        offset = SCALES_AT + half * 4 * (LATENT // 2 // GROUP)
        text = f"""{{
            .reg .b64 at;
            .reg .pred there;
            setp.ge.s32 there, $1, 0;
            mad.wide.s32 at, $1, {TOKEN_BYTES}, $2;
            mov.b32 $0, 0;
            @there ld.global.L1::no_allocate.b32 $0, [at + {offset}];
        }}"""
        scale = asm(text, "=&r,r,l", slot, group_base, result=i32(), effects=True)
        return pack_words(words), _number(scale)

    return fetch(tokens, slots)


def arrive_when_copied(words: Any, barrier: jax.Array) -> None:
    """Arrives at a barrier of an array in shared memory in every thread, when the copies that the
    thread has started are done."""

    @inline(REF, SCALAR)
    def arrive(words: Any, barrier: Any) -> None:
        at = arith.addi(shared_address(words), arith.shli(value_of(barrier), const(3)))
        asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r,~{memory}", at, effects=True)

    arrive(words, jnp.asarray(barrier, jnp.int32))


def opaque_zero() -> jax.Array:
    """Returns zero, which the compiler does not know, and which it must not move out of a loop."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def make() -> Any:
        zero = asm("mov.b32 $0, 0;", "=r", result=i32(), effects=True)
        return scalar(zero)

    return make()


def interpreted_tokens(tokens: Any, slots: jax.Array) -> jax.Array:
    """Returns the columns of the tokens in these slots, zeros for -1; used by the interpreter."""
    gathered = tokens[...][jnp.maximum(slots, 0)]
    if tokens.dtype == jnp.uint8:
        latent_and_rope = dequantize_latent(with_rounded_scales(gathered), jnp.bfloat16)
        gathered = jnp.concatenate(latent_and_rope, axis=-1)
    return jnp.where((slots >= 0)[:, None], gathered, jnp.zeros_like(gathered))


def interpreted_slots(
    indices: Any, tables: Any, block: jax.Array, sequence: jax.Array, page: int, pages: int
) -> jax.Array:
    """Returns what :func:`find_slots` does, in the order of the tokens, [64]."""
    index = indices[...].reshape(-1, 4 * _TOKENS)[block]
    table = tables[...][sequence]
    number = table[jnp.clip(index // page, 0, len(table) - 1)]
    slots = jnp.clip(number, 0, pages - 1) * page + index % page
    return jnp.where(index < 0, -1, slots)


def _token() -> Any:
    """Returns the index of the thread's token in a key block."""
    warp, lane = warp_and_lane()
    return arith.addi(arith.muli(warp, const(_TOKENS)), arith.andi(lane, const(_TOKENS - 1)))


def _load(base: Any, index: Any) -> Any:
    """Loads number ``index`` of an array, below 2^32. Bytes are counted in 64 bits: 4 sequences
    of 131,072 tokens have 2^30 indices."""
    two = const(2, 64)
    address = arith.addi(base, arith.shli(arith.extui(i64(), index), two))
    return asm("ld.global.b32 $0, [$1];", "=r,l", address, result=i32(), effects=True)


def _number(register: Any) -> Any:
    register = vector.broadcast(ir.VectorType.get((1,), i32()), register)
    return array([register], (THREADS,), PER_THREAD, is_signed=True)


def _only(numbers: Any) -> Any:
    return item(numbers.registers.item(), 0)
