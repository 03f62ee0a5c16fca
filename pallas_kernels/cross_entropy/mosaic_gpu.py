"""cross_entropy on Hopper GPUs: one kernel, which reads and writes the logits in memory once.

Each CTA has a row at a time, and reads it twice: for the maximum and the sum of exponentials, and
then for the gradient, which it writes in the place of the logits. The rows of all CTAs together
have about 40 MB, and stay in the L2 cache between the two.

A thread keeps a maximum and a sum for each of its columns of a chunk. So only the end of a row has
operations across threads: all warpgroups write their maxima and sums to shared memory, the first
one reduces them, and all read the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.hopper import Ref, multiprocessors, require_hopper
from pallas_kernels.hopper.ir import Registers, inline, numbers_of
from pallas_kernels.hopper.lanes import LAYOUT, SHAPE, WARPS, per_thread
from pallas_kernels.hopper.launch import LANE
from pallas_kernels.hopper.registers import exchanged
from pallas_kernels.hopper.tiles import load_with_layout
from pallas_kernels.hopper.warpgroup import sync_warpgroup, when

_WARPGROUPS = 8  # per CTA; a multiprocessor has one CTA
_INTERPRETED_WARPGROUPS, _INTERPRETED_CTAS = 2, 2
_CHUNKS = 512, 256  # columns that a warpgroup loads at a time: the first that divides a row
_TOGETHER = 8  # chunks that are loaded before any is used, to hide the latency of memory
_LEAST = -1e30  # below any maximum, and finite: the difference of two infinities is NaN
_LOG2E = math.log2(math.e)


def cross_entropy(
    logits: Float[Array, "M W"],
    targets: Int[Array, " M"],
    weights: Float32[Array, " M"],
    *,
    interpret: Any = None,
) -> tuple[Float32[Array, " M"], BFloat16[Array, "M W"]]:
    """cross_entropy on a Hopper GPU. Raises NotImplementedError for no Hopper GPU, a dtype other
    than bfloat16, a number of columns that is not a multiple of 256, and 2^31 logits or more."""
    require_hopper(interpret)
    if logits.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {logits.dtype}")
    if not logits.size or logits.shape[1] % _CHUNKS[-1] or logits.size >= 2**31:
        raise NotImplementedError(
            f"takes multiples of {_CHUNKS[-1]} columns and fewer than 2^31 logits, got"
            f" {logits.shape}"
        )
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0].astype(jnp.float32)
    # Without the barrier, XLA would copy the logits, because the kernel overwrites them.
    chosen, logits = lax.optimization_barrier((chosen, logits))
    total, gradient = _kernel(logits, targets.astype(jnp.int32), weights, interpret=interpret)
    return total - chosen, gradient


@functools.partial(jax.jit, static_argnames="interpret")
def _kernel(
    logits: BFloat16[Array, "M W"],
    targets: Int[Array, " M"],
    weights: Float32[Array, " M"],
    *,
    interpret: Any,
) -> tuple[Float32[Array, " M"], BFloat16[Array, "M W"]]:
    """Returns the log-sum-exp of each row, and the gradient."""
    M, W = logits.shape
    on_gpu = interpret is None
    ctas = multiprocessors() if on_gpu else _INTERPRETED_CTAS
    warpgroups = _WARPGROUPS if on_gpu else _INTERPRETED_WARPGROUPS
    chunk = next(size for size in _CHUNKS if W % size == 0)
    values = jax.new_ref(logits.reshape(-1))

    def cross_entropy(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(compute, *refs),
            *(plgpu.SMEM((warpgroups, chunk), jnp.float32) for _ in range(2)),
            *(plgpu.SMEM(SHAPE, jnp.float32) for _ in range(2)),
            plgpu.Barrier(num_arrivals=warpgroups),
            collective_axes="wg",
        )

    def compute(*refs: Any) -> None:
        row = _Row(
            *refs,
            W=W,
            chunk=chunk,
            warpgroups=warpgroups,
            warpgroup=lax.axis_index("wg"),
            interpret=interpret,
        )
        cta = lax.axis_index("cta")
        count = lax.div(M - cta + (ctas - 1), jnp.int32(ctas))

        def one_row(i: jax.Array, carry: tuple[()]) -> tuple[()]:
            row.run(cta + i * jnp.int32(ctas))
            return carry

        lax.fori_loop(0, count, one_row, ())

    options = {"unsafe_no_auto_barriers": True, "lowering_semantics": LANE}
    totals = jax.new_ref(jnp.zeros((M,), jnp.float32))
    pl.kernel(  # not plgpu.kernel, which takes no refs in jax 0.10
        cross_entropy,
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(ctas,), grid_names=("cta",), num_threads=warpgroups, thread_name="wg"
        ),
        compiler_params=plgpu.CompilerParams(**options),
        **({} if interpret is None else {"interpret": interpret}),
    )(targets, weights, values, totals)  # pyright: ignore[reportCallIssue]
    return totals[...], values[...].reshape(M, W)


@dataclasses.dataclass(frozen=True)
class _Row:
    """The work of one warpgroup on a row."""

    targets: Ref  # int32 [M]
    weights: Ref  # float32 [M]
    values: Ref  # bfloat16 [M W]: the logits, and then the gradient
    totals: Ref  # float32 [M]
    maxima: Ref  # in shared memory, of every warpgroup: float32 [warpgroups, chunk]
    sums: Ref
    warp_maxima: Ref  # of each warp of the first warpgroup, float32 [WARPS, 32]
    warp_sums: Ref
    barrier: Ref
    W: int
    chunk: int
    warpgroups: int
    warpgroup: jax.Array
    interpret: Any

    def run(self, row: jax.Array) -> None:
        first = row * jnp.int32(self.W)
        maximum, total = self.reduce_columns(first)
        self.maxima[self.warpgroup], self.sums[self.warpgroup] = maximum, total
        self.sync_cta()
        when(self.warpgroup == 0)(self.reduce_threads)
        self.sync_cta()
        maximum, total = self.warp_maxima[0, 0], self.warp_sums[0, 0]
        for warp in range(1, WARPS):
            maximum = jnp.maximum(maximum, self.warp_maxima[warp, 0])
            total += self.warp_sums[warp, 0]
        total = maximum + jnp.log(total) * _LOG2E
        when(self.warpgroup == 0)(lambda: self.store_total(row, total))
        self.write_gradient(row, first, total)

    # ---- the chunks of this warpgroup, _TOGETHER at a time ----

    @property
    def chunks(self) -> int:
        return self.W // self.chunk

    def each_group(self, body: Any, carry: Any) -> Any:
        """Calls ``carry = body(numbers, carry)`` with the numbers of chunks. The last may be too
        large."""
        groups = pl.cdiv(self.chunks, _TOGETHER)
        count = lax.div(groups - self.warpgroup + (self.warpgroups - 1), jnp.int32(self.warpgroups))

        def one_group(i: jax.Array, carry: Any) -> Any:
            group = self.warpgroup + i * jnp.int32(self.warpgroups)
            return body([group * _TOGETHER + n for n in range(_TOGETHER)], carry)

        return lax.fori_loop(0, count, one_group, carry)

    def is_inside(self, number: jax.Array) -> jax.Array | bool:
        return True if self.chunks % _TOGETHER == 0 else number < self.chunks

    def load(self, first: jax.Array, numbers: list[jax.Array]) -> list[jax.Array]:
        """Loads chunks in float32, times log2(e)."""
        loaded = [
            load_with_layout(self.values.at[self.window(first, number)], self.layout)
            for number in numbers
        ]
        return [x.astype(jnp.float32) * _LOG2E for x in loaded]

    def window(self, first: jax.Array, number: jax.Array) -> Any:
        inside = jnp.minimum(number, self.chunks - 1)
        return pl.ds(first + inside * jnp.int32(self.chunk), self.chunk)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.chunk,), vec_size=self.chunk // 128)

    def filled(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.chunk,), value, jnp.float32), self.layout)

    # ---- the three parts ----

    def reduce_columns(self, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the maximum of each column of the chunks, and the sum of 2^(x - maximum)."""

        def add(numbers: list[jax.Array], carry: Any) -> Any:
            maximum, total = carry
            chunks = [
                x
                if self.is_inside(number) is True
                else jnp.where(self.is_inside(number), x, _LEAST)
                for number, x in zip(numbers, self.load(first, numbers), strict=True)
            ]
            raised = maximum
            for x in chunks:
                raised = jnp.maximum(raised, x)
            total = total * jnp.exp2(maximum - raised)
            for x in chunks:
                total += jnp.exp2(x - raised)
            return raised, total

        return self.each_group(add, (self.filled(_LEAST), self.filled(0.0)))

    def reduce_threads(self) -> None:
        maxima = [self.load_shared(self.maxima.at[n]) for n in range(self.warpgroups)]
        sums = [self.load_shared(self.sums.at[n]) for n in range(self.warpgroups)]
        raised = functools.reduce(jnp.maximum, maxima)
        scaled = [s * jnp.exp2(x - raised) for x, s in zip(maxima, sums, strict=True)]
        self.warp_maxima[...] = self.of_warps(raised, arith.maximumf, jnp.max)
        sync_warpgroup(self.interpret)
        each = [self.warp_maxima[warp, 0] for warp in range(WARPS)]
        total = functools.reduce(jnp.add, scaled) * jnp.exp2(
            raised - functools.reduce(jnp.maximum, each)
        )
        self.warp_sums[...] = self.of_warps(total, arith.addf, lambda x: jnp.sum(x) / WARPS)

    def of_warps(
        self, row: jax.Array, operation: Callable[..., Any], interpreted: Callable[..., Any]
    ) -> jax.Array:
        """Reduces the numbers of each warp: [WARPS, 32], equal in all lanes."""
        if self.interpret is not None:
            return jnp.full(SHAPE, interpreted(row))

        @inline(self.layout, returns=plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT))
        def reduce(row: Registers) -> Registers:
            total = functools.reduce(operation, numbers_of(row))
            for distance in (16, 8, 4, 2, 1):
                total = operation(total, exchanged(total, distance))
            return per_thread(total)

        return reduce(row)

    def store_total(self, row: jax.Array, total: jax.Array) -> None:
        self.totals[row] = total * (1 / _LOG2E)

    def load_shared(self, ref: Ref) -> jax.Array:
        return load_with_layout(ref, self.layout)

    def write_gradient(self, row: jax.Array, first: jax.Array, total: jax.Array) -> None:
        weight, target = self.weights[row], self.targets[row]
        numbers = plgpu.broadcasted_iota(jnp.int32, (self.chunk,), 0, layout=self.layout)

        def write(chunks: list[jax.Array], carry: tuple[()]) -> tuple[()]:
            for number, x in zip(chunks, self.load(first, chunks), strict=True):
                p = jnp.exp2(x - total)
                column = target - number * jnp.int32(self.chunk)
                p = jnp.where(numbers == column, p - 1, p) * weight
                self.store(first, number, p.astype(jnp.bfloat16))
            return carry

        self.each_group(write, ())

    def store(self, first: jax.Array, number: jax.Array, values: jax.Array) -> None:
        def put() -> None:
            self.values[self.window(first, number)] = values

        inside = self.is_inside(number)
        put() if inside is True else when(inside)(put)

    def sync_cta(self) -> None:
        sync_warpgroup(self.interpret)
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)
