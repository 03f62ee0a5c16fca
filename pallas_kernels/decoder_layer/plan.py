"""The static plan of the feed-forward kernel: its phases, and how shared memory is divided."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.decoder_layer.reference import is_integer
from pallas_kernels.decoder_layer.registers import ROWS, Operand
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    STEP_BYTES,
    WARPGROUP,
    Phase,
    Stages,
    check,
    padded,
)
from pallas_kernels.route.reference import Rule

PART_COLUMNS = CONSUMERS * WARPGROUP
"""Attention's parts have a multiple of this number of columns: each warpgroup has half of them."""

_EXPERT_ROWS = 20 * 1024  # least numbers of routed experts' rows that fit at the same time
_MOST_EXPERTS, _MOST_CHOICES = 384, 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the layer, and what follows from them. :meth:`of` makes and checks it. The
    activations' memory has, one after the other, the rows that gate and up need (the norm), the
    hidden rows of the MLP, and the router's rows if the norm's are in float16. Earlier phases'
    rows, and later those of the routed experts, take the place of all of them."""

    ctas: int
    tokens: int
    width: int  # D, the hidden size
    attention: int  # width of all heads' values together
    heads: int  # heads whose outputs are latents, 0 without W_UV
    latent: int  # C, the width of a head's latents, 0 without W_UV
    sequences: int  # sequences whose attention's output is in parts, 0 if it has been merged
    ffn: int  # hidden width of the dense or shared MLP, 0 without one
    expert_ffn: int  # hidden width of a routed expert, 0 in a dense layer
    experts: int
    rule: Rule | None
    eps: float
    dtype: Any  # dtype of the activations
    weight_dtype: Any  # dtype of all matrices but the router and W_UV
    phases: tuple[Phase, ...] = ()  # in the order in which their weights are read
    stages: Any = None

    @staticmethod
    def of(*, interpret: Any, **sizes: Any) -> Plan:
        """Returns the plan for ``sizes``, the fields up to ``weight_dtype``, or raises
        NotImplementedError."""
        plan = Plan(**sizes)
        widths = {"hidden": plan.width, "attention": plan.attention, "latent": plan.latent}
        widths |= {"dense or shared": plan.ffn, "expert": plan.expert_ffn}
        multiples = {name: (width, WARPGROUP) for name, width in widths.items()}
        multiples["head"] = plan.attention // (plan.heads or 1), 2 * ROWS if plan.heads else 1
        check(plan.tokens, plan.dtype, plan.weight_dtype, multiples)
        if plan.rule is not None:
            _check_rule(plan.rule, plan.experts)
        if plan.sequences and plan.latent % PART_COLUMNS:
            raise NotImplementedError(
                f"takes parts with a multiple of {PART_COLUMNS} columns, got {plan.latent}"
            )
        phases = _phases(plan)
        plan = dataclasses.replace(plan, phases=phases, stages=Stages.of(phases, interpret))
        used = 2 * plan.activations + 4 * plan.total_blocks * WARPGROUP + 4 * plan.factors
        return dataclasses.replace(plan, stages=plan.stages.fitting(used, plan.tokens))

    @property
    def choices(self) -> int:
        """Pairs of a token and an expert that it chose."""
        return 0 if self.rule is None else self.tokens * self.rule.num_experts_per_tok

    @property
    def output_rows(self) -> int:
        """Output features of a unit of a D-wide output."""
        return 2 * ROWS if is_integer(self.weight_dtype) else ROWS

    @property
    def output_blocks(self) -> int:
        """Blocks of eight output features of such a unit."""
        return self.output_rows // ROWS

    @property
    def total_blocks(self) -> int:
        """The most blocks of such units that a CTA has. Their sums stay in shared memory."""
        return -(-(self.width // self.output_rows) // self.ctas) * self.output_blocks

    @property
    def signals(self) -> int:
        """Signals to the producer: that the experts are chosen, and one for each grid barrier."""
        return 1 + max(3, self.phases[-1].barriers)

    @property
    def w_uv_units(self) -> int:
        """The most units of w_uv that a CTA has. They are consecutive."""
        phase = self.phases[0]
        return -(-phase.units * phase.matrices // self.ctas)

    @property
    def w_uv_heads(self) -> int:
        """The most heads that a CTA's units of w_uv belong to."""
        if not self.heads:
            return 0
        most, units = self.w_uv_units, self.phases[0].units
        fits = most % units == 0 or units % most == 0
        return min(self.heads, -(-most // units) + (not fits))

    def stride(self, columns: int) -> int:
        """Returns the distance of activation rows in shared memory, see :func:`padded`."""
        return padded(columns, self.weight_dtype)

    @property
    def is_float16(self) -> bool:
        """Whether activation rows for matrices of ``weight_dtype`` are in float16."""
        return self.weight_dtype.itemsize == 1

    @property
    def ffn_start(self) -> int:
        """Index of the dense or shared MLP's hidden rows in the activations' memory."""
        return self.tokens * self.stride(self.width)

    @property
    def router_start(self) -> int:
        """Index of the router's rows, if the norm's rows are in float16."""
        return self.ffn_start + self.tokens * self.stride(self.ffn) * bool(self.ffn)

    @property
    def routed_factor(self) -> int:
        """Index of the factor of the first routed expert's hidden row, after those of the tokens'
        rows and of the MLP's hidden rows."""
        return 2 * self.tokens

    @property
    def factors(self) -> int:
        """Factors of rows in float16, 0 if no rows are."""
        return (self.routed_factor + self.batch) * self.is_float16

    @property
    def batch(self) -> int:
        """Hidden rows of routed experts that are in shared memory at the same time."""
        if not self.choices:
            return 0
        available = max(self._early, _EXPERT_ROWS)
        return min(self.choices, max(1, available // self.stride(self.expert_ffn)))

    @property
    def activations(self) -> int:
        late = self.batch * self.stride(self.expert_ffn) if self.choices else 0
        return max(self._early, late)

    @property
    def _early(self) -> int:
        """Numbers that the phases before the routed experts' downs need."""
        rows = self.router_start
        if self.is_float16 and self.rule is not None:
            rows += self.tokens * self.stride(self.width)
        latents = self.w_uv_heads * self.stride(self.latent)
        return max(rows, self.tokens * max(self.stride(self.attention), latents))


def _check_rule(rule: Rule, experts: int) -> None:
    if experts % ROWS or not 0 < experts <= _MOST_EXPERTS:
        raise NotImplementedError(
            f"takes a multiple of {ROWS} experts, {_MOST_EXPERTS} at most, got {experts}"
        )
    if rule.num_experts_per_tok > _MOST_CHOICES:
        raise NotImplementedError(
            f"takes {_MOST_CHOICES} experts per token at most, got {rule.num_experts_per_tok}"
        )


def _phases(plan: Plan) -> tuple[Phase, ...]:
    """Returns the phases in the order in which their weights are read. Those of the shared experts'
    down arrive while the CTAs choose the routed experts, whose weights nobody can copy before."""
    D, weights, rows = plan.width, plan.weight_dtype, plan.output_rows
    phases: list[Phase] = []
    barriers, shift = 0, None

    def add(name: str, features: int, operand: Operand, rows: int = ROWS, **more: Any) -> None:
        phases.append(Phase(name, features // rows, operand, barriers=barriers, rows=rows, **more))

    def of_output(columns: int) -> Operand:
        # A row of integers is short, and half of it may not have whole groups.
        return Operand.of(weights, columns, not is_integer(weights), STEP_BYTES)

    if plan.heads:
        w_uv = Operand.of(plan.dtype, plan.latent, False, STEP_BYTES)
        add("w_uv", plan.attention // plan.heads, w_uv, 2 * ROWS, matrices=plan.heads)
        barriers += 1
    add("o_proj", D, of_output(plan.attention), rows)
    barriers += 1
    gate_up = Operand.of(weights, D, False, STEP_BYTES)
    if plan.rule is not None:
        add("router", plan.experts, Operand.of(plan.dtype, D, True, STEP_BYTES))
        shift = -phases[-1].units  # CTAs without a unit of the router get the first of gate_up
    if plan.ffn:
        add("gate_up", plan.ffn, gate_up, shift=shift)
    barriers += 1
    if plan.ffn:
        add("down", D, of_output(plan.ffn), rows)
    if plan.rule is not None:
        add("routed_gate_up", plan.expert_ffn, gate_up, matrices=plan.choices)
        barriers += 1
        add("routed_down", D, of_output(plan.expert_ffn), rows, matrices=plan.choices)
    return tuple(phases)
