"""A norm and several projections of its result in one Hopper kernel, for one to eight tokens.

Every program norms the tokens for itself, while its producer already copies weights: all that a
program has of them fits its ring, or nearly. Units of eight output features go round the programs,
one projection's after the other's. See :mod:`pallas_kernels.decoder_layer.stream`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.decoder_layer.registers import SCALE_BLOCK
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    ROWS,
    Half,
    Operand,
    Rows,
    Stages,
    Stream,
    Totals,
    count_units,
)
from pallas_kernels.decoder_layer.vectors import norm_row, store_block
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.grid_barrier import GridBarrier
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.warpgroup import first_warp
from pallas_kernels.route.lanes import SHAPE


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and settings."""

    tokens: int
    width: int
    """Columns of the projections."""
    stride: int
    """Distance of the tokens in shared memory."""
    operands: tuple[Operand, ...]
    rows: tuple[int, ...]
    """Rows of each projection."""
    eps: float
    dtype: Any
    programs: int
    stages: Stages


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def project(
    x: Float[Array, "M D"],
    norm: Float[Array, " D"],
    projections: Sequence[Projection],
    *,
    plan: Plan,
    interpret: Any,
) -> list[Float[Array, "M _"]]:
    """Returns ``W norm(x)`` for each projection W."""
    flat = [
        each._replace(scales=tuple(scale.reshape(-1) for scale in each.scales))
        for each in projections
    ]
    inputs, structure = jax.tree.flatten((x, norm, flat))
    scratch = {
        "stages": plan.stages.scratch(),
        "ring": Ring.scratch(plan.stages.count, 2, CONSUMERS, interpret),
        "totals": Totals.scratch(interpret),
        "activations": [plgpu.SMEM((plan.tokens * plan.stride,), plan.dtype)],
        "norms": [plgpu.SMEM((CONSUMERS, *SHAPE), jnp.float32)],
    }

    def project(*refs: Any) -> None:
        given = structure.unflatten(refs[: len(inputs)])
        end = len(inputs) + len(plan.rows)
        memory, rest = {}, refs[end:]
        for name, types in scratch.items():
            memory[name], rest = rest[: len(types)], rest[len(types) :]
        _Program(plan, given, refs[len(inputs) : end], memory, interpret).run()

    made = plgpu.kernel(
        project,
        out_type=[jax.ShapeDtypeStruct((plan.tokens * rows,), x.dtype) for rows in plan.rows],
        scratch_types=[each for types in scratch.values() for each in types],
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **GridBarrier.launch(plan.programs, interpret),
    )(*inputs)
    return [each.reshape(plan.tokens, -1) for each in made]


class _Program:
    """One program of the grid. Its methods emit the roles' code."""

    def __init__(self, plan: Plan, given: Any, outs: Sequence[Any], memory: Any, interpret: Any):
        self.plan, self.outs, self.interpret = plan, outs, interpret
        self.x, self.norm, self.projections = given
        ring = Ring.of(plan.stages.count, CONSUMERS, memory["ring"], interpret)
        self.stream = Stream(ring, plan.stages.bind(memory["stages"]))
        self.totals = Totals.of(memory["totals"], interpret)
        (self.activations,), (self.norms,) = memory["activations"], memory["norms"]
        self.program, self.wg = lax.axis_index("program"), lax.axis_index("wg")

    def run(self) -> None:
        self.stream.ring.initialise()
        overlap_preceding_kernel(interpret=self.interpret)

        @when(self.wg == CONSUMERS)
        def _() -> None:
            when(first_warp(self.interpret is None))(self.produce)

        @when(self.wg < CONSUMERS)
        def _() -> None:
            self.stream.ring.release_all()
            self.consume()

    def produce(self) -> None:
        state = self.stream.ring.start()
        for n, operand in enumerate(self.plan.operands):

            def unit(
                i: jax.Array, state: PipelineState, n: int = n, operand: Operand = operand
            ) -> PipelineState:
                return self.stream.produce(operand, self.halves(n, i), state)

            state = lax.fori_loop(0, self.count(n), unit, state)
        self.stream.ring.drain(state)

    def consume(self) -> None:
        plan = self.plan
        for t in range(plan.tokens):

            @when(self.wg == t % CONSUMERS)
            def _(t: int = t) -> None:
                norm_row(
                    self.x.at[t],
                    None,
                    self.norm,
                    self.activations.at[pl.ds(t * plan.stride, plan.width)],
                    self.norms.at[self.wg],
                    eps=plan.eps,
                    dtype=plan.dtype,
                    interpret=self.interpret,
                )

        self.totals.meet()
        state, number = self.stream.ring.start(), jnp.int32(0)
        for n in range(len(plan.operands)):
            state, number = self.consume_units(n, state, number)

    def consume_units(
        self, n: int, state: PipelineState, number: jax.Array
    ) -> tuple[PipelineState, jax.Array]:
        """Multiplies this program's units of a projection, as ``number`` exchanges before."""
        plan, operand, count = self.plan, self.plan.operands[n], self.count(n)
        rows = Rows(self.activations, 0, plan.stride, plan.tokens)

        def scales_of(i: jax.Array) -> list[Any]:
            i = jnp.where(i < count, i, 0)  # past the end, those of a unit that exists
            return self.stream.scales(operand, self.halves(n, i))

        def unit(i: jax.Array, carry: Any) -> Any:
            state, number, scales = carry
            following = scales_of(i + 1)
            state, sums = self.stream.consume(operand, rows, scales, state)
            self.totals.exchange(number, sums)

            @when(self.wg == lax.rem(number, jnp.int32(CONSUMERS)))
            def _() -> None:
                left, right = self.totals.load(number, plan.tokens)
                out, start, stride = self.outs[n], self.row(n, i), plan.rows[n]
                store_block(out, start, stride, left + right, plan.tokens, self.interpret)

            return state, number + 1, following

        carry = state, number, scales_of(jnp.int32(0))
        state, number, _ = lax.fori_loop(0, count, unit, carry)
        return state, number

    def number(self, n: int) -> jax.Array:
        """Returns the program's number in a projection: the first unit comes after the last of the
        one before."""
        before = sum(self.plan.rows[:n]) // ROWS
        programs = self.plan.programs
        return lax.rem(self.program + (-before) % programs, jnp.int32(programs))

    def count(self, n: int) -> jax.Array:
        """Returns the program's number of units."""
        return count_units(self.number(n), self.plan.rows[n] // ROWS, self.plan.programs)

    def row(self, n: int, i: jax.Array) -> jax.Array:
        """Returns the first row of the program's i-th unit, or of any unit if it has none."""
        unit = self.number(n) + i * self.plan.programs
        return jnp.minimum(unit, self.plan.rows[n] // ROWS - 1) * ROWS

    def halves(self, n: int, i: jax.Array) -> tuple[Half, Half]:
        """Returns the weights of the program's i-th unit."""
        (weight, scales), row = self.projections[n], self.row(n, i)
        left = Half(weight, row)
        if scales:
            columns = -(-self.plan.width // SCALE_BLOCK)
            start = lax.div(row, jnp.int32(SCALE_BLOCK)) * columns
            left = dataclasses.replace(left, scales=scales[0], scales_start=start)
        return left, dataclasses.replace(left, column=self.plan.operands[n].columns)
