"""The query rows of one sequence in shared memory, for the kernel for few query rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.warpgroup import WARPS
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE


@dataclasses.dataclass(frozen=True, eq=False)
class QueryBuffer:
    """A buffer for one sequence's queries, which a producer fills and all consumers read."""

    sources: tuple[Any, Any]
    """Latent queries [B, N, 512] and rope queries [B, N, 64] in global memory."""

    targets: tuple[Any, Any]
    """Latent queries [1, N, 512] and rope queries [1, N, 64] in shared memory."""

    full: Barriers
    """One barrier. Its use i is complete when the partition's i-th sequence has been copied."""

    free: Barriers
    """One barrier. Its use i is complete when all consumers have read the i-th sequence."""

    first_row: Callable[[], Any] = lambda: 0
    """Returns the first of the query rows in the buffer."""

    def initialise(self, consumers: int) -> None:
        self.full.initialise([2])
        self.free.initialise([consumers * WARPS])

    def fetch(self, i: Any, b: Any) -> None:
        """Copies the partition's i-th sequence, which is sequence b, when the buffer is free.

        One warp calls it.
        """

        @when(i > 0)
        def _():
            self.free.wait(0, i - 1)

        for source, target, columns in zip(self.sources, self.targets, (LATENT, ROPE), strict=True):
            window = b, pl.ds(self.first_row(), target.shape[1]), pl.ds(0, columns)
            self.full.copy(0, source, window, target.at[0], None)

    def wait_for_arrivals(self, sequences: Any) -> None:
        """Waits until the last sequence has been read; the program may exit only then."""

        @when(sequences > 0)
        def _():
            self.free.wait(0, sequences - 1)
