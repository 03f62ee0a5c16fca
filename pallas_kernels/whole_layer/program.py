"""The roles of the kernel: those of the two kernels that it joins, with attention between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_inputs.program import Program as Before
from pallas_kernels.attention_inputs.program import Refs as BeforeRefs
from pallas_kernels.decoder_layer.program import Program as After
from pallas_kernels.decoder_layer.stamps import store_cycles
from pallas_kernels.decoder_layer.stream import CONSUMERS
from pallas_kernels.decoder_layer.units import Refs as AfterRefs
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.warpgroup import WARPS, first_warp
from pallas_kernels.whole_layer.attention import (
    PROBABILITY_NUMBERS,
    QUERY_NUMBERS,
    Attention,
    Memory,
    Refs,
)
from pallas_kernels.whole_layer.plan import EVENTS, Plan


class PartsOfLayer:
    """The parts of the only sequence, as :class:`pallas_kernels.mla_decode.parts.Parts`."""

    out = None

    def __init__(self, attention: Attention):
        self.attention = attention
        self.partials, self.lse = attention.refs.partials, attention.refs.lse

    def of_sequence(self, b: int) -> tuple[Any, Any]:
        """Returns the first part of the sequence, and the number of its parts."""
        assert b == 0
        # Attention has loaded the length: another load would be a latency more.
        return jnp.int32(0), self.attention.sizes.split(self.attention.start)[2]


class Program:
    """One program of the grid. Its methods emit the roles' code."""

    def __init__(
        self, plan: Plan, before: BeforeRefs, attention: Refs, after: AfterRefs, memory: Any,
        counter: Any, clocks: Any, interpret: Any,
    ):  # fmt: skip
        self.plan, self.clocks, self.interpret = plan, clocks, interpret
        self.before = Before(plan.before, before, memory | memory["before"], counter, interpret)
        (activations,) = memory["activations"]
        shared = Memory(
            activations.at[pl.ds(0, QUERY_NUMBERS)],
            activations.at[pl.ds(QUERY_NUMBERS, PROBABILITY_NUMBERS)],
            memory["before"]["partials"][0],
        )
        self.wg = lax.axis_index("wg")
        self.attention = Attention(
            plan.attention, attention, shared, self.before.totals, lax.axis_index("program"),
            self.wg, interpret,
        )  # fmt: skip
        after = after._replace(parts=PartsOfLayer(self.attention))
        self.after = After(plan.after, after, memory | memory["after"], counter, interpret)
        self.ring = self.after.stream.ring
        self.signals = Barriers(memory["arrived"][0], interpret)
        self.grid = self.after.grid

    def run(self) -> None:
        self.ring.initialise()
        self.before.initialise_signals()
        self.after.initialise_signals()
        self.signals.initialise([CONSUMERS * WARPS], cluster=False)
        overlap_preceding_kernel(interpret=self.interpret)

        @when(self.wg == CONSUMERS)
        def _() -> None:
            when(first_warp(self.interpret is None))(self.produce)

        @when(self.wg < CONSUMERS)
        def _() -> None:
            self.ring.release_all()
            self.consume()

    def produce(self) -> None:
        state = self.before.produce_phases(self.ring.start())
        self.attention.prefetch()
        # Arriving takes longer while copies are in flight. From here on there is time for them.
        self.signals.wait(0, 0)
        state = self.after.produce_phases(state, ahead=self.plan.config.ahead)
        self.ring.drain(state)

    def consume(self) -> None:
        self.record("start")
        self.attention.load_start()
        self.before.meanwhile = self.attention.find_page
        state = self.before.consume(self.ring.start())
        self.record("inputs")
        self.sync_before_attention()
        self.record("barrier before attention")
        self.attention.run()
        self.record("attention")
        self.grid.sync()
        self.record("barrier after attention")
        self.after.consume(state)

    def record(self, event: str) -> None:
        """Stores the multiprocessor's clock, if this is timed."""
        if self.plan.config.timed:
            program = lax.axis_index("program")
            store_cycles(self.clocks, program * len(EVENTS) + EVENTS.index(event))

    def sync_before_attention(self) -> None:
        token: jax.Array = self.grid.arrive()
        self.signals.arrive(0)
        self.attention.load_early()
        self.grid.wait(token)
