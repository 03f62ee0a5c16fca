"""The producer of the kernel for few query rows that copies a bfloat16 cache by TMA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.warpgroup import warp_is
from pallas_kernels.mla_decode.few_queries_ring import Rings
from pallas_kernels.mla_decode.query_buffer import QueryBuffer
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.work import Work


def copy_blocks(pages: Any, rings: Rings, queries: QueryBuffer, work: Work, *, gpu: bool) -> None:
    """Fills the rings and the query buffer for all sequences of a partition.

    One warp copies the key blocks, another one the queries.

    Args:
      pages: the cache [P, 64, 576] in global memory.
    """
    i32, W = jnp.int32, rings.plan.warpgroups
    sequence_count = work.sequence_count()

    def fetch_queries(i):
        queries.fetch(i, work.schedule[work.partition, 0] + i)

    def fetch_blocks(i, done):
        work_range = work.range()
        page = work.page(work_range[0] + i, jnp.where(i == 0, work_range[2], 0))
        b, begin, count = work.segment(i, work_range)

        def fetch(j, page):
            ahead = work.page(b, begin + j + 1)
            w = rings.owner(done + j)
            stages = rings.stages_of(rings.index(done + j))
            for columns, (stage, use) in zip(rings.plan.slices, stages, strict=True):
                rings.wait_until_free(w, stage, use)
                window = page, pl.ds(0, BLOCK), pl.ds(columns.first, columns.width)
                target = rings.stage_ref(w, stage)
                rings.barriers.copy(rings.full(w, stage), pages, window, target, None)
            return ahead

        lax.fori_loop(0, count, fetch, page)
        return done + count

    def wait_for_arrivals(done):
        for w in range(W):
            rings.wait_for_arrivals(w, rings.index(done + (W - 1 - w)))

    if not gpu:  # in the interpreter a warpgroup is one thread

        def fetch_sequence(i, done):
            fetch_queries(i)
            return fetch_blocks(i, done)

        wait_for_arrivals(lax.fori_loop(0, sequence_count, fetch_sequence, i32(0)))
        queries.wait_for_arrivals(sequence_count)
        return

    @when(warp_is(0))
    def _():
        wait_for_arrivals(lax.fori_loop(0, sequence_count, fetch_blocks, i32(0)))

    @when(warp_is(1))
    def _():
        lax.fori_loop(0, sequence_count, lambda i, _: fetch_queries(i), None)
        queries.wait_for_arrivals(sequence_count)
