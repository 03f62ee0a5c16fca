"""The arrays of cache pages, and addresses of pages by what their contents depend on.

The contents of a page depend on the model, on the arrays that are cached, and on all tokens up to
the end of the page. The MTP layer's entry at position i also depends on token i + 1, so that with
an MTP layer a page depends on the first token after it too (``lookahead``). An address is a chain
of SHA-256 digests over all of these:

    root      = SHA-256(identity of the cache)
    digest[0] = SHA-256(root      + tokens of page 0 and its lookahead)
    digest[i] = SHA-256(digest[i-1] + tokens of page i and its lookahead)

Two processes with the same weights compute the same addresses.

A record has one contiguous payload: for each array the rows of the page, in the width that the
model caches. A row is what the array stores for a token, or has the scales of several tokens. The
pool may be wider (576 numbers are stored as 640 on a TPU) and divided over devices; a payload never
is. Engines with other layouts and platforms can therefore exchange records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  # gives NumPy the names of JAX's dtypes
import numpy as np

if TYPE_CHECKING:
    from dsv3_jax.kv_cache import CacheSpec  # imports JAX, which records do not need


@dataclasses.dataclass(frozen=True)
class PageArray:
    """One array of a page."""

    name: str  # layer and name in its spec, such as ``layers.3.latent`` or ``mtp.0.latent``
    width: int  # numbers per token
    dtype: str  # name of the dtype, for example ``bfloat16``
    rows: int | None = None  # rows per page, if they are more than its tokens

    def numbers(self, page_size: int) -> int:
        """Returns how many numbers a page has."""
        return (self.rows or page_size) * self.width

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """The arrays of a page in the order of its payload: larger numbers come first, so that every
    array is aligned."""

    page_size: int  # tokens of a page on one device
    arrays: tuple[PageArray, ...]

    @classmethod
    def of(cls, spec: CacheSpec, page_size: int) -> PageFormat:
        """Returns the format of a model's pages."""
        arrays = [
            PageArray(
                f"{group}.{number}.{name}",
                array.width,
                np.dtype(array.dtype).name,
                array.rows(page_size) if array.is_scaled else None,
            )
            for group, layers in (("layers", spec.layers), ("mtp", spec.mtp))
            for number, layer in enumerate(layers)
            for name, array in layer.items()
        ]
        return cls(page_size, tuple(sorted(arrays, key=lambda array: -array.itemsize)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PageFormat:
        """Returns the format that :meth:`as_json` described. Raises ValueError, TypeError or
        KeyError for anything else."""
        arrays = tuple(
            PageArray(str(name), int(width), np.dtype(dtype).name, *map(int, rows))
            for name, width, dtype, *rows in value["arrays"]
        )
        return cls(int(value["page_size"]), arrays)

    def as_json(self) -> dict[str, Any]:
        """Returns a description in JSON's types."""
        arrays = [
            [array.name, array.width, array.dtype, *([array.rows] if array.rows else [])]
            for array in self.arrays
        ]
        return {"page_size": self.page_size, "arrays": arrays}

    @property
    def has_mtp(self) -> bool:
        """Whether a page has entries of the MTP layer."""
        return any(array.name.startswith("mtp.") for array in self.arrays)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of a payload."""
        return sum(array.numbers(self.page_size) * array.itemsize for array in self.arrays)


_VERSION = 1
"""Increase it when a model's layers begin to cache other values for the same weights and tokens."""


@dataclasses.dataclass(frozen=True)
class PageAddress:
    """The address of one page."""

    digest: bytes  # SHA-256 of ``parent`` and ``tokens``, 32 bytes
    parent: bytes  # digest of the page before it. That of the first page is the identity's.
    tokens: tuple[int, ...]  # the page's tokens, and the lookahead after them
    previous: PageAddress | None = dataclasses.field(default=None, compare=False, repr=False)
    """The address of the page before it, if it is known: a source that computes pages needs all
    tokens. ``parent`` identifies it."""

    @classmethod
    def of(
        cls, parent: bytes, tokens: Sequence[int], previous: PageAddress | None = None
    ) -> PageAddress:
        """Returns the address of a page."""
        content = np.asarray(tokens, "<i4").tobytes()
        return cls(hashlib.sha256(parent + content).digest(), parent, tuple(tokens), previous)

    def chain(self) -> list[PageAddress]:
        """Returns the addresses of all pages before it that are known, in order, and its own."""
        addresses: list[PageAddress] = [self]
        while (previous := addresses[-1].previous) is not None:
            addresses.append(previous)
        return addresses[::-1]


@dataclasses.dataclass(frozen=True)
class CacheIdentity:
    """Everything besides tokens that the contents of a page depend on."""

    model: str  # digest of config, weights and options (:mod:`dsv3_jax.pages.weights`)
    format: PageFormat
    lookahead: int  # tokens after a page that it depends on: 1 if an MTP layer caches, else 0
    salt: str = ""  # separates caches that are otherwise the same

    @functools.cached_property
    def digest(self) -> bytes:
        """The root of all addresses, 32 bytes."""
        parts = [_VERSION, self.model, self.format.as_json(), self.lookahead, self.salt]
        return hashlib.sha256(json.dumps(parts).encode()).digest()

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.format.page_size

    def addresses(
        self, tokens: Sequence[int], known: Sequence[PageAddress] = ()
    ) -> list[PageAddress]:
        """Returns the address of each full page of ``tokens`` whose lookahead is among them.
        ``known`` has those of the first pages, from an earlier call."""
        addresses = list(known)
        parent = addresses[-1].digest if addresses else self.digest
        full = (len(tokens) - self.lookahead) // self.page_size
        for number in range(len(addresses), full):
            begin = number * self.page_size
            content = tokens[begin : begin + self.page_size + self.lookahead]
            previous = addresses[-1] if addresses else None
            addresses.append(PageAddress.of(parent, content, previous))
            parent = addresses[-1].digest
        return addresses
