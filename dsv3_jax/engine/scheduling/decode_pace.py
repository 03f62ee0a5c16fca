"""Measures how long a decode step takes, and from that how many steps a dispatch should have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dsv3_jax.engine.scheduling.step_plan import StepPlan

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for one."""

_SMOOTHING = 0.9  # weight of earlier measurements


class Pace(Protocol):
    """Chooses the size of dispatches that only decode."""

    def choose(self, most: int) -> tuple[int, int | None]:
        """Returns the number of decode steps, from 1 to ``most``, and the drafts in each, or None
        for the most. It is called before every plan."""
        ...

    def read(self, plan: StepPlan, results: Sequence[Any], now: float) -> None:
        """Takes the results of a dispatch, and the time at which they were read."""
        ...


class DecodePace:
    """Recent mean time of a decode step, on the caller's clock. Pure Python."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """Recent mean between two results of dispatches that only decode, per step."""
        self._last_read: float | None = None

    def read(self, plan: StepPlan, results: Sequence[Any], now: float) -> None:
        """Takes the time at which the results of a plan were read."""
        if plan.chunks:
            self._last_read = None
            return
        if self._last_read is not None:
            seconds = (now - self._last_read) / plan.decode_steps
            before = self.seconds
            self.seconds = (
                seconds if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * seconds
            )
        self._last_read = now

    def choose(self, most: int) -> tuple[int, None]:
        """Returns the number of decode steps for a dispatch, from 1 to ``most``."""
        if self.seconds is None:
            return 1, None
        return max(1, min(int(DISPATCH_SECONDS / self.seconds), most)), None
