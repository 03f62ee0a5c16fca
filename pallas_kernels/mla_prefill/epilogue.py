"""The end of a tile in the Hopper mla_prefill kernel: normalises and stores its results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.math import LOG2E
from pallas_kernels.hopper.tiles import ROWS, spread_rows
from pallas_kernels.mla_prefill.plan import COLUMNS


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The outputs in global memory, and a consumer's buffers for them in shared memory."""

    out: Any
    lse: Any
    out_staging: Any
    """bfloat16 [warpgroups, ROWS, COLUMNS]."""
    lse_staging: Any
    """float32 [warpgroups, ROWS]."""

    def store(
        self, wg: Any, b: Any, h: Any, t0: Any, acc: jax.Array, maximum: jax.Array, total: jax.Array
    ) -> None:
        """Stores the rows of consumer ``wg`` in the tile that begins at query t0."""
        rows = pl.ds(t0 + wg * ROWS, ROWS)
        visible = total > 0.0
        lse = maximum * (1.0 / LOG2E) + jnp.log(total)
        acc = acc * spread_rows(jnp.where(visible, 1.0 / total, 0.0), acc.shape[1])
        for c in range(acc.shape[1] // COLUMNS):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns = slice(c * COLUMNS, (c + 1) * COLUMNS)
            self.out_staging[wg] = acc[:, columns].astype(jnp.bfloat16)
            if c == 0:
                self.lse_staging[wg] = jnp.where(visible, lse, -jnp.inf)
            plgpu.commit_smem()
            if c == 0:
                plgpu.copy_smem_to_gmem(self.lse_staging.at[wg], self.lse.at[b, h, rows])
            columns = pl.ds(c * COLUMNS, COLUMNS)
            plgpu.copy_smem_to_gmem(self.out_staging.at[wg], self.out.at[b, rows, h, columns])
