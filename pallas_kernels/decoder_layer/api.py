"""The public feed_forward: the second half of a decoder layer as one operation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.decoder_layer import mosaic_gpu, reference
from pallas_kernels.decoder_layer.reference import (
    Chosen,
    Matrices,
    Projection,
    Router,
    scales_shape,
    shape_of,
)
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.hopper.split_kv import Parts
from pallas_kernels.route.reference import Rule

# The reference is first, so only a caller who names the kernel gets it: whether it is faster
# depends on the whole layer, see dsv3_jax.overrides.few_tokens.
BACKENDS = {"reference": reference.feed_forward, "mosaic_gpu": mosaic_gpu.feed_forward}


def feed_forward(
    h: Float[Array, "M D"],
    norm: Float[Array, " D"],
    router: Router | None,
    shared: Matrices | None,
    routed: Matrices | None,
    *,
    rule: Rule | None,
    eps: float,
    attended: Float[Array, "M _"] | Parts | None = None,
    o_proj: Projection | None = None,
    w_uv: Float[Array, "H V C"] | None = None,
    counter: Any = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "M D"], Chosen | None]:
    """Computes ``h + ffn(x)`` with ``x = norm h / sqrt(mean(h^2) + eps)``.

    In a dense layer ``ffn`` is ``shared``. In an MoE layer it is the sum of ``shared`` and of each
    token's chosen experts, times their routing weights; the sum is float32 and rounded once.

    Args:
      h: the residual.
      norm: weights of the norm.
      router: the router; None in a dense layer.
      routed: stacks of the experts' matrices; None in a dense layer.
      shared: the dense MLP, or the shared experts as one MLP of their summed width, or None.
      rule: how experts are chosen, see :func:`pallas_kernels.route`; None in a dense layer.
      attended: attention's output, which is added to h first. The sum is rounded to h's dtype.
        None if h contains it. With ``w_uv`` it may be in parts, from :func:`mla_decode_parts`.
      o_proj: the projection of attention's output, or None if ``attended`` is projected already.
        The kernel requires it.
      w_uv: by head, what attention's output [M, H C] is multiplied by before ``o_proj``; or None.
      counter: Ref of the counter by which the kernel's CTAs wait for each other, which all
        calls of a program should share: ``jax.new_ref(grid_barrier.new_counter())``. None makes one
        for this call. The reference needs none.
      implementation: back-end name, or names in order of preference; see ``dispatch``. By default
        the reference.

    Returns:
      The output in h's dtype, and the routing of an MoE layer or None.

    Raises:
      ValueError: the arguments are neither those of a dense nor of an MoE layer, or their shapes
        do not match.
      NotImplementedError: no selected back-end takes these arguments.
    """
    _check(h, norm, router, shared, routed, rule)
    _check_attended(h, attended, o_proj, w_uv)
    arrays = h, norm, router, shared, routed
    options = {"rule": rule, "eps": eps, "attended": attended, "o_proj": o_proj}
    options |= {"w_uv": w_uv, "counter": counter}
    return dispatch("feed_forward", BACKENDS, implementation, *arrays, **options)


def _check(
    h: Array, norm: Array, router: Router | None, shared: Matrices | None,
    routed: Matrices | None, rule: Rule | None,
) -> None:  # fmt: skip
    given = [part is not None for part in (router, routed, rule)]
    if any(given) != all(given) or not (all(given) or shared is not None):
        parts = {"router": router, "shared": shared, "routed": routed, "rule": rule}
        names = [name for name, part in parts.items() if part is not None]
        raise ValueError(
            "expected shared alone, or router, routed and rule with or without shared; got"
            f" {', '.join(names) or 'none of them'}"
        )
    D = h.shape[1]
    if norm.shape != (D,):
        raise ValueError(f"norm: expected shape {(D,)}, got {norm.shape}")
    if router is not None and routed is not None and rule is not None:
        E = len(routed.gate)
        if router.weight.shape != (E, D):
            raise ValueError(f"router: expected shape {(E, D)}, got {router.weight.shape}")
        rule.check(jnp.zeros((1, E)), router.bias, None)
    for name, matrices in (("shared", shared), ("routed", routed)):
        if matrices is not None:
            _check_matrices(name, matrices, D)


def _check_attended(
    h: Array, attended: Array | Parts | None, o_proj: Projection | None, w_uv: Array | None
) -> None:
    if attended is None:
        if o_proj is not None:
            raise ValueError("o_proj: expected None without attended, got a projection")
        return
    (M, D), width = h.shape, h.shape[1]
    if o_proj is not None:
        width = shape_of(o_proj.weight)[1]
        if o_proj.weight.shape[0] != D:
            raise ValueError(f"o_proj: expected {D} rows, got shape {o_proj.weight.shape}")
        blocks = scales_shape(o_proj.weight)
        if o_proj.scales and [scale.shape for scale in o_proj.scales] != [blocks]:
            got = [scale.shape for scale in o_proj.scales]
            raise ValueError(f"o_proj: expected scales of shape {blocks}, got {got}")
    if w_uv is not None:
        H, V, C = w_uv.shape
        if o_proj is None or width != H * V:
            got = "no o_proj" if o_proj is None else f"{width} columns"
            raise ValueError(f"w_uv: expected an o_proj with {H * V} columns, got {got}")
        width = H * C
    if isinstance(attended, Parts):
        _check_parts(h, attended, w_uv)
        return
    if (attended.shape, attended.dtype) != ((M, width), h.dtype):
        raise ValueError(
            f"attended: expected {h.dtype} of shape {(M, width)}, got {attended.dtype} of"
            f" {attended.shape}"
        )


def _check_parts(h: Array, parts: Parts, w_uv: Array | None) -> None:
    if w_uv is None:
        raise ValueError("attended: expected an array without w_uv, got parts")
    (H, _, C), (B, rows, width) = w_uv.shape, parts.out.shape
    if len(h) % B or rows < len(h) // B * H or (width, parts.out.dtype) != (C, h.dtype):
        raise ValueError(
            f"attended: expected {h.dtype} parts of {len(h)} tokens with {H} rows of {C} each, got"
            f" {parts.out.dtype} of {parts.out.shape}"
        )


def _check_matrices(name: str, matrices: Matrices, D: int) -> None:
    *stack, F, _ = matrices.gate.shape
    expected = (*stack, F, D), (*stack, F, D), (*stack, D, F)
    got = tuple(shape_of(matrix) for matrix in matrices[:3])
    if got != expected:
        raise ValueError(f"{name}: expected gate, up and down of shapes {expected}, got {got}")
    if matrices.scales:
        blocks = [scales_shape(matrix) for matrix in matrices[:3]]
        scales = [scale.shape for scale in matrices.scales]
        if scales != blocks:
            raise ValueError(f"{name}: expected scales of shapes {blocks}, got {scales}")
