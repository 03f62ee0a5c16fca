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
_PROGRAMS_AN_SM = 4  # that run at once, by their registers
_LOADS = 8  # pieces of rows whose loads are under way together


@functools.partial(jax.jit, static_argnames=("interpret"))
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
    B, M, C = out.shape
    parts = split.shape[0]
    # Many rows are cut in two, few in many. A program takes several query rows if pieces are few.
    deep = 2 if parts <= B else 4 if parts <= 4 * B else 8
    wide = _LOADS // deep
    groups = M // wide
    # As many programs as run at once, whatever there is to merge: often it is nothing.
    programs = min(parts * groups, _PROGRAMS_AN_SM * multiprocessors())
    early = interpret is None and hasattr(plgpu, "griddepcontrol_wait")  # not in jax 0.10

    def mla_merge(piece_g, piece_lse_g, split_g, out_g, lse_g):
        if early:  # launched while the first kernel still runs
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        program = lax.axis_index("program")
        left = split_g[0, 3] * groups - program

        def merge_rows(i, _):
            place = program + i * programs
            m0 = lax.rem(place, groups) * wide
            b, first, count = (split_g[lax.div(place, groups), k] for k in range(3))

            def add(i, carry):
                """Several pieces of several rows, all their loads under way together; past the last
                piece the last one again, for nothing."""
                numbers = [i * deep + j for j in range(deep)]
                pieces = [first + jnp.minimum(n, count - 1) for n in numbers]
                lses = [[piece_lse_g[piece, m0 + w] for piece in pieces] for w in range(wide)]
                values = [[piece_g[piece, m0 + w] for piece in pieces] for w in range(wide)]
                added = []
                for row, row_lses, row_values in zip(carry, lses, values, strict=True):
                    total, weight, top = row
                    highest = functools.reduce(jnp.maximum, row_lses, top)
                    kept = jnp.exp(top - highest)
                    total, weight = total * kept, weight * kept
                    for n, lse, value in zip(numbers, row_lses, row_values, strict=True):
                        share = jnp.where(n < count, jnp.exp(lse - highest), 0.0)
                        total, weight = total + share * value, weight + share
                    added.append((total, weight, highest))
                return added

            rounds = lax.div(count + deep - 1, deep)
            zeros = plgpu.layout_cast(
                jnp.zeros((C,), jnp.float32), plgpu.Layout.WG_STRIDED((C,), vec_size=2)
            )
            nothing = [(zeros, jnp.float32(0.0), jnp.float32(_NO_SCORE))] * wide
            for w, row in enumerate(lax.fori_loop(0, rounds, add, nothing)):
                total, weight, top = row
                merged = total / jnp.where(weight == 0.0, 1.0, weight)
                out_g[b, m0 + w] = merged.astype(out.dtype)
                lse_g[b, m0 + w] = jnp.where(weight == 0.0, -jnp.inf, jnp.log(weight) + top)

        rounds = lax.div(jnp.maximum(left + programs - 1, 0), programs)
        lax.fori_loop(0, rounds, merge_rows, None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    pl.kernel(  # not plgpu.kernel, which takes no refs in jax 0.10
        mla_merge,
        out_type=(),
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",)),
        **({} if interpret is None else {"interpret": interpret}),
    )(pieces, piece_lse, split, out_ref, lse_ref)  # pyright: ignore[reportCallIssue]
    return out_ref[...], lse_ref[...]
