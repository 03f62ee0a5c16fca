"""A kernel that does nothing but grid barriers, to check them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.hopper.grid_barrier import MOST_POLLS, GridBarrier
from pallas_kernels.hopper.launch import LANE, grid_kernel

_WORDS = 256  # words that a round exchanges, a multiple of a warpgroup's threads


@functools.partial(
    jax.jit,
    static_argnames=("programs", "rounds", "checked", "absent", "most_polls", "interpret"),
    donate_argnames=("counter",),
)
def grid_barrier(
    counter: Int32[Array, 1],
    *,
    programs: int,
    rounds: int,
    checked: bool = True,
    absent: int = 0,
    most_polls: int = MOST_POLLS,
    interpret: Any = None,
) -> tuple[Int32[Array, " programs"], Int32[Array, 1]]:
    """Runs ``rounds`` barriers in one launch.

    Args:
      counter: the counter, as :func:`grid_barrier.new_counter` or an earlier call returns it.
      checked: whether each program writes a word before every barrier, and compares the words of
        all programs after it.
      absent: number of programs that skip the last barrier, so that the others trap.
      most_polls: see :class:`GridBarrier`.

    Returns:
      The number of wrong words that each program has read, and the counter.

    Raises:
      NotImplementedError: there are more programs than multiprocessors.
    """
    if programs > _WORDS:
        raise NotImplementedError(f"takes at most {_WORDS} programs, got {programs}")

    def barriers(*refs: Any) -> None:
        refs, cluster_barrier = (refs, None) if interpret is None else (refs[:-1], refs[-1])
        *counter_g, wrong_g, words_g = refs
        memory = counter_g[0] if interpret is None else cluster_barrier
        barrier = GridBarrier(memory, programs, 1, most_polls=most_polls, interpret=interpret)
        program = lax.axis_index("cta")
        layout = plgpu.Layout.WG_STRIDED((_WORDS,), vec_size=2)
        column = plgpu.broadcasted_iota(jnp.int32, (_WORDS,), 0, layout=layout)

        def one(i: jax.Array, wrong: jax.Array) -> jax.Array:
            half = lax.rem(i, jnp.int32(2))  # the other half may still be read
            if checked:
                words_g[half, program] = i * _WORDS + program
            is_last = i == rounds - 1
            pl.when(~is_last | (program < programs - absent))(barrier.sync)
            if not checked:
                return wrong
            words = plgpu.layout_cast(words_g[half], layout)
            is_wrong = (words != i * _WORDS + column) & (column < programs)
            return wrong + jnp.where(is_wrong, 1, 0)

        zeros = plgpu.layout_cast(jnp.zeros((_WORDS,), jnp.int32), layout)
        wrong_g[program] = lax.fori_loop(0, rounds, one, zeros)

    out_type = [
        jax.ShapeDtypeStruct((programs, _WORDS), jnp.int32),
        jax.ShapeDtypeStruct((2, _WORDS), jnp.int32),
    ]
    kernel = grid_kernel(
        barriers,
        out_type,
        GridBarrier.scratch(1, interpret),
        warpgroups=1,
        **GridBarrier.launch(programs, interpret),
        interpret=interpret,
        lowering_semantics=LANE,
    )
    if interpret is not None:
        return jnp.sum(kernel()[0], axis=1), counter
    shared = jax.new_ref(counter)
    wrong, _ = kernel(shared)
    return jnp.sum(wrong, axis=1), jax.freeze(shared)
