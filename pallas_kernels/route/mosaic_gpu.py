"""route on Hopper GPUs: one warp per token, with the experts distributed over its lanes.

Design for 64 tokens and 256 experts in 8 groups, with 8 experts chosen: XLA compiles this to twelve
kernels of 2 to 3 microseconds each, mostly launch overhead, so here it is one kernel. One
multiprocessor would take 16 microseconds for all tokens, so up to 8 CTAs share the work, which
leaves two warps per scheduler. They form a cluster, because they need each other's choices.

Sorting is by counting, with work that is linear in the number of tokens. A pair's position is the
number of pairs of lower experts, plus the earlier tokens that chose the same expert. Each
warpgroup has consecutive tokens and, in shared memory, for every expert words with a bit for each
of its tokens: whether it chose the expert. So the earlier tokens of the same warpgroup are ones of
a word, those of other warpgroups are sums of ones, and those of other CTAs are counts, which
the CTAs exchange through global memory. The pairs of a token that is not valid count for one
more column, after those of the experts.

More than 128 tokens are spread over all multiprocessors. Their CTAs cannot wait for each
other, so a second kernel computes the positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float32, Int

from pallas_kernels.hopper import Index, Ref, require_hopper
from pallas_kernels.hopper.lanes import (
    LANES,
    WARPS,
    add_if,
    bits_of,
    filled,
    load,
    load_padded,
    load_rows,
    maximum,
    ones_of,
    over_warp,
    prefix_sums,
    select,
    set_bits,
    store,
    store_rows,
    thread_index,
)
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.warpgroup import sync_cluster, sync_cta, sync_warpgroup
from pallas_kernels.residuals import named
from pallas_kernels.route.reference import Routes, Rule

ONE_KERNEL_TOKENS = 128
"""Most tokens for which a cluster does everything in one kernel. A second kernel costs half a
microsecond or one, and less than a second token of each warp of the cluster."""

MAX_TOKENS = 16384
_CLUSTER = 8  # CTAs of a cluster
_MULTIPROCESSORS = 132
_WARPGROUPS = 4  # of a CTA, at most
_WORD = 32  # bits
_MAX_EXPERTS = 384
_MAX_EXPERTS_PER_TOKEN = 16
_MAX_GROUPS = 8
_TOGETHER = 16  # counts that a thread loads before it adds them, to hide the L2 cache's latency
_WORD_BITS = 5  # log2 of the bits of a word
_LOWEST = -(2**31)  # of no expert, or of one that is already chosen: below every score's integer
_MINUS_INFINITY = -(2**31) + 2**23 - 1  # the integer of -inf
_FLIP = 2**31 - 1


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
    interpret: Any = None,
) -> Routes:
    """Implements :func:`pallas_kernels.route`. Its gradient is the reference's. Raises
    NotImplementedError for no Hopper GPU; no tokens or more than 16,384; more than 384 experts; K >
    16; or more than 8 groups."""
    require_hopper(interpret)
    (M, E), K = logits.shape, rule.num_experts_per_tok
    if not 0 < M <= MAX_TOKENS:
        raise NotImplementedError(f"takes 1 to {MAX_TOKENS} tokens, got {M}")
    if E > _MAX_EXPERTS:
        raise NotImplementedError(f"takes {_MAX_EXPERTS} experts at most, got {E}")
    if K > _MAX_EXPERTS_PER_TOKEN:
        raise NotImplementedError(
            f"takes {_MAX_EXPERTS_PER_TOKEN} experts per token at most, got {K}"
        )
    if rule.n_group > _MAX_GROUPS:
        raise NotImplementedError(f"takes {_MAX_GROUPS} groups at most, got {rule.n_group}")
    plan = plan_of(M, E if valid is None else E + 1)
    return _route_with_gradient(logits, bias, valid, rule, plan, interpret)


def _run_route(logits, bias, valid, rule: Rule, plan: Plan, interpret: Any) -> Routes:
    valid = None if valid is None else valid.astype(jnp.int32)
    options = {"rule": rule, "plan": plan, "interpret": interpret}
    return Routes(*choose_and_sort(logits, bias, valid, **options))


def _forward(logits, bias, valid, *options):
    routes = named("routes", _run_route(logits, bias, valid, *options))
    return routes, (logits, routes.experts)


def _backward(rule, plan, interpret, residuals, cotangents):
    del plan, interpret
    logits, experts = residuals

    def scores_and_weights(logits):
        scores = rule.scores(logits)
        return scores, rule.weights(scores, experts)

    vjp = jax.vjp(scores_and_weights, logits)[1]
    return *vjp((cotangents.scores, cotangents.weights)), None, None


_route_with_gradient = jax.custom_vjp(_run_route, nondiff_argnums=(3, 4, 5))
_route_with_gradient.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Each warp takes ``steps`` tokens in turn. A warpgroup's tokens are consecutive."""

    ctas: int
    warpgroups: int
    steps: int
    columns: int
    """Columns of a table with one column per expert, and one for the invalid tokens if there may be
    any. A multiple of a CTA's threads."""
    one_kernel: bool  # whether the CTAs form a cluster, so that one kernel suffices

    @property
    def words(self) -> int:
        """Words with a bit for each token of a warpgroup."""
        return -(-WARPS * self.steps // _WORD)

    @property
    def cta_words(self) -> int:
        """Words with a bit for each token of a CTA and each column."""
        return self.warpgroups * self.words * self.columns

    @property
    def rounds(self) -> int:
        """Columns of each thread of a cta."""
        return self.columns // (self.warpgroups * WARPS * LANES)


def plan_of(tokens: int, columns: int) -> Plan:
    """Returns the plan for a number of tokens and of columns that are needed."""
    one_kernel = tokens <= ONE_KERNEL_TOKENS
    if one_kernel:
        ctas = min(_CLUSTER, 1 << (-(-tokens // WARPS) - 1).bit_length())
        warpgroups = min(_WARPGROUPS, -(-tokens // (WARPS * ctas)))
        steps = -(-tokens // (WARPS * warpgroups * ctas))
    else:
        warpgroups = _WARPGROUPS
        steps = -(-tokens // (WARPS * warpgroups * _MULTIPROCESSORS))
        ctas = -(-tokens // (WARPS * warpgroups * steps))
    threads = warpgroups * WARPS * LANES
    return Plan(ctas, warpgroups, steps, -(-columns // threads) * threads, one_kernel)


@lowered_once("rule", "plan", "interpret")
def choose_and_sort(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Int[Array, " M"] | None,
    *,
    rule: Rule,
    plan: Plan,
    interpret: Any = None,
) -> Sequence[jax.Array]:
    """Returns the fields of Routes."""
    (M, E), K = logits.shape, rule.num_experts_per_tok
    f32, i32 = jnp.float32, jnp.int32
    run = functools.partial(_run, plan=plan, rule=rule, tokens=M, experts=E, interpret=interpret)
    optional = {name: x for name, x in (("bias", bias), ("valid", valid)) if x is not None}
    arrays = {"logits": logits.reshape(-1)} | optional
    chosen = {"scores": (M * E, f32), "experts": (M * K, i32), "weights": (M * K, f32)}
    chosen["counts"] = (plan.ctas * plan.columns, i32)
    placed = {"order": (M * K, i32), "inverse": (M * K, i32), "sizes": (E, i32)}
    members = {"members": plan.cta_words}
    bases = {"bases": plan.cta_words, "chunks": LANES}
    if plan.one_kernel:
        results = run(_route, arrays, chosen | placed, members | bases)
    else:
        all_members = {"all_members": (plan.ctas * plan.cta_words, i32)}
        results = run(_route_choose, arrays, chosen | all_members, members)
        needed = {name: results[name] for name in ("experts", "counts", "all_members")}
        arrays = needed | {name: x for name, x in optional.items() if name == "valid"}
        results |= run(_route_place, arrays, placed, bases)
    scores, *pairs = (results[name].reshape(M, -1) for name in ("scores", "experts", "weights"))
    return scores, *pairs, *(results[name] for name in ("order", "inverse", "sizes"))


def _run(
    body: Callable[[_Cta], None],
    arrays: dict[str, jax.Array],
    outputs: dict[str, tuple[int, Any]],
    shared: dict[str, int],
    *,
    plan: Plan,
    interpret: Any,
    **settings: Any,
) -> dict[str, jax.Array]:
    """Runs a kernel. Returns its ``outputs``, given by size and type. ``shared`` has the sizes of
    integer arrays in shared memory."""
    names = [*arrays, *outputs, *shared]

    def kernel(*refs: Any) -> None:
        arrays, barriers = dict(zip(names, refs, strict=False)), list(refs[len(names) :])
        body(_Cta(arrays, barriers, plan=plan, interpret=interpret, **settings))

    kernel.__name__ = body.__name__.removeprefix("_")
    scratch: list[Any] = [plgpu.SMEM((size,), jnp.int32) for size in shared.values()]
    if interpret is not None:
        scratch.append(plgpu.Barrier(num_arrivals=plan.warpgroups))
        if plan.one_kernel:
            arrivals = plan.warpgroups
            scratch.append(plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=arrivals))
    ctas = {"cta": plan.ctas}
    results = grid_kernel(
        kernel,
        [jax.ShapeDtypeStruct((size,), dtype) for size, dtype in outputs.values()],
        scratch,
        warpgroups=plan.warpgroups,
        grid={"one": 1} if plan.one_kernel else ctas,
        cluster=ctas if plan.one_kernel else None,
        interpret=interpret,
        lowering_semantics=LANE,
    )(*arrays.values())
    return dict(zip(outputs, results, strict=True))


def _route(cta: _Cta) -> None:
    cta.clear()
    overlap_preceding_kernel(interpret=cta.interpret)
    if cta.plan.steps == 1:  # the choice stays in registers
        columns = cta.choose(0)
        cta.count()
        sync_cluster(cta.barriers, cta.interpret)
        cta.find_bases("members")
        cta.place(0, columns, "members")
        return
    cta.for_steps(cta.choose)
    cta.count()
    sync_cluster(cta.barriers, cta.interpret)
    cta.find_bases("members")
    cta.for_steps(lambda step: cta.place(step, cta.columns_of(step), "members"))


def _route_choose(cta: _Cta) -> None:
    cta.clear()
    overlap_preceding_kernel(interpret=cta.interpret)
    cta.for_steps(cta.choose)
    cta.count()


def _route_place(cta: _Cta) -> None:
    overlap_preceding_kernel(interpret=cta.interpret)
    cta.find_bases("all_members")
    cta.for_steps(lambda step: cta.place(step, cta.columns_of(step), "all_members"))


class _Cta:
    """One cta. All its threads call each method."""

    def __init__(
        self,
        refs: dict[str, Any],
        barriers: list[Any],
        *,
        plan: Plan,
        rule: Rule,
        tokens: int,
        experts: int,
        interpret: Any,
    ):
        self.refs, self.barriers, self.interpret = refs, barriers, interpret
        self.plan, self.rule, self.tokens, self.experts = plan, rule, tokens, experts
        self._load = functools.partial(load, interpret=interpret)
        self._load_rows = functools.partial(load_rows, interpret=interpret)
        self._store_rows = functools.partial(store_rows, interpret=interpret)
        self.cta, self.wg = lax.axis_index("cta"), lax.axis_index("wg")
        self.warp, self.lane = thread_index(0), thread_index(1)
        self.always = self.lane < LANES
        self.columns = experts + ("valid" in refs)  # without those that fill up the plan's

    def for_steps(self, do: Callable[[Any], Any]) -> None:

        def step(i: jax.Array, carry: None) -> None:
            do(i)
            return carry

        if self.plan.steps == 1:
            do(0)
        else:
            lax.fori_loop(0, self.plan.steps, step, None)

    def token_of(self, step: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the warp's token, its number among the warpgroup's, and whether it exists."""
        number = step * WARPS + self.warp
        warpgroup = self.cta * self.plan.warpgroups + self.wg
        token = warpgroup * (self.plan.steps * WARPS) + number
        return token, number, token < self.tokens

    def clear(self) -> None:
        size = self.plan.words * self.plan.columns
        for i in range(0, size, WARPS * LANES):
            first = self.wg * size + i + self.warp * LANES
            self._store_rows(self.refs["members"], first, filled(0), LANES, self.always)
        sync_warpgroup(self.interpret)

    def choose(self, step: Index) -> jax.Array:
        """Chooses a token's experts, and sets its bits. Returns the columns of its pairs."""
        K, bias = self.rule.num_experts_per_tok, None
        token, number, exists = self.token_of(step)
        if "bias" in self.refs:
            bias = load_bias(self.refs["bias"], filled(0), self.experts, self.interpret)
        experts = choose(
            self.refs["logits"],
            bias,
            self.refs["scores"],
            self.refs["experts"],
            self.refs["weights"],
            token=token,
            first=0,
            is_reporter=None,
            tokens=self.tokens,
            experts=self.experts,
            rule=self.rule,
            interpret=self.interpret,
        )
        token = jnp.minimum(token, self.tokens - 1)
        columns, counted = self._columns(token, experts)
        # An invalid token has one bit.
        sets = exists if counted is None else exists & (counted | (self.lane == 0))
        at = self._words_at(number) + columns
        set_bits(self.refs["members"], at, self._bit(number), K, sets, self.interpret)
        return columns

    def columns_of(self, step: Index) -> jax.Array:
        """Returns the columns of a token's pairs in the first K lanes."""
        K = self.rule.num_experts_per_tok
        token = jnp.minimum(self.token_of(step)[0], self.tokens - 1)
        at = token * K + jnp.minimum(self.lane, K - 1)
        return self._columns(token, self._load(self.refs["experts"], at, K))[0]

    def _columns(self, token: jax.Array, experts: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the pairs' columns, and whether the token is valid, or None."""
        if "valid" not in self.refs:
            return experts, None
        counted = self._load_rows(self.refs["valid"], token, 1) != 0
        return select(experts, counted, self.experts), counted

    def _words_at(self, number: jax.Array) -> jax.Array:
        """Returns where the words with a token's bit begin among the CTA's."""
        word = self.wg * self.plan.words + lax.shift_right_arithmetic(number, filled(_WORD_BITS))
        return word * self.plan.columns

    def _bit(self, number: jax.Array) -> jax.Array:
        return lax.shift_left(filled(1), number & (2**_WORD_BITS - 1))

    def _column_of(self, number: int) -> tuple[jax.Array, jax.Array]:
        """Returns a column of this thread, and the number of its chunk of 32 columns."""
        chunk = (number * self.plan.warpgroups + self.wg) * WARPS + self.warp
        return chunk * LANES + self.lane, chunk

    def _needed(self, chunk: jax.Array) -> jax.Array:
        """Returns the chunk, or the last that is needed instead of one that nothing needs, so that
        the many warps without experts load the same numbers."""
        return jnp.minimum(chunk, (self.columns - 1) // LANES)

    def _words_of(self, chunk: jax.Array, members: str) -> list[jax.Array]:
        """Returns the words of a column, in the order of their tokens."""
        start = self._needed(chunk) * LANES
        if members == "all_members":
            start = start + self.cta * self.plan.cta_words
        return [
            self._load_rows(self.refs[members], start + i * self.plan.columns, LANES)
            for i in range(self.plan.warpgroups * self.plan.words)
        ]

    def count(self) -> None:
        """Stores the number of the CTA's tokens in each column."""
        sync_cta(self.barriers, self.interpret)
        for number in range(self.plan.rounds):
            chunk = self._column_of(number)[1]
            words = self._words_of(chunk, "members")
            ones = [ones_of(word, self.interpret) for word in words]
            first = self.cta * self.plan.columns + chunk * LANES
            total, needed = functools.reduce(jnp.add, ones), chunk == self._needed(chunk)
            self._store_rows(self.refs["counts"], first, total, LANES, needed)
            if "all_members" in self.refs:
                start = self.cta * self.plan.cta_words + chunk * LANES
                for i, word in enumerate(words):
                    at = start + i * self.plan.columns
                    self._store_rows(self.refs["all_members"], at, word, LANES, needed)

    def find_bases(self, members: str) -> None:
        """Computes the number of pairs before those of each word of the cta."""
        firsts, befores = [], []
        for number in range(self.plan.rounds):
            column, chunk = self._column_of(number)
            size, before = self._count_over_ctas(chunk)
            total = over_warp(jnp.sum, size)
            self._store_rows(self.refs["chunks"], chunk, total, 1, self.always)
            firsts.append(prefix_sums(size, self.interpret) - size)
            befores.append(before)
            is_reporter = (column < self.experts) & (self.cta == 0)
            store(self.refs["sizes"], column, size, is_reporter, self.interpret)
        sync_cta(self.barriers, self.interpret)
        chunks = self._load_rows(self.refs["chunks"], filled(0), LANES)
        for number, (first, before) in enumerate(zip(firsts, befores, strict=True)):
            column, chunk = self._column_of(number)
            first += over_warp(jnp.sum, select(chunks, self.lane < chunk, 0))
            # An invalid token has one bit, but K pairs.
            K = select(filled(self.rule.num_experts_per_tok), column == self.experts, 1)
            for i, word in enumerate(self._words_of(chunk, members)):
                at = i * self.plan.columns + chunk * LANES
                base = first + before * K
                self._store_rows(self.refs["bases"], at, base, LANES, self.always)
                before += ones_of(word, self.interpret)
        sync_cta(self.barriers, self.interpret)

    def _count_over_ctas(self, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens of all CTAs and of those before this one in the column."""
        ctas, columns = self.plan.ctas, self.plan.columns
        together = min(ctas, _TOGETHER)

        def add(i: Index, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, before = sums
            numbers = [i * together + j for j in range(together)]
            counts = []
            for n in numbers:
                at = jnp.minimum(n, ctas - 1) * columns + self._needed(chunk) * LANES
                counts.append(self._load_rows(self.refs["counts"], at, LANES))
            for n, count in zip(numbers, counts, strict=True):
                total += count if ctas % together == 0 else select(count, n < ctas, 0)
                before += select(count, filled(0) + n < self.cta, 0)
            return total, before

        zeros = filled(0), filled(0)
        if ctas == together:
            return add(0, zeros)
        return lax.fori_loop(0, -(-ctas // together), add, zeros)

    def place(self, step: Index, columns: jax.Array, members: str) -> None:
        """Stores the positions of a token's pairs, whose columns are in the first K lanes."""
        E, K, lane = self.experts, self.rule.num_experts_per_tok, self.lane
        token, number, exists = self.token_of(step)
        mine = exists & (lane < K)
        at = self._words_at(number) + columns
        start = self.cta * self.plan.cta_words if members == "all_members" else 0
        word = self._load(self.refs[members], at + start, K)
        earlier = ones_of(word & (self._bit(number) - 1), self.interpret)
        if "valid" in self.refs:
            earlier = jnp.where(columns == E, earlier * K + lane, earlier)
        position = self._load(self.refs["bases"], at, K) + earlier
        self._store_rows(self.refs["inverse"], token * K, position, K, exists)
        store(self.refs["order"], position, token * K + lane, mine, self.interpret)


def choose(
    logits_g: Ref, bias: list[jax.Array] | None, scores_g: Ref, experts_g: Ref, weights_g: Ref, *,
    token: jax.Array, first: jax.Array | int, is_reporter: jax.Array | None, tokens: int,
    experts: int, rule: Rule, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Chooses the experts of each warp's ``token``, returns them in the first lanes, and stores
    them and their weights, the first token's from index ``first`` on. Arrays in global memory are
    flat. ``bias`` is from :func:`load_bias`. A warp without a token stores nothing. With
    ``is_reporter``, only those warps store their token's scores."""
    K, lane = rule.num_experts_per_tok, thread_index(1)
    chunks = _chunks(experts)
    exists, row = token < tokens, jnp.minimum(token, tokens - 1)
    logits = [load_padded(logits_g, row * experts + c, n, -jnp.inf, interpret) for c, n in chunks]
    scores = scores_of(logits, rule)
    stores = exists if is_reporter is None else exists & is_reporter
    for (c, n), of_chunk in zip(chunks, scores, strict=True):
        store_rows(scores_g, row * experts + c, of_chunk, n, stores, interpret)
    choice = scores
    if bias is not None:
        choice = [s + b for s, b in zip(scores, bias, strict=True)]
    columns = [lane + c for c, _ in chunks]
    ranked = [as_integer(x) for x in choice]
    if experts % LANES:  # the last lanes have no expert
        ranked[-1] = select(ranked[-1], columns[-1] < experts, _LOWEST)
    ranked = mask_groups(ranked, columns, experts, rule)
    chosen, bits = top_k(ranked, [bits_of(s) for s in scores], columns, K)
    weights = lax.bitcast_convert_type(to_lanes(bits, lane), jnp.float32)
    if rule.normalize:
        weights = weights / (over_warp(jnp.sum, weights) + 1e-20)
    weights = weights * rule.scaling_factor
    at, experts_of_token = first + row * K, to_lanes(chosen, lane)
    store_rows(experts_g, at, experts_of_token, K, exists, interpret)
    store_rows(weights_g, at, weights, K, exists, interpret)
    return experts_of_token


def load_bias(bias_g: Ref, zero: jax.Array, experts: int, interpret: Any) -> list[jax.Array]:
    """Loads what is added to the scores, for each chunk of experts one number per lane. ``zero`` is
    0 in all lanes."""
    return [load_padded(bias_g, zero + c, n, 0.0, interpret) for c, n in _chunks(experts)]


def _chunks(experts: int) -> list[tuple[int, int]]:
    """Returns the first expert and the number of experts of each chunk of up to LANES experts."""
    return [(c, min(experts - c, LANES)) for c in range(0, experts, LANES)]


def scores_of(logits: list[jax.Array], rule: Rule) -> list[jax.Array]:
    """Returns the scores of a warp's token, from its logits."""
    if rule.scoring == "sigmoid":
        return [1.0 / (1.0 + jnp.exp(-x)) for x in logits]
    maximum_logit = over_warp(jnp.max, maximum(logits))
    exps = [jnp.exp(x - maximum_logit) for x in logits]
    total = over_warp(jnp.sum, functools.reduce(jnp.add, exps))
    return [x / total for x in exps]


def as_integer(x: jax.Array) -> jax.Array:
    """Maps floats to integers in the same order. NaN comes after infinity."""
    bits = bits_of(x)
    return jnp.where(bits < 0, bits ^ _FLIP, bits)


def as_float(x: jax.Array) -> jax.Array:
    """Inverts :func:`as_integer`."""
    return lax.bitcast_convert_type(jnp.where(x < 0, x ^ _FLIP, x), jnp.float32)


def mask_groups(
    ranked: list[jax.Array], columns: list[jax.Array], E: int, rule: Rule
) -> list[jax.Array]:
    """Sets the integers of experts outside the best groups to that of minus infinity."""
    if rule.topk_group == rule.n_group:
        return ranked
    size = E // rule.n_group
    # For each group: the chunks that contain it, with a mask of its columns, or None for all.
    members = []
    for low in range(0, E, size):
        high, masks = low + size, {}
        for c in range(low // LANES, -(-high // LANES)):
            is_whole = low <= c * LANES and (c + 1) * LANES <= high
            masks[c] = None if is_whole else (columns[c] >= low) & (columns[c] < high)
        members.append(masks)
    values = []
    for masks in members:
        values_of_group = [
            ranked[c] if inside is None else select(ranked[c], inside, _LOWEST)
            for c, inside in masks.items()
        ]
        best = over_warp(jnp.max, maximum(values_of_group))
        if rule.method == "noaux_tc":
            members_of_group = [columns[c] for c in masks]
            first = first_of(values_of_group, best, members_of_group)
            others = [
                select(x, column != first, _LOWEST)
                for column, x in zip(members_of_group, values_of_group, strict=True)
            ]
            second = over_warp(jnp.max, maximum(others))
            best = as_integer(as_float(best) + as_float(second))
        values.append(best)
    masked = list(ranked)
    for g, (value, masks) in enumerate(zip(values, members, strict=True)):
        better = filled(0)
        for h, other in enumerate(values):
            if h != g:
                better = add_if(other >= value if h < g else other > value, better)
        best = better < rule.topk_group
        for c, inside in masks.items():
            is_open = best if inside is None else best | ~inside
            masked[c] = select(masked[c], is_open, _MINUS_INFINITY)
    return masked


def top_k(
    ranked: list[jax.Array], bits: list[jax.Array], columns: list[jax.Array], K: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the columns of the K largest integers, and ``bits`` of these columns."""
    chosen, found_bits = [], []
    for _ in range(K):
        first = first_of(ranked, over_warp(jnp.max, maximum(ranked)), columns)
        bits_of_first = [
            select(b, column == first, 0) for column, b in zip(columns, bits, strict=True)
        ]
        chosen.append(first)
        found_bits.append(over_warp(jnp.sum, functools.reduce(jnp.bitwise_or, bits_of_first)))
        ranked = [select(x, o != first, _LOWEST) for o, x in zip(columns, ranked, strict=True)]
    return chosen, found_bits


def first_of(values: list[jax.Array], value: jax.Array, columns: list[jax.Array]) -> jax.Array:
    """Returns the lowest column with ``value``: a maximum of negated columns, one instruction."""
    negated = [
        select(-column, x == value, _LOWEST) for x, column in zip(values, columns, strict=True)
    ]
    return -over_warp(jnp.max, maximum(negated))


def to_lanes(numbers: list[jax.Array], lane: jax.Array) -> jax.Array:
    """Returns ``numbers[i]`` in lane i, and zero in the remaining lanes."""
    lanes = filled(0)
    for i, n in enumerate(numbers):
        lanes = jnp.where(lane == i, n, lanes)
    return lanes
