"""Entries of phases: consumers bring activation rows to shared memory before they multiply."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.decoder_layer.merging import merge_row
from pallas_kernels.decoder_layer.packed import pack, pack_rows
from pallas_kernels.decoder_layer.plan import Plan
from pallas_kernels.decoder_layer.stream import CONSUMERS, Totals
from pallas_kernels.decoder_layer.units import Refs, Units
from pallas_kernels.decoder_layer.vectors import copy_row, norm_row
from pallas_kernels.hopper.branch import when


@dataclasses.dataclass(frozen=True)
class Entries:
    """The rows' memory, and how they get there."""

    plan: Plan
    refs: Refs
    units: Units
    totals: Totals
    activations: Any
    factors: Any
    """Reference to the factors of rows in float16, or None."""
    norms: Any
    """Reference to [4, 32] numbers of each warpgroup."""
    wg: jax.Array
    interpret: Any

    def norm_tokens(self, weight: jax.Array) -> None:
        """Norms the tokens, alternately by both warpgroups.

        Args:
          weight: from :func:`vectors.load_weight`.
        """
        plan, refs = self.plan, self.refs
        for t in range(plan.tokens):

            @when(self.wg == t % CONSUMERS)
            def _(t: int = t) -> None:
                row, added = refs.h.at[t], None if refs.attended is None else refs.attended.at[t]
                if plan.attention:
                    row, added = refs.residual.at[pl.ds(t * plan.width, plan.width)], None
                start, norms = t * plan.stride(plan.width), self.norms.at[self.wg]
                target = self.activations.at[pl.ds(start, plan.width)]
                # The router's weights are bfloat16: it takes a row of its own.
                unpacked = target if self.factors is None else None
                if self.factors is not None and plan.rule is not None:
                    unpacked = self.activations.at[pl.ds(plan.router_start + start, plan.width)]
                normed = norm_row(
                    row,
                    added,
                    weight,
                    unpacked,
                    norms,
                    eps=plan.eps,
                    dtype=plan.dtype,
                    interpret=self.interpret,
                )
                if self.factors is not None:
                    targets = [(target, self.factors.at[t])]
                    pack([normed], targets, plan.weight_dtype, norms, self.interpret)

        self.totals.meet()

    def copy_latents(self) -> None:
        """Copies or merges the outputs of the heads whose units of w_uv this program has."""
        plan, stride = self.plan, self.plan.stride(self.plan.latent)
        for t in range(plan.tokens):
            starts = [(head * plan.tokens + t) * stride for head in range(plan.own_heads)]
            first = t * plan.heads + self.units.first_head()
            if plan.sequences:
                self.merge_rows(t, starts)
            else:
                self.copy_rows(self.refs.flat_attended, plan.latent, starts, first)

    def merge_rows(self, token: int, starts: Sequence[int]) -> None:
        """Merges a token's parts, of consecutive heads. Each warpgroup has half of the columns."""
        plan = self.plan
        sequence, query = divmod(token, plan.tokens // plan.sequences)
        half = plan.latent // CONSUMERS
        for n, start in enumerate(starts):
            row = query * plan.heads + self.units.first_head() + n
            target = self.activations.at[pl.ds(start + self.wg * half, half)]
            merge_row(self.refs.parts, sequence, row, pl.ds(self.wg * half, half), target)
        self.totals.meet()

    def copy_rows(
        self, source: Any, width: int, starts: Sequence[int], first: Any = 0,
        factor: int | None = None,
    ) -> None:  # fmt: skip
        """Copies rows to ``starts`` in the activations' memory, alternately by both warpgroups.

        Args:
          first: number of the first row in ``source``.
          factor: index of the first row's factor, or None for rows that meet bfloat16 weights.
        """
        rows = [
            (source.at[pl.ds((first + n) * width, width)], self.activations.at[pl.ds(start, width)])
            for n, start in enumerate(starts)
        ]
        if self.factors is not None and factor is not None:
            packed = [(*row, self.factors.at[factor + n]) for n, row in enumerate(rows)]
            for wg in range(min(CONSUMERS, len(rows))):
                own = packed[wg::CONSUMERS], self.plan.weight_dtype, self.norms.at[wg]
                when(self.wg == wg)(functools.partial(pack_rows, *own, self.interpret))
            self.totals.meet()
            return
        for n, row in enumerate(rows):
            when(self.wg == n % CONSUMERS)(functools.partial(copy_row, *row))
        self.totals.meet()
