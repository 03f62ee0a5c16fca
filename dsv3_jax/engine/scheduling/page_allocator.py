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

The prefix index is a tree of pages. An edge is labelled with the exact tokens of a page, compared
one by one: two prompts share a page only if all tokens up to its end are equal, whatever their
hashes. Cached pages are evicted least recently used first, and the end of a prefix before its
beginning, also if its pages are those of several requests. No page stays in the index without all
of those before it: nothing could find it.

A page is indexed when the step that computes it is planned, so that requests with the same prompt
compute it once. Until a step that read it has given finite logits it is unverified: if the logits
are not finite, it leaves the index again, and only verified pages are copied elsewhere.

The latents of a page depend on the tokens up to its end. The MTP layer's entry at position i also
depends on token i + 1. With ``lookahead=1`` a key therefore includes the first token after the
page: then a shared page is right for the MTP layer too, and no request ever writes to one.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """An indexed page, or the root of the index."""

    page: int
    tokens: tuple[int, ...] = ()
    """The page's tokens, and ``lookahead`` tokens after them."""
    parent: _Node | None = None
    children: dict[tuple[int, ...], _Node] = dataclasses.field(default_factory=dict)
    """The indexed pages that follow it, by their tokens."""
    is_verified: bool = False


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
        self._root = _Node(-1)
        self._nodes: dict[int, _Node] = {}  # of indexed pages
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
        """Returns :attr:`available` as it is after :meth:`reuse` of ``pages``."""
        return self.available - sum(page in self._cached for page in pages)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` pages with one reference each, free ones first, or None if too few."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Takes one reference from each page. Without any, an indexed page becomes cached."""
        last = None
        for page in list(pages):
            if self._references.get(page, 0) < 1:
                raise ValueError(f"page: expected one that is in use, got {page}")
            self._references[page] -= 1
            node = self._nodes.get(page)
            last = node or last
            if self._references[page]:
                continue
            if node is None:
                self._free.append(page)
            else:
                self._cached[page] = None
        if last is not None:
            # Pages before this request's own may be those of another one, which ended earlier.
            self._touch(last)

    def cached_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Returns the pages that hold the longest indexed prefix of ``tokens``. At least one token
        stays uncovered, since the model has to run on one to predict the next."""
        numbers = range((len(tokens) - 1) // self.page_size)
        return [node.page for node in self._indexed(tokens, numbers)]

    def is_indexed(self, page: int) -> bool:
        """Returns whether other requests can reuse a page."""
        return page in self._nodes

    def reuse(self, pages: Iterable[int]) -> None:
        """Adds one reference to each of the pages that :meth:`cached_prefix` returned."""
        for page in pages:
            self._references[page] += 1
            self._cached.pop(page, None)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], start: int = 0) -> int:
        """Indexes the full pages of a request from page ``start`` on, so that other requests can
        reuse them. ``tokens`` are those whose cache entries are written, and ``lookahead`` ones.
        Returns the number of the first page that is still to be published."""
        full = (len(tokens) - self.lookahead) // self.page_size
        if not self._prefix_cache or full <= start:
            return start
        node = self._node_of_prefix(tokens, pages, start)
        if node is None:
            return full  # the page before was evicted, so that nothing could find these
        for number in range(start, full):
            key = self._key(tokens, number)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(pages[number], key, node)
                self._nodes[child.page] = child
            # Otherwise another request has published equal contents. This copy stays private, and
            # pages after it are indexed after the other one.
            node = child
        return full

    def verify(self, pages: Iterable[int]) -> list[int]:
        """Notes that logits of pages are finite. Returns those indexed that were unverified."""
        verified = [page for page in pages if self._is_unverified(page)]
        for page in verified:
            self._nodes[page].is_verified = True
        return verified

    def retract(self, pages: Iterable[int]) -> None:
        """Removes unverified pages, whose logits are not finite, and those after them."""
        for page in pages:
            if self._is_unverified(page):
                self._remove(page)

    def clear(self) -> None:
        """Empties the prefix index and begins a new generation, for example because the weights
        have changed. Pages in use stay with their requests."""
        self.generation += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self._nodes.clear()
        self._root.children.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if a page is lost, in two states, or of another of ``owners``."""
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
        assert cached <= set(self._nodes), "a cached page is not indexed"
        assert not free & set(self._nodes), "a free page is indexed"
        age = {page: number for number, page in enumerate(self._cached)}
        for page, node in self._nodes.items():
            parent = node.parent
            assert node.page == page
            assert parent is not None
            assert parent.children[node.tokens] is node, "an indexed page is lost"
            if parent is self._root:
                continue
            assert self._nodes.get(parent.page) is parent, "a page is indexed without its parent"
            if page in age and parent.page in age:
                assert age[page] < age[parent.page], "a page is evicted before what follows it"
        nodes = [self._root, *self._nodes.values()]
        assert sum(len(node.children) for node in nodes) == len(self._nodes)

    def _key(self, tokens: Sequence[int], number: int) -> tuple[int, ...]:
        begin = number * self.page_size
        return tuple(tokens[begin : begin + self.page_size + self.lookahead])

    def _is_unverified(self, page: int) -> bool:
        return page in self._nodes and not self._nodes[page].is_verified

    def _node_of_prefix(
        self, tokens: Sequence[int], pages: Sequence[int], count: int
    ) -> _Node | None:
        """Returns the node that ends the first ``count`` pages of ``tokens``, if it is indexed."""
        if count and pages[count - 1] in self._nodes:
            return self._nodes[pages[count - 1]]
        nodes = [self._root, *self._indexed(tokens, range(count))]
        return nodes[count] if len(nodes) > count else None

    def _indexed(self, tokens: Sequence[int], numbers: range) -> Iterator[_Node]:
        """Yields the nodes of the first pages of ``tokens``, as far as they are indexed."""
        node = self._root
        for number in numbers:
            child = node.children.get(self._key(tokens, number))
            if child is None:
                return
            yield (node := child)

    def _touch(self, node: _Node | None) -> None:
        """Makes an indexed page and those before it the most recently used cached pages, the first
        one last: the end of a prefix is evicted before its beginning."""
        while node is not None:
            if node.page in self._cached:
                self._cached.move_to_end(node.page)
            node = node.parent

    def _evict(self) -> int:
        """Takes the least recently used page that no indexed page follows. Those that follow a
        cached page are in use; only if there is no other one, they leave the index with it."""
        oldest = page = next(iter(self._cached))
        while self._nodes[page].children:
            self._touch(self._nodes[page])
            if (page := next(iter(self._cached))) == oldest:
                break
        del self._cached[page]
        self._remove(page)
        return page

    def _remove(self, page: int) -> None:
        """Removes a page from the index, with those after it, which nothing could find any more."""
        node = self._nodes[page]
        assert node.parent is not None
        del node.parent.children[node.tokens]
        lost = [node]
        while lost:
            each = lost.pop()
            del self._nodes[each.page]
            lost += each.children.values()
            if each.page in self._cached:
                del self._cached[each.page]
                self._free.append(each.page)
