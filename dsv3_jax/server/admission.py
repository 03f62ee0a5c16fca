"""Admission: how many completions may run or wait at a time."""

from __future__ import annotations

from dsv3_jax.server.errors import ApiError, overloaded


class Admission:
    """Counts open completions. Only the event loop's thread uses it.

    Args:
      limit: most that are open at a time.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.open = 0
        """Completions that run or wait."""

    def enter(self, count: int) -> None:
        """Opens completions: all, or none if it raises.

        Raises:
          ApiError: there are too many.
        """
        if count > self._limit:
            raise ApiError(
                400, f"request: expected at most {self._limit} completions, got {count}", param="n"
            )
        if self.open + count > self._limit:
            raise overloaded(
                f"queue: expected at most {self._limit} completions running and waiting, got"
                f" {self.open} and {count} more; try again later"
            )
        self.open += count

    def leave(self, count: int) -> None:
        """Closes completions."""
        self.open -= count
        assert self.open >= 0, "more completions were closed than opened"
