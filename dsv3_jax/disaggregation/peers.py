"""The prefill servers that a decode server knows.

A request goes to the peer with the fewest tokens under way. A peer that fails gets no requests for
a while, one second after the first failure and twice as long after each further one. Then one
request tries it; the others follow when that one has succeeded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0  # time between two looks

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


@dataclasses.dataclass(eq=False)
class Peer:
    """A prefill server, and what the decode server knows of it."""

    url: str  # for example ``http://10.0.0.7:8000``
    host: str
    port: int
    api_key: str | None = None  # key of this server alone, or None
    open_tokens: int = 0  # prompt tokens of the requests that it is working on for this server
    open_requests: int = 0
    failures: int = 0  # failures since its last success
    paused_until: float = -math.inf  # time on the clock until which it gets no requests

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Peer:
        """Returns the peer at a URL."""
        parts = urllib.parse.urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.hostname and not parts.query
        if not is_right or parts.path not in ("", "/"):
            raise ValueError(f"prefill URL: expected http://HOST:PORT, got {url!r}")
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(url.rstrip("/"), parts.hostname, port, api_key)


class Peers:
    """A choice of the peers at ``urls``; there may be none until :meth:`replace`. All methods can
    be called from any thread. Raises ValueError if a URL has another form or is given twice."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self.all = [Peer.of(url) for url in urls]
        if len({peer.url for peer in self.all}) < len(self.all):
            raise ValueError(f"prefill URLs: expected different ones, got {', '.join(urls)}")
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def has_ready(self) -> bool:
        """Whether there is a peer that a request could go to."""
        with self._lock:
            return any(map(self._is_ready, self.all))

    @property
    def up(self) -> dict[str, bool]:
        """Whether each peer's last request succeeded, by URL. A new peer counts as up."""
        with self._lock:
            return {peer.url: not peer.failures for peer in self.all}

    def replace(self, api_keys: Mapping[str, str | None]) -> None:
        """Changes the peers to those at these URLs, each with its key. What is known of a peer that
        stays is kept; a server with another key is another peer. Requests to one that does not stay
        go on."""
        with self._lock:
            known = {(peer.url, peer.api_key): peer for peer in self.all}
            given = [Peer.of(url, key) for url, key in api_keys.items()]
            self.all = [known.get((peer.url, peer.api_key), peer) for peer in given]

    def at(self, host: str | None, port: int | None) -> Peer | None:
        """Returns the peer at an address, or None."""
        return next((p for p in self.all if (p.host, p.port) == (host, port)), None)

    def begin(
        self, tokens: int, tried: Collection[Peer] = (), preferred: Peer | None = None
    ) -> Peer | None:
        """Returns the peer for a request, which counts as its work until :meth:`end`. None if no
        peer is ready."""
        with self._lock:
            ready = [peer for peer in self.all if peer not in tried and self._is_ready(peer)]
            if not ready:
                return None
            peer = min(ready, key=lambda peer: (peer is not preferred, peer.open_tokens))
            peer.open_tokens += tokens
            peer.open_requests += 1
            return peer

    def end(self, peer: Peer, tokens: int, *, succeeded: bool | None) -> None:
        """Ends the work on a request. ``succeeded`` is None if nothing was learned about the peer,
        as after a cancellation."""
        with self._lock:
            peer.open_tokens -= tokens
            peer.open_requests -= 1
            if succeeded:
                peer.failures = 0
            elif succeeded is False:
                pause = min(_FIRST_PAUSE * 2**peer.failures, _LONGEST_PAUSE)
                peer.failures = min(peer.failures + 1, 30)
                peer.paused_until = self._clock() + pause

    def _is_ready(self, peer: Peer) -> bool:
        if not peer.failures:
            return True
        return self._clock() >= peer.paused_until and not peer.open_requests


class PrefillAddress(NamedTuple):
    """The address of a prefill replica's own HTTP server."""

    url: str  # with the address of its node
    api_key: str  # key that it made when it started. Only Ray's actors have it.


async def keep_current(
    peers: Peers,
    addresses: Callable[[], Awaitable[list[PrefillAddress]]],
    failures: tuple[type[Exception], ...] = (TimeoutError,),
) -> None:
    """Replaces the peers by the replicas that run now, whose addresses ``addresses`` returns, until
    it is cancelled. After one of ``failures`` the next look may succeed; other errors end it.

    A replica that was lost is a peer for at most a period, in which requests to it fail and go to
    another one. One that does not answer keeps others from joining: the peers stay as they are.
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
