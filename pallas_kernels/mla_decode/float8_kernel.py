"""The Hopper split-KV kernel of mla_decode for a float8 cache and an odd number of tiles.

With an even number, :mod:`float8_pairs_kernel` is faster. It would have to add a tile of padding to
an odd one, as with 64 heads.

A program processes one tile of 64 query rows (of a sequence's T * H) over one partition of the
schedule, one key block of 64 cached tokens after the other. Its three warpgroups are specialised
and synchronise only through barriers:

* The producer fills the two slots of shared memory. It loads a block's float8 latents into
  registers while the previous block is in use. When a slot is released it multiplies them by their
  scales and stores them as bfloat16. Rope keys are copied unchanged.
* Two consumer warpgroups compute. Each computes the scores S = Q K^T of every other key block, and
  overwrites the block's rope keys, which are no longer needed, with P = exp(S - maximum). Both
  accumulate P V, each for 256 of the 512 output columns, in registers. The running maximum is
  passed from one to the other. The tensor cores compute half of a block's scores, then this
  warpgroup's share of P V of the previous block, which releases its slot, then the other half.

The producer fills half a block at a time, the columns of one consumer's output. Scores are scaled
to base 2. The schedule, the results and the merge are the same as in :mod:`kernel`.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.mla_decode.epilogue import TileResults
from pallas_kernels.mla_decode.float8_consumer import attend_to_blocks
from pallas_kernels.mla_decode.float8_producer import fill_slots
from pallas_kernels.mla_decode.float8_signals import Signals
from pallas_kernels.mla_decode.kernel_parts import TILE, results
from pallas_kernels.mla_decode.schedule import Schedule
from pallas_kernels.mla_decode.tile_memory import TileMemory
from pallas_kernels.mla_decode.work import Work

_COMPUTE_REGISTERS, _FILL_REGISTERS = 192, 120  # per thread: 2 * compute + fill <= 504
_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@lowered_once("queries", "heads", "scale", "interpret")
def attend(
    q_latent: BFloat16[Array, "B M C"],
    q_rope: BFloat16[Array, "B M R"],
    pages: UInt8[Array, "P page 656"],
    block_tables: Int[Array, "B max_pages"],
    schedule: Schedule,
    *,
    queries: int,
    heads: int,
    scale: float,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Partials]:
    """Attention of M = T * H query rows, padded to whole tiles if M > 64. Row m is query m // H.

    Returns:
      ``out`` and ``lse``, written for sequences that are not split, and the partial results and
      their log-sum-exps of the sequences that are.
    """
    B, M, _ = q_latent.shape
    rows = min(TILE, M)
    tiles = -(-M // TILE)
    partitions = schedule.partitions
    buffers = TileMemory.scratch()

    def mla_decode_float8(ql_g, qr_g, kv_g, tables_g, schedule_g, *refs):
        results_g, scratch = refs[:4], refs[4:]
        memory = TileMemory(*scratch[: len(buffers)])
        signals = Signals(*scratch[len(buffers) :], interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        m0 = lax.axis_index("tile") * TILE
        work = Work(schedule_g, tables_g, partitions, partition, pages.shape[0])
        first_sequence, last_sequence = schedule_g[partition, 0], schedule_g[partition, 1]
        sequence_count = last_sequence - first_sequence + 1
        outputs = TileResults(
            *results_g,
            lse_staging=memory.lse,
            first_row=lambda: m0,
            rows=rows,
            rows_per_copy=rows,
            interpret=interpret,
        )

        bounds = first_sequence, last_sequence, sequence_count

        def consumer_warpgroup(own):
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            attend_to_blocks(
                own, memory, signals, work, lambda: bounds, outputs,
                queries=queries, heads=heads, scale=scale,
            )  # fmt: skip

        @when(wg == 2)
        def _produce():
            plgpu.set_max_registers(_FILL_REGISTERS, action="decrease")
            fill_slots((ql_g, qr_g, kv_g), memory, signals, work, m0, rows, bounds)

        for own in range(2):  # separate code for each, so that addresses are constants
            when(wg == own)(functools.partial(consumer_warpgroup, own))

    out, lse, *partials = plgpu.kernel(
        mla_decode_float8,
        out_type=results(B, M, partitions),
        scratch_types=[
            *buffers,
            *Signals.scratch(),
        ],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid=(partitions, tiles),
        grid_names=("partition", "tile"),
        cluster=(1,),  # of one program: cluster barriers let one thread arrive for a warpgroup
        cluster_names=("one",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
