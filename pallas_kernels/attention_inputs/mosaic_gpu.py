"""Everything before attention itself in one Hopper kernel, for one to eight tokens.

A persistent kernel with the roles of :mod:`pallas_kernels.decoder_layer.stream`. The units of all
phases go round the CTAs, so that CTAs without a last unit of one phase get the first of the next.

    phase       weights             activations         results
    q_proj      [H (N + R), D]      norm of x           q_nope; rotated q_rope
    kv_a_proj   [C + R, D]          norm of x           latents; rotated rope keys in the pages
    -- grid barrier --
    w_uk        [H, N, C]           q_nope              q_latent
    latents                         latents             their norm in the pages

Rope needs no barrier: a unit's eight features are four of its pairs. With q_a_proj it comes in the
place of q_proj, and q_b_proj follows after a barrier of its own and the norm of its results. The
results between phases are float32, apart from what tensor cores multiply.

W_UK is multiplied on ordinary cores (:mod:`registers`). Its units are pieces of some columns of a
head, and a ring stage has some of a piece's rows: the first half of them in each half of the stage.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.attention_inputs.reference import AttentionInputs, AttentionWeights
from pallas_kernels.attention_inputs.registers import (
    Pieces,
    add_products,
    layout_of,
    no_sums,
    store_rotated,
    store_sums,
    store_totals,
)
from pallas_kernels.decoder_layer.activations import copy_row, load_weight, norm_row, store_block
from pallas_kernels.decoder_layer.mosaic_gpu import output_blocks
from pallas_kernels.decoder_layer.reference import is_integer
from pallas_kernels.decoder_layer.registers import ROWS, Half, Operand, Rows, zero_after
from pallas_kernels.decoder_layer.stream import (
    CONSUMERS,
    STEP_BYTES,
    WARPGROUP,
    Cta,
    Phase,
    RowCopies,
    Stages,
    check,
    launch,
    padded,
    weight_dtype_of,
    with_flat_scales,
)
from pallas_kernels.hopper import Index, multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.hopper.lanes import LANES, load
from pallas_kernels.hopper.ring import PipelineState
from pallas_kernels.hopper.warpgroup import when

_HEAD = 64
_INTERPRETED_CTAS = 2

# ---- the plan ----


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes, and what follows from them. :meth:`of` makes and checks it."""

    ctas: int
    tokens: int
    width: int  # D, the hidden size
    q_rank: int  # Q, or 0 without q_a_proj
    rope: int
    heads: int
    nope: int
    rank: int
    eps: float
    latent_eps: float
    dtype: Any
    weight_dtype: Any  # dtype of the projections
    pieces: Any = None
    phases: tuple[Phase, ...] = ()  # in the order in which their weights are read
    stages: Any = None

    signals = 2  # one for each grid barrier: this CTA has arrived at it

    @staticmethod
    def of(*, interpret: Any, **sizes: Any) -> Plan:
        """Returns the plan for ``sizes``, the fields up to ``weight_dtype``, or raises
        NotImplementedError."""
        plan = Plan(**sizes)
        widths = {"hidden": (plan.width, WARPGROUP), "q_lora": (plan.q_rank, WARPGROUP)}
        widths |= {"latent": (plan.rank, WARPGROUP), "head": (plan.nope, _HEAD)}
        widths |= {"rope": (plan.rope, ROWS)}
        check(plan.tokens, plan.dtype, plan.weight_dtype, widths)
        sizes_of_w_uk = plan.heads, plan.nope, plan.rank, plan.tokens, plan.dtype
        plan = dataclasses.replace(plan, pieces=Pieces.of(*sizes_of_w_uk, plan.ctas))
        phases = _phases(plan)
        stages = Stages.of(phases, interpret, STEP_BYTES)
        queries = plan.tokens * plan.pieces.query_stride
        used = 2 * plan.activations + 4 * (queries + plan.pieces.partials)
        stages = stages.fitting(used, plan.tokens)
        return dataclasses.replace(plan, phases=phases, stages=stages)

    @property
    def waits(self) -> bool:
        """Whether the producer waits for its CTA's arrival at a grid barrier before it copies the
        weights of the next phases, because arriving takes longer while copies are in flight. If all
        weights fit the ring at the same time, they have arrived when the CTA does."""
        return self.most_stages > self.stages.count

    @property
    def most_stages(self) -> int:
        """Ring stages that the CTA with the most work fills."""

        def stages(phase: Phase, cta: int) -> int:
            first = (cta + (phase.shift or 0)) % self.ctas
            return len(range(first, phase.units, self.ctas)) * self.steps(phase)

        return max(sum(stages(phase, cta) for phase in self.phases) for cta in range(self.ctas))

    def steps(self, phase: Phase) -> int:
        """Returns the ring stages of a unit."""
        if phase.operand is not None:
            return phase.operand.steps
        return self.pieces.steps if phase.name == "w_uk" else 0

    @property
    def activations(self) -> int:
        return self.tokens * max(self.stride(self.width), self.stride(self.q_rank))

    @property
    def factors(self) -> int:
        """Factors of rows in float16, 0 if no rows are."""
        return self.tokens * (self.weight_dtype.itemsize == 1)

    def stride(self, columns: int) -> int:
        """Returns the distance of activation rows in shared memory, see :func:`padded`."""
        return padded(columns, self.weight_dtype)


def _phases(plan: Plan) -> tuple[Phase, ...]:
    """Returns the phases in the order in which their weights are read."""
    phases: list[Phase] = []

    def add(name: str, units: int, barriers: int, **more: Any) -> None:
        before = sum(phase.units for phase in phases)
        phases.append(Phase(name, units, barriers=barriers, shift=-before, **more))

    def add_projection(name: str, features: int, columns: int, barriers: int) -> None:
        dtype = plan.weight_dtype
        rows = 2 * ROWS if is_integer(dtype) else ROWS
        if features % rows:
            raise NotImplementedError(
                f"takes {name} of {dtype} with a multiple of {rows} rows, got {features}"
            )
        operand = Operand.of(dtype, columns, not is_integer(dtype), STEP_BYTES)
        add(name, features // rows, barriers, operand=operand, rows=rows)

    queries, latents = plan.heads * (plan.nope + plan.rope), plan.rank + plan.rope
    if plan.q_rank:
        add_projection("q_a_proj", plan.q_rank, plan.width, 0)
        add_projection("kv_a_proj", latents, plan.width, 0)
        add_projection("q_proj", queries, plan.q_rank, 1)
    else:
        add_projection("q_proj", queries, plan.width, 0)
        add_projection("kv_a_proj", latents, plan.width, 0)
    last = 2 if plan.q_rank else 1
    add("w_uk", plan.heads * plan.pieces.per_head, last)
    add("latents", plan.tokens, last)
    return tuple(phases)


# ---- the back-end ----


def attention_inputs(
    x: Float[Array, "M D"],
    weights: AttentionWeights,
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Float[Array, "P page width"],
    slots: Int[Array, " M"],
    *,
    eps: float,
    latent_eps: float,
    counter: Any = None,
    interpret: Any = None,
) -> AttentionInputs:
    """Implements :func:`pallas_kernels.attention_inputs`.

    Raises NotImplementedError for no Hopper GPU; more than 8 tokens, or 4 for float8 projections;
    activations, pages or W_UK that are not bfloat16; projections that are neither all bfloat16, nor
    all float8, int8 or int4 with scales; widths that are not multiples of 128, or rope widths and
    columns of pages that are not multiples of 8; or too little shared memory."""
    require_hopper(interpret)
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if x.dtype not in allowed or {weights.w_uk.dtype, pages.dtype} != {x.dtype}:
        raise NotImplementedError(
            f"takes bfloat16 activations, W_UK and pages, got {x.dtype}, {weights.w_uk.dtype} and"
            f" {pages.dtype}"
        )
    projections = [weights.q_proj, weights.kv_a_proj]
    projections += [] if weights.q_a_proj is None else [weights.q_a_proj]
    H, N, C = weights.w_uk.shape
    plan = Plan.of(
        ctas=multiprocessors() if interpret is None else _INTERPRETED_CTAS,
        tokens=x.shape[0],
        width=x.shape[1],
        q_rank=0 if weights.q_a_proj is None else weights.q_a_proj.weight.shape[0],
        rope=2 * cos.shape[1],
        heads=H,
        nope=N,
        rank=C,
        eps=eps,
        latent_eps=latent_eps,
        dtype=jnp.dtype(x.dtype),
        weight_dtype=weight_dtype_of(projections, x.dtype),
        interpret=interpret,
    )
    if pages.shape[2] % ROWS:
        raise NotImplementedError(
            f"takes pages with a multiple of {ROWS} columns, got {pages.shape[2]}"
        )
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    slots = slots.astype(jnp.int32)
    arrays = {"x": x, "weights": weights, "cos": cos, "sin": sin, "slots": slots}
    made: Any = _attention_inputs(arrays, pages, counter, plan=plan, interpret=interpret)
    return AttentionInputs(*made)


# ---- the kernel ----


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _attention_inputs(
    arrays: dict[str, Any], pages: Array, counter: Any, *, plan: Plan, interpret: Any
) -> tuple[Array, Array, Array]:
    """Launches the kernel on x, weights, cos, sin and slots. The interpreter needs no counter."""
    M, H, pieces, f32 = plan.tokens, plan.heads, plan.pieces, jnp.float32
    weights = arrays["weights"]
    for name in ("q_proj", "kv_a_proj", "q_a_proj"):
        weights = weights._replace(**{name: with_flat_scales(getattr(weights, name))})
    rows = jax.new_ref(pages.reshape(-1, pages.shape[-1]))  # a row for each token
    results = {
        "q_latent": ((M * H * plan.rank,), plan.dtype),
        "q_rope": ((M * H, plan.rope), plan.dtype),
        "compressed": ((M * plan.q_rank,), f32),  # the results of q_a_proj
        "queries": ((M * H * pieces.query_stride,), f32),
        "latents": ((M * plan.rank,), f32),
    }
    memory = {
        "queries": plgpu.SMEM((M * pieces.query_stride,), f32),
        "partials": plgpu.SMEM((pieces.partials,), f32),
    }
    if interpret is not None:  # its stages cannot be seen as arrays of another shape
        of_pieces = plan.stages.count, 2, pieces.rows // 2, pieces.width
        memory["pieces"] = plgpu.SMEM(of_pieces, plan.dtype)
    made = launch(
        "attention_inputs", BeforeAttention, plan, [arrays | {"weights": weights}, {"pages": rows}],
        results, memory, counter, interpret,
    )  # fmt: skip
    q_latent, q_rope = made["q_latent"], made["q_rope"]
    return q_latent.reshape(M, H, -1), q_rope.reshape(M, H, -1), rows[...].reshape(pages.shape)


class BeforeAttention(Cta):
    """One CTA of the kernel."""

    alternates_by_exchange = True

    def __init__(
        self, plan: Plan, refs: dict[str, Any], memory: dict[str, Any], counter: Any, interpret: Any
    ):
        super().__init__(plan, refs, memory, counter, interpret)
        self.producer_waits = plan.waits
        (self.queries,), (self.partials,) = memory["queries"], memory["partials"]
        (self.piece_stages,) = memory.get("pieces", self.stages.refs)

    def halves(self, phase: Phase, i: Index) -> tuple[Half, Half]:
        projection = getattr(self.refs.weights, phase.name)
        _, row = self.locate(phase, i)
        left, right = (self.half(phase, n, row, *projection) for n in range(2))
        return left, right

    def unit(self, phase: Phase, i: Index) -> Any:
        """Returns this CTA's i-th unit, or any unit if it has none."""
        return jnp.minimum(self.first_unit(phase) + i * self.plan.ctas, phase.units - 1)

    def piece(self, phase: Phase, i: Index) -> tuple[Any, Any]:
        """Returns the head and the first column of this CTA's i-th piece of W_UK."""
        unit, per_head = self.unit(phase, i), jnp.int32(self.plan.pieces.per_head)
        return lax.div(unit, per_head), lax.rem(unit, per_head) * self.plan.pieces.width

    # ---- the producer ----

    def produce(self) -> None:
        state, passed = self.ring.start(), 0
        for phase in self.plan.phases:
            if phase.barriers > passed:
                if self.producer_waits:
                    self.signals.wait(passed, 0)
                passed = phase.barriers
            if phase.operand is not None:
                state = self.produce_units(phase, state)
            elif phase.name == "w_uk":
                state = self.produce_pieces(phase, state)
        self.ring.drain(state)

    def produce_pieces(self, phase: Phase, state: PipelineState) -> PipelineState:
        """Copies this CTA's pieces of W_UK, some rows per stage."""
        pieces = self.plan.pieces
        half, row_bytes = pieces.rows // 2, pieces.width * pieces.dtype.itemsize

        def piece(i: jax.Array, state: PipelineState) -> PipelineState:
            head, column = self.piece(phase, i)

            def fill(step: jax.Array, state: PipelineState, carry: None) -> None:
                copies = []
                for n in range(2):
                    rows = pl.ds(step * pieces.rows + n * half, half)
                    window = head, rows, pl.ds(column, pieces.width)
                    target = self.piece_stages.at[state.stage].at[n]
                    w_uk = self.refs.weights.w_uk
                    copies.append(RowCopies(w_uk, window, target, row_bytes=row_bytes))
                self.ring.fill(state, copies)

            return self.ring.loop(self.steps(pieces.steps), fill, state, None)[0]

        return lax.fori_loop(0, self.count(phase), piece, state)

    # ---- the consumers ----

    def consume(self) -> None:
        plan, refs, weights = self.plan, self.refs, self.refs.weights
        norm = load_weight(weights.norm)
        self.norm_rows(plan.width, norm, lambda t: refs.x.at[t], plan.eps)

        if plan.q_rank:
            self.project("q_a_proj", plan.width)
            self.project("kv_a_proj", plan.width)
            norm = load_weight(weights.q_a_norm)  # arrives while the barrier waits
            self.sync_grid()
            Q = plan.q_rank
            self.norm_rows(Q, norm, lambda t: refs.compressed.at[pl.ds(t * Q, Q)], plan.latent_eps)
            self.project("q_proj", Q)
        else:
            self.project("q_proj", plan.width)
            self.project("kv_a_proj", plan.width)
        self.sync_grid()

        self.multiply_pieces(self.phase("w_uk"))
        self.store_latents(self.phase("latents"))

    def project(self, name: str, columns: int) -> None:
        """Multiplies the tokens' rows, which have ``columns`` columns, with a projection."""
        plan, phase = self.plan, self.phase(name)
        rows = Rows(self.activations, 0, plan.stride(columns), plan.tokens, self.factors)
        self.multiply_units(phase, rows, functools.partial(self.store_features, phase))

    def store_features(
        self, phase: Phase, i: Index, matrix: Any, row: Any, left: jax.Array, right: jax.Array
    ) -> None:
        """Stores a projection's output features, in blocks of eight."""
        _, row = self.locate(phase, i)  # again, which takes no register during the multiplication
        for n, block in enumerate(output_blocks(phase, left, right)):
            self.store_block(phase, row + n * ROWS, block)

    def store_block(self, phase: Phase, row: jax.Array, block: jax.Array) -> None:
        """Stores eight output features. Those with positions are rotated."""
        plan, refs, pieces = self.plan, self.refs, self.plan.pieces
        tokens, interpret = plan.tokens, self.interpret
        if phase.name == "q_a_proj":
            store_block(refs.compressed, row, plan.q_rank, block, tokens, interpret)
            return
        is_query = phase.name == "q_proj"
        plain = plan.nope if is_query else plan.rank
        head = lax.div(row, jnp.int32(plain + plan.rope)) if is_query else jnp.int32(0)
        feature = row - head * (plain + plan.rope)

        @when(feature < plain)
        def _() -> None:
            target = refs.queries if is_query else refs.latents
            of_head = pieces.query_stride if is_query else plain
            stride = plan.heads * of_head if is_query else of_head
            store_block(target, head * of_head + feature, stride, block, tokens, interpret)

        @when(feature >= plain)
        def _() -> None:
            target = refs.pages, self.slot, plain
            if is_query:
                target = refs.q_rope, lambda t: t * plan.heads + head, 0
            pair = lax.div(feature - plain, jnp.int32(2))
            store_rotated(*target, pair, block, refs.cos, refs.sin, tokens, interpret)

    def slot(self, token: Any) -> Any:
        """Returns the slots of each thread's token, or in the interpreter of one token."""
        if self.interpret is not None:
            return self.refs.slots[token]
        return load(self.refs.slots, token, LANES, None)

    def multiply_pieces(self, phase: Phase) -> None:
        """Multiplies this CTA's pieces of W_UK with the queries of their heads."""
        plan, pieces, interpret = self.plan, self.plan.pieces, self.interpret
        stride, row_bytes = pieces.query_stride, plan.stages.row_bytes

        def piece(i: jax.Array, state: PipelineState) -> PipelineState:
            head, column = self.piece(phase, i)
            for t in range(plan.tokens):

                @when(self.wg == t % CONSUMERS)
                def _(t: int = t) -> None:
                    source = pl.ds((t * plan.heads + head) * stride, stride)
                    target = self.queries.at[pl.ds(t * stride, stride)]
                    copy_row(self.refs.queries.at[source], target)

            self.sync_consumers()  # also: all have read the piece before from the partial sums

            def add(step: jax.Array, state: PipelineState, sums: jax.Array) -> jax.Array:
                self.ring.wait_full(state)
                stage = self.piece_stages.at[state.stage]
                sums = add_products(pieces, stage, row_bytes, self.queries, step, sums, interpret)
                read = state.stage + zero_after([sums], layout_of(pieces), interpret)
                self.ring.release(state._replace(stage=read))
                return sums

            first = no_sums(pieces, interpret)
            state, sums = self.ring.loop(self.steps(pieces.steps), add, state, first)
            store_sums(pieces, self.partials, sums, interpret)
            self.sync_consumers()
            start = head * plan.rank + column
            store_totals(pieces, self.partials, self.refs.q_latent, start, interpret)
            return state

        self.state = lax.fori_loop(0, self.count(phase), piece, self.state)

    def store_latents(self, phase: Phase) -> None:
        """Norms latents to the pages. A unit is a token."""
        plan, refs, C = self.plan, self.refs, self.plan.rank

        def token(i: jax.Array, carry: None) -> None:
            t = self.unit(phase, i)
            slot = refs.slots[t]

            @when((slot >= 0) & (self.wg == 0))
            def _() -> None:
                row, weight = refs.latents.at[pl.ds(t * C, C)], load_weight(refs.weights.kv_a_norm)
                target, norms = refs.pages.at[slot, pl.ds(0, C)], self.norms.at[self.wg]
                norm_row(row, weight, target, norms, plan.latent_eps, plan.dtype, self.interpret)

        lax.fori_loop(0, self.count(phase), token, None)
