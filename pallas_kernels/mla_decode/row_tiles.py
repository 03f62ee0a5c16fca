"""Shared parts of the kernels for tiles of 64 query rows: memory, mask, results, consumers.

A CTA computes 64 query rows, the M of a wgmma instruction, in blocks of 64 keys. Shared memory has
the queries (72 KB) and two slots for key blocks (72 KB each). A block's rope keys are overwritten
with its P. :class:`Consumer` is a warpgroup of the kernels in which two warpgroups both compute
scores and P V (:mod:`float8` and sparse_mla_decode, not :mod:`dense`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.ir import SCALAR, Registers, asm, const, inline, shared_address, value_of
from pallas_kernels.hopper.launch import grid_kernel
from pallas_kernels.hopper.online_softmax import log_sum_exp, raised_maximum, scale_rows
from pallas_kernels.hopper.split_kv import BLOCK, Outputs, Partition, Schedule, output_types
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, TILES, WGMMA, tiles_of
from pallas_kernels.hopper.warpgroup import fence_async_proxy, sync_warpgroup, when
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE

TILE = ROWS
"""Query rows of a CTA."""

SLOTS = 2
"""Key blocks in shared memory."""

HALF = LATENT // 2
"""Latent columns per copy and barrier: a slot is released half by half."""


@dataclasses.dataclass(frozen=True, eq=False)
class TileMemory:
    """A CTA's buffers in shared memory, in the order of :meth:`scratch`."""

    q_latent: Ref  # [2, TILE, HALF]
    q_rope: Ref
    """[1, TILE, ROPE]. With an axis of one, so that its descriptor can depend on an index."""
    latents: Ref  # latents of the key blocks, both keys and values: [SLOTS, 2, BLOCK, HALF]
    rope: Ref  # rope keys of the key blocks, later :attr:`p`: [SLOTS, BLOCK, ROPE]
    vectors: Ref
    """Numbers per query row, float32 [9, TILE]. One array, because each is padded to 1 KiB."""

    @staticmethod
    def scratch() -> list[Any]:
        queries = tiles_of(2, TILE, HALF), tiles_of(1, TILE, ROPE)
        keys = tiles_of(SLOTS, 2, BLOCK, HALF), tiles_of(SLOTS, BLOCK, ROPE)
        return [*queries, *keys, plgpu.SMEM((9, TILE), jnp.float32)]

    def copy_queries(
        self, full: Barriers, sources: tuple[Any, Any], b: Index, first_row: Index, rows: int
    ) -> None:
        """Starts the three copies of a tile's queries from their latent and rope parts in global
        memory. One warp calls it."""
        m, here = pl.ds(first_row, rows), pl.ds(0, rows)
        for half in range(2):
            window = b, m, pl.ds(HALF * half, HALF)
            full.copy(0, sources[0], window, self.q_latent.at[half, here])
        full.copy(0, sources[1], (b, m, pl.ds(0, ROPE)), self.q_rope.at[0, here])

    @property
    def p(self) -> Any:
        """P of the key blocks, in place of their rope keys: [SLOTS, TILE, BLOCK]."""
        return self.rope

    @property
    def maxima(self) -> Any:
        """The running maximum after each slot's block."""
        return self.vectors.at[0:2]

    @property
    def factors(self) -> Any:
        """Factors of each slot's block, which rescale earlier results to its running maximum."""
        return self.vectors.at[2:4]

    @property
    def sums(self) -> Any:
        """Row sums of P, by the warpgroup that computed the scores."""
        return self.vectors.at[4:6]

    @property
    def sum_maxima(self) -> Any:
        """Maxima to which :attr:`sums` are relative."""
        return self.vectors.at[6:8]

    @property
    def lse(self) -> Any:
        """Log-sum-exps on their way to global memory."""
        return self.vectors.at[8]


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Static parameters of one call."""

    M: int
    """Query rows per sequence, padded to whole tiles if there are several. Row m is query
    m // heads."""
    queries: int
    heads: int
    scale: float
    interpret: Any

    @property
    def rows(self) -> int:
        """Query rows of a tile, fewer than TILE if a sequence has fewer."""
        return min(TILE, self.M)

    @property
    def tiles(self) -> int:
        """Tiles per sequence."""
        return -(-self.M // TILE)

    @property
    def pair(self) -> int:
        """CTAs of a cluster: 2 if two tiles of a sequence share its key blocks, or 1."""
        return 2 if self.tiles % 2 == 0 else 1

    def masked(
        self,
        s: jax.Array,
        length: Index,
        block: Index,
        max_pages: int,
        first_row: Callable[[], Any],
    ) -> jax.Array:
        """Returns the scores of a tile against a sequence's key block number ``block``, [TILE,
        BLOCK], with -inf where a query row may not attend. ``first_row`` returns the tile's first
        query row."""
        column = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1, layout=WGMMA)
        visible = length - (self.queries - 1) - block * BLOCK
        end = max_pages * BLOCK - block * BLOCK
        if self.queries > 1:
            m = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 0, layout=WGMMA)
            visible = visible + lax.div(m + first_row(), jnp.int32(self.heads))
        return jnp.where(column < jnp.minimum(visible, end), s, -jnp.inf)


def launch(
    kernel: Callable[..., None], plan: TilePlan, arrays: Sequence[jax.Array], schedule: Schedule,
    barriers: Sequence[Any], warpgroups: int,
) -> Outputs:  # fmt: skip
    """Runs a kernel with one CTA per partition and tile on latent queries, rope queries, pages and
    block tables. It gets references to these and to the schedule's table, to the outputs, to the
    buffers of :class:`TileMemory`, and to ``barriers``, given by their scratch types."""
    B = arrays[0].shape[0]
    out, lse, *partials = grid_kernel(
        kernel,
        output_types(B, plan.M, LATENT, schedule.partitions),
        [*TileMemory.scratch(), *barriers],
        warpgroups=warpgroups,
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid={"partition": schedule.partitions, "tile": plan.tiles // plan.pair},
        cluster={"pair": plan.pair},
        interpret=plan.interpret,
        approx_math=True,
        reduction_scratch_bytes=0,
    )(*arrays, schedule.table)
    return out, lse, (partials[0], partials[1])


def clear_tokens(values: Ref, columns: Any, token: Index, *, interpret: Any = None) -> None:
    """Zeroes some ``columns`` of values, [BLOCK, width] in shared memory, from token ``token`` on.
    P is zero there, but the page may contain infinities or NaN, and 0 * NaN is NaN. A whole
    warpgroup calls it, and has to fence its writes before the tensor cores read them."""
    tile = 64  # columns of a swizzled tile: 128 contiguous bytes of a token
    width, starts = values.shape[1], range(0, columns.size, tile)
    if interpret is not None:
        for start in starts:
            columns_ref = values.at[:, pl.ds(columns.start + start, tile)]
            place = plgpu.broadcasted_iota(jnp.int32, (BLOCK, tile), 0, layout=WGMMA)
            old = plgpu.layout_cast(columns_ref[...], WGMMA)
            columns_ref[...] = jnp.where(place < token, old, jnp.zeros_like(old))
        return
    # Whole 64-column tiles of a token are cleared, so the swizzle within them does not matter. One
    # block of assembly, so that its addresses occupy no registers before or after it.
    eight_tokens = 8 * width * 2  # bytes
    text = [
        "{ .reg .b32 thread, place, at, z; .reg .pred p;",
        "mov.b32 z, 0;",
        "mov.u32 thread, %tid.x;",
        "bfe.u32 place, thread, 3, 4;",  # token among 16: eight threads clear one
        f"shr.u32 at, place, 3; mul.lo.u32 at, at, {eight_tokens};",
        "add.u32 at, at, $0;",
        "and.b32 thread, thread, 63;",  # 16 bytes per thread, eight tokens together
        "shl.b32 thread, thread, 4;",
        "add.u32 at, at, thread;",
    ]
    for step in range(4):
        text.append("setp.ge.s32 p, place, $1;")
        for start in starts:
            offset = 2 * step * eight_tokens + start // tile * 1024
            text.append(f"@p st.shared.v4.b32 [at + {offset}], {{z, z, z, z}};")
        text.append("add.u32 place, place, 16;")
    text.append("}")

    @inline(TILES, SCALAR, SCALAR).on(values, jnp.asarray(columns.start, jnp.int32), token)
    def _(ref: ir.Value, first_column: Registers, token: Registers) -> None:
        base = shared_address(ref)
        # A tile of eight tokens by 64 columns takes 1,024 bytes, so a column takes 16.
        base = arith.addi(base, arith.shli(value_of(first_column), const(4)))
        asm("\n".join(text), "r,r,~{memory}", base, value_of(token), effects=True)


def load_sums(maxima: Ref, sums: Ref) -> tuple[list[jax.Array], list[jax.Array]]:
    """Loads the maxima and the sums, [2, ROWS] in shared memory, of the warpgroups that score."""
    loaded = [[plgpu.layout_cast(ref[k], ROW) for k in range(2)] for ref in (maxima, sums)]
    return loaded[0], loaded[1]


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns of the output that a warpgroup has in registers."""

    columns: slice  # their place in the warpgroup's accumulator
    out_columns: Any  # their place in the output, a ``pl.ds``
    staging: Callable[[Any], Any] | None
    """Returns a window of rows of the part's buffer in shared memory, bfloat16 [ROWS, columns]. If
    None, registers are stored to global memory directly."""


@dataclasses.dataclass(frozen=True, eq=False)
class TileResults:
    """A tile's outputs in global memory, see :func:`split_kv.output_types`."""

    out: Ref
    lse: Ref
    partial_out: Ref
    partial_lse: Ref
    lse_staging: Ref  # float32 [ROWS] in shared memory
    first_row: Callable[[], Any]  # returns the tile's first query row
    rows: int  # query rows of the tile that are in ``out``, at most ROWS
    rows_per_copy: int  # rows of a staging buffer that are contiguous in shared memory
    interpret: Any

    @classmethod
    def of(
        cls, refs: Sequence[Any], memory: TileMemory, plan: TilePlan, first_row: Callable[[], Any],
        rows_per_copy: int,
    ) -> TileResults:  # fmt: skip
        out, lse, partial_out, partial_lse = refs
        rows = first_row, plan.rows, rows_per_copy
        return cls(out, lse, partial_out, partial_lse, memory.lse, *rows, plan.interpret)

    def stage_lse(self, maximum: jax.Array, total: jax.Array) -> None:
        """Prepares the log-sum-exp for both kinds of store. One warpgroup calls it."""
        self.lse_staging[...] = log_sum_exp(maximum, total)
        plgpu.commit_smem()

    def store_sequence(
        self, partition: Partition, b: Index, acc: jax.Array, sums: tuple[jax.Array, jax.Array],
        parts: Callable[[], Sequence[Part]], is_first: jax.Array | bool,
    ) -> None:  # fmt: skip
        """Stores a sequence's output, or its partial output if it is split: this warpgroup's parts,
        and the log-sum-exp if it ``is_first``. ``sums`` are the maximum in base 2, and the sum of
        exponentials."""
        segments = partition.segments(b)
        when(is_first)(lambda: self.stage_lse(*sums))
        made = parts()
        when(segments == 1)(lambda: self.store(b, acc, made, is_first))
        when(segments > 1)(lambda: self.store_partial(partition.partial(b), acc, made, is_first))
        plgpu.wait_smem_to_gmem(0)

    def store(
        self, b: Index, acc: jax.Array, parts: Sequence[Part], has_lse: jax.Array | bool
    ) -> None:
        """Stores a sequence's normalised output, and in one warpgroup its log-sum-exp."""
        for part in parts:
            values = acc[:, part.columns].astype(jnp.bfloat16)
            if part.staging is None:
                target = self.out.at[b, pl.ds(self.first_row(), ROWS), part.out_columns]
                if self.interpret is None and hasattr(plgpu, "store"):
                    # jax 0.12 refuses pieces of less than a 32-byte sector unless requested.
                    store: Any = plgpu.store  # pyright: ignore[reportAttributeAccessIssue]
                    store(target, values, optimized=False)
                else:
                    target[...] = values
            else:
                part.staging(slice(None))[...] = values
        staged = [part for part in parts if part.staging is not None]
        if staged:
            plgpu.commit_smem()
        for part in staged:
            assert part.staging is not None
            count = self.rows_per_copy
            for m in range(0, self.rows, count):
                rows = pl.ds(self.first_row() + m, count)
                target = self.out.at[b, rows, part.out_columns]
                plgpu.copy_smem_to_gmem(part.staging(pl.ds(m, count)), target)

        @when(has_lse)
        def _():
            target = self.lse.at[b, pl.ds(self.first_row(), self.rows)]
            plgpu.copy_smem_to_gmem(self.lse_staging.at[pl.ds(0, self.rows)], target)

    def store_partial(
        self, partial: Any, acc: jax.Array, parts: Sequence[Part], has_lse: jax.Array | bool
    ) -> None:
        for part in parts:
            rows = pl.ds(self.first_row(), ROWS)
            self.partial_out[partial, rows, part.out_columns] = acc[:, part.columns]

        @when(has_lse)
        def _():
            target = self.partial_lse.at[partial, pl.ds(self.first_row(), ROWS)]
            plgpu.copy_smem_to_gmem(self.lse_staging, target)


# ---- a warpgroup that computes both S and P V ----------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ConsumerSignals:
    """Waits and arrivals of a consumer at barriers. ``n`` is the use of the barrier."""

    wait_full: Callable[[int, Any], None]
    """Waits until the half of its slot that is scored first (0) or second (1) is filled."""
    max_ready: Callable[[], None]  # arrives when the maximum of its block is in shared memory
    p_ready: Callable[[], None]  # arrives when P of its block is in shared memory
    wait_other_max: Callable[[Any], None]
    """Waits for the maximum of the other consumer's block: (n)."""
    wait_other_p: Callable[[Any], None]  # waits for P of the other consumer's block: (n)
    release: Callable[[int], None]  # releases this consumer's half of a slot: (slot)


@dataclasses.dataclass(frozen=True, eq=False)
class Consumer:
    """A warpgroup that computes the scores of every other key block, and P V of all of them for 256
    of the 512 output columns. The running maximum is passed from one consumer to the other. The
    tensor cores compute half of a block's scores, then P V of the other consumer's last block, then
    the other half of the scores, and then, after the softmax, P V of its own block."""

    index: int
    """Parity of the blocks that it scores, their slot, and its half of the output: 0 or 1."""
    memory: TileMemory
    signals: ConsumerSignals
    zero: Callable[[Any], Any]
    """Returns 0 for a block, such that the compiler cannot tell. Otherwise it would compute the
    matmuls' descriptors before the loop and keep them in registers."""
    interpret: Any
    hides_rope: bool = True  # whether ``zero`` also applies to the rope queries
    first_half: Any = 0  # the half of the latents that is scored first: 0, or a scalar

    def add_scores(self, acc: Ref, n: Index, halves: tuple[int, ...] = (0, 1)) -> None:
        """Starts adding the scores of its block n to ``acc``, over the latents' ``halves`` that are
        scored first (0) and second (1)."""
        memory, zero = self.memory, self.zero(n)
        slot = self.index + zero
        for step in halves:
            half = step
            if not isinstance(self.first_half, int):
                half = (step ^ self.first_half) + zero
            self.signals.wait_full(step, n)
            keys = memory.latents.at[slot, half].transpose((1, 0))
            plgpu.wgmma(acc, memory.q_latent.at[half + zero], keys)
        if 1 in halves:
            q_rope = memory.q_rope.at[zero if self.hides_rope else 0]
            plgpu.wgmma(acc, q_rope, memory.rope.at[slot].transpose((1, 0)))

    def scores(self, n: Index, halves: tuple[int, ...] = (0, 1)) -> jax.Array:

        def multiply(acc):
            self.add_scores(acc, n, halves)
            return acc[...]

        return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

    def add_values(self, acc: jax.Array, slot: int) -> jax.Array:
        """Returns ``acc + P V`` of the block in a slot."""

        def multiply(acc_ref):
            if self.interpret is None:
                acc_ref[...] = acc
            plgpu.wgmma(acc_ref, self.memory.p.at[slot], self.memory.latents.at[slot, self.index])
            return acc_ref[...]

        added = pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
        return added if self.interpret is None else acc + added

    def rescaled(self, acc: jax.Array, n: Index) -> jax.Array:
        """Waits for P of the other's block n. Returns ``acc`` relative to that block's maximum."""
        self.signals.wait_other_max(n)
        alpha = plgpu.layout_cast(self.memory.factors[1 - self.index], ROW)
        acc = scale_rows(acc, alpha, interpret=self.interpret)
        self.signals.wait_other_p(n)
        return acc

    def store_p(
        self, maximum: jax.Array, before: jax.Array, exponents: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Stores a block's maximum, factor and P for both consumers, from the maximum of its
        scores, the running maximum before it, and a function that returns the exponents of P
        relative to a maximum. Returns P, the running maximum, and the factor that rescales earlier
        results to it."""
        running = raised_maximum(maximum, before)
        alpha = jnp.exp2(before - running)
        self.memory.maxima[self.index] = running
        self.memory.factors[self.index] = alpha
        self.signals.max_ready()
        p = jnp.exp2(exponents(running))
        sync_warpgroup(self.interpret)  # the matmuls of all four warps have read the rope keys
        self.memory.p[self.index] = p.astype(jnp.bfloat16)
        fence_async_proxy(self.interpret)
        self.signals.p_ready()
        return p, running, alpha

    def add_block(
        self,
        n: Index,
        n_other: Index,
        acc: jax.Array,
        softmax: Callable[[jax.Array], tuple[Any, ...]],
    ) -> tuple[Any, ...]:
        """Computes the scores of its block n, meanwhile P V of the other's block, then P V of n.
        ``softmax`` stores P of the scores, and returns the factor that rescales ``acc``, and the
        row sums' state. Returns ``acc`` and the state."""
        index, other, memory = self.index, 1 - self.index, self.memory

        def overlapped(s_ref, acc_ref):
            self.add_scores(s_ref, n, halves=(0,))
            acc_ref[...] = self.rescaled(acc, n_other)
            plgpu.wgmma(acc_ref, memory.p.at[other], memory.latents.at[other, index])
            self.add_scores(s_ref, n, halves=(1,))
            # P V is complete: only the second half's latent and rope scores remain.
            plgpu.wgmma_wait(2)
            self.signals.release(other)
            softmax_results = softmax(plgpu.wgmma_accumulator_load(s_ref, wait_n=0))
            return acc_ref[...], *softmax_results

        if self.interpret is None:
            accumulators = ACC((TILE, BLOCK), jnp.float32), ACC((TILE, HALF), jnp.float32)
            acc, alpha, *state = pl.run_scoped(overlapped, *accumulators)
        else:  # the interpreter has no two accumulators at once
            s = self.scores(n, (0,))
            acc = self.add_values(self.rescaled(acc, n_other), other)
            s = s + self.scores(n, (1,))
            self.signals.release(other)
            alpha, *state = softmax(s)
        acc = self.add_values(scale_rows(acc, alpha, interpret=self.interpret), index)
        return acc, *state
