"""The end of a sequence in the kernels for tiles of 64 query rows: merges sums, stores results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.math import LOG2E
from pallas_kernels.hopper.tiles import ROW, ROWS


def load_sums(maxima: Any, sums: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Loads the maxima and sums of exponentials of the two warpgroups that compute scores.

    Args:
      maxima, sums: [2, ROWS] in shared memory.
    """
    loaded = [[plgpu.layout_cast(ref[k], ROW) for k in range(2)] for ref in (maxima, sums)]
    return loaded[0], loaded[1]


def merge_sums(
    maxima: Sequence[jax.Array], sums: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum in base 2, and the sum of exponentials relative to it."""
    maximum = jnp.maximum(*maxima)
    return maximum, sums[0] * jnp.exp2(maxima[0] - maximum) + sums[1] * jnp.exp2(
        maxima[1] - maximum
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns of the output that a warpgroup has in registers."""

    columns: slice
    """Columns of the warpgroup's accumulator."""

    out_columns: Any
    """The same columns of the output, a ``pl.ds``."""

    staging: Callable[[Any], Any] | None
    """Returns a window of rows of the part's buffer in shared memory, bfloat16 [ROWS, columns]. If
    None, registers are stored to global memory directly."""


@dataclasses.dataclass(frozen=True, eq=False)
class TileResults:
    """A tile's outputs in global memory, see :func:`kernel_parts.results`."""

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any

    lse_staging: Any
    """float32 [ROWS] in shared memory."""

    first_row: Callable[[], Any]
    """Returns the tile's first query row."""

    rows: int
    """Number of query rows in ``out``, at most ROWS."""

    rows_per_copy: int
    """Rows of a staging buffer that are contiguous in shared memory."""

    interpret: Any

    def stage_lse(self, maximum: jax.Array, total: jax.Array) -> None:
        """Prepares the log-sum-exp for both kinds of store. One warpgroup calls it."""
        lse = (maximum + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
        self.lse_staging[...] = jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))
        plgpu.commit_smem()

    def store(self, b: Any, acc: jax.Array, parts: Sequence[Part], has_lse: Any) -> None:
        """Stores a sequence's normalised output, and in one warpgroup its log-sum-exp."""
        for part in parts:
            values = acc[:, part.columns].astype(jnp.bfloat16)
            if part.staging is None:
                target = self.out.at[b, pl.ds(self.first_row(), ROWS), part.out_columns]
                _store_sectors(target, values, self.interpret)
            else:
                part.staging(slice(None))[...] = values
        staged = [part for part in parts if part.staging is not None]
        if staged:
            plgpu.commit_smem()
        for part in staged:
            assert part.staging is not None
            for m in range(0, self.rows, self.rows_per_copy):
                count = self.rows_per_copy
                rows = pl.ds(self.first_row() + m, count)
                target = self.out.at[b, rows, part.out_columns]
                plgpu.copy_smem_to_gmem(part.staging(pl.ds(m, count)), target)

        @when(has_lse)
        def _():
            target = self.lse.at[b, pl.ds(self.first_row(), self.rows)]
            plgpu.copy_smem_to_gmem(self.lse_staging.at[pl.ds(0, self.rows)], target)

    def store_partial(
        self, partial: Any, acc: jax.Array, parts: Sequence[Part], has_lse: Any
    ) -> None:
        """Stores a partial result of a sequence that is split."""
        for part in parts:
            rows = pl.ds(self.first_row(), ROWS)
            self.partial_out[partial, rows, part.out_columns] = acc[:, part.columns]

        @when(has_lse)
        def _():
            target = self.partial_lse.at[partial, pl.ds(self.first_row(), ROWS)]
            plgpu.copy_smem_to_gmem(self.lse_staging, target)


def _store_sectors(ref: Any, value: jax.Array, interpret: Any) -> None:
    """Stores to global memory in pieces of less than a 32-byte sector.

    jax 0.12 refuses such stores unless they are requested.
    """
    if interpret is None and hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value
