"""The number of drafts per step: of a request, or of a batch by its estimated throughput."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

AUTO_DEPTHS = (0, 1, 2, 4)
"""Depths that ``draft_depth="auto"`` chooses from. Each has a compiled program."""

AUTO_STEPS, AUTO_SECONDS = 32, 0.05
"""A dispatch has at most this many steps, or those of this time if that is more, if the depth is
chosen anew for each dispatch."""

_ACCEPTANCE_DECAY = 0.9  # weight of earlier counts after another step or dispatch
_COST_DECAY = 0.5  # the same for costs, which hardly vary except for an outlier at the start
_ENOUGH = 0.95  # fraction of the best rate that suffices to prefer fewer drafts
_PROBE_INTERVAL = 16  # every 16th choice tries something else, to notice what has changed

_WORTH = 0.2
"""Least probability with which a request's draft must be accepted. A step reads weights for every
token that it verifies: most of them once for all tokens, but experts for few tokens at a time."""


class _Acceptance:
    """Running estimate of the probability ``a_j`` that draft j of ``most`` in a step is accepted,
    given that all before it were. A draft that has not been checked has the acceptance ``prior``,
    as of two checks."""

    def __init__(self, most: int, prior: float):
        self._checked = [2.0] * most
        self._accepted = [2.0 * prior] * most

    def observe(self, position: int, checked: int, accepted: int) -> None:
        """Takes the counts of one draft of a step or of a dispatch."""
        for counts, count in ((self._checked, checked), (self._accepted, accepted)):
            counts[position] = _ACCEPTANCE_DECAY * counts[position] + count

    def __iter__(self) -> Iterator[float]:
        """Yields ``a_1``, ``a_1 a_2``, and so on."""
        each = map(operator.truediv, self._accepted, self._checked)
        return itertools.accumulate(each, operator.mul)


class DraftDepth:
    """Chooses how many drafts a request verifies in its next step, at most ``most``, from its own
    acceptance.

    Drafts are verified as far as ``a_1 ... a_j`` is large enough. A request whose drafts are
    rejected verifies none, except in probes, which verify one draft more.

    Results may be observed any number of steps late. The choice depends only on tokens of the past,
    and each depth preserves the model's distribution, so the choices do too.
    """

    def __init__(self, most: int):
        self._most = most
        self._acceptance = _Acceptance(most, 0.5)
        self._steps = 0

    def choose(self) -> int:
        """Returns the depth of the next step."""
        self._steps += 1
        worth = itertools.takewhile(lambda probability: probability >= _WORTH, self._acceptance)
        is_probe = self._steps % _PROBE_INTERVAL == 0
        return min(sum(1 for _ in worth) + is_probe, self._most)

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes the result of a step: the number of drafts, and how many of them were accepted."""
        # Drafts after the first rejected one say nothing.
        for j in range(min(drafted, accepted + 1)):
            self._acceptance.observe(j, 1, j < accepted)


class DepthChooser:
    """Chooses the number of drafts ("depth") of the next dispatch from a static set.

    Let ``c_d`` be the measured seconds of a step with d drafts. Depth d generates
    ``(1 + a_1 + a_1 a_2 + ... + a_1 ... a_d) / c_d`` tokens per second and sequence. The chooser
    takes the smallest depth whose rate is close to the best, because sequences of a batch end at
    more similar times with fewer drafts. It first measures each depth whose cost is unknown,
    assumes that drafts are accepted until one has been checked, and probes every depth again now
    and then.

    The choice depends only on the past. Every depth preserves the model's distribution, so any
    sequence of choices does.
    """

    def __init__(self, depths: Sequence[int]):
        self.depths = tuple(sorted(depths))
        # Until one at its position is checked, a draft counts as accepted. Otherwise a depth whose
        # last drafts have never been checked could look slow, and only a probe would try it.
        self._acceptance = _Acceptance(self.depths[-1], 1.0)
        self._cost: dict[int, tuple[float, float]] = {}  # decayed sums of seconds and steps
        self._last_dispatch = dict.fromkeys(self.depths, 0)
        self._dispatches = 0

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one depth."""
        return len(self.depths) == 1

    @property
    def unmeasured(self) -> list[int]:
        """Depths whose cost has not been measured yet."""
        return [] if self.is_fixed else [d for d in self.depths if d not in self._cost]

    def choose(self) -> int:
        """Returns the depth of the next dispatch."""
        if self.is_fixed:
            return self.depths[0]
        if self.unmeasured:
            return self.unmeasured[0]
        if self._dispatches % _PROBE_INTERVAL == _PROBE_INTERVAL - 1:
            return min(self.depths, key=self._last_dispatch.__getitem__)
        rates = {depth: self._rate(depth) for depth in self.depths}
        enough = _ENOUGH * max(rates.values())
        return next(depth for depth, rate in rates.items() if rate >= enough)

    def observe(
        self,
        depth: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        steps: int,
        seconds: float | None,
    ) -> None:
        """Updates the estimates with the results of one dispatch.

        Args:
          drafted: number of drafts at each position in a step, summed over sequences and steps.
          accepted: number of accepted drafts at each position.
          seconds: duration of the ``steps``; None if the dispatch also compiled its program.
        """
        self._dispatches += 1
        self._last_dispatch[depth] = self._dispatches
        # A draft counts as checked only if all drafts before it were accepted.
        checked = [drafted[0], *accepted[:-1]] if len(drafted) else []
        for position, (c, a) in enumerate(zip(checked, accepted, strict=True)):
            if position < depth and c:
                self._acceptance.observe(position, c, a)
        if seconds is not None and steps:
            # Weighted by steps, so that the overhead of short dispatches has little influence.
            old_seconds, old_steps = self._cost.get(depth, (0.0, 0.0))
            self._cost[depth] = (
                _COST_DECAY * old_seconds + seconds,
                _COST_DECAY * old_steps + steps,
            )

    def _rate(self, depth: int) -> float:
        """Estimates tokens per second and sequence."""
        seconds, steps = self._cost[depth]
        return (1.0 + sum(itertools.islice(self._acceptance, depth))) * steps / seconds
