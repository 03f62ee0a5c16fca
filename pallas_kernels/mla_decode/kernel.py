"""The Hopper split-KV kernel of mla_decode for a bfloat16 cache and tiles of 64 query rows.

A program processes one tile of 64 query rows (of a sequence's T * H) over one partition of the
schedule, one key block of 64 cached tokens after the other. Its four warpgroups are specialised and
synchronise only through barriers:

* Two score warpgroups process the even and the odd key blocks. Each copies its blocks by TMA into
  its own slot of shared memory, computes S = Q K^T, and overwrites the block's rope keys, which are
  no longer needed, with P = exp(S - maximum). The running maximum is passed from one to the other.
* Two value warpgroups each accumulate P V for 256 of the 512 output columns, in registers.

So the softmax of one key block overlaps with the matmuls of its neighbours, and one block is copied
while the other is in use. Two programs whose query tiles belong to the same sequence form a
cluster: each copies half of a key block for both (TMA multicast), which halves the traffic from the
L2 cache. Scores are scaled to base 2.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.mla_decode.epilogue import TileResults
from pallas_kernels.mla_decode.kernel_parts import TILE, results
from pallas_kernels.mla_decode.plan import Config, Plan
from pallas_kernels.mla_decode.schedule import Schedule
from pallas_kernels.mla_decode.score_warpgroup import score_blocks
from pallas_kernels.mla_decode.signals import Signals
from pallas_kernels.mla_decode.tile_memory import TileMemory
from pallas_kernels.mla_decode.value_warpgroup import add_values
from pallas_kernels.mla_decode.work import Work

# Registers per thread. Four warpgroups have 128 each on average: the score warpgroups release what
# the value warpgroups acquire.
_VALUE_REGISTERS, _SCORE_REGISTERS = 160, 96


_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@lowered_once("queries", "heads", "scale", "config", "interpret")
def attend(
    q_latent: BFloat16[Array, "B M C"],
    q_rope: BFloat16[Array, "B M R"],
    pages: BFloat16[Array, "P page C+R"],
    block_tables: Int[Array, "B max_pages"],
    schedule: Schedule,
    *,
    queries: int,
    heads: int,
    scale: float,
    config: Config,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Partials]:
    """Attention of M = T * H query rows, padded to whole tiles if M > 64. Row m is query m // H.

    Returns:
      ``out`` and ``lse``, written for sequences that are not split, and the partial results and
      their log-sum-exps of the sequences that are.
    """
    B, M, _ = q_latent.shape
    partitions = schedule.partitions
    plan = Plan(config, M, queries, heads, scale, block_tables.shape[1], interpret)
    pair = plan.pair
    buffers = TileMemory.scratch()

    def mla_decode(ql_g, qr_g, kv_g, tables_g, schedule_g, *refs):
        results_g, scratch = refs[:4], refs[4:]
        memory = TileMemory(*scratch[: len(buffers)])
        signals = Signals.of(scratch[len(buffers) :], interpret)
        signals.initialise()
        overlap_preceding_kernel(config.early, interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        work = Work(schedule_g, tables_g, partitions, partition, pages.shape[0])

        def m0():
            """Returns the tile's first query row, recomputed at each use to save a register."""
            return (lax.axis_index("tile") * pair + lax.axis_index("pair")) * TILE

        outputs = TileResults(
            *results_g,
            lse_staging=memory.lse,
            first_row=m0,
            rows=plan.rows,
            rows_per_copy=8,
            interpret=interpret,
        )

        @when(wg >= 2)
        def _score():
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
            sources = ql_g, qr_g, kv_g
            score_blocks(plan, wg, sources, memory, signals, work, m0)

        @when(wg < 2)
        def _add():
            plgpu.set_max_registers(_VALUE_REGISTERS, action="increase")
            add_values(plan, wg, memory, signals, work, outputs)

    out, lse, *partials = plgpu.kernel(
        mla_decode,
        out_type=results(B, M, partitions),
        scratch_types=[
            *buffers,
            *Signals.scratch(interpret),
        ],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid=(partitions, plan.tiles // pair),
        grid_names=("partition", "tile"),
        cluster=(pair,),
        cluster_names=("pair",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
