"""The largest batch that fits: where the compiler's own sum points, and from there by running."""

from __future__ import annotations

from collections.abc import Callable

FINENESS = 32  # of a batch's rows, in steps of which the search goes


def largest_batch(
    planned_bytes: Callable[[int], int],
    runs: Callable[[int], bool],
    first: int,
    *,
    fixed: int,
    limit: int,
) -> tuple[int, int]:
    """A batch that runs and a slightly larger one that does not.

    Args:
      planned_bytes: what a batch takes according to its compiled program.
      runs: whether a batch fits, by running it.
      first: a batch near it.
      fixed: bytes that every batch takes, the weights.
      limit: bytes there are.

    Raises:
      ValueError: not even one row fits.
    """
    a_row = max(1, planned_bytes(first) - fixed) / first
    rows = max(1, int((limit - fixed) / a_row))
    if runs(rows):
        while runs(more := rows + max(1, rows // FINENESS)):
            rows = more
        return rows, more
    while rows > 1:
        fails, rows = rows, rows - max(1, rows // FINENESS)
        if runs(rows):
            return rows, fails
    raise ValueError("expected at least one row to fit, got none")
