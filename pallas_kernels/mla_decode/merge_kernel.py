"""The second Hopper kernel of mla_decode: joins the pieces of the rows that several parts shared.

Weighted by their log-sum-exp, as :func:`pallas_kernels.merge_attention` does, all pieces of a row
at once and in float32, into the places that the first kernel left open.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

from pallas_kernels.hopper import multiprocessors

_NO_SCORE = -1e30  # below every score, and finite: -inf - -inf would be NaN
_PROGRAMS_AN_SM = 16
_UNROLLED = 8  # pieces whose loads are under way together


def merge_pieces(
    out: BFloat16[Array, "B M C"],
    lse: Float32[Array, "B M"],
    pieces: Float32[Array, "pieces Mp C"],
    piece_lse: Float32[Array, "pieces Mp"],
    split: Int[Array, "parts 4"],
    *,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"]]:
    """``out`` and ``lse`` with the split rows filled in; see :class:`schedule.Schedule`."""
    M, C = out.shape[1:]
    # As many programs as run at once, whatever there is to merge: often it is nothing.
    programs = min(split.shape[0] * M, _PROGRAMS_AN_SM * multiprocessors())

    def body(piece_g, piece_lse_g, split_g, out_g, lse_g):
        program = lax.axis_index("program")
        left = split_g[0, 3] * M - program

        def merge_row(i, _):
            place = program + i * programs
            m = lax.rem(place, M)
            b, first, count = (split_g[lax.div(place, M), k] for k in range(3))

            def add(i, carry):
                """Several pieces, all their loads under way together; past the last one the last
                one again, for nothing."""
                total, weight, top = carry
                numbers = [i * _UNROLLED + j for j in range(_UNROLLED)]
                pieces = [first + jnp.minimum(n, count - 1) for n in numbers]
                lses = [piece_lse_g[piece, m] for piece in pieces]
                parts = [piece_g[piece, m] for piece in pieces]
                highest = functools.reduce(jnp.maximum, lses, top)
                kept = jnp.exp(top - highest)
                total, weight = total * kept, weight * kept
                for n, lse, part in zip(numbers, lses, parts, strict=True):
                    share = jnp.where(n < count, jnp.exp(lse - highest), 0.0)
                    total, weight = total + share * part, weight + share
                return total, weight, highest

            rounds = lax.div(count + _UNROLLED - 1, _UNROLLED)
            zeros = plgpu.layout_cast(
                jnp.zeros((C,), jnp.float32), plgpu.Layout.WG_STRIDED((C,), vec_size=2)
            )
            nothing = zeros, jnp.float32(0.0), jnp.float32(_NO_SCORE)
            total, weight, top = lax.fori_loop(0, rounds, add, nothing)
            out_g[b, m] = (total / jnp.where(weight == 0.0, 1.0, weight)).astype(out.dtype)
            lse_g[b, m] = jnp.where(weight == 0.0, -jnp.inf, jnp.log(weight) + top)

        rows = lax.div(jnp.maximum(left + programs - 1, 0), programs)
        lax.fori_loop(0, rows, merge_row, None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    pl.kernel(  # not plgpu.kernel, which takes no refs in jax 0.10
        body,
        out_type=(),
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",)),
        **({} if interpret is None else {"interpret": interpret}),
    )(pieces, piece_lse, split, out_ref, lse_ref)  # pyright: ignore[reportCallIssue]
    return out_ref[...], lse_ref[...]
