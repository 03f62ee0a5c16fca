"""The feed-forward half of a decoder layer in one Hopper kernel, for one to eight tokens.

One program per multiprocessor stays for the whole half. In each, a producer warp streams weights
through a ring, phase after phase of a static list, and two consumer warpgroups multiply
(:mod:`program`, :mod:`stream`). Activations pass from phase to phase through global memory, with a
grid barrier between. Each program norms the tokens and chooses the experts for itself, which takes
less time than another barrier.

    phase               weights                     activations             results
    w_uv                [H, V, C]                   attention's output      values
    -- grid barrier --
    o_proj              [D, H V]                    values                  h
    -- grid barrier --
    router              [E, D]                      norm of h               logits
    gate_up             shared gate, up [F, D]      norm of h               hidden rows
    -- grid barrier --
    down                shared down [D, F]          hidden rows             sums in shared memory
    routed_gate_up      chosen gates, ups           norm of h               hidden rows
    -- grid barrier --
    routed_down         chosen downs                hidden rows             added to these

Attention's output is copied, or merged from parts (:mod:`merging`), to the programs that need it.
Then ``out = h + sums``. Without w_uv, or without it and o_proj, the first phases and barriers are
missing. A dense layer has only gate_up and down after them. The producer passes the first
barrier with the weights of ``down``; it waits for the choice of experts before it copies theirs,
and passes the second barrier with their downs.

A pair of a token and an expert is a matrix of its own: if several tokens choose an expert, its
weights are read for each. Eight tokens of a model with 256 experts and 8 choices read 12 % more
than they need.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.decoder_layer.plan import Plan
from pallas_kernels.decoder_layer.program import Program
from pallas_kernels.decoder_layer.reference import Chosen, Matrices, Projection, Router
from pallas_kernels.decoder_layer.stream import CONSUMERS, Totals
from pallas_kernels.decoder_layer.units import Refs
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.mla_decode.parts import Parts
from pallas_kernels.route.lanes import SHAPE


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def feed_forward(
    h: Float[Array, "M D"],
    attended: Float[Array, "M _"] | Parts | None,
    o_proj: Projection | None,
    w_uv: Float[Array, "H V C"] | None,
    norm: Float[Array, " D"],
    router: Router | None,
    shared: Matrices | None,
    routed: Matrices | None,
    counter: Any,
    *,
    plan: Plan,
    interpret: Any,
) -> tuple[
    Float[Array, "M D"],
    Chosen | None,
    Int32[Array, "programs stamps"] | None,
]:
    """Returns ``h + ffn(norm(h))`` and the routing, after adding ``o_proj attended`` to h.

    If ``plan.config.timed``, it also returns each program's clock at ``plan.events``, and the
    GPU's nanoseconds at the first and the last of them, modulo 2**32.

    Args:
      router, routed: of an MoE layer, or None.
      shared: the MLP of a dense layer, the shared experts of an MoE layer, or None.
      counter: Ref of the grid barrier's counter. The interpreter needs none.
    """
    M, D, programs = plan.tokens, plan.width, plan.config.programs
    arrays = _arrays(h, attended, o_proj, w_uv, norm, router, shared, routed)
    results = _results(plan, h.dtype)
    inputs, structure = jax.tree.flatten(arrays)
    existing = {name: it for name, it in results.items() if it[0][0]}
    scratch = _scratch(plan, h.dtype, interpret)
    counts = [len(each) for each in scratch.values()]

    def feed_forward(*given_refs: Any) -> None:
        refs = list(given_refs)
        given = structure.unflatten(refs[: len(inputs)])
        del refs[: len(inputs)]
        counter_g = refs.pop(0) if interpret is None else None
        stored = dict(zip(existing, refs[: len(existing)], strict=True))
        del refs[: len(existing)]
        memory = {}
        for name, count in zip(scratch, counts, strict=True):
            memory[name], refs = refs[:count], refs[count:]
        names = dict.fromkeys(results) | stored
        Program(plan, Refs(**given, **names), memory, counter_g, interpret).run()

    kernel = plgpu.kernel(
        feed_forward,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in existing.values()],
        scratch_types=[each for group in scratch.values() for each in group],
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **GridBarrier.launch(programs, interpret),
    )
    made = kernel(*inputs, *([counter] if interpret is None else []))
    by_name = dict(zip(existing, made, strict=True))
    chosen = None if router is None else _chosen(plan, by_name)
    clocks = by_name["clocks"].reshape(programs, -1) if plan.config.timed else None
    return by_name["out"].reshape(M, D), chosen, clocks


def _arrays(
    h: Float[Array, "M D"], attended: Float[Array, "M _"] | Parts | None,
    o_proj: Projection | None, w_uv: Float[Array, "H V C"] | None, norm: Float[Array, " D"],
    router: Router | None, shared: Matrices | None, routed: Matrices | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the arrays that the kernel reads, by the names of :class:`units.Refs`."""
    parts, attended = (attended, None) if isinstance(attended, Parts) else (None, attended)
    return {
        "h": h,
        "flat_h": h.reshape(-1),
        "attended": attended,
        "flat_attended": None if attended is None else attended.reshape(-1),
        "parts": parts,
        "o_proj": None if o_proj is None else _flat_scales(o_proj),
        "w_uv": w_uv,
        "norm": norm,
        "router": None if router is None else router.weight,
        "bias": None if router is None else router.bias,
        "shared": None if shared is None else _flat_scales(shared),
        "routed": None if routed is None else _flat_scales(routed),
    }


def _results(plan: Plan, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the shapes and dtypes of the arrays that the kernel writes. Empty ones are absent."""
    M, D, E, pairs = plan.tokens, plan.width, plan.experts, plan.choices
    programs, f32, i32 = plan.config.programs, jnp.float32, jnp.int32
    return {
        "out": ((M * D,), dtype),
        "values": ((M * plan.attention * bool(plan.heads),), dtype),
        "residual": ((M * D * bool(plan.attention),), dtype),
        "scores": ((M * E,), f32),
        "experts": ((programs * pairs,), i32),
        "weights": ((programs * pairs,), f32),
        "logits": ((M * E,), f32),
        "hidden": ((M * plan.ffn,), dtype),
        "routed_hidden": ((pairs * plan.expert_ffn,), dtype),
        "clocks": ((programs * plan.stamps * plan.config.timed,), i32),
    }


def _chosen(plan: Plan, by_name: dict[str, jax.Array]) -> Chosen:
    """Returns the routing of an MoE layer from the arrays of :func:`_results`."""
    M, pairs = plan.tokens, plan.choices
    return Chosen(
        by_name["scores"].reshape(M, plan.experts),
        by_name["experts"][:pairs].reshape(M, -1),
        by_name["weights"][:pairs].reshape(M, -1),
    )


def _flat_scales(matrices: Any) -> Any:
    return matrices._replace(scales=tuple(scale.reshape(-1) for scale in matrices.scales))


def _scratch(plan: Plan, dtype: Any, interpret: Any) -> dict[str, list[Any]]:
    """Returns the scratch types by what they are for."""
    f32 = jnp.float32
    signals = [Barriers.scratch(plan.signals, CONSUMERS, interpret)]
    return {
        "stages": plan.stages.scratch(),
        "ring": Ring.scratch(plan.stages.count, 2, CONSUMERS, interpret),
        "totals": Totals.scratch(interpret),
        "signals": signals,
        "activations": [plgpu.SMEM((plan.activations,), dtype)],
        "sums": [plgpu.SMEM((plan.own_outputs * plan.output_blocks, *SHAPE), f32)],
        "norms": [plgpu.SMEM((CONSUMERS, *SHAPE), f32)],
        "factors": [plgpu.SMEM((plan.factors,), f32)] if plan.factors else [],
        "grid": GridBarrier.scratch(CONSUMERS, interpret),
    }
