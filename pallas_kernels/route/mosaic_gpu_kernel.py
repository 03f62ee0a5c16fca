"""The kernel of route: a warp a token, its experts side by side in the lanes.

Plan, for 64 tokens of 256 experts in 8 groups, of which 8 are chosen. XLA has twelve kernels for
it, of 2 to 3 microseconds each, most of which is their launch: so it is one. A warp issues 1860
instructions, a multiprocessor would those of all tokens in 16 microseconds. Up to 8 programs share
them, a cluster, for they must hear of each other's choices: two warps a scheduler, 2 microseconds.

A choice is a maximum over the warp, one instruction if numbers are integers, so scores become
integers of the same order. Two such a choice, for the maximum and for the lowest expert that has
it, and a sum that brings its score.

Sorting is counting. A pair's key is its expert and then its own number, so no two are equal, and a
pair stands where as many keys are less than its own. Each warp counts for its token's pairs among
all, 16 keys a lane, and how many there are of its share of the experts.

More than 128 tokens are up to four for a warp, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int

from pallas_kernels.route.lanes import (
    LANES,
    LAYOUT,
    SHAPE,
    WARPS,
    kept,
    load_rows,
    maximum,
    meet_cluster,
    number,
    over_warp,
    store,
    store_rows,
)
from pallas_kernels.route.reference import Rule

_MOST_PROGRAMS = 8  # of a cluster
_MOST_WARPGROUPS = 4  # of a program
_MOST_TURNS = 4
MOST_TOKENS = _MOST_PROGRAMS * _MOST_WARPGROUPS * WARPS * _MOST_TURNS
_SLAB = 128  # 32 keys by a warp's pairs, compared at a time
_CHOSEN = -(2**31)  # below every integer that a score becomes
_OUTSIDE = -(2**31) + 2**23 - 1  # what -inf becomes
_FLIP = 2**31 - 1


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def choose_and_sort(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Int[Array, " M"] | None,
    *,
    rule: Rule,
    interpret: Any = None,
) -> Sequence[jax.Array]:
    """The fields of Routes."""
    M, E = logits.shape
    K, f32, i32 = rule.num_experts_per_tok, jnp.float32, jnp.int32
    programs = min(_MOST_PROGRAMS, _power_of_two(-(-M // WARPS)))
    warpgroups = min(_MOST_WARPGROUPS, -(-M // (WARPS * programs)))
    warps = WARPS * warpgroups * programs
    turns = -(-M // warps)  # tokens of a warp
    tokens = warps * turns
    places = max(8, _power_of_two(K))  # of a token's keys, pairs and what is none
    shift = (tokens * places - 1).bit_length()
    chunks = range(E // LANES)
    # Experts that a warp counts: as few as all warps together can, in runs of one length.
    share = next(n for n in range(1, E + 1) if E % n == 0 and n * warps >= E)
    early = interpret is None and hasattr(plgpu, "griddepcontrol_wait")  # not in jax 0.10

    def route(*refs):
        logits_g, *refs = refs
        bias_g, refs = (refs[0], refs[1:]) if bias is not None else (None, refs)
        valid_g, refs = (refs[0], refs[1:]) if valid is not None else (None, refs)
        scores_g, experts_g, weights_g, order_g, inverse_g, sizes_g, keys_g, *met = refs
        if early:  # launched while the kernel before still runs
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        read_rows = functools.partial(load_rows, interpret=interpret)
        write_rows = functools.partial(store_rows, interpret=interpret)
        lane = number(1)
        warp = (lax.axis_index("program") * warpgroups + lax.axis_index("wg")) * WARPS + number(0)
        columns = [lane + c * LANES for c in chunks]
        biases = []
        if bias_g is not None:
            biases = [read_rows(bias_g, _all(c * LANES), LANES) for c in chunks]

        def token_of(turn):
            """Of this warp: its number, and whether there is one."""
            token = warp + turn * warps
            return token, token < M

        def choose(turn):
            """The keys of a token's pairs, each in all lanes."""
            number_of, here = token_of(turn)
            token = jnp.minimum(number_of, M - 1)
            logits = [read_rows(logits_g, token * E + c * LANES, LANES) for c in chunks]
            counted = None if valid_g is None else read_rows(valid_g, token, 1) != 0
            scores = scores_of(logits, rule)
            for c, of_chunk in zip(chunks, scores, strict=True):
                write_rows(scores_g, token * E + c * LANES, of_chunk, LANES, here)
            choice = scores
            if biases:
                choice = [s + b for s, b in zip(scores, biases, strict=True)]
            ranked = mask_groups([as_integer(x) for x in choice], columns, E, rule)
            chosen, bits = top_k(ranked, [_bits(s) for s in scores], columns, K)

            experts = beside(chosen, lane)
            weights = lax.bitcast_convert_type(beside(bits, lane), f32)
            if rule.normalize:
                weights = weights / (over_warp(jnp.sum, weights) + 1e-20)
            weights = weights * rule.scaling_factor
            write_rows(experts_g, token * K, experts, K, here)
            write_rows(weights_g, token * K, weights, K, here)

            def key_of(expert, place):
                """Of tokens that do not count behind all experts, of what is no pair at the end."""
                if counted is not None:
                    expert = kept(expert, counted, E)
                expert = kept(expert, here, E + 1)
                return lax.shift_left(expert, _all(shift)) + (number_of * places + place)

            keys = kept(key_of(experts, lane), lane < K, (E + 2) << shift)
            write_rows(keys_g, number_of * places, keys, places, here | True)
            return [key_of(expert, k) for k, expert in enumerate(chosen)]

        def counted_over_keys(count, counters):
            """``counters`` numbers, each in all lanes, that ``count`` adds up over all keys."""

            def some(i, counts):
                for j in range(deep):
                    counts = count(
                        read_rows(keys_g, _all(0) + (i * deep + j) * LANES, LANES), counts
                    )
                return counts

            rounds, zeros = slabs // deep, [_all(0)] * counters
            counts = some(0, zeros) if rounds == 1 else lax.fori_loop(0, rounds, some, zeros)
            return [over_warp(jnp.sum, n) for n in counts]

        slabs = tokens * places // LANES
        deep = next(n for n in range(_SLAB // places, 0, -1) if slabs % n == 0)
        first = warp * share  # of this warp's experts

        def less_than(own, key, counts):
            return [n + (key < mine).astype(i32) for n, mine in zip(counts, own, strict=True)]

        def of_share(key, counts):
            expert = lax.shift_right_arithmetic(key, _all(shift)) - first
            return [n + (expert == e).astype(i32) for e, n in enumerate(counts)]

        def write_positions(turn, positions):
            token, here = token_of(turn)
            position, pair = beside(positions, lane), token * K + lane
            write_rows(inverse_g, token * K, position, K, here)
            store(order_g, position, pair, here & (lane < K), interpret)

        def write_sizes(sizes):
            for e in range(0, share, LANES):
                some = sizes[e:][:LANES]
                write_rows(sizes_g, first + e, beside(some, lane), len(some), first < E)

        if turns == 1:  # a token's keys stay where they are, and one pass counts both
            own = choose(0)
            meet_cluster(met, interpret)

            def both(key, counts):
                return [*less_than(own, key, counts[:K]), *of_share(key, counts[K:])]

            totals = counted_over_keys(both, K + share)
            write_positions(0, totals[:K])
            write_sizes(totals[K:])
            return

        def choose_each(turn, carry):
            choose(turn)
            return carry

        lax.fori_loop(0, turns, choose_each, 0)
        meet_cluster(met, interpret)

        def place_each(turn, carry):
            token, _ = token_of(turn)
            own = [read_rows(keys_g, token * places + k, 1) for k in range(K)]
            write_positions(turn, counted_over_keys(functools.partial(less_than, own), K))
            return carry

        lax.fori_loop(0, turns, place_each, 0)
        write_sizes(counted_over_keys(of_share, share))

    shapes = [((M * E,), f32), ((M * K,), i32), ((M * K,), f32)]
    shapes += [((M * K,), i32), ((M * K,), i32), ((E,), i32), ((tokens * places,), i32)]
    arrays = [logits.reshape(-1), *(x for x in (bias, valid) if x is not None)]
    scores, experts, weights, order, inverse, sizes, _ = plgpu.kernel(
        route,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        scratch_types=[]
        if interpret is None
        else [plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=warpgroups)],
        grid=(1,),
        grid_names=("one",),
        cluster=(programs,),
        cluster_names=("program",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*arrays)
    return (
        scores.reshape(M, E),
        experts.reshape(M, K),
        weights.reshape(M, K),
        order,
        inverse,
        sizes,
    )


def scores_of(logits: list[jax.Array], rule: Rule) -> list[jax.Array]:
    if rule.scoring == "sigmoid":
        return [1.0 / (1.0 + jnp.exp(-x)) for x in logits]
    most = over_warp(jnp.max, maximum(logits))
    exps = [jnp.exp(x - most) for x in logits]
    total = over_warp(jnp.sum, functools.reduce(jnp.add, exps))
    return [x / total for x in exps]


def as_integer(x: jax.Array) -> jax.Array:
    """In the order of the numbers; above infinity, what is none."""
    bits = _bits(x)
    return jnp.where(bits < 0, bits ^ _FLIP, bits)


def as_float(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(x < 0, x ^ _FLIP, x), jnp.float32)


def mask_groups(
    ranked: list[jax.Array], columns: list[jax.Array], E: int, rule: Rule
) -> list[jax.Array]:
    """Integers of experts outside the best groups become that of minus infinity."""
    if rule.topk_group == rule.n_group:
        return ranked
    size = E // rule.n_group
    # Of each group the chunks that hold it, and where in them it lies; None if it fills one.
    members = []
    for low in range(0, E, size):
        high = low + size
        held = range(low // LANES, -(-high // LANES))
        members.append(
            {
                c: None
                if low <= c * LANES and (c + 1) * LANES <= high
                else (columns[c] >= low) & (columns[c] < high)
                for c in held
            }
        )
    values = []
    for where in members:
        held = [
            ranked[c] if inside is None else kept(ranked[c], inside, _CHOSEN)
            for c, inside in where.items()
        ]
        best = over_warp(jnp.max, maximum(held))
        if rule.method == "noaux_tc":
            own = [columns[c] for c in where]
            first = first_of(held, best, own)
            others = [kept(x, o != first, _CHOSEN) for o, x in zip(own, held, strict=True)]
            second = over_warp(jnp.max, maximum(others))
            best = as_integer(as_float(best) + as_float(second))
        values.append(best)
    masked = list(ranked)
    for g, (mine, where) in enumerate(zip(values, members, strict=True)):
        better = [
            (other >= mine if h < g else other > mine).astype(jnp.int32)
            for h, other in enumerate(values)
            if h != g
        ]
        best = functools.reduce(jnp.add, better) < rule.topk_group
        for c, inside in where.items():
            there = best if inside is None else best | ~inside
            masked[c] = kept(masked[c], there, _OUTSIDE)
    return masked


def top_k(
    ranked: list[jax.Array], bits: list[jax.Array], columns: list[jax.Array], K: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The columns of the K largest integers, and these columns' ``bits``."""
    chosen, found = [], []
    for _ in range(K):
        first = first_of(ranked, over_warp(jnp.max, maximum(ranked)), columns)
        mine = [kept(b, column == first, 0) for column, b in zip(columns, bits, strict=True)]
        chosen.append(first)
        found.append(over_warp(jnp.sum, functools.reduce(jnp.bitwise_or, mine)))
        ranked = [kept(x, o != first, _CHOSEN) for o, x in zip(columns, ranked, strict=True)]
    return chosen, found


def first_of(values: list[jax.Array], value: jax.Array, columns: list[jax.Array]) -> jax.Array:
    """The lowest column that has it; a maximum of what is negated, an instruction of the warp."""
    there = [kept(-column, x == value, _CHOSEN) for x, column in zip(values, columns, strict=True)]
    return -over_warp(jnp.max, maximum(there))


def beside(numbers: list[jax.Array], lane: jax.Array) -> jax.Array:
    """The first number in the first lane, and so on; zeros in the others."""
    held = _all(0)
    for i, n in enumerate(numbers):
        held = jnp.where(lane == i, n, held)
    return held


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _all(n: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full(SHAPE, n, jnp.int32), LAYOUT)


def _power_of_two(n: int) -> int:
    """The least that is n or more."""
    return 1 << (n - 1).bit_length()
