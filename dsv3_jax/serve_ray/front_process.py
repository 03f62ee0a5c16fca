"""A front in a process of Ray Serve. It imports neither JAX nor the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
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
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from dsv3_jax.serve_ray.call import Call, EngineFailedError
from dsv3_jax.serve_ray.front import (
    Batches,
    Front,
    NoReplicaError,
    ReplicaLostError,
    Replicas,
    merged,
)
from dsv3_jax.serve_ray.router import results_of
from dsv3_jax.serve_ray.settings import AppSettings
from dsv3_jax.server.api_keys import ApiKeyCheck, ApiKeys
from dsv3_jax.server.body_limit import BodyLimit

ENGINE = "engine"
PREFILL = "prefill"

_LOST = (RayActorError, NodeDiedError, WorkerCrashedError, ObjectLostError, EngineFailedError)
_BODY_SECONDS = 30.0


def front_builder(settings: AppSettings) -> Callable[[], Starlette]:
    """Returns a function that makes the front's application in its process."""

    def build() -> Starlette:
        app_name = serve.get_replica_context().app_name
        names = [ENGINE] if settings.prefill is None else [ENGINE, PREFILL]
        handles = [serve.get_deployment_handle(name, app_name) for name in names]
        return make_front(handles[0], settings, others=handles[1:])

    return build


def make_front(
    handle: DeploymentHandle, settings: AppSettings, *, others: Sequence[DeploymentHandle] = ()
) -> Starlette:
    """Returns the application of a front.

    Args:
      handle: the replicas that answer requests.
      others: further replicas whose figures /metrics has.
    """
    arguments = settings.arguments
    streaming = handle.options(method_name="respond", stream=True)

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
        handles = [handle, *others]
        texts = await asyncio.gather(*(results_of(each, "metrics") for each in handles))
        return merged(dict(itertools.chain(*texts)))

    front = Front(Replicas(open_call, metrics), attempts=settings.attempts)
    # The first one sees a request first.
    middleware = [
        Middleware(BodyLimit, max_bytes=arguments.max_body_mib * 2**20, seconds=_BODY_SECONDS)
    ]
    if arguments.api_key_file is not None:
        keys = ApiKeys.read(arguments.api_key_file)
        middleware.insert(0, Middleware(ApiKeyCheck, keys=keys))
    return Starlette(routes=[Mount("/", app=front)], middleware=middleware)
