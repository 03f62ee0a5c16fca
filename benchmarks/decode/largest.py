"""The largest batch that fits: found by trying, beginning where the first try's memory points."""

from __future__ import annotations

from collections.abc import Callable

FINENESS = 32  # the search ends when the least batch that fails is at most 1 / 32 larger


def largest_batch(
    peak_bytes: Callable[[int], int | None], first: int, *, fixed: int, limit: int
) -> tuple[int, int]:
    """A batch that fits and a slightly larger one that does not.

    Args:
      peak_bytes: tries a batch; what it took, or None if it did not fit.
      first: the first to try.
      fixed: bytes that every batch takes, the weights.
      limit: bytes there are.

    Raises:
      ValueError: not even one row fits.
    """
    peak = peak_bytes(first)
    while peak is None:
        if first == 1:
            raise ValueError("expected at least one row to fit, got none")
        first //= 2
        peak = peak_bytes(first)
    fits, fails = first, None
    guess = max(fits + 1, int(fits * (limit - fixed) / max(peak - fixed, 1)))
    while True:
        if peak_bytes(guess) is None:
            fails = guess
        else:
            fits = guess
        if fails is None:
            guess = fits + max(1, fits // FINENESS)
        elif fails - fits <= max(1, fits // FINENESS):
            return fits, fails
        else:
            # From above, in small steps: the first guess is near.
            guess = max((fits + fails) // 2, fails - max(1, fails // FINENESS))
