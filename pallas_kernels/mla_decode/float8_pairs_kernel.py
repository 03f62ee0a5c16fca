"""The Hopper kernel of mla_decode for a float8 cache in which two programs unpack together.

It is :mod:`float8_kernel`, but the two programs whose tiles of 64 query rows belong to the same
sequence form a cluster. They need the same key blocks. Each unpacks half of the latents' columns
and stores them in both programs' shared memory, so that each does half of the work
(:mod:`float8_pairs_producer`). Rope keys are copied by TMA. A consumer scores the half that its own
program has unpacked first, while the other one is on its way.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.mla_decode.epilogue import TileResults
from pallas_kernels.mla_decode.float8_consumer import attend_to_blocks
from pallas_kernels.mla_decode.float8_pairs_plan import Float8Pairs
from pallas_kernels.mla_decode.float8_pairs_producer import fill_slots
from pallas_kernels.mla_decode.float8_pairs_signals import PairSignals
from pallas_kernels.mla_decode.kernel_parts import TILE, results
from pallas_kernels.mla_decode.schedule import Schedule
from pallas_kernels.mla_decode.tile_memory import TileMemory
from pallas_kernels.mla_decode.work import Work

# Registers per thread of consumers and producer: 2 * consumer + producer <= 504.
_REGISTERS = 216, 72
_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@lowered_once("queries", "heads", "scale", "config", "interpret")
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
    config: Float8Pairs,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Partials]:
    """Attention of M query rows, padded to whole pairs of tiles. Row m is query m // H.

    Returns:
      ``out`` and ``lse``, written for sequences that are not split, and the partial results and
      their log-sum-exps of the sequences that are.
    """
    B, M, _ = q_latent.shape
    partitions, buffers = schedule.partitions, TileMemory.scratch()

    def mla_decode_float8_pairs(ql_g, qr_g, kv_g, tables_g, schedule_g, *refs):
        results_g, scratch = refs[:4], refs[4:]
        memory, program = TileMemory(*scratch[: len(buffers)]), lax.axis_index("pair")
        signals = PairSignals.of(scratch[len(buffers) :], program, interpret)
        signals.initialise()
        overlap_preceding_kernel(config.early, interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        work = Work(schedule_g, tables_g, partitions, partition, pages.shape[0])

        def m0():
            return (lax.axis_index("tile") * 2 + lax.axis_index("pair")) * TILE

        outputs = TileResults(
            *results_g,
            lse_staging=memory.lse,
            first_row=m0,
            rows=TILE,
            rows_per_copy=TILE,
            interpret=interpret,
        )

        def consumer_warpgroup(own):
            plgpu.set_max_registers(_REGISTERS[0], action="increase")

            def bounds():  # read again for each sequence, which takes fewer registers
                first_sequence, last_sequence = (schedule_g[partition, k] for k in range(2))
                return first_sequence, last_sequence, last_sequence - first_sequence + 1

            # Not staged in the last block: the other program may still be sent its copy.
            attend_to_blocks(
                own, memory, signals, work, bounds, outputs,
                queries=queries, heads=heads, scale=scale,
                staged=False, few_registers=True, first_half=program,
            )  # fmt: skip

        @when(wg == 2)
        def _produce():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            fill_slots((ql_g, qr_g, kv_g), memory, signals, work, m0())

        for own in range(2):  # separate code for each, so that addresses are constants
            when(wg == own)(functools.partial(consumer_warpgroup, own))

    out, lse, *partials = plgpu.kernel(
        mla_decode_float8_pairs,
        out_type=results(B, M, partitions),
        scratch_types=[*buffers, *PairSignals.scratch(interpret)],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid=(partitions, M // TILE // 2),
        grid_names=("partition", "tile"),
        cluster=(2,),
        cluster_names=("pair",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
