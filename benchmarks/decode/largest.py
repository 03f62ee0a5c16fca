"""Finds the largest batch that fits: begins with the compiler's estimate, then tries to run."""

from __future__ import annotations

from collections.abc import Callable

FRACTION = 32  # the search changes the batch size by 1/32 at a time


def largest_batch(
    planned_bytes: Callable[[int], int],
    runs: Callable[[int], bool],
    first: int,
    *,
    fixed: int,
    limit: int,
) -> tuple[int, int]:
    """Returns a batch size that runs, and a slightly larger one that does not.

    Args:
      planned_bytes: returns the peak memory of a batch size according to its compiled program.
      runs: tries to run a batch size, and returns whether it fits.
      first: initial guess.
      fixed: bytes that do not depend on the batch size, such as weights.
      limit: available bytes.

    Raises:
      ValueError: not even one sequence fits.
    """
    bytes_per_sequence = max(1, planned_bytes(first) - fixed) / first
    rows = max(1, int((limit - fixed) / bytes_per_sequence))
    if runs(rows):
        while runs(more := rows + max(1, rows // FRACTION)):
            rows = more
        return rows, more
    while rows > 1:
        fails, rows = rows, rows - max(1, rows // FRACTION)
        if runs(rows):
            return rows, fails
    raise ValueError("expected at least one sequence to fit, got none")
