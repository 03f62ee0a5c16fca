"""A page with a header that identifies it, and its form in a file or a message.

    magic         16 bytes, with the version of this form
    length        8 bytes, little endian: bytes of the header
    header        JSON: identity, address, tokens, format
    payload       the contents, see :class:`~dsv3_jax.pages.format.PageFormat`
    checksum      SHA-256 of everything before it, 32 bytes

A record is parsed only if its checksum is right. A page is used only if its identity, arrays,
address and tokens are those that were asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv3_jax.pages.address import CacheIdentity, PageAddress
from dsv3_jax.pages.format import PageFormat

_MAGIC = b"dsv3-jax page 1\n"
_KIND = _MAGIC[:14]  # the same in all versions
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class PageError(ValueError):
    """A record is damaged, or is not the page that was asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageRecord:
    """One page in host memory."""

    identity: bytes
    """Digest of the identity of its cache."""
    address: PageAddress
    format: PageFormat
    payload: np.ndarray
    """Its contents: ``format.num_bytes`` of uint8."""
    pinned: Any = None
    """The arrays that ``payload`` is a view of, if they are in pinned host memory; else None."""

    @classmethod
    def of(
        cls, identity: CacheIdentity, address: PageAddress, arrays: Mapping[str, np.ndarray]
    ) -> PageRecord:
        """Returns the record of a page with these arrays, see :meth:`PageFormat.join`."""
        return cls(identity.digest, address, identity.format, identity.format.join(arrays))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Views of its contents, [rows, width] by the name of the array."""
        return self.format.split(self.payload)

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
        """Returns the record that :meth:`encode` wrote. Its payload is a view of ``data``.

        Raises:
          PageError: one line that names the kind of damage. :meth:`check` compares a record with
            what was asked for.
        """
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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PageError(f"page record: its header is incomplete: {error}") from None
        if PageAddress.of(address.parent, address.tokens) != address:
            raise PageError("page record: its digest is not that of its tokens")
        payload = np.frombuffer(view[payload_begin:-_CHECKSUM_BYTES], np.uint8)
        if payload.nbytes != format.num_bytes:
            raise PageError(
                f"page record: expected {format.num_bytes} bytes of contents, got {payload.nbytes}"
            )
        if mtp is not format.has_mtp:
            raise PageError("page record: its header contradicts its arrays about the MTP layer")
        return cls(identity, address, format, payload)


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Returns the header of a record whose checksum is right, and where its payload begins."""
    if bytes(view[: len(_KIND)]) != _KIND:
        raise PageError(f"page record: expected one that begins with {_KIND!r}, got other data")
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise PageError(
            f"page record: expected version {_MAGIC[len(_KIND) :]!r}, got"
            f" {bytes(view[len(_KIND) : len(_MAGIC)])!r}"
        )
    if len(view) < len(_MAGIC) + _LENGTH.size + _CHECKSUM_BYTES:
        raise PageError(f"page record: is truncated to {len(view)} bytes")
    content, checksum = view[:-_CHECKSUM_BYTES], bytes(view[-_CHECKSUM_BYTES:])
    if hashlib.sha256(content).digest() != checksum:
        raise PageError(f"page record: is damaged: the checksum of {len(view)} bytes is wrong")
    begin = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(view[len(_MAGIC) : begin])
    if begin + length > len(content):
        raise PageError(f"page record: expected a header of {length} bytes, got fewer")
    try:
        header = json.loads(bytes(view[begin : begin + length]))
    except ValueError as error:
        raise PageError(f"page record: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise PageError(f"page record: its header is not an object: {type(header).__name__}")
    return header, begin + length
