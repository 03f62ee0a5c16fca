"""Results of a dispatch, request by request, as Python's numbers and lists, and the interface of
what runs plans."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from dsv3_jax.engine.device.step import PromptLogprobs, StepOutput
from dsv3_jax.engine.scheduling.step_plan import Chunk, PageSave, ScheduledRequest, StepPlan
from dsv3_jax.engine.stats import DispatchTimes


class StepTokens(NamedTuple):
    """Tokens that one step gave to a request."""

    tokens: list[int]
    logprobs: list[float]
    drafted: int
    """Number of drafts that the step verified."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """The most probable tokens in the place of each, best first, and their log-probabilities:
    [t, n] each. None if the request does not ask for them."""

    def first(self, count: int) -> StepTokens:
        """Returns the first of these tokens."""
        top = self.top and (self.top[0][:count], self.top[1][:count])
        return StepTokens(self.tokens[:count], self.logprobs[:count], self.drafted, top)


class RequestResult(NamedTuple):
    """Tokens that a dispatch gave to one request."""

    request: ScheduledRequest
    steps: list[StepTokens]
    """The steps that gained tokens."""
    finished: int
    """RUNNING, STOPPED, FULL or NON_FINITE."""
    is_decode: bool
    """Whether these were decode steps. Otherwise they were a chunk of its prompt."""
    prompt: tuple[int, PromptLogprobs] | None = None
    """Position of the token after the chunk's first one, and the log-probabilities of the tokens
    from there on, if the request asks for them."""
    finite_tokens: int | None = None
    """Prompt tokens up to the end of a chunk that ends no prompt, if the logits there, which select
    no token, are finite, and 0 if they are not. None for other results."""

    @property
    def tokens(self) -> list[int]:
        """All new tokens."""
        if len(self.steps) == 1:
            return self.steps[0].tokens
        return [token for step in self.steps for token in step.tokens]


class StepResults:
    """The output of a dispatch, on the host.

    Arrays become lists once, since reading a number from an array costs ten times as much.
    """

    def __init__(self, output: StepOutput):
        arrays: Any = output  # NumPy's
        # The arrays have room for the most steps of a dispatch. The executed ones come first.
        executed = np.flatnonzero(arrays.counts.any(axis=1)).max(initial=-1) + 1
        self._counts: list[list[int]] = arrays.counts[:executed].tolist()
        self._tokens: list[list[list[int]]] = arrays.tokens[:executed].tolist()
        self._logprobs: list[list[list[float]]] = arrays.logprobs[:executed].tolist()
        self._drafted: list[list[int]] = arrays.drafted[:executed].tolist()
        self.finished: list[int] = arrays.finished.tolist()
        """RUNNING, STOPPED, FULL or NON_FINITE for each row."""
        self.has_top = arrays.top_tokens.shape[-1] > 0
        """Whether some requests ask for the most probable tokens."""
        self._top = arrays.top_tokens, arrays.top_logprobs
        self._prompt = arrays.prompt

    def new_tokens(self, row: int, *, top: bool) -> list[StepTokens]:
        """Returns the tokens of each step that gave some to a row, with the most probable ones if
        ``top``."""
        return [
            StepTokens(
                self._tokens[step][row][:count],
                self._logprobs[step][row][:count],
                self._drafted[step][row],
                (self._top[0][step, row, :count], self._top[1][step, row, :count]) if top else None,
            )
            for step, counts in enumerate(self._counts)
            if (count := counts[row])
        ]

    def prompt(self, number: int, chunk: Chunk) -> tuple[int, PromptLogprobs]:
        """Returns :attr:`RequestResult.prompt` for the chunk with this number in the step."""
        arrays = [array[number, : chunk.count] for array in self._prompt]
        return chunk.start + 1, PromptLogprobs(*arrays)


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

    def close(self) -> None:
        """Frees the memory. Nothing can be dispatched after it."""
        ...
