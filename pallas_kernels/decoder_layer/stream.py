"""The skeleton of a persistent kernel that streams weights past the activations of a few tokens.

One CTA per SM runs the whole kernel, a static list of phases. A phase multiplies matrices with
activations of the same kind. It is divided into units of eight output features, which go round the
CTAs. A unit reads two *halves* of eight matrix rows each: the rows of gate and of up with the same
numbers, the left and the right columns of the rows of one matrix, or 16 rows of one matrix (which
are then 16 features).

A CTA has three warpgroups:

* The *producer*, one warp, copies the weights of its CTA's units to a ring of stages in shared
  memory, unit after unit and phase after phase, in steps of ``Operand.step`` columns. It does not
  wait for other CTAs: the next phase's weights arrive while the consumers wait at a grid barrier.
* Two *consumer* warpgroups multiply. Before a phase they bring its activations, one row per token,
  from global to shared memory. For every unit (:meth:`Cta.multiply_units`) their eight warps share
  the columns of each stage, and have sums in registers; at its end they exchange these through
  shared memory, and one of the warpgroups adds them up and stores the results in global memory.
  When all results of a phase are stored, a grid barrier makes them visible to all CTAs.

A subclass of :class:`Cta` defines the weights of a unit, and the order of the phases.

Budget on an H200: an SM's share of 4.3 TB/s is 16.5 bytes of weights per cycle. They enter and
leave shared memory, and the tokens leave it once per eight rows: another 16.5 bytes per cycle for
bfloat16 weights, 33 for float8, of the 128 that shared memory moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.decoder_layer.activations import norm_row, pack
from pallas_kernels.decoder_layer.reference import is_integer, scale_block, shape_of
from pallas_kernels.decoder_layer.registers import (
    BLOCK_BYTES,
    MOST_SPLIT_TOKENS,
    MOST_TOKENS,
    ROWS,
    SUMS,
    SUMS_SHAPE,
    Half,
    Operand,
    Rows,
    load_scales,
    load_totals,
    multiply,
    no_sums,
    prefetch_scales,
    zero_after,
)
from pallas_kernels.hopper import Index
from pallas_kernels.hopper.barriers import BULK_COPY, Barriers, TmaCopy
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.hopper.ir import (
    INT32,
    Registers,
    asm,
    const,
    i32,
    inline,
    instruction,
    scalar,
    shared_address,
)
from pallas_kernels.hopper.lanes import SHAPE
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.warpgroup import WARPS, first_warp, when

CONSUMERS = 2  # consumer warpgroups
STEP_BYTES = 1024  # bytes of a matrix row per stage, which then has 16 KiB
WARPGROUP = 128  # threads

_SHARED_MEMORY = 227 * 1024  # bytes per CTA
_RESERVED = 8 * 1024  # barriers, alignment of buffers, norms, factors
_FEWEST_STAGES, _MOST_STAGES = 3, 12
_PADDING = BLOCK_BYTES  # modulo 128: the rows that a warp reads at once are then in different banks
_CONSUMER_BARRIER = 13  # hardware barrier of the consumers; see warpgroup for those in use
_EVICT_FIRST = 0x12F0000000000000  # an L2 cache policy, as createpolicy encodes it


# ---- the plan ----


@dataclasses.dataclass(frozen=True)
class Phase:
    """Work that is divided among the CTAs, between the same grid barriers. A phase's units are
    numbered matrix by matrix, and CTA c has the units c, c + CTAs, and so on."""

    name: str
    units: int  # units of a matrix, or of a gate and its up
    operand: Operand | None = None
    """The matrices, or None if the phase does not multiply matrices by :func:`multiply`."""
    matrices: int = 1
    """Matrices, or pairs of gate and up: 1, one per head, or one per pair of a token and an
    expert."""
    barriers: int = 0  # grid barriers before this phase's activations
    rows: int = ROWS
    """Output features of a unit. If its halves are not split and are of one matrix, eight each."""
    shift: int | None = None
    """Added to a CTA's number, modulo CTAs, so that the CTAs without a last unit of the phase
    before have the first ones."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """The memory of the ring's stages, which hold weights of several dtypes and widths."""

    dtypes: tuple[Any, ...]
    row_bytes: int  # distance of a stage's rows, the same for all dtypes and widths
    count: int
    interpret: Any
    refs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, phases: Sequence[Phase], interpret: Any, least_bytes: int = 0) -> Stages:
        """Returns stages for the phases' operands, with rows of at least ``least_bytes``. Their
        number is that of :meth:`fitting`."""
        operands = [phase.operand for phase in phases if phase.operand is not None]
        widest = max(least_bytes, *(operand.step_bytes for operand in operands))
        row_bytes = widest + (_PADDING - widest) % 128
        return cls(tuple(dict.fromkeys(each.dtype for each in operands)), row_bytes, 0, interpret)

    def fitting(self, used: int, tokens: int) -> Stages:
        """Returns as many stages as fit in addition to ``used`` bytes, from 3 to 12. In the
        interpreter there are three, so that small tests go round the ring several times."""
        used += _RESERVED + 2 * CONSUMERS * 2 * 4 * SUMS_SHAPE[0] * SUMS_SHAPE[1]
        size = 2 * ROWS * self.row_bytes
        most = _MOST_STAGES if self.interpret is None else _FEWEST_STAGES
        count = min((_SHARED_MEMORY - used) // size, most)
        if count < _FEWEST_STAGES:
            raise NotImplementedError(
                f"takes {_FEWEST_STAGES} ring stages of {size} bytes in addition to {used} bytes"
                f" for {tokens} tokens, got room for {max(count, 0)}"
            )
        return dataclasses.replace(self, count=count)

    def scratch(self) -> list[Any]:
        """Returns the scratch types: bytes, or in the interpreter an array for each dtype."""
        if self.interpret is None:
            return [plgpu.SMEM((self.count, 2, ROWS, self.row_bytes), jnp.uint8)]
        return [
            plgpu.SMEM((self.count, 2, ROWS, self.row_bytes // dtype.itemsize), dtype)
            for dtype in self.dtypes
        ]

    def half(self, operand: Operand, stage: jax.Array, half: int) -> Any:
        """Returns the reference to half a stage, of ``operand.step`` columns."""
        if self.interpret is None:
            return self.refs[0].at[stage, half]
        ref = self.refs[self.dtypes.index(operand.dtype)]
        return ref.at[stage, half, :, pl.ds(0, operand.elements)]


def padded(columns: int, weight_dtype: Any) -> int:
    """Returns the distance of activation rows of N columns in shared memory. The tokens that a
    quarter of a warp reads at once are then in different banks: a thread reads 16 bytes per block
    of bfloat16 weights, 32 of float8. What it reads for integers is next to the other threads'."""
    is_float8 = weight_dtype.itemsize == 1 and not is_integer(weight_dtype)
    return columns + ((16 if is_float8 else 64) - 2 * columns) % 128 // 2


def weight_dtype_of(matrices: Sequence[tuple[Any, Any]], dtype: Any) -> Any:
    """Returns the dtype of matrices, given with their scales. Raises NotImplementedError if a
    kernel does not take them with activations of ``dtype``."""
    dtypes = {jnp.dtype(matrix.dtype) for matrix, _ in matrices}
    (first, *others) = dtypes
    is_scaled = first == jnp.dtype(FLOAT8) or is_integer(first)
    is_known = first == dtype or (is_scaled and all(scales for _, scales in matrices))
    if others or not is_known:
        names = ", ".join(sorted(map(str, dtypes)))
        raise NotImplementedError(
            f"takes matrices of {dtype}, or of float8_e4m3fn, int8 or int4 with scales, got {names}"
        )
    return first


def check(tokens: int, dtype: Any, weight_dtype: Any, widths: dict[str, tuple[int, int]]) -> None:
    """Raises NotImplementedError if a kernel does not take these tokens, dtypes and widths, which
    are given with the number that must divide each."""
    for name, (width, multiple) in widths.items():
        if width % multiple:
            raise NotImplementedError(
                f"takes {name} widths of a multiple of {multiple}, got {width}"
            )
    if not 1 <= tokens <= MOST_TOKENS:
        raise NotImplementedError(f"takes 1 to {MOST_TOKENS} tokens, got {tokens}")
    if weight_dtype.itemsize > 1:
        return
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 activations for {weight_dtype}, got {dtype}")
    if tokens > MOST_SPLIT_TOKENS and not is_integer(weight_dtype):
        raise NotImplementedError(
            f"takes 1 to {MOST_SPLIT_TOKENS} tokens for {weight_dtype} matrices, got {tokens}"
        )


def count_units(cta: Index, units: int, ctas: int) -> jax.Array:
    """Returns how many of ``units`` units a CTA has. Unit u is of CTA u % CTAs."""
    return lax.div(units - cta + (ctas - 1), jnp.int32(ctas))


# ---- the kernel ----


class Cta:
    """One CTA. Its methods emit the code of its warps.

    A kernel's plan has ``ctas``, ``tokens``, ``dtype`` of the activations, ``weight_dtype`` of the
    matrices that may be quantized, ``phases``, ``stages``, ``signals`` (barriers of the consumers
    that the producer waits for), ``activations`` (numbers in the activations' memory), ``factors``
    (of rows in float16; 0 if there are none) and ``stride(columns)`` of activation rows."""

    first_arrival = 0
    """Index of the first of the signals that the consumers have arrived at a grid barrier."""

    producer_waits = True  # whether the producer waits for these signals

    alternates_by_exchange = False
    """Whether consecutive exchanges are stored by different warpgroups, even across phases.
    Otherwise warpgroup ``i % 2`` stores unit i of each phase."""

    def __init__(
        self, plan: Any, refs: dict[str, Any], memory: dict[str, Any], counter: Any, interpret: Any
    ):
        self.plan, self.refs, self.interpret = plan, SimpleNamespace(**refs), interpret
        self.ring = Ring.of(plan.stages.count, CONSUMERS, memory["ring"], interpret)
        self.stages = dataclasses.replace(plan.stages, refs=tuple(memory["stages"]))
        self.partial_sums, *self.consumer_barrier = memory["totals"]
        self.signals = Barriers(memory["signals"][0], interpret)
        (self.activations,), (self.norms,) = memory["activations"], memory["norms"]
        self.factors = next(iter(memory["factors"]), None)
        grid_memory = counter if interpret is None else memory["grid"][0]
        self.grid = GridBarrier(grid_memory, plan.ctas, CONSUMERS, interpret=interpret)
        self.cta = lax.axis_index("cta")
        self.wg = lax.axis_index("wg")
        # Progress of the consumers' code: in the ring, exchanges of sums, and grid barriers.
        self.state: Any = None
        self.exchanges: Any = None
        self.barriers = 0

    def run(self) -> None:
        self.ring.initialise()
        self.signals.initialise([CONSUMERS * WARPS] * self.plan.signals, cluster=False)
        overlap_preceding_kernel(interpret=self.interpret)
        when(self.wg == CONSUMERS)(lambda: when(first_warp(self.interpret is None))(self.produce))

        @when(self.wg < CONSUMERS)
        def _() -> None:
            self.ring.release_all()
            self.state, self.exchanges = self.ring.start(), jnp.int32(0)
            self.consume()

    def produce(self) -> None:
        """Copies the weights of all phases. One warp runs it."""
        raise NotImplementedError

    def consume(self) -> None:
        """Multiplies the phases. Two warpgroups run it."""
        raise NotImplementedError

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.plan.phases if phase.name == name)

    # ---- the units of this CTA ----

    def first_unit(self, phase: Phase) -> jax.Array:
        if phase.shift is None:
            return self.cta
        return lax.rem(self.cta + phase.shift % self.plan.ctas, jnp.int32(self.plan.ctas))

    def count(self, phase: Phase) -> jax.Array:
        return count_units(self.first_unit(phase), phase.units * phase.matrices, self.plan.ctas)

    def locate(self, phase: Phase, i: Index) -> tuple[jax.Array, jax.Array]:
        """Returns the matrix and the first output feature of this CTA's i-th unit, or of any unit
        if it has none."""
        return self.matrix_and_row(phase, self.first_unit(phase) + i * self.plan.ctas)

    def matrix_and_row(self, phase: Phase, unit: Index) -> tuple[jax.Array, jax.Array]:
        unit = jnp.minimum(unit, phase.units * phase.matrices - 1)
        if phase.matrices == 1:
            return jnp.int32(0), unit * phase.rows
        units = jnp.int32(phase.units)
        return lax.div(unit, units), lax.rem(unit, units) * phase.rows

    def halves(self, phase: Phase, i: Index) -> tuple[Half, Half]:
        """Returns the weights of this CTA's i-th unit."""
        raise NotImplementedError

    def half(
        self, phase: Phase, n: int, row: Index, matrix: Any, scales: Sequence[Any],
        index: tuple[Any, ...] = (),
    ) -> Half:  # fmt: skip
        """Returns half ``n`` of a unit that begins at ``row`` of a matrix."""
        assert phase.operand is not None
        column = n * phase.operand.columns if phase.operand.is_split else 0
        if phase.rows > ROWS:
            row += n * ROWS
        if not scales:
            return Half(matrix, row, column, index)
        sizes = zip(shape_of(matrix)[-2:], scale_block(matrix), strict=True)
        rows, columns = (-(-size // block) for size, block in sizes)
        scale_row = lax.div(row, jnp.int32(scale_block(matrix)[0]))
        if index:
            scale_row = index[0] * rows + scale_row
        return Half(matrix, row, column, index, scales[0], scale_row * columns)

    # ---- the producer ----

    def produce_units(self, phase: Phase, state: PipelineState) -> PipelineState:
        """Copies the weights of this CTA's units of a phase, each matrix row by a bulk copy. A
        unit's scales only go to the L2 cache: a row of them may not be aligned for a copy, and the
        consumers load them a unit ahead, which is too late for what is in memory."""
        operand = phase.operand
        assert operand is not None

        def unit(i: jax.Array, state: PipelineState) -> PipelineState:
            halves = self.halves(phase, i)

            def fill(i: jax.Array, state: PipelineState, carry: None) -> None:
                copies = []
                for n, half in enumerate(halves):
                    columns = pl.ds(half.column + i * operand.elements, operand.elements)
                    window = (*half.index, pl.ds(half.row, ROWS), columns)
                    target = self.stages.half(operand, state.stage, n)
                    row_bytes = self.stages.row_bytes
                    copies.append(RowCopies(half.matrix, window, target, row_bytes=row_bytes))
                self.ring.fill(state, copies)

            for half in halves:
                prefetch_scales(operand, half, self.interpret)
            return self.ring.loop(self.steps(operand.steps), fill, state, None)[0]

        return lax.fori_loop(0, self.count(phase), unit, state)

    def steps(self, count: int) -> Any:
        """Returns the steps of a unit, as a number that compilers do not know: they would unroll
        the loops, and LLVM made 18 copies of six loops."""
        if self.interpret is not None:
            return count

        @inline(returns=INT32)
        def steps() -> Registers:
            return scalar(asm(f"mov.b32 $0, {count};", "=r", result=i32(), effects=True))

        return steps()

    # ---- the consumers ----

    def multiply_units(
        self, phase: Phase, rows_of: Callable[[Any], Rows] | Rows, store: Callable[..., None]
    ) -> None:
        """Multiplies this CTA's units of a phase with activation rows, or those of a unit's matrix.
        The main loop of both warpgroups. One of them calls ``store`` per unit, with the unit's
        index, its matrix, its first output feature, and the totals of its halves."""
        operand = phase.operand
        assert operand is not None
        count = self.count(phase)

        def unit(i: jax.Array, carry: Any) -> Any:
            state, number, scales = carry
            matrix, row = self.locate(phase, i)
            next_scales = self.scales(phase, i + 1, count)
            rows = rows_of if isinstance(rows_of, Rows) else rows_of(matrix)
            state, sums = self.multiply_unit(operand, rows, scales, state)
            self.exchange(number, sums)
            parity = number if self.alternates_by_exchange else i

            @when(self.wg == lax.rem(parity, jnp.int32(CONSUMERS)))
            def _() -> None:
                factors = rows.factors, rows.first_factor
                totals = self.totals(operand, number, rows.count, *factors)
                store(i, matrix, row, *totals)

            return state, number + 1, next_scales

        carry = self.state, self.exchanges, self.scales(phase, jnp.int32(0), count)
        self.state, self.exchanges, _ = lax.fori_loop(0, count, unit, carry)

    def scales(self, phase: Phase, i: Index, count: Index) -> list[Any]:
        """Loads the scales of unit i of ``count`` units, or past the end of a unit that exists."""
        assert phase.operand is not None
        if not phase.operand.is_scaled:
            return []
        i = jnp.where(i < count, i, 0)
        return load_scales(phase.operand, self.halves(phase, i), self.interpret)

    def multiply_unit(
        self, operand: Operand, rows: Rows, scales: Sequence[Any], state: PipelineState
    ) -> tuple[PipelineState, tuple[jax.Array, jax.Array]]:
        """Multiplies a unit's weights with the activation rows, and returns the next state and this
        warpgroup's sums of both halves."""

        def add(i: jax.Array, state: PipelineState, sums: Any) -> Any:
            self.ring.wait_full(state)
            halves = [self.stages.half(operand, state.stage, n) for n in range(2)]
            sums = multiply(operand, halves, rows, i, scales, sums, self.interpret)
            read = state.stage + zero_after(sums, SUMS, self.interpret)
            self.ring.release(state._replace(stage=read))
            return sums

        first = (no_sums(), no_sums())
        return self.ring.loop(self.steps(operand.steps), add, state, first)

    def exchange(self, number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> None:
        """Stores this warpgroup's sums in shared memory, and waits for those of the other.
        Consecutive exchanges use different buffers, so that one barrier per exchange suffices."""
        for half, values in enumerate(sums):
            self.partial_sums[lax.rem(number, 2), lax.axis_index("wg"), half] = values
        self.sync_consumers()

    def totals(
        self,
        operand: Operand,
        number: jax.Array,
        tokens: int,
        factors: Any = None,
        first: Index = 0,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the totals of both halves after exchange ``number``, see :func:`load_totals`."""
        sums = self.partial_sums.at[lax.rem(number, 2)]
        return load_totals(operand, sums, tokens, self.interpret, factors, first)

    def sync_consumers(self) -> None:
        """Synchronises the consumers' threads. They see each other's writes to all memory."""
        if self.interpret is not None:
            plgpu.barrier_arrive(self.consumer_barrier[0])
            plgpu.barrier_wait(self.consumer_barrier[0])
            return
        inline()(lambda: instruction(f"bar.sync {_CONSUMER_BARRIER}, {128 * CONSUMERS};"))()

    def norm_rows(
        self, width: int, weight: jax.Array, row_of: Callable[[int], Any], eps: float,
        bfloat16_start: int | None = None,
    ) -> None:  # fmt: skip
        """Norms the tokens' rows to the activations' memory, alternately by both warpgroups; if the
        rows are in float16, also in bfloat16 to ``bfloat16_start``, unless that is None."""
        plan = self.plan
        for t in range(plan.tokens):

            @when(self.wg == t % CONSUMERS)
            def _(t: int = t) -> None:
                start, norms = t * plan.stride(width), self.norms.at[self.wg]
                target = self.activations.at[pl.ds(start, width)]
                unpacked = target if self.factors is None else None
                if self.factors is not None and bfloat16_start is not None:
                    unpacked = self.activations.at[pl.ds(bfloat16_start + start, width)]
                options = eps, plan.dtype, self.interpret
                normed = norm_row(row_of(t), weight, unpacked, norms, *options)
                if self.factors is not None:
                    targets = [(target, self.factors.at[t])]
                    pack([normed], targets, plan.weight_dtype, norms, self.interpret)

        self.sync_consumers()

    def sync_grid(self, load: Callable[[], Any] = lambda: None) -> Any:
        """Waits until all CTAs have stored their results. Meanwhile ``load`` loads weights, which
        have left the L2 cache since the last step. Its result is returned."""
        token = self.grid.arrive()
        if self.producer_waits:
            self.signals.arrive(self.first_arrival + self.barriers)
        loaded = load()
        self.grid.wait(token)
        self.barriers += 1
        return loaded


def launch(
    name: str, cta: Callable[..., Cta], plan: Any, inputs: Sequence[dict[str, Any]],
    results: dict[str, tuple[tuple[int, ...], Any]], memory: dict[str, Any], counter: Any,
    interpret: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """Runs a kernel of ``cta``'s, which gets references by name to the arrays and trees of
    ``inputs`` and to ``results`` (shapes and dtypes), and returns the arrays that it writes. Empty
    ones are absent, their references None. ``memory`` is scratch in addition to that of
    :class:`Cta`."""
    leaves, structure = jax.tree.flatten(inputs)
    existing = {key: it for key, it in results.items() if it[0][0]}
    f32 = jnp.float32
    partial_sums = plgpu.SMEM((2, CONSUMERS, 2, *SUMS_SHAPE), f32)
    barrier = [] if interpret is None else [plgpu.Barrier(num_arrivals=CONSUMERS)]
    scratch = {
        "stages": plan.stages.scratch(),
        "ring": Ring.scratch(plan.stages.count, 2, CONSUMERS, interpret),
        "totals": [partial_sums, *barrier],
        "signals": [Barriers.scratch(plan.signals, CONSUMERS, interpret)],
        "activations": [plgpu.SMEM((plan.activations,), plan.dtype)],
        **{key: [each] for key, each in memory.items()},
        "norms": [plgpu.SMEM((CONSUMERS, *SHAPE), f32)],
        "factors": [plgpu.SMEM((plan.factors,), f32)] if plan.factors else [],
        "grid": GridBarrier.scratch(CONSUMERS, interpret),
    }

    def run(*given: Any) -> None:
        refs = list(given)

        def take(count: int) -> list[Any]:
            taken = refs[:count]
            del refs[:count]
            return taken

        arrays = structure.unflatten(take(len(leaves)))
        counters = take(int(interpret is None))
        by_name = dict.fromkeys(results) | dict(zip(existing, take(len(existing)), strict=True))
        for each in arrays:
            by_name |= each
        allocated = {key: take(len(types)) for key, types in scratch.items()}
        cta(plan, by_name, allocated, counters[0] if counters else None, interpret).run()

    run.__name__ = name
    kernel = grid_kernel(
        run,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in existing.values()],
        [each for types in scratch.values() for each in types],
        warpgroups=CONSUMERS + 1,
        **GridBarrier.launch(plan.ctas, interpret),
        interpret=interpret,
        lowering_semantics=LANE,
    )
    made = kernel(*leaves, *([counter] if interpret is None else []))
    return dict(zip(existing, made, strict=True))


def with_flat_scales(matrices: Any) -> Any:
    """Returns matrices, or None, with scales as the kernel indexes them."""
    if matrices is None:
        return None
    return matrices._replace(scales=tuple(scale.reshape(-1) for scale in matrices.scales))


@dataclasses.dataclass(frozen=True)
class RowCopies(TmaCopy):
    """Bulk copies of consecutive rows' columns to shared memory, one for each row."""

    tiled: bool = False
    swizzle: int | None = None
    contiguous: bool = True
    row_bytes: int = 0  # distance of the rows in shared memory

    def interpret(self, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(self.source.at[self.window], self.target, barrier)

    def _issue_contiguous(
        self,
        source: ir.Value,
        starts: Sequence[Registers],
        target: ir.Value,
        barrier: Any,
        leader: Any,
    ) -> None:
        address, strides = self.address_and_strides(source, starts)
        rows = self.sizes[-2]
        # A loop: unrolled, the copies of all phases were half of the kernel's instructions, and the
        # first execution of an instruction waits for the memory. Weights leave the L2 cache first,
        # because a step reads them once.
        text = f"""{{
            .reg .pred more; .reg .b32 to, left; .reg .b64 from;
            mov.b32 to, $0;
            mov.b64 from, $1;
            mov.b32 left, {rows};
        ROW:
            .pragma "nounroll";
            @$3 {BULK_COPY}.L2::cache_hint [to], [from], {self.bytes // rows}, [$2], $4;
            add.u32 to, to, {self.row_bytes};
            add.u64 from, from, {strides[-2]};
            sub.u32 left, left, 1;
            setp.ne.u32 more, left, 0;
            @more bra ROW;
        }}"""
        mbarrier = llvm.ptrtoint(i32(), barrier.get_ptr())
        policy = const(_EVICT_FIRST, 64)
        operands = shared_address(target), address, mbarrier, leader, policy
        asm(text, "r,l,r,b,l,~{memory}", *operands, effects=True)
