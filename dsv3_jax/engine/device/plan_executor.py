"""The part that runs plans, as the engine's loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from dsv3_jax.engine.device.dispatch_times import DispatchTimes
from dsv3_jax.engine.device.step_results import RequestResult
from dsv3_jax.engine.scheduling.step_plan import PageSave, ScheduledRequest, StepPlan


class PlanExecutor(Protocol):
    """Runs plans in order, as ``Executor`` in ``executor.py`` does on a device."""

    @property
    def steps_in_flight(self) -> int:
        """Plans whose results have not been read."""
        ...

    @property
    def seconds_left(self) -> float:
        """Predicted time until the step in flight ends; 0 if there is none, or no forecast."""
        ...

    @property
    def max_decode_steps(self) -> int:
        """Most decode steps in a plan."""
        ...

    @property
    def compiled_after_warm_up(self) -> int:
        """Number of programs that were compiled while requests were waiting for them."""
        ...

    @property
    def times(self) -> DispatchTimes:
        """Times of the dispatches, by shape."""
        ...

    def dispatch(self, plan: StepPlan) -> None:
        """Launches a plan. An error of the launch may be raised by :meth:`wait`."""
        ...

    def save(self, saves: Sequence[PageSave]) -> Future[None]:
        """Launches copies of pages without a plan. The future is done when these and all earlier
        ones are launched."""
        ...

    def wait(self) -> tuple[StepPlan, list[RequestResult]]:
        """Waits for the oldest plan, and returns it with its results."""
        ...

    def forget(self, request: ScheduledRequest) -> None:
        """Frees what it keeps of a request that has ended."""
        ...

    def close(self) -> None:
        """Frees the memory. Nothing can be dispatched after it."""
        ...
