"""How many drafts a step: a fixed number, or the one that pays best so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

AUTO_DEPTHS = (0, 1, 2, 4)  # what "auto" chooses from; a compiled program each
MAX_DEPTH = 4

_MEMORY = 0.9  # how much of what was seen still counts after another dispatch
_CURIOSITY = 16  # every so many dispatches, one goes a depth further than what pays best


class DepthChooser:
    """Chooses the depth of the next dispatch from a static set.

    With ``a_j`` the running estimate of how often the j-th draft of a step is accepted after those
    before it, and ``c_d`` the measured seconds of a step with d drafts, it takes the d with the
    most tokens a second, ``(1 + a_1 + a_1 a_2 + ... + a_1 ... a_d) / c_d``. A depth without a
    measured cost is measured first. The choice looks at the past alone, and every depth keeps the
    model's distribution; so does any sequence of choices.
    """

    def __init__(self, depths: Sequence[int]):
        self.depths = tuple(sorted(depths))
        most = self.depths[-1]
        # One accepted draft in two, for a start: a weak belief that the first dispatch outweighs.
        self._reached = np.full(most, 2.0)
        self._accepted = np.full(most, 1.0)
        self._seconds: dict[int, float] = {}
        self._dispatches = 0

    @property
    def is_fixed(self) -> bool:
        return len(self.depths) == 1

    @property
    def unmeasured(self) -> list[int]:
        """Depths whose cost has yet to be measured."""
        return [] if self.is_fixed else [d for d in self.depths if d not in self._seconds]

    def choose(self) -> int:
        """The depth of the next dispatch."""
        if self.is_fixed:
            return self.depths[0]
        if self.unmeasured:
            return self.unmeasured[0]
        best = max(self.depths, key=self._rate)
        if self._dispatches % _CURIOSITY == _CURIOSITY - 1:
            return next((depth for depth in self.depths if depth > best), best)
        return best

    def observe(
        self,
        depth: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds_per_step: float | None,
    ) -> None:
        """What one dispatch came to.

        Args:
          drafted: drafts offered at each place of a step, summed over rows and steps.
          accepted: those of them that were accepted.
          seconds_per_step: None where the dispatch compiled its program first.
        """
        self._dispatches += 1
        # A place's draft counts only where all before it were accepted.
        reached = [drafted[0], *accepted[:-1]] if len(drafted) else []
        for place, (r, a) in enumerate(zip(reached, accepted, strict=True)):
            if place < depth and r:
                self._reached[place] = _MEMORY * self._reached[place] + r
                self._accepted[place] = _MEMORY * self._accepted[place] + a
        if seconds_per_step is not None:
            held = self._seconds.get(depth, seconds_per_step)
            self._seconds[depth] = _MEMORY * held + (1 - _MEMORY) * seconds_per_step

    def _rate(self, depth: int) -> float:
        """Estimated tokens a second and row."""
        chance = np.cumprod(self._accepted[:depth] / self._reached[:depth])
        return (1.0 + float(chance.sum())) / self._seconds[depth]
