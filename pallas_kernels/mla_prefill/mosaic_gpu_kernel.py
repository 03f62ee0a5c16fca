"""The Hopper kernel of mla_prefill: a CTA takes a tile, 128 queries of one head.

Two compute warpgroups hold 64 queries each; a third copies keys and values by TMA into a ring. A
compute warpgroup issues ``S' = Q K'^T`` of the next block of keys together with ``O += P V`` of
this one, and works on the softmax of S' while the tensor cores finish the second product. The two
take turns at issuing, so that one's softmax falls into the other's products.

Blocks of keys run from the last visible one down to the first: the blocks that need a mask (the
diagonal, the row's end) come first, and the loop over all others has none.

The GPU starts a CTA wherever one has ended, in the order of the grid: the tiles with most
keys first, so that the multiprocessors end together.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_prefill.held_registers import hold

WARPGROUPS = 2
"""That compute; one more copies."""
ROWS = 64
"""Queries of a warpgroup: the height of a wgmma."""
TILE = WARPGROUPS * ROWS
COLUMNS = 64
"""bfloat16 in the 128 bytes of a swizzled row."""

_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24
"""Of a thread: 2 x 240 + 24 of the 504 that three warpgroups have."""

_LOG2E = math.log2(math.e)
_LOWEST = -1e30
"""Where a row's maximum starts: finite, so that a row that sees nothing gets exp2(-inf) = 0."""
# What jax leaves untyped, or types for its own use.
_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_as_layout: Any = plgpu.layout_cast
_run_state: Any = pl.run_state
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block: keys a step, a multiple of 64.
      stages: blocks of keys, and of values, that SMEM holds; at least 2.
      l2_bytes: heads whose keys and values fit here run side by side.
    """

    block: int = 128
    stages: int = 2
    l2_bytes: int = 24 << 20

    def __post_init__(self):
        # The values of a block must be there before the last block's are let go.
        if self.block <= 0 or self.block % 64 or self.stages < 2:
            raise ValueError(f"expected a block of 64, 128, ... and 2 stages or more, got {self}")


def _transforms() -> tuple[Any, ...]:
    return (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))


def _smem(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=_transforms())


def heads_together(heads: int, bytes_a_head: int, budget: int) -> int:
    """The largest divisor of ``heads`` whose keys and values fit into ``budget``; at least 1."""
    fit = max(1, budget // bytes_a_head)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fit)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    config: Config,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V], lse [B, H, >= T] of bfloat16 arrays whose T and S are multiples of 8."""
    B, T, H, K = q.shape
    S, V = k.shape[1], v.shape[-1]
    block, stages = config.block, config.stages
    to_log2 = scale * _LOG2E
    interpreted = interpret is not None
    q_tiles = pl.cdiv(T, TILE)
    together = heads_together(B * H, S * (K + V) * 2, config.l2_bytes)

    def body(
        q_g, k_g, v_g, starts_g, lengths_g, out_g, lse_g,
        q_s, k_s, v_s, lse_s, q_full, k_full, k_free, v_full, v_free, clean, turn,
        p_s: Any = None,
    ):  # fmt: skip
        wg = lax.axis_index("wg")

        def place():
            """Row b, head h and first query t0 of the CTA's tile."""
            index = lax.axis_index("tile")
            section, index = lax.div(index, together * q_tiles), lax.rem(index, together * q_tiles)
            row_head = section * together + lax.rem(index, together)
            b, h = lax.div(row_head, H), lax.rem(row_head, H)
            return b, h, (q_tiles - 1 - lax.div(index, together)) * TILE

        def keys_of(b, t0):
            """Query t0's place among the keys, the row's length, the blocks to visit."""
            start, length = starts_g[b] + t0, lengths_g[b]
            seen = jnp.clip(jnp.minimum(length, start + TILE), 0, S)
            return start, length, jnp.maximum(lax.div(seen + block - 1, block), 1)

        def copy():
            b, h, t0 = place()
            blocks = keys_of(b, t0)[2]  # first: the loads take longest
            for w in range(WARPGROUPS):
                rows = pl.ds(t0 + w * ROWS, ROWS)
                for c in range(K // COLUMNS):
                    columns = pl.ds(c * COLUMNS, COLUMNS)
                    plgpu.copy_gmem_to_smem(q_g.at[b, rows, h, columns], q_s.at[w, c], q_full.at[w])

            def step(i, carry):
                slot, keys = lax.rem(i, stages), pl.ds((blocks - 1 - i) * block, block)
                for source, ring, full, free in (
                    (k_g, k_s, k_full, k_free),
                    (v_g, v_s, v_full, v_free),
                ):

                    @pl.when(i >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(source.at[b, keys, h], ring.at[slot], full.at[slot])
                return carry

            def drain(i, carry):
                """A barrier may not end in a phase that nobody has seen."""
                plgpu.barrier_wait(k_free.at[lax.rem(i, stages)])
                plgpu.barrier_wait(v_free.at[lax.rem(i, stages)])
                return carry

            lax.fori_loop(0, blocks, step, None)
            lax.fori_loop(jnp.maximum(blocks - stages, 0), blocks, drain, None)

        def take_turn():
            plgpu.barrier_wait(turn.at[wg])

        def give_turn():
            plgpu.barrier_arrive(turn.at[WARPGROUPS - 1 - wg])

        def softmax(s, top, total, bound):
            """P of a block, and the row maxima, sums and factors that go with it."""
            if bound is not None:
                start, length, first = bound
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=_WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 0, layout=_WGMMA)
                visible = jnp.minimum(row + (start + 1 - first), length - first)
                s = jnp.where(column < visible, s, -jnp.inf)
            new_top = jnp.maximum(top, s.max(axis=1) * to_log2)
            alpha = jnp.exp2(top - new_top)
            p = jnp.exp2(s * to_log2 - lax.broadcast_in_dim(new_top, (ROWS, block), [0]))
            return p, new_top, total * alpha + p.sum(axis=1), alpha

        def pv_operand(p):
            if not interpreted:
                return p
            p_s[wg] = p
            plgpu.commit_smem()
            return p_s.at[wg]

        def zeros(columns):
            return _as_layout(jnp.zeros((ROWS, columns), jnp.float32), _WGMMA)

        def product(issue, columns):
            """What ``issue`` adds up in an accumulator of zeros."""

            def scope(ref):
                issue(ref)
                return ref[...]

            return pl.run_scoped(scope, _ACC((ROWS, columns), jnp.float32))

        def scores(ref, slot):
            for c in range(K // COLUMNS):
                keys = k_s.at[slot, :, pl.ds(c * COLUMNS, COLUMNS)]
                plgpu.wgmma(ref, q_s.at[wg, c], keys.transpose((1, 0)))

        def values_clean(slot, first, length):
            """Zeroes the values past the row's end, which may be NaN; half the columns each."""
            for c in range(V // COLUMNS):

                @pl.when(wg == c % WARPGROUPS)
                def _(c=c):
                    part = v_s.at[slot, :, pl.ds(c * COLUMNS, COLUMNS)]
                    shape = (block, COLUMNS)
                    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
                    held = _as_layout(part[...], _WGMMA)
                    part[...] = jnp.where(row < length - first, held, jnp.zeros_like(held))

            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)

        def compute():
            b, h, t0 = place()
            start, length, blocks = keys_of(b, t0)
            start = start + wg * ROWS
            # Blocks below this one are visible to each of the warpgroup's queries.
            whole = jnp.clip(lax.div(jnp.minimum(length, start + 1), block), 0, blocks)
            first = (blocks - 1) * block

            plgpu.barrier_wait(q_full.at[wg])
            plgpu.barrier_wait(k_full.at[0])
            take_turn()

            def first_scores(ref):
                scores(ref, 0)
                give_turn()

            s = product(first_scores, block)
            plgpu.barrier_arrive(k_free.at[0])
            top = _as_layout(jnp.full((ROWS,), _LOWEST, jnp.float32), _ROW)
            total = _as_layout(jnp.zeros((ROWS,), jnp.float32), _ROW)
            p, top, total = softmax(s, top, total, (start, length, first))[:3]
            p = p.astype(jnp.bfloat16)
            plgpu.barrier_wait(v_full.at[0])

            @pl.when(blocks * block > length)
            def _():
                values_clean(0, first, length)

            def step(i, carry, masked):
                acc, top, total, p = carry
                slot, before = lax.rem(i, stages), lax.rem(i - 1, stages)
                bound = (start, length, (blocks - 1 - i) * block) if masked else None
                plgpu.barrier_wait(k_full.at[slot])
                p_operand = pv_operand(p)
                take_turn()

                def after_scores(s):
                    plgpu.barrier_arrive(k_free.at[slot])
                    return softmax(s, top, total, bound)

                def overlapped(refs):
                    acc_ref, s_ref, p_ref, top_ref, total_ref, alpha_ref = refs
                    scores(s_ref, slot)
                    plgpu.wgmma(acc_ref, p_operand, v_s.at[before])
                    give_turn()
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    # Without this, and the branch in the wait for the next values, the
                    # compilers move the softmax past the wait for the second product.
                    p_ref[...], top_ref[...], total_ref[...], alpha_ref[...] = (
                        lax.optimization_barrier(after_scores(s))
                    )
                    plgpu.barrier_wait(v_full.at[slot])

                if interpreted:
                    acc = acc + product(lambda ref: plgpu.wgmma(ref, p_operand, v_s.at[before]), V)
                    give_turn()
                    p, top, total, alpha = after_scores(
                        product(lambda ref: scores(ref, slot), block)
                    )
                    plgpu.barrier_wait(v_full.at[slot])
                else:
                    s, before_p = zeros(block), p
                    # The old values stand in for the new ones until these are known.
                    acc, _, p, top, total, alpha = _run_state(overlapped)(
                        (_ACC.init(acc), _ACC.init(s), s, top, total, total)
                    )
                    alpha = hold(alpha, acc, before_p)
                plgpu.barrier_arrive(v_free.at[before])
                # Only now: a register that a product in flight reads may not be written.
                p = p.astype(jnp.bfloat16)
                acc = acc * lax.broadcast_in_dim(alpha, (ROWS, V), [0])
                return acc, top, total, p

            masked = jnp.maximum(blocks - whole, 1)
            carry = (zeros(V), top, total, p)
            carry = lax.fori_loop(1, masked, lambda i, c: step(i, c, True), carry)
            carry = lax.fori_loop(masked, blocks, lambda i, c: step(i, c, False), carry)
            acc, top, total, p = carry
            slot = lax.rem(blocks - 1, stages)
            p_operand = pv_operand(p)

            def last(ref):
                plgpu.wgmma(ref, p_operand, v_s.at[slot])

            acc = acc + product(last, V) if interpreted else _run_state(last)(_ACC.init(acc))
            plgpu.barrier_arrive(v_free.at[slot])
            store(b, h, t0, acc, top, total)

        def store(b, h, t0, acc, top, total):
            rows = pl.ds(t0 + wg * ROWS, ROWS)
            seen = total > 0.0
            lse = (top + jnp.log(total) * _LOG2E) * (1.0 / _LOG2E)
            lse_s[wg] = jnp.where(seen, lse, -jnp.inf)
            acc = acc * lax.broadcast_in_dim(jnp.where(seen, 1.0 / total, 0.0), (ROWS, V), [0])
            for c in range(V // COLUMNS):  # where no product reads the queries any more
                columns = slice(c * COLUMNS, (c + 1) * COLUMNS)
                q_s[wg, c] = acc[:, columns].astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, h, rows])
            for c in range(V // COLUMNS):
                columns = pl.ds(c * COLUMNS, COLUMNS)
                plgpu.copy_smem_to_gmem(q_s.at[wg, c], out_g.at[b, rows, h, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(wg == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            copy()

        @pl.when(wg < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

            @pl.when(wg == 1)
            def _():
                give_turn()

            compute()

            @pl.when(wg == 0)
            def _():
                take_turn()

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
            # Whole tiles: a copy of float32 in one piece is not cut at T, and would run on.
            jax.ShapeDtypeStruct((B, H, q_tiles * TILE), jnp.float32),
        ],
        scratch_types=[
            _smem(WARPGROUPS, K // COLUMNS, ROWS, COLUMNS),
            _smem(stages, block, K),
            _smem(stages, block, V),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=K // COLUMNS, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            *([_smem(WARPGROUPS, ROWS, block)] if interpreted else []),
        ],
        grid=(B * H * q_tiles,),
        grid_names=("tile",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        **({"interpret": interpret} if interpreted else {}),
    )
    return tuple(kernel(q, k, v, starts, lengths))
