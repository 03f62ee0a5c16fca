"""Per-thread code of the kernel for few query rows: reductions, shared memory and global stores.

Arrays are transposed: the rows of a WGMMA tile are tokens or latent columns, its columns are query
rows. In a tile of 64 x 8, each warp has 16 rows. Its thread ``lane`` holds rows ``lane // 4`` and
``lane // 4 + 8`` of them, and columns ``2 * (lane % 4)`` and the next one. With ``gpu=False``, in
the interpreter, each function operates on whole arrays instead.
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
from jaxlib.mlir.dialects import arith, llvm, math

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    float_pair,
    i32,
    i64,
    inline,
    instruction,
    item,
    shared_address,
    warp_and_lane,
)
from pallas_kernels.hopper.tiles import COLUMN, TILES, WGMMA
from pallas_kernels.hopper.warpgroup import any_thread
from pallas_kernels.mla_decode.float8_cache import LATENT

_TILE_BYTES = 8 * 128
_REDUCTIONS: dict[str, Any] = {"max": arith.maximumf, "add": arith.addf}


def column_vector(N: int, value: float) -> jax.Array:
    """Returns a vector [N] of ``value`` in the COLUMN layout."""
    return plgpu.layout_cast(jnp.full((N,), value, jnp.float32), COLUMN)


def put_transposed(target: Any, p: jax.Array, *, gpu: bool) -> None:
    """Stores bfloat16 ``p`` [64, N], transposed to [N, 64], in shared memory as wgmma requires."""
    if not gpu:
        target[...] = p.T
        return

    @inline(TILES, WGMMA)
    def write(target: Any, p: Any):
        warp, lane = warp_and_lane()
        row, matrix = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
        # 8 x 8 matrices in the order of the registers: for each eight query rows, the warp's first
        # eight tokens, then its other eight. Eight tokens are 16 bytes of a stored row.
        chunk = arith.ori(arith.shli(warp, const(1)), arith.andi(matrix, const(1)))
        chunk = arith.shli(arith.xori(chunk, row), const(4))
        tile = arith.muli(arith.shrui(matrix, const(1)), const(_TILE_BYTES))
        at = arith.addi(shared_address(target), arith.addi(tile, arith.shli(row, const(7))))
        at = arith.addi(at, chunk)
        words = [llvm.bitcast(i32(), pair) for pair in p.registers.flat]
        for first in range(0, len(words), 4):
            some = words[first : first + 4]
            names = ", ".join(f"${1 + i}" for i in range(len(some)))
            text = (
                f"stmatrix.sync.aligned.m8n8.x{len(some)}.trans.shared.b16"
                f" [$0 + {first // 2 * _TILE_BYTES}], {{{names}}};"
            )
            asm(text, ",".join(["r"] * (1 + len(some))) + ",~{memory}", at, *some, effects=True)

    write(target, p)


def any_above(p: jax.Array, bound: float, *, gpu: bool) -> jax.Array:
    """Returns whether any element of ``p`` exceeds ``bound``. A barrier of the warpgroup."""
    if not gpu:
        return jnp.any(p > bound)

    @inline(WGMMA, returns=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR))
    def vote(p: Any):
        f32 = ir.F32Type.get()
        limit = arith.constant(f32, ir.FloatAttr.get(f32, bound))
        values = [item(pair, i) for pair in p.registers.flat for i in range(2)]
        compared = [arith.cmpf(arith.CmpFPredicate.OGT, value, limit) for value in values]
        above: Any = functools.reduce(arith.ori, compared)
        return mgpu.FragmentedArray.splat(any_thread(above), (), is_signed=False)

    return vote(p)


def reduce_rows(x: jax.Array, kind: str, *, gpu: bool) -> jax.Array:
    """Reduces the columns of ``x`` [64, N] over the rows that a thread holds.

    :func:`reduce_threads` completes the reduction. ``kind`` is "max" or "add".
    """
    if not gpu:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)

    @inline(WGMMA, returns=_vector(x.shape[1]))
    def reduce(x: Any):
        combine = _REDUCTIONS[kind]
        rows = _batched(x.registers.flat, 2)
        results = [
            float_pair(*(combine(item(a, i), item(b, i)) for i in range(2))) for a, b in rows
        ]
        return array(results, (x.shape[1],), COLUMN)

    return reduce(x)


def reduce_threads(x: jax.Array, kind: str, scratch: Any, *, gpu: bool) -> jax.Array:
    """Reduces per-thread results of :func:`reduce_rows` over the threads of each column.

    Args:
      scratch: 4 N float32 in shared memory. A barrier of the warpgroup must separate this call
        from the last read of it.
    """
    if not gpu:
        return x
    (N,) = x.shape

    @inline(COLUMN, REF, returns=_vector(N))
    def reduce(x: Any, scratch: Any):
        combine = _REDUCTIONS[kind]
        warp, lane = _warp_and_lane()
        column = arith.shli(arith.andi(lane, const(3)), const(3))
        base = arith.addi(shared_address(scratch), column)
        at = arith.addi(base, arith.muli(warp, const(4 * N)))
        for j, pair in enumerate(x.registers.flat):
            both = [item(pair, i) for i in range(2)]
            for distance in (4, 8, 16):
                both = [combine(value, mgpu.utils.shfl_bfly(value, distance)) for value in both]
            # Eight threads write the same value.
            text = f"st.shared.v2.f32 [$0 + {32 * j}], {{$1, $2}};"
            asm(text, "r,f,f,~{memory}", at, *both, effects=True)
        mgpu.utils.warpgroup_barrier()
        results = []
        for j in range(N // 8):
            warps = [_load_two(base, 4 * N * w + 32 * j) for w in range(4)]
            both = ([pair[i] for pair in warps] for i in range(2))
            results.append(
                float_pair(*(combine(combine(a, b), combine(c, d)) for a, b, c, d in both))
            )
        return array(results, (N,), COLUMN)

    return reduce(x, scratch)


def write_handover(stages: Sequence[Any], acc: jax.Array, *vectors: jax.Array) -> None:
    """Stores ``acc`` [512, N] and vectors [N] in a key block's stages, in the threads' own order.

    ``acc`` of every 64 latent columns overwrites those columns of the block, and the vectors
    overwrite its rope keys.
    """

    @inline([TILES] * len(stages), WGMMA, *(COLUMN for _ in vectors))
    def write(stages: Any, acc: Any, *vectors: Any):
        vector_pairs = [pair for each in vectors for pair in each.registers.flat]
        for pairs, addresses in zip([*_tiles(acc), vector_pairs], _addresses(stages), strict=True):
            for (address, offset), some in zip(addresses, _batched(pairs, 2), strict=False):
                words = [item(pair, i) for pair in some for i in range(2)]
                asm(f"st.shared.v4.f32 [$0 + {offset}], {{$1, $2, $3, $4}};",
                    "r,f,f,f,f,~{memory}", address, *words, effects=True)  # fmt: skip

    write(list(stages), acc, *vectors)


def read_handover_vectors(stages: Sequence[Any], N: int, count: int) -> tuple[jax.Array, ...]:
    """Loads the vectors [N] that another warpgroup stored with :func:`write_handover`."""

    @inline([TILES] * len(stages), returns=(_vector(N),) * count)
    def read(stages: Any):
        pairs = _load_fours(_addresses(stages)[-1], count * (N // 8))
        return tuple(array(some, (N,), COLUMN) for some in _batched(pairs, N // 8))

    return read(list(stages))


def add_handover(
    stages: Sequence[Any], acc: jax.Array, own_factor: jax.Array, other_factor: jax.Array
) -> jax.Array:
    """Returns ``acc * own_factor + other_acc * other_factor``.

    ``other_acc`` is what another warpgroup stored with :func:`write_handover`. It is loaded 64 rows
    at a time, because registers have room for only one [512, N].
    """
    N = acc.shape[1]
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=WGMMA)

    @inline([TILES] * len(stages), WGMMA, COLUMN, COLUMN, returns=result)
    def add(stages: Any, acc: Any, own_factor: Any, other_factor: Any):
        results = []
        for tile, (own, tile_addresses) in enumerate(
            zip(_tiles(acc), _addresses(stages), strict=False)
        ):
            if tile % 2 == 0:
                instruction(
                    "bar.warp.sync 0xffffffff;"
                )  # otherwise ptxas loads everything before it adds any
            for n, (a, b) in enumerate(zip(own, _load_fours(tile_addresses, N // 4), strict=True)):
                factors = own_factor.registers.flat[n // 2], other_factor.registers.flat[n // 2]
                results.append(math.fma(a, factors[0], arith.mulf(b, factors[1])))
        return array(results, (LATENT, N), WGMMA)

    return add(list(stages), acc, own_factor, other_factor)


def store(
    out: Any, lse: Any, acc: jax.Array, lse_values: jax.Array, *, gpu: bool, swapped: bool = False
) -> None:
    """Stores ``acc`` [512, N] transposed to ``out`` [N, 512] in global memory, and ``lse`` [N].

    Args:
      swapped: whether each two 16 rows of ``acc`` are exchanged in every second 64.
    """
    if not gpu:
        out[...] = acc.T
        lse[...] = lse_values
        return
    N, bytes_ = acc.shape[1], jnp.dtype(acc.dtype).itemsize

    @inline(REF, REF, WGMMA, COLUMN)
    def write(out: Any, lse: Any, acc: Any, lse_values: Any):
        (stride, _), _ = ir.MemRefType(out.type).get_strides_and_offset()
        warp, lane = _warp_and_lane()
        high, low = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(out))
        # bfloat16 is transposed first in matrices of 8 x 8, after which a thread has two columns of
        # one row. With float32 it has one column of two rows.
        row, column = (high, arith.shli(low, const(1))) if bytes_ == 2 else (
            arith.shli(low, const(1)), high)  # fmt: skip
        column = arith.addi(column, arith.shli(warp, const(4)))
        offset = arith.addi(arith.muli(row, const(stride)), column)
        first_at = odd_at = arith.addi(base, arith.extui(i64(), arith.muli(offset, const(bytes_))))
        if swapped:
            odd = arith.subi(const(16), arith.shli(arith.andi(warp, const(1)), const(5)))
            odd = arith.muli(arith.addi(offset, odd), const(bytes_))
            odd_at = arith.addi(base, arith.extui(i64(), odd))
        for number, pair in enumerate(acc.registers.flat):
            m, (j, h) = number // (N // 4), divmod(number % (N // 4), 2)
            at = odd_at if swapped and m % 2 else first_at
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
                asm(text, "l,f,~{memory}", at, item(pair, i), effects=True)
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(lse))
        at = arith.addi(base, arith.extui(i64(), arith.shli(low, const(3))))
        thread = arith.ori(warp, high)
        for j, pair in enumerate(lse_values.registers.flat):
            text = f"""{{
                .reg .pred p;
                setp.eq.s32 p, $1, 0;
                @p st.global.v2.f32 [$0 + {32 * j}], {{$2, $3}};
            }}"""
            asm(text, "l,r,f,f,~{memory}", at, thread, item(pair, 0), item(pair, 1),
                effects=True)  # fmt: skip

    write(out, lse, acc, lse_values)


def _vector(N: int) -> Any:
    return plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=COLUMN)


def _thread() -> Any:
    """Returns the thread's number in its warpgroup.

    It is read anew at the end of a sequence, so that nothing derived from it occupies registers in
    the main loop.
    """
    thread = asm("mov.u32 $0, %tid.x;", "=r", result=i32(), effects=True)
    return arith.andi(thread, const(127))


def _warp_and_lane() -> tuple[Any, Any]:
    thread = _thread()
    return arith.shrui(thread, const(5)), arith.andi(thread, const(31))


def _load_two(base: Any, offset: int) -> list[Any]:
    f32 = ir.F32Type.get()
    two = llvm.StructType.get_literal([f32] * 2)
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    loaded = asm(text, "=f,=f,r,~{memory}", base, result=two, effects=True)
    return [llvm.extractvalue(f32, loaded, [i]) for i in range(2)]


def _batched(values: Any, count: int) -> list[list[Any]]:
    values = list(values)
    return [values[i : i + count] for i in range(0, len(values), count)]


def _tiles(acc: Any) -> list[list[Any]]:
    """Groups a thread's register pairs by 64 latent columns."""
    return _batched(acc.registers.flat, acc.registers.size * 64 // LATENT)


def _load_fours(addresses: Sequence[Any], pairs: int) -> list[Any]:
    f32 = ir.F32Type.get()
    four = llvm.StructType.get_literal([f32] * 4)
    results = []
    for address, offset in addresses[: pairs // 2]:
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        loaded = asm(text, "=f,=f,=f,=f,r,~{memory}", address, result=four, effects=True)
        words = [llvm.extractvalue(f32, loaded, [i]) for i in range(4)]
        results += [float_pair(*words[:2]), float_pair(*words[2:])]
    return results


def _addresses(stages: Sequence[Any]) -> list[Any]:
    """Returns (address, offset) of a thread's groups of four float32, for each 64 block columns."""
    thread = _thread()
    results = []
    for ref in stages:
        at = arith.addi(shared_address(ref), arith.shli(thread, const(4)))
        _, tiles, _, _ = ir.MemRefType(ref.type).shape
        for tile in range(tiles):
            results.append([(at, 8 * tile * _TILE_BYTES + 2048 * i) for i in range(4)])
    return results
