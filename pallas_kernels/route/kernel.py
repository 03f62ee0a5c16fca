"""The Hopper kernel of route: one warp per token, with the experts distributed over its lanes.

Design for 64 tokens and 256 experts in 8 groups, with 8 experts chosen: XLA compiles this to twelve
kernels of 2 to 3 microseconds each, mostly launch overhead, so here it is one kernel. A warp issues
1,860 instructions. One multiprocessor would take 16 microseconds for all tokens, so up to 8
programs share the work, which leaves two warps per scheduler and takes 2 microseconds. They form a
cluster, because they need each other's choices.

A choice is a maximum over a warp. That is one instruction for integers, so scores are converted to
integers in the same order. Each choice takes two maxima, one for the score and one for the lowest
expert that has it, and a sum that fetches the expert's score.

Sorting is by counting. A pair's key consists of its expert and then its own index, so no two keys
are equal, and a pair's sorted position is the number of smaller keys. Each warp counts the smaller
keys for its token's pairs, 16 keys per lane, and counts the pairs of its share of the experts.

With more than 128 tokens, a warp processes up to four tokens in turn.
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

from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.route.lanes import (
    LANES,
    LAYOUT,
    SHAPE,
    WARPS,
    add_if,
    load_rows,
    maximum,
    over_warp,
    select,
    store,
    store_rows,
    sync_cluster,
    thread_index,
)
from pallas_kernels.route.reference import Rule

_MAX_PROGRAMS = 8  # per cluster
_MAX_WARPGROUPS = 4  # per program
_MAX_TOKENS_PER_WARP = 4
MAX_TOKENS = _MAX_PROGRAMS * _MAX_WARPGROUPS * WARPS * _MAX_TOKENS_PER_WARP
_COMPARISONS = 128  # per lane and loop iteration: keys times the pairs of a token
_CHOSEN = -(2**31)  # an expert that is already chosen: below the integer of every score
_MINUS_INFINITY = -(2**31) + 2**23 - 1  # the integer of -inf
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
    """Returns the fields of Routes."""
    M, E = logits.shape
    K, f32, i32 = rule.num_experts_per_tok, jnp.float32, jnp.int32
    programs = min(_MAX_PROGRAMS, _power_of_two(-(-M // WARPS)))
    warpgroups = min(_MAX_WARPGROUPS, -(-M // (WARPS * programs)))
    warps = WARPS * warpgroups * programs
    tokens_per_warp = -(-M // warps)  # tokens per warp
    tokens = warps * tokens_per_warp
    padded_K = max(8, _power_of_two(K))  # keys per token, padded to a power of two
    shift = (tokens * padded_K - 1).bit_length()
    chunks = range(E // LANES)
    # Experts that each warp counts: the smallest divisor of E with which the warps cover E.
    share = next(n for n in range(1, E + 1) if E % n == 0 and n * warps >= E)

    def route(*refs):
        logits_g, *refs = refs
        bias_g, refs = (refs[0], refs[1:]) if bias is not None else (None, refs)
        valid_g, refs = (refs[0], refs[1:]) if valid is not None else (None, refs)
        scores_g, experts_g, weights_g, order_g, inverse_g, sizes_g, keys_g, *cluster_barriers = (
            refs
        )
        overlap_preceding_kernel(interpret=interpret)
        read_rows = functools.partial(load_rows, interpret=interpret)
        write_rows = functools.partial(store_rows, interpret=interpret)
        lane = thread_index(1)
        warp = (
            lax.axis_index("program") * warpgroups + lax.axis_index("wg")
        ) * WARPS + thread_index(0)
        columns = [lane + c * LANES for c in chunks]
        biases = []
        if bias_g is not None:
            biases = [read_rows(bias_g, _all(c * LANES), LANES) for c in chunks]

        def token_of(step):
            """Returns the index of the warp's token, and whether it exists."""
            token = warp + step * warps
            return token, token < M

        def choose(step):
            """Chooses a token's experts. Returns the keys of its pairs, each in all lanes."""
            token_index, exists = token_of(step)
            token = jnp.minimum(token_index, M - 1)
            logits = [read_rows(logits_g, token * E + c * LANES, LANES) for c in chunks]
            is_counted = None if valid_g is None else read_rows(valid_g, token, 1) != 0
            scores = scores_of(logits, rule)
            for c, of_chunk in zip(chunks, scores, strict=True):
                write_rows(scores_g, token * E + c * LANES, of_chunk, LANES, exists)
            choice = scores
            if biases:
                choice = [s + b for s, b in zip(scores, biases, strict=True)]
            ranked = mask_groups([as_integer(x) for x in choice], columns, E, rule)
            chosen, bits = top_k(ranked, [_bits(s) for s in scores], columns, K)

            experts = to_lanes(chosen, lane)
            weights = lax.bitcast_convert_type(to_lanes(bits, lane), f32)
            if rule.normalize:
                weights = weights / (over_warp(jnp.sum, weights) + 1e-20)
            weights = weights * rule.scaling_factor
            write_rows(experts_g, token * K, experts, K, exists)
            write_rows(weights_g, token * K, weights, K, exists)

            def key_of(expert, k_index):
                """Returns a sort key. Invalid tokens come after all experts, absent ones last."""
                if is_counted is not None:
                    expert = select(expert, is_counted, E)
                expert = select(expert, exists, E + 1)
                return lax.shift_left(expert, _all(shift)) + (token_index * padded_K + k_index)

            keys = select(key_of(experts, lane), lane < K, (E + 2) << shift)
            write_rows(keys_g, token_index * padded_K, keys, padded_K, exists | True)
            return [key_of(expert, k) for k, expert in enumerate(chosen)]

        def count_over_keys(count, counters):
            """Returns ``counters`` totals over all keys, accumulated by ``count``, in all lanes."""

            def accumulate(i, counts):
                for j in range(keys_per_iteration):
                    counts = count(
                        read_rows(keys_g, _all(0) + (i * keys_per_iteration + j) * LANES, LANES),
                        counts,
                    )
                return counts

            rounds, zeros = key_vectors // keys_per_iteration, [_all(0)] * counters
            counts = (
                accumulate(0, zeros) if rounds == 1 else lax.fori_loop(0, rounds, accumulate, zeros)
            )
            return [over_warp(jnp.sum, n) for n in counts]

        key_vectors = tokens * padded_K // LANES
        keys_per_iteration = next(
            n for n in range(_COMPARISONS // padded_K, 0, -1) if key_vectors % n == 0
        )
        first = warp * share  # of the experts that this warp counts

        def less_than(own, key, counts):
            return [add_if(key < own_key, n) for n, own_key in zip(counts, own, strict=True)]

        def of_share(key, counts):
            expert = lax.shift_right_arithmetic(key, _all(shift)) - first
            return [add_if(expert == e, n) for e, n in enumerate(counts)]

        def write_positions(step, positions):
            token, exists = token_of(step)
            position, pair = to_lanes(positions, lane), token * K + lane
            write_rows(inverse_g, token * K, position, K, exists)
            store(order_g, position, pair, exists & (lane < K), interpret)

        def write_sizes(sizes):
            for e in range(0, share, LANES):
                sizes_of_lanes = sizes[e:][:LANES]
                write_rows(
                    sizes_g,
                    first + e,
                    to_lanes(sizes_of_lanes, lane),
                    len(sizes_of_lanes),
                    first < E,
                )

        if tokens_per_warp == 1:
            # The keys stay in registers, and one pass over all keys counts both.
            own = choose(0)
            sync_cluster(cluster_barriers, interpret)

            def count_both(key, counts):
                return [*less_than(own, key, counts[:K]), *of_share(key, counts[K:])]

            totals = count_over_keys(count_both, K + share)
            write_positions(0, totals[:K])
            write_sizes(totals[K:])
            return

        def choose_each(step, carry):
            choose(step)
            return carry

        lax.fori_loop(0, tokens_per_warp, choose_each, 0)
        sync_cluster(cluster_barriers, interpret)

        def sort_each(step, carry):
            token, _ = token_of(step)
            own = [read_rows(keys_g, token * padded_K + k, 1) for k in range(K)]
            write_positions(step, count_over_keys(functools.partial(less_than, own), K))
            return carry

        lax.fori_loop(0, tokens_per_warp, sort_each, 0)
        write_sizes(count_over_keys(of_share, share))

    shapes = [((M * E,), f32), ((M * K,), i32), ((M * K,), f32)]
    shapes += [((M * K,), i32), ((M * K,), i32), ((E,), i32), ((tokens * padded_K,), i32)]
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
    """Returns the scores of a warp's token, from its logits."""
    if rule.scoring == "sigmoid":
        return [1.0 / (1.0 + jnp.exp(-x)) for x in logits]
    maximum_logit = over_warp(jnp.max, maximum(logits))
    exps = [jnp.exp(x - maximum_logit) for x in logits]
    total = over_warp(jnp.sum, functools.reduce(jnp.add, exps))
    return [x / total for x in exps]


def as_integer(x: jax.Array) -> jax.Array:
    """Maps floats to integers in the same order. NaN comes after infinity."""
    bits = _bits(x)
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
        high = low + size
        chunks_of_group = range(low // LANES, -(-high // LANES))
        members.append(
            {
                c: None
                if low <= c * LANES and (c + 1) * LANES <= high
                else (columns[c] >= low) & (columns[c] < high)
                for c in chunks_of_group
            }
        )
    values = []
    for masks in members:
        values_of_group = [
            ranked[c] if inside is None else select(ranked[c], inside, _CHOSEN)
            for c, inside in masks.items()
        ]
        best = over_warp(jnp.max, maximum(values_of_group))
        if rule.method == "noaux_tc":
            own = [columns[c] for c in masks]
            first = first_of(values_of_group, best, own)
            others = [
                select(x, o != first, _CHOSEN) for o, x in zip(own, values_of_group, strict=True)
            ]
            second = over_warp(jnp.max, maximum(others))
            best = as_integer(as_float(best) + as_float(second))
        values.append(best)
    masked = list(ranked)
    for g, (value, masks) in enumerate(zip(values, members, strict=True)):
        better = _all(0)
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
        ranked = [select(x, o != first, _CHOSEN) for o, x in zip(columns, ranked, strict=True)]
    return chosen, found_bits


def first_of(values: list[jax.Array], value: jax.Array, columns: list[jax.Array]) -> jax.Array:
    """Returns the lowest column with ``value``: a maximum of negated columns, one instruction."""
    negated = [
        select(-column, x == value, _CHOSEN) for x, column in zip(values, columns, strict=True)
    ]
    return -over_warp(jnp.max, maximum(negated))


def to_lanes(numbers: list[jax.Array], lane: jax.Array) -> jax.Array:
    """Returns ``numbers[i]`` in lane i, and zero in the remaining lanes."""
    lanes = _all(0)
    for i, n in enumerate(numbers):
        lanes = jnp.where(lane == i, n, lanes)
    return lanes


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _all(n: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full(SHAPE, n, jnp.int32), LAYOUT)


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
