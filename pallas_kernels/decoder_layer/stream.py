"""stream_matvec: weights that a producer streams through a ring, times a few activation rows.

A unit of work is eight output features. It reads two halves of eight matrix rows each: the rows of
gate and of up with the same numbers, or the left and the right columns of the rows of one matrix.
The producer copies a unit in steps of ``Operand.step`` columns, one ring stage each, every row by a
bulk copy of its own. It knows nothing of barriers between phases, so that the next phase's weights
arrive while the consumers wait for the activations that they will meet.

Two consumer warpgroups multiply. Their eight warps share the columns of a stage, in blocks of 64
bytes, and keep the sums of a unit in registers. At the unit's end the sums go to shared memory,
from where one of the warpgroups takes the totals. The activations are in shared memory, one row per
token, and stay there for the phase.

Budget on an H200: a multiprocessor's share of 4.3 TB/s is 16.5 bytes of weights per cycle. They
enter and leave shared memory, and the tokens leave it once per eight rows: another 16.5 bytes per
cycle for bfloat16 weights, 33 for float8, of the 128 that shared memory moves.
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

from pallas_kernels.decoder_layer.formats import (
    SCALE_BLOCK,
    columns_per_element,
    is_integer,
)
from pallas_kernels.decoder_layer.registers import (
    BLOCK_BYTES,
    SUMS,
    SUMS_SHAPE,
    multiply,
    no_sums,
    zero_after,
)
from pallas_kernels.decoder_layer.row_copies import RowCopies
from pallas_kernels.decoder_layer.scales import load_row_scales, load_scales, prefetch_scales
from pallas_kernels.decoder_layer.totals import Float16Sums, load_totals
from pallas_kernels.hopper.ir import (
    SCALAR,
    asm,
    i32,
    inline,
    instruction,
    scalar,
)
from pallas_kernels.hopper.ring import PipelineState, Ring

CONSUMERS = 2
"""Consumer warpgroups."""
ROWS = 8
"""Matrix rows of a half, and output features of a unit."""
MOST_TOKENS = 8

_PADDING = BLOCK_BYTES  # modulo 128: the rows that a warp reads at once are then in different banks
_CONSUMER_BARRIER = 13  # hardware barrier of the consumers; see warpgroup for those in use


@dataclasses.dataclass(frozen=True)
class Operand:
    """Static description of the matrices of a phase."""

    dtype: Any
    """bfloat16, float8_e4m3fn with scales of 128x128 blocks, int8 with a scale for each row, uint8
    for int4 with scales of 1x128 blocks, or in the interpreter float32."""

    columns: int
    """Columns of a half."""

    step: int
    """Columns of a half per ring stage, a divisor of ``columns`` and a multiple of a block's."""

    is_split: bool
    """Whether the halves are the left and the right columns of one matrix. Otherwise they are equal
    columns of two matrices, or of different rows. Halves of integers are never split."""

    @staticmethod
    def of(dtype: Any, columns: int, is_split: bool, most_bytes: int) -> Operand:
        """Returns the operand for rows of ``columns`` columns, with steps of ``most_bytes`` or
        fewer.

        Raises:
          NotImplementedError: a half is not a multiple of 64 bytes.
        """
        itemsize, per_element = jnp.dtype(dtype).itemsize, columns_per_element(dtype)
        assert not (is_split and is_integer(dtype))
        row = columns * itemsize // per_element // (2 if is_split else 1)
        if row % BLOCK_BYTES:
            raise NotImplementedError(
                f"takes rows of a multiple of {BLOCK_BYTES * (2 if is_split else 1)} bytes, got"
                f" {columns} columns of {jnp.dtype(dtype)}"
            )
        blocks = row // BLOCK_BYTES
        fitting = range(most_bytes // BLOCK_BYTES, 0, -1)
        step = next(n for n in fitting if blocks % n == 0) * BLOCK_BYTES
        row, step = (size // itemsize * per_element for size in (row, step))
        return Operand(jnp.dtype(dtype), row, step, is_split)

    @property
    def steps(self) -> int:
        return self.columns // self.step

    @property
    def elements(self) -> int:
        """Stored elements of a row per ring stage."""
        return self.step // columns_per_element(self.dtype)

    @property
    def step_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def block_columns(self) -> int:
        """Columns that a warp multiplies at a time."""
        return BLOCK_BYTES // self.dtype.itemsize * columns_per_element(self.dtype)

    @property
    def is_integer(self) -> bool:
        return is_integer(self.dtype)

    @property
    def group(self) -> int | None:
        """Columns of an integer matrix that share a row's scale, or None if all of them do."""
        return SCALE_BLOCK if columns_per_element(self.dtype) == 2 else None

    @property
    def groups(self) -> int:
        """Scales of a row of an integer matrix."""
        return self.columns // self.group if self.group else 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activation rows in shared memory: bfloat16, or in the interpreter also float32."""

    memory: Any
    """Reference to a flat array."""

    start: jax.Array | int
    """Index of the first row's first number."""

    stride: int
    """Distance of the rows."""

    count: int
    """1 to MOST_TOKENS."""

    factors: Any = None
    """Reference to float32 factors by which results are multiplied, if the rows are in float16 (see
    :mod:`packed`). The weights must be float8 or integers, and integers need it."""

    first_factor: Any = 0
    """Index of the first row's factor."""


@dataclasses.dataclass(frozen=True)
class Half:
    """Half a unit: eight rows of a matrix in global memory."""

    matrix: Any
    """Reference to a matrix, or to a stack of them."""

    row: jax.Array
    """The first row."""

    column: int = 0
    """The first column."""

    index: tuple[jax.Array, ...] = ()
    """Index of the matrix in a stack."""

    scales: Any = None
    """Reference to all float32 scales of a matrix or stack of float8 or integers, flat."""

    scales_start: jax.Array | int = 0
    """Index of the scale of the first row's first column."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """The memory of the ring's stages, which hold weights of several dtypes and widths."""

    dtypes: tuple[Any, ...]
    row_bytes: int
    """Distance of a stage's rows, the same for all dtypes and widths."""
    count: int
    refs: tuple[Any, ...] = ()
    interpret: Any = None

    @classmethod
    def of(
        cls, operands: Sequence[Operand], count: int, interpret: Any, least_bytes: int = 0
    ) -> Stages:
        """Returns stages for the operands, with rows of at least ``least_bytes``."""
        widest = max(least_bytes, *(operand.step_bytes for operand in operands))
        row_bytes = widest + (_PADDING - widest) % 128
        dtypes = tuple(dict.fromkeys(operand.dtype for operand in operands))
        return cls(dtypes, row_bytes, count, (), interpret)

    @property
    def stage_bytes(self) -> int:
        return 2 * ROWS * self.row_bytes

    def scratch(self) -> list[Any]:
        """Returns the scratch types: bytes, or in the interpreter an array for each dtype."""
        if self.interpret is None:
            return [plgpu.SMEM((self.count, 2, ROWS, self.row_bytes), jnp.uint8)]
        return [
            plgpu.SMEM((self.count, 2, ROWS, self.row_bytes // dtype.itemsize), dtype)
            for dtype in self.dtypes
        ]

    def bind(self, refs: Sequence[Any]) -> Stages:
        """Returns the stages in the references that :meth:`scratch` allocated."""
        return dataclasses.replace(self, refs=tuple(refs))

    def half(self, operand: Operand, stage: jax.Array, half: int) -> Any:
        """Returns the reference to half a stage, of ``operand.step`` columns."""
        if self.interpret is None:
            return self.refs[0].at[stage, half]
        ref = self.refs[self.dtypes.index(operand.dtype)]
        return ref.at[stage, half, :, pl.ds(0, operand.elements)]


@dataclasses.dataclass(frozen=True)
class Stream:
    """The ring, and what producer and consumers do with it."""

    ring: Ring
    stages: Stages

    def produce(
        self, operand: Operand, halves: tuple[Half, Half], state: PipelineState,
        allow: Callable[[PipelineState], None] = lambda state: None,
    ) -> PipelineState:  # fmt: skip
        """Copies the weights of a unit. One warp of the producer calls it.

        The unit's scales only go to the L2 cache: a row of them may not be aligned for a copy. The
        consumers load them a unit ahead, which is too late for what is in memory.

        Args:
          allow: called before each step's copies, to delay them.
        """

        def fill(i: jax.Array, state: PipelineState, carry: None) -> None:
            copies = []
            for n, half in enumerate(halves):
                columns = pl.ds(half.column + i * operand.elements, operand.elements)
                window = (*half.index, pl.ds(half.row, ROWS), columns)
                target = self.stages.half(operand, state.stage, n)
                copies.append(
                    RowCopies(
                        half.matrix, window, target, False, None, True, None, self.stages.row_bytes
                    )
                )
            allow(state)
            self.ring.fill(state, copies)

        for half in halves:
            if operand.dtype.itemsize == 1:
                start, count = half.scales_start, ROWS * operand.groups
                if not operand.is_integer:
                    start += half.column // SCALE_BLOCK
                    count = -(-operand.columns // SCALE_BLOCK)
                prefetch_scales(half.scales, start, count, self.stages.interpret)
        return self.ring.loop(self.steps(operand.steps), fill, state, None)[0]

    def steps(self, count: int) -> Any:
        """Returns the steps of a unit, as a number that compilers do not know.

        They would unroll the loops, and LLVM made 18 copies of six loops.
        """
        if self.stages.interpret is not None:
            return count

        @inline(returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
        def steps() -> Any:
            return scalar(asm(f"mov.b32 $0, {count};", "=r", result=i32(), effects=True))

        return steps()

    def scales(self, operand: Operand, halves: tuple[Half, Half]) -> list[Any]:
        """Loads the scales of a unit, for :meth:`consume`, from the L2 cache: load them early.

        Returns:
          Numbers in the lanes' registers for each half, or of integers for each stage. Nothing of
          matrices without scales.
        """
        if operand.dtype.itemsize != 1:
            return []
        if operand.is_integer:
            return load_row_scales(operand, halves, self.stages.interpret)
        return [
            load_scales(
                half.scales,
                jnp.asarray(half.scales_start, jnp.int32),
                half.column,
                operand.columns,
                self.stages.interpret,
            )
            for half in halves
        ]

    def consume(
        self, operand: Operand, rows: Rows, scales: Sequence[Any], state: PipelineState
    ) -> tuple[PipelineState, tuple[jax.Array, jax.Array]]:
        """Multiplies a unit's weights with the activation rows. Every consumer warpgroup calls it.

        Args:
          scales: from :meth:`scales`.

        Returns:
          The next state, and this warpgroup's sums of both halves, for :class:`Totals`.
        """

        def add(i: jax.Array, state: PipelineState, sums: Any) -> Any:
            self.ring.wait_full(state)
            halves = [self.stages.half(operand, state.stage, n) for n in range(2)]
            sums = multiply(operand, halves, rows, i, scales, sums, self.stages.interpret)
            read = state.stage + zero_after(sums, SUMS, self.stages.interpret)
            self.ring.release(state._replace(stage=read))
            return sums

        first = (no_sums(), no_sums())
        return self.ring.loop(self.steps(operand.steps), add, state, first)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Shared memory in which the consumer warpgroups' sums become the totals of a unit."""

    memory: Any
    """Reference that :meth:`scratch` allocates."""

    barrier: Any
    """The interpreter's barrier of the consumers, or None."""

    interpret: Any

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        """Returns the scratch types: two buffers, and in the interpreter the consumers' barrier."""
        sums = plgpu.SMEM((2, CONSUMERS, 2, *SUMS_SHAPE), jnp.float32)
        return [sums, *([plgpu.Barrier(num_arrivals=CONSUMERS)] if interpret is not None else [])]

    @classmethod
    def of(cls, refs: Sequence[Any], interpret: Any) -> Totals:
        """Returns the totals in the references that :meth:`scratch` allocated."""
        return cls(refs[0], None if interpret is None else refs[1], interpret)

    def meet(self) -> None:
        """Synchronises the consumers' threads. They see each other's writes to all memory."""
        if self.interpret is not None:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
            return
        inline()(lambda: instruction(f"bar.sync {_CONSUMER_BARRIER}, {128 * CONSUMERS};"))()

    def exchange(self, number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> None:
        """Stores this warpgroup's sums, and waits for those of the others.

        Args:
          number: number of exchanges before this one. Consecutive ones use different buffers, so
            that one meeting per exchange suffices.
        """
        for half, values in enumerate(sums):
            self.memory[lax.rem(number, 2), lax.axis_index("wg"), half] = values
        self.meet()

    def load(
        self, number: jax.Array, tokens: int, float16: Float16Sums | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the totals of both halves after exchange ``number``, see :func:`load_totals`."""
        return load_totals(self.memory.at[lax.rem(number, 2)], tokens, self.interpret, float16)


def count_units(program: jax.Array, units: int, programs: int) -> jax.Array:
    """Returns how many of ``units`` units a program has. Unit u is of program u % programs."""
    return lax.div(units - program + (programs - 1), jnp.int32(programs))


def count_most(units: int, programs: int) -> int:
    """Returns the most units that a program has."""
    return -(-units // programs)
