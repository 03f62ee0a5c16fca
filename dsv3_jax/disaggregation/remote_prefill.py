"""Prefill servers as a source of cached pages.

The engine asks this source for the pages of a prompt like any other source. It sends the prompt to
a prefill server, which computes what it does not have, and returns the pages that arrived in time.
The engine's steps go on meanwhile. Cancelling the future closes the connection, which ends the work
of the prefill server too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

import aiohttp

from dsv3_jax.disaggregation.peers import Peer, Peers
from dsv3_jax.disaggregation.protocol import PATH, PrefillBody, ProtocolError, Receiver, frames
from dsv3_jax.pages import PageAddress, PageError, PageRecord
from dsv3_jax.words import one_line

logger = logging.getLogger(__name__)

Reason = Literal[
    "no_peer",  # no peer was ready
    "connection",  # a peer was unreachable, or went away
    "deadline",  # the pages did not arrive in time
    "overloaded",  # a peer had no room for the request
    "refused",  # a peer refused the request: another model, other settings, no key
    "protocol",  # a peer's answer had another form
    "damaged",  # a record was not the page that was asked for, or had a wrong checksum
    "evicted",  # a peer no longer had the pages when it came to sending them
    "cancelled",  # the request ended before
    "internal",  # an error of this program, which is in the log
]
"""Reason for which pages did not arrive."""


@dataclasses.dataclass(frozen=True)
class RemoteFigures:
    """Figures of a decode server at one moment. Counts are totals since its start."""

    requests: int = 0  # prompts for which peers were asked
    open_requests: int = 0
    pages: int = 0  # pages that were pulled
    num_bytes: int = 0  # bytes of their records
    seconds: float = 0.0  # time of these requests, together
    failures: Counter[Reason] = dataclasses.field(default_factory=Counter)  # of one peer
    recomputed_pages: Counter[Reason] = dataclasses.field(default_factory=Counter)
    """Pages that did not arrive from any peer, by the last reason."""


_CONNECT_SECONDS = 5.0
_MAX_OPEN = 64  # prompts under way; others wait, within their time
_MAX_PREFERRED = 4096
_SHOWN_BYTES = 2000  # of a peer's error


class RemotePrefill:
    """Asks peers for pages. It has a thread of its own.

    Args:
      peers: the prefill servers. One whose cache has another identity refuses.
      receiver: how the pages travel.
      page_size: tokens of a page.
      max_page_bytes: most bytes of a page's contents. A larger one is refused before it is read.
      seconds: longest time for the pages of a prompt; after it the engine computes the rest.
      min_pages: fewer pages are left to the engine.
      api_key: key that peers without one of their own expect, or None.
    """

    name = "remote"

    def __init__(
        self,
        peers: Peers,
        receiver: Receiver,
        *,
        page_size: int,
        max_page_bytes: int,
        seconds: float = 30.0,
        min_pages: int = 1,
        api_key: str | None = None,
    ):
        self.peers = peers
        self._preferred: OrderedDict[bytes, Peer] = OrderedDict()  # by digests of last pages
        self._receiver = receiver
        self._page_size = page_size
        self._max_page_bytes = max_page_bytes
        self._seconds = seconds
        self._min_pages = min_pages
        self._api_key = api_key
        self._room = asyncio.Semaphore(_MAX_OPEN)
        # The thread replaces this record and changes none, so that a reader may keep one.
        self.figures = RemoteFigures()
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dsv3-remote-prefill", daemon=True)
        self._thread.start()

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """Returns the number of these pages if a peer can be asked for them, else 0."""
        is_wanted = len(addresses) >= self._min_pages and self.peers.has_ready
        return len(addresses) if is_wanted else 0

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """Returns the records of leading pages that peers gave, in order; perhaps none."""
        return asyncio.run_coroutine_threadsafe(self._fetch(addresses), self._loop)

    def prefer(self, peer: Peer, addresses: Sequence[PageAddress]) -> None:
        """Lets a peer be the first that is asked for these pages, because it has them."""
        for address in addresses[-2:]:  # the last one is not needed if it ends the prompt
            self._preferred[address.digest] = peer
            if len(self._preferred) > _MAX_PREFERRED:
                self._preferred.popitem(last=False)

    def close(self) -> None:
        """Gives up what is under way, and ends the thread."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join()

    def _run(self) -> None:
        """The body of the thread."""
        self._loop.run_forever()
        self._loop.close()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        await self._loop.shutdown_default_executor()
        self._loop.stop()

    async def _fetch(self, addresses: Sequence[PageAddress]) -> list[PageRecord]:
        """Asks one peer after the other for what is still missing, until the time is over."""
        began = time.monotonic()
        records: list[PageRecord] = []
        reason: Reason = "cancelled"
        self._count(requests=1, open_requests=1)
        try:
            async with asyncio.timeout(self._seconds), self._room:
                reason = await self._ask_peers(addresses, records, began)
        except TimeoutError:
            reason = "deadline"
        except Exception:
            reason = "internal"
            logger.exception("a remote prefill failed; its pages are computed here")
        finally:
            self._count(
                open_requests=-1,
                seconds=time.monotonic() - began,
                recomputed_pages=Counter({reason: len(addresses) - len(records)}),
            )
        return records

    async def _ask_peers(
        self, addresses: Sequence[PageAddress], records: list[PageRecord], began: float
    ) -> Reason:
        """Appends records until all are there or every peer that is ready has failed. Returns the
        reason of the last failure."""
        reason: Reason = "no_peer"
        tried: set[Peer] = set()
        while wanted := addresses[len(records) :]:
            tokens = len(wanted) * self._page_size
            preferred = self._preferred.get(wanted[-1].digest)
            peer = self.peers.begin(tokens, tried, preferred)
            if peer is None:
                break
            tried.add(peer)
            succeeded: bool | None = None
            try:
                left = self._seconds - (time.monotonic() - began)
                await self._ask(peer, wanted, records, left)
                succeeded, reason = True, "evicted"
            except asyncio.CancelledError:
                # A deadline says something about the peer, a cancellation does not. Both cancel
                # this task: a TimeoutError is that of a connection to this peer.
                is_late = time.monotonic() - began >= self._seconds
                if is_late:
                    self._failed(peer, "deadline", f"no answer within {self._seconds:g} s")
                    succeeded = False
                raise
            except Exception as error:
                reason = _reason(error)
                self._failed(peer, reason, str(error) or type(error).__name__)
                # A busy peer is a good one, and a damaged page may be a single one.
                succeeded = None if reason == "overloaded" else False
            finally:
                self.peers.end(peer, tokens, succeeded=succeeded)
        return reason

    async def _ask(
        self, peer: Peer, wanted: Sequence[PageAddress], records: list[PageRecord], seconds: float
    ) -> None:
        """Appends the records that a peer sends, each checked."""
        all_pages = wanted[-1].chain()
        identity = all_pages[0].parent
        most = self._max_page_bytes
        body = PrefillBody(
            identity=identity.hex(),
            tokens=_tokens(all_pages, self._page_size),
            first_page=len(all_pages) - len(wanted),
            num_pages=len(wanted),
            seconds=max(seconds, 1e-3),
            transfer=self._receiver.name,
        )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            )
        key = peer.api_key or self._api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = peer.url + PATH
        # A redirect could lead the prompt, and the key, anywhere.
        async with self._session.post(
            url, json=body.model_dump(), headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                message = (await response.content.read(_SHOWN_BYTES)).decode("utf-8", "replace")
                raise _RefusedError(response.status, message)
            left, before = iter(wanted), len(records)
            try:
                max_bytes = self._receiver.max_frame_bytes(most)
                async for content in frames(response.content, max_bytes):
                    pages = len(wanted) - (len(records) - before)
                    for data in await self._receiver.receive(content, peer.host, most, pages):
                        address = next(left, None)
                        if address is None:
                            raise ProtocolError(f"answer: expected {len(wanted)} pages, got more")
                        # In a thread, because a checksum takes a while and releases the lock.
                        record = await asyncio.to_thread(_checked, data, identity, address)
                        self._count(pages=1, num_bytes=len(data))
                        records.append(record)
            finally:
                response.close()  # not only released: the peer holds pages until then

    def _count(self, **added: Any) -> None:
        """Adds to the figures of these names."""
        totals = {name: getattr(self.figures, name) + more for name, more in added.items()}
        self.figures = dataclasses.replace(self.figures, **totals)

    def _failed(self, peer: Peer, reason: Reason, message: str) -> None:
        self._count(failures=Counter({reason: 1}))
        logger.warning("prefill at %s failed (%s): %s", peer.url, reason, one_line(message, 300))


class _RefusedError(Exception):
    """A peer answered with an error."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}: {message}")
        self.status = status


def _checked(data: bytes | memoryview, identity: bytes, address: PageAddress) -> PageRecord:
    """Returns a record. The engine compares its format too when it uses it."""
    record = PageRecord.decode(data)
    if record.address != address or record.identity != identity:
        raise PageError(
            f"page: expected {address.digest.hex()[:16]} of the cache {identity.hex()[:16]}, got"
            f" {record.address.digest.hex()[:16]} of {record.identity.hex()[:16]}"
        )
    return record


def _reason(error: Exception) -> Reason:
    """Returns the reason that a failure is counted under."""
    if isinstance(error, _RefusedError):
        if error.status == 503:
            return "overloaded"
        return "deadline" if error.status == 504 else "refused"
    if isinstance(error, PageError):
        return "damaged"
    if isinstance(error, ProtocolError):
        return "protocol"
    if isinstance(error, (aiohttp.ClientError, OSError, EOFError)):
        return "connection"
    raise error


def _tokens(addresses: Sequence[PageAddress], page_size: int) -> list[int]:
    """Returns the tokens that a prompt's pages depend on."""
    tokens = [token for address in addresses for token in address.tokens[:page_size]]
    return tokens + list(addresses[-1].tokens[page_size:])
