"""The Hopper kernel of mla_prefill: one CTA takes 128 queries of one head at a time.

Two compute warpgroups hold 64 queries each; a third copies keys and values by TMA into a ring. A
compute warpgroup issues ``S' = Q K'^T`` of the next block of keys together with ``O += P V`` of
this one, and works on the softmax of S' while the tensor cores finish the second product.

Blocks of keys run from the last visible one down to the first: the blocks that need a mask (the
diagonal, the row's end) come first, and the loop over all others has none.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper import multiprocessors

WARPGROUPS = 2
"""That compute; one more copies."""
ROWS = 64
"""Queries of a warpgroup: the height of a wgmma."""
TILE = WARPGROUPS * ROWS
COLUMNS = 64
"""bfloat16 in the 128 bytes of a swizzled row."""

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
      stages: blocks of keys, and of values, that SMEM holds.
      registers_a: P goes to the second product in registers, else through SMEM.
      turns: the two compute warpgroups take turns at issuing products, so that one's softmax
        falls into the other's products.
      ctas: at most this many, each of which takes tile after tile; by default one a
        multiprocessor.
      pair: two CTAs with neighbouring tiles each copy half of a block for both (TMA multicast),
        which halves what the L2 cache delivers; the lower tile may do one block for nothing.
      l2_bytes: heads whose keys and values fit here run side by side.
      registers: of a compute thread and of a copying thread; at most 504 for the three together.
    """

    block: int = 128
    stages: int = 2
    registers_a: bool = True
    hold: bool = True
    turns: bool = True
    ctas: int | None = None
    pair: bool = False
    l2_bytes: int = 24 << 20
    registers: tuple[int, int] = (240, 24)


def _transforms() -> tuple[Any, ...]:
    return (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))


def _smem(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=_transforms())


def heads_together(heads: int, bytes_a_head: int, budget: int) -> int:
    """The largest divisor of ``heads`` whose keys and values fit into ``budget``; at least 1."""
    fit = max(1, budget // bytes_a_head)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fit)


def _hold(factors: Any, acc: Any, p: Any) -> Any:
    """``factors`` unchanged, in such a way that P's registers are in use until ``acc`` is known.

    A product in flight reads P from registers. If nothing else does, ptxas may give them to the
    softmax of the next block: at best it waits for the product first, and versions before 13.3
    are known to forget that. So the bits of P are combined after the wait, into a sign that is
    never set, for P >= 0.
    """
    shape = plgpu.ShapeDtypeStruct(factors.shape, jnp.float32, layout=_ROW)

    def held(_, factors, acc, p):
        i32 = ir.IntegerType.get_signless(32)

        def bits(register):
            """The first 32 bits of a register."""
            kind = register.type
            if isinstance(kind, ir.VectorType):
                words = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
                register = vector.bitcast(ir.VectorType.get((words,), i32), register)
                return vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
            return arith.bitcast(i32, register)

        words = [bits(r) for r in p.registers.flat]
        chains = [words[i : i + 8] for i in range(0, len(words), 8)]
        starts = [bits(r) for r in acc.registers.flat[: len(chains)]]
        inputs = [word for chain in chains for word in chain] + starts
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
        asm = f"{{ {registers}{' '.join(lines)} and.b32 $0, t0, 0x80008000; }}"
        sign: Any = llvm.inline_asm(
            i32, inputs, asm, "=r" + ",r" * len(inputs), has_side_effects=True
        )
        new = factors.copy()
        for index, register in np.ndenumerate(factors.registers):
            combined = arith.ori(bits(register), sign)
            if isinstance(register.type, ir.VectorType):
                combined = vector.broadcast(ir.VectorType.get((1,), i32), combined)
                new.registers[index] = vector.bitcast(register.type, combined)
            else:
                new.registers[index] = arith.bitcast(register.type, combined)
        return new

    inline: Any = plgpu.inline_mgpu(arg_types=(_ROW, _WGMMA, _WGMMA), return_type=shape)(held)
    return inline(factors, acc, p)


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
    in_registers = config.registers_a and not interpreted  # the interpreter wants P in SMEM

    neighbours = 2 if config.pair else 1
    q_tiles = pl.cdiv(T, TILE * neighbours)  # of a CTA, or of a pair
    together = heads_together(B * H, S * (K + V) * 2, config.l2_bytes)
    tiles = B * H * q_tiles
    ctas = min(tiles, (config.ctas or multiprocessors()) // neighbours)
    multicast: dict[str, Any] = {"collective_axes": "pair"} if config.pair else {}

    def body(
        q_g, k_g, v_g, starts_g, lengths_g, out_g, lse_g,
        q_s, k_s, v_s, o_s, lse_s, q_full, q_free, k_full, k_free, v_full, v_free, clean, turn,
        p_s: Any = None,
    ):  # fmt: skip
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        waves, rest = divmod(tiles, ctas)
        # Every other wave runs backwards, so that who had the longest tile gets the shortest.
        backwards = waves % 2 == 1
        mine = waves + (ctas - 1 - cta < rest if backwards else cta < rest).astype(jnp.int32)

        def tile_of(wave):
            """Row b, head h, first query t0, its place among the keys, and the keys' range."""
            index = wave * ctas + jnp.where(lax.rem(wave, 2) == 1, ctas - 1 - cta, cta)
            section, index = lax.div(index, together * q_tiles), lax.rem(index, together * q_tiles)
            row_head = section * together + lax.rem(index, together)
            b, h = lax.div(row_head, H), lax.rem(row_head, H)
            # The longest tiles first.
            t0 = (q_tiles - 1 - lax.div(index, together)) * (TILE * neighbours)
            start, length = starts_g[b] + t0, lengths_g[b]
            seen = jnp.clip(jnp.minimum(length, start + TILE * neighbours), 0, S)
            blocks = jnp.maximum(lax.div(seen + block - 1, block), 1)
            if config.pair:
                here = lax.axis_index("pair") * TILE
                t0, start = t0 + here, start + here
            return b, h, t0, start, length, blocks

        def copy_block(source, target, barrier):
            plgpu.copy_gmem_to_smem(source, target, barrier, **multicast)

        def release(barrier):
            if config.pair:  # one thread arrives, for four warps that must all be done
                plgpu.commit_smem()
            plgpu.barrier_arrive(barrier)

        @pl.when(wg == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def tile_step(wave, count):
                b, h, t0, _, _, blocks = tile_of(wave)

                def block_step(i, count):
                    slot = lax.rem(count, stages)
                    keys = pl.ds((blocks - 1 - i) * block, block)

                    @pl.when(count >= stages)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    copy_block(k_g.at[b, keys, h], k_s.at[slot], k_full.at[slot])

                    @pl.when(i == 0)
                    def _():
                        @pl.when(wave > 0)
                        def _():
                            plgpu.barrier_wait(q_free)

                        for w in range(WARPGROUPS):
                            rows = pl.ds(t0 + w * ROWS, ROWS)
                            plgpu.copy_gmem_to_smem(q_g.at[b, rows, h], q_s.at[w], q_full.at[w])

                    @pl.when(count >= stages)
                    def _():
                        plgpu.barrier_wait(v_free.at[slot])

                    copy_block(v_g.at[b, keys, h], v_s.at[slot], v_full.at[slot])
                    return count + 1

                return lax.fori_loop(0, blocks, block_step, count)

            count = lax.fori_loop(0, mine, tile_step, jnp.int32(0))

            # A barrier may not end in a phase that nobody has seen.
            plgpu.barrier_wait(q_free)

            def drain(i, carry):
                plgpu.barrier_wait(k_free.at[lax.rem(i, stages)])
                plgpu.barrier_wait(v_free.at[lax.rem(i, stages)])
                return carry

            lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)

        @pl.when(wg < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(config.registers[0], action="increase")
            other = WARPGROUPS - 1 - wg

            if config.turns:

                @pl.when(wg == 1)
                def _():
                    plgpu.barrier_arrive(turn.at[0])

            def take_turn():
                if config.turns:
                    plgpu.barrier_wait(turn.at[wg])

            def give_turn():
                if config.turns:
                    plgpu.barrier_arrive(turn.at[other])

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
                if in_registers:
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
                plgpu.wgmma(ref, q_s.at[wg], k_s.at[slot].transpose((1, 0)))

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

            def tile_step(wave, count):
                b, h, t0, start, length, blocks = tile_of(wave)
                start = start + wg * ROWS
                # Blocks below this one are visible to each of the warpgroup's queries.
                whole = jnp.clip(lax.div(jnp.minimum(length, start + 1), block), 0, blocks)
                first = (blocks - 1) * block

                plgpu.barrier_wait(q_full.at[wg])
                slot = lax.rem(count, stages)
                plgpu.barrier_wait(k_full.at[slot])

                take_turn()

                def first_scores(ref):
                    scores(ref, slot)
                    give_turn()

                s = product(first_scores, block)
                release(k_free.at[slot])
                top = _as_layout(jnp.full((ROWS,), _LOWEST, jnp.float32), _ROW)
                total = _as_layout(jnp.zeros((ROWS,), jnp.float32), _ROW)
                p, top, total = softmax(s, top, total, (start, length, first))[:3]
                p = p.astype(jnp.bfloat16)
                plgpu.barrier_wait(v_full.at[slot])

                @pl.when(blocks * block > length)
                def _():
                    values_clean(slot, first, length)

                acc = zeros(V)

                def step(i, carry, masked):
                    acc, top, total, p = carry
                    slot, before = lax.rem(count + i, stages), lax.rem(count + i - 1, stages)
                    bound = (start, length, (blocks - 1 - i) * block) if masked else None
                    plgpu.barrier_wait(k_full.at[slot])
                    p_operand = pv_operand(p)
                    take_turn()

                    def after_scores(s):
                        release(k_free.at[slot])
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

                    before_p = p
                    if interpreted:
                        acc = acc + product(
                            lambda ref: plgpu.wgmma(ref, p_operand, v_s.at[before]), V
                        )
                        give_turn()
                        p, top, total, alpha = after_scores(
                            product(lambda ref: scores(ref, slot), block)
                        )
                        plgpu.barrier_wait(v_full.at[slot])
                    else:
                        s = zeros(block)
                        # The old values stand in for the new ones until these are known.
                        acc, _, p, top, total, alpha = _run_state(overlapped)(
                            (_ACC.init(acc), _ACC.init(s), s, top, total, total)
                        )
                    if in_registers and config.hold:
                        alpha = _hold(alpha, acc, before_p)
                    release(v_free.at[before])
                    # Only now: a register that a product in flight reads may not be written.
                    p = p.astype(jnp.bfloat16)
                    acc = acc * lax.broadcast_in_dim(alpha, (ROWS, V), [0])
                    return acc, top, total, p

                masked = jnp.maximum(blocks - whole, 1)
                carry = lax.fori_loop(
                    1, masked, lambda i, c: step(i, c, True), (acc, top, total, p)
                )
                carry = lax.fori_loop(masked, blocks, lambda i, c: step(i, c, False), carry)
                acc, top, total, p = carry
                plgpu.barrier_arrive(q_free)
                slot = lax.rem(count + blocks - 1, stages)
                p_operand = pv_operand(p)

                def last(ref):
                    plgpu.wgmma(ref, p_operand, v_s.at[slot])

                acc = acc + product(last, V) if interpreted else _run_state(last)(_ACC.init(acc))
                release(v_free.at[slot])

                rows = pl.ds(t0 + wg * ROWS, ROWS)
                seen = total > 0.0
                # The former tile's stores have read the staging buffers.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                lse = (top + jnp.log(total) * _LOG2E) * (1.0 / _LOG2E)
                lse_s[wg] = jnp.where(seen, lse, -jnp.inf)
                acc = acc * lax.broadcast_in_dim(jnp.where(seen, 1.0 / total, 0.0), (ROWS, V), [0])
                for c in range(V // COLUMNS):
                    columns = slice(c * COLUMNS, (c + 1) * COLUMNS)
                    if c:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    o_s[wg] = acc[:, columns].astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    if c == 0:
                        plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, h, rows])
                    plgpu.copy_smem_to_gmem(
                        o_s.at[wg], out_g.at[b, rows, h, pl.ds(c * COLUMNS, COLUMNS)]
                    )
                return count + blocks

            lax.fori_loop(0, mine, tile_step, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)
            if config.turns:

                @pl.when(wg == 0)
                def _():
                    plgpu.barrier_wait(turn.at[0])

    options: dict[str, Any] = {"interpret": interpret} if interpreted else {}
    if config.pair:
        options |= {"cluster": (2,), "cluster_names": ("pair",)}
        free: Any = plgpu.ClusterBarrier(
            collective_axes=("pair",), num_arrivals=WARPGROUPS, num_barriers=stages
        )
    else:
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
            # Whole tiles: a copy of float32 in one piece is not cut at T, and would run on.
            jax.ShapeDtypeStruct((B, H, q_tiles * TILE * neighbours), jnp.float32),
        ],
        scratch_types=[
            _smem(WARPGROUPS, ROWS, K),
            _smem(stages, block, K),
            _smem(stages, block, V),
            _smem(WARPGROUPS, ROWS, COLUMNS),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            plgpu.Barrier(num_barriers=stages),
            free,
            plgpu.Barrier(num_barriers=stages),
            free,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            *([] if in_registers else [_smem(WARPGROUPS, ROWS, block)]),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        **options,
    )
    return tuple(kernel(q, k, v, starts, lengths))
