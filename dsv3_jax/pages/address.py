"""Addresses of pages by what their contents depend on.

The contents of a page depend on the model, on the arrays that are cached, and on all tokens up to
the end of the page. The MTP layer's entry at position i also depends on token i + 1, so that with
an MTP layer a page depends on the first token after it too (``lookahead``). An address is a chain
of SHA-256 digests over all of these:

    root      = SHA-256(identity of the cache)
    digest[0] = SHA-256(root      + tokens of page 0 and its lookahead)
    digest[i] = SHA-256(digest[i-1] + tokens of page i and its lookahead)

Two processes with the same weights compute the same addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from dsv3_jax.pages.format import PageFormat

_VERSION = 1
"""Increase it when a model's layers begin to cache other values for the same weights and tokens."""


@dataclasses.dataclass(frozen=True)
class PageAddress:
    """The address of one page."""

    digest: bytes
    """SHA-256 of ``parent`` and ``tokens``, 32 bytes."""
    parent: bytes
    """Digest of the page before it. That of the first page is the identity's."""
    tokens: tuple[int, ...]
    """The page's tokens, and the lookahead after them."""
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

    model: str
    """Identifies config, weights and options, see :func:`dsv3_jax.pages.weights.model_digest`."""
    format: PageFormat
    lookahead: int
    """Tokens after a page that its contents depend on: 1 if an MTP layer caches, else 0."""
    salt: str = ""
    """Separates caches that are otherwise the same."""

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

        Args:
          known: addresses of the first pages, from an earlier call.
        """
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
