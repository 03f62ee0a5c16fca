"""Allocation of pages, and which contents are found again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator

# Python hashes an integer modulo this prime, so these two tokens have equal hashes.
PRIME = 2**61 - 1
TOKEN, COLLIDING = 5, 5 + PRIME


def filled(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    """Pages for these tokens, published."""
    pages = allocator.allocate(allocator.pages_for(len(tokens)))
    assert pages is not None
    allocator.publish(tokens, pages)
    return pages


def test_pages_are_handed_out_once():
    allocator = PageAllocator(5, 4, first_page=3)
    assert sorted([*allocator.allocate(2), *allocator.allocate(3)]) == [3, 4, 5, 6, 7]
    assert allocator.allocate(1) is None
    assert (allocator.used, allocator.available) == (5, 0)


def test_a_refused_allocation_takes_nothing():
    allocator = PageAllocator(5, 4)
    allocator.allocate(3)
    assert allocator.allocate(3) is None
    assert allocator.available == 2


def test_a_page_that_is_not_in_use_cannot_be_released():
    allocator = PageAllocator(2, 4)
    page = allocator.allocate(1)
    allocator.release(page)
    with pytest.raises(ValueError, match=f"in use, got {page[0]}"):
        allocator.release(page)
    with pytest.raises(ValueError, match="in use, got 9"):
        allocator.release([9])


def test_full_pages_are_found():
    allocator = PageAllocator(10, 4)
    tokens = list(range(11))
    pages = filled(allocator, tokens)
    assert allocator.cached_prefix(tokens) == pages[:2]
    assert allocator.cached_prefix([*tokens[:8], 99]) == pages[:2]
    assert allocator.cached_prefix([*tokens[:7], 99, 100]) == pages[:1]
    assert allocator.cached_prefix([99, *tokens[1:]]) == []


def test_one_token_stays_uncovered():
    allocator = PageAllocator(10, 4)
    pages = filled(allocator, list(range(8)))
    assert allocator.cached_prefix(list(range(8))) == pages[:1]
    assert allocator.cached_prefix([0]) == allocator.cached_prefix([]) == []


def test_equal_tokens_after_another_prefix_are_not_found():
    allocator = PageAllocator(10, 4)
    pages = filled(allocator, [*[1] * 4, *[2] * 4])
    assert allocator.cached_prefix([*[3] * 4, *[2] * 4, 0]) == []
    assert allocator.cached_prefix([*[1] * 4, *[2] * 4, 0]) == pages


def test_colliding_hashes_are_told_apart():
    assert hash((0, (TOKEN,) * 4)) == hash((0, (COLLIDING,) * 4))
    allocator = PageAllocator(10, 4)
    pages = filled(allocator, [TOKEN] * 8)
    assert allocator.cached_prefix([COLLIDING] * 9) == []
    others = filled(allocator, [COLLIDING] * 8)
    assert allocator.cached_prefix([COLLIDING] * 9) == others
    assert allocator.cached_prefix([TOKEN] * 9) == pages


def test_a_page_with_lookahead_depends_on_the_next_token():
    allocator = PageAllocator(10, 4, lookahead=1)
    pages = filled(allocator, [1, 1, 1, 1, 2, 2, 2, 2])
    # Nobody knows the token after the second page.
    assert allocator.cached_prefix([1, 1, 1, 1, 2, 2, 2, 2, 2]) == pages[:1]
    assert allocator.cached_prefix([1, 1, 1, 1, 3, 3]) == []


def test_released_pages_are_reused_until_they_are_evicted():
    allocator = PageAllocator(4, 4)
    tokens = list(range(9))
    pages = filled(allocator, tokens)
    allocator.release(pages)
    assert (allocator.used, allocator.available) == (0, 4)
    hit = allocator.cached_prefix(tokens)
    assert hit == pages[:2]
    allocator.reuse(hit)
    assert allocator.used == 2
    allocator.check_integrity([hit])
    assert allocator.allocate(3) is None  # pages in use are never evicted
    allocator.release(hit)
    assert len(allocator.allocate(4)) == 4
    assert allocator.cached_prefix(tokens) == []


def test_the_least_recently_used_end_is_evicted_first():
    allocator = PageAllocator(4, 2)
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    for tokens in (old, new):
        pages = allocator.allocate(2)
        allocator.publish(tokens, pages)
        allocator.release(pages)
    allocator.allocate(1)
    assert [len(allocator.cached_prefix(tokens)) for tokens in (old, new)] == [1, 2]
    allocator.allocate(1)
    assert [len(allocator.cached_prefix(tokens)) for tokens in (old, new)] == [0, 2]


def test_a_prefix_in_use_counts_as_recently_used():
    allocator = PageAllocator(4, 2)
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    for tokens in (old, new):
        pages = allocator.allocate(2)
        allocator.publish(tokens, pages)
        allocator.release(pages)
    hit = allocator.cached_prefix(old)
    allocator.reuse(hit)
    allocator.release(hit)
    allocator.allocate(2)
    assert [len(allocator.cached_prefix(tokens)) for tokens in (old, new)] == [2, 0]


def test_equal_contents_are_indexed_once():
    allocator = PageAllocator(10, 2)
    first = filled(allocator, [1, 2, 3, 4])
    second = filled(allocator, [1, 2, 3, 4, 5, 6])
    assert allocator.cached_prefix([1, 2, 3, 4, 5, 6, 7]) == [*first, second[2]]
    allocator.release(second)
    allocator.check_integrity([first])
    assert allocator.available == 8


def test_pages_are_published_as_they_fill():
    allocator = PageAllocator(10, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    pages = allocator.allocate(4)
    published = 0
    for length in range(len(tokens) + 1):
        published = allocator.publish(tokens[:length], pages, published)
        assert published == length // 2
    assert allocator.cached_prefix(tokens) == pages[:3]


def test_publication_goes_on_after_an_equal_prefix_of_another_request():
    allocator = PageAllocator(10, 2)
    first = filled(allocator, [1, 2])
    pages = allocator.allocate(2)
    published = allocator.publish([1, 2], pages)
    allocator.publish([1, 2, 3, 4], pages, published)
    assert allocator.cached_prefix([1, 2, 3, 4, 5]) == [first[0], pages[1]]


def test_pages_after_an_evicted_prefix_are_not_published():
    allocator = PageAllocator(3, 2)
    first = filled(allocator, [1, 2])
    pages = allocator.allocate(2)
    published = allocator.publish([1, 2], pages)  # this request's copy stays private
    allocator.release(first)
    allocator.allocate(1)  # evicts the first request's page
    assert allocator.publish([1, 2, 3, 4], pages, published) == 2
    assert allocator.cached_prefix([1, 2, 3, 4, 5]) == []


def test_pages_of_another_request_are_evicted_after_those_that_follow_them():
    """Two requests begin alike at the same time. The one whose pages are indexed ends first."""
    allocator = PageAllocator(9, 2)
    first = filled(allocator, [1, 2, 3, 4])
    second = filled(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    allocator.release(first)
    third = filled(allocator, [9, 9, 8, 8])
    allocator.release(second)
    allocator.release(third)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 0]
    taken: list[int] = []
    left: list[int] = []
    while not left or left[-1]:
        taken += allocator.allocate(1) or []
        allocator.check_integrity([taken])
        left.append(len(allocator.cached_prefix(tokens)))
    assert left == [4, 4, 4, 3, 2, 1, 0]  # three were free
    assert allocator.cached_prefix([9, 9, 8, 8, 0]) == third


def test_pages_that_running_requests_follow_are_evicted_last():
    allocator = PageAllocator(6, 2)
    first = filled(allocator, [1, 2, 3, 4])
    second = filled(allocator, [1, 2, 3, 4, 5, 6])
    allocator.release(first)
    allocator.release(filled(allocator, [7, 8]))
    hit = [*first, second[2]]
    (other,) = allocator.allocate(1)  # though the page of 7 and 8 was used later
    assert allocator.cached_prefix([1, 2, 3, 4, 5, 6, 0]) == hit
    (end,) = allocator.allocate(1)
    assert end == first[1]
    # Nothing can find the page after it any more.
    assert allocator.cached_prefix([1, 2, 3, 4, 5, 6, 0]) == first[:1]
    assert not allocator.is_indexed(second[2])
    allocator.check_integrity([second, [other], [end]])
    allocator.release(second)
    allocator.check_integrity([[other], [end]])
    assert allocator.cached_prefix([1, 2, 0]) == first[:1]


class RandomPrefixes(RuleBasedStateMachine):
    """No page is in the index without those before it, and ends are evicted before beginnings."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12, 1)
        self.running: list[tuple[list[int], list[int], int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6), share=st.booleans())
    def begin(self, tokens, share):
        """With the pages that are there, or with its own, as if both had begun together."""
        hit = self.allocator.cached_prefix(tokens) if share else []
        self.allocator.reuse(hit)
        pages = self.allocator.allocate(len(tokens) - len(hit))
        if pages is None:
            self.allocator.release(hit)
        else:
            self.running.append((tokens, [*hit, *pages], len(hit)))

    @rule(number=st.integers(0, 20), count=st.integers(1, 6))
    def publish(self, number, count):
        if self.running:
            tokens, pages, start = self.running.pop(number % len(self.running))
            start = self.allocator.publish(tokens[: start + count], pages, start)
            self.running.append((tokens, pages, start))

    @rule(number=st.integers(0, 20), count=st.integers(0, 6), is_finite=st.booleans())
    def know(self, number, count, is_finite):
        """Whether logits that depend on the first pages of a request are finite."""
        if self.running:
            _, pages, _ = self.running[number % len(self.running)]
            if is_finite:
                self.allocator.verify(pages[:count])
            else:
                self.allocator.retract(pages)

    @rule(number=st.integers(0, 20))
    def end(self, number):
        if self.running:
            self.allocator.release(self.running.pop(number % len(self.running))[1])

    @invariant()
    def it_is_whole(self):
        self.allocator.check_integrity([pages for _, pages, _ in self.running])


TestRandomPrefixes = RandomPrefixes.TestCase
TestRandomPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_unverified_pages_leave_the_index_with_those_after_them():
    allocator = PageAllocator(10, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    pages = filled(allocator, tokens)
    assert allocator.verify(pages[:1]) == pages[:1]
    assert allocator.verify(pages[:1]) == [], "each page is verified once"
    hit = allocator.cached_prefix(tokens)
    allocator.reuse(hit)
    own = allocator.allocate(1)
    allocator.publish([*tokens, 8], [*hit, *own], 3)
    assert len(allocator.cached_prefix([*tokens, 8, 9])) == 4
    allocator.retract(pages)
    assert allocator.cached_prefix([*tokens, 8, 9]) == pages[:1]
    allocator.check_integrity([pages, [*hit, *own]])
    assert allocator.publish([*tokens, 8], [*hit, *own], 3) == 4
    assert not allocator.is_indexed(own[0]), "nothing could find it"
    allocator.release(pages)
    allocator.release([*hit, *own])
    allocator.check_integrity([])
    again = filled(allocator, tokens)
    assert allocator.cached_prefix(tokens) == [pages[0], *again[1:3]]
    assert allocator.verify(again) == again[1:3]
    allocator.retract(again)
    assert len(allocator.cached_prefix(tokens)) == 3, "finite logits were computed from them"


def test_a_new_parent_does_not_adopt_pages_of_an_evicted_one():
    allocator = PageAllocator(3, 1)
    first = allocator.allocate(2)
    allocator.publish([1, 2], first)
    allocator.reuse(first[1:])  # keeps the second page alive
    allocator.release(first)
    allocator.allocate(2)  # takes the free page and evicts the first page
    allocator.check_integrity([[first[1]], sorted({0, 1, 2} - {first[1]})])
    assert allocator.cached_prefix([1, 2, 3]) == []


def test_without_a_prefix_cache_pages_are_free_at_once():
    allocator = PageAllocator(4, 2, prefix_cache=False)
    pages = filled(allocator, [1, 2, 3, 4])
    assert allocator.cached_prefix([1, 2, 3, 4, 5]) == []
    allocator.release(pages)
    allocator.check_integrity([])


def test_clear_forgets_contents_and_keeps_owners():
    allocator = PageAllocator(4, 2)
    owned, released = filled(allocator, [1, 2]), filled(allocator, [3, 4])
    allocator.release(released)
    allocator.clear()
    assert allocator.cached_prefix([1, 2, 0]) == allocator.cached_prefix([3, 4, 0]) == []
    allocator.check_integrity([owned])
    allocator.release(owned)
    assert allocator.available == 4


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected 1 or more, got 0"):
        PageAllocator(**{"num_pages": 1, "page_size": 1, name: 0})
