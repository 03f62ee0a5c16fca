"""The static plan of the kernel: its phases, the pieces of W_UK, and how memory is divided."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.decoder_layer.formats import is_integer
from pallas_kernels.decoder_layer.plan import check_packed, padded
from pallas_kernels.decoder_layer.registers import SUMS_SHAPE
from pallas_kernels.decoder_layer.stream import CONSUMERS, MOST_TOKENS, ROWS, Operand, Stages

PhaseName = Literal["q_a_proj", "q_proj", "kv_a_proj", "w_uk", "latents"]

_STEP_BYTES = 1024  # of a matrix row per stage, which then has 16 KiB
_MOST_STAGES, _FEWEST_STAGES = 12, 3
_SHARED_MEMORY = 227 * 1024  # bytes per thread block
_RESERVED = 8 * 1024  # barriers, alignment of buffers, norms
_WARPGROUP = 128
_HEAD = 64
_PIECE_WIDTHS = 512, 256, 128, 64


@dataclasses.dataclass(frozen=True)
class Phase:
    """Units of work that are distributed among the programs."""

    name: PhaseName
    units: int
    """Some output features of a projection, a piece of W_UK, or a token's latent."""
    before: int
    """Units of the phases before. The first unit is of the next program, modulo their number."""
    barriers: int = 0
    """Grid barriers before this phase."""
    operand: Operand | None = None
    """The matrix of a projection."""
    rows: int = ROWS
    """Output features of a unit of a projection: if the operand's halves are not split, each has
    eight of them."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of W_UK: all N rows of a head, and some of its C columns.

    A ring stage has some of a piece's rows: the first half of them in each half of the stage.
    """

    heads: int
    nope: int
    rank: int
    width: int
    """Columns of a piece."""
    tokens: int
    dtype: Any

    @staticmethod
    def of(heads: int, nope: int, rank: int, tokens: int, dtype: Any, programs: int) -> Pieces:
        """Returns the pieces that give the program with the most columns as few as possible."""

        def most_columns(pieces: Pieces) -> int:
            return -(-heads * pieces.per_head // programs) * pieces.width

        widths = [width for width in _PIECE_WIDTHS if rank % width == 0]
        pieces = [Pieces(heads, nope, rank, each, tokens, jnp.dtype(dtype)) for each in widths]
        return min((each for each in pieces if nope % each.rows == 0), key=most_columns)

    @property
    def per_head(self) -> int:
        return self.rank // self.width

    @property
    def query_stride(self) -> int:
        """Distance of the heads' queries. A warpgroup copies them to shared memory as whole
        vectors, together with what fills up the distance."""
        return -(-self.nope // _WARPGROUP) * _WARPGROUP

    @property
    def rows(self) -> int:
        """Rows per stage, which then has 16 KiB."""
        return 2 * ROWS * _STEP_BYTES // (self.width * self.dtype.itemsize)

    @property
    def steps(self) -> int:
        """Stages per piece."""
        return self.nope // self.rows

    @property
    def groups(self) -> int:
        """Groups of 64 columns. Each is of other warps."""
        return self.width // 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings that change the speed, not the result."""

    programs: int
    """Thread blocks, at most one per multiprocessor."""
    ahead: Literal["always", "arrived"] | None = None
    """The time from which weights of phases after a grid barrier are copied: always, or only when
    this program has arrived at the barrier, because arriving takes longer while copies are in
    flight. None means always if they fit the ring together with those before the barrier: they have
    then arrived when the program does."""
    packed: bool = False
    """Whether the rows that meet float8 or integer projections are in float16, see
    :mod:`pallas_kernels.decoder_layer.packed`. Integers need it."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and settings. :meth:`of` makes and checks it."""

    tokens: int
    width: int
    """D, the hidden size."""
    q_rank: int
    """Q, or 0 without q_a_proj."""
    rope: int
    pieces: Pieces
    phases: tuple[Phase, ...]
    eps: float
    latent_eps: float
    dtype: Any
    config: Config
    stages: Stages

    @staticmethod
    def of(
        tokens: int, width: int, q_rank: int, rope: int, w_uk: tuple[int, int, int],
        weight_dtypes: dict[PhaseName, Any], eps: float, latent_eps: float, dtype: Any,
        config: Config, interpret: Any,
    ) -> Plan:  # fmt: skip
        """Returns the plan.

        Raises:
          NotImplementedError: the kernel does not support these sizes.
        """
        H, N, C = w_uk
        if not 1 <= tokens <= MOST_TOKENS:
            raise NotImplementedError(f"takes 1 to {MOST_TOKENS} tokens, got {tokens}")
        multiples = dict.fromkeys(("hidden", "q_lora", "latent"), _WARPGROUP) | {"head": _HEAD}
        for (name, multiple), size in zip(multiples.items(), (width, q_rank, C, N), strict=True):
            if size % multiple:
                raise NotImplementedError(
                    f"takes {name} widths of a multiple of {multiple}, got {size}"
                )
        if rope % ROWS:
            raise NotImplementedError(f"takes a rope width of a multiple of {ROWS}, got {rope}")
        if config.packed:
            check_packed(tokens, dtype, *weight_dtypes.values())
        elif any(map(is_integer, weight_dtypes.values())):
            raise NotImplementedError("takes int8 and int4 projections only packed")
        pieces = Pieces.of(H, N, C, tokens, dtype, config.programs)
        phases = _phases(tokens, width, q_rank, rope, pieces, weight_dtypes)
        operands = [phase.operand for phase in phases if phase.operand is not None]
        plan = Plan(
            tokens, width, q_rank, rope, pieces, phases, eps, latent_eps, jnp.dtype(dtype), config,
            Stages.of(operands, 0, interpret, _STEP_BYTES),
        )  # fmt: skip
        used = plan.used_bytes
        count = min((_SHARED_MEMORY - used) // plan.stages.stage_bytes, _MOST_STAGES)
        if count < _FEWEST_STAGES:
            raise NotImplementedError(
                f"takes {_FEWEST_STAGES} ring stages of {plan.stages.stage_bytes} bytes in addition"
                f" to {used} bytes for {tokens} tokens, got room for {max(count, 0)}"
            )
        plan = dataclasses.replace(plan, stages=dataclasses.replace(plan.stages, count=count))
        if config.ahead is not None:
            return plan
        ahead = "always" if plan.most_stages <= count else "arrived"
        return dataclasses.replace(plan, config=dataclasses.replace(config, ahead=ahead))

    @property
    def weight_dtype(self) -> Any:
        """The dtype of the projections, if rows are packed."""
        operands = [phase.operand for phase in self.phases if phase.operand is not None]
        return operands[0].dtype

    @property
    def used_bytes(self) -> int:
        """Bytes of shared memory, apart from the ring's stages."""
        sums = 2 * CONSUMERS * 2 * 4 * SUMS_SHAPE[0] * SUMS_SHAPE[1]
        queries = 4 * self.tokens * self.pieces.query_stride
        return _RESERVED + 2 * self.activations + sums + queries + 4 * self.partials

    @property
    def most_stages(self) -> int:
        """Ring stages that the program with the most work fills."""
        most = 0
        for program in range(self.config.programs):
            steps = 0
            for phase in self.phases:
                units = len(range(self.number(phase, program), phase.units, self.config.programs))
                steps += units * self.steps(phase)
            most = max(most, steps)
        return most

    def number(self, phase: Phase, program: Any) -> Any:
        """Returns a program's first unit in a phase, if there are so many."""
        return (program + -phase.before % self.config.programs) % self.config.programs

    def steps(self, phase: Phase) -> int:
        """Returns the ring stages of a unit."""
        if phase.operand is not None:
            return phase.operand.steps
        return self.pieces.steps if phase.name == "w_uk" else 0

    @property
    def activations(self) -> int:
        """Numbers in the activations' memory."""
        return self.tokens * max(self.stride(self.width), self.stride(self.q_rank))

    @property
    def partials(self) -> int:
        """Numbers in the memory of W_UK's sums: 64 per warp and token."""
        return 4 * CONSUMERS * 64 * self.tokens

    def stride(self, columns: int) -> int:
        """Returns the distance of activation rows in shared memory.

        The tokens that a quarter of a warp reads at once are then in different banks.
        """
        operands = [phase.operand for phase in self.phases if phase.operand is not None]
        return padded(columns, *(operand.dtype for operand in operands))


def _phases(
    tokens: int, width: int, q_rank: int, rope: int, pieces: Pieces,
    weight_dtypes: dict[PhaseName, Any],
) -> tuple[Phase, ...]:  # fmt: skip
    """Returns the phases in the order in which their weights are read."""
    phases: list[Phase] = []

    def add(name: PhaseName, units: int, barriers: int) -> None:
        before = sum(phase.units for phase in phases)
        phases.append(Phase(name, units, before, barriers))

    def add_projection(name: PhaseName, features: int, columns: int, barriers: int) -> None:
        dtype, before = weight_dtypes[name], sum(phase.units for phase in phases)
        rows = 2 * ROWS if is_integer(dtype) else ROWS
        if features % rows:
            raise NotImplementedError(
                f"takes {name} of {jnp.dtype(dtype)} with a multiple of {rows} rows, got {features}"
            )
        operand = Operand.of(dtype, columns, not is_integer(dtype), _STEP_BYTES)
        phases.append(Phase(name, features // rows, before, barriers, operand, rows))

    queries = pieces.heads * (pieces.nope + rope)
    latents = pieces.rank + rope
    if q_rank:
        add_projection("q_a_proj", q_rank, width, 0)
        add_projection("kv_a_proj", latents, width, 0)
        add_projection("q_proj", queries, q_rank, 1)
    else:
        add_projection("q_proj", queries, width, 0)
        add_projection("kv_a_proj", latents, width, 0)
    last = 2 if q_rank else 1
    add("w_uk", pieces.heads * pieces.per_head, last)
    add("latents", tokens, last)
    return tuple(phases)
