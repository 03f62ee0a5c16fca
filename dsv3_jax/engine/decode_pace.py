"""Measures how long a decode step takes, and from that how many steps a dispatch should have."""

from __future__ import annotations

from dsv3_jax.engine.step_plan import StepPlan

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for one."""

_SMOOTHING = 0.9  # weight of earlier measurements


class DecodePace:
    """Recent mean time of a decode step, on the caller's clock. Pure Python."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """Recent mean between two results of dispatches that only decode, per step."""
        self._last_read: float | None = None

    def read(self, plan: StepPlan, now: float) -> None:
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

    def steps(self, most: int) -> int:
        """Returns the number of decode steps for a dispatch, from 1 to ``most``."""
        if self.seconds is None:
            return 1
        return max(1, min(int(DISPATCH_SECONDS / self.seconds), most))
