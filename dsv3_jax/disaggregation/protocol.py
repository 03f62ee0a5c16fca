"""The request to a prefill server, the frames of its answer, and the transports of page records.

A decode server sends the first tokens of a prompt as ``POST /prefill`` and keeps the connection
open until it has the pages. The connection is a lease: when it closes, for whatever reason, the
prefill server cancels the work and forgets the pages. The answer's body is a sequence of frames:

    length        8 bytes, little endian
    content       a page record, or a ticket for several of them

A frame of length 0 is the last one. An answer that ends without it was interrupted; pages that came
before are right, since each record has its own checksum.

Both sides name the same transport. ``http`` puts the records into the frames of the answer: what
applies to other answers of the server, such as API keys, proxies and TLS, applies to them. ``jax``
is in :mod:`dsv3_jax.disaggregation.jax_transfer`.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from dsv3_jax.pages import PageRecord
from dsv3_jax.pages.record import max_record_bytes

PATH = "/prefill"
MEDIA_TYPE = "application/octet-stream"

TransferName = Literal["http", "jax"]  # the answer itself, or jax.experimental.transfer

_LENGTH = struct.Struct("<Q")
LAST_FRAME = _LENGTH.pack(0)


class ProtocolError(Exception):
    """A peer's answer has another form than expected."""


class PrefillBody(BaseModel):
    """Asks for pages of a prompt, which the server computes if it does not have them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of the cache's identity: model, weights, format. A server with another one refuses."""
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)
    ]
    """The tokens of all pages, and the lookahead after the last one."""
    first_page: Annotated[int, Field(ge=0)]  # the decode server has those before it
    num_pages: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(gt=0, le=3600)]  # after which the decode server no longer waits
    transfer: TransferName


class Reader(Protocol):
    """Reads bytes, as :class:`aiohttp.StreamReader` does."""

    async def readexactly(self, n: int) -> bytes: ...


def frame(*parts: bytes | memoryview) -> bytes:
    """Returns a frame whose content is given in parts, with one copy."""
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


async def frames(reader: Reader, max_bytes: int) -> AsyncIterator[bytes]:
    """Yields the contents of frames up to the last one. Raises ProtocolError for a content of more
    than ``max_bytes``, before it is read, and EOFError if the answer was interrupted."""
    while length := _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]:
        if length > max_bytes:
            raise ProtocolError(f"frame: expected at most {max_bytes} bytes, got {length}")
        yield await reader.readexactly(length)


class Lease(Protocol):
    """The records of one answer, on the prefill side. The methods may block, but not for long."""

    def offer(self, records: Sequence[PageRecord]) -> list[bytes]:
        """Returns the frames that give these records to the decode server."""
        ...

    def close(self) -> None:
        """Forgets all records that were offered. It is called once the connection is closed."""


class Sender(Protocol):
    """The prefill side of a transfer."""

    name: TransferName
    keeps_records: bool
    """Whether records must be kept until the decode server closes the connection, since they are
    not in the answer."""

    def lease(self) -> Lease:
        """Begins an answer."""
        ...


class Receiver(Protocol):
    """The decode side of a transfer. It is used on one event loop."""

    name: TransferName

    def max_frame_bytes(self, max_page_bytes: int) -> int:
        """Returns the most bytes that a frame may have."""
        ...

    async def receive(
        self, content: bytes, host: str, max_page_bytes: int, max_pages: int
    ) -> Sequence[bytes | memoryview]:
        """Returns the encoded records that belong to a frame. Cancelling it ends the transfer.

        Args:
          host: of the peer that sent the frame. Nothing is pulled from another one.
          max_page_bytes: most bytes of a page's contents.
          max_pages: most records. More are refused before there is memory for them.

        Raises:
          ProtocolError: the frame has another form.
          ConnectionError: the peer went away.
        """
        ...


class HttpSender:
    """Sends records in the answer."""

    name: TransferName = "http"
    keeps_records = False

    def lease(self) -> HttpSender:
        """Begins an answer."""
        return self

    def offer(self, records: Sequence[PageRecord]) -> list[bytes]:
        """Returns a frame for each record."""
        return [frame(*record.parts()) for record in records]

    def close(self) -> None:
        """Does nothing, since nothing is kept."""


class HttpReceiver:
    """Reads records from the answer."""

    name: TransferName = "http"

    def max_frame_bytes(self, max_page_bytes: int) -> int:
        """Returns the most bytes of a record."""
        return max_record_bytes(max_page_bytes)

    async def receive(
        self, content: bytes, host: str, max_page_bytes: int, max_pages: int
    ) -> Sequence[bytes]:
        """Returns the frame's content, which is a record."""
        return [content]
