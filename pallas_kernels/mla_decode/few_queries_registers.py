"""What threads of the few-rows kernel do to their own registers and to single words of memory.

Arrays are transposed: tokens or latent columns down a WGMMA tile, query rows across it. Of 64 x 8
thread ``lane`` of a warp holds rows ``lane // 4`` and the one 8 further down of the warp's 16, and
columns ``2 * (lane % 4)`` and the next. On a machine without such threads each function does the
same to whole arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.mla_decode.float8_cache import LATENT
from pallas_kernels.mla_decode.kernel_parts import WGMMA
from pallas_kernels.mosaic_ir import (
    REF,
    SCALAR,
    any_thread,
    array,
    asm,
    const,
    i32,
    i64,
    inline,
    instruction,
    warp_and_lane,
)

COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""One number for each column of a WGMMA tile, here a query row: in every thread that holds it."""
_TILES = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
_TILE_BYTES = 8 * 128
_JOINS: dict[str, Any] = {"max": arith.maximumf, "add": arith.addf}


def column_vector(N: int, value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((N,), value, jnp.float32), COLUMN)


def put_transposed(target: Any, p: jax.Array, *, gpu: bool) -> None:
    """bfloat16 [64, N] to [N, 64] in shared memory as wgmma takes it."""
    if not gpu:
        target[...] = p.T
        return

    @inline(_TILES, WGMMA)
    def put(target: Any, p: Any):
        warp, lane = warp_and_lane()
        row, matrix = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
        # Matrices of 8 x 8 in the registers' order: of eight query rows the warp's first eight
        # tokens, then its other eight, which are a row's 16 bytes.
        piece = arith.ori(arith.shli(warp, const(1)), arith.andi(matrix, const(1)))
        piece = arith.shli(arith.xori(piece, row), const(4))
        tile = arith.muli(arith.shrui(matrix, const(1)), const(_TILE_BYTES))
        at = arith.addi(_shared(target), arith.addi(tile, arith.shli(row, const(7))))
        at = arith.addi(at, piece)
        words = [llvm.bitcast(i32(), pair) for pair in p.registers.flat]
        for first in range(0, len(words), 4):
            some = words[first : first + 4]
            names = ", ".join(f"${1 + i}" for i in range(len(some)))
            text = (
                f"stmatrix.sync.aligned.m8n8.x{len(some)}.trans.shared.b16"
                f" [$0 + {first // 2 * _TILE_BYTES}], {{{names}}};"
            )
            asm(text, ",".join(["r"] * (1 + len(some))) + ",~{memory}", at, *some, effects=True)

    put(target, p)


def any_above(p: jax.Array, bound: float, *, gpu: bool) -> jax.Array:
    """Whether any of ``p`` is above the bound; the warpgroup's threads meet."""
    if not gpu:
        return jnp.any(p > bound)

    @inline(WGMMA, returns=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR))
    def vote(p: Any):
        f32 = ir.F32Type.get()
        limit = arith.constant(f32, ir.FloatAttr.get(f32, bound))
        values = [_item(pair, i) for pair in p.registers.flat for i in range(2)]
        compared = [arith.cmpf(arith.CmpFPredicate.OGT, value, limit) for value in values]
        above: Any = functools.reduce(arith.ori, compared)
        return mgpu.FragmentedArray.splat(any_thread(above), (), is_signed=False)

    return vote(p)


def over_rows(x: jax.Array, kind: str, *, gpu: bool) -> jax.Array:
    """The "max" or "add" of each column of [64, N], so far as the thread holds it: over_threads
    does the rest."""
    if not gpu:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)

    @inline(WGMMA, returns=_vector(x.shape[1]))
    def reduce(x: Any):
        join = _JOINS[kind]
        rows = _batched(x.registers.flat, 2)
        found = [_pair(*(join(_item(a, i), _item(b, i)) for i in range(2))) for a, b in rows]
        return array(found, (x.shape[1],), COLUMN)

    return reduce(x)


def over_threads(x: jax.Array, kind: str, scratch: Any, *, gpu: bool) -> jax.Array:
    """The "max" or "add" of what the threads of a column found.

    They must have met since ``scratch``, 4 N float32 in shared memory, was last read.
    """
    if not gpu:
        return x
    (N,) = x.shape

    @inline(COLUMN, REF, returns=_vector(N))
    def reduce(x: Any, scratch: Any):
        join = _JOINS[kind]
        warp, lane = _warp_and_lane()
        column = arith.shli(arith.andi(lane, const(3)), const(3))
        base = arith.addi(_shared(scratch), column)
        at = arith.addi(base, arith.muli(warp, const(4 * N)))
        for j, pair in enumerate(x.registers.flat):
            both = [_item(pair, i) for i in range(2)]
            for distance in (4, 8, 16):
                both = [join(value, mgpu.utils.shfl_bfly(value, distance)) for value in both]
            # Eight threads write the same.
            text = f"st.shared.v2.f32 [$0 + {32 * j}], {{$1, $2}};"
            asm(text, "r,f,f,~{memory}", at, *both, effects=True)
        mgpu.utils.warpgroup_barrier()
        found = []
        for j in range(N // 8):
            warps = [_load_pair(base, 4 * N * w + 32 * j) for w in range(4)]
            both = ([pair[i] for pair in warps] for i in range(2))
            found.append(_pair(*(join(join(a, b), join(c, d)) for a, b, c, d in both)))
        return array(found, (N,), COLUMN)

    return reduce(x, scratch)


def hand_over(pieces: Sequence[Any], acc: jax.Array, *vectors: jax.Array) -> None:
    """Lays [512, N] and vectors [N] into a block's pieces as threads hold them: 64
    latent columns of at most 32 rows where those of the block were, vectors for rope keys."""

    @inline([_TILES] * len(pieces), WGMMA, *(COLUMN for _ in vectors))
    def write(pieces: Any, acc: Any, *vectors: Any):
        lone = [pair for each in vectors for pair in each.registers.flat]
        for pairs, places in zip([*_tiles(acc), lone], _places(pieces), strict=True):
            for (address, offset), some in zip(places, _batched(pairs, 2), strict=False):
                words = [_item(pair, i) for pair in some for i in range(2)]
                asm(f"st.shared.v4.f32 [$0 + {offset}], {{$1, $2, $3, $4}};",
                    "r,f,f,f,f,~{memory}", address, *words, effects=True)  # fmt: skip

    write(list(pieces), acc, *vectors)


def taken_vectors(pieces: Sequence[Any], N: int, count: int) -> tuple[jax.Array, ...]:
    """The vectors [N] that another warpgroup's hand_over left."""

    @inline([_TILES] * len(pieces), returns=(_vector(N),) * count)
    def read(pieces: Any):
        pairs = _load_fours(_places(pieces)[-1], count * (N // 8))
        return tuple(array(some, (N,), COLUMN) for some in _batched(pairs, N // 8))

    return read(list(pieces))


def add_taken(
    pieces: Sequence[Any], acc: jax.Array, kept: jax.Array, added: jax.Array
) -> jax.Array:
    """``acc * kept`` and what another warpgroup's hand_over left times ``added``, 64 rows after the
    other: registers hold only one [512, N]."""
    N = acc.shape[1]
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=WGMMA)

    @inline([_TILES] * len(pieces), WGMMA, COLUMN, COLUMN, returns=result)
    def add(pieces: Any, acc: Any, kept: Any, added: Any):
        found = []
        for tile, (own, place) in enumerate(zip(_tiles(acc), _places(pieces), strict=False)):
            if tile % 2 == 0:
                instruction("bar.warp.sync 0xffffffff;")  # ptxas would load all before it adds any
            for n, (a, b) in enumerate(zip(own, _load_fours(place, N // 4), strict=True)):
                factors = kept.registers.flat[n // 2], added.registers.flat[n // 2]
                found.append(math.fma(a, factors[0], arith.mulf(b, factors[1])))
        return array(found, (LATENT, N), WGMMA)

    return add(list(pieces), acc, kept, added)


def store(out: Any, lse: Any, acc: jax.Array, of_rows: jax.Array, *, gpu: bool) -> None:
    """[512, N] of float32 or bfloat16 to rows [N, 512] in global memory; the rows' lse [N]."""
    if not gpu:
        out[...] = acc.T
        lse[...] = of_rows
        return
    N, bytes_ = acc.shape[1], jnp.dtype(acc.dtype).itemsize

    @inline(REF, REF, WGMMA, COLUMN)
    def write(out: Any, lse: Any, acc: Any, of_rows: Any):
        (stride, _), _ = ir.MemRefType(out.type).get_strides_and_offset()
        warp, lane = _warp_and_lane()
        high, low = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(out))
        # Of bfloat16 eight rows by eight columns are transposed first: a thread then has two
        # columns of one row, of float32 one column of two rows.
        row, column = (high, arith.shli(low, const(1))) if bytes_ == 2 else (
            arith.shli(low, const(1)), high)  # fmt: skip
        column = arith.addi(column, arith.shli(warp, const(4)))
        offset = arith.addi(arith.muli(row, const(stride)), column)
        at = arith.addi(base, arith.extui(i64(), arith.muli(offset, const(bytes_))))
        for number, pair in enumerate(acc.registers.flat):
            m, (j, h) = number // (N // 4), divmod(number % (N // 4), 2)
            first = (8 * j * stride + 64 * m + 8 * h) * bytes_
            if bytes_ == 2:
                text = f"""{{
                    .reg .b32 t;
                    movmatrix.sync.aligned.m8n8.trans.b16 t, $1;
                    st.global.b32 [$0 + {first}], t;
                }}"""
                asm(text, "l,r,~{memory}", at, llvm.bitcast(i32(), pair), effects=True)
                continue
            for i in range(2):
                text = f"st.global.f32 [$0 + {first + i * stride * bytes_}], $1;"
                asm(text, "l,f,~{memory}", at, _item(pair, i), effects=True)
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(lse))
        at = arith.addi(base, arith.extui(i64(), arith.shli(low, const(3))))
        thread = arith.ori(warp, high)
        for j, pair in enumerate(of_rows.registers.flat):
            text = f"""{{
                .reg .pred p;
                setp.eq.s32 p, $1, 0;
                @p st.global.v2.f32 [$0 + {32 * j}], {{$2, $3}};
            }}"""
            asm(text, "l,r,f,f,~{memory}", at, thread, _item(pair, 0), _item(pair, 1),
                effects=True)  # fmt: skip

    write(out, lse, acc, of_rows)


def _vector(N: int) -> Any:
    return plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=COLUMN)


def _thread() -> Any:
    """Of the warpgroup's; read anew, where a row ends, rather than all that follows from it kept
    in registers meanwhile."""
    thread = asm("mov.u32 $0, %tid.x;", "=r", result=i32(), effects=True)
    return arith.andi(thread, const(127))


def _warp_and_lane() -> tuple[Any, Any]:
    thread = _thread()
    return arith.shrui(thread, const(5)), arith.andi(thread, const(31))


def _shared(ref: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def _item(pair: Any, i: int) -> Any:
    return vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _pair(first: Any, second: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [first, second])


def _load_pair(base: Any, offset: int) -> list[Any]:
    f32 = ir.F32Type.get()
    two = llvm.StructType.get_literal([f32] * 2)
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    loaded = asm(text, "=f,=f,r,~{memory}", base, result=two, effects=True)
    return [llvm.extractvalue(f32, loaded, [i]) for i in range(2)]


def _batched(values: Any, count: int) -> list[list[Any]]:
    values = list(values)
    return [values[i : i + count] for i in range(0, len(values), count)]


def _tiles(acc: Any) -> list[list[Any]]:
    """A thread's pairs of each 64 latent columns."""
    return _batched(acc.registers.flat, acc.registers.size * 64 // LATENT)


def _load_fours(places: Sequence[Any], pairs: int) -> list[Any]:
    f32 = ir.F32Type.get()
    four = llvm.StructType.get_literal([f32] * 4)
    found = []
    for address, offset in places[: pairs // 2]:
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        loaded = asm(text, "=f,=f,=f,=f,r,~{memory}", address, result=four, effects=True)
        words = [llvm.extractvalue(f32, loaded, [i]) for i in range(4)]
        found += [_pair(*words[:2]), _pair(*words[2:])]
    return found


def _places(pieces: Sequence[Any]) -> list[Any]:
    """For each 64 columns of a block where a thread's fours of float32 go: addresses, offsets."""
    thread = _thread()
    found = []
    for ref in pieces:
        at = arith.addi(_shared(ref), arith.shli(thread, const(4)))
        _, tiles, _, _ = ir.MemRefType(ref.type).shape
        for tile in range(tiles):
            found.append([(at, 8 * tile * _TILE_BYTES + 2048 * i) for i in range(4)])
    return found
