"""The units of work of one program: how many a phase has, and which weights each of them reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decoder_layer.formats import scale_block, shape_of
from pallas_kernels.decoder_layer.plan import Phase, Plan
from pallas_kernels.decoder_layer.reference import Matrices
from pallas_kernels.decoder_layer.stream import ROWS, Half, count_units


class Refs(NamedTuple):
    """References to the kernel's arrays in global memory."""

    h: Any
    flat_h: Any
    attended: Any
    """Attention's output, which is added to h, or None."""
    flat_attended: Any
    parts: Any
    """Attention's output in parts, a :class:`Parts`, or None."""
    o_proj: Any
    """The projection of attention's output, or None; its scales are flat."""
    w_uv: Any
    values: Any
    """Attention's output times W_UV, flat."""
    residual: Any
    """h with the projection of attention's output, flat."""
    norm: Any
    router: Any
    bias: Any
    shared: Any
    """gate, up and down, and their scales, flat."""
    routed: Any
    out: Any
    scores: Any
    experts: Any
    weights: Any
    logits: Any
    hidden: Any
    routed_hidden: Any
    clocks: Any


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of one program."""

    plan: Plan
    refs: Refs
    program: jax.Array

    @property
    def programs(self) -> int:
        return self.plan.config.programs

    def count(self, phase: Phase) -> jax.Array:
        """Returns the number of this program's units."""
        if phase.name == "routed_down":
            return self.own_outputs() * phase.matrices
        if phase.name == "w_uv":
            left = phase.units * phase.matrices - self.program * self.plan.own_units
            return jnp.clip(left, 0, self.plan.own_units)
        return count_units(self.shifted(phase), phase.units * phase.matrices, self.programs)

    def own_outputs(self) -> jax.Array:
        return count_units(self.program, self.plan.width // self.plan.output_rows, self.programs)

    def shifted(self, phase: Phase) -> jax.Array:
        """Returns the program's number in a phase."""
        if phase.shift % self.programs == 0:
            return self.program
        return lax.rem(self.program + phase.shift % self.programs, jnp.int32(self.programs))

    def locate(self, phase: Phase, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the matrix and the first output feature of the program's i-th unit.

        For a program without units, they are those of any unit.
        """
        if phase.name == "routed_down":
            pair, output = self._routed_down(i)
            unit = self.program + output * self.programs
            return pair, jnp.minimum(unit, phase.units - 1) * phase.rows
        unit = self.shifted(phase) + i * self.programs
        if phase.name == "w_uv":
            unit = self.program * self.plan.own_units + i
        unit = jnp.minimum(unit, phase.units * phase.matrices - 1)
        if phase.matrices == 1:
            return jnp.int32(0), unit * phase.rows
        units = jnp.int32(phase.units)
        return lax.div(unit, units), lax.rem(unit, units) * phase.rows

    def first_head(self) -> jax.Array:
        """Returns the first of the heads, ``own_heads``, that hold this program's units of w_uv."""
        head = lax.div(self.program * self.plan.own_units, jnp.int32(self.plan.phases[0].units))
        return jnp.minimum(head, self.plan.heads - self.plan.own_heads)

    def _routed_down(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the pair and the number of the output unit of the i-th unit of routed_down.

        A batch of pairs has all output units, and each of these all pairs of the batch.
        """
        pairs, batch = self.plan.choices, self.plan.batch
        if batch == pairs:
            return lax.rem(i, jnp.int32(pairs)), lax.div(i, jnp.int32(pairs))
        own = jnp.maximum(self.own_outputs(), 1)
        first = lax.div(i, own * batch) * batch
        in_batch = jnp.minimum(pairs - first, batch)
        i -= first * own
        return first + lax.rem(i, in_batch), lax.div(i, in_batch)

    def halves(self, phase: Phase, i: jax.Array) -> tuple[Half, Half]:
        """Returns the weights of the program's i-th unit."""
        pair, row = self.locate(phase, i)
        if phase.name == "router":
            left = Half(self.refs.router, row)
            return left, dataclasses.replace(left, column=phase.operand.columns)
        if phase.name == "w_uv":
            left = Half(self.refs.w_uv, row, 0, (pair,))
            return left, dataclasses.replace(left, row=row + ROWS)
        if phase.name == "o_proj":
            weight, scales = self.refs.o_proj
            left, right = (self._half(phase, weight, scales, n, row) for n in range(2))
            return left, right
        index: tuple[jax.Array, ...] = ()
        matrices = self.refs.shared
        if phase.name.startswith("routed"):
            matrices = self.refs.routed
            index = (self.refs.experts[self.first_pair() + pair],)
        names = ("down", "down") if phase.name.endswith("down") else ("gate", "up")
        halves: list[Half] = []
        for n, name in enumerate(names):
            number = Matrices._fields.index(name)
            scales = matrices.scales[number : number + 1]
            halves.append(self._half(phase, matrices[number], scales, n, row, index))
        left, right = halves
        return left, right

    def _half(
        self, phase: Phase, matrix: Any, scales: Sequence[Any], n: int, row: jax.Array,
        index: tuple[jax.Array, ...] = (),
    ) -> Half:  # fmt: skip
        """Returns half ``n`` of a unit. ``scales`` are none, or the matrix' own."""
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

    def first_pair(self) -> jax.Array:
        """Returns where this program's choice of experts begins."""
        return self.program * self.plan.choices
