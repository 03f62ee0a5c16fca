"""mla_decode on TPUs (Pallas Mosaic TPU): bfloat16 and float32, any number of heads and queries.

A grid step has the M = T * H query rows of one batch row. It goes through that row's cached tokens
in chunks, with an online softmax (:mod:`pallas_kernels.online_softmax`) over::

    S = scale (Q_latent C^T + Q_rope K^T)        [M, chunk], and C is the values too

* Pages stay in HBM. Blocks of them, as the table numbers them and no further than the row's length,
  are copied into one of two buffers while the other is computed with; behind a row's last block
  comes the next row's first. Blocks are large, since what is on its way has to cover HBM's latency:
  2,048 tokens are 2.6 MB, 1.6 us of a v6e's HBM.
* Chunks are smaller, since a row's last is computed whole. For 128 rows and 1,024 tokens libtpu
  0.0.42 schedules 2,400 cycles on a v5p, where the matrix units need 2,304; for half the tokens
  1,435. Page copies add 9 cycles each. None of it has been run: no TPU was here.
* C is a multiple of 128, so the latent and the rope part each begin at a register's first lane, and
  are scored apart. R = 64 fills half a register, and half of a matrix unit's pass: a token takes
  640 columns of VMEM, of the products and, as does any array's last dimension in a kernel's eyes,
  of HBM: 11 % more to hold and to read than 576. So pages should be [P, page, 640]. XLA keeps
  [P, page, 576] with the pages innermost, and copies them all before every call.
* A device of two cores gives each half of the rows, whatever their lengths.

Of the kernels that come with JAX, ragged_paged_attention has one width for keys and values, held
apart; none attends to latents. Those of tpu-inference and tokamax pack the cache their own way.
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

from pallas_kernels.online_softmax import OnlineSoftmax, softmax_bytes
from pallas_kernels.tpu import (
    LANES,
    SMEM,
    Chip,
    dot,
    require_tpu,
    require_vmem,
    tile_rows,
    tiled_bytes,
)

MOST_PAGES = SMEM // 4 * 7 // 8
"""Of all rows' block tables together, which lie in SMEM with what the compiler puts there."""

_COPIES = 8  # started in one turn of a loop: one by one a copy takes 33 cycles, not 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Where the work is cut; whole pages, and no more of them than a table has."""

    rows: int = 512
    """Query rows, T * H, of a grid step at most: more go through the cache in turns."""

    chunk: int = 1024
    """Tokens of a chunk."""

    block: int = 2048
    """Tokens of a block at most; fewer where VMEM is short."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The numbers of one kernel."""

    queries: int
    heads: int
    rows: int
    """Query rows of a grid step, in whole tiles."""
    tiles: int
    """Grid steps of a batch row."""
    page: int
    max_pages: int
    chunk: int
    block: int
    scale: float
    chip: Chip
    vmem: int
    """Bytes that the compiler may use."""


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
    """As :func:`pallas_kernels.mla_decode`.

    Args:
      interpret: as pallas_call takes it, to run without a TPU.
    """
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
    idle = -B % chip.cores  # rows of no tokens

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
    """The largest blocks that fit into VMEM."""
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
            disable_bounds_checks=True,  # page numbers are clipped
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
    cached,  # VMEM [2, block, width], the two buffers
    turn,  # SMEM [1], which buffer is next; lives from step to step
    arrived,  # a semaphore a buffer
    *softmax,  # VMEM, as OnlineSoftmax has them
) -> None:
    block, chunk, table_end = plan.block, plan.chunk, plan.max_pages * plan.page
    pages_of_block = block // plan.page
    index, steps_of_core = pl.program_id(1), pl.num_programs(1)
    step = pl.program_id(0) * steps_of_core + index
    sums, C, R = OnlineSoftmax(*softmax), q_latent.shape[-1], q_rope.shape[-1]

    def held(step):
        """Cached tokens of a step's row; a length may count queries past the table's end."""
        return jnp.clip(lengths[step // plan.tiles], 0, table_end)

    def each_copy(step, i, buffer, act: Callable[[Any], None]) -> None:
        """Starts, or awaits, the copies of a row's block i."""
        first = i * pages_of_block
        count = jnp.clip(pl.cdiv(held(step), plan.page) - first, 0, pages_of_block)

        def copy(p) -> None:
            number = tables[step // plan.tiles * plan.max_pages + first + p]
            place = pl.ds(pl.multiple_of(p * plan.page, plan.page), plan.page)
            to = cached.at[buffer, place]
            act(pltpu.make_async_copy(pages.at[number], to, arrived.at[buffer]))

        turns = count // _COPIES

        @pl.loop(0, turns)
        def _(turn):
            for p in range(_COPIES):
                copy(turn * _COPIES + p)

        pl.loop(turns * _COPIES, count)(copy)

    @pl.when(index == 0)
    def _():
        turn[0] = 0
        each_copy(step, 0, 0, lambda copy: copy.start())

    sums.clear()
    length = held(step)
    blocks = jnp.maximum(pl.cdiv(length, block), 1)  # an empty row's has no page
    row = step % plan.tiles * plan.rows + lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    visible = lengths[step // plan.tiles] - plan.queries + 1 + row // plan.heads
    visible = jnp.minimum(visible, table_end)

    @pl.loop(0, blocks)
    def _(i):
        buffer, last = turn[0], i + 1 == blocks

        @pl.when(~last | (index + 1 < steps_of_core))
        def _():
            next_block = jnp.where(last, step + 1, step), jnp.where(last, 0, i + 1)
            each_copy(*next_block, 1 - buffer, lambda copy: copy.start())

        each_copy(step, i, buffer, lambda copy: copy.wait())

        @pl.loop(0, pl.cdiv(jnp.minimum(length - i * block, block), chunk))
        def _(c):
            here = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
            s = i * block + c * chunk

            # What no copy filled may be NaN, and 0 * NaN is.
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

        turn[0] = 1 - buffer

    result, lse[0] = sums.result()
    out[0] = result.astype(out.dtype)
