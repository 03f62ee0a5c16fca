"""Expert routing: chooses experts for each token, and sorts the (token, expert) pairs."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.route import counting, mosaic_gpu, reference
from pallas_kernels.route.reference import Routes, Rule

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.route,
    "counting": counting.route,
    "reference": reference.route,
}


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    method: str,
    scoring: str,
    normalize: bool,
    scaling_factor: float,
    implementation: Implementation = None,
) -> Routes:
    """Scores experts, chooses K = ``num_experts_per_tok`` per token, sorts the pairs by expert.

    A token chooses the experts with the largest score s plus ``bias``, among those of the
    ``topk_group`` best of ``n_group`` groups of consecutive experts. Ties go to the lower index.
    The routing weights are the scores s of the chosen experts, divided by their sum if
    ``normalize``, times ``scaling_factor``. The gradient flows to the logits through scores and
    weights, not through the choice (DeepSeek-V3 report, equations 12 to 16).

    Args:
      logits: router logits.
      bias: added to the scores for the choice only. None means zero.
      valid: False for padding tokens. They choose experts too, but their pairs are sorted after all
        others and not counted.
      method: how a group is scored: by the sum of its two best experts (``noaux_tc``), or by its
        best (``greedy``, ``group_limited_greedy``).
      scoring: function from logits to scores, ``sigmoid`` or ``softmax``.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Raises:
      ValueError: shapes or settings are inconsistent.
      NotImplementedError: no selected back-end takes these arguments.
    """
    rule = Rule(
        num_experts_per_tok, n_group, topk_group, method, scoring, normalize, scaling_factor
    )
    rule.check(logits, bias, valid)
    return dispatch("route", BACKENDS, implementation, logits, bias, valid, rule=rule)
