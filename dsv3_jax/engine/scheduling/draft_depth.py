"""The number of drafts that one request verifies per step, from its own acceptance."""

from __future__ import annotations

_DECAY = 0.9
"""Weight of earlier counts after another step."""

_WORTH = 0.2
"""Least probability with which a draft must be accepted. A step reads weights for every token that
it verifies: most of them once for all tokens, but experts for few tokens at a time."""

_PROBE_INTERVAL = 16
"""Every 16th step verifies one draft more, to notice that drafts have become better."""


class DraftDepth:
    """Chooses how many drafts a request verifies in its next step.

    Let ``a_j`` be the estimated probability that draft j of a step is accepted, given that all
    before it were. Drafts are verified as far as ``a_1 ... a_j`` is large enough. A request whose
    drafts are rejected verifies none, except in probes.

    Results may be observed any number of steps late. The choice depends only on tokens of the past,
    and each depth preserves the model's distribution, so the choices do too.

    Args:
      most: greatest depth.
    """

    def __init__(self, most: int):
        # The prior is an acceptance of one in two.
        self._checked = [2.0] * most
        self._accepted = [1.0] * most
        self._steps = 0

    def choose(self) -> int:
        """Returns the depth of the next step."""
        self._steps += 1
        depth, probability = 0, 1.0
        for checked, accepted in zip(self._checked, self._accepted, strict=True):
            probability *= accepted / checked
            if probability < _WORTH:
                break
            depth += 1
        is_probe = self._steps % _PROBE_INTERVAL == 0
        return min(depth + is_probe, len(self._checked))

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes the result of a step: the number of drafts, and how many of them were accepted."""
        # Drafts after the first rejected one say nothing.
        for j in range(min(drafted, accepted + 1)):
            self._checked[j] = _DECAY * self._checked[j] + 1
            self._accepted[j] = _DECAY * self._accepted[j] + (j < accepted)
