"""The second Hopper kernel of mla_decode: joins the pieces of the rows that several parts shared.

Weighted by their log-sum-exp, as :func:`pallas_kernels.merge_attention` does, all pieces of a row
at once and in float32, into the places that the first kernel left open.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

_UNROLLED = 8  # pieces whose loads are under way together


def merge_pieces(
    out: BFloat16[Array, "B M C"],
    lse: Float32[Array, "B M"],
    pieces: Float32[Array, "pieces Mp C"],
    piece_lse: Float32[Array, "pieces Mp"],
    split: Int[Array, "parts 3"],
    *,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"]]:
    """``out`` and ``lse`` with the split rows filled in; see :class:`schedule.Schedule`."""
    M, C = out.shape[1:]

    def body(piece_g, piece_lse_g, split_g, out_g, lse_g):
        place, m = lax.axis_index("place"), lax.axis_index("m")
        b, first, count = (split_g[place, i] for i in range(3))

        @pl.when(count > 0)
        def _():
            # Several loads under way together; past the last piece the last one again, for nothing.
            def several(i):
                numbers = [i * _UNROLLED + j for j in range(_UNROLLED)]
                pieces = [first + jnp.minimum(n, count - 1) for n in numbers]
                return zip(numbers, pieces, [piece_lse_g[p, m] for p in pieces], strict=True)

            def largest(i, top):
                for _, _, lse in several(i):
                    top = jnp.maximum(top, lse)
                return top

            def add(i, carry):
                total, weight = carry
                for n, piece, lse in several(i):
                    share = jnp.where(n < count, jnp.exp(lse - top), 0.0)
                    total, weight = total + share * piece_g[piece, m], weight + share
                return total, weight

            rounds = lax.div(count + _UNROLLED - 1, _UNROLLED)
            top = lax.fori_loop(0, rounds, largest, jnp.float32(-jnp.inf))
            top = jnp.where(top == -jnp.inf, 0.0, top)
            nothing = jnp.zeros((C,), jnp.float32), jnp.float32(0.0)
            total, weight = lax.fori_loop(0, rounds, add, nothing)
            out_g[b, m] = (total / jnp.where(weight == 0.0, 1.0, weight)).astype(out.dtype)
            lse_g[b, m] = jnp.where(weight == 0.0, -jnp.inf, jnp.log(weight) + top)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        grid=(split.shape[0], M),
        grid_names=("place", "m"),
        **({} if interpret is None else {"interpret": interpret}),
    )(pieces, piece_lse, split, out_ref, lse_ref)
    return out_ref[...], lse_ref[...]
