"""The Hopper kernel of sparse_index.

A program scores consecutive pages of a sequence for up to 256 rows, the heads of a group of
queries. The matmul is transposed, S^T = K Q^T: the M dimension of wgmma (64) is the tokens of a
page, so that one query fills a tile, and the sum over heads is one over the columns of a row.

Each warpgroup has a range of the program's pages and works on its own: it copies its pages by TMA
into a ring buffer, several pages ahead, and takes the matmul, the ReLU and the weighted sum of each
page in turn. Meanwhile the tensor cores work for the other warpgroups and programs of the
multiprocessor. Scores are collected in shared memory and copied out at the end. Pages past a
sequence's length are not read; their scores are -inf.

For one query per sequence, HBM delivers a page of float8 keys to each multiprocessor every 480
cycles. Its matmul takes 128 cycles and the sum over heads about 100.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.tiles import ACC, ROW
from pallas_kernels.hopper.warpgroup import meet

PAGE, COLUMNS = 64, 128
_MOST_ROWS = 256  # of one wgmma instruction: heads of all queries of a group
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # layout of a vector with one number per column of a tile
_PROGRAMS_AN_SM = 8  # that the plan aims at, so that ragged lengths balance
_LEAST_PAGES, _MOST_PAGES = 4, 32  # per warpgroup
_MOST_SCORES = 48  # pages times queries per warpgroup, whose scores are in shared memory


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters that do not change any result."""

    queries: int
    """Queries of a group, whose heads are the columns of one matmul."""

    pages: int
    """Consecutive pages of a warpgroup."""

    warpgroups: int = 2
    """Number of warpgroups per program."""

    stages: int = 4
    """Pages in a warpgroup's ring buffer."""


def plan(B: int, T: int, J: int, max_pages: int) -> Config:
    """Returns the parameters for T queries of J heads in each of B sequences."""
    groups = -(-T // max(1, _MOST_ROWS // J))
    queries = -(-T // groups)
    pages = B * groups * max_pages // (2 * multiprocessors() * _PROGRAMS_AN_SM)
    most = min(_MOST_PAGES, _MOST_SCORES // queries)
    return Config(queries, pages=min(most, max(_LEAST_PAGES, pages)))


@functools.partial(jax.jit, static_argnames=("queries", "config", "interpret"))
def score(
    q: Float[Array, "B G rows D"],
    weights: Float32[Array, "B G Tg J"],
    pages: Float[Array, "P page width"],
    block_tables: Int32[Array, "B max_pages"],
    lengths: Int32[Array, " B"],
    scales: Float32[Array, "P page"] | None,
    *,
    queries: int,
    config: Config,
    interpret: Any = None,
) -> Float32[Array, "B T S"]:
    """Scores the tokens of each table for G groups of Tg queries.

    Args:
      queries: number of queries T. The last group may have fewer than the others.
    """
    B, G, rows, _ = q.shape
    J, float8 = weights.shape[-1], scales is not None
    group, own_pages, W, stages = config.queries, config.pages, config.warpgroups, config.stages
    # Table entries past a sequence's length may be anything; clip them to the page pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]
    chunks = -(-max_pages // (W * own_pages))

    def sparse_index(*refs):
        q_g, weights_g, pages_g, tables_g, lengths_g, *refs = refs
        scales_g, refs = (refs[0], refs[1:]) if float8 else (None, refs)
        out_g, q_s, weights_s, keys_s, scales_s, out_s, q_full, full = refs
        b, g, wg = (lax.axis_index(name) for name in ("sequence", "group", "wg"))
        first_page = (lax.axis_index("chunk") * W + wg) * own_pages
        length = lengths_g[b]
        # This warpgroup's pages in the table, and those with tokens of the sequence.
        in_table = jnp.clip(max_pages - first_page, 0, own_pages)
        count = jnp.clip(lax.div(length + (PAGE - 1), PAGE) - first_page, 0, in_table)

        def fetch(n):
            """Starts copying the warpgroup's n-th page."""
            number = jnp.clip(tables_g[b, first_page + n], 0, last_page)
            stage = wg * stages + lax.rem(n, jnp.int32(stages))
            plgpu.copy_gmem_to_smem(
                pages_g.at[number, :, pl.ds(0, COLUMNS)], keys_s.at[stage], full.at[stage]
            )
            if scales_g is not None:
                plgpu.copy_gmem_to_smem(scales_g.at[number], scales_s.at[stage], full.at[stage])

        def sum_heads(products, t, scale):
            """Returns a query's scores of a page, from the products of its heads."""
            products = products[:, t * J : (t + 1) * J]
            head_weights = plgpu.layout_cast(weights_s[t], _COLUMN)
            head_weights = lax.broadcast_in_dim(head_weights, products.shape, [1])
            scores = (jnp.maximum(products, 0.0) * head_weights).sum(axis=1)
            return scores if scale is None else scores * scale

        def score_page(n, _):
            stage = wg * stages + lax.rem(n, jnp.int32(stages))
            plgpu.barrier_wait(full.at[stage])

            def multiply(acc):
                plgpu.wgmma(acc, keys_s.at[stage], q_s.transpose((1, 0)))
                return acc[...]

            products = pl.run_scoped(multiply, ACC((PAGE, rows), jnp.float32))
            scale = plgpu.layout_cast(scales_s[stage], ROW) if float8 else None
            meet(interpret)  # all warps have read the page
            when(n + stages < count)(lambda: fetch(n + stages))
            position = plgpu.broadcasted_iota(jnp.int32, (PAGE,), 0, layout=ROW)
            position = position + (first_page + n) * PAGE
            for t in range(group):
                visible = length - queries + 1 + g * group + t
                scores = sum_heads(products, t, scale)
                scores = jnp.where(position < visible, scores, jnp.full_like(scores, -jnp.inf))
                out_s[wg, t, pl.ds(n * PAGE, PAGE)] = scores

        def hide_page(n, _):
            nothing = plgpu.layout_cast(jnp.full((PAGE,), -jnp.inf, jnp.float32), ROW)
            for t in range(group):
                out_s[wg, t, pl.ds(n * PAGE, PAGE)] = nothing

        def store_page(n, _):
            """Starts copying the scores of a page to the output."""
            for t in range(group):

                @when(g * group + t < queries)
                def _(t=t):
                    plgpu.copy_smem_to_gmem(
                        out_s.at[wg, t, pl.ds(n * PAGE, PAGE)],
                        out_g.at[b, g * group + t, pl.ds((first_page + n) * PAGE, PAGE)],
                        commit_group=False,
                    )

        @when(wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(q_g.at[b, g], q_s, q_full)
            plgpu.copy_gmem_to_smem(weights_g.at[b, g], weights_s, q_full)

        lax.fori_loop(0, jnp.minimum(count, stages), lambda n, _: fetch(n), None)
        plgpu.barrier_wait(q_full)
        lax.fori_loop(0, count, score_page, None)
        lax.fori_loop(count, in_table, hide_page, None)
        plgpu.commit_smem()
        lax.fori_loop(0, in_table, store_page, None)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    columns = 128 // pages.dtype.itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    arrays = [q, weights, pages, block_tables, lengths, *(() if scales is None else (scales,))]
    return plgpu.kernel(
        sparse_index,
        out_type=jax.ShapeDtypeStruct((B, queries, max_pages * PAGE), jnp.float32),
        scratch_types=[
            plgpu.SMEM((rows, COLUMNS), q.dtype, transforms=transforms),
            plgpu.SMEM((group, J), jnp.float32),
            plgpu.SMEM((W * stages, PAGE, COLUMNS), q.dtype, transforms=transforms),
            plgpu.SMEM((W * stages, PAGE), jnp.float32),
            plgpu.SMEM((W, group, own_pages * PAGE), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1 + float8, num_barriers=W * stages),
        ],
        grid=(B, chunks, G),
        grid_names=("sequence", "chunk", "group"),
        num_threads=W,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*arrays)
