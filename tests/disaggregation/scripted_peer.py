"""A prefill server without an engine: it sends records of a small format, or misbehaves as told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from aiohttp import web

from dsv3_jax.disaggregation.protocol import LAST_FRAME, PATH, PrefillBody, Sender
from dsv3_jax.pages import CacheIdentity, PageAddress, PageArray, PageFormat, PageRecord

IDENTITY = CacheIdentity(
    "a model",
    PageFormat(4, (PageArray("layers.0.latent", 6, "bfloat16"), PageArray("mtp.0.k", 3, "uint8"))),
    lookahead=1,
)
PROMPT = list(range(100, 121))  # five pages and the token after them
ADDRESSES = IDENTITY.addresses(PROMPT)


def record_of(address: PageAddress) -> PageRecord:
    """Returns a record with random contents, always the same for one address."""
    rng = np.random.default_rng(list(address.digest))
    payload = rng.integers(0, 256, IDENTITY.format.num_bytes, dtype=np.uint8)
    return PageRecord(IDENTITY.digest, address, IDENTITY.format, payload)


def is_right(records: Sequence[PageRecord], first: int = 0) -> bool:
    """Whether these are the prompt's pages from the first one on, bit by bit."""
    expected = [record_of(address) for address in ADDRESSES[first : first + len(records)]]
    return all(
        got.address == right.address and bool((got.payload == right.payload).all())
        for got, right in zip(records, expected, strict=True)
    )


Change = Callable[[list[bytes]], list[bytes]]
"""Changes the frames of an answer."""


class ScriptedPeer:
    """Answers requests with the records that they ask for.

    Args:
      sender: how records travel.
      status: of the answers.
      change: changes the frames, after which the answer may not have the last one.
      stalls: whether an answer never ends.
      delay: seconds before an answer.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        status: int = 200,
        change: Change | None = None,
        stalls: bool = False,
        delay: float = 0.0,
    ):
        self.bodies: list[PrefillBody] = []
        self.open = 0
        """Answers whose connection is open."""
        self._sender = sender
        self._status = status
        self._change = change
        self._stalls = stalls
        self._delay = delay

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handles a request."""
        body = PrefillBody.model_validate_json(await request.read())
        self.bodies.append(body)
        lease = self._sender.lease()
        self.open += 1
        try:
            await asyncio.sleep(self._delay)
            if self._status != 200:
                headers = {"Location": PATH} if 300 <= self._status < 400 else None
                return web.json_response(
                    {"error": {"message": "refused\x1b[2J"}}, status=self._status, headers=headers
                )
            addresses = IDENTITY.addresses(body.tokens)
            wanted = addresses[body.first_page : body.first_page + body.num_pages]
            sent = [*lease.offer([record_of(address) for address in wanted]), LAST_FRAME]
            response = web.StreamResponse()
            await response.prepare(request)
            for frame in sent if self._change is None else self._change(sent):
                await response.write(frame)
            if self._stalls or self._sender.keeps_records:
                await asyncio.sleep(60)  # cancelled when the connection closes
            return response
        finally:
            self.open -= 1
            lease.close()


@contextmanager
def running(peer: ScriptedPeer) -> Iterator[str]:
    """Runs a peer in a thread. Returns its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait_for(work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(10)  # pyright: ignore

    app = web.Application()
    app.router.add_post(PATH, peer.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    try:
        wait_for(runner.setup())
        wait_for(web.TCPSite(runner, "127.0.0.1", 0).start())
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        wait_for(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
