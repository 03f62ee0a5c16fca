"""Requests as the scheduler sees them, its limits, the plan of one step, and its results."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from dsv3_jax.generation.depth import DraftDepth
from dsv3_jax.generation.request import Request

End = Literal["cancelled", "timeout"] | int | BaseException
"""Reason of a request's end: the scheduler's, a value of ``finished``, or an error of its own."""


class Phase(enum.Enum):
    """Stage of a request's life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class ScheduledRequest:
    """A request on its way through the engine: one object for all of its parts.

    Its other objects: :class:`Request` is what the caller asked for (``settings``),
    ``RequestOutput`` turns its tokens into text (``output``), ``EngineRequest`` is the handle that
    the caller holds, and each ``RequestResult`` has the tokens that one dispatch gave it.

    The caller that submits it writes the first two groups of fields. All later writes are under the
    loop's lock, and by the engine's thread except for ``is_cancelled``; only ``swapped`` is
    written without the lock, while the executor dispatches.
    """

    tokens: list[int]
    """The prompt, then the generated tokens that the host has read: the scheduler adds them."""
    max_length: int
    """Length at which the request ends: prompt tokens and the most new ones."""
    drafts: int = 0
    """Most draft tokens that a decode step verifies for it."""
    priority: int = 0
    """Less is more urgent."""
    arrival: float = 0.0
    """Time of submission, in seconds of the caller's clock."""
    deadline: float = math.inf
    """Time at which it ends even if it is not finished."""
    is_serial: bool = False
    """Whether a decode step needs all earlier tokens on the host, as a grammar does."""
    reuses_prefix: bool = True
    """Whether cached pages may take the place of its own. Log-probabilities of a prompt need its
    hidden states, which are not cached."""
    depth: DraftDepth | None = None
    """Chooses the drafts of each step, up to ``drafts``. None: always ``drafts``."""

    # The scheduler does not read these, except `rewind`.
    settings: Request | None = None
    """Sampling, stop tokens, and the mask of a grammar's next token, which ``Delivery`` replaces
    after each step. None if the device is simulated."""
    output: object = None
    """Its ``RequestOutput``: text, log-probabilities, the caller's handle."""
    swapped: Any = None
    """Its copy in host memory while it is swapped out."""
    rewind: int = 0
    """Newest tokens in its slot that are not among ``tokens``, because its grammar refused them.
    ``Delivery`` sets it; the next plan takes it and sets it to 0, and that step removes them."""
    rewinds: int = 0
    """Number of steps whose tokens were refused."""

    # Written by the scheduler.
    order: float = 0.0
    """Requests with a smaller one come first. It never changes once the request is added."""
    phase: Phase = Phase.WAITING
    shard: int | None = None
    """The data-parallel shard that runs it, while it has a slot."""
    slot: int | None = None
    """Its row in its shard's part of the device's state, while it is running."""
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    """Tokens whose cache entries are written, or reused, when all planned chunks are done."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved at the first admission."""
    dispatches_in_flight: int = 0
    """Dispatched plans that include it and whose results are not reported yet."""
    decode_steps_in_flight: int = 0
    """Decode steps in those plans. Each adds at least one token, unless the request ends before:
    then the device computes nothing for it."""
    published: int = 0
    """Number of its first pages that have been offered to the prefix index."""
    verified: int = 0
    """Number of its pages from which finite logits have been computed."""
    is_broken: bool = False
    """Whether logits that depend on its cache entries are not finite. It publishes nothing more."""
    addresses: list[Any] = dataclasses.field(default_factory=list)
    """Addresses of its first pages in a store outside of the device, as far as they are known."""
    generation: int = 0
    """Generation of the prefix index, see :class:`PageAllocator`, in which its prefill began."""
    preemptions: int = 0
    resumes_in: Phase = Phase.PREFILL
    """Phase in which it goes on after host memory."""
    is_cancelled: bool = False
    is_slot_ready: bool = False
    """Whether a dispatched step has initialised its slot."""

    def __lt__(self, other: ScheduledRequest) -> bool:
        return self.order < other.order

    @property
    def is_running(self) -> bool:
        return self.phase in (Phase.PREFILL, Phase.DECODE)

    @property
    def least_length(self) -> int:
        """Tokens it has at least when all dispatched steps are done."""
        return len(self.tokens) + self.decode_steps_in_flight

    @property
    def greatest_length(self) -> int:
        """Tokens it has at most when all dispatched steps are done."""
        most = len(self.tokens) + self.decode_steps_in_flight * (1 + self.drafts)
        return min(most, self.max_length)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive known tokens of one request that a step prefills: those of its prompt and, after
    a preemption, those that it had generated."""

    request: ScheduledRequest
    slot: int
    start: int
    """Position of the first token."""
    count: int
    is_first: bool
    """Whether the request has just been admitted, so that the step initialises its slot."""
    is_last: bool
    """Whether the chunk ends the known tokens, so that the step samples the next one."""


class SwapOut(NamedTuple):
    """A copy of a preempted request to host memory."""

    request: ScheduledRequest
    slot: int
    pages: tuple[int, ...]
    """Pages to copy, in order. Other requests of the plan may already own them."""


class SwapIn(NamedTuple):
    """A copy of a preempted request back to the device."""

    request: ScheduledRequest
    slot: int
    pages: tuple[int, ...]
    """Pages that the copied ones go to, in order."""
    shared: int
    """Number of the first of these pages that need no copy: they are in the prefix cache."""


class PageSave(NamedTuple):
    """A copy of a page to a store outside of the device."""

    page: int
    addresses: tuple[Any, ...]
    """Its address in the store, or one for each device that has a part of the page."""
    identity: Any
    """The store's identity at the time of the addresses."""


class PageLoad(NamedTuple):
    """A copy of a page from a store to the device."""

    page: int
    contents: tuple[Any, ...]
    """As the store gave them, one for each device that has a part of the page."""


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler."""

    max_running: int
    """Number of slots of each shard."""
    chunk_tokens: int
    """Most tokens in a chunk; one chunk is one segment of the compiled step."""
    max_chunks: int
    """Most chunks of each shard in a step: times ``chunk_tokens``, its prefill budget."""
    multi_step_decodes: int | None = None
    """Most requests on a shard that decode several steps in a dispatch; None for no limit."""
    max_waiting: int = 4096
    priority_seconds: float = 10.0
    """Head start, in seconds, that a request has over one with the next higher priority number."""
    separate: bool = False
    """Whether a step either prefills or decodes. Prompts come first."""
    refill_steps: int = 1
    """While requests wait: decode steps of a dispatch during which the slot of a request that has
    ended may stay empty."""
    aligned_prefixes: bool = False
    """Whether a request reuses whole chunks alone, which other requests prefilled as it would have:
    no part of a chunk, and no tokens that were generated."""

    @property
    def limits(self) -> StepLimits:
        """The limits of a step."""
        return StepLimits(self.max_running, self.max_chunks)

    def __post_init__(self) -> None:
        names = ("max_running", "chunk_tokens", "max_chunks", "max_waiting", "refill_steps")
        for name in names:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")


class StepLimits(NamedTuple):
    """Limits of each shard that may change between steps, within those of the configuration."""

    running: int
    """Most requests that run. More that run already go on."""
    chunks: int
    """Most chunks of a step."""


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """The work of one dispatch on one data-parallel shard."""

    decodes: tuple[ScheduledRequest, ...]
    slots: tuple[int, ...]
    """Slot of each request in ``decodes``."""
    drafts: tuple[int, ...]
    """Most drafts that each of them verifies in a step."""
    rewinds: tuple[int, ...]
    """Tokens to remove from each of them before the step."""
    chunks: tuple[Chunk, ...]
    swap_outs: tuple[SwapOut, ...] = ()
    """Requests to copy to host memory before the dispatch writes anything."""
    swap_ins: tuple[SwapIn, ...] = ()
    """Requests to copy back, after that and before the step."""
    loads: tuple[PageLoad, ...] = ()
    """Pages to copy from a store, after that and before the step."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The work of one dispatch."""

    shards: tuple[ShardPlan, ...]
    decode_steps: int
    """Decode steps in the dispatch: 1 if it prefills anything."""
    depth: int | None = None
    """Drafts per decode step that the program has room for; None for the most."""
    saves: tuple[PageSave, ...] = ()
    """Pages to copy to a store before the dispatch writes any page."""

    @functools.cached_property
    def decodes(self) -> tuple[ScheduledRequest, ...]:
        """The requests that decode, shard by shard."""
        return tuple(request for shard in self.shards for request in shard.decodes)

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all shards."""
        return tuple(chunk for shard in self.shards for chunk in shard.chunks)

    @functools.cached_property
    def swap_outs(self) -> tuple[SwapOut, ...]:
        """The copies to host memory of all shards."""
        return tuple(swap for shard in self.shards for swap in shard.swap_outs)

    @functools.cached_property
    def swap_ins(self) -> tuple[SwapIn, ...]:
        """The copies from host memory of all shards."""
        return tuple(swap for shard in self.shards for swap in shard.swap_ins)

    @functools.cached_property
    def loads(self) -> tuple[PageLoad, ...]:
        """The copies from a store of all shards."""
        return tuple(load for shard in self.shards for load in shard.loads)

    @functools.cached_property
    def requests(self) -> tuple[ScheduledRequest, ...]:
        """Every request of the plan, once."""
        return tuple(dict.fromkeys([*self.decodes, *(chunk.request for chunk in self.chunks)]))


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
    prompt: tuple[int, Any] | None = None
    """Position of the token after the chunk's first one, and the ``PromptLogprobs`` of the tokens
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


class StepGains(NamedTuple):
    """Gains of the requests of a plan: the arguments of :meth:`Scheduler.report` after the plan."""

    tokens: Mapping[ScheduledRequest, Sequence[int]]
    ends: Mapping[ScheduledRequest, End]
    """The requests that are at their end."""
    broken: Collection[ScheduledRequest] = ()
    """Requests with logits that are not finite. Their pages are neither reused nor stored."""
    finite: Mapping[ScheduledRequest, int] = MappingProxyType({})
    """Tokens after which logits are finite, of requests with a chunk that ends no prompt."""
