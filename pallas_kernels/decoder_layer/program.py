"""The roles of the feed-forward kernel: what the producer and the consumers do in each phase."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decoder_layer.entries import Entries
from pallas_kernels.decoder_layer.epilogue import epilogue, output_blocks
from pallas_kernels.decoder_layer.plan import Entry, Phase, Plan
from pallas_kernels.decoder_layer.registers import MOST_SPLIT_TOKENS, SUMS, SUMS_SHAPE, no_sums
from pallas_kernels.decoder_layer.stamps import store_cycles, store_nanoseconds
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    MOST_TOKENS,
    ROWS,
    Operand,
    Rows,
    Stream,
    Totals,
)
from pallas_kernels.decoder_layer.totals import Float16Sums
from pallas_kernels.decoder_layer.units import Refs, Units
from pallas_kernels.decoder_layer.vectors import load_block, load_weight, store_block
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.loads import load_with_layout
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.warpgroup import WARPS, first_warp
from pallas_kernels.route.choice import choose, load_bias
from pallas_kernels.route.lanes import LAYOUT, SHAPE, filled, thread_index

_CHOSEN, _ARRIVED = 0, 1  # signals: the experts are chosen; arrived at grid barriers 0, 1, ...


class Program:
    """One program of the grid. Its methods emit the roles' code."""

    def __init__(self, plan: Plan, refs: Refs, memory: Any, counter: Any, interpret: Any):
        self.plan, self.refs, self.interpret = plan, refs, interpret
        self.programs, self.on_gpu = plan.config.programs, interpret is None
        ring = Ring.of(plan.stages.count, CONSUMERS, memory["ring"], interpret)
        self.stream = Stream(ring, plan.stages.bind(memory["stages"]))
        self.totals = Totals.of(memory["totals"], interpret)
        self.signals = Barriers(memory["signals"][0], interpret)
        (self.activations,), (self.sums,), (self.norms,) = (
            memory[name] for name in ("activations", "sums", "norms")
        )
        self.grid = GridBarrier(
            counter if self.on_gpu else memory["grid"][0],
            self.programs,
            CONSUMERS,
            interpret=interpret,
        )
        self.program = lax.axis_index("program")
        self.wg = lax.axis_index("wg")
        self.units = Units(plan, refs, self.program)
        self.norm: Any = None
        self.bias: list[jax.Array] | None = None
        self.factors = next(iter(memory["factors"]), None)
        self.entries = Entries(
            plan, refs, self.units, self.totals, self.activations, self.factors, self.norms,
            self.wg, interpret,
        )  # fmt: skip

    def run(self) -> None:
        self.stream.ring.initialise()
        self.signals.initialise([CONSUMERS * WARPS] * self.plan.signals, cluster=False)
        overlap_preceding_kernel(interpret=self.interpret)

        @when(self.wg == CONSUMERS)
        def _() -> None:
            when(first_warp(self.on_gpu))(self.produce)

        @when(self.wg < CONSUMERS)
        def _() -> None:
            self.stream.ring.release_all()
            self.consume()

    # ---- the producer ----

    def produce(self) -> None:
        state, passed = self.stream.ring.start(), 0
        for phase in self.plan.phases:
            # Arriving takes longer while copies are in flight.
            if phase.barriers > passed:
                self.signals.wait(_ARRIVED + passed, 0)
            passed = phase.barriers
            if phase.name == "routed_gate_up":
                self.signals.wait(_CHOSEN, 0)

            def unit(i: jax.Array, state: PipelineState, phase: Phase = phase) -> PipelineState:
                return self.stream.produce(phase.operand, self.units.halves(phase, i), state)

            state = lax.fori_loop(0, self.units.count(phase), unit, state)
        self.stream.ring.drain(state)

    # ---- the consumers ----

    def consume(self) -> None:
        plan = self.plan
        state, number, passed = self.stream.ring.start(), jnp.int32(0), 0
        self.record("start")
        self.load_early(plan.entry(0))
        self.enter(0)
        for phase in plan.phases:
            if phase.barriers > passed:
                self.sync_grid(passed)
                passed = phase.barriers
                self.record(f"barrier {passed}")
                self.enter(passed)
            if phase.name == "routed_down":
                state, number = self.consume_batches(phase, state, number)
            else:
                rows = self.rows_of(phase)
                store = epilogue(phase, plan, self.refs, self.sums, self.interpret)
                state, number = self.consume_units(
                    phase, 0, self.units.count(phase), rows, store, state, number
                )
            self.record(phase.name)
        self.store_out()
        self.record("out")

    def enter(self, passed: int) -> None:
        """Prepares the activations for the phases after so many grid barriers."""
        plan = self.plan
        if (entry := plan.entry(passed)) is None:
            return
        if entry == "latents":
            self.entries.copy_latents()
        elif entry == "rows":
            starts = [t * plan.stride(plan.attention) for t in range(plan.tokens)]
            rows = self.refs.values if plan.heads else self.refs.flat_attended
            self.entries.copy_rows(rows, plan.attention, starts, factor=0)
        elif entry == "norm":
            self.entries.norm_tokens(self.norm)
        else:
            self.enter_second_part()
        self.record(entry)

    def record(self, event: str) -> None:
        """Stores the multiprocessor's clock, and at both ends the nanoseconds, if this is timed."""
        plan = self.plan
        if not plan.config.timed:
            return
        first, clocks = self.program * plan.stamps, self.refs.clocks
        store_cycles(clocks, first + plan.events.index(event))
        if event in ("start", "out"):
            store_nanoseconds(clocks, first + len(plan.events) + int(event == "out"))

    def sync_grid(self, barrier: int) -> None:
        token = self.grid.arrive()
        self.signals.arrive(_ARRIVED + barrier)
        self.load_early(self.plan.entry(barrier + 1))
        self.grid.wait(token)

    def load_early(self, entry: Entry | None) -> None:
        """Loads the weights that the entry needs, which no program writes. They have left the L2
        cache since the last step, and arrive while the barrier waits."""
        if entry == "norm":
            self.norm = load_weight(self.refs.norm)
        elif entry == "choice and rows" and self.refs.bias is not None:
            self.bias = load_bias(self.refs.bias, filled(0), self.plan.experts, self.interpret)

    def enter_second_part(self) -> None:
        """Chooses the experts, and copies the shared experts' hidden rows to shared memory."""
        plan, refs = self.plan, self.refs
        if plan.rule is not None:
            choose(
                refs.logits,
                self.bias,
                refs.scores,
                refs.experts,
                refs.weights,
                token=thread_index(0) + self.wg * WARPS,
                first=self.units.first_pair(),
                is_reporter=self.program == 0,
                tokens=plan.tokens,
                experts=plan.experts,
                rule=plan.rule,
                interpret=self.interpret,
            )
            self.totals.meet()
            self.signals.arrive(_CHOSEN)
        if plan.ffn:
            starts = [plan.ffn_start + t * plan.stride(plan.ffn) for t in range(plan.tokens)]
            self.entries.copy_rows(refs.hidden, plan.ffn, starts, factor=plan.ffn_factor)
        else:
            for i in range(plan.own_outputs * plan.output_blocks):
                zeros = plgpu.layout_cast(jnp.zeros(SHAPE, jnp.float32), LAYOUT)
                when(self.wg == i // plan.output_blocks % CONSUMERS)(
                    lambda i=i, zeros=zeros: _store(self.sums.at[i], zeros)
                )

    def rows_of(self, phase: Phase) -> Any:
        """Returns a function from a unit's pair to the activation rows that it meets."""
        plan = self.plan
        normed = plan.stride(plan.width)
        if phase.name == "w_uv":
            stride, first = plan.stride(plan.latent), self.units.first_head()
            of_head = plan.tokens * stride
            return lambda head: Rows(
                self.activations, (head - first) * of_head, stride, plan.tokens
            )
        rows = functools.partial(Rows, self.activations, count=plan.tokens)
        packed = functools.partial(rows, factors=self.factors)
        if phase.name == "o_proj":
            return lambda _: packed(0, plan.stride(plan.attention))
        if phase.name == "down":
            stride, factor = plan.stride(plan.ffn), plan.ffn_factor
            return lambda _: packed(plan.ffn_start, stride, first_factor=factor)
        if phase.name == "routed_gate_up":
            assert plan.rule is not None
            K = jnp.int32(plan.rule.num_experts_per_tok)

            def of_pair(pair: jax.Array) -> Rows:
                token = lax.div(pair, K)
                return packed(token * normed, normed, count=1, first_factor=token)

            return of_pair
        if phase.name == "router":
            start = 0 if self.factors is None else plan.router_start
            return lambda _: rows(start, normed)
        return lambda _: packed(0, normed)

    def consume_units(
        self, phase: Phase, first: Any, last: Any, rows_of: Any, epilogue: Any,
        state: PipelineState, number: jax.Array,
    ) -> tuple[PipelineState, jax.Array]:  # fmt: skip
        """Multiplies this program's units of a phase, from ``first`` up to ``last``.

        The scales of each unit are loaded one unit ahead.

        Args:
          rows_of: function from a unit's pair to its activation rows.
          epilogue: called by one warpgroup per unit, with the unit's index, its pair, its first
            output feature, and the totals of its halves.
          number: number of exchanges before.
        """
        stream, operand = self.stream, phase.operand
        is_scaled = operand.dtype.itemsize == 1

        def scales_of(i: jax.Array) -> list[Any]:
            i = jnp.where(i < last, i, 0)  # past the end, those of a unit that exists
            return stream.scales(operand, self.units.halves(phase, i))

        def unit(i: jax.Array, carry: Any) -> Any:
            state, number, scales = carry
            pair, row = self.units.locate(phase, i)
            following = scales_of(i + 1) if is_scaled else []
            rows = rows_of(pair)
            state, sums = stream.consume(operand, rows, scales, state)
            self.totals.exchange(number, sums)

            @when(self.wg == lax.rem(i, jnp.int32(CONSUMERS)))
            def _() -> None:
                epilogue(i, pair, row, *self.load_totals(operand, rows, number))

            return state, number + 1, following

        begin = jnp.asarray(first, jnp.int32)
        carry = state, number, scales_of(begin) if is_scaled else []
        state, number, _ = lax.fori_loop(begin, last, unit, carry)
        return state, number

    def load_totals(
        self, operand: Operand, rows: Rows, number: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the totals of a unit's halves after exchange ``number``."""
        float16 = None
        if rows.factors is not None:
            float16 = Float16Sums(operand.is_split, rows.factors, rows.first_factor)
        return self.totals.load(number, rows.count, float16)

    def consume_batches(
        self, phase: Phase, state: PipelineState, number: jax.Array
    ) -> tuple[PipelineState, jax.Array]:
        """Multiplies the routed experts' downs, for as many pairs at a time as have room.

        The sums of an output feature's experts stay in registers, times their routing weights.
        """
        plan, refs, operand = self.plan, self.refs, phase.operand
        assert plan.rule is not None
        own, stride = self.units.own_outputs(), plan.stride(plan.expert_ffn)
        K, first_pair = jnp.int32(plan.rule.num_experts_per_tok), self.units.first_pair()
        # Sums over rows in float16 are transposed in registers, with the tokens twice in a row if
        # the halves are of one row.
        is_packed = self.factors is not None
        transposed = is_packed and self.on_gpu
        row_token = plgpu.broadcasted_iota(jnp.int32, SUMS_SHAPE, int(transposed), layout=SUMS)
        most = MOST_SPLIT_TOKENS if transposed and operand.is_split else MOST_TOKENS
        row_token = jnp.bitwise_and(row_token, most - 1)
        count = self.units.count(phase)

        def scales_of(i: jax.Array) -> list[Any]:
            i = jnp.where(i < count, i, 0)  # past the end, those of a unit that exists
            return self.stream.scales(operand, self.units.halves(phase, i))

        def add_output(n: jax.Array, carry: Any, low: int, high: int) -> Any:
            def add_pair(p: jax.Array, carry: Any) -> Any:
                state, scales, *sums = carry
                following = scales_of(first + p + 1)
                factor = refs.weights[first_pair + low + p]
                if self.factors is not None:
                    factor = factor * self.factors[plan.routed_factor + p]
                if plan.tokens > 1:
                    # All rows of the products are the pair's token.
                    factor = jnp.where(row_token == lax.div(low + p, K), factor, 0.0)
                rows = Rows(self.activations, p * stride, stride, 1, self.factors)
                state, products = self.stream.consume(operand, rows, scales, state)
                sums = [s + factor * x for s, x in zip(sums, products, strict=True)]
                return state, following, *sums

            state, number, scales = carry
            first = low * own + n * (high - low)
            carry = state, scales, no_sums(), no_sums()
            state, scales, left, right = lax.fori_loop(0, high - low, add_pair, carry)
            self.totals.exchange(number, (left, right))

            @when(self.wg == lax.rem(n, jnp.int32(CONSUMERS)))
            def _() -> None:
                float16 = Float16Sums(operand.is_split) if is_packed else None
                left, right = self.totals.load(number, plan.tokens, float16)
                for j, block in enumerate(output_blocks(operand, left, right)):
                    total = self.sums.at[n * plan.output_blocks + j]
                    _store(total, load_with_layout(total, LAYOUT) + block)

            return state, number + 1, scales

        scales = scales_of(jnp.int32(0))
        for low in range(0, plan.choices, plan.batch):
            high = min(low + plan.batch, plan.choices)
            if low:
                self.totals.meet()  # both warpgroups have read the last batch
            starts = [(pair - low) * stride for pair in range(low, high)]
            self.entries.copy_rows(
                refs.routed_hidden, plan.expert_ffn, starts, low, plan.routed_factor
            )
            add = functools.partial(add_output, low=low, high=high)
            state, number, scales = lax.fori_loop(0, own, add, (state, number, scales))
        return state, number

    def store_out(self) -> None:
        """Adds the sums to the residual."""
        plan, refs = self.plan, self.refs
        blocks = plan.output_blocks
        for i in range(plan.own_outputs * blocks):
            row = (self.program + i // blocks * self.programs) * plan.output_rows
            row += i % blocks * ROWS
            is_own = (self.wg == i // blocks % CONSUMERS) & (row < plan.width)

            @when(is_own)
            def _(i: int = i, row: jax.Array = row) -> None:
                sums = load_with_layout(self.sums.at[i], LAYOUT)
                sums = sums.astype(plan.dtype).astype(jnp.float32)
                h = self.load_residual(row)
                store_block(refs.out, row, plan.width, h + sums, plan.tokens, self.interpret)

    def load_residual(self, start: jax.Array) -> jax.Array:
        """Returns a block of h, with attention's output."""
        plan, refs, arguments = self.plan, self.refs, (self.plan.width, self.plan.tokens)
        if plan.attention:
            return load_block(refs.residual, start, *arguments, self.interpret)
        h = load_block(refs.flat_h, start, *arguments, self.interpret)
        if refs.attended is None:
            return h
        h += load_block(refs.flat_attended, start, *arguments, self.interpret)
        return h.astype(plan.dtype).astype(jnp.float32)


def _store(ref: Any, values: jax.Array) -> None:
    ref[...] = values
