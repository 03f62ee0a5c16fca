"""A decoder layer of one token of one sequence in one Hopper kernel.

It is the program of :mod:`pallas_kernels.attention_inputs`, then attention, then the program of
:mod:`pallas_kernels.decoder_layer`, with one ring of weights and grid barriers between:

    attention_inputs    queries, and the new tokens' latents in the pages
    -- grid barrier --
    attention           parts of attention's output, and their log-sum-exps
    -- grid barrier --
    decoder_layer       parts merged, W_UV, and all that follows

Weights of the phases after attention are copied while it runs. It reads no weights itself, and its
cached keys are in registers before its queries are known.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention_inputs import kernel as before_attention
from pallas_kernels.attention_inputs.program import Refs as BeforeRefs
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer import kernel as after_attention
from pallas_kernels.decoder_layer.stream import CONSUMERS
from pallas_kernels.decoder_layer.units import Refs as AfterRefs
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.whole_layer.attention import Refs
from pallas_kernels.whole_layer.plan import EVENTS, Plan
from pallas_kernels.whole_layer.program import Program
from pallas_kernels.whole_layer.reference import Cached, LayerOutput, LayerWeights

# The scratch that each of the joined kernels has for itself.
_OF_EACH: dict[str, tuple[str, ...]] = {
    "before": ("signals", "queries", "partials", "factors", "pieces"),
    "after": ("signals", "sums", "factors"),
}


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def whole_layer(
    x: Float[Array, "T D"],
    before: AttentionWeights,
    after: LayerWeights,
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    cached: Cached,
    counter: Any,
    *,
    plan: Plan,
    interpret: Any,
) -> tuple[LayerOutput, tuple[Int32[Array, "programs _"], ...]]:
    """Implements :func:`pallas_kernels.whole_layer.api.whole_layer`.

    If ``plan.config.timed``, it also returns each program's clock at ``plan.EVENTS``, and what
    :func:`pallas_kernels.decoder_layer.kernel.feed_forward` does.

    Args:
      counter: Ref of the grid barrier's counter. The interpreter needs none.
    """
    w_uv, o_proj, norm, router, shared, routed = after
    pages = cached.pages
    weights = before_attention.with_flat_scales(before)
    inputs, structure = jax.tree.flatten(
        {
            "before": {"x": x, "weights": weights, "cos": cos, "sin": sin, "slots": cached.slots},
            "after": after_attention.arrays_of(x, None, o_proj, w_uv, norm, router, shared, routed),
            "table": cached.table,
            "start": cached.start,
        }
    )
    sizes, programs, f32 = plan.attention, plan.config.programs, jnp.float32
    results = {
        "before": before_attention.results_of(plan.before, x.dtype),
        "attention": {
            "partials": ((sizes.parts, sizes.rows, sizes.latent), f32),
            "lse": ((sizes.parts, sizes.rows), f32),
        },
        "own": {"clocks": ((programs * len(EVENTS) * plan.config.timed,), jnp.int32)},
        "after": after_attention.results_of(plan.after, x.dtype),
    }
    existing = [
        (group, name, it)
        for group, named in results.items()
        for name, it in named.items()
        if it[0][0]
    ]
    scratch, layout = jax.tree.flatten(
        _scratch(plan, x.dtype, interpret), is_leaf=lambda it: not isinstance(it, dict | list)
    )
    rows = jax.new_ref(pages.reshape(-1, pages.shape[-1]))

    def whole_layer(*given_refs: Any) -> None:
        refs = list(given_refs)
        given = structure.unflatten(refs[: len(inputs)])
        del refs[: len(inputs)]
        pages_g = refs.pop(0)
        counter_g = refs.pop(0) if interpret is None else None
        stored: dict[str, dict[str, Any]] = {
            group: dict.fromkeys(named) for group, named in results.items()
        }
        for group, name, _ in existing:
            stored[group][name] = refs.pop(0)
        memory = layout.unflatten(refs)
        of_before = BeforeRefs(**given["before"], **stored["before"], pages=pages_g)
        attention = Refs(
            of_before.q_latent, of_before.q_rope, pages_g, given["table"], given["start"],
            **stored["attention"],
        )  # fmt: skip
        of_after = AfterRefs(**given["after"], **stored["after"])
        clocks = stored["own"]["clocks"]
        Program(plan, of_before, attention, of_after, memory, counter_g, clocks, interpret).run()

    kernel = plgpu.kernel(
        whole_layer,
        out_type=[jax.ShapeDtypeStruct(*it) for _, _, it in existing],
        scratch_types=scratch,
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **GridBarrier.launch(programs, interpret),
    )
    made = kernel(*inputs, rows, *([counter] if interpret is None else []))
    by_name = {
        name: array
        for (group, name, _), array in zip(existing, made, strict=True)
        if group == "after"
    }
    chosen = None if after.router is None else after_attention.chosen_of(plan.after, by_name)
    clocks = tuple(
        array.reshape(programs, -1)
        for (_, name, _), array in zip(existing, made, strict=True)
        if name == "clocks"
    )
    out = by_name["out"].reshape(x.shape)
    return LayerOutput(out, chosen, rows[...].reshape(pages.shape)), clocks


def _scratch(plan: Plan, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Returns the scratch types: common ones, and those of the kernels that this one joins."""
    scratch: dict[str, Any] = {
        "before": before_attention.scratch_of(plan.before, dtype, interpret),
        "after": after_attention.scratch_of(plan.after, dtype, interpret),
    }
    common = {
        name: types for name, types in scratch["after"].items() if name not in _OF_EACH["after"]
    }
    for group, names in _OF_EACH.items():
        scratch[group] = {name: scratch[group][name] for name in names}
    activations = [plgpu.SMEM((plan.activations,), dtype)]
    arrived = [Barriers.scratch(1, CONSUMERS, interpret)]
    return common | scratch | {"activations": activations, "arrived": arrived}
