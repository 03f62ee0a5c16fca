"""The Hopper kernel of route: one warp per token, with the experts distributed over its lanes.

Design for 64 tokens and 256 experts in 8 groups, with 8 experts chosen: XLA compiles this to twelve
kernels of 2 to 3 microseconds each, mostly launch overhead, so here it is one kernel. One
multiprocessor would take 16 microseconds for all tokens, so up to 8 programs share the work, which
leaves two warps per scheduler. They form a cluster, because they need each other's choices.

Sorting is by counting, with work that is linear in the number of tokens. A pair's position is the
number of pairs of lower experts, plus the earlier tokens that chose the same expert. Each
warpgroup has consecutive tokens and, in shared memory, for every expert words with a bit for each
of its tokens: whether it chose the expert. So the earlier tokens of the same warpgroup are ones of
a word, those of other warpgroups are sums of ones, and those of other programs are counts, which
the programs exchange through global memory. The pairs of a token that is not valid count for one
more column, after those of the experts.

More than 128 tokens are spread over all multiprocessors. Their programs cannot wait for each
other, so a second kernel computes the positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int

from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.warpgroup import meet, sync_cluster, sync_program
from pallas_kernels.route.choice import choose, load_bias
from pallas_kernels.route.lanes import (
    LANES,
    WARPS,
    filled,
    load,
    load_rows,
    ones_of,
    over_warp,
    prefix_sums,
    select,
    set_bits,
    store,
    store_rows,
    thread_index,
)
from pallas_kernels.route.plan import Plan, plan_of
from pallas_kernels.route.reference import Rule

_TOGETHER = (
    16  # counts that a thread loads before it adds them, to hide the latency of the L2 cache
)
_WORD_BITS = 5  # log2 of the bits of a word


@lowered_once("rule", "one_kernel", "interpret")
def choose_and_sort(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Int[Array, " M"] | None,
    *,
    rule: Rule,
    one_kernel: bool | None = None,
    interpret: Any = None,
) -> Sequence[jax.Array]:
    """Returns the fields of Routes. ``one_kernel``: see :func:`plan_of`."""
    (M, E), K = logits.shape, rule.num_experts_per_tok
    plan = plan_of(M, E if valid is None else E + 1, one_kernel)
    f32, i32 = jnp.float32, jnp.int32
    run = functools.partial(_run, plan=plan, rule=rule, tokens=M, experts=E, interpret=interpret)
    optional = {name: x for name, x in (("bias", bias), ("valid", valid)) if x is not None}
    arrays = {"logits": logits.reshape(-1)} | optional
    chosen = {"scores": (M * E, f32), "experts": (M * K, i32), "weights": (M * K, f32)}
    chosen["counts"] = (plan.programs * plan.columns, i32)
    placed = {"order": (M * K, i32), "inverse": (M * K, i32), "sizes": (E, i32)}
    members = {"members": plan.program_words}
    bases = {"bases": plan.program_words, "chunks": LANES}
    if plan.one_kernel:
        results = run(_route, arrays, chosen | placed, members | bases)
    else:
        all_members = {"all_members": (plan.programs * plan.program_words, i32)}
        results = run(_route_choose, arrays, chosen | all_members, members)
        needed = {name: results[name] for name in ("experts", "counts", "all_members")}
        arrays = needed | {name: x for name, x in optional.items() if name == "valid"}
        results |= run(_route_place, arrays, placed, bases)
    return (
        results["scores"].reshape(M, E),
        results["experts"].reshape(M, K),
        results["weights"].reshape(M, K),
        results["order"],
        results["inverse"],
        results["sizes"],
    )


def _run(
    body: Callable[[_Program], None],
    arrays: dict[str, jax.Array],
    outputs: dict[str, tuple[int, Any]],
    shared: dict[str, int],
    *,
    plan: Plan,
    interpret: Any,
    **settings: Any,
) -> dict[str, jax.Array]:
    """Runs a kernel. Returns its ``outputs``, which are given by size and type.

    Args:
      arrays: the inputs.
      shared: sizes of the integer arrays in shared memory.
    """
    names = [*arrays, *outputs, *shared]

    def kernel(*refs: Any) -> None:
        named, barriers = dict(zip(names, refs, strict=False)), list(refs[len(names) :])
        body(_Program(named, barriers, plan=plan, interpret=interpret, **settings))

    kernel.__name__ = body.__name__.removeprefix("_")
    scratch: list[Any] = [plgpu.SMEM((size,), jnp.int32) for size in shared.values()]
    launch: dict[str, Any] = {"grid": (plan.programs,), "grid_names": ("program",)}
    if plan.one_kernel:
        launch = {"grid": (1,), "grid_names": ("one",)}
        launch |= {"cluster": (plan.programs,), "cluster_names": ("program",)}
    if interpret is not None:
        launch["interpret"] = interpret
        scratch.append(plgpu.Barrier(num_arrivals=plan.warpgroups))
        if plan.one_kernel:
            arrivals = plan.warpgroups
            scratch.append(
                plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=arrivals)
            )
    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((size,), dtype) for size, dtype in outputs.values()],
        scratch_types=scratch,
        num_threads=plan.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **launch,
    )(*arrays.values())
    return dict(zip(outputs, results, strict=True))


def _route(program: _Program) -> None:
    program.clear()
    overlap_preceding_kernel(interpret=program.interpret)
    if program.plan.steps == 1:  # the choice stays in registers
        columns = program.choose(0)
        program.count()
        sync_cluster(program.barriers, program.interpret)
        program.find_bases("members")
        program.place(0, columns, "members")
        return
    program.for_steps(program.choose)
    program.count()
    sync_cluster(program.barriers, program.interpret)
    program.find_bases("members")
    program.for_steps(lambda step: program.place(step, program.columns_of(step), "members"))


def _route_choose(program: _Program) -> None:
    program.clear()
    overlap_preceding_kernel(interpret=program.interpret)
    program.for_steps(program.choose)
    program.count()


def _route_place(program: _Program) -> None:
    overlap_preceding_kernel(interpret=program.interpret)
    program.find_bases("all_members")
    program.for_steps(lambda step: program.place(step, program.columns_of(step), "all_members"))


class _Program:
    """One program. All its threads call each method."""

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
        self.program, self.wg = lax.axis_index("program"), lax.axis_index("wg")
        self.warp, self.lane = thread_index(0), thread_index(1)
        self.always = self.lane < LANES
        self.columns = experts + ("valid" in refs)  # without those that fill up the plan's

    def for_steps(self, do: Callable[[Any], Any]) -> None:
        """Calls ``do(step)`` for each of the warps' tokens."""

        def step(i: jax.Array, carry: None) -> None:
            do(i)
            return carry

        if self.plan.steps == 1:
            do(0)
        else:
            lax.fori_loop(0, self.plan.steps, step, None)

    def token_of(self, step: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the warp's token, its number among the warpgroup's, and whether it exists."""
        number = step * WARPS + self.warp
        warpgroup = self.program * self.plan.warpgroups + self.wg
        token = warpgroup * (self.plan.steps * WARPS) + number
        return token, number, token < self.tokens

    def clear(self) -> None:
        """Clears the words of this warpgroup."""
        size = self.plan.words * self.plan.columns
        for i in range(0, size, WARPS * LANES):
            first = self.wg * size + i + self.warp * LANES
            self._store_rows(self.refs["members"], first, filled(0), LANES, self.always)
        meet(self.interpret)

    def choose(self, step: Any) -> jax.Array:
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

    def columns_of(self, step: Any) -> jax.Array:
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
        """Returns where the words with a token's bit begin among the program's."""
        word = self.wg * self.plan.words + lax.shift_right_arithmetic(number, filled(_WORD_BITS))
        return word * self.plan.columns

    def _bit(self, number: jax.Array) -> jax.Array:
        return lax.shift_left(filled(1), number & (2**_WORD_BITS - 1))

    def _column_of(self, number: int) -> tuple[jax.Array, jax.Array]:
        """Returns a column of this thread, and the number of its chunk of 32 columns."""
        chunk = (number * self.plan.warpgroups + self.wg) * WARPS + self.warp
        return chunk * LANES + self.lane, chunk

    def _needed(self, chunk: jax.Array) -> jax.Array:
        """Returns the chunk, or instead of one that nothing needs the last that is needed.

        So the many warps that have no experts load the same numbers.
        """
        return jnp.minimum(chunk, (self.columns - 1) // LANES)

    def _words_of(self, chunk: jax.Array, members: str) -> list[jax.Array]:
        """Returns the words of a column, in the order of their tokens."""
        start = self._needed(chunk) * LANES
        if members == "all_members":
            start = start + self.program * self.plan.program_words
        return [
            self._load_rows(self.refs[members], start + i * self.plan.columns, LANES)
            for i in range(self.plan.warpgroups * self.plan.words)
        ]

    def count(self) -> None:
        """Stores the number of the program's tokens in each column."""
        sync_program(self.barriers, self.interpret)
        for number in range(self.plan.rounds):
            chunk = self._column_of(number)[1]
            words = self._words_of(chunk, "members")
            ones = [ones_of(word, self.interpret) for word in words]
            first = self.program * self.plan.columns + chunk * LANES
            total, needed = functools.reduce(jnp.add, ones), chunk == self._needed(chunk)
            self._store_rows(self.refs["counts"], first, total, LANES, needed)
            if "all_members" in self.refs:
                start = self.program * self.plan.program_words + chunk * LANES
                for i, word in enumerate(words):
                    at = start + i * self.plan.columns
                    self._store_rows(self.refs["all_members"], at, word, LANES, needed)

    def find_bases(self, members: str) -> None:
        """Computes the number of pairs before those of each word of the program."""
        firsts, befores = [], []
        for number in range(self.plan.rounds):
            column, chunk = self._column_of(number)
            size, before = self._count_over_programs(chunk)
            total = over_warp(jnp.sum, size)
            self._store_rows(self.refs["chunks"], chunk, total, 1, self.always)
            firsts.append(prefix_sums(size, self.interpret) - size)
            befores.append(before)
            is_reporter = (column < self.experts) & (self.program == 0)
            store(self.refs["sizes"], column, size, is_reporter, self.interpret)
        sync_program(self.barriers, self.interpret)
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
        sync_program(self.barriers, self.interpret)

    def _count_over_programs(self, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens of all programs and of those before this one in the column."""
        programs, columns = self.plan.programs, self.plan.columns
        together = min(programs, _TOGETHER)

        def add(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, before = sums
            numbers = [i * together + j for j in range(together)]
            counts = [
                self._load_rows(
                    self.refs["counts"],
                    jnp.minimum(n, programs - 1) * columns + self._needed(chunk) * LANES,
                    LANES,
                )
                for n in numbers
            ]
            for n, count in zip(numbers, counts, strict=True):
                total += count if programs % together == 0 else select(count, n < programs, 0)
                before += select(count, filled(0) + n < self.program, 0)
            return total, before

        zeros = filled(0), filled(0)
        if programs == together:
            return add(0, zeros)
        return lax.fori_loop(0, -(-programs // together), add, zeros)

    def place(self, step: Any, columns: jax.Array, members: str) -> None:
        """Stores the positions of a token's pairs, whose columns are in the first K lanes."""
        E, K, lane = self.experts, self.rule.num_experts_per_tok, self.lane
        token, number, exists = self.token_of(step)
        mine = exists & (lane < K)
        at = self._words_at(number) + columns
        start = self.program * self.plan.program_words if members == "all_members" else 0
        word = self._load(self.refs[members], at + start, K)
        earlier = ones_of(word & (self._bit(number) - 1), self.interpret)
        if "valid" in self.refs:
            earlier = jnp.where(columns == E, earlier * K + lane, earlier)
        position = self._load(self.refs["bases"], at, K) + earlier
        self._store_rows(self.refs["inverse"], token * K, position, K, exists)
        store(self.refs["order"], position, token * K + lane, mine, self.interpret)
