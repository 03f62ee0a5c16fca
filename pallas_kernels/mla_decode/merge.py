"""The second Hopper kernel of mla_decode: the split-KV merge.

It merges the partial results of every split sequence, weighted by their log-sum-exp as in
:func:`pallas_kernels.merge_attention`, but all at once and in float32. It writes the elements of
``out`` and ``lse`` that the first kernel left unwritten.

A CTA is one warpgroup. It merges a few query rows of a split sequence at a time: 8 loads of partial
results are in flight, of one row or of several, as a sequence has many parts or few.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import NO_SCORE
from pallas_kernels.hopper.split_kv import add_parts

_CTAS_PER_SM = 4  # resident CTAs, limited by registers
_LOADS = 8  # query rows of partial results that a CTA loads at a time


@lowered_once("interpret")
def merge_partials(
    out: BFloat16[Array, "B M C"],
    lse: Float32[Array, "B M"],
    partials: Float32[Array, "partials Mp C"],
    partial_lse: Float32[Array, "partials Mp"],
    split_sequences: Int[Array, "partitions 4"],
    *,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"]]:
    """Returns the outputs and log-sum-exps of the first kernel with those of split sequences filled
    in. See :class:`split_kv.Parts` for the arguments."""
    B, M, C = out.shape
    partitions = split_sequences.shape[0]
    # The more sequences there are, the fewer parts each split one has, and the more of its query
    # rows a CTA merges at a time. M is a multiple of 8.
    parts_per_step = 2 if partitions <= B else 4 if partitions <= 4 * B else 8
    rows_per_step = _LOADS // parts_per_step
    groups = M // rows_per_step
    # As many CTAs as can be resident, however much there is to merge: often it is nothing.
    ctas = min(partitions * groups, _CTAS_PER_SM * multiprocessors())

    def mla_merge(partial_g, partial_lse_g, split_g, out_g, lse_g):
        overlap_preceding_kernel(interpret=interpret)
        cta = lax.axis_index("cta")
        remaining = split_g[0, 3] * groups - cta

        def merge_rows(i, _):
            group = cta + i * ctas  # of ``groups`` per split sequence
            m0 = lax.rem(group, groups) * rows_per_step
            b, first, count = (split_g[lax.div(group, groups), k] for k in range(3))

            def add(i, carry):
                """Adds some partial results of the group's query rows. All loads are issued before
                any is used. Past the last partial result the last one is loaded again and gets
                weight 0."""
                numbers = [i * parts_per_step + j for j in range(parts_per_step)]
                partials = [first + jnp.minimum(n, count - 1) for n in numbers]
                rows = range(rows_per_step)
                lses = [[partial_lse_g[partial, m0 + w] for partial in partials] for w in rows]
                values = [[partial_g[partial, m0 + w] for partial in partials] for w in rows]
                return [
                    add_parts(row, numbers, count, row_lses, row_values)
                    for row, row_lses, row_values in zip(carry, lses, values, strict=True)
                ]

            steps = lax.div(count + parts_per_step - 1, parts_per_step)
            zeros = plgpu.layout_cast(
                jnp.zeros((C,), jnp.float32), plgpu.Layout.WG_STRIDED((C,), vec_size=2)
            )
            initial = [(zeros, jnp.float32(0.0), jnp.float32(NO_SCORE))] * rows_per_step
            for w, row in enumerate(lax.fori_loop(0, steps, add, initial)):
                total, weight, maximum = row
                merged = total / jnp.where(weight == 0.0, 1.0, weight)
                out_g[b, m0 + w] = merged.astype(out.dtype)
                lse_g[b, m0 + w] = jnp.where(weight == 0.0, -jnp.inf, jnp.log(weight) + maximum)

        rounds = lax.div(jnp.maximum(remaining + ctas - 1, 0), ctas)
        lax.fori_loop(0, rounds, merge_rows, None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    pl.kernel(  # not plgpu.kernel, which takes no refs in jax 0.10
        mla_merge,
        out_type=(),
        mesh=plgpu.Mesh(grid=(ctas,), grid_names=("cta",)),
        **({} if interpret is None else {"interpret": interpret}),
    )(partials, partial_lse, split_sequences, out_ref, lse_ref)  # pyright: ignore[reportCallIssue]
    return out_ref[...], lse_ref[...]
