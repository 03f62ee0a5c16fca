"""Measured durations of compiled programs, which determine the length of a dispatch."""

from __future__ import annotations

from collections.abc import Hashable

DISPATCH_SECONDS = 0.5
"""Target duration of a dispatch. A dispatch cannot be interrupted, and a stop string ends a
sequence only after it. The host needs about a millisecond between two dispatches."""


class StepTimes:
    """Seconds per decode step of each compiled program, as measured by its last run.

    A program is identified by its static arguments and shapes. Its first run includes compilation,
    and is therefore not measured.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float | None] = {}

    def has_run(self, program: Hashable) -> bool:
        """Returns whether the program has run, and is therefore compiled."""
        return program in self._seconds

    def record(self, program: Hashable, steps: int, seconds: float) -> None:
        """Records a run. A first run, or a run of no steps, has no measured time per step."""
        if not self.has_run(program):
            self._seconds[program] = None
        elif steps:
            self._seconds[program] = seconds / steps

    def steps_per_dispatch(
        self, program: Hashable, *, default: int = 1, seconds: float | None = None
    ) -> int:
        """Returns the number of steps, at least 1, that take about so many seconds, by default
        DISPATCH_SECONDS; ``default`` if the program has not been measured."""
        each = self._seconds.get(program)
        if each is None:
            return default
        seconds = DISPATCH_SECONDS if seconds is None else seconds
        return int(min(max(seconds / max(each, 1e-9), 1), 2**30))
