"""/prefill: pages of prompts for decode servers, on servers of the role ``prefill``.

The server computes what it does not have of the prompt, as a request for one token, which nobody
reads: the decode server samples the first token itself. The engine saves every page to its tier in
host memory as soon as the logits after its chunk are known to be finite, and the answer takes it
from there, so that the first pages travel while later ones are computed. Nothing is pinned on the
device: a slow or lost decode server costs no memory there.

The connection is the lease: when the decode server closes it, or its time is over, the request ends
and records that were not pulled are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request
from prometheus_client.metrics_core import Metric
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv3_jax.disaggregation.protocol import LAST_FRAME, MEDIA_TYPE, PATH, PrefillBody, Sender
from dsv3_jax.engine import Engine, EngineError
from dsv3_jax.pages import PageAddress, PageRecord
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.job import Job
from dsv3_jax.server.metrics import Figures
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.service import Service
from dsv3_jax.server.sse import disconnected, first_of, while_connected

logger = logging.getLogger(__name__)

_MAX_RECORDS = 8
"""Most records that are encoded at a time."""
_POLL_SECONDS = 0.002


@dataclasses.dataclass
class PrefillCounts:
    """Figures of a prefill server. The event loop writes them."""

    prompts: int = 0  # whose pages were asked for
    pages: int = 0  # that were sent or offered
    num_bytes: int = 0  # of their contents
    missing_pages: int = 0  # that were not found in host memory although they had been computed
    interrupted: int = 0  # answers; the decode server went away, or its time was over
    open_answers: int = 0


class PrefillFigures(Figures):
    def __init__(self, counts: PrefillCounts, model_name: str):
        super().__init__(model_name)
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts, counter = self._counts, self.counter
        yield self.gauge("dsv3:prefill_answers_open", "Answers under way.", counts.open_answers)
        yield counter("dsv3:prefill_prompts", "Prompts of decode servers.", counts.prompts)
        yield counter("dsv3:prefill_pages", "Pages that were offered.", counts.pages)
        yield counter("dsv3:prefill_bytes", "Bytes of offered pages.", counts.num_bytes)
        yield counter("dsv3:prefill_interrupted", "Answers that ended early.", counts.interrupted)


class Prefills:
    """Answers decode servers."""

    def __init__(self, service: Service, sender: Sender):
        self.counts = PrefillCounts()
        self._service = service
        assert isinstance(service.engine, Engine), "prefill servers have their engine here"
        self.engine = service.engine
        self.store = service.engine.page_transfer
        self._sender = sender

    async def answer(self, body: PrefillBody) -> Response:
        """Returns an answer with the pages, once the first one is there."""
        # Hashing a long prompt takes some milliseconds.
        addresses = await self._service.in_thread(lambda: self._addresses(body), "prompts")
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
        answer = _Answer(self, job, addresses, self._sender, deadline)
        try:
            async with asyncio.timeout(body.seconds):
                await answer.first_page()
        except BaseException as error:
            self.counts.interrupted += 1
            await answer.close()
            if isinstance(error, TimeoutError):
                message = f"prefill: expected the first page within {body.seconds:g} s"
                raise ApiError(504, message, kind="timeout_error") from None
            raise
        return answer

    def _addresses(self, body: PrefillBody) -> Sequence[PageAddress]:
        """Returns the addresses of the pages that are asked for."""
        identity = self.store.identity
        if body.identity != identity.digest.hex():
            raise ApiError(
                409,
                f"identity: expected {identity.digest.hex()}, got {body.identity}; both servers"
                " need the same model, weights, dtype, quantization, activations, cache dtype, page"
                " size and drafts",
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
        if (count := len(body.tokens)) > (most := self._service.settings.max_len):
            message = f"tokens: expected at most {most} (max_len {most}), got {count}"
            raise ApiError(400, message, param="tokens", code="context_length_exceeded")
        addresses = identity.addresses(body.tokens)
        if (last := body.first_page + body.num_pages) > len(addresses):
            raise ApiError(
                400,
                f"num_pages: expected at most {len(addresses)} full pages of {len(body.tokens)}"
                f" tokens, got {last}",
                param="num_pages",
            )
        return addresses[body.first_page : last]


class _Answer(Response):
    """An answer of frames that ends when the decode server goes away."""

    def __init__(
        self,
        prefills: Prefills,
        job: Job,
        addresses: Sequence[PageAddress],
        sender: Sender,
        deadline: float,
    ):
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._counts = prefills.counts
        self._counts.open_answers += 1
        self._engine = prefills.engine
        self._store = prefills.store
        self._job = job
        self._computed = asyncio.ensure_future(job.completions())
        self._left = list(addresses)
        self._sender = sender
        self._lease = sender.lease()
        self._deadline = deadline

    async def first_page(self) -> None:
        """Waits for the first page, or until there will be none."""
        if not await self._pages_there() and self._computed.done():
            self._computed.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        body = {"type": "http.response.body", "body": b"", "more_body": False}
        try:
            await send(start)
            async with asyncio.timeout(self._deadline - time.monotonic()):
                await first_of(self._send(send), disconnected(receive))
        except (ApiError, TimeoutError):
            # Without the last frame, so that the decode server knows.
            self._counts.interrupted += 1
        finally:
            await self.close()
        # After all is freed: it waits for as long as the decode server reads nothing.
        await send(body)

    async def close(self) -> None:
        """Ends the request, and forgets the records."""
        self._counts.open_answers -= 1
        self._computed.cancel()
        with contextlib.suppress(asyncio.CancelledError, ApiError):
            await self._computed
        self._job.close()
        await asyncio.shield(asyncio.to_thread(self._lease.close))

    async def _send(self, send: Send) -> None:
        async def send_frame(frame: bytes) -> None:
            await send({"type": "http.response.body", "body": frame, "more_body": True})

        while self._left:
            records: list[PageRecord] = []
            if count := await self._pages_there():
                records = await asyncio.wrap_future(self._store.fetch(self._left[:count]))
            else:
                self._computed.result()
            if not records:
                self._counts.missing_pages += len(self._left)
                break
            for frame in await asyncio.to_thread(self._lease.offer, records):
                await send_frame(frame)
            del self._left[: len(records)]
            self._counts.pages += len(records)
            self._counts.num_bytes += sum(record.num_bytes for record in records)
        await send_frame(LAST_FRAME)
        if self._sender.keeps_records:
            await asyncio.Event().wait()  # until the decode server goes away

    async def _pages_there(self) -> int:
        """Waits until the next page is stored, or the prompt is computed and all its pages were.
        Returns how many pages can be read."""
        are_stored = False
        while not (count := self._store.lookup(self._left[:_MAX_RECORDS])):
            if are_stored:
                return 0
            if self._computed.done():
                left = max(self._deadline - time.monotonic(), 0.0)
                with contextlib.suppress(EngineError):  # it has ended, and the pages are missing
                    await asyncio.to_thread(self._engine.flush_tiers, left)
                are_stored = True
            else:
                await asyncio.wait([self._computed], timeout=_POLL_SECONDS)
        return count


router = APIRouter(route_class=BodyRoute)


@router.post(PATH, responses={200: {"content": {MEDIA_TYPE: {}}}})
async def prefill(body: PrefillBody, request: Request) -> Response:
    """Computes pages of a prompt for a decode server, and returns them."""
    prefills: Prefills = request.app.state.prefills
    return await while_connected(request, prefills.answer(body))
