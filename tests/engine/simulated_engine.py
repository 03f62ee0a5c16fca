"""The engine's loop on a simulated device: no model, no arrays, and errors on demand."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dsv3_jax.engine.loop import EngineLoop
from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import (
    PageSave,
    RequestResult,
    ScheduledRequest,
    SchedulerConfig,
    StepPlan,
    StepTokens,
)
from dsv3_jax.engine.scheduling.stored_pages import SwapSpace
from dsv3_jax.engine.stats import DispatchTimes
from dsv3_jax.generation.completion import FULL, NON_FINITE, RUNNING, STOPPED
from dsv3_jax.generation.request import Request
from tests.engine.simulated_device import SimulatedDevice, completion, shard_pages

BROKEN = 99
"""The simulated model computes NaN for prompts that begin with this token."""


class DeviceError(Exception):
    """An error of the simulated device."""


class Letters:
    """A tokenizer: token 0 is a, token 1 is b, and so on. It cannot decode ``undecodable``."""

    def __init__(self, undecodable: int | None = None):
        self.undecodable = undecodable

    def decode(self, ids: Sequence[int]) -> str:
        if self.undecodable in ids:
            raise UnicodeError(f"expected letters, got {ids}")
        return "".join(chr(97 + i) for i in ids)


class SimulatedExecutor:
    """Runs plans on a simulated device.

    Args:
      latency: seconds that the results of a step take.
    """

    max_decode_steps = 3
    seconds_left = 0.0
    compiled_after_warm_up = 0

    def __init__(
        self,
        device: SimulatedDevice,
        latency: Callable[[], float],
    ):
        self.device = device
        self.times = DispatchTimes()
        self.fails_at: str | None = None
        """``dispatch`` or ``wait``: the next call of it raises DeviceError."""
        self.is_closed = False
        self._latency = latency
        self._in_flight: deque[tuple[StepPlan, dict, set]] = deque()

    @property
    def dispatches_in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, plan: StepPlan) -> None:
        assert not self.is_closed, "a step after the end"
        # As in the real executor, results are late, so that a request can have ended by now.
        assert all(chunk.request.is_running for chunk in plan.chunks if chunk.is_first)
        self._maybe_fail("dispatch")
        self._in_flight.append((plan, *self.device.run(plan)))

    def save(self, saves: Sequence[PageSave]) -> Future[None]:
        self.device.save(saves)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def wait(self) -> tuple[StepPlan, list[RequestResult]]:
        time.sleep(self._latency())
        self._maybe_fail("wait")
        plan, gained, finished = self._in_flight.popleft()
        decodes = set(plan.decodes)
        results = []
        for request in plan.requests:
            if request in decodes or request in gained or request in finished:
                steps = [_new_tokens(tokens) for tokens in gained.get(request, ()) if tokens]
                reason = self._reason(request, steps) if request in finished else RUNNING
                results.append(RequestResult(request, steps, reason, request in decodes))
        return plan, results

    def close(self) -> None:
        self.is_closed = True
        self._in_flight.clear()

    def _reason(self, request: ScheduledRequest, steps: list[StepTokens]) -> int:
        if request.tokens[0] == BROKEN:
            return NON_FINITE
        is_stopped = steps and steps[-1].tokens[-1] == self.device.stop
        return STOPPED if is_stopped else FULL

    def _maybe_fail(self, name: str) -> None:
        if self.fails_at == name:
            raise DeviceError(f"the device failed in {name}")


def _new_tokens(tokens: list[int]) -> StepTokens:
    return StepTokens(tokens, [0.0] * len(tokens), drafted=len(tokens) - 1)


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A request of a simulated engine, and what it asked for."""

    handle: EngineRequest
    request: Request
    stop_token: int | None
    has_deadline: bool

    @property
    def expected(self) -> list[int]:
        """Tokens that it gains when it runs alone and to its end."""
        prompt = list(self.request.prompt)
        tokens = completion(prompt, len(prompt) + self.request.max_new_tokens, self.stop_token)
        text = Letters().decode(tokens) if self.request.stop else ""
        ends = [text.find(stop) + len(stop) for stop in self.request.stop if stop in text]
        return tokens[: min(ends, default=len(tokens))]


class SimulatedEngine:
    """Does what :class:`dsv3_jax.Engine` does, on a simulated device.

    Args:
      stop: the token that ends every request, or None.
      drafts: draft tokens of a decode step.
      lookahead: 1 to simulate an MTP layer, else 0.
      latency: seconds that the results of a step take.
      undecodable: a token that the tokenizer cannot decode.
      swap_pages: host memory of each shard for preempted requests, as in deterministic mode.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 4,
        max_running: int = 4,
        max_waiting: int = 6,
        stop: int | None = 3,
        drafts: int = 0,
        lookahead: int = 0,
        prefix_cache: bool = True,
        overlap: bool = True,
        shards: int = 1,
        background: bool = False,
        latency: Callable[[], float] = lambda: 0.0,
        undecodable: int | None = None,
        swap_pages: int | None = None,
    ):
        pages = shard_pages(
            shards, num_pages, page_size, lookahead=lookahead, prefix_cache=prefix_cache
        )
        config = SchedulerConfig(
            max_running=max_running,
            chunk_tokens=5,
            max_chunks=3,
            max_waiting=max_waiting,
            aligned_prefixes=swap_pages is not None,
        )
        swaps = None if swap_pages is None else [SwapSpace(swap_pages) for _ in pages]
        self.stop = stop
        self._tokenizer = Letters(undecodable)
        self.drafts = drafts
        self.scheduler = Scheduler(config, pages, swaps)
        self.executor = SimulatedExecutor(
            SimulatedDevice(num_pages, page_size, stop, lookahead, broken=BROKEN), latency
        )
        self.loop = EngineLoop(self.scheduler, self.executor, overlap=overlap)
        if background:
            self.loop.start()

    def submit(
        self,
        prompt: list[int],
        new: int,
        *,
        stop: tuple[str, ...] = (),
        priority: int = 0,
        timeout: float = math.inf,
        draft: bool = True,
    ) -> Submitted:
        request = Request(tuple(prompt), max_new_tokens=new, stop=stop)
        drafts = self.drafts if draft else 0
        now = time.monotonic()
        scheduled = ScheduledRequest(
            tokens=list(prompt),
            max_length=len(prompt) + new,
            drafts=drafts,
            priority=priority,
            arrival=now,
            deadline=now + timeout,
            settings=request,
        )
        handle = EngineRequest(lambda _: self.loop.cancel(scheduled))
        scheduled.output = RequestOutput(
            handle, request, self._tokenizer, draft="ngram" if drafts else None, depth=drafts
        )
        self.loop.add(scheduled)
        return Submitted(handle, request, self.stop, timeout < math.inf)
