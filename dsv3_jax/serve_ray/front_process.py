"""A front in a process of Ray Serve: its application, and the router of its calls. It imports
neither JAX nor the engine.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    WorkerCrashedError,
)
from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
    BackPressureError,
    DeploymentUnavailableError,
)
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from dsv3_jax.serve_ray.call import Call, EngineFailedError
from dsv3_jax.serve_ray.front import Batches, Front, NoReplicaError, ReplicaLostError, merged
from dsv3_jax.serve_ray.placement import choose
from dsv3_jax.serve_ray.settings import AppSettings
from dsv3_jax.server.middleware import ApiKeyCheck, ApiKeys, BodyLimit

ENGINE = "engine"
PREFILL = "prefill"
_LOST = (RayActorError, NodeDiedError, WorkerCrashedError, ObjectLostError, EngineFailedError)
_SECONDS = 5
_BODY_SECONDS = 30.0


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


async def results_of(handle: DeploymentHandle, method: str) -> list[Any]:
    """Returns the results of the replicas that gave one; none if no replica runs. Raises
    TimeoutError if a replica neither answered nor was lost."""
    try:
        results = await handle.broadcast(method).results_async(
            timeout_s=_SECONDS, return_exceptions=True
        )
    except DeploymentUnavailableError:
        return []
    return [each for each in results if not isinstance(each, BaseException)]


def make_front(settings: AppSettings) -> Starlette:
    """Returns the application of a front, in its process."""
    arguments, app_name = settings.arguments, serve.get_replica_context().app_name
    names = [ENGINE] if settings.prefill is None else [ENGINE, PREFILL]
    handles = [serve.get_deployment_handle(name, app_name) for name in names]
    streaming = handles[0].options(method_name="respond", stream=True)

    async def open_call(call: Call) -> Batches:
        response: Any = streaming.remote(call)
        try:
            async for batch in response:
                yield batch
        except _LOST as error:
            raise ReplicaLostError(str(error)) from error
        except BackPressureError as error:
            raise NoReplicaError(f"replicas: all are full ({error}); try again later") from error
        except DeploymentUnavailableError as error:
            raise NoReplicaError(f"replicas: none can be started ({error})") from error
        finally:
            response.cancel()

    async def metrics() -> bytes:
        texts = await asyncio.gather(*(results_of(each, "metrics") for each in handles))
        return merged(dict(itertools.chain(*texts)))

    front = Front(open_call, metrics, attempts=settings.attempts)
    # The first one sees a request first.
    middleware = [
        Middleware(BodyLimit, max_bytes=arguments.max_body_mib * 2**20, seconds=_BODY_SECONDS)
    ]
    if arguments.api_key_file is not None:
        keys = ApiKeys.read(arguments.api_key_file)
        middleware.insert(0, Middleware(ApiKeyCheck, keys=keys))
    return Starlette(routes=[Mount("/", app=front)], middleware=middleware)
