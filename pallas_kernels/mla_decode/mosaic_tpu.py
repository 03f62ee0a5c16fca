"""mla_decode on TPUs (Pallas Mosaic TPU): bfloat16 and float32, any number of heads and queries.

A grid step processes the M = T * H query rows of one sequence. It loops over the sequence's cached
tokens in chunks, with an online softmax (:class:`pallas_kernels.tpu.OnlineSoftmax`) over::

    S = scale (Q_latent C^T + Q_rope K^T)        [M, chunk]; C also serves as the values

* Pages stay in HBM. Blocks of pages, in the order of the block table and no further than the
  sequence's length, are copied into one of two VMEM buffers while the other is in use. The next
  sequence's first block follows a sequence's last. Blocks are large, because the bytes in flight
  must cover HBM's latency: 2,048 tokens are 2.6 MB, 1.6 us of a v6e's HBM bandwidth.
* Chunks are smaller, because a sequence's last chunk is computed whole. For 128 query rows and
  1,024 tokens, libtpu 0.0.42 schedules 2,400 cycles on a v5p, where the matrix units need 2,304;
  for 512 tokens, 1,435. Each page copy adds 9 cycles. These are compiler schedules: the kernel has
  not been run on a TPU.
* C is a multiple of 128, so the latent and the rope part both begin at the first lane of a register
  and are scored separately. R = 64 fills half a register and half a pass of a matrix unit, so a
  token takes 640 columns of VMEM and of the matmuls. It takes 640 in HBM too, because a kernel sees
  the last dimension padded: 11 % more memory and traffic than 576. So pages should be
  [P, page, 640]. XLA lays out [P, page, 576] with the pages innermost, and copies all pages before
  every call.
* On a device with two cores, each core processes half of the sequences, whatever their lengths.

Among the kernels that come with JAX, ragged_paged_attention requires separate keys and values of
one width, and none attends to latents. Those of tpu-inference and tokamax require their own cache
formats.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from pallas_kernels.tpu import (
    LANES,
    SMEM,
    Chip,
    OnlineSoftmax,
    dot,
    require_tpu,
    require_vmem,
    softmax_bytes,
    tile_rows,
    tiled_bytes,
)

MOST_PAGES = SMEM // 4 * 7 // 8
"""Limit on the entries of the block tables, which share SMEM with the compiler's own data."""

_COPIES = 8  # started per loop iteration: 8 cycles each, instead of 33 one by one


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes. Chunks and blocks are rounded to whole pages and limited to the table."""

    rows: int = 512
    """Maximum query rows (of T * H) per grid step. More query rows take several passes."""
    chunk: int = 1024  # cached tokens per chunk, the unit of computation
    block: int = 2048
    """Maximum cached tokens per block, the unit of copying. Reduced until it fits in VMEM."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of one compiled kernel."""

    queries: int  # query tokens per sequence, T
    heads: int
    rows: int  # query rows per grid step, rounded up to whole register tiles
    tiles: int  # grid steps per sequence
    page: int  # cached tokens per page
    max_pages: int
    chunk: int
    block: int
    scale: float
    chip: Chip
    vmem: int  # VMEM limit for the compiler, in bytes


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_decode`. Tests select tile sizes with ``config``."""
    chip = require_tpu(interpret)
    B, T, H, C = q_latent.shape
    dtypes = {x.dtype.name for x in (q_latent, q_rope, pages)}
    if dtypes not in ({"bfloat16"}, {"float32"}):
        raise NotImplementedError(f"takes bfloat16 or float32, got {', '.join(sorted(dtypes))}")
    if 0 in (q_latent.size, pages.size, block_tables.size):
        shapes = q_latent.shape, pages.shape, block_tables.shape
        raise NotImplementedError(f"takes no empty arrays, got {', '.join(map(str, shapes))}")
    page, tile = pages.shape[1], tile_rows(pages.dtype)
    if C % LANES or page % tile:
        raise NotImplementedError(
            f"takes a multiple of {LANES} latent columns and pages of a multiple of {tile} tokens,"
            f" got {C} and {page}"
        )
    if (entries := block_tables.size) > MOST_PAGES:
        raise NotImplementedError(f"takes block tables of {MOST_PAGES:,} pages, got {entries:,}")
    plan = _plan(config or Config(), q_latent, q_rope, pages, block_tables, scale, chip)
    idle = -B % chip.cores  # empty sequences, so that the cores get equally many

    def steps(q: Float[Array, "B T H n"]) -> Float[Array, "steps rows n"]:
        q = q.reshape(B, T * H, -1)
        q = jnp.pad(q, ((0, idle), (0, plan.tiles * plan.rows - T * H), (0, 0)))
        return q.reshape(-1, plan.rows, q.shape[-1])

    out, lse = _attend(
        plan,
        steps(q_latent),
        steps(q_rope),
        pages,
        jnp.clip(block_tables.astype(jnp.int32), 0, pages.shape[0] - 1).reshape(-1),
        jnp.pad(lengths.astype(jnp.int32), (0, idle)),
        interpret=interpret,
    )
    out = out.reshape(B + idle, -1, C)[:B, : T * H].reshape(B, T, H, C)
    return out, lse.reshape(B + idle, -1)[:B, : T * H].reshape(B, T, H)


def _plan(config, q_latent, q_rope, pages, block_tables, scale: float, chip: Chip) -> _Plan:
    """Chooses the largest blocks that fit in VMEM."""
    _, T, H, C = q_latent.shape
    dtype, (_, page, width), max_pages = pages.dtype, pages.shape, block_tables.shape[1]
    tile = tile_rows(dtype)
    tiles = -(-T * H // config.rows)
    rows = -(-T * H // (tiles * tile)) * tile
    chunk = min(max(config.chunk // page, 1), max_pages) * page
    block = min(max(config.block // chunk, 1), -(-max_pages * page // chunk)) * chunk

    def blocks(tokens: int) -> dict[str, int]:
        return {
            "queries": 2 * sum(tiled_bytes((rows, n), dtype) for n in (C, q_rope.shape[-1])),
            "results": 2 * (tiled_bytes((rows, C), dtype) + tiled_bytes((1, rows), jnp.float32)),
            "cache": 2 * tiled_bytes((tokens, width), dtype),
            **softmax_bytes(rows, C, chunk, width),
        }

    while block > chunk and sum(blocks(block).values()) > chip.budget:
        block -= chunk
    require_vmem(chip, blocks(block))
    vmem = sum(blocks(block).values()) + chip.vmem - chip.budget
    return _Plan(T, H, rows, tiles, page, max_pages, chunk, block, scale, chip, vmem)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _attend(
    plan: _Plan,
    q_latent: Float[Array, "steps rows C"],
    q_rope: Float[Array, "steps rows R"],
    pages: Float[Array, "P page width"],
    tables: Int32[Array, " table"],
    lengths: Int32[Array, " B"],
    *,
    interpret: Any,
) -> tuple[Float[Array, "steps rows C"], Float32[Array, "steps 1 rows"]]:
    steps, rows, C = q_latent.shape
    dtype, width = pages.dtype, pages.shape[-1]

    def block(*shape: int) -> pl.BlockSpec:
        per_core = steps // plan.chip.cores
        return pl.BlockSpec((1, *shape), lambda core, step, *_: (core * per_core + step, 0, 0))

    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=(
            jax.ShapeDtypeStruct((steps, rows, C), dtype),
            jax.ShapeDtypeStruct((steps, 1, rows), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.chip.cores, steps // plan.chip.cores),
            in_specs=[
                block(rows, C),
                block(rows, q_rope.shape[-1]),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[block(rows, C), block(1, rows)],
            scratch_shapes=[
                pltpu.VMEM((2, plan.block, width), dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                *OnlineSoftmax.scratch(rows, C),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=plan.vmem,
            disable_bounds_checks=True,  # page numbers have been clipped
        ),
        interpret=interpret,
        name="mla_decode",
    )(tables, lengths, q_latent, q_rope, pages)


def _kernel(
    plan: _Plan,
    tables,  # SMEM [B * max_pages], page numbers
    lengths,  # SMEM [B]
    q_latent,  # VMEM [1, rows, C]
    q_rope,  # VMEM [1, rows, R]
    pages,  # HBM [P, page, width]
    out,  # VMEM [1, rows, C]
    lse,  # VMEM [1, 1, rows]
    cached,  # VMEM [2, block, width], double buffer
    next_buffer,  # SMEM [1], index of the next buffer; persists across grid steps
    arrived,  # one semaphore per buffer
    *softmax,  # VMEM, the fields of OnlineSoftmax
) -> None:
    block, chunk, table_end = plan.block, plan.chunk, plan.max_pages * plan.page
    pages_of_block = block // plan.page
    index, steps_of_core = pl.program_id(1), pl.num_programs(1)
    step = pl.program_id(0) * steps_of_core + index
    sums, C, R = OnlineSoftmax(*softmax), q_latent.shape[-1], q_rope.shape[-1]

    def cached_tokens(step):
        """Returns the cached tokens of a step's sequence, limited to the table's end."""
        return jnp.clip(lengths[step // plan.tiles], 0, table_end)

    def each_copy(step, i, buffer, act: Callable[[Any], None]) -> None:
        """Applies ``act``, start or wait, to the page copies of block i of a step's sequence."""
        first = i * pages_of_block
        count = jnp.clip(pl.cdiv(cached_tokens(step), plan.page) - first, 0, pages_of_block)

        def copy(p) -> None:
            number = tables[step // plan.tiles * plan.max_pages + first + p]
            slots = pl.ds(pl.multiple_of(p * plan.page, plan.page), plan.page)
            target = cached.at[buffer, slots]
            act(pltpu.make_async_copy(pages.at[number], target, arrived.at[buffer]))

        unrolled = count // _COPIES

        @pl.loop(0, unrolled)
        def _(group):
            for p in range(_COPIES):
                copy(group * _COPIES + p)

        pl.loop(unrolled * _COPIES, count)(copy)

    @pl.when(index == 0)
    def _():
        next_buffer[0] = 0
        each_copy(step, 0, 0, lambda copy: copy.start())

    sums.clear()
    length = cached_tokens(step)
    blocks = jnp.maximum(pl.cdiv(length, block), 1)  # an empty sequence has one block of no pages
    row = step % plan.tiles * plan.rows + lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    visible = lengths[step // plan.tiles] - plan.queries + 1 + row // plan.heads
    visible = jnp.minimum(visible, table_end)

    @pl.loop(0, blocks)
    def _(i):
        buffer, last = next_buffer[0], i + 1 == blocks

        @pl.when(~last | (index + 1 < steps_of_core))
        def _():
            next_block = jnp.where(last, step + 1, step), jnp.where(last, 0, i + 1)
            each_copy(*next_block, 1 - buffer, lambda copy: copy.start())

        each_copy(step, i, buffer, lambda copy: copy.wait())

        @pl.loop(0, pl.cdiv(jnp.minimum(length - i * block, block), chunk))
        def _(c):
            here = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
            s = i * block + c * chunk

            # Slots that no copy filled may be NaN, and 0 * NaN is NaN.
            @pl.when(s + chunk > length)
            def _():
                tokens = s + lax.broadcasted_iota(jnp.int32, (chunk, 1), 0)
                cached[buffer, here] = jnp.where(tokens < length, cached[buffer, here], 0)

            latents, keys = cached[buffer, here, :C], cached[buffer, here, C : C + R]
            scores = plan.scale * (
                dot(q_latent[0], latents, transposed=True) + dot(q_rope[0], keys, transposed=True)
            )
            tokens = s + lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
            sums.add(jnp.where(tokens < visible, scores, -jnp.inf), latents)

        next_buffer[0] = 1 - buffer

    result, lse[0] = sums.result()
    out[0] = result.astype(out.dtype)
