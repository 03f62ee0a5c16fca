"""Page records by :mod:`jax.experimental.transfer`, pulled by the decode side.

The prefill server registers the records of a few pages under a random number, and sends a ticket
with that number in its answer. The decode server pulls them from the host that the answer came from
and from no other. Records are host memory here, as in the other transfer: the CPU backend's arrays
of bytes.

What jax 0.10.2 and 0.12 do, as seen between processes of one machine, decides on the form of this
module:

* ``timeout`` of ``pull`` and ``await_pull`` has no effect. A pull from a peer that never answers,
  or of a number that is not registered, never ends. But a pull does not block its caller, so that
  its arrays can be polled, and a connection can be given up, which ends its pulls with an error.
  Every pull therefore has a connection of its own.
* A peer that dies ends the pulls from it with an error. One that is only stopped does not.
* What was registered and is not pulled stays in memory. :meth:`_JaxLease.close` pulls it itself and
  gives that pull up.
* A decode server that is stopped in the middle of a pull of some megabytes keeps a prefill server
  from serving other pulls until its connection closes. They run into their deadlines, and their
  pages are computed again.
* **Bytes of another protocol that arrive at the port end the process.** Nobody but the decode
  servers may be able to connect to it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import transfer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsv3_jax.disaggregation.protocol import ProtocolError, TransferName, frame
from dsv3_jax.pages import PageRecord
from dsv3_jax.pages.record import max_record_bytes

_BUFFER_BYTES = 2**24  # bytes that JAX copies at a time
_POLL_SECONDS = 0.002
_WITHDRAWAL_SECONDS = 0.1  # time in which a pull within this process has begun
_MAX_TICKET_BYTES = 2**14
_MAX_RECORDS = 256


class _Ticket(BaseModel):
    """Names registered records."""

    model_config = ConfigDict(extra="forbid", strict=True)

    port: Annotated[int, Field(ge=1, lt=2**16)]
    number: Annotated[int, Field(ge=0, lt=2**63)]
    sizes: Annotated[
        list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=_MAX_RECORDS)
    ]
    """Bytes of each record."""


class JaxSender:
    """Registers records in this process, and sends tickets."""

    name: TransferName = "jax"
    keeps_records = True

    def __init__(self, host: str, port: int = 0):
        self.server = _start_server(host, port)
        self.port = int(self.server.address().rpartition(":")[2])

    def lease(self) -> _JaxLease:
        """Begins an answer."""
        return _JaxLease(self)


class _JaxLease:
    """Registered records of one answer."""

    def __init__(self, sender: JaxSender):
        self._sender = sender
        self._offered: list[tuple[int, list[int]]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def offer(self, records: Sequence[PageRecord]) -> list[bytes]:
        """Registers records. Returns frames with tickets for them."""
        tickets = []
        for begin in range(0, len(records), _MAX_RECORDS):
            contents = [record.encode() for record in records[begin : begin + _MAX_RECORDS]]
            number, sizes = secrets.randbits(63), [len(content) for content in contents]
            arrays = [np.frombuffer(content, np.uint8) for content in contents]
            with self._lock:
                if self._is_closed:  # the decode server went away meanwhile
                    return tickets
                self._sender.server.await_pull(number, jax.device_put(arrays, _cpu()))
                self._offered.append((number, sizes))
            ticket = _Ticket(port=self._sender.port, number=number, sizes=sizes)
            tickets.append(frame(ticket.model_dump_json().encode()))
        return tickets

    def close(self) -> None:
        """Removes what was not pulled, by pulling it and giving that up. Other numbers are no
        longer registered, so that pulling them does nothing."""
        server = self._sender.server
        with self._lock:
            self._is_closed = True
            offered, self._offered = self._offered, []
        pulls = []
        for number, sizes in offered:
            connection = server.connect(server.address())
            pulls.append((connection, _pull(connection, number, sizes)))
        deadline = time.monotonic() + _WITHDRAWAL_SECONDS
        while not all(map(_is_ready, (p for _, p in pulls))) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for connection, arrays in pulls:
            _give_up(connection, arrays)


class JaxReceiver:
    """Pulls the records that tickets name."""

    name: TransferName = "jax"

    def __init__(self) -> None:
        # Only this process connects to it.
        self._server = _start_server("127.0.0.1", 0)

    def max_frame_bytes(self, max_page_bytes: int) -> int:
        """Returns the most bytes of a ticket."""
        return _MAX_TICKET_BYTES

    async def receive(
        self, content: bytes, host: str, max_page_bytes: int, max_pages: int
    ) -> Sequence[memoryview]:
        """Returns the records of a ticket. Cancelling it gives the pull up."""
        try:
            ticket = _Ticket.model_validate_json(content)
        except ValidationError as error:
            raise ProtocolError(f"ticket: {error.errors()[0]['msg']}") from None
        if max(ticket.sizes) > (most := max_record_bytes(max_page_bytes)):
            raise ProtocolError(
                f"ticket: expected records of at most {most} bytes, got {max(ticket.sizes)}"
            )
        if (count := len(ticket.sizes)) > max_pages:
            raise ProtocolError(f"ticket: expected at most {max_pages} records, got {count}")
        address = f"[{host}]:{ticket.port}" if ":" in host else f"{host}:{ticket.port}"
        connection = self._server.connect(address)
        arrays = _pull(connection, ticket.number, ticket.sizes)
        try:
            while not _is_ready(arrays):
                await asyncio.sleep(_POLL_SECONDS)
            return [np.asarray(array).data for array in arrays]
        except jax.errors.JaxRuntimeError as error:
            raise ConnectionError(f"pull: {str(error).splitlines()[0]:.200}") from None
        finally:
            if not _is_ready(arrays):
                _give_up(connection, arrays)


def _start_server(host: str, port: int) -> transfer.TransferServer:
    """Returns a server of this process's arrays."""
    if not hasattr(transfer.TransferConnection, "_poison_connection"):
        raise ValueError(
            "transfer: expected a version of JAX in which a pull can be given up, got"
            f" {jax.__version__}; use the transfer http"
        )
    try:
        is_all = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_all = False
    if is_all:
        raise ValueError(
            f"transfer jax: expected --host with the address of one network interface, which"
            f" decode servers connect to, got {host}"
        )
    host = f"[{host}]" if ":" in host else host
    return transfer.start_transfer_server(
        _cpu().client, f"{host}:{port}", [f"{host}:0"], transfer_size=_BUFFER_BYTES
    )


def _cpu() -> Any:
    """Returns the device whose arrays are host memory."""
    return jax.devices("cpu")[0]


def _pull(connection: Any, number: int, sizes: Sequence[int]) -> list[jax.Array]:
    """Starts a pull and returns its arrays, which may never become ready."""
    sharding = jax.sharding.SingleDeviceSharding(_cpu())
    specs = [jax.ShapeDtypeStruct((size,), np.uint8, sharding=sharding) for size in sizes]
    return connection.pull(number, specs)


def _is_ready(arrays: Sequence[Any]) -> bool:
    """Returns whether a pull has ended, perhaps with an error."""
    return all(array.is_ready() for array in arrays)


def _give_up(connection: Any, arrays: Sequence[jax.Array]) -> None:
    """Ends the pulls of a connection that are under way, with an error."""
    if not _is_ready(arrays):
        connection._poison_connection()
