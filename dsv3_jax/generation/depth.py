"""How many drafts a step: a fixed number, or the one that pays best so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

AUTO_DEPTHS = (0, 1, 2, 4)  # what "auto" chooses from; a compiled program each
AUTO_STEPS = 32  # of a dispatch where the depth is chosen anew for each

_MEMORY = 0.9  # how much of the acceptance seen still counts after another dispatch
_COST_MEMORY = 0.5  # and of the cost: it hardly varies, but for a first value that was off
_MARGIN = 0.95  # of the best rate is enough for fewer drafts: rows end more evenly with them
_CURIOSITY = 16  # every so many dispatches, one runs the depth that has not run for longest


class DepthChooser:
    """Chooses the depth of the next dispatch from a static set.

    With ``a_j`` the running estimate of how often the j-th draft of a step is accepted after those
    before it, and ``c_d`` the measured seconds of a step with d drafts, depth d gives
    ``(1 + a_1 + a_1 a_2 + ... + a_1 ... a_d) / c_d`` tokens a second and row. It takes the
    smallest d that comes close to the best. A depth without a measured cost is measured first, and
    each again now and then. The choice looks at the past alone, and every depth keeps the model's
    distribution; so does any sequence of choices.
    """

    def __init__(self, depths: Sequence[int]):
        self.depths = tuple(sorted(depths))
        most = self.depths[-1]
        # One accepted draft in two, for a start: a weak belief that the first dispatch outweighs.
        self._reached = np.full(most, 2.0)
        self._accepted = np.full(most, 1.0)
        self._cost: dict[int, tuple[float, float]] = {}  # seconds and steps, fading alike
        self._ran_at = dict.fromkeys(self.depths, 0)
        self._dispatches = 0

    @property
    def is_fixed(self) -> bool:
        return len(self.depths) == 1

    @property
    def unmeasured(self) -> list[int]:
        """Depths whose cost has yet to be measured."""
        return [] if self.is_fixed else [d for d in self.depths if d not in self._cost]

    def choose(self) -> int:
        """The depth of the next dispatch."""
        if self.is_fixed:
            return self.depths[0]
        if self.unmeasured:
            return self.unmeasured[0]
        if self._dispatches % _CURIOSITY == _CURIOSITY - 1:
            return min(self.depths, key=self._ran_at.__getitem__)
        rates = {depth: self._rate(depth) for depth in self.depths}
        enough = _MARGIN * max(rates.values())
        return next(depth for depth, rate in rates.items() if rate >= enough)

    def observe(
        self,
        depth: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        steps: int,
        seconds: float | None,
    ) -> None:
        """What one dispatch came to.

        Args:
          drafted: drafts offered at each place of a step, summed over rows and steps.
          accepted: those of them that were accepted.
          seconds: that ``steps`` took; None where the dispatch compiled its program first.
        """
        self._dispatches += 1
        self._ran_at[depth] = self._dispatches
        # A place's draft counts only where all before it were accepted.
        reached = [drafted[0], *accepted[:-1]] if len(drafted) else []
        for place, (r, a) in enumerate(zip(reached, accepted, strict=True)):
            if place < depth and r:
                self._reached[place] = _MEMORY * self._reached[place] + r
                self._accepted[place] = _MEMORY * self._accepted[place] + a
        if seconds is not None and steps:
            # By steps: what a dispatch costs beside them weighs little where it has many.
            held_seconds, held_steps = self._cost.get(depth, (0.0, 0.0))
            self._cost[depth] = (
                _COST_MEMORY * held_seconds + seconds,
                _COST_MEMORY * held_steps + steps,
            )

    def _rate(self, depth: int) -> float:
        """Estimated tokens a second and row."""
        chance = np.cumprod(self._accepted[:depth] / self._reached[:depth])
        seconds, steps = self._cost[depth]
        return (1.0 + float(chance.sum())) * steps / seconds
