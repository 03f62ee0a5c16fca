"""Tests of the Hopper kernels' shared parts, each in a small kernel of its own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import warpgroup
from pallas_kernels.hopper.barriers import Barriers, TmaCopy
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.tiles import ROWS, spread_columns, spread_rows, tiles_of
from pallas_kernels.hopper.warpgroup import (
    WARPS,
    cond,
    fence_async_proxy,
    first_warp,
    sync_warpgroup,
    when,
)
from tests.pallas_kernels.machine import INTERPRET, kernel_runs

CONSUMERS = 2


def launch(kernel, out_shape, scratch, *arguments, threads):
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        scratch_types=scratch,
        grid=(1,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if INTERPRET is None else {"interpret": INTERPRET}),
    )(*arguments)


def values(*shape):
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


@kernel_runs
@pytest.mark.parametrize(("stages", "steps"), [(2, 5), (3, 2)])
def test_ring(stages, steps):
    """Two consumers sum the stages that a producer fills; the ring goes round, or is not full."""
    x = values(steps, 2, ROWS, 32)

    def kernel(x_g, out_g, first_s, second_s, *memory):
        ring = Ring.of(stages, CONSUMERS, memory, INTERPRET)
        ring.initialise()
        overlap_preceding_kernel(interpret=INTERPRET)
        wg = lax.axis_index("wg")

        def produce():
            def fill(step, state, carry):
                rows, columns = pl.ds(0, ROWS), pl.ds(0, 32)
                copies = [
                    TmaCopy(x_g, (step, n, rows, columns), ref.at[state.stage], False, None)
                    for n, ref in enumerate((first_s, second_s))
                ]
                ring.fill(state, copies)
                return carry

            ring.drain(ring.loop(steps, fill, ring.start(), ())[0])

        @pl.when(wg == CONSUMERS)
        def _():
            pl.when(first_warp(INTERPRET is None))(produce)

        @pl.when(wg != CONSUMERS)
        def _():
            ring.release_all()

            def add(_, state, total):
                ring.wait_full(state)
                total = total + first_s[state.stage] - second_s[state.stage]
                ring.release(state)
                return total

            zeros = plgpu.layout_cast(
                jnp.zeros((ROWS, 32), jnp.float32), plgpu.Layout.WG_STRIDED((ROWS, 32), vec_size=1)
            )
            out_g[wg] = ring.loop(steps, add, ring.start(), zeros)[1]

    scratch = [
        *(plgpu.SMEM((stages, ROWS, 32), jnp.float32) for _ in range(2)),
        *Ring.scratch(stages, 2, CONSUMERS, INTERPRET),
    ]
    out = launch(kernel, (CONSUMERS, ROWS, 32), scratch, x, threads=CONSUMERS + 1)
    expected = np.sum(np.asarray(x[:, 0] - x[:, 1]), axis=0)
    for each in out:
        np.testing.assert_allclose(each, expected, atol=1e-5)


@kernel_runs
def test_barriers_pass_a_value_between_warpgroups_and_copy_tiles():
    """Each use of a barrier passes one matrix on; the first comes by TMA, to swizzled tiles."""
    x = values(ROWS, 64).astype(jnp.bfloat16)
    ready, read, copied = range(3)

    def kernel(x_g, out_g, tiles_s, passed_s, barriers_s, *, rounds=3):
        barriers = Barriers(barriers_s, INTERPRET)
        barriers.initialise([WARPS, WARPS, 1], cluster=False)
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            @pl.when(first_warp(INTERPRET is None))
            def _():
                barriers.copy(copied, x_g, (pl.ds(0, ROWS), pl.ds(0, 64)), tiles_s)

            barriers.wait(copied, 0)
            value = plgpu.layout_cast(tiles_s[...], plgpu.Layout.WGMMA).astype(jnp.float32)
            for n in range(rounds):
                if n:
                    barriers.wait(read, n - 1)
                passed_s[...] = value * (n + 1)
                sync_warpgroup(INTERPRET)
                fence_async_proxy(INTERPRET)
                barriers.arrive(ready)
            barriers.wait(read, rounds - 1)

        @pl.when(wg == 1)
        def _():
            for n in range(rounds):
                barriers.wait(ready, n)
                out_g[n] = plgpu.layout_cast(passed_s[...], plgpu.Layout.WGMMA)
                barriers.arrive(read)

    scratch = [
        tiles_of(ROWS, 64),
        plgpu.SMEM((ROWS, 64), jnp.float32),
        Barriers.scratch(3, 1, INTERPRET),
    ]
    out = launch(kernel, (3, ROWS, 64), scratch, x, threads=2)
    for n, each in enumerate(out):
        np.testing.assert_array_equal(each, np.asarray(x.astype(jnp.float32)) * (n + 1))


def test_vectors_are_spread_along_rows_and_columns():
    vector = jnp.arange(3.0)
    np.testing.assert_array_equal(spread_rows(vector, 2), np.stack([vector] * 2, axis=1))
    np.testing.assert_array_equal(spread_columns(vector, 2), np.stack([vector] * 2))


def test_a_copy_counts_the_bytes_of_its_window():
    source = jax.ShapeDtypeStruct((4, 64, 576), jnp.bfloat16)
    copy = TmaCopy(source, (jnp.int32(2), pl.ds(8, 16), pl.ds(0, 64)), None)
    assert (copy.sizes, copy.bytes) == ([None, 16, 64], 2 * 16 * 64)
    assert [int(start) for start in copy.starts] == [2, 8, 0]


@kernel_runs
def test_branches():
    """Each of 128 numbers is chosen by a condition on the device, or on the host."""

    def kernel(x_g, out_g):
        total = jnp.sum(x_g[...])
        chosen = cond(total > 0, lambda x: x + 1, lambda x: x - 1, x_g[...])
        out_g[...] = chosen
        for condition, factor in ((total < 0, 2.0), (total > 0, 3.0), (True, 5.0), (False, 7.0)):

            @when(condition)
            def _(factor=factor):
                out_g[...] = out_g[...] * factor

    x = jnp.abs(values(128))
    for numbers, want in ((x, (x + 1) * 15), (-x, (-x - 1) * 10)):
        np.testing.assert_allclose(launch(kernel, (128,), [], numbers, threads=1), want, rtol=1e-6)


def test_all_kernels_branch_like_that():
    """``pl.when`` and ``lax.cond`` make lowering slow, see ``hopper/warpgroup.py``."""
    root = Path(warpgroup.__file__).parents[1]
    files = [path for path in root.rglob("*.py") if "tpu" not in path.name]
    assert len(files) > 100
    slow = ("pl.when(", "lax.cond(")
    users = [path.name for path in files if any(word in path.read_text() for word in slow)]
    assert not users, f"use pallas_kernels.hopper.warpgroup in {', '.join(users)}"
