"""How calls reach replicas: one by prefix, within a bound on the load, or all of them."""

from __future__ import annotations

import collections
from typing import Any

from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
    DeploymentUnavailableError,
)
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from dsv3_jax.serve_ray.call import Call
from dsv3_jax.serve_ray.placement import choose


class PrefixRouter(RequestRouter):
    """Sends requests that share a prefix to the same replica, unless it has too many."""

    def initialize_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, load_bound: float
    ) -> None:
        """Is called with the router's settings."""
        self._load_bound = load_bound
        self._open: collections.Counter[ReplicaID] = collections.Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which they are tried. Full ones are passed over."""
        if pending_request is None:
            return [candidate_replicas]
        # All replicas are full when none of this order takes the request.
        pending_request.routing_context.should_backoff = True
        call = pending_request.args[0]
        assert isinstance(call, Call)
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {name: self._load(each.replica_id) for name, each in replicas.items()}
        order = choose(call.prefix_key, loads, self._load_bound)
        # Replicas that could not serve the request come last: there may be no other one.
        order.sort(key=lambda name: name in call.avoid)
        return [[replicas[name]] for name in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counts a request that is sent to a replica, which may still refuse it."""
        super().on_send_request(replica_id)
        self._open[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts the end of a request, or its refusal."""
        self._open[replica_id] -= 1
        if self._open[replica_id] <= 0:
            del self._open[replica_id]

    def _load(self, replica_id: ReplicaID) -> int:
        """Returns the open requests of a replica: those of this front, or of all if it told."""
        return max(self._open[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)


_SECONDS = 5


async def results_of(handle: DeploymentHandle, method: str) -> list[Any]:
    """Returns the results of the replicas that gave one; none if no replica runs.

    Raises:
      TimeoutError: a replica neither answered nor was lost.
    """
    try:
        results = await handle.broadcast(method).results_async(
            timeout_s=_SECONDS, return_exceptions=True
        )
    except DeploymentUnavailableError:
        return []
    return [each for each in results if not isinstance(each, BaseException)]
