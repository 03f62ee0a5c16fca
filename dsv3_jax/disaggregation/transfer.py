"""Transports of page records from a prefill server to a decode server.

Both sides name the same one. ``http`` puts the records into the frames of the answer: what applies
to other answers of the server, such as API keys, proxies and TLS, applies to them. ``jax`` is in
:mod:`dsv3_jax.disaggregation.jax_transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsv3_jax.disaggregation.protocol import TransferName, frame_of
from dsv3_jax.pages import PageRecord
from dsv3_jax.pages.record import max_record_bytes


class Lease(Protocol):
    """The records of one answer, on the prefill side. The methods may block, but not for long."""

    def offer(self, records: Sequence[PageRecord]) -> list[bytes]:
        """Returns the frames that give these records to the decode server."""
        ...

    def close(self) -> None:
        """Forgets all records that were offered. It is called once the connection is closed."""
        ...


class Sender(Protocol):
    """The prefill side of a transfer."""

    @property
    def name(self) -> TransferName:
        """Its name in requests."""
        ...

    @property
    def keeps_records(self) -> bool:
        """Whether records must be kept until the decode server closes the connection, since they
        are not in the answer."""
        ...

    def lease(self) -> Lease:
        """Begins an answer."""
        ...


class Receiver(Protocol):
    """The decode side of a transfer. It is used on one event loop."""

    @property
    def name(self) -> TransferName:
        """Its name in requests."""
        ...

    def max_frame_bytes(self, max_page_bytes: int) -> int:
        """Returns the most bytes that a frame may have."""
        ...

    async def receive(
        self, content: bytes, host: str, max_page_bytes: int
    ) -> Sequence[bytes | memoryview]:
        """Returns the encoded records that belong to a frame. Cancelling it ends the transfer.

        Args:
          host: of the peer that sent the frame. Nothing is pulled from another one.
          max_page_bytes: most bytes of a page's contents.

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
        return [frame_of(record.parts()) for record in records]

    def close(self) -> None:
        """Does nothing, since nothing is kept."""


class HttpReceiver:
    """Reads records from the answer."""

    name: TransferName = "http"

    def max_frame_bytes(self, max_page_bytes: int) -> int:
        """Returns the most bytes of a record."""
        return max_record_bytes(max_page_bytes)

    async def receive(self, content: bytes, host: str, max_page_bytes: int) -> Sequence[bytes]:
        """Returns the frame's content, which is a record."""
        return [content]
