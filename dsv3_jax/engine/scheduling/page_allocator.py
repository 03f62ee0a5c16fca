"""Allocates cache pages to requests, and finds pages whose contents another request can reuse.

The allocator deals in page numbers only; the arrays live on the device. A page is in one of three
states:

======== ============================================ ==========================
state    meaning                                      becomes
======== ============================================ ==========================
free     its contents mean nothing                    used, by :meth:`allocate`
used     one or more requests refer to it             cached or free, by :meth:`release`
cached   nobody refers to it, but its contents are    used, by :meth:`reuse` or, when no
         indexed and can be reused                    page is free, by :meth:`allocate`
======== ============================================ ==========================

The prefix index is a tree. A page's key is its parent page's identity and the exact tokens that its
contents depend on, compared one by one: two prompts share a page only if all tokens up to its end
are equal, whatever their hashes. Cached pages are evicted least recently used first, and the end of
a prefix before its beginning, also if its pages are those of several requests. No page stays in the
index without all of those before it: nothing could find it.

A page is indexed when the step that computes it is planned, so that requests with the same prompt
compute it once. Until a step that read it has given finite logits it is unverified: if the logits
are not finite, it leaves the index again, and only verified pages are copied elsewhere.

The latents of a page depend on the tokens up to its end. The MTP layer's entry at position i also
depends on token i + 1. With ``lookahead=1`` a key therefore includes the first token after the
page: then a shared page is right for the MTP layer too, and no request ever writes to one.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ROOT = 0  # identity of the parent of every first page


class _Key(NamedTuple):
    """Key of a page in the prefix index: everything that its contents depend on."""

    parent: int
    """Identity of the page before it, or ``_ROOT``."""
    tokens: tuple[int, ...]
    """The page's tokens, and ``lookahead`` tokens after them."""


class PageAllocator:
    """Pages ``first_page`` to ``first_page + num_pages - 1`` of a cache.

    Args:
      page_size: tokens in a page.
      lookahead: tokens after a page that its contents depend on: 1 if an MTP layer caches, else 0.
      prefix_cache: whether released pages stay available for reuse.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        first_page: int = 0,
        lookahead: int = 0,
        prefix_cache: bool = True,
    ):
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"{name}: expected 1 or more, got {size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._pages = range(first_page, first_page + num_pages)
        self.lookahead = lookahead
        self._prefix_cache = prefix_cache
        self._free = list(reversed(self._pages))
        self._references = dict.fromkeys(self._pages, 0)
        self._index: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}  # of indexed pages
        # A page gets a new identity whenever it is indexed, so that no key outlives its parent.
        self._identities: dict[int, int] = {}
        self._by_identity: dict[int, int] = {}  # the inverse
        self._children: dict[int, set[int]] = {}  # pages by their parent's identity
        self._next_identity = itertools.count(_ROOT + 1)
        self._unverified: set[int] = set()  # indexed pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.generation = 0
        """Number of calls of :meth:`clear`. A request that began in an earlier generation publishes
        nothing: the weights may have changed since."""

    @property
    def available(self) -> int:
        """Number of pages that :meth:`allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Number of pages that requests refer to."""
        return self.num_pages - self.available

    def available_beside(self, pages: Iterable[int]) -> int:
        """Returns the number of pages that :meth:`allocate` can hand out after :meth:`reuse` of
        ``pages``."""
        return self.available - sum(page in self._cached for page in pages)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` pages with one reference each, or None if there are not so many.

        It takes free pages first and then evicts cached ones.
        """
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Takes one reference from each page. A page without references becomes cached if it is
        indexed, and free if it is not.

        Raises:
          ValueError: a page has no reference.
        """
        last = None
        for page in list(pages):
            if self._references.get(page, 0) < 1:
                raise ValueError(f"page: expected one that is in use, got {page}")
            self._references[page] -= 1
            if page in self._keys:
                last = page
            if self._references[page]:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)
        if last is not None:
            # Pages before this request's own may be those of another one, which ended earlier.
            self._touch(last)

    def cached_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Returns the pages that hold the longest indexed prefix of ``tokens``, without changing
        anything. At least one token stays uncovered, since the model has to run on one to predict
        the next."""
        pages = []
        parent = _ROOT
        for number in range((len(tokens) - 1) // self.page_size):
            page = self._index.get(self._key(parent, tokens, number))
            if page is None:
                break
            pages.append(page)
            parent = self._identities[page]
        return pages

    def is_indexed(self, page: int) -> bool:
        """Returns whether other requests can reuse a page."""
        return page in self._keys

    def reuse(self, pages: Iterable[int]) -> None:
        """Adds one reference to each of the pages that :meth:`cached_prefix` returned."""
        for page in pages:
            self._references[page] += 1
            self._cached.pop(page, None)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], start: int = 0) -> int:
        """Indexes the full pages of a request, so that other requests can reuse them.

        Args:
          tokens: the request's tokens whose cache entries are written, plus ``lookahead`` known
            tokens after them.
          pages: the request's pages, in order. All of them are in use.
          start: number of the first page that was not published by an earlier call.

        Returns:
          The number of the first page that is still to be published.
        """
        full = (len(tokens) - self.lookahead) // self.page_size
        if not self._prefix_cache or full <= start:
            return start
        parent = self._identity_of_prefix(tokens, pages, start)
        for number in range(start, full):
            if parent is None:
                # The parent was evicted, so that nothing could find this page.
                return full
            key = self._key(parent, tokens, number)
            page = self._index.get(key)
            if page is None:
                page = pages[number]
                self._index[key] = page
                self._keys[page] = key
                self._identities[page] = identity = next(self._next_identity)
                self._unverified.add(page)
                self._by_identity[identity] = page
                self._children.setdefault(parent, set()).add(page)
            # Otherwise another request has published equal contents. This copy stays private, and
            # pages after it are indexed after the other one.
            parent = self._identities[page]
        return full

    def verify(self, pages: Iterable[int]) -> list[int]:
        """Notes that logits that depend on pages are finite. Returns those of the pages that are
        indexed and were unverified."""
        verified = [page for page in pages if page in self._unverified]
        self._unverified.difference_update(verified)
        return verified

    def retract(self, pages: Iterable[int]) -> None:
        """Removes the unverified ones of some pages from the index, with all pages after them,
        because logits that depend on them are not finite."""
        for page in pages:
            if page in self._unverified:
                self._remove(page)

    def clear(self) -> None:
        """Empties the prefix index and begins a new generation, for example because the weights
        have changed. Pages in use stay with their requests."""
        self.generation += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self._index.clear()
        self._keys.clear()
        self._identities.clear()
        self._by_identity.clear()
        self._children.clear()
        self._unverified.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if a page is lost, referred to by nobody, or in two states.

        Args:
          owners: the pages of each request that holds some.
        """
        counts = dict.fromkeys(self._pages, 0)
        for pages in owners:
            for page in pages:
                assert page in counts, "a page belongs to another allocator"
                counts[page] += 1
        assert counts == self._references, "references differ from the pages of requests"
        used = {page for page, count in counts.items() if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free | cached | used) == len(free) + len(cached) + len(used), (
            "a page is in two states"
        )
        assert free | cached | used == set(self._pages), "a page is lost"
        assert set(self._keys) == set(self._index.values()) == set(self._identities)
        assert all(self._index[key] == page for page, key in self._keys.items())
        assert cached <= set(self._keys), "a cached page is not indexed"
        assert not free & set(self._keys), "a free page is indexed"
        assert self._unverified <= set(self._keys), "an unverified page is not indexed"
        assert self._by_identity == {number: page for page, number in self._identities.items()}
        age = {page: number for number, page in enumerate(self._cached)}
        for page, key in self._keys.items():
            assert page in self._children[key.parent], "an indexed page is lost"
            parent = self._by_identity.get(key.parent)
            assert parent is not None or key.parent == _ROOT, "a page is indexed without its parent"
            if page in age and parent in age:
                assert age[page] < age[parent], "a page is evicted before what follows it"
        assert sum(map(len, self._children.values())) == len(self._keys)

    def _key(self, parent: int, tokens: Sequence[int], number: int) -> _Key:
        begin = number * self.page_size
        return _Key(parent, tuple(tokens[begin : begin + self.page_size + self.lookahead]))

    def _identity_of_prefix(
        self, tokens: Sequence[int], pages: Sequence[int], count: int
    ) -> int | None:
        """Returns the identity of the indexed page that ends the first ``count`` pages of
        ``tokens``, or None if it is not indexed."""
        if not count:
            return _ROOT
        if (page := pages[count - 1]) in self._identities:
            return self._identities[page]
        parent = _ROOT
        for number in range(count):
            page = self._index.get(self._key(parent, tokens, number))
            if page is None:
                return None
            parent = self._identities[page]
        return parent

    def _touch(self, page: int) -> None:
        """Makes an indexed page and those before it the most recently used cached pages, the first
        one last: the end of a prefix is evicted before its beginning."""
        last: int | None = page
        while last is not None:
            if last in self._cached:
                self._cached.move_to_end(last)
            last = self._by_identity.get(self._keys[last].parent)

    def _evict(self) -> int:
        """Takes the least recently used page that no indexed page follows. Those that follow a
        cached page are in use; only if there is no other one, they leave the index with it."""
        oldest = next(iter(self._cached))
        page = oldest
        while self._identities[page] in self._children:
            self._touch(page)
            if (page := next(iter(self._cached))) == oldest:
                break
        del self._cached[page]
        self._remove(page)
        return page

    def _remove(self, page: int) -> None:
        """Removes a page from the index, with those after it, which nothing could find any more."""
        lost = [page]
        while lost:
            each = lost.pop()
            key = self._keys.pop(each)
            del self._index[key]
            siblings = self._children[key.parent]
            siblings.discard(each)
            if not siblings:
                del self._children[key.parent]
            identity = self._identities.pop(each)
            del self._by_identity[identity]
            self._unverified.discard(each)
            lost += self._children.get(identity, ())
            if each in self._cached:
                del self._cached[each]
                self._free.append(each)
