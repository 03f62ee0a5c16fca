"""The public attention_inputs: a decoder layer's operations before attention itself, as one."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.attention_inputs import mosaic_gpu, reference
from pallas_kernels.attention_inputs.reference import AttentionInputs, AttentionWeights
from pallas_kernels.decoder_layer.reference import scales_shape, shape_of
from pallas_kernels.dispatch import Implementation, dispatch

# The reference is first, so only a caller who names the kernel gets it: whether it is faster
# depends on the whole layer, see dsv3_jax.overrides.few_tokens.
BACKENDS = {"reference": reference.attention_inputs, "mosaic_gpu": mosaic_gpu.attention_inputs}


def attention_inputs(
    x: Float[Array, "M D"],
    weights: AttentionWeights,
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Float[Array, "P page width"],
    slots: Int[Array, " M"],
    *,
    eps: float,
    latent_eps: float,
    counter: Any = None,
    implementation: Implementation = None,
) -> AttentionInputs:
    """Computes multi-head latent attention's queries, and stores the tokens' latents.

    With ``n = norm x / sqrt(mean(x^2) + eps)``, and ``r`` a norm of the same form with
    ``latent_eps``::

        q = q_proj n, or q_b_proj r(q_a_proj n)        [q_nope | q_R] of each head
        q_latent = q_nope W_UK                         of each head
        q_rope = rotated q_R
        [c | k] = kv_a_proj n
        pages[slots] = [r(c) | rotated k]

    Args:
      x: the layer's input.
      cos: cosines of the R / 2 rotary angles of each token.
      sin: sines of the same angles.
      pages: the layer's cache. The result replaces it; inside jit, XLA updates it in place if it is
        not used afterwards.
      slots: ``page number * page + slot`` of each token, all different, or -1 for a token that is
        not stored.
      eps: of the norm of ``x``.
      latent_eps: of the norms of the latent and of q_a_proj's result.
      counter: see :func:`pallas_kernels.feed_forward`.
      implementation: back-end name, or names in order of preference; see ``dispatch``. By default
        the reference.

    Raises:
      ValueError: the shapes do not match.
      NotImplementedError: no selected back-end takes these arguments.
    """
    _check(x, weights, cos, pages)
    options = {"eps": eps, "latent_eps": latent_eps, "counter": counter}
    arrays = x, weights, cos, sin, pages, slots
    return dispatch("attention_inputs", BACKENDS, implementation, *arrays, **options)


def _check(x: Array, weights: AttentionWeights, cos: Array, pages: Array) -> None:
    D, (H, N, C), R = x.shape[1], weights.w_uk.shape, 2 * cos.shape[1]
    if (weights.q_a_proj is None) != (weights.q_a_norm is None):
        raise ValueError("q_a_proj and q_a_norm: expected both or neither, got one")
    expected = {"q_proj": (H * (N + R), D), "kv_a_proj": (C + R, D)}
    projections = {"q_proj": weights.q_proj, "kv_a_proj": weights.kv_a_proj}
    norms = {"norm": (weights.norm, D), "kv_a_norm": (weights.kv_a_norm, C)}
    if weights.q_a_proj is not None and weights.q_a_norm is not None:
        Q = weights.q_a_proj.weight.shape[0]
        expected |= {"q_proj": (H * (N + R), Q), "q_a_proj": (Q, D)}
        projections["q_a_proj"] = weights.q_a_proj
        norms["q_a_norm"] = weights.q_a_norm, Q
    for name, (weight, scales) in projections.items():
        if (shape := shape_of(weight)) != expected[name]:
            raise ValueError(f"{name}: expected shape {expected[name]}, got {shape}")
        blocks = scales_shape(weight)
        if scales and [scale.shape for scale in scales] != [blocks]:
            got = [scale.shape for scale in scales]
            raise ValueError(f"{name}: expected scales of shape {blocks}, got {got}")
    for name, (weight, width) in norms.items():
        if weight.shape != (width,):
            raise ValueError(f"{name}: expected shape {(width,)}, got {weight.shape}")
    if pages.shape[2] < C + R:
        raise ValueError(f"pages: expected {C + R} columns or more, got {pages.shape[2]}")
