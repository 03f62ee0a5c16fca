"""Calls of one method on all replicas of a deployment."""

from __future__ import annotations

from typing import Any

from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
    DeploymentUnavailableError,
)
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]

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
