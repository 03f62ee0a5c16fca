"""Figures of remote prefills: what was pulled, what failed and why."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from typing import Literal

Reason = Literal[
    "no_peer",
    "connection",
    "deadline",
    "overloaded",
    "refused",
    "protocol",
    "damaged",
    "evicted",
    "cancelled",
    "internal",
]
"""Reason for which pages did not arrive:

========== ===================================================================
no_peer    no peer was ready
connection a peer was unreachable, or went away
deadline   the pages did not arrive in time
overloaded a peer had no room for the request
refused    a peer refused the request: another model, other settings, no key
protocol   a peer's answer had another form
damaged    a record was not the page that was asked for, or had a wrong checksum
evicted    a peer no longer had the pages when it came to sending them
cancelled  the request ended before
internal   an error of this program, which is in the log
========== ===================================================================
"""


@dataclasses.dataclass(frozen=True)
class RemoteFigures:
    """Figures of a decode server at one moment. Counts are totals since its start."""

    requests: int
    """Prompts for which peers were asked."""
    pages: int
    """Pages that were pulled."""
    num_bytes: int
    """Bytes of their records."""
    seconds: float
    """Time of these requests, together."""
    failures: dict[Reason, int]
    """Failed requests to one peer, by reason."""
    recomputed_pages: dict[Reason, int]
    """Pages that did not arrive from any peer, by the last reason."""
    open_requests: int
    peers_up: dict[str, bool]
    """See :attr:`Peers.up`."""


class RemoteCounts:
    """Counts these figures. All methods can be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._failures: Counter[Reason] = Counter()
        self._recomputed: Counter[Reason] = Counter()

    def began(self) -> None:
        """Counts a request."""
        with self._lock:
            self._counts["requests"] += 1
            self._counts["open"] += 1

    def pulled(self, num_bytes: int) -> None:
        """Counts a page."""
        with self._lock:
            self._counts["pages"] += 1
            self._counts["bytes"] += num_bytes

    def failed(self, reason: Reason) -> None:
        """Counts a failed request to a peer."""
        with self._lock:
            self._failures[reason] += 1

    def ended(self, seconds: float, missing_pages: int, reason: Reason) -> None:
        """Counts the end of a request, with the pages that did not arrive."""
        with self._lock:
            self._counts["open"] -= 1
            self._seconds += seconds
            if missing_pages:
                self._recomputed[reason] += missing_pages

    def figures(self, peers_up: dict[str, bool]) -> RemoteFigures:
        """Returns the figures as they are now."""
        with self._lock:
            return RemoteFigures(
                requests=self._counts["requests"],
                pages=self._counts["pages"],
                num_bytes=self._counts["bytes"],
                seconds=self._seconds,
                failures=dict(self._failures),
                recomputed_pages=dict(self._recomputed),
                open_requests=self._counts["open"],
                peers_up=peers_up,
            )
