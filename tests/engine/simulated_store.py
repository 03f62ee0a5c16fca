"""A store of pages of the simulated device: late, sometimes incomplete, and strict.

An address is the tuple of all tokens that a page depends on, so that the store can check what it is
given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LOAD_SECONDS = 4.0
"""Longest time that a request waits for pages."""

# Seconds that the loads take, one after the other, and how many pages of each are lost.
_DELAYS = (0.0, 1.0, 3.0, 2.0, 9.0)
_LOST = (0, 0, 1, 0, 2, 0, 99)


class SimulatedLoad:
    """Pages that come at a time of the simulation."""

    def __init__(self, contents: list[Any], due: float, clock: Callable[[], float]):
        self._contents = contents
        self._due = due
        self._clock = clock
        self.is_closed = False

    @property
    def contents(self) -> list[Any] | None:
        assert not self.is_closed, "a load is used after its end"
        return self._contents if self._clock() >= self._due else None

    def close(self) -> None:
        assert not self.is_closed, "a load ends twice"
        self.is_closed = True


class SimulatedStore:
    """Pages by their address.

    Args:
      clock: the time of the simulation.
    """

    parts = 1
    page_bytes = 10

    def __init__(
        self,
        page_size: int,
        lookahead: int,
        clock: Callable[[], float],
    ):
        self.identity = 0
        self.pages: dict[Any, Any] = {}
        self.loads: list[SimulatedLoad] = []
        self._page_size, self._lookahead = page_size, lookahead
        self._clock = clock
        self.begin(_DELAYS, _LOST)

    def begin(self, delays: Iterable[float], lost: Iterable[int]) -> None:
        """Sets the seconds and the lost pages of the next loads, one after the other."""
        self.loads.clear()
        self._delays, self._lost = itertools.cycle(delays), itertools.cycle(lost)

    def addresses(self, tokens: Sequence[int], known: Sequence[Any] = ()) -> list[Any]:
        full = (len(tokens) - self._lookahead) // self._page_size
        ends = [(i + 1) * self._page_size + self._lookahead for i in range(full)]
        addresses = [(self.identity, tuple(tokens[:end])) for end in ends]
        if known and known[0][0] == self.identity:
            assert addresses[: len(known)] == known[:full], "known addresses are of other tokens"
        return addresses

    def lookup(self, addresses: Sequence[Any]) -> int:
        return next((i for i, a in enumerate(addresses) if a not in self.pages), len(addresses))

    def load(self, addresses: Sequence[Any]) -> SimulatedLoad:
        contents = [self.pages[address] for address in addresses]
        contents = contents[: max(len(contents) - next(self._lost), 0)]
        self.loads.append(SimulatedLoad(contents, self._clock() + next(self._delays), self._clock))
        return self.loads[-1]

    def save(self, address: Any, identity: Any, contents: list[list[Any]]) -> None:
        """Stores a page of the device whose entries are those of the address's tokens."""
        of, tokens = address
        assert of == identity
        begin = (len(tokens) - self._lookahead) - self._page_size
        entries, mtp_entries, _ = contents
        for offset in range(self._page_size):
            end = begin + offset + 1
            assert entries[offset] == tokens[:end], "a page is saved with wrong entries"
            if self._lookahead:
                assert mtp_entries[offset] == tokens[: end + 1], "a page is saved too early"
        self.pages[address] = contents
