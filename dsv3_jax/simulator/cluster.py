"""Replicas under one clock: requests arrive, are routed, and in two pools travel between them.

A unified cluster has one pool. With prefill and decode pools, a request computes its prompt and its
first token in the first pool, and decodes in the second one after its cache has been sent there.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dsv3_jax.engine.scheduling.step_plan import Phase, SchedulerConfig
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.plan import engine_state
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.replica import Replica, ReplicaSettings
from dsv3_jax.simulator.step_times import Efficiency, StepModel, StepTimes
from dsv3_jax.simulator.workload import Arrival, Served, SimulatedRequest
from sharding.balancers import UNASSIGNED, assign_decode

_NODE_SIZE = 8  # devices of a node where all devices are joined by fast links, as in a TPU slice


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Equal replicas."""

    replicas: int
    engine: ReplicaSettings
    times: StepTimes
    devices: int  # devices of each replica
    nodes: float  # nodes of each replica

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas: expected 1 or more, got {self.replicas}")


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Replicas of one deployment, whose ``batch`` is the number of slots of a replica."""

    deployment: Deployment
    replicas: int = 1
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)
    acceptance: float = 0.85  # probability that a draft of the MTP layer is accepted
    stored_prompts: bool = False  # whether beginnings of prompts are on disk
    resumes: bool = False  # whether requests arrive with their prompts cached, as in a decode pool
    multi_step: int | None = None
    """Number of decode steps of every dispatch that prefills nothing; None takes the engine's.
    More steps make a simulation faster, and an arriving request wait longer."""
    bfloat16_results: bool = False  # whether experts' results travel in bfloat16

    def settings(self, shards: ShardCache) -> PoolSettings:
        """Returns the pool. Raises ValueError if the layout does not exist on the devices, or
        cannot divide the slots."""
        d = self.deployment
        assert d.engine is not None
        shard = shards.of(d)
        parts, token_parts = map(shard.layout.num_shards, ("batch", "cached_tokens"))
        buckets = engine_state.default_buckets(d.target, d.layout_name, d.batch // parts)
        engine = ReplicaSettings(
            SchedulerConfig(
                d.batch // parts,
                d.chunk_tokens,
                d.engine.chunks,
                multi_step_decodes=None if self.multi_step else buckets.most_multi_step_decodes,
                max_waiting=10**9,
            ),
            shards=parts,
            pages=engine_state.local_pages(shard, d),
            page_size=DEFAULT_PAGE_SIZE * token_parts,
            prefix_cache=not self.resumes,
            max_steps=self.multi_step or buckets.max_steps,
            adaptive_steps=not self.multi_step,
            drafts=d.draft_depth,
            acceptance=self.acceptance,
            stored_prompts=self.stored_prompts,
            resumes=self.resumes,
        )
        times = StepModel(
            shard,
            d,
            self.efficiency,
            chunk_form=d.engine.chunk_form,
            result_dtype="bfloat16" if self.bfloat16_results else "float32",
        )
        node_size = d.target.chip.node_size or _NODE_SIZE
        return PoolSettings(
            self.replicas, engine, times, d.target.devices, d.target.devices / node_size
        )


@dataclasses.dataclass(frozen=True)
class ClusterSettings:
    """Pools, and what connects them."""

    pool: PoolSettings  # the only pool, or the one that decodes
    prefill: PoolSettings | None = None  # computes prompts. None if each replica does.
    transfer_seconds_per_token: float = 0.0  # to send a token's cache from one pool to the other
    disk_seconds_per_token: float = 0.0  # to read a token's cache before its prompt is computed

    @property
    def pools(self) -> dict[str, PoolSettings]:
        """The pools by name."""
        if self.prefill is None:
            return {"unified": self.pool}
        return {"prefill": self.prefill, "decode": self.pool}


@dataclasses.dataclass
class Outcome:
    """Measurements of a simulation after its warm-up."""

    settings: ClusterSettings
    requests: list[Served]  # submitted after the warm-up and ended, in the order of their ends
    open: list[Served]  # as if they ended now; NaN for the time of a first token that has not come
    submitted: int  # requests that were submitted after the warm-up
    seconds: float  # length of the measurement
    replicas: dict[str, list[Replica]]  # of each pool, with their figures since the warm-up


class Cluster:
    """Runs a workload on a cluster, in simulated time."""

    def __init__(self, settings: ClusterSettings):
        self._settings = settings
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._served: list[Served] = []
        self._submitted = self._first_measured = 0
        self._began = 0.0
        self._pools: dict[str, _Pool] = {}
        ends = {"unified": self._ends, "prefill": self._is_prefilled, "decode": self._ends}
        for name, pool in settings.pools.items():
            kind = _DecodePool if pool.engine.resumes else _Pool
            self._pools[name] = kind(pool, ends[name], self._at)

    def run(
        self, arrivals: Iterable[Arrival], *, until: float | None = None, warm_up: float = 0.0
    ) -> Outcome:
        """Returns the outcome at time ``until``, or after the last request. Nothing is measured
        before ``warm_up``."""
        stream = iter(arrivals)
        self._at(warm_up, self._measure)
        self._next_arrival(stream)
        while self._events and (until is None or self._events[0][0] <= until):
            at, _, action = heapq.heappop(self._events)
            action(at)
        end = max((each.end for each in self._served), default=0.0) if until is None else until
        return Outcome(
            self._settings,
            self._served,
            [
                request.served(now=end)
                for pool in self._pools.values()
                for request in pool.owner
                if request.submitted >= self._began
            ],
            self._submitted - self._first_measured,
            end - self._began,
            {name: pool.replicas for name, pool in self._pools.items()},
        )

    def _measure(self, now: float) -> None:
        """Begins the measurement."""
        self._began, self._first_measured = now, self._submitted
        self._served.clear()
        for pool in self._pools.values():
            for replica in pool.replicas:
                replica.reset()

    def _at(self, seconds: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), action))

    def _next_arrival(self, stream: Any) -> None:
        arrival = next(stream, None)
        if arrival is None:
            return

        def arrives(now: float) -> None:
            self._submit(arrival, now)
            self._next_arrival(stream)

        self._at(arrival.seconds, arrives)

    def _submit(self, arrival: Arrival, now: float) -> None:
        self._submitted += 1
        drafts = 0 if self._settings.prefill else self._settings.pool.engine.drafts
        request = SimulatedRequest.of(arrival, self._submitted, drafts=drafts)
        pool = self._pools["prefill" if self._settings.prefill else "unified"]
        if self._settings.prefill:
            request.wanted_length = request.max_length
            request.max_length = request.prompt_tokens + 1
        delay = self._settings.disk_seconds_per_token * request.stored_tokens
        self._at(now + delay, lambda at: pool.add(request, at))

    def _is_prefilled(self, request: SimulatedRequest) -> None:
        """Sends a request that has its first token to the decode pool."""
        if request.wanted_length <= request.max_length:
            self._ends(request)
            return
        travelling = request.resumed(drafts=self._settings.pool.engine.drafts)
        delay = self._settings.transfer_seconds_per_token * len(request.tokens)
        self._at(request.end + delay, lambda at: self._pools["decode"].add(travelling, at))

    def _ends(self, request: SimulatedRequest) -> None:
        if request.submitted >= self._began:
            self._served.append(request.served())


class _Pool:
    """Replicas that compute prompts. A request goes to the replica with the fewest tokens."""

    def __init__(
        self,
        settings: PoolSettings,
        finished: Callable[[SimulatedRequest], None],
        at: Callable[[float, Callable[[float], None]], None],
    ):
        self._at = at
        self._tokens = [0] * settings.replicas  # prompt and output tokens of each one's requests
        self.owner: dict[SimulatedRequest, int] = {}  # replica of each request that has not ended
        self._is_awake = [False] * settings.replicas
        self._report = finished
        self.replicas = [
            Replica(settings.engine, settings.times, self._ended, seed=number)
            for number in range(settings.replicas)
        ]

    def add(self, request: SimulatedRequest, now: float) -> None:
        """Routes a request and puts it into a replica's queue."""
        number = min(range(len(self.replicas)), key=self._tokens.__getitem__)
        self._tokens[number] += request.max_length
        self.owner[request] = number
        self._queue(number, request)
        if not self._is_awake[number]:
            self._is_awake[number] = True
            self._at(now, lambda at: self._advance(number, at))

    def _queue(self, number: int, request: SimulatedRequest) -> None:
        self.replicas[number].add(request)

    def _ended(self, request: SimulatedRequest) -> None:
        self._tokens[self.owner.pop(request)] -= request.max_length
        self._report(request)

    def _advance(self, number: int, now: float) -> None:
        after = self.replicas[number].advance(now)
        if after is None:
            self._is_awake[number] = False
        else:
            self._at(after, lambda at: self._advance(number, at))


class _DecodePool(_Pool):
    """Replicas that take requests with cached prompts. A request waits for its replica until a
    data-parallel shard has room, see :func:`sharding.balancers.assign_decode`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._arrived: list[deque[SimulatedRequest]] = [deque() for _ in self.replicas]

    def _queue(self, number: int, request: SimulatedRequest) -> None:
        self._arrived[number].append(request)

    def _advance(self, number: int, now: float) -> None:
        if self._arrived[number]:
            self._assign(self.replicas[number], self._arrived[number])
        super()._advance(number, now)

    def _assign(self, replica: Replica, arrived: deque[SimulatedRequest]) -> None:
        shards = replica.scheduler.shards
        slots = replica.settings.scheduler.max_running
        owners = [[*shard.running, *shard.retiring] for shard in shards]
        # The scheduler leaves a page to each running request, which an admission must not take.
        used = np.array([s.pages.used + 2 * len(r) for s, r in zip(shards, owners, strict=True)])
        running = np.array([len(requests) for requests in owners])
        free = np.maximum(replica.settings.pages, used)
        pages_for = shards[0].pages.pages_for
        need = [pages_for(len(r.tokens) + 1 + r.drafts) + 2 for r in arrived]
        chosen = assign_decode(need, used, free, running, np.maximum(slots, running))
        for shard in chosen.tolist():
            request = arrived.popleft()
            if shard == UNASSIGNED:
                arrived.append(request)
                continue
            swap = shards[shard].swap
            # The scheduler admits it as it admits a preempted request from host memory.
            request.resumes_in = Phase.DECODE
            swap.put(request, 0, range(shards[shard].pages.pages_for(len(request.tokens))))
            replica.add(request)
