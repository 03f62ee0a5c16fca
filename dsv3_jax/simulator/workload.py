"""Requests of a simulation, in the order of their arrival.

A workload is an iterable of :class:`Arrival`, so that an hour of a large cluster needs no memory
for requests that have not arrived.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest
from dsv3_jax.traces import Trace

_BATCH = 4096  # requests whose random numbers are made at once


class Arrival(NamedTuple):
    """A request and the time at which it arrives."""

    seconds: float
    prompt_tokens: int
    output_tokens: int  # tokens that it generates, at least 1
    prefix: int = 0  # tokens at the beginning of the prompt that its family shares
    family: int = -1  # number of the shared prefix, or -1
    stored_tokens: int = 0  # tokens at the beginning of the prompt whose cache entries are on disk
    client_busy: float = 0.0
    """Time until which the client goes on submitting without a pause, if it shares the engine's
    interpreter."""


@dataclasses.dataclass(frozen=True)
class SubmitCosts:
    """Time for which a client in the engine's process holds the interpreter to submit a request,
    in seconds."""

    request: float = 0.0
    token: float = 0.0  # in addition, per token of the prompt

    def of(self, prompt_tokens: int) -> float:
        """Returns the time for a prompt."""
        return self.request + self.token * prompt_tokens


class Served(NamedTuple):
    """A request at its end. Times are in simulated seconds."""

    submitted: float
    first_token: float
    end: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens that the prefix cache saved, those from disk included

    @property
    def ttft(self) -> float:
        """Time from the submission to the first token, in seconds."""
        return self.first_token - self.submitted

    @property
    def tpot(self) -> float:
        """Mean time between two later tokens, in seconds; NaN for a request with one token."""
        if self.output_tokens < 2:
            return math.nan
        return (self.end - self.first_token) / (self.output_tokens - 1)


@dataclasses.dataclass(eq=False, kw_only=True)
class SimulatedRequest(ScheduledRequest):
    """A request of the scheduler with its times, in simulated seconds; NaN before an event."""

    prompt_tokens: int
    submitted: float
    stored_tokens: int = 0
    client_busy: float = 0.0
    prefix: int = 0
    family: int = -1
    first_token: float = math.nan
    end: float = math.nan
    wanted_length: int = 0  # at which it ends in the decode pool, while it is in the other

    @classmethod
    def of(cls, arrival: Arrival, number: int, *, drafts: int = 0) -> SimulatedRequest:
        """Returns the request. Token ids only distinguish prompts: a family has its own negative
        id, and the rest of a prompt consists of the request's ``number``."""
        own = arrival.prompt_tokens - arrival.prefix
        tokens = [-1 - arrival.family] * arrival.prefix + [number] * own
        return cls(
            tokens=tokens,
            max_length=arrival.prompt_tokens + arrival.output_tokens,
            drafts=drafts,
            arrival=arrival.seconds,
            prompt_tokens=arrival.prompt_tokens,
            submitted=arrival.seconds,
            stored_tokens=arrival.stored_tokens,
            client_busy=arrival.client_busy,
            prefix=arrival.prefix,
            family=arrival.family,
        )

    def resumed(self, *, drafts: int) -> SimulatedRequest:
        """Returns the request as a decode pool gets it, with the first token and all times."""
        return SimulatedRequest(
            tokens=self.tokens,
            max_length=self.wanted_length,
            drafts=drafts,
            arrival=self.end,
            computed=len(self.tokens),
            generation=-1,  # the decode pool indexes no pages
            is_slot_ready=True,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self.prompt_tokens,
            submitted=self.submitted,
            stored_tokens=self.stored_tokens,
            first_token=self.first_token,
        )

    def served(self, *, now: float | None = None) -> Served:
        """Returns the request without its tokens, at its end or as if it ended ``now``."""
        return Served(
            self.submitted,
            self.first_token,
            self.end if now is None else now,
            self.prompt_tokens,
            len(self.tokens) - self.prompt_tokens,
            self.cached_tokens,
        )


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of numbers of tokens."""

    mean: float
    sigma: float  # standard deviation of the logarithm
    most: int  # longer ones are cut to this

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.most:
            raise ValueError(f"mean: expected 1 to {self.most} tokens, got {self.mean}")
        if self.sigma < 0:
            raise ValueError(f"sigma: expected 0 or more, got {self.sigma}")

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Returns ``count`` lengths of at least 1."""
        log_mean = math.log(self.mean) - self.sigma**2 / 2
        values = np.exp(log_mean + self.sigma * random.standard_normal(count))
        return np.clip(np.rint(values), 1, self.most).astype(int)


def replayed(
    trace: Trace,
    rate: float | None,
    count: int | None = None,
    *,
    submit: SubmitCosts = SubmitCosts(),
    hit_share: float = 0.0,
    page_size: int = 64,
) -> Iterator[Arrival]:
    """Yields the requests of a trace at a rate, or all at once if it is None. A request arrives at
    the end of its submission. ``hit_share`` of each prompt is on disk, in whole pages."""
    requests = trace.requests[:count]
    due = [0.0 if rate is None else each.unit_arrival / rate for each in requests]
    ready, now = [], 0.0
    for each, begin in zip(requests, due, strict=True):
        now = max(begin, now) + submit.of(each.prompt_tokens)
        ready.append(now)
    busy = ready.copy()
    for i in reversed(range(len(requests) - 1)):
        if due[i + 1] <= ready[i]:
            busy[i] = busy[i + 1]
    for i, each in enumerate(requests):
        stored = _stored(each.prompt_tokens, hit_share, page_size, i * 0.618034 % 1)
        sizes = each.prompt_tokens, each.output_tokens, each.prefix, each.family
        yield Arrival(ready[i], *sizes, stored, busy[i])


def poisson(
    rate: Callable[[float], float],
    most_rate: float,
    seconds: float,
    prompts: Lengths,
    outputs: Lengths,
    *,
    hit_share: float = 0.0,
    page_size: int = 64,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yields Poisson arrivals. ``rate`` gives the requests per second at each time, at most
    ``most_rate``; ``hit_share`` is the mean share of prompt tokens that are on disk, in whole
    pages. Raises ValueError for a number out of range."""
    for name, value in (("most_rate", most_rate), ("seconds", seconds)):
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    if not 0 <= hit_share < 1:
        raise ValueError(f"hit_share: expected 0 or more and below 1, got {hit_share}")
    random, now = np.random.default_rng(seed), 0.0
    while True:
        times = now + np.cumsum(random.exponential(1 / most_rate, _BATCH))
        keep = random.random(_BATCH)
        sizes = prompts.sample(random, _BATCH), outputs.sample(random, _BATCH)
        dither = random.random(_BATCH)
        for time, chance, prompt, output, fraction in zip(
            times.tolist(),
            keep.tolist(),
            *(s.tolist() for s in sizes),
            dither.tolist(),
            strict=True,
        ):
            if time >= seconds:
                return
            if chance * most_rate <= rate(time):
                stored = _stored(prompt, hit_share, page_size, fraction)
                yield Arrival(time, prompt, output, stored_tokens=stored)
        now = float(times[-1])


def _stored(prompt: int, share: float, page_size: int, dither: float) -> int:
    """Returns whole pages of about ``share`` of a prompt; the mean over all ditherings is exact
    except for prompts of few pages. At least one token stays to be computed."""
    pages = int(share * prompt / page_size + dither)
    return min(pages, (prompt - 1) // page_size) * page_size
