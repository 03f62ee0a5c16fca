"""Which experts a token goes to, and the pairs of both sorted by expert."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.route import mosaic_gpu, reference
from pallas_kernels.route.reference import Routes, Rule

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.route,
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
    """Scores the experts, chooses K = ``num_experts_per_tok`` a token, sorts the pairs by expert.

    A token chooses by its scores s plus ``bias``, among the experts of the ``topk_group`` best of
    ``n_group`` groups of consecutive experts; of equal ones the lower comes first. Its weights are
    the chosen s, divided by their sum under ``normalize``, times ``scaling_factor``. Logits have a
    gradient through scores and weights; choices have none (V3 report, equations 12 to 16).

    Args:
      bias: added for the choice alone; none is zero.
      valid: tokens that are no padding; others choose, and their pairs stand behind all groups.
      method: ``noaux_tc``, a group is as good as its two best experts together; ``greedy`` or
        ``group_limited_greedy``, as its best.
      scoring: s of the logits, ``sigmoid`` or ``softmax``.

    Raises:
      ValueError: shapes or settings do not fit together.
      NotImplementedError: the named back-end does not take these arguments.
    """
    rule = Rule(
        num_experts_per_tok, n_group, topk_group, method, scoring, normalize, scaling_factor
    )
    rule.check(logits, bias, valid)
    return dispatch("route", BACKENDS, implementation, logits, bias, valid, rule=rule)
