"""The static plan of the feed-forward kernel: its phases, and how shared memory is divided."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.decoder_layer.formats import is_integer
from pallas_kernels.decoder_layer.registers import MOST_SPLIT_TOKENS, SUMS_SHAPE
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    MOST_TOKENS,
    ROWS,
    Operand,
    Stages,
    count_most,
)
from pallas_kernels.route.reference import Rule

PhaseName = Literal["w_uv", "o_proj", "router", "gate_up", "down", "routed_gate_up", "routed_down"]

Entry = Literal["latents", "rows", "norm", "choice and rows"]

_SHARED_MEMORY = 227 * 1024  # bytes per thread block
_RESERVED = 8 * 1024  # barriers, alignment of buffers, norms
_MOST_STAGES, _FEWEST_STAGES = 12, 3
_STEP_BYTES = 1024  # of a matrix row per stage, which then has 16 KiB
_EXPERT_ROWS = 20 * 1024  # least numbers of routed experts' rows that fit at the same time
_WARPGROUP = 128
PART_COLUMNS = CONSUMERS * _WARPGROUP
"""Attention's parts have a multiple of this number of columns: each warpgroup has half of them."""
_MOST_EXPERTS, _MOST_CHOICES = 384, 16


@dataclasses.dataclass(frozen=True)
class Phase:
    """Matrices that all programs multiply with the same kind of activations.

    A phase's units are numbered matrix by matrix. Program p has the units p, p + programs, and so
    on, after ``shift`` has been added to p. In w_uv it has consecutive units, of few heads.

    The halves of a unit are those of its operand. If that is not split, and the phase has one
    matrix instead of gate and up, they are eight rows each.
    """

    name: PhaseName
    operand: Operand
    units: int
    """Units of a matrix, or of a gate and its up."""
    matrices: int = 1
    """Matrices, or pairs of gate and up: 1, one per head, or one per pair of a token and an
    expert."""
    barriers: int = 0
    """Grid barriers before this phase's activations."""
    shift: int = 0
    rows: int = ROWS
    """Output features of a unit."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings that change the speed, not the result."""

    programs: int
    """Thread blocks, at most one per multiprocessor."""
    stages: int | None = None
    """Number of stages of the ring buffer. None means as many as fit, at most 12."""
    packed: bool = False
    """Whether the rows that meet float8 or integer weights are in float16, see :mod:`packed`. It
    takes fewer instructions, and integers need it."""
    timed: bool = False
    """Whether each program records its clock at :attr:`Plan.events`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and settings. :meth:`of` makes and checks it."""

    tokens: int
    width: int
    """D, the hidden size."""
    attention: int
    """Width of all heads' values together, 0 without the output projection."""
    heads: int
    """Heads whose outputs are latents, 0 without W_UV."""
    latent: int
    """C, the width of a head's latents, 0 without W_UV."""
    sequences: int
    """Sequences whose attention's output is in parts, 0 if it has been merged."""
    ffn: int
    """Hidden width of the dense or shared MLP, 0 without one."""
    expert_ffn: int
    """Hidden width of a routed expert, 0 in a dense layer."""
    experts: int
    rule: Rule | None
    eps: float
    dtype: Any
    """Dtype of the activations."""
    weight_dtype: Any
    phases: tuple[Phase, ...]
    config: Config
    stages: Stages

    @staticmethod
    def of(
        tokens: int, width: int, attention: int, heads: int, latent: int, sequences: int, ffn: int,
        expert_ffn: int, experts: int, rule: Rule | None, eps: float, dtype: Any,
        weight_dtype: Any, router_dtype: Any, config: Config, interpret: Any,
    ) -> Plan:  # fmt: skip
        """Returns the plan.

        Raises:
          NotImplementedError: the kernel does not support these sizes.
        """
        if not 1 <= tokens <= MOST_TOKENS:
            raise NotImplementedError(f"takes 1 to {MOST_TOKENS} tokens, got {tokens}")
        widths = {"hidden": width, "attention": attention, "latent": latent}
        widths |= {"dense or shared": ffn}
        for name, size in (widths | {"expert": expert_ffn}).items():
            if size % _WARPGROUP:
                raise NotImplementedError(
                    f"takes {name} widths of a multiple of {_WARPGROUP}, got {size}"
                )
        if rule is not None:
            _check_rule(rule, experts)
        if config.packed:
            check_packed(tokens, dtype, weight_dtype)
        if is_integer(weight_dtype):
            _check_integers(width, config)
        if heads and attention % (2 * ROWS * heads):
            raise NotImplementedError(
                f"takes head widths of a multiple of {2 * ROWS}, got {attention / heads:g}"
            )
        if sequences and latent % PART_COLUMNS:
            raise NotImplementedError(
                f"takes parts with a multiple of {PART_COLUMNS} columns, got {latent}"
            )
        phases = _phases(
            tokens, width, attention, ffn, expert_ffn, experts, rule, weight_dtype, router_dtype
        )
        if heads:
            phases = _with_w_uv(phases, heads, attention // heads, latent, dtype)
        operands = [phase.operand for phase in phases]
        plan = Plan(
            tokens, width, attention, heads, latent, sequences, ffn, expert_ffn, experts, rule,
            eps, jnp.dtype(dtype), jnp.dtype(weight_dtype), phases, config,
            Stages.of(operands, 0, interpret),
        )  # fmt: skip
        return dataclasses.replace(plan, stages=Stages.of(operands, plan._ring_stages(), interpret))

    def _ring_stages(self) -> int:
        """Returns the number of stages that fit in addition to everything else."""
        used = self.activations * 2 + _RESERVED
        used += 2 * CONSUMERS * 2 * 4 * SUMS_SHAPE[0] * SUMS_SHAPE[1]
        used += 4 * self.own_outputs * self.output_blocks * _WARPGROUP + 4 * self.factors
        fitting = (_SHARED_MEMORY - used) // self.stages.stage_bytes
        wanted = self.config.stages or min(fitting, _MOST_STAGES)
        if not _FEWEST_STAGES <= wanted <= fitting:
            raise NotImplementedError(
                f"takes {_FEWEST_STAGES} to {max(fitting, 0)} ring stages of"
                f" {self.stages.stage_bytes} bytes in addition to {used} bytes for"
                f" {self.tokens} tokens, got {wanted}"
            )
        return wanted

    @property
    def choices(self) -> int:
        """Pairs of a token and an expert that it chose."""
        return 0 if self.rule is None else self.tokens * self.rule.num_experts_per_tok

    @property
    def own_outputs(self) -> int:
        """The most units of a D-wide output that a program has."""
        return count_most(self.width // self.output_rows, self.config.programs)

    @property
    def output_rows(self) -> int:
        """Output features of a unit of a D-wide output."""
        return self.phases[-1].rows

    @property
    def output_blocks(self) -> int:
        """Blocks of eight output features of such a unit."""
        return self.output_rows // ROWS

    @property
    def events(self) -> tuple[str, ...]:
        """Names of what the first consumer warpgroup has completed, in order."""
        events, passed = ["start", self.entry(0)], 0
        for phase in self.phases:
            if phase.barriers > passed:
                passed = phase.barriers
                events += [f"barrier {passed}", self.entry(passed)]
            events.append(phase.name)
        return (*filter(None, events), "out")

    @property
    def stamps(self) -> int:
        """Numbers that a timed program stores: clocks at the events, nanoseconds at both ends."""
        return len(self.events) + 2

    def entry(self, passed: int) -> Entry | None:
        """Returns what the consumers do after so many barriers, before they multiply."""
        entries: list[Entry | None] = ["latents", "rows", "norm", "choice and rows", None]
        return entries[passed + (not self.attention) + (not self.heads)]

    @property
    def signals(self) -> int:
        """Signals to the producer: that the experts are chosen, and one for each grid barrier."""
        return 1 + max(3, self.phases[-1].barriers)

    @property
    def own_units(self) -> int:
        """The most units of w_uv that a program has. They are consecutive."""
        phase = self.phases[0]
        return count_most(phase.units * phase.matrices, self.config.programs)

    @property
    def own_heads(self) -> int:
        """The most heads that a program's units of w_uv belong to."""
        if not self.heads:
            return 0
        own, units = self.own_units, self.phases[0].units
        fits = own % units == 0 or units % own == 0
        return min(self.heads, -(-own // units) + (not fits))

    def stride(self, columns: int) -> int:
        """Returns the distance of activation rows in shared memory.

        The tokens that a quarter of a warp reads at once are then in different banks: a thread
        reads 16 bytes per block of bfloat16 weights, and 32 bytes of float8 weights. What it reads
        for integers is next to the other threads' 16 bytes.
        """
        return padded(columns, self.weight_dtype)

    @property
    def ffn_start(self) -> int:
        """Index of the dense or shared MLP's hidden rows in the activations' memory."""
        return self.tokens * self.stride(self.width)

    @property
    def router_start(self) -> int:
        """Index of the router's rows, if those of the same numbers are in float16."""
        return self.ffn_start + self.tokens * self.stride(self.ffn) * bool(self.ffn)

    @property
    def ffn_factor(self) -> int:
        """Index of the factor of the MLP's first hidden row, after those of the tokens' rows."""
        return self.tokens

    @property
    def routed_factor(self) -> int:
        """Index of the factor of the first routed expert's hidden row."""
        return 2 * self.tokens

    @property
    def factors(self) -> int:
        """Factors of rows in float16, 0 if no rows are."""
        return (self.routed_factor + self.batch) * self.config.packed

    @property
    def batch(self) -> int:
        """Hidden rows of routed experts that are in shared memory at the same time."""
        if not self.choices:
            return 0
        available = max(self._early, _EXPERT_ROWS)
        return min(self.choices, max(1, available // self.stride(self.expert_ffn)))

    @property
    def activations(self) -> int:
        """Numbers in the activations' memory. Routed experts' rows replace the earlier ones."""
        late = self.batch * self.stride(self.expert_ffn) if self.choices else 0
        return max(self._early, late)

    @property
    def _early(self) -> int:
        rows = self.router_start
        if self.config.packed and self.rule is not None:
            rows += self.tokens * self.stride(self.width)
        latents = self.own_heads * self.stride(self.latent)
        attention = self.stride(self.attention) * bool(self.attention)
        return max(rows, self.tokens * max(attention, latents))


def padded(columns: int, *weight_dtypes: Any) -> int:
    """Returns the distance of activation rows of N columns, see :meth:`Plan.stride`."""
    is_float8 = any(dtype.itemsize == 1 and not is_integer(dtype) for dtype in weight_dtypes)
    return columns + ((16 if is_float8 else 64) - 2 * columns) % 128 // 2


def packs(tokens: int, dtype: Any, *weight_dtypes: Any) -> bool:
    """Returns whether rows should be packed: for integers always, for float8 if possible."""
    if any(map(is_integer, weight_dtypes)):
        return True
    try:
        check_packed(tokens, dtype, *weight_dtypes)
    except NotImplementedError:
        return False
    return True


def check_packed(tokens: int, dtype: Any, *weight_dtypes: Any) -> None:
    """Raises NotImplementedError if rows of this dtype cannot be packed for these matrices."""
    dtype, kinds = jnp.dtype(dtype), {jnp.dtype(each) for each in weight_dtypes}
    float8 = jnp.dtype(jnp.float8_e4m3fn)
    are_integers = len(kinds) == 1 and all(map(is_integer, kinds))
    if dtype != jnp.dtype(jnp.bfloat16) or not (kinds == {float8} or are_integers):
        raise NotImplementedError(
            f"packs bfloat16 rows for matrices of float8_e4m3fn, int8 or int4, got {dtype} and"
            f" {', '.join(sorted(map(str, kinds)))}"
        )
    if tokens > MOST_SPLIT_TOKENS and not are_integers:
        raise NotImplementedError(
            f"packs 1 to {MOST_SPLIT_TOKENS} tokens for float8_e4m3fn matrices, got {tokens}"
        )


def _check_integers(width: int, config: Config) -> None:
    if not config.packed:
        raise NotImplementedError("takes int8 and int4 matrices only packed")
    assert width % (2 * ROWS) == 0


def _check_rule(rule: Rule, experts: int) -> None:
    if experts % ROWS or not 0 < experts <= _MOST_EXPERTS:
        raise NotImplementedError(
            f"takes a multiple of {ROWS} experts, {_MOST_EXPERTS} at most, got {experts}"
        )
    if rule.num_experts_per_tok > _MOST_CHOICES:
        raise NotImplementedError(
            f"takes {_MOST_CHOICES} experts per token at most, got {rule.num_experts_per_tok}"
        )


def _phases(
    tokens: int, width: int, attention: int, ffn: int, expert_ffn: int, experts: int,
    rule: Rule | None, weight_dtype: Any, router_dtype: Any,
) -> tuple[Phase, ...]:  # fmt: skip
    """Returns the phases in the order in which their weights are read.

    The shared experts' down projection is between both barriers' matrices: its weights arrive while
    the programs choose the routed experts, whose weights nobody can copy before.
    """

    def operand(dtype: Any, columns: int, *, is_split: bool) -> Operand:
        return Operand.of(dtype, columns, is_split, _STEP_BYTES)

    def of_output(columns: int) -> Operand:
        return operand(weight_dtype, columns, is_split=not is_integer(weight_dtype))

    # A row of integers is short, and half of it may not have whole groups.
    rows = 2 * ROWS if is_integer(weight_dtype) else ROWS
    phases: list[Phase] = []
    router_units = 0
    before = int(bool(attention))  # barriers before the norm
    if attention:
        phases.append(Phase("o_proj", of_output(attention), width // rows, rows=rows))
    if rule is not None:
        router_units = experts // ROWS
        router = operand(router_dtype, width, is_split=True)
        phases.append(Phase("router", router, router_units, barriers=before))
    if ffn:
        gate_up = operand(weight_dtype, width, is_split=False)
        # Programs without a unit of the router get the first ones here.
        phases.append(Phase("gate_up", gate_up, ffn // ROWS, barriers=before, shift=-router_units))
        phases.append(Phase("down", of_output(ffn), width // rows, barriers=before + 1, rows=rows))
    if rule is not None:
        gate_up = operand(weight_dtype, width, is_split=False)
        down = of_output(expert_ffn)
        pairs = tokens * rule.num_experts_per_tok
        phases += [
            Phase("routed_gate_up", gate_up, expert_ffn // ROWS, pairs, barriers=before + 1),
            Phase("routed_down", down, width // rows, pairs, barriers=before + 2, rows=rows),
        ]
    return tuple(phases)


def _with_w_uv(
    phases: tuple[Phase, ...], heads: int, head_width: int, latent: int, dtype: Any
) -> tuple[Phase, ...]:
    """Returns the phases after W_UV, which has one more barrier behind it.

    A unit is 16 of a head's values: its halves are rows of the same matrix.
    """
    operand = Operand.of(dtype, latent, False, _STEP_BYTES)
    later = [dataclasses.replace(each, barriers=each.barriers + 1) for each in phases]
    return Phase("w_uv", operand, head_width // (2 * ROWS), heads, rows=2 * ROWS), *later
