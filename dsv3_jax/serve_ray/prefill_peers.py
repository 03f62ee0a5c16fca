"""The prefill replicas that a decode replica knows: it asks Ray Serve for them again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from dsv3_jax.disaggregation.peers import Peers

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
"""Time between two looks."""


class PrefillAddress(NamedTuple):
    """The address of a prefill replica's own HTTP server."""

    url: str
    """With the address of its node."""
    api_key: str
    """Key that it made when it started. Only Ray's actors have it."""


async def keep_current(
    peers: Peers,
    addresses: Callable[[], Awaitable[list[PrefillAddress]]],
    failures: tuple[type[Exception], ...] = (TimeoutError,),
) -> None:
    """Replaces the peers by the replicas that run now, until it is cancelled.

    A replica that was lost is a peer for at most a period, in which requests to it fail and go to
    another one. A replica that does not answer keeps others from joining, so that the peers then
    stay as they are.

    Args:
      addresses: returns the addresses of all prefill replicas, or raises one of ``failures``.
      failures: errors after which the next look may succeed. Others end the task.
    """
    while True:
        try:
            given = await addresses()
        except failures as error:
            reason = f"{type(error).__name__} {error}".strip()
            logger.warning("prefill replicas: expected all addresses, got %s", reason)
        else:
            new = dict(given)
            if new.keys() != {peer.url for peer in peers.all}:
                logger.info("prefill replicas: %s", ", ".join(new) or "none")
            peers.replace(new)
        await asyncio.sleep(PERIOD_SECONDS)
