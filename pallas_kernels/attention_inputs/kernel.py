"""Everything before attention itself in one Hopper kernel, for one to eight tokens.

One program per multiprocessor stays for the whole kernel. In each, a producer warp streams weights
through a ring, phase after phase, and two consumer warpgroups multiply, see
:mod:`pallas_kernels.decoder_layer.stream`. The units of all phases go round the programs, so that
programs without a last unit of one phase get the first of the next.

    phase       weights             activations         results
    q_proj      [H (N + R), D]      norm of x           q_nope; rotated q_rope
    kv_a_proj   [C + R, D]          norm of x           latents; rotated rope keys in the pages
    -- grid barrier --
    w_uk        [H, N, C]           q_nope              q_latent
    latents                         latents             their norm in the pages

Rope needs no barrier: a unit's eight features are four of its pairs. With q_a_proj it comes in the
place of q_proj, and q_b_proj follows after a barrier of its own and the norm of its results. The
results between phases are float32, apart from what tensor cores multiply.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention_inputs.plan import Plan
from pallas_kernels.attention_inputs.program import SIGNALS, Program, Refs
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.decoder_layer.stream import CONSUMERS, Totals
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.route.lanes import SHAPE


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def attention_inputs(
    x: Float[Array, "M D"],
    weights: AttentionWeights,
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Float[Array, "P page width"],
    slots: Int32[Array, " M"],
    counter: Any,
    *,
    plan: Plan,
    interpret: Any,
) -> tuple[
    Float[Array, "M H C"],
    Float[Array, "M H R"],
    Float[Array, "P page width"],
]:
    """Returns the queries for attention, and the pages with the tokens' latents.

    Args:
      counter: Ref of the grid barrier's counter. The interpreter needs none.
    """
    M, pieces = plan.tokens, plan.pieces
    inputs, structure = jax.tree.flatten(
        {"x": x, "weights": _with_flat_scales(weights), "cos": cos, "sin": sin, "slots": slots}
    )
    results = _results(plan, x.dtype)
    existing = {name: it for name, it in results.items() if it[0][0]}
    scratch = _scratch(plan, x.dtype, interpret)
    rows = jax.new_ref(pages.reshape(-1, pages.shape[-1]))

    def attention_inputs(*given_refs: Any) -> None:
        refs = list(given_refs)
        given = structure.unflatten(refs[: len(inputs)])
        del refs[: len(inputs)]
        pages_g = refs.pop(0)
        counter_g = refs.pop(0) if interpret is None else None
        stored = dict(zip(existing, refs[: len(existing)], strict=True))
        del refs[: len(existing)]
        memory = {}
        for name, types in scratch.items():
            memory[name], refs = refs[: len(types)], refs[len(types) :]
        arrays: Any = dict.fromkeys(results) | stored | {"pages": pages_g}
        Program(plan, Refs(**given, **arrays), memory, counter_g, interpret).run()

    kernel = plgpu.kernel(
        attention_inputs,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in existing.values()],
        scratch_types=[each for types in scratch.values() for each in types],
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **GridBarrier.launch(plan.config.programs, interpret),
    )
    made = kernel(*inputs, rows, *([counter] if interpret is None else []))
    q_latent = made[0].reshape(M, pieces.heads, pieces.rank)
    q_rope = made[1].reshape(M, pieces.heads, plan.rope)
    return q_latent, q_rope, rows[...].reshape(pages.shape)


def _results(plan: Plan, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the shapes and dtypes of the arrays that the kernel writes. Empty ones are absent."""
    M, pieces, f32 = plan.tokens, plan.pieces, jnp.float32
    return {
        "q_latent": ((M * pieces.heads * pieces.rank,), dtype),
        "q_rope": ((M * pieces.heads, plan.rope), dtype),
        "compressed": ((M * plan.q_rank,), f32),
        "queries": ((M * pieces.heads * pieces.query_stride,), f32),
        "latents": ((M * pieces.rank,), f32),
    }


def _with_flat_scales(weights: AttentionWeights) -> AttentionWeights:
    def flat(each: Projection | None) -> Projection | None:
        if each is None:
            return None
        return each._replace(scales=tuple(scale.reshape(-1) for scale in each.scales))

    names = "q_proj", "kv_a_proj", "q_a_proj"
    return weights._replace(**{name: flat(getattr(weights, name)) for name in names})


def _scratch(plan: Plan, dtype: Any, interpret: Any) -> dict[str, list[Any]]:
    """Returns the scratch types by what they are for."""
    f32, pieces, stages = jnp.float32, plan.pieces, plan.stages
    # The interpreter's stages cannot be seen as arrays of another shape.
    of_pieces = stages.count, 2, pieces.rows // 2, pieces.width
    return {
        "stages": stages.scratch(),
        "pieces": [] if interpret is None else [plgpu.SMEM(of_pieces, pieces.dtype)],
        "ring": Ring.scratch(stages.count, 2, CONSUMERS, interpret),
        "totals": Totals.scratch(interpret),
        "signals": [Barriers.scratch(SIGNALS, CONSUMERS, interpret)],
        "activations": [plgpu.SMEM((plan.activations,), dtype)],
        "queries": [plgpu.SMEM((plan.tokens * pieces.query_stride,), f32)],
        "partials": [plgpu.SMEM((plan.partials,), f32)],
        "norms": [plgpu.SMEM((CONSUMERS, *SHAPE), f32)],
        "factors": [plgpu.SMEM((plan.tokens,), f32)] if plan.config.packed else [],
        "grid": GridBarrier.scratch(CONSUMERS, interpret),
    }
