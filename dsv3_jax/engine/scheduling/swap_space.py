"""Host memory for preempted requests, as the scheduler sees it: which are there, and their size.

A request that is swapped out keeps everything it has computed: its pages and its slot are copied to
host memory, and later to other pages and another slot. Nothing is recomputed, so that its further
tokens are those of an uninterrupted run, to the last bit.

Host memory is bounded, and it never runs full while a request has to be preempted: new requests are
admitted only while there is room for that, see :meth:`SwapSpace.has_room`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest, SwapIn, SwapOut


class SwapSpace:
    """Counts the pages of swapped requests.

    Args:
      num_pages: pages that fit into the host memory. None: there is no such memory, and preempted
        requests are prefilled again.
    """

    def __init__(self, num_pages: int | None = None):
        self.exists = num_pages is not None
        self.num_pages = num_pages or 0
        self._counts: dict[ScheduledRequest, int] = {}
        self._outs: list[SwapOut] = []
        self._ins: list[SwapIn] = []

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request in self._counts

    @property
    def requests(self) -> list[ScheduledRequest]:
        """The requests in host memory."""
        return list(self._counts)

    @property
    def used(self) -> int:
        """Number of pages in host memory."""
        return sum(self._counts.values())

    def has_room(self, device_pages: int, longest: Sequence[int]) -> bool:
        """Returns whether these requests can run together without filling the host memory.

        Let D and H be the pages of the device and the host, and M the largest request. If the
        requests together need at most D + H - M pages at their greatest lengths, then whenever the
        device is full and some request lacks a page, the requests in host memory use less than H -
        M pages. Any other request then fits as a whole.

        Args:
          longest: pages that each request needs at its greatest length.
        """
        most = max(longest, default=0)
        return len(longest) <= 1 or sum(longest) <= device_pages + self.num_pages - most

    def put(self, request: ScheduledRequest, slot: int, pages: Sequence[int]) -> None:
        """Plans to copy a request to host memory before anything else is written to its pages."""
        self._counts[request] = len(pages)
        assert self.used <= self.num_pages, "has_room() admits no more requests than fit"
        self._outs.append(SwapOut(request, slot, tuple(pages)))

    def take(self, request: ScheduledRequest, slot: int, pages: Sequence[int], shared: int) -> None:
        """Plans to copy a request back to ``pages``. The first ``shared`` pages have the right
        contents already."""
        count = self._counts.pop(request)
        self._ins.append(SwapIn(request, slot, tuple(pages[:count]), min(shared, count)))

    def drop(self, request: ScheduledRequest) -> None:
        """Removes a request that has ended, if it is here."""
        if self._counts.pop(request, None) is not None:
            self._outs = [swap for swap in self._outs if swap.request is not request]

    def planned(self) -> tuple[list[SwapOut], list[SwapIn]]:
        """Returns the copies that no plan has included yet."""
        planned = self._outs, self._ins
        self._outs, self._ins = [], []
        return planned

    def check_integrity(self, waiting: Iterable[ScheduledRequest]) -> None:
        """Raises AssertionError if a request is here that does not wait, or there are too many."""
        assert set(self._counts) <= set(waiting), "a request in host memory does not wait"
        assert self.used <= self.num_pages, "more pages in host memory than fit"
        assert {swap.request for swap in self._outs} <= set(self._counts)
        assert not self._ins, "a request comes back without a plan"
