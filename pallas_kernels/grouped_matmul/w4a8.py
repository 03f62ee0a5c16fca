"""grouped_matmul of float8 rows by int4 matrices on Hopper GPUs, for many tokens per group (w4a8).

    out[m] = sum_b lhs_scale[m, b] * rhs_scale[g(m), :, b] * (rhs[g(m), :, b] @ lhs[m, b])

where b is a block of 128 columns, g(m) the group of row m.

Every int4 is a float8_e4m3fn number, so the tensor cores multiply float8 by float8, and the result
is that of the unrounded integers: :mod:`reference` is the specification. Compared with bfloat16
rows, the only loss is the rounding of the rows to float8. The matrices are read as they are stored,
in 4 bits, and converted in registers. For that, XLA permutes the columns of the rows and transposes
the scales.

The matmul is transposed, ``out^T = W x^T``: only the first operand of wgmma can be in registers.
A tile is 128 output features by 128 tokens of a group. The producer's first warp keeps a ring of
stages filled by TMA. A stage has 128 columns of K, one block of scales: the tokens in float8 (16
KB), the weights in 4 bits (8 KB), and the scales of both. Each of two consumer warpgroups converts
64 features to float8 in registers, multiplies, and adds the product times its scales to float32
sums.

A step takes 512 tensor core cycles. Each warp needs 304 instructions for it: 88 convert 64 weights,
128 scale the product and add it, 34 load scales. Two warps share a scheduler, so that instructions
are the limit, not the tensor cores. Shared memory moves 25 KB in and 40 KB out in a step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Float, Float32, Int, UInt8

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul.few_tokens_registers import store_transposed
from pallas_kernels.grouped_matmul.schedule import GroupTiles
from pallas_kernels.hopper import Index, Ref, multiprocessors, wgmma
from pallas_kernels.hopper.barriers import TmaCopy
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    array,
    asm,
    const,
    f32,
    float_pair,
    i32,
    inline,
    shared_address,
    value_of,
    warp_and_lane,
    wgmma_row,
)
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.registers import advance, load_words
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import COLUMN, ROW, ROWS, WGMMA, spread_columns, spread_rows
from pallas_kernels.hopper.warpgroup import first_warp, when
from pallas_kernels.hopper.wgmma import keep_live

BLOCK = 128  # columns of K per step, and per scale
_CONSUMERS = 2  # consumer warpgroups
_FEATURES = _CONSUMERS * ROWS  # of the output, per tile
_FEW = 64  # tokens per group, on average, up to which tiles have 64 of them
_SHARED_BYTES = 232448 - 4096  # of a CTA, less barriers and alignment
_REGISTERS = (232, 40)  # per thread of a consumer and of the producer warpgroup
_INTERPRETED_CTAS = 2
_ROW_BYTES = BLOCK // 2  # of the weights
# Factor between an integer and its float8: 2^9. In float8_e4m3fn the bytes 0 to 8 are the multiples
# of 2^-9 up to 2^-6: seven of them are subnormal, so all are equidistant.
_UNPACKED_SCALE = 512.0
# The two's complement half bytes in the low halves of a word's bytes, as sign and magnitude: a
# negative one is 7 - low bits + 1, and its sign is bit 7. Bytes do not carry into each other.
_UNPACK = """{
    .reg .b32 t, m, d;
    shr.u32 t, $1, SHIFT;
    shr.u32 m, $1, SIGN;
    and.b32 m, m, 0x01010101;
    mul.lo.u32 d, m, 7;
    lop3.b32 t, t, 0x07070707, d, 0x6A;
    mad.lo.u32 $0, m, 0x81, t;
}"""


# ---- arguments and launch ------------------------------------------------------------------------


def check_shapes(lhs: jax.Array, rhs: jax.Array, block_shape: tuple[int, int]) -> None:
    """Raises NotImplementedError for dtypes or shapes that the kernel does not support."""
    (_, K), N = lhs.shape, rhs.shape[1]
    if rhs.dtype != jnp.uint8 or block_shape != (1, BLOCK):
        raise NotImplementedError(
            f"takes int4 matrices with scales of 1 x {BLOCK}, got {rhs.dtype} with {block_shape}"
        )
    if lhs.dtype != FLOAT8:
        raise NotImplementedError(f"takes {jnp.dtype(FLOAT8)} rows, got {lhs.dtype}")
    check_widths(N, K)


def check_widths(N: int, K: int) -> None:
    """Raises NotImplementedError for matrices [N, K] that the kernel does not support."""
    if N % _FEATURES or K % BLOCK:
        raise NotImplementedError(f"takes N in {_FEATURES} and K in {BLOCK}, got {N=} {K=}")


def permute_columns(lhs: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """Permutes the columns of every block of 128 to the order in which the kernel unpacks weights.

    Thread q of four reads 16 of the 64 bytes that a weight row has per block: columns 32 q to 32 q
    + 31. The low halves of its i-th word are what it has of columns 4 q to 4 q + 3 in the operand
    of the i-th instruction of 32 columns, and the high halves of columns 16 + 4 q to 16 + 4 q + 3.
    """
    M, K = lhs.shape
    # (quarter, instruction, byte, half) to (instruction, half, quarter, byte)
    blocks = lhs.reshape(M, K // BLOCK, 4, 4, 4, 2)
    return blocks.transpose(0, 1, 3, 5, 2, 4).reshape(M, K)


def _scale_copy(tokens: int) -> int:
    """Returns the token scales per copy. It starts at a multiple of four and has 32 more."""
    return tokens + 32


def matmul(
    lhs: Float[Array, "M K"],
    rhs: UInt8[Array, "G N K2"],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"],
    rhs_scale: Float32[Array, "G N Kb"],
    *,
    tokens: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "M N"]:
    """Multiplies each float8 row with its group's int4 matrix. By default ``tokens`` per tile (a
    multiple of 32 up to 128) follow from the shapes, and the ring has the most ``stages`` that fit
    in shared memory."""
    M, G = len(lhs), len(rhs)
    tokens = tokens or (64 if M <= _FEW * G else 128)
    scale_copy = _scale_copy(tokens)
    stage_bytes = tokens * BLOCK + _FEATURES * _ROW_BYTES + 4 * (scale_copy + _FEATURES)
    # A tile's rows are copied whole. TMA fills with zeros past the end; the interpreter does not.
    padding = max(0, tokens - M) if interpret is None else tokens
    scale_padding = max(-M % 4, scale_copy - M) if interpret is None else scale_copy
    x = jnp.pad(permute_columns(lhs), ((0, padding), (0, 0)))
    x_scales = jnp.pad(lhs_scale, ((0, scale_padding), (0, 0))).T
    arrays = x, rhs, group_sizes, x_scales, jnp.swapaxes(rhs_scale, 1, 2)
    ctas = multiprocessors() if interpret is None else _INTERPRETED_CTAS
    stages = stages or _SHARED_BYTES // stage_bytes
    return _kernel(*arrays, M=M, tokens=tokens, stages=stages, ctas=ctas, interpret=interpret)


@lowered_once("M", "tokens", "stages", "ctas", "interpret")
def _kernel(
    x: Float[Array, "rows K"],
    values: UInt8[Array, "G N K2"],
    group_sizes: Int[Array, " G"],
    x_scales: Float32[Array, "Kb rows_of_scales"],
    scales: Float32[Array, "G Kb N"],
    *,
    M: int,
    tokens: int,
    stages: int,
    ctas: int,
    interpret: Any,
) -> BFloat16[Array, "M N"]:
    N, on_gpu, scale_copy = values.shape[1], interpret is None, _scale_copy(tokens)
    ring_scratch = Ring.scratch(stages, 4, _CONSUMERS, interpret)
    swizzle = (plgpu.SwizzleTransform(128),) if on_gpu else ()

    def w4a8(*refs: Any) -> None:
        arrays, (x_s, w_s, x_scale_s, scale_s), ring_refs = refs[:6], refs[6:10], refs[10:]
        x_g, w_g, sizes_g, x_scale_g, scale_g, out_g = arrays
        ring = Ring.of(stages, _CONSUMERS, ring_refs, interpret)
        ring.initialise()
        overlap_preceding_kernel(interpret=interpret)
        warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
        groups = GroupTiles(sizes_g, tokens, on_gpu=on_gpu)
        tiles = _Tiles(groups, N // _FEATURES, cta, ctas)
        memory = _Stages(ring, tokens, x.shape[1] // BLOCK, x_s, w_s, x_scale_s, scale_s)

        @when(warpgroup == _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            sources = x_g, w_g, x_scale_g, scale_g
            when(first_warp(on_gpu))(lambda: _produce(memory, tiles, *sources))

        @when(warpgroup != _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            _consume(memory, tiles, out_g, warpgroup, on_gpu=on_gpu)

    return grid_kernel(
        w4a8,
        jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        [
            plgpu.SMEM((stages, tokens, BLOCK), FLOAT8, transforms=swizzle),
            plgpu.SMEM((stages, _FEATURES, _ROW_BYTES), jnp.uint8),
            plgpu.SMEM((stages, scale_copy), jnp.float32),
            plgpu.SMEM((stages, _FEATURES), jnp.float32),
            *ring_scratch,
        ],
        warpgroups=_CONSUMERS + 1,
        grid={"cta": ctas},
        interpret=interpret,
        lowering_semantics=LANE,
    )(x, values, group_sizes.astype(jnp.int32), x_scales, scales)


# ---- tiles, stages, and the producer -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of one CTA. Those of the same tokens are next to each other."""

    groups: GroupTiles
    feature_tiles: int  # tiles along N
    cta: Index
    ctas: int

    def count(self) -> jax.Array:
        total = self.groups.count() * self.feature_tiles
        return lax.div(total - self.cta + (self.ctas - 1), jnp.int32(self.ctas))

    def locate(self, i: Index) -> tuple[jax.Array, ...]:
        """Returns the group, first token, number of tokens and first feature of the i-th tile."""
        t = self.cta + i * self.ctas
        feature_tile = lax.rem(t, jnp.int32(self.feature_tiles))
        tile = self.groups.locate(lax.div(t, jnp.int32(self.feature_tiles)))
        return *tile, feature_tile * _FEATURES


@dataclasses.dataclass(frozen=True, eq=False)
class _Stages:
    """The ring buffer in shared memory. The first axis of each array is the stage."""

    ring: Ring
    tokens: int
    steps: int  # K steps
    x: Ref  # float8 [stages, tokens, 128]
    weights: Ref  # uint8 [stages, features, 64]
    x_scales: Ref  # float32 [stages, tokens + 32]
    scales: Ref  # float32 [stages, features]


def _produce(
    memory: _Stages, tiles: _Tiles, x_g: Ref, w_g: Ref, x_scale_g: Ref, scale_g: Ref
) -> None:
    """Copies the operands of every K step of this CTA's tiles to the ring. One warp calls it."""
    ring = memory.ring

    def copy_tile(i: Index, state: PipelineState) -> PipelineState:
        group, token, _, feature = tiles.locate(i)
        features, tokens = pl.ds(feature, _FEATURES), pl.ds(token, memory.tokens)

        def fill(step: Index, state: PipelineState, carry: tuple[()]) -> tuple[()]:
            stage, columns = state.stage, pl.ds(step * jnp.int32(BLOCK), BLOCK)
            half = pl.ds(step * jnp.int32(_ROW_BYTES), _ROW_BYTES)
            of_tokens = step, pl.ds(token - (token & 3), _scale_copy(memory.tokens))
            plain: Any = {"tiled": False, "swizzle": None}
            ring.fill(state, [
                TmaCopy(x_g, (tokens, columns), memory.x.at[stage], tiled=False),
                TmaCopy(w_g, (group, features, half), memory.weights.at[stage], **plain),
                TmaCopy(x_scale_g, of_tokens, memory.x_scales.at[stage], **plain),
                TmaCopy(scale_g, (group, step, features), memory.scales.at[stage], **plain),
            ])  # fmt: skip
            return carry

        return ring.loop(memory.steps, fill, state, ())[0]

    ring.drain(lax.fori_loop(0, tiles.count(), copy_tile, ring.start()))


# ---- the consumers -------------------------------------------------------------------------------


def _consume(memory: _Stages, tiles: _Tiles, out: Ref, warpgroup: Index, *, on_gpu: bool) -> None:
    """Computes and stores 64 features of every tile of the CTA."""
    ring, width = memory.ring, memory.tokens
    ring.release_all()
    first_row = pl.multiple_of(warpgroup * jnp.int32(ROWS), ROWS)
    zeros = jnp.zeros((ROWS, width), jnp.float32)
    if on_gpu:
        zeros = plgpu.layout_cast(zeros, WGMMA)

    def compute_tile(i: Index, state: PipelineState) -> PipelineState:
        _, token, tokens, feature = tiles.locate(i)

        def step(i: Index, state: PipelineState, carry: Any) -> Any:
            ring.wait_full(state)
            stage = state.stage
            packed = memory.weights.at[stage, pl.ds(first_row, ROWS)]
            x_scales = memory.x_scales.at[stage]
            if not on_gpu:
                weights = _unpack_in_interpreter(packed[...])
                x = memory.x[stage].astype(jnp.float32)
                product = jnp.dot(weights, x.T, precision="highest")
                columns = x_scales[pl.ds(token & 3, width)]
                factors = memory.scales[stage, pl.ds(first_row, ROWS)][:, None] * columns[None]
                sums, previous = carry
                when(i > 0)(lambda: ring.release(previous))
                return sums + product * factors, state
            sums, product, previous = carry
            weights = _unpack(packed)
            base = wgmma.operand_base(memory.x, stage * (width * BLOCK))
            started = wgmma.start_product_of_registers(weights, base, product)
            # An arrival does not wait for loads of scales that have not been used yet. Those of the
            # previous step have been: this product takes the registers of the one they scaled.
            when(i > 0)(lambda: ring.release(previous))
            rows = plgpu.layout_cast(memory.scales[stage, pl.ds(first_row, ROWS)], ROW)
            columns = _load_columns(x_scales, token & 3, width)
            rows = rows * _UNPACKED_SCALE
            factors = spread_rows(rows, width) * spread_columns(columns, ROWS)
            product = wgmma.wait_for_product(started)
            keep_live(weights)
            return sums + product * factors, product, state

        carry = (zeros, zeros, state) if on_gpu else (zeros, state)
        state, carry = ring.loop(memory.steps, step, state, carry)
        sums, at = carry[0].astype(jnp.bfloat16), (token, feature + first_row)
        store_transposed(out, at, sums, tokens, column_blocks=1, on_gpu=on_gpu)
        ring.release(carry[-1])
        return state

    lax.fori_loop(0, tiles.count(), compute_tile, ring.start())


def _unpack(packed: Ref) -> jax.Array:
    """Unpacks 64 weight rows of 128 columns, as they are stored, to float8_e4m3fn: the operand of
    :func:`wgmma.start_product_of_registers`, in the order of :func:`permute_columns`."""

    @inline(REF, returns=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, layout=WGMMA))
    def load(packed: ir.Value) -> Registers:
        _, lane = warp_and_lane()
        quarter = arith.andi(lane, const(3))
        offset = arith.muli(wgmma_row(), const(_ROW_BYTES))
        offset = arith.addi(offset, arith.muli(quarter, const(16)))
        rows = []
        for half in range(2):
            at = arith.addi(offset, const(8 * _ROW_BYTES * half))
            rows.append(load_words(advance(mgpu.utils.memref_ptr(packed), at)))
        words = []
        for i in range(4):
            for shift in (0, 4):
                text = _UNPACK.replace("SHIFT", str(shift)).replace("SIGN", str(shift + 3))
                words += [asm(text, "=r,r", row[i], result=i32()) for row in rows]
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        return array([llvm.bitcast(pair, each) for each in words], (ROWS, ROWS), WGMMA)

    return load(packed)


def _load_columns(numbers: Ref, first: jax.Array, count: int) -> jax.Array:
    """Loads ``count`` float32 numbers from ``first`` on, in the layout of a product's columns."""

    @inline(REF, SCALAR, returns=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=COLUMN))
    def load(ref: ir.Value, first: Registers) -> Registers:
        _, lane = warp_and_lane()
        column = arith.addi(value_of(first), arith.muli(arith.andi(lane, const(3)), const(2)))
        address = arith.addi(shared_address(ref), arith.muli(column, const(4)))
        numbers = [
            asm(f"ld.shared.f32 $0, [$1 + {4 * i}];", "=f,r", address, result=f32(), effects=True)
            for block in range(0, count, 8)
            for i in (block, block + 1)
        ]
        pairs = [float_pair(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]
        return array(pairs, (count,), COLUMN)

    return load(numbers, jnp.asarray(first, jnp.int32))


def _unpack_in_interpreter(packed: jax.Array) -> jax.Array:
    """Unpacks 64 rows to their integers in the order of :func:`_unpack`, float32 [64, 128]."""
    halves = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.int32)
    # (quarter, instruction, column, half) to (instruction, half, quarter, column)
    columns = halves.reshape(ROWS, 4, 4, 4, 2).transpose(0, 2, 4, 1, 3)
    return ((columns ^ 8) - 8).astype(jnp.float32).reshape(ROWS, BLOCK)
