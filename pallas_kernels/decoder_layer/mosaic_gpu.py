"""The feed-forward half of a decoder layer in one Hopper kernel, for one to eight tokens.

A persistent kernel with the roles of :mod:`stream`. Its phases, in the order of time:

    phase               weights                     activations             results
    w_uv                [H, V, C]                   attention's output      values
    -- grid barrier --
    o_proj              [D, H V]                    values                  residual, with h
    -- grid barrier --
    router              [E, D]                      norm of the residual    logits
    gate_up             shared gate, up [F, D]      norm of the residual    hidden rows
    -- grid barrier --
    down                shared down [D, F]          hidden rows             sums in shared memory
    routed_gate_up      chosen gates, ups           norm of the residual    hidden rows
    -- grid barrier --
    routed_down         chosen downs                hidden rows             added to these

Then ``out = residual + sums``. Without w_uv its phase and the first barrier are missing. A dense
layer has only gate_up and down after o_proj. Each CTA norms the tokens and chooses the experts for
itself, which takes less time than another barrier, and copies, or merges from parts, the
attention's output that it needs.

The producer waits for its CTA's arrival at a barrier only because arriving takes longer while
copies are in flight. The weights of ``down`` arrive while the CTAs choose the experts; it waits for
their choice before it copies the routed experts' weights.

A pair of a token and an expert is a matrix of its own: if several tokens choose an expert, its
weights are read for each. Eight tokens of a model with 256 experts and 8 choices read 12 % more
than they need.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.decoder_layer.activations import (
    copy_row,
    load_block,
    load_weight,
    merge_row,
    pack_rows,
    store_block,
)
from pallas_kernels.decoder_layer.plan import Plan
from pallas_kernels.decoder_layer.reference import Chosen, Matrices, Projection, Router, shape_of
from pallas_kernels.decoder_layer.registers import (
    MOST_SPLIT_TOKENS,
    MOST_TOKENS,
    ROWS,
    SUMS,
    SUMS_SHAPE,
    Half,
    Rows,
    no_sums,
)
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    Cta,
    Phase,
    count_units,
    launch,
    weight_dtype_of,
    with_flat_scales,
)
from pallas_kernels.hopper import Index, Ref, multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.hopper.lanes import LAYOUT, SHAPE, filled, thread_index
from pallas_kernels.hopper.split_kv import Parts
from pallas_kernels.hopper.tiles import load_with_layout
from pallas_kernels.hopper.warpgroup import WARPS, when
from pallas_kernels.route.mosaic_gpu import choose, load_bias
from pallas_kernels.route.reference import Rule

_CHOSEN = 0  # signal: the experts are chosen; the next ones: arrived at grid barriers 0, 1, ...
_INTERPRETED_CTAS = 2


# ---- the back-end ----


def feed_forward(
    h: Float[Array, "M D"],
    norm: Float[Array, " D"],
    router: Router | None,
    shared: Matrices | None,
    routed: Matrices | None,
    *,
    rule: Rule | None,
    eps: float,
    attended: Float[Array, "M _"] | Parts | None = None,
    o_proj: Projection | None = None,
    w_uv: Float[Array, "H V C"] | None = None,
    counter: Any = None,
    interpret: Any = None,
) -> tuple[Float[Array, "M D"], Chosen | None]:
    """Implements :func:`pallas_kernels.feed_forward`. All kernels of a program should share
    ``counter``: XLA then neither fills it for each kernel nor runs two of them at the same time.

    Raises NotImplementedError for no Hopper GPU; no ``o_proj``; more than 8 tokens, or 4 for float8
    matrices; activations that are not bfloat16; matrices that are neither bfloat16, nor float8,
    int8 or int4 with scales; widths that are not multiples of 128; what
    :func:`pallas_kernels.route` refuses on Hopper; or too little shared memory."""
    require_hopper(interpret)
    if attended is None or o_proj is None:
        raise NotImplementedError("takes layers with o_proj, got none")
    router_dtype = h.dtype if router is None else router.weight.dtype
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if h.dtype not in allowed or router_dtype != h.dtype:
        raise NotImplementedError(
            f"takes bfloat16 activations and routers, got {h.dtype} and {router_dtype}"
        )
    if w_uv is not None and w_uv.dtype != h.dtype:
        raise NotImplementedError(f"takes W_UV of {h.dtype}, got {w_uv.dtype}")
    matrices = [(m, each.scales) for each in (shared, routed) if each for m in each[:3]]
    matrices.append(o_proj)
    plan = Plan.of(
        ctas=multiprocessors() if interpret is None else _INTERPRETED_CTAS,
        tokens=h.shape[0],
        width=h.shape[1],
        attention=shape_of(o_proj.weight)[1],
        heads=0 if w_uv is None else w_uv.shape[0],
        latent=0 if w_uv is None else w_uv.shape[2],
        sequences=len(attended.out) if isinstance(attended, Parts) else 0,
        ffn=0 if shared is None else shared.gate.shape[-2],
        expert_ffn=0 if routed is None else routed.gate.shape[-2],
        experts=0 if routed is None else math.prod(routed.gate.shape[:-2]),
        rule=rule,
        eps=eps,
        dtype=jnp.dtype(h.dtype),
        weight_dtype=weight_dtype_of(matrices, h.dtype),
        interpret=interpret,
    )
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    arrays = {"h": h, "norm": norm, "router": router, "shared": shared, "routed": routed}
    arrays |= {"attended": attended, "o_proj": o_proj, "w_uv": w_uv}
    made: Any = _feed_forward(arrays, counter, plan=plan, interpret=interpret)
    return made


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _feed_forward(
    arrays: dict[str, Any], counter: Any, *, plan: Plan, interpret: Any
) -> tuple[Array, Chosen | None]:
    """Launches the kernel on feed_forward's arrays, by name. The interpreter needs no counter."""
    h, attended, router = arrays["h"], arrays["attended"], arrays["router"]
    M, D, E, pairs = plan.tokens, plan.width, plan.experts, plan.choices
    parts, attended = (attended, None) if isinstance(attended, Parts) else (None, attended)
    inputs = arrays | {
        "flat_h": h.reshape(-1),
        "attended": attended,
        "flat_attended": None if attended is None else attended.reshape(-1),
        "parts": parts,
        "router": None if router is None else router.weight,
        "bias": None if router is None else router.bias,
    }
    for name in ("o_proj", "shared", "routed"):
        inputs[name] = with_flat_scales(inputs[name])
    f32 = jnp.float32
    results = {
        "out": ((M * D,), plan.dtype),
        "values": ((M * plan.attention * bool(plan.heads),), plan.dtype),  # with W_UV
        "residual": ((M * D,), plan.dtype),  # h with o_proj
        "scores": ((M * E,), f32),
        "experts": ((plan.ctas * pairs,), jnp.int32),  # each CTA's choice
        "weights": ((plan.ctas * pairs,), f32),
        "logits": ((M * E,), f32),
        "hidden": ((M * plan.ffn,), plan.dtype),
        "routed_hidden": ((pairs * plan.expert_ffn,), plan.dtype),
    }
    memory = {"sums": plgpu.SMEM((plan.total_blocks, *SHAPE), f32)}
    made = launch("feed_forward", FeedForward, plan, [inputs], results, memory, counter, interpret)
    out = made["out"].reshape(M, D)
    if router is None:
        return out, None
    experts, weights = (made[name][:pairs].reshape(M, -1) for name in ("experts", "weights"))
    return out, Chosen(made["scores"].reshape(M, E), experts, weights)


class FeedForward(Cta):
    """One CTA of the kernel."""

    first_arrival = _CHOSEN + 1

    def __init__(
        self, plan: Plan, refs: dict[str, Any], memory: dict[str, Any], counter: Any, interpret: Any
    ):
        super().__init__(plan, refs, memory, counter, interpret)
        (self.sums,) = memory["sums"]

    # ---- the units of this CTA ----

    def count(self, phase: Phase) -> Any:
        if phase.name == "routed_down":
            return self.output_units() * phase.matrices
        if phase.name == "w_uv":
            left = phase.units * phase.matrices - self.cta * self.plan.w_uv_units
            return jnp.clip(left, 0, self.plan.w_uv_units)
        return super().count(phase)

    def output_units(self) -> jax.Array:
        """Returns the number of this CTA's units of a D-wide output."""
        return count_units(self.cta, self.plan.width // self.plan.output_rows, self.plan.ctas)

    def locate(self, phase: Phase, i: Index) -> tuple[Any, Any]:
        if phase.name == "routed_down":
            pair, output = self._pair_and_output(i)
            unit = self.cta + output * self.plan.ctas
            return pair, jnp.minimum(unit, phase.units - 1) * phase.rows
        if phase.name == "w_uv":  # consecutive units, of few heads
            return self.matrix_and_row(phase, self.cta * self.plan.w_uv_units + i)
        return super().locate(phase, i)

    def _pair_and_output(self, i: Index) -> tuple[Any, Any]:
        """Returns the pair and the number of the output unit of the i-th unit of routed_down. A
        batch of pairs has all output units, and each of these all pairs of the batch."""
        pairs, batch = self.plan.choices, self.plan.batch
        if batch == pairs:
            return lax.rem(i, jnp.int32(pairs)), lax.div(i, jnp.int32(pairs))
        outputs = jnp.maximum(self.output_units(), 1)
        first = lax.div(i, outputs * batch) * batch
        in_batch = jnp.minimum(pairs - first, batch)
        i -= first * outputs
        return first + lax.rem(i, in_batch), lax.div(i, in_batch)

    def halves(self, phase: Phase, i: Index) -> tuple[Half, Half]:
        refs, (matrix, row) = self.refs, self.locate(phase, i)
        index: tuple[Any, ...] = ()
        if phase.name in ("router", "w_uv"):
            weight = refs.router if phase.name == "router" else refs.w_uv
            sides = [(weight, ()), (weight, ())]
            index = (matrix,) if phase.name == "w_uv" else ()
        elif phase.name == "o_proj":
            sides = [refs.o_proj, refs.o_proj]
        else:
            matrices = refs.shared
            if phase.name.startswith("routed"):
                matrices = refs.routed
                index = (refs.experts[self.first_pair() + matrix],)
            numbers = (2, 2) if phase.name.endswith("down") else (0, 1)
            sides = [(matrices[n], matrices.scales[n : n + 1]) for n in numbers]
        left, right = (self.half(phase, n, row, *side, index) for n, side in enumerate(sides))
        return left, right

    def first_pair(self) -> jax.Array:
        """Returns where this CTA's choice of experts begins."""
        return self.cta * self.plan.choices

    # ---- the producer ----

    def produce(self) -> None:
        state, passed = self.ring.start(), 0
        for phase in self.plan.phases:
            # Arriving takes longer while copies are in flight.
            if phase.barriers > passed:
                self.signals.wait(self.first_arrival + passed, 0)
            passed = phase.barriers
            if phase.name == "routed_gate_up":
                self.signals.wait(_CHOSEN, 0)
            state = self.produce_units(phase, state)
        self.ring.drain(state)

    # ---- the consumers ----

    def consume(self) -> None:
        plan, refs = self.plan, self.refs
        if plan.heads:
            self.copy_latents()
            self.multiply("w_uv", self.latents(), self.store_values)
            self.sync_grid()

        self.copy_rows(refs.values if plan.heads else refs.flat_attended, plan.attention)
        self.multiply("o_proj", self.rows(0, plan.attention), self.store_residual)
        norm = self.sync_grid(lambda: load_weight(refs.norm))

        def residual(t: int) -> Any:
            return refs.residual.at[pl.ds(t * plan.width, plan.width)]

        router_start = None if plan.rule is None else plan.router_start
        self.norm_rows(plan.width, norm, residual, plan.eps, router_start)
        if plan.rule is not None:
            start = plan.router_start if plan.is_float16 else 0
            rows = Rows(self.activations, start, plan.stride(plan.width), plan.tokens)
            self.multiply("router", rows, self.store_logits)
        if plan.ffn:
            self.multiply("gate_up", self.rows(0, plan.width), self.store_hidden)
        bias = self.sync_grid(self.load_bias)

        if plan.rule is not None:
            self.choose_experts(bias)
        if plan.ffn:
            self.copy_rows(refs.hidden, plan.ffn, plan.ffn_start, factor=plan.tokens)
            rows = self.rows(plan.ffn_start, plan.ffn, first_factor=plan.tokens)
            self.multiply("down", rows, self.store_sums)
        else:
            self.clear_sums()
        if plan.rule is not None:
            self.multiply("routed_gate_up", self.row_of_pair, self.store_routed_hidden)
            self.sync_grid()
            self.add_routed(self.phase("routed_down"))
        self.store_out()

    def multiply(self, name: str, rows: Any, store: Any) -> None:
        self.multiply_units(self.phase(name), rows, store)

    def rows(self, start: int, width: int, first_factor: int = 0) -> Rows:
        """Returns the tokens' activation rows for matrices of the plan's weight dtype."""
        plan = self.plan
        stride = plan.stride(width)
        return Rows(self.activations, start, stride, plan.tokens, self.factors, first_factor)

    def row_of_pair(self, pair: Index) -> Rows:
        """Returns the normed row of the token of a pair."""
        plan = self.plan
        token = lax.div(pair, jnp.int32(plan.rule.num_experts_per_tok))
        stride = plan.stride(plan.width)
        return Rows(self.activations, token * stride, stride, 1, self.factors, token)

    # ---- attention's output ----

    def first_head(self) -> jax.Array:
        """Returns the first of the heads, ``w_uv_heads``, that have this CTA's units of w_uv."""
        plan = self.plan
        head = lax.div(self.cta * plan.w_uv_units, jnp.int32(plan.phases[0].units))
        return jnp.minimum(head, plan.heads - plan.w_uv_heads)

    def copy_latents(self) -> None:
        """Copies or merges the outputs of the heads whose units of w_uv this CTA has."""
        plan, stride = self.plan, self.plan.stride(self.plan.latent)
        for t in range(plan.tokens):
            starts = [(head * plan.tokens + t) * stride for head in range(plan.w_uv_heads)]
            if plan.sequences:
                self.merge_rows(t, starts)
            else:
                first = t * plan.heads + self.first_head()
                self.copy_to(starts, self.refs.flat_attended, plan.latent, first)

    def latents(self) -> Any:
        """Returns a function from a head to its rows."""
        plan = self.plan
        stride, first = plan.stride(plan.latent), self.first_head()
        return lambda head: Rows(
            self.activations, (head - first) * (plan.tokens * stride), stride, plan.tokens
        )

    def merge_rows(self, token: int, starts: Sequence[int]) -> None:
        """Merges a token's parts, of consecutive heads. Each warpgroup has half of the columns."""
        plan = self.plan
        sequence, query = divmod(token, plan.tokens // plan.sequences)
        half = plan.latent // CONSUMERS
        for n, start in enumerate(starts):
            row = query * plan.heads + self.first_head() + n
            target = self.activations.at[pl.ds(start + self.wg * half, half)]
            merge_row(self.refs.parts, sequence, row, pl.ds(self.wg * half, half), target)
        self.sync_consumers()

    def copy_rows(self, source: Ref, width: int, start: int = 0, factor: int = 0) -> None:
        """Copies the tokens' rows for matrices of the plan's weight dtype."""
        stride = self.plan.stride(width)
        starts = [start + t * stride for t in range(self.plan.tokens)]
        self.copy_to(starts, source, width, 0, factor)

    def copy_to(
        self,
        starts: Sequence[int],
        source: Ref,
        width: int,
        first: Index,
        factor: int | None = None,
    ) -> None:
        """Copies rows of ``source``, from its ``first`` on, to the activations' memory, alternately
        by both warpgroups; in float16 with factors from index ``factor`` on, unless that is
        None."""
        rows = [
            (source.at[pl.ds((first + n) * width, width)], self.activations.at[pl.ds(start, width)])
            for n, start in enumerate(starts)
        ]
        if self.factors is not None and factor is not None:
            packed = [(*row, self.factors.at[factor + n]) for n, row in enumerate(rows)]
            for wg in range(min(CONSUMERS, len(rows))):
                arguments = packed[wg::CONSUMERS], self.plan.weight_dtype, self.norms.at[wg]
                when(self.wg == wg)(functools.partial(pack_rows, *arguments, self.interpret))
        else:
            for n, row in enumerate(rows):
                when(self.wg == n % CONSUMERS)(functools.partial(copy_row, *row))
        self.sync_consumers()

    # ---- the choice of experts ----

    def load_bias(self) -> Any:
        if self.refs.bias is None:
            return None
        return load_bias(self.refs.bias, filled(0), self.plan.experts, self.interpret)

    def choose_experts(self, bias: Any) -> None:
        plan, refs = self.plan, self.refs
        choose(
            refs.logits,
            bias,
            refs.scores,
            refs.experts,
            refs.weights,
            token=thread_index(0) + self.wg * WARPS,
            first=self.first_pair(),
            is_reporter=self.cta == 0,
            tokens=plan.tokens,
            experts=plan.experts,
            rule=plan.rule,
            interpret=self.interpret,
        )
        self.sync_consumers()
        self.signals.arrive(_CHOSEN)

    # ---- the results of units: what one warpgroup does with the totals of a unit's halves ----

    def store_values(
        self, i: Index, head: Index, row: Index, first: jax.Array, second: jax.Array
    ) -> None:
        plan = self.plan
        start = head * (plan.attention // plan.heads) + row
        for n, block in enumerate((first, second)):
            self.store(self.refs.values, start + n * ROWS, plan.attention, block)

    def store_residual(
        self, i: Index, matrix: Index, row: Index, left: jax.Array, right: jax.Array
    ) -> None:
        plan = self.plan
        for n, block in enumerate(output_blocks(self.phase("o_proj"), left, right)):
            attended, start = block.astype(plan.dtype).astype(jnp.float32), row + n * ROWS
            h = load_block(self.refs.flat_h, start, plan.width, plan.tokens, self.interpret)
            self.store(self.refs.residual, start, plan.width, h + attended)

    def store_logits(
        self, i: Index, matrix: Index, row: Index, left: jax.Array, right: jax.Array
    ) -> None:
        self.store(self.refs.logits, row, self.plan.experts, left + right)

    def store_hidden(
        self, i: Index, matrix: Index, row: Index, gate: jax.Array, up: jax.Array
    ) -> None:
        self.store(self.refs.hidden, row, self.plan.ffn, gate / (1 + jnp.exp(-gate)) * up)

    def store_routed_hidden(
        self, i: Index, pair: Index, row: Index, gate: jax.Array, up: jax.Array
    ) -> None:
        hidden, start = gate / (1 + jnp.exp(-gate)) * up, pair * self.plan.expert_ffn + row
        store_block(self.refs.routed_hidden, start, 0, hidden, 1, self.interpret)

    def store_sums(
        self, i: Index, matrix: Index, row: Index, left: jax.Array, right: jax.Array
    ) -> None:
        blocks = output_blocks(self.phase("down"), left, right)
        for n, block in enumerate(blocks):
            self.sums.at[i * len(blocks) + n][...] = block

    def store(self, ref: Ref, start: Index, stride: int, block: jax.Array) -> None:
        store_block(ref, start, stride, block, self.plan.tokens, self.interpret)

    # ---- the routed experts' downs, and the output ----

    def clear_sums(self) -> None:
        """Clears the sums, which a layer without shared experts has not stored."""
        plan = self.plan
        for i in range(plan.total_blocks):
            zeros = plgpu.layout_cast(jnp.zeros(SHAPE, jnp.float32), LAYOUT)
            when(self.wg == i // plan.output_blocks % CONSUMERS)(
                lambda i=i, zeros=zeros: _set(self.sums.at[i], zeros)
            )

    def add_routed(self, phase: Phase) -> None:
        """Adds the routed experts' downs to the sums, for as many pairs at a time as have room. The
        sums of an output feature's experts stay in registers, times their routing weights. The
        scales of each unit are loaded one unit ahead."""
        plan, refs, operand = self.plan, self.refs, phase.operand
        assert operand is not None
        assert plan.rule is not None
        outputs, stride = self.output_units(), plan.stride(plan.expert_ffn)
        K, first_pair = jnp.int32(plan.rule.num_experts_per_tok), self.first_pair()
        # Sums over rows in float16 are transposed in registers, with the tokens twice in a row if
        # the halves are of one row.
        transposed = plan.is_float16 and self.interpret is None
        row_token = plgpu.broadcasted_iota(jnp.int32, SUMS_SHAPE, int(transposed), layout=SUMS)
        most = MOST_SPLIT_TOKENS if transposed and operand.is_split else MOST_TOKENS
        row_token = jnp.bitwise_and(row_token, most - 1)
        count = self.count(phase)

        def add_output(n: jax.Array, carry: Any, low: int, high: int) -> Any:
            def add_pair(p: jax.Array, carry: Any) -> Any:
                state, scales, *sums = carry
                next_scales = self.scales(phase, first + p + 1, count)
                factor = refs.weights[first_pair + low + p]
                if self.factors is not None:
                    factor = factor * self.factors[plan.routed_factor + p]
                if plan.tokens > 1:
                    # All rows of the products are the pair's token.
                    factor = jnp.where(row_token == lax.div(low + p, K), factor, 0.0)
                rows = Rows(self.activations, p * stride, stride, 1, self.factors)
                state, products = self.multiply_unit(operand, rows, scales, state)
                sums = [s + factor * x for s, x in zip(sums, products, strict=True)]
                return state, next_scales, *sums

            state, number, scales = carry
            first = low * outputs + n * (high - low)
            carry = state, scales, no_sums(), no_sums()
            state, scales, left, right = lax.fori_loop(0, high - low, add_pair, carry)
            self.exchange(number, (left, right))

            @when(self.wg == lax.rem(n, jnp.int32(CONSUMERS)))
            def _() -> None:
                left, right = self.totals(operand, number, plan.tokens)
                for j, block in enumerate(output_blocks(phase, left, right)):
                    total = self.sums.at[n * plan.output_blocks + j]
                    _set(total, load_with_layout(total, LAYOUT) + block)

            return state, number + 1, scales

        state, number = self.state, self.exchanges
        scales = self.scales(phase, jnp.int32(0), count)
        for low in range(0, plan.choices, plan.batch):
            high = min(low + plan.batch, plan.choices)
            if low:
                self.sync_consumers()  # both warpgroups have read the last batch
            starts = [(pair - low) * stride for pair in range(low, high)]
            self.copy_to(starts, refs.routed_hidden, plan.expert_ffn, low, plan.routed_factor)
            add = functools.partial(add_output, low=low, high=high)
            state, number, scales = lax.fori_loop(0, outputs, add, (state, number, scales))

    def store_out(self) -> None:
        """Adds the sums to the residual."""
        plan, refs, blocks = self.plan, self.refs, self.plan.output_blocks
        for i in range(plan.total_blocks):
            row = (self.cta + i // blocks * plan.ctas) * plan.output_rows
            row += i % blocks * ROWS
            exists = (self.wg == i // blocks % CONSUMERS) & (row < plan.width)

            @when(exists)
            def _(i: int = i, row: jax.Array = row) -> None:
                sums = load_with_layout(self.sums.at[i], LAYOUT)
                sums = sums.astype(plan.dtype).astype(jnp.float32)
                h = load_block(refs.residual, row, plan.width, plan.tokens, self.interpret)
                self.store(refs.out, row, plan.width, h + sums)


def output_blocks(phase: Phase, left: jax.Array, right: jax.Array) -> list[jax.Array]:
    """Returns the blocks of output features of a matrix, from the totals of a unit's halves."""
    assert phase.operand is not None
    return [left + right] if phase.operand.is_split else [left, right]


def _set(ref: Ref, values: jax.Array) -> None:
    ref[...] = values
