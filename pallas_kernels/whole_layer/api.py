"""The public whole_layer: a decoder layer of one token of one sequence as one operation."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Float32

from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.route.reference import Rule
from pallas_kernels.whole_layer import mosaic_gpu, reference
from pallas_kernels.whole_layer.reference import Cached, LayerOutput, LayerWeights

BACKENDS = {"reference": reference.whole_layer, "mosaic_gpu": mosaic_gpu.whole_layer}


def whole_layer(
    x: Float[Array, "T D"],
    before: AttentionWeights,
    after: LayerWeights,
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    cached: Cached,
    *,
    scale: float,
    eps: float,
    latent_eps: float,
    after_eps: float,
    rule: Rule | None,
    counter: Any = None,
    implementation: Implementation = None,
) -> LayerOutput:
    """Computes a decoder layer in absorbed form: ``h = x + o_proj(attention(norm x))``, and then
    ``h + ffn(norm h)``.

    It is :func:`pallas_kernels.attention_inputs`, :func:`pallas_kernels.mla_decode` and
    :func:`pallas_kernels.feed_forward`, one after the other. Each of the new tokens sees those
    cached before, the new ones before it, and itself.

    Args:
      x: the layer's input.
      cos, sin: of the R / 2 rotary angles of each token.
      scale: factor of attention's scores.
      eps, latent_eps: see :func:`pallas_kernels.attention_inputs`.
      after_eps: of the norm after attention.
      rule: how experts are chosen; None in a dense layer.
      counter: see :func:`pallas_kernels.feed_forward`.
      implementation: back-end name, or names in order of preference; see ``dispatch``. By default
        the reference.

    Raises:
      NotImplementedError: no selected back-end takes these arguments.
    """
    options = {"scale": scale, "eps": eps, "latent_eps": latent_eps, "after_eps": after_eps}
    options |= {"rule": rule, "counter": counter}
    arrays = x, before, after, cos, sin, cached
    return dispatch("whole_layer", BACKENDS, implementation, *arrays, **options)
