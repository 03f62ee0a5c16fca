"""/prefill: pages of prompts for decode servers, on servers of the role ``prefill``.

The server computes what it does not have of the prompt, as a request for one token, which nobody
reads: the decode server samples the first token itself. The pages stay in the prefix cache, where
they may be evicted, and are copied from it a few at a time, while the decode server reads. Nothing
is pinned on the device, so that a slow or lost decode server costs no memory there.

The connection is the lease: when the decode server closes it, or its time is over, the request ends
and records that were not pulled are forgotten.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv3_jax.disaggregation.protocol import LAST_FRAME, MEDIA_TYPE, PATH, PrefillBody
from dsv3_jax.disaggregation.transfer import Sender
from dsv3_jax.pages import PageRecord
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.job import Job
from dsv3_jax.server.service import Service
from dsv3_jax.server.sse import disconnected, first_of, while_connected

logger = logging.getLogger(__name__)

_PAGES_PER_READ = 8


@dataclasses.dataclass
class PrefillCounts:
    """Figures of a prefill server. The event loop writes them."""

    prompts: int = 0
    """Prompts whose pages were asked for."""
    pages: int = 0
    """Pages that were offered."""
    num_bytes: int = 0
    """Bytes of their contents."""
    interrupted: int = 0
    """Answers that ended early: the decode server went away, or its time was over."""
    open_answers: int = 0


class Prefills:
    """Answers decode servers.

    Args:
      sender: how the records travel.
    """

    def __init__(self, service: Service, sender: Sender):
        self._service = service
        self._sender = sender
        self.counts = PrefillCounts()

    async def answer(self, body: PrefillBody, request: Request) -> Response:
        """Returns an answer with the pages, once they are computed.

        Raises:
          ApiError: the pages are of another cache or more than the prompt has, or the engine
            refuses the prompt, or does not get to it in time.
        """
        self._check(body)
        deadline = time.monotonic() + body.seconds
        self.counts.prompts += 1
        job = await self._service.submit(
            lambda: [body.tokens],
            1,
            n=1,
            prompt_field="tokens",
            max_new_tokens=1,
            temperature=0.0,
            draft=False,
        )
        is_answered = False
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                await job.completions()
            is_answered = True
        except TimeoutError:
            raise ApiError(
                504,
                f"prefill: expected the prompt's turn within {body.seconds:g} s",
                kind="timeout_error",
            ) from None
        finally:
            if not is_answered:
                self.counts.interrupted += 1
                job.close()
        return _PagesResponse(self, body, job, deadline)

    def _check(self, body: PrefillBody) -> None:
        """Raises ApiError unless this server can have the pages."""
        identity = self._service.engine.cache_identity
        if body.identity != identity.digest.hex():
            raise ApiError(
                409,
                f"identity: expected {identity.digest.hex()}, got {body.identity}; both servers"
                " need the same model, weights, dtype, quantization, page size and drafts",
                param="identity",
                code="other_cache",
            )
        if body.transfer != self._sender.name:
            raise ApiError(
                409,
                f"transfer: expected {self._sender.name} (--transfer), got {body.transfer}",
                param="transfer",
                code="other_transfer",
            )
        pages = (len(body.tokens) - identity.lookahead) // identity.page_size
        if (last := body.first_page + body.num_pages) > pages:
            raise ApiError(
                400,
                f"num_pages: expected at most {pages} full pages of {len(body.tokens)} tokens, got"
                f" {last}",
                param="num_pages",
            )

    async def send(self, body: PrefillBody, job: Job, deadline: float, send: Send) -> None:
        """Sends the pages of a prompt as frames.

        Raises:
          TimeoutError: the decode server did not read them in time.
        """
        lease = self._sender.lease()

        async def read(first: int) -> list[PageRecord]:
            count = min(_PAGES_PER_READ, end - first)
            read_pages = self._service.engine.read_pages
            return await asyncio.to_thread(read_pages, body.tokens, first, count)

        end = body.first_page + body.num_pages
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                for first in range(body.first_page, end, _PAGES_PER_READ):
                    records = await read(first)
                    for frame in await asyncio.to_thread(lease.offer, records):
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
                    self.counts.pages += len(records)
                    self.counts.num_bytes += sum(record.num_bytes for record in records)
                    if len(records) < min(_PAGES_PER_READ, end - first):
                        break  # later ones were evicted
                await send({"type": "http.response.body", "body": LAST_FRAME, "more_body": True})
                if self._sender.keeps_records:
                    await asyncio.Event().wait()  # until the decode server goes away
        finally:
            await asyncio.shield(asyncio.to_thread(lease.close))


class _PagesResponse(Response):
    """An answer of frames that ends when the decode server goes away."""

    def __init__(self, prefills: Prefills, body: PrefillBody, job: Job, deadline: float):
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._prefills = prefills
        self._body = body
        self._job = job
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = self._prefills.counts
        counts.open_answers += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pages = self._prefills.send(self._body, self._job, self._deadline, send)
            await first_of(pages, disconnected(receive))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # Without the last frame, so that the decode server knows.
            counts.interrupted += 1
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            counts.open_answers -= 1
            self._job.close()


def _loop_time(deadline: float) -> float:
    """Returns a time of ``time.monotonic()`` on the event loop's clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


router = APIRouter()


@router.post(PATH, responses={200: {"content": {MEDIA_TYPE: {}}}})
async def prefill(body: PrefillBody, request: Request) -> Response:
    """Computes pages of a prompt for a decode server, and returns them."""
    prefills: Prefills = request.app.state.prefills
    return await while_connected(request, prefills.answer(body, request))
