"""The roles of the kernel: what the producer and the consumers do in each phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_inputs.fold import (
    add_products,
    layout_of,
    no_sums,
    store_sums,
    store_totals,
)
from pallas_kernels.attention_inputs.plan import Phase, Plan
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.attention_inputs.rotation import store_rotated
from pallas_kernels.decoder_layer.epilogue import output_blocks
from pallas_kernels.decoder_layer.formats import scale_block, scales_shape, shape_of
from pallas_kernels.decoder_layer.packed import pack
from pallas_kernels.decoder_layer.registers import zero_after
from pallas_kernels.decoder_layer.row_copies import RowCopies
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    ROWS,
    Half,
    Rows,
    Stream,
    Totals,
    count_units,
)
from pallas_kernels.decoder_layer.totals import Float16Sums
from pallas_kernels.decoder_layer.vectors import copy_row, load_weight, norm_row, store_block
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.warpgroup import WARPS, first_warp
from pallas_kernels.route.lanes import LANES, load

SIGNALS = 2  # one for each grid barrier: this program has arrived at it


class Refs(NamedTuple):
    """References to the kernel's arrays in global memory."""

    x: Any
    weights: AttentionWeights
    """The scales are flat."""
    cos: Any
    sin: Any
    slots: Any
    pages: Any
    """[rows, columns]: a row for each token."""
    q_latent: Any
    """Flat, like the following."""
    q_rope: Any
    """[M H, R]"""
    compressed: Any
    """float32, the results of q_a_proj."""
    queries: Any
    """float32 [M, H, query_stride]"""
    latents: Any
    """float32 [M, C]"""


class Program:
    """One program of the grid. Its methods emit the roles' code."""

    def __init__(self, plan: Plan, refs: Refs, memory: Any, counter: Any, interpret: Any):
        self.plan, self.refs, self.interpret = plan, refs, interpret
        ring = Ring.of(plan.stages.count, CONSUMERS, memory["ring"], interpret)
        self.stream = Stream(ring, plan.stages.bind(memory["stages"]))
        self.piece_stages = memory["pieces"]
        self.totals = Totals.of(memory["totals"], interpret)
        self.signals = Barriers(memory["signals"][0], interpret)
        (self.activations,), (self.norms,) = memory["activations"], memory["norms"]
        (self.queries,), (self.partials,) = memory["queries"], memory["partials"]
        self.factors = next(iter(memory["factors"]), None)
        self.grid = GridBarrier(
            counter if interpret is None else memory["grid"][0],
            plan.config.programs,
            CONSUMERS,
            interpret=interpret,
        )
        self.program, self.wg = lax.axis_index("program"), lax.axis_index("wg")

    def run(self) -> None:
        self.stream.ring.initialise()
        self.signals.initialise([CONSUMERS * WARPS] * SIGNALS, cluster=False)
        overlap_preceding_kernel(interpret=self.interpret)

        @when(self.wg == CONSUMERS)
        def _() -> None:
            when(first_warp(self.interpret is None))(self.produce)

        @when(self.wg < CONSUMERS)
        def _() -> None:
            self.stream.ring.release_all()
            self.consume()

    # ---- the units of this program ----

    def number(self, phase: Phase) -> jax.Array:
        """Returns the program's first unit in a phase, if there are so many."""
        programs = self.plan.config.programs
        return lax.rem(self.program + -phase.before % programs, jnp.int32(programs))

    def count(self, phase: Phase) -> jax.Array:
        """Returns the program's number of units."""
        return count_units(self.number(phase), phase.units, self.plan.config.programs)

    def unit(self, phase: Phase, i: jax.Array) -> jax.Array:
        """Returns the program's i-th unit, or any unit if it has none."""
        unit = self.number(phase) + i * self.plan.config.programs
        return jnp.minimum(unit, phase.units - 1)

    def halves(self, phase: Phase, i: jax.Array) -> tuple[Half, Half]:
        """Returns the weights of the program's i-th unit of a projection."""
        assert phase.operand is not None
        weight, scales = getattr(self.refs.weights, phase.name)
        operand, first = phase.operand, self.unit(phase, i) * phase.rows

        def half(n: int) -> Half:
            row = first if operand.is_split else first + n * ROWS
            made = Half(weight, row, n * operand.columns if operand.is_split else 0)
            if not scales:
                return made
            start = lax.div(row, jnp.int32(scale_block(weight)[0])) * scales_shape(weight)[1]
            return dataclasses.replace(made, scales=scales[0], scales_start=start)

        return half(0), half(1)

    def piece(self, phase: Phase, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the head and the first column of the program's i-th piece of W_UK."""
        unit, per_head = self.unit(phase, i), jnp.int32(self.plan.pieces.per_head)
        return lax.div(unit, per_head), lax.rem(unit, per_head) * self.plan.pieces.width

    # ---- the producer ----

    def produce(self) -> None:
        state, passed = self.stream.ring.start(), 0
        for phase in self.plan.phases:
            if phase.barriers > passed:
                if self.plan.config.ahead == "arrived":
                    self.signals.wait(passed, 0)
                passed = phase.barriers
            if phase.name == "latents":
                continue

            def unit(i: jax.Array, state: PipelineState, phase: Phase = phase) -> PipelineState:
                if phase.operand is None:
                    return self.produce_piece(phase, i, state)
                return self.stream.produce(phase.operand, self.halves(phase, i), state)

            state = lax.fori_loop(0, self.count(phase), unit, state)
        self.stream.ring.drain(state)

    def produce_piece(self, phase: Phase, i: jax.Array, state: PipelineState) -> PipelineState:
        """Copies a piece of W_UK, some rows per stage."""
        pieces, ring = self.plan.pieces, self.stream.ring
        head, column = self.piece(phase, i)
        half, row_bytes = pieces.rows // 2, pieces.width * pieces.dtype.itemsize

        def fill(step: jax.Array, state: PipelineState, carry: None) -> None:
            copies = []
            for n in range(2):
                rows = pl.ds(step * pieces.rows + n * half, half)
                window = head, rows, pl.ds(column, pieces.width)
                target = self.piece_stage(state.stage).at[n]
                weights = self.refs.weights.w_uk
                copies.append(
                    RowCopies(weights, window, target, False, None, True, None, row_bytes)
                )
            ring.fill(state, copies)

        return ring.loop(self.piece_steps(), fill, state, None)[0]

    def piece_steps(self) -> Any:
        return self.stream.steps(self.plan.pieces.steps)

    def piece_stage(self, stage: jax.Array) -> Any:
        """Returns the reference to a stage that has rows of W_UK."""
        refs = self.stream.stages.refs if self.interpret is None else self.piece_stages
        return refs[0].at[stage]

    # ---- the consumers ----

    def consume(self) -> None:
        plan = self.plan
        weight = load_weight(self.refs.weights.norm)
        self.norm_rows(plan.width, weight, lambda t: self.refs.x.at[t], plan.eps)
        state, number, passed = self.stream.ring.start(), jnp.int32(0), 0
        for phase in plan.phases:
            if phase.barriers > passed:
                if phase.name == "q_proj":  # loaded while the barrier waits
                    weight = load_weight(self.refs.weights.q_a_norm)
                self.sync_grid(passed)
                passed = phase.barriers
                if phase.name == "q_proj":
                    self.norm_compressed(weight)
            if phase.name == "w_uk":
                state = self.consume_pieces(phase, state)
            elif phase.name == "latents":
                self.store_latents(phase)
            else:
                state, number = self.consume_units(phase, state, number)

    def sync_grid(self, barrier: int) -> None:
        token = self.grid.arrive()
        if self.plan.config.ahead == "arrived":
            self.signals.arrive(barrier)
        self.grid.wait(token)

    def norm_compressed(self, weight: Any) -> None:
        """Norms the tokens' results of q_a_proj."""
        plan, Q = self.plan, self.plan.q_rank
        rows = lambda t: self.refs.compressed.at[pl.ds(t * Q, Q)]  # noqa: E731
        self.norm_rows(Q, weight, rows, plan.latent_eps)

    def norm_rows(self, width: int, weight: Any, row: Callable[[int], Any], eps: float) -> None:
        """Norms the tokens' rows to the activations' memory, alternately by both warpgroups."""
        plan = self.plan
        for t in range(plan.tokens):

            @when(self.wg == t % CONSUMERS)
            def _(t: int = t) -> None:
                target = self.activations.at[pl.ds(t * plan.stride(width), width)]
                norms = self.norms.at[self.wg]
                normed = norm_row(
                    row(t),
                    None,
                    weight,
                    target if self.factors is None else None,
                    norms,
                    eps=eps,
                    dtype=plan.dtype,
                    interpret=self.interpret,
                )
                if self.factors is not None:
                    targets, dtype = [(target, self.factors.at[t])], plan.weight_dtype
                    pack([normed], targets, dtype, norms, self.interpret)

        self.totals.meet()

    def consume_units(
        self, phase: Phase, state: PipelineState, number: jax.Array
    ) -> tuple[PipelineState, jax.Array]:
        """Multiplies this program's units of a projection, as ``number`` exchanges before."""
        plan, operand, count = self.plan, phase.operand, self.count(phase)
        assert operand is not None
        width = shape_of(getattr(self.refs.weights, phase.name).weight)[1]
        rows = Rows(self.activations, 0, plan.stride(width), plan.tokens, self.factors)
        float16 = None if self.factors is None else Float16Sums(operand.is_split, self.factors)

        def scales_of(i: jax.Array) -> list[Any]:
            i = jnp.where(i < count, i, 0)  # past the end, those of a unit that exists
            return self.stream.scales(operand, self.halves(phase, i))

        def unit(i: jax.Array, carry: Any) -> Any:
            state, number, scales = carry
            following = scales_of(i + 1)
            state, sums = self.stream.consume(operand, rows, scales, state)
            self.totals.exchange(number, sums)

            @when(self.wg == lax.rem(number, jnp.int32(CONSUMERS)))
            def _() -> None:
                left, right = self.totals.load(number, plan.tokens, float16)
                row = self.unit(phase, i) * phase.rows
                for n, block in enumerate(output_blocks(operand, left, right)):
                    self.store_features(phase, row + n * ROWS, block)

            return state, number + 1, following

        carry = state, number, scales_of(jnp.int32(0))
        state, number, _ = lax.fori_loop(0, count, unit, carry)
        return state, number

    def store_features(self, phase: Phase, row: jax.Array, block: jax.Array) -> None:
        """Stores eight output features of a projection. Those with positions are rotated."""
        plan, refs, pieces = self.plan, self.refs, self.plan.pieces
        tokens, interpret = plan.tokens, self.interpret
        if phase.name == "q_a_proj":
            store_block(refs.compressed, row, plan.q_rank, block, tokens, interpret)
            return
        is_query = phase.name == "q_proj"
        plain = pieces.nope if is_query else pieces.rank
        head = lax.div(row, jnp.int32(plain + plan.rope)) if is_query else jnp.int32(0)
        feature = row - head * (plain + plan.rope)

        @when(feature < plain)
        def _() -> None:
            target = refs.queries if is_query else refs.latents
            of_head = pieces.query_stride if is_query else plain
            stride = pieces.heads * of_head if is_query else of_head
            store_block(target, head * of_head + feature, stride, block, tokens, interpret)

        @when(feature >= plain)
        def _() -> None:
            store_rotated(
                refs.q_rope if is_query else refs.pages,
                (lambda t: t * pieces.heads + head) if is_query else self.slot,
                0 if is_query else plain,
                lax.div(feature - plain, jnp.int32(2)),
                block,
                refs.cos,
                refs.sin,
                tokens,
                interpret,
            )

    def slot(self, token: Any) -> Any:
        """Returns the slots of each thread's token, or in the interpreter of one token."""
        if self.interpret is not None:
            return self.refs.slots[token]
        return load(self.refs.slots, token, LANES, None)

    def consume_pieces(self, phase: Phase, state: PipelineState) -> PipelineState:
        """Multiplies this program's pieces of W_UK with the queries of their heads."""
        plan, pieces, interpret = self.plan, self.plan.pieces, self.interpret
        row_bytes = plan.stages.row_bytes

        def piece(i: jax.Array, state: PipelineState) -> PipelineState:
            head, column = self.piece(phase, i)
            for t in range(plan.tokens):

                @when(self.wg == t % CONSUMERS)
                def _(t: int = t) -> None:
                    stride = pieces.query_stride
                    source = pl.ds((t * pieces.heads + head) * stride, stride)
                    target = self.queries.at[pl.ds(t * stride, stride)]
                    copy_row(self.refs.queries.at[source], target)

            self.totals.meet()  # also: all have read the piece before from the partial sums

            def add(step: jax.Array, state: PipelineState, sums: jax.Array) -> jax.Array:
                self.stream.ring.wait_full(state)
                stage = self.piece_stage(state.stage)
                sums = add_products(pieces, stage, row_bytes, self.queries, step, sums, interpret)
                read = state.stage + zero_after([sums], layout_of(pieces), interpret)
                self.stream.ring.release(state._replace(stage=read))
                return sums

            first = no_sums(pieces, interpret)
            state, sums = self.stream.ring.loop(self.piece_steps(), add, state, first)
            store_sums(pieces, self.partials, sums, interpret)
            self.totals.meet()
            start = head * pieces.rank + column
            store_totals(pieces, self.partials, self.refs.q_latent, start, interpret)
            return state

        return lax.fori_loop(0, self.count(phase), piece, state)

    def store_latents(self, phase: Phase) -> None:
        """Norms latents to the pages."""
        plan, C = self.plan, self.plan.pieces.rank

        def token(i: jax.Array, carry: None) -> None:
            t = self.unit(phase, i)
            slot = self.refs.slots[t]

            @when((slot >= 0) & (self.wg == 0))
            def _() -> None:
                norm_row(
                    self.refs.latents.at[pl.ds(t * C, C)],
                    None,
                    load_weight(self.refs.weights.kv_a_norm),
                    self.refs.pages.at[slot, pl.ds(0, C)],
                    self.norms.at[self.wg],
                    eps=plan.latent_eps,
                    dtype=plan.dtype,
                    interpret=self.interpret,
                )

        lax.fori_loop(0, self.count(phase), token, None)
