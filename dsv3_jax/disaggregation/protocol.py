"""The request to a prefill server, and the frames of its answer.

A decode server sends the first tokens of a prompt as ``POST /prefill`` and keeps the connection
open until it has the pages. The connection is a lease: when it closes, for whatever reason, the
prefill server cancels the work and forgets the pages. The answer's body is a sequence of frames:

    length        8 bytes, little endian
    content       a page record, or a ticket for several of them

A frame of length 0 is the last one. An answer that ends without it was interrupted; pages that came
before are right, since each record has its own checksum.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

PATH = "/prefill"
MEDIA_TYPE = "application/octet-stream"

TransferName = Literal["http", "jax"]
"""Transport of the records: the answer itself, or jax.experimental.transfer."""

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
    first_page: Annotated[int, Field(ge=0)]
    """Number of the first page that is asked for. The decode server has those before it."""
    num_pages: Annotated[int, Field(ge=1)]
    """Number of pages that are asked for."""
    seconds: Annotated[float, Field(gt=0, le=3600)]
    """Time after which the decode server no longer waits."""
    transfer: TransferName
    """Transport of the records."""


class Reader(Protocol):
    """Reads bytes, as :class:`aiohttp.StreamReader` does."""

    async def readexactly(self, n: int) -> bytes: ...


def frame(content: bytes) -> bytes:
    """Returns a frame with this content."""
    return _LENGTH.pack(len(content)) + content


def frame_of(parts: tuple[bytes, memoryview, bytes]) -> bytes:
    """Returns a frame whose content is given in parts, with one copy."""
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


async def frames(reader: Reader, max_bytes: int) -> AsyncIterator[bytes]:
    """Yields the contents of frames up to the last one.

    Args:
      max_bytes: most bytes of a content. More are refused before they are read.

    Raises:
      ProtocolError: a frame is larger.
      EOFError: the answer was interrupted.
    """
    while length := _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]:
        if length > max_bytes:
            raise ProtocolError(f"frame: expected at most {max_bytes} bytes, got {length}")
        yield await reader.readexactly(length)
