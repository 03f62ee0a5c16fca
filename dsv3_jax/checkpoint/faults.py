"""Positions of bad elements in a tensor."""

from __future__ import annotations

import numpy as np


class Faults:
    """Bad elements of one kind in a tensor: their number and the position of the first."""

    def __init__(self, kind: str):
        self.kind = kind
        """Description for messages, such as ``"NaN or infinity"``."""
        self.count = 0
        """Number of bad elements so far."""
        self._first: list[int] = []

    def add(self, is_bad: np.ndarray, first_row: int) -> None:
        """Adds the bad elements of consecutive rows, given as a mask that begins at a row."""
        if not self.count:
            row, *others = (int(i) for i in np.unravel_index(is_bad.argmax(), is_bad.shape))
            self._first = [first_row + row, *others]
        self.count += int(is_bad.sum())

    def __str__(self) -> str:
        more = f" and {self.count - 1:,} more" if self.count > 1 else ""
        return f"{self.kind} at {self._first}{more}"
