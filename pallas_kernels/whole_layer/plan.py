"""The static plan of the kernel: those of the kernels that it joins, with common ring stages."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.attention_inputs.plan import Plan as Before
from pallas_kernels.decoder_layer.plan import (
    FEWEST_STAGES,
    MOST_STAGES,
    RESERVED,
    SHARED_MEMORY,
    TOTALS_BYTES,
)
from pallas_kernels.decoder_layer.plan import Plan as After
from pallas_kernels.decoder_layer.stream import Stages
from pallas_kernels.whole_layer.attention import PROBABILITY_NUMBERS, QUERY_NUMBERS, Sizes

_MORE_RESERVED = 4 * 1024  # this kernel has more buffers and barriers than each of the others


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings that change the speed, not the result."""

    programs: int
    """Thread blocks, at most one per multiprocessor."""
    packed: bool = False
    """See :class:`pallas_kernels.decoder_layer.plan.Config`."""
    stages: int | None = None
    """The number of stages of the ring. If it is None, the ring has as many as fit, at most 12."""
    ahead: int = 1
    """Grid barriers by which weights after attention are copied earlier than in feed_forward, if
    they do not depend on the choice of experts. W_UV's are copied during attention in any case."""
    timed: bool = False
    """Whether each program records its clock at EVENTS, and then at those of the plan after
    attention."""


EVENTS = "start", "inputs", "barrier before attention", "attention", "barrier after attention"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and settings. :meth:`of` makes and checks it."""

    before: Before
    after: After
    attention: Sizes
    config: Config

    @staticmethod
    def of(before: Before, after: After, attention: Sizes, config: Config, interpret: Any) -> Plan:
        """Returns the plan. The stages and memory of the given plans are replaced.

        Raises:
          NotImplementedError: there is too little shared memory.
        """
        operands = [phase.operand for phase in (*before.phases, *after.phases)]
        own = [operand for operand in operands if operand is not None]
        least_bytes = before.stages.row_bytes  # W_UK's pieces need whole stages
        stages = Stages.of(own, 0, interpret, least_bytes - least_bytes % 128)
        plan = Plan(before, after, attention, config)
        fitting = (SHARED_MEMORY - plan.used_bytes) // stages.stage_bytes
        count = config.stages or min(fitting, MOST_STAGES)
        if not FEWEST_STAGES <= count <= fitting:
            raise NotImplementedError(
                f"takes {FEWEST_STAGES} to {max(fitting, 0)} ring stages of {stages.stage_bytes}"
                f" bytes in addition to {plan.used_bytes} bytes, got {count}"
            )
        stages = dataclasses.replace(stages, count=count)
        before = dataclasses.replace(before, stages=stages)
        after = dataclasses.replace(after, stages=stages)
        ahead = "always" if before.most_stages <= count else "arrived"
        before = dataclasses.replace(before, config=dataclasses.replace(before.config, ahead=ahead))
        return Plan(before, after, attention, config)

    @property
    def activations(self) -> int:
        """Numbers in the activations' memory, which also has attention's queries."""
        of_attention = QUERY_NUMBERS + PROBABILITY_NUMBERS
        return max(self.before.activations, self.after.activations, of_attention)

    @property
    def used_bytes(self) -> int:
        """Bytes of shared memory, apart from the ring's stages."""
        queries = 4 * self.before.tokens * (self.before.pieces.nope + 1)
        used = RESERVED + _MORE_RESERVED + 2 * self.activations + TOTALS_BYTES
        return used + queries + 4 * self.before.partials + self.after.own_bytes
