"""Records of pages: a header that identifies the page, and its form in a file or a message. And the
protocols of stores of records: host memory, a disk or another process.

    magic         16 bytes, with the version of this form
    length        8 bytes, little endian: bytes of the header
    header        JSON: identity, address, tokens, format
    payload       the contents, see :class:`~dsv3_jax.pages.address.PageFormat`
    checksum      SHA-256 of everything before it, 32 bytes

A record is used only if its checksum is right, and its identity, arrays, address and tokens are
those that were asked for. Memory for a record in a file is allocated only if the file has the size
that its header tells.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, BinaryIO, Protocol

import numpy as np

from dsv3_jax.pages.address import CacheIdentity, PageAddress, PageFormat

_MAGIC = b"dsv3-jax page 1\n"
_KIND = _MAGIC[:14]  # the same in all versions
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_BEGIN_BYTES = len(_MAGIC) + _LENGTH.size
_MAX_HEADER_BYTES = 2**20  # more than the arrays of all layers and the tokens take


class PageError(ValueError):
    """A record is damaged, or is not the page that was asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageRecord:
    """One page in host memory."""

    identity: bytes  # digest of the identity of its cache
    address: PageAddress
    format: PageFormat
    payload: np.ndarray  # its contents: ``format.num_bytes`` of uint8
    pinned: Any = None  # the arrays that ``payload`` is a view of, if in pinned host memory

    @property
    def num_bytes(self) -> int:
        """Bytes of its contents."""
        return self.payload.nbytes

    def check(self, identity: CacheIdentity, address: PageAddress) -> None:
        """Raises PageError, naming the difference, unless this is the page of ``address`` in a
        cache of this identity."""
        if self.format != identity.format:
            raise PageError(f"page: expected {identity.format}, got {self.format}")
        if self.identity != identity.digest:
            raise PageError(
                f"page: expected one of the cache {identity.digest.hex()[:16]}, got one of"
                f" {self.identity.hex()[:16]}: another model, other weights or other options"
            )
        # Tokens first: two prompts with equal digests would be told apart by them.
        if self.address.tokens != address.tokens:
            raise PageError("page: expected the tokens that were asked for, got others")
        for name in ("parent", "digest"):
            expected, got = getattr(address, name).hex(), getattr(self.address, name).hex()
            if got != expected:
                raise PageError(f"page: expected the {name} {expected[:16]}, got {got[:16]}")

    def encode(self) -> bytes:
        """Returns the record as bytes."""
        return b"".join(self.parts())

    def parts(self) -> tuple[bytes, memoryview, bytes]:
        """Returns the record as bytes in three parts, without a copy of the payload."""
        header = json.dumps(
            {
                "identity": self.identity.hex(),
                "digest": self.address.digest.hex(),
                "parent": self.address.parent.hex(),
                "tokens": self.address.tokens,
                "mtp": self.format.has_mtp,
                "format": self.format.as_json(),
            }
        ).encode()
        # Spaces align the payload.
        header += b" " * (-(len(_MAGIC) + _LENGTH.size + len(header)) % _ALIGNMENT)
        begin = _MAGIC + _LENGTH.pack(len(header)) + header
        payload = self.payload.data
        checksum = hashlib.sha256(begin)
        checksum.update(payload)
        return begin, payload, checksum.digest()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> PageRecord:
        """Returns the record that :meth:`encode` wrote. Its payload is a view of ``data``. Raises
        PageError, in one line, for any damage; :meth:`check` compares a record with what was asked
        for."""
        view = memoryview(data).cast("B")
        header, payload_begin = _header(view)
        try:
            format = PageFormat.from_json(header["format"])
            address = PageAddress(
                bytes.fromhex(header["digest"]),
                bytes.fromhex(header["parent"]),
                tuple(map(int, header["tokens"])),
            )
            identity, mtp = bytes.fromhex(header["identity"]), header["mtp"]
            is_address = PageAddress.of(address.parent, address.tokens) == address
            num_bytes, has_mtp = format.num_bytes, format.has_mtp
            if not 0 <= num_bytes < 2**63:
                raise ValueError("the sizes of its arrays")
        except Exception as error:  # whatever a header of any content leads to
            raise PageError(f"page record: its header is incomplete: {_line(error)}") from None
        if not is_address:
            raise PageError("page record: its digest is not that of its tokens")
        payload = np.frombuffer(view[payload_begin:-_CHECKSUM_BYTES], np.uint8)
        if payload.nbytes != num_bytes:
            raise PageError(
                f"page record: expected {num_bytes} bytes of contents, got {payload.nbytes}"
            )
        if mtp is not has_mtp:
            raise PageError("page record: its header contradicts its arrays about the MTP layer")
        return cls(identity, address, format, payload)

    @classmethod
    def read(cls, file: BinaryIO, size: int) -> PageRecord:
        """Returns the record that a file of ``size`` bytes has, see :meth:`decode`. A file of
        another size than its header tells is refused with PageError before it is read. Raises
        OSError if it cannot be read."""
        begin = file.read(_BEGIN_BYTES)
        _check_kind(memoryview(begin))
        try:
            (length,) = _LENGTH.unpack(begin[len(_MAGIC) :])
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"it has {length} bytes")
            header = file.read(length)
            payload = PageFormat.from_json(json.loads(header)["format"]).num_bytes
            is_right = size == _BEGIN_BYTES + length + payload + _CHECKSUM_BYTES
        except OSError:
            raise
        except Exception as error:  # whatever a header of any content leads to
            raise PageError(f"page record: is damaged: its header: {_line(error)}") from None
        if not is_right:
            raise PageError(f"page record: is damaged: its header is not one of {size} bytes")
        file.seek(0)
        return cls.decode(file.read(size))


def max_record_bytes(max_page_bytes: int) -> int:
    """Returns a bound for the bytes of an encoded record."""
    return max_page_bytes + _MAX_HEADER_BYTES


def _line(error: Exception) -> str:
    """Returns one short line about an error."""
    return " ".join(f"{error!s:.200}".split()) or type(error).__name__


def _check_kind(view: memoryview) -> None:
    """Raises PageError unless a record begins with these bytes."""
    if bytes(view[: len(_KIND)]) != _KIND:
        raise PageError(f"page record: expected one that begins with {_KIND!r}, got other data")
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise PageError(
            f"page record: expected version {_MAGIC[len(_KIND) :]!r}, got"
            f" {bytes(view[len(_KIND) : len(_MAGIC)])!r}"
        )


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Returns the header of a record whose checksum is right, and where its payload begins."""
    _check_kind(view)
    if len(view) < _BEGIN_BYTES + _CHECKSUM_BYTES:
        raise PageError(f"page record: is truncated to {len(view)} bytes")
    content, checksum = view[:-_CHECKSUM_BYTES], bytes(view[-_CHECKSUM_BYTES:])
    if hashlib.sha256(content).digest() != checksum:
        raise PageError(f"page record: is damaged: the checksum of {len(view)} bytes is wrong")
    (length,) = _LENGTH.unpack(view[len(_MAGIC) : _BEGIN_BYTES])
    end = _BEGIN_BYTES + length
    if end > len(content):
        raise PageError(f"page record: expected a header of {length} bytes, got fewer")
    if length > _MAX_HEADER_BYTES:
        raise PageError(
            f"page record: expected a header of at most {_MAX_HEADER_BYTES} bytes, got {length}"
        )
    try:
        header = json.loads(bytes(view[_BEGIN_BYTES:end]))
    except (ValueError, RecursionError, MemoryError) as error:
        raise PageError(f"page record: its header is not JSON: {_line(error)}") from None
    if not isinstance(header, dict):
        raise PageError(f"page record: its header is not an object: {type(header).__name__}")
    return header, end


class PageSource(Protocol):
    """Gives records of pages. Its methods can be called from any thread and return at once."""

    name: str  # its name in statistics, for example ``host``

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """Returns how many leading pages it seems to have. :meth:`fetch` may find fewer, since
        pages can be evicted or damaged."""
        ...

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """Returns the records of leading pages that it has, in order; perhaps none.

        A page that is missing or damaged, or that the source could not get in time, ends the list.
        The future has no error. The caller checks each record with :meth:`PageRecord.check`.
        """
        ...


class PageSink(Protocol):
    """Takes records of pages. Its methods can be called from any thread."""

    def store(self, records: Sequence[PageRecord]) -> None:
        """Keeps records, or drops them if it has no room. Returns at once."""


@dataclasses.dataclass(frozen=True)
class TierStats:
    """Figures of one source. Counts are totals since it was made."""

    name: str
    hit_pages: int = 0  # pages that were fetched from it
    hit_bytes: int = 0
    stored_pages: int = 0  # pages that it did not have before
    stored_bytes: int = 0
    dropped_pages: int = 0  # not kept, because it was too slow or its disk failed
    damaged_pages: int = 0  # pages that were refused and deleted. Requests computed them again.
    used_bytes: int = 0  # bytes that it occupies now

    def plus(
        self,
        *,
        hits: Sequence[PageRecord] = (),
        stored: Sequence[PageRecord] = (),
        dropped: int = 0,
        damaged: int = 0,
        used: int = 0,
    ) -> TierStats:
        """Returns the figures after some events. ``used`` counts bytes that it occupies in
        addition."""
        return TierStats(
            self.name,
            hit_pages=self.hit_pages + len(hits),
            hit_bytes=self.hit_bytes + sum(record.num_bytes for record in hits),
            stored_pages=self.stored_pages + len(stored),
            stored_bytes=self.stored_bytes + sum(record.num_bytes for record in stored),
            dropped_pages=self.dropped_pages + dropped,
            damaged_pages=self.damaged_pages + damaged,
            used_bytes=self.used_bytes + used,
        )

    def since(self, before: TierStats) -> TierStats:
        """Returns the figures with totals counted from an earlier moment."""
        totals = {
            field.name: getattr(self, field.name) - getattr(before, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("name", "used_bytes")
        }
        return dataclasses.replace(self, **totals)
