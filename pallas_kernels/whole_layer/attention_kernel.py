"""The phase of attention as a kernel of its own, for tests and to time it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decoder_layer.stream import CONSUMERS, Totals
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.mla_decode.parts import Parts
from pallas_kernels.whole_layer.attention import (
    PROBABILITY_NUMBERS,
    QUERY_NUMBERS,
    REDUCED_NUMBERS,
    Attention,
    Memory,
    Refs,
    Sizes,
)


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def attend(
    q_latent: Float[Array, "T H C"],
    q_rope: Float[Array, "T H R"],
    pages: Float[Array, "P page width"],
    table: Int[Array, " max_pages"],
    start: Int[Array, 1],
    *,
    sizes: Sizes,
    interpret: Any = None,
) -> Parts:
    """Returns attention's output of one sequence in parts.

    Args:
      start: tokens that were cached before the T new ones, whose latents are in the pages.
    """
    _, page, columns = pages.shape
    sizes.check(page, columns, len(table) * page, interpret)
    T, H, C = q_latent.shape
    bf16, f32 = q_latent.dtype, jnp.float32

    def attend(
        q_latent: Any, q_rope: Any, pages: Any, table: Any, start: Any, partials: Any, lse: Any,
        queries_s: Any, probabilities_s: Any, numbers_s: Any, *totals: Any,
    ) -> None:  # fmt: skip
        overlap_preceding_kernel(interpret=interpret)
        attention = Attention(
            sizes,
            Refs(q_latent, q_rope, pages, table, start, partials, lse),
            Memory(queries_s, probabilities_s, numbers_s),
            Totals.of(totals, interpret),
            lax.axis_index("program"),
            lax.axis_index("wg"),
            interpret,
        )
        attention.load_start()
        attention.find_page()
        attention.load_early()
        attention.run()

    partials, lse = plgpu.kernel(
        attend,
        out_type=[
            jax.ShapeDtypeStruct((sizes.parts, sizes.rows, C), f32),
            jax.ShapeDtypeStruct((sizes.parts, sizes.rows), f32),
        ],
        scratch_types=[
            plgpu.SMEM((QUERY_NUMBERS,), bf16),
            plgpu.SMEM((PROBABILITY_NUMBERS,), bf16),
            plgpu.SMEM((REDUCED_NUMBERS,), f32),
            *Totals.scratch(interpret),
        ],
        grid=(sizes.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(
        q_latent.reshape(-1),
        q_rope.reshape(T * H, -1),
        pages.reshape(-1, pages.shape[-1]),
        table.astype(jnp.int32),
        start.astype(jnp.int32),
    )
    count = sizes.split(start[0].astype(jnp.int32))[2]
    entries = jnp.stack([jnp.int32(0), jnp.int32(0), count, jnp.int32(1)])[None]
    # All sequences are in parts, so that nothing reads ``out``.
    return Parts(jnp.zeros((1, sizes.rows, C), bf16), partials, lse, entries)
