"""mla_prefill on Hopper GPUs: a persistent kernel with a dynamic tile scheduler (bfloat16).

A tile is 128 queries of one head. Each CTA has three warpgroups:

* The producer claims tiles, and copies their queries, key blocks and value blocks by TMA. Keys and
  values go to rings of two stages. It claims the next tile as soon as it has started to copy the
  current one, so that the next tile's operands arrive during this tile's epilogue. Tiles with the
  most keys come first, so that all multiprocessors finish at about the same time.
* Two consumers process 64 queries each. As in FlashAttention-3, a consumer overlaps the softmax
  with the matmuls: it issues ``S' = Q K'^T`` of the next key block, meanwhile rescales O for the
  change of the running maximum, issues ``O += P V`` of the current block, and computes the softmax
  of S' while the tensor cores finish the second matmul. It waits for that matmul in the middle of
  the softmax. Then the first half of the new P is packed into the registers that the old P has
  vacated, while the special function units compute the exponentials of the second half.

Key blocks are visited from the last visible one to the first. So the blocks that need a mask (the
diagonal and the sequence's end) come first, and the loop over all others is unmasked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.ir import asm, i32, inline, item
from pallas_kernels.hopper.launch import LANE, grid_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import LOG2E, NO_SCORE
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, spread_rows, tiles_of
from pallas_kernels.hopper.warpgroup import when
from pallas_kernels.mla_prefill.gradients import differentiable
from pallas_kernels.mla_prefill.reference import bounds
from pallas_kernels.mla_prefill.tiles import HeadTiles, claim_tile, mask_columns, uniform

CONSUMERS = 2  # warpgroups
TILE = CONSUMERS * ROWS  # queries
BLOCK = 128  # keys
STAGES = 2  # blocks in the ring of keys, and in that of values
COLUMNS = 64  # bfloat16 in a 128-byte swizzled row
L2_BYTES = 24 << 20  # share of the L2 cache for keys and values of concurrent heads
_HALF = BLOCK // 2
_PARTIAL_SUMS = 8  # of a row: two for each of the four threads that hold it
_TMA_ROWS = 8  # queries and keys are tiled in groups of this many
# Registers per thread. Three warpgroups have 504 together, and 2 x 240 + 24 = 504.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24

# jax types it for its own use.
_run_state: Any = pl.run_state


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_prefill`."""
    require_hopper(interpret)
    arrays = {"q": q, "k": k, "v": v}
    if wrong := {name: x.dtype.name for name, x in arrays.items() if x.dtype != jnp.bfloat16}:
        raise NotImplementedError(f"takes bfloat16, got {wrong}")
    K, V = q.shape[-1], v.shape[-1]
    if K % COLUMNS or V % COLUMNS or not 0 < V <= min(K, 128) or K > 192:
        raise NotImplementedError(
            "takes keys 64, 128 or 192 wide and values 64 or 128 wide, no wider than the keys,"
            f" got {K} and {V}"
        )
    if scale <= 0:
        raise NotImplementedError(f"takes a positive scale, got {scale}")
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError(f"takes no empty arrays, got q {q.shape} and k {k.shape}")

    def pad_tokens(x):
        missing = -x.shape[1] % _TMA_ROWS
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x

    def padded_attend(q, k, v, starts, lengths):
        T = q.shape[1]
        starts, lengths = bounds(k, starts, lengths)
        q, k, v = map(pad_tokens, (q, k, v))
        starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
        plan = Plan.of(q, k, v, float(scale), interpret)
        out, lse = attend(q, k, v, starts, lengths, plan=plan, interpret=interpret)
        return out[:, :T], lse[:, :, :T].swapaxes(1, 2)

    return differentiable(padded_attend, scale=scale)(q, k, v, starts, lengths)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles of a call, and their order."""

    order: HeadTiles
    keys: int  # keys of a sequence
    tiles: int  # tiles of all heads and sequences
    ctas: int
    to_log2: float  # factor from scores to exponents of 2
    interpreted: bool

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, interpret: Any) -> Plan:
        (B, T, H, K), S, V = q.shape, k.shape[1], v.shape[-1]
        order = HeadTiles.of(B, H, pl.cdiv(T, TILE), S * (K + V) * 2, L2_BYTES)
        tiles = B * H * order.per_head
        ctas = min(multiprocessors(), tiles)
        return cls(order, S, tiles, ctas, scale * LOG2E, interpret is not None)

    def position_of(self, index: Any) -> tuple[Any, Any, Any]:
        """Returns the sequence b, head h and first query t0 of a tile."""
        b, h, i = self.order.locate(index)
        return b, h, (self.order.per_head - 1 - i) * TILE

    def blocks_of(self, start: Any, length: Any) -> Any:
        """Returns how many key blocks the tile's last query sees, at least 1."""
        visible = jnp.clip(jnp.minimum(length, start + TILE), 0, self.keys)
        return jnp.maximum(lax.div(visible + BLOCK - 1, BLOCK), 1)


class _Refs(NamedTuple):
    """Arguments of the kernel: arrays in global memory (_g), arrays in shared memory, barriers."""

    q_g: Any
    k_g: Any
    v_g: Any
    starts_g: Any
    lengths_g: Any
    out_g: Any
    lse_g: Any
    q: Any  # [CONSUMERS, ROWS, K]
    k: Any  # [STAGES, BLOCK, K]
    v: Any  # [STAGES, BLOCK, V]
    out: Any  # staging for the epilogue, bfloat16 [CONSUMERS, ROWS, COLUMNS]
    lse: Any  # staging for the epilogue, float32 [CONSUMERS, ROWS]
    next_tile: Any  # int32 [2], through which the consumers receive tiles
    q_full: Any
    q_free: Any
    full: Any  # barriers of the rings of keys and of values, and of the slots of next_tile
    free: Any
    values_cleared: Any
    p: Any = None  # P in the interpreter, whose wgmma takes no operand from registers

    def rings(self) -> list[_Ring]:
        """Returns the rings of keys, values and next tiles."""
        return [_Ring(self.full, self.free, first) for first in (0, STAGES, 2 * STAGES)]


_RING_SLOTS = 2 * STAGES + 2  # of all rings


@dataclasses.dataclass(frozen=True, eq=False)
class _Ring:
    """Slots that the producer fills and the consumers release. Its barriers begin at ``first``."""

    full: Any
    free: Any
    first: int

    def full_barrier(self, slot: Any) -> Any:
        return self.full.at[self.first + slot]

    def wait_full(self, slot: Any) -> None:
        plgpu.barrier_wait(self.full_barrier(slot))

    def wait_free(self, slot: Any) -> None:
        plgpu.barrier_wait(self.free.at[self.first + slot])

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self.first + slot])


def _slot(i: Any) -> Any:
    """Returns the ring slot of a tile's i-th block."""
    return i & (STAGES - 1)


@lowered_once("plan", "interpret")
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    plan: Plan,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [B, T, H, V] and lse [B, H, T padded to tiles]. T and S are multiples of 8."""
    (B, T, H, K), V = q.shape, v.shape[-1]

    def mla_prefill(*refs: Any) -> None:
        refs, wg, first_tile = _Refs(*refs), lax.axis_index("wg"), lax.axis_index("cta")

        @when(wg == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            _produce(plan, refs, first_tile)

        @when(wg < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            _consume(plan, refs, wg, first_tile)

    kernel = grid_kernel(
        mla_prefill,
        [
            jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
            # Padded to whole tiles, because a one-dimensional float32 copy is not clipped at T.
            jax.ShapeDtypeStruct((B, H, plan.order.per_head * TILE), jnp.float32),
        ],
        [
            tiles_of(CONSUMERS, ROWS, K),
            tiles_of(STAGES, BLOCK, K),
            tiles_of(STAGES, BLOCK, V),
            tiles_of(CONSUMERS, ROWS, COLUMNS),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            plgpu.SMEM((2,), jnp.int32),
            plgpu.Barrier(num_barriers=CONSUMERS),
            plgpu.Barrier(num_barriers=CONSUMERS),
            plgpu.Barrier(num_barriers=_RING_SLOTS),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=_RING_SLOTS),
            plgpu.Barrier(num_arrivals=CONSUMERS),
            *([tiles_of(CONSUMERS, ROWS, BLOCK)] if plan.interpreted else []),
        ],
        warpgroups=CONSUMERS + 1,
        grid={"cta": plan.ctas},
        interpret=interpret,
        approx_math=True,
        lowering_semantics=LANE,
        reduction_scratch_bytes=0,
    )
    return tuple(kernel(q, k, v, starts, lengths))


def _produce(plan: Plan, refs: _Refs, first_tile: Any) -> None:
    """Claims this CTA's tiles one after another, and copies their queries, keys and values."""
    keys, values, tiles = refs.rings()
    tile_counter = None if plan.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR)

    def process_tile(carry):
        n, tile = carry
        b, h, t0 = plan.position_of(tile)
        blocks = plan.blocks_of(refs.starts_g[b] + t0, refs.lengths_g[b])

        def copy_block(source, target, ring, i):
            slot = _slot(i)
            ring.wait_free(slot)
            rows = pl.ds((blocks - 1 - i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(source.at[b, rows, h], target.at[slot], ring.full_barrier(slot))

        copy_keys = functools.partial(copy_block, refs.k_g, refs.k, keys)
        copy_values = functools.partial(copy_block, refs.v_g, refs.v, values)
        copy_keys(jnp.int32(0))
        for w in range(CONSUMERS):
            plgpu.barrier_wait(refs.q_free.at[w])
            rows = pl.ds(t0 + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(refs.q_g.at[b, rows, h], refs.q.at[w], refs.q_full.at[w])
        copy_values(jnp.int32(0))
        next_tile = pass_next_tile(lax.rem(n, 2), tile)

        def step(i, carry):
            copy_keys(i)
            copy_values(i)
            return carry

        lax.fori_loop(1, blocks, step, None)
        return n + 1, next_tile

    def pass_next_tile(slot, tile):
        """Claims the next tile, and passes it to the consumers."""
        tiles.wait_free(slot)
        if plan.interpreted:  # it has no atomic addition, so each CTA takes every ctas-th tile
            refs.next_tile[slot] = tile + plan.ctas
        else:
            claim_tile(tile_counter, refs.next_tile, slot, plan.ctas)
        plgpu.commit_smem()
        plgpu.barrier_arrive(tiles.full_barrier(slot))
        return refs.next_tile[slot]

    lax.while_loop(lambda c: c[1] < plan.tiles, process_tile, (jnp.int32(0), first_tile))
    # Every completed phase of a barrier must be waited for before the CTA exits.
    for w in range(CONSUMERS):
        plgpu.barrier_wait(refs.q_free.at[w])
    for i in range(_RING_SLOTS):
        plgpu.barrier_wait(refs.free.at[i])


def _consume(plan: Plan, refs: _Refs, wg: Any, first_tile: Any) -> None:
    """Attends to the key blocks of each of the CTA's tiles."""
    keys, values, tiles = refs.rings()
    V, make_uniform = refs.v.shape[-1], (lambda x: x) if plan.interpreted else uniform

    def process_tile(carry):
        n, tile, start, length = carry
        t0 = plan.position_of(tile)[2]
        blocks = plan.blocks_of(start + t0, length)
        start = start + t0 + wg * ROWS
        # All queries of the warpgroup see the blocks below this one.
        unmasked = jnp.clip(lax.div(jnp.minimum(length, start + 1), BLOCK), 0, blocks - 1)
        first = (blocks - 1) * BLOCK

        plgpu.barrier_wait(refs.q_full.at[wg])
        keys.wait_full(0)
        s = _accumulate(lambda ref: issue_scores(ref, 0), BLOCK)
        keys.release(0)
        maximum = plgpu.layout_cast(jnp.full((ROWS,), NO_SCORE, jnp.float32), ROW)
        p, s, maximum, total, alpha = _start_softmax(
            plan, s, maximum, _zeros(_PARTIAL_SUMS), (start, length, first)
        )
        carry = _zeros(V), alpha, maximum, *_finish_softmax(plan, p, s, maximum, total)
        values.wait_full(0)
        when(blocks * BLOCK > length)(lambda: clear_values(first, length))

        def visit(masked, i, carry):
            bound = (start, length, (blocks - 1 - i) * BLOCK) if masked else None
            return add_block(_slot(i), _slot(i - 1), carry, bound)

        masked = blocks - unmasked
        carry = lax.fori_loop(1, masked, functools.partial(visit, True), carry)
        carry = lax.fori_loop(masked, blocks, functools.partial(visit, False), carry)
        plgpu.barrier_arrive(refs.q_free.at[wg])
        next_tile = receive_tile(n)
        acc, alpha, maximum, total, p = carry
        slot = _slot(blocks - 1)
        acc = add_values(acc * spread_rows(alpha, V), p, slot)
        values.release(slot)
        position = plan.position_of(make_uniform(tile))
        _store(refs, wg, *position, acc, maximum, total.sum(axis=1))
        return n + 1, *next_tile

    def add_block(slot, previous, carry, bound):
        """Adds P V of the previous block, and computes P of the block in ``slot``."""
        acc, alpha, maximum, total, p = carry
        keys.wait_full(slot)

        def softmax_of(s):
            keys.release(slot)
            return _start_softmax(plan, s, maximum, total, bound)

        def overlapped(state):
            acc_ref, s_ref, *rest_refs = state
            issue_scores(s_ref, slot)
            old = plgpu.wgmma_accumulator_load(acc_ref, wait_n=None)
            acc_ref[...] = old * spread_rows(alpha, V)
            issue_values(acc_ref, p, previous)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            # Without this barrier, and the branch in the wait for the next values, the
            # compilers move the softmax past the wait for the second matmul.
            rest = lax.optimization_barrier(softmax_of(s))
            for ref, x in zip(rest_refs, rest, strict=True):
                ref[...] = x
            values.wait_full(slot)

        if plan.interpreted:
            acc = add_values(acc * spread_rows(alpha, V), p, previous)
            first, s, maximum, total, alpha = softmax_of(
                _accumulate(lambda ref: issue_scores(ref, slot), BLOCK)
            )
            values.wait_full(slot)
        else:
            s, part = _zeros(BLOCK), _zeros(_HALF)
            # Placeholders for the results, of the right types and layouts.
            acc, _, first, s, maximum, total, alpha = _run_state(overlapped)(
                (ACC.init(acc), ACC.init(s), part, part, maximum, total, maximum)
            )
            alpha = _keep_live(alpha, acc, p)
        values.release(previous)
        # Only now, because registers that a wgmma in flight reads must not be written.
        return acc, alpha, maximum, *_finish_softmax(plan, first, s, maximum, total)

    def issue_scores(ref, slot):
        plgpu.wgmma(ref, refs.q.at[wg], refs.k.at[slot].transpose((1, 0)))

    def issue_values(ref, p, slot):
        plgpu.wgmma(ref, p, refs.v.at[slot])

    def add_values(acc, p, slot):
        """Returns ``acc + P V``."""
        if plan.interpreted:
            refs.p[wg] = p
            plgpu.commit_smem()
            return acc + _accumulate(lambda ref: issue_values(ref, refs.p.at[wg], slot), V)
        return _run_state(lambda ref: issue_values(ref, p, slot))(ACC.init(acc))

    def clear_values(first, length):
        """Zeroes the last block's values past the sequence's end, which may be NaN, in slot 0. Each
        consumer clears half of the columns."""
        for c in range(V // COLUMNS):

            @when(wg == c % CONSUMERS)
            def _(c=c):
                part = refs.v.at[0, :, pl.ds(c * COLUMNS, COLUMNS)]
                row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, COLUMNS), 0, layout=WGMMA)
                old = plgpu.layout_cast(part[...], WGMMA)
                part[...] = jnp.where(row < length - first, old, jnp.zeros_like(old))

        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.values_cleared)
        plgpu.barrier_wait(refs.values_cleared)

    def receive_tile(n):
        slot = lax.rem(n, 2)
        tiles.wait_full(slot)
        tile = refs.next_tile[slot]
        tiles.release(slot)
        return with_sequence(tile)

    def with_sequence(tile):
        """Returns the tile and its sequence's start and length."""
        b = plan.position_of(jnp.minimum(tile, plan.tiles - 1))[0]
        return tuple(make_uniform(x) for x in (tile, refs.starts_g[b], refs.lengths_g[b]))

    plgpu.barrier_arrive(refs.q_free.at[wg])
    for i in range(_RING_SLOTS):
        plgpu.barrier_arrive(refs.free.at[i])
    lax.while_loop(
        lambda c: c[1] < plan.tiles, process_tile, (jnp.int32(0), *with_sequence(first_tile))
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)


def _accumulate(issue: Any, columns: int) -> jax.Array:
    """Returns the accumulator, initially zero, after ``issue`` has accumulated into it."""

    def scope(ref):
        issue(ref)
        return ref[...]

    return pl.run_scoped(scope, ACC((ROWS, columns), jnp.float32))


def _start_softmax(
    plan: Plan, s: jax.Array, maximum: jax.Array, total: jax.Array, bound: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Masks scores and starts the softmax. Returns P of the block's first half, the scores of the
    second half, and per row the maximum, the partial sums and the factor that rescales earlier
    sums. ``bound`` is the tile's first query, the sequence's length and the block's first key, or
    None if nothing is masked."""
    if bound is not None:
        start, length, first = bound
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        visible = jnp.minimum(row + (start + 1 - first), length - first)
        s = mask_columns(s, visible, interpreted=plan.interpreted)
    new_maximum = jnp.maximum(maximum, s.max(axis=1) * plan.to_log2)
    alpha = jnp.exp2(maximum - new_maximum)
    total = total * spread_rows(alpha, _PARTIAL_SUMS)
    p, total = _exponentials(plan, s[:, :_HALF], new_maximum, total)
    return p, s[:, _HALF:], new_maximum, total, alpha


def _finish_softmax(
    plan: Plan, first: jax.Array, s: jax.Array, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the second half of P, from the scores s. Returns the partial sums, and P."""
    second, total = _exponentials(plan, s, maximum, total)
    halves = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
    concatenate = functools.partial(jnp.concatenate, axis=1)
    return total, (concatenate if plan.interpreted else _concatenate_columns)(halves)


def _exponentials(
    plan: Plan, s: jax.Array, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns P of half a block, and the updated partial sums."""
    p = jnp.exp2(s * plan.to_log2 - spread_rows(maximum, _HALF))
    for c in range(0, _HALF, _PARTIAL_SUMS):
        total = total + p[:, c : c + _PARTIAL_SUMS]
    return p, total


def _store(
    refs: _Refs, wg: Any, b: Any, h: Any, t0: Any, acc: jax.Array, maximum: jax.Array,
    total: jax.Array,
) -> None:  # fmt: skip
    """Normalises and stores the rows of consumer ``wg`` in the tile that begins at query t0."""
    rows = pl.ds(t0 + wg * ROWS, ROWS)
    visible = total > 0.0
    lse = maximum * (1.0 / LOG2E) + jnp.log(total)
    acc = acc * spread_rows(jnp.where(visible, 1.0 / total, 0.0), acc.shape[1])
    for c in range(acc.shape[1] // COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        columns = slice(c * COLUMNS, (c + 1) * COLUMNS)
        refs.out[wg] = acc[:, columns].astype(jnp.bfloat16)
        if c == 0:
            refs.lse[wg] = jnp.where(visible, lse, -jnp.inf)
        plgpu.commit_smem()
        if c == 0:
            plgpu.copy_smem_to_gmem(refs.lse.at[wg], refs.lse_g.at[b, h, rows])
        columns = pl.ds(c * COLUMNS, COLUMNS)
        plgpu.copy_smem_to_gmem(refs.out.at[wg], refs.out_g.at[b, rows, h, columns])


def _concatenate_columns(tiles: Sequence[jax.Array]) -> jax.Array:
    """Concatenates register tiles along their columns."""
    shape = tiles[0].shape[0], sum(tile.shape[1] for tile in tiles)
    result = plgpu.ShapeDtypeStruct(shape, tiles[0].dtype, layout=WGMMA)

    @inline(*(WGMMA for _ in tiles), returns=result)
    def concatenate(*tiles: Any) -> Any:
        return mgpu.FragmentedArray(
            _registers=np.concatenate([tile.registers for tile in tiles], axis=1),
            _layout=tiles[0].layout,
            _is_signed=tiles[0].is_signed,
        )

    return concatenate(*tiles)


def _keep_live(factors: jax.Array, acc: jax.Array, p: jax.Array) -> jax.Array:
    """Returns ``factors`` unchanged, but makes them depend on P's registers and on ``acc``.

    A wgmma in flight reads P from registers. If nothing else uses these registers, ptxas may assign
    them to the softmax of the next block. At best it then waits for the wgmma first, and versions
    before 13.3 are known to omit the wait. So after the wait for ``acc`` the bits of P are combined
    into a sign bit, which is never set because P >= 0, and which is merged into ``factors``.
    """
    shape = plgpu.ShapeDtypeStruct(factors.shape, jnp.float32, layout=ROW)

    def bits(register: Any) -> Any:
        """Returns the first 32 bits of a register."""
        type_ = register.type
        if isinstance(type_, ir.VectorType):
            words = type_.shape[0] * mgpu.utils.bitwidth(type_.element_type) // 32
            register = vector.bitcast(ir.VectorType.get((words,), i32()), register)
            return item(register, 0)
        return arith.bitcast(i32(), register)

    @inline(ROW, WGMMA, WGMMA, returns=shape)
    def merge_sign(factors: Any, acc: Any, p: Any) -> Any:
        words = [bits(r) for r in p.registers.flat]
        chains = [words[i : i + 8] for i in range(0, len(words), 8)]
        starts = [bits(r) for r in acc.registers.flat[: len(chains)]]
        inputs = [each for chain in chains for each in chain] + starts
        lines, names = [], []
        for i in range(len(chains)):
            name = f"t{i}"
            for j in range(0, 8, 2):
                third, table = (f"${len(words) + i + 1}", "0xA8") if j == 0 else (name, "0xFE")
                a, b = f"${i * 8 + j + 1}", f"${i * 8 + j + 2}"
                lines.append(f"lop3.b32 {name}, {a}, {b}, {third}, {table};")
            names.append(name)
        for name in names[1:]:
            lines.append(f"or.b32 t0, t0, {name};")
        registers = "".join(f".reg .b32 {name}; " for name in names)
        text = f"{{ {registers}{' '.join(lines)} and.b32 $0, t0, 0x80008000; }}"
        constraints = "=r" + ",r" * len(inputs)
        sign = asm(text, constraints, *inputs, result=i32(), effects=True)
        new = factors.copy()
        for index, register in np.ndenumerate(factors.registers):
            combined = arith.ori(bits(register), sign)
            if isinstance(register.type, ir.VectorType):
                combined = vector.broadcast(ir.VectorType.get((1,), i32()), combined)
                new.registers[index] = vector.bitcast(register.type, combined)
            else:
                new.registers[index] = arith.bitcast(register.type, combined)
        return new

    return merge_sign(factors, acc, p)
