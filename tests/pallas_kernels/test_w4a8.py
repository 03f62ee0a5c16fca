"""Tests of grouped_matmul of float8 rows by int4 matrices, on a Hopper GPU or interpreted.

The interpreter detects races. In place of the inline instructions that unpack weights to float8 in
registers, it runs jax.numpy code that takes the same bytes.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.block_quant.api import block_quant
from pallas_kernels.grouped_matmul import mosaic_gpu, w4a8
from tests.pallas_kernels.grouped_matmul_cases import FLOAT8, Inputs, run
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import E4M3_LEAST_ERROR, E4M3_ROUNDING, check, tolerance
from tests.support.covering import slow_except


def back_end(tokens: int | None = None, stages: int | None = None):
    def matmul(*arrays, block_shape):
        assert block_shape == (1, w4a8.BLOCK)
        return w4a8.matmul(*arrays, tokens=tokens, stages=stages, interpret=INTERPRET)

    return matmul


def inputs(sizes, N=128, K=256, M=None, **settings) -> Inputs:
    settings = {"lhs_dtype": FLOAT8, "rhs_dtype": "int4", "block_shape": (1, 128)} | settings
    return Inputs.random(sizes, M=M, N=N, K=K, **settings)


CASES = [
    # Several tiles of a group, first tokens at every remainder of 4, tiles of both widths.
    ((37, 0, 3, 1), 128, 256, (32, 2)),
    ((1, 70, 0, 66), 256, 512, (64, 2)),
    ((2, 129), 128, 384, (128, 3)),
    ((3, 0, 4), 256, 1024, ()),
]


@kernel_runs
@pytest.mark.parametrize(("sizes", "N", "K", "settings"), slow_except(CASES, [0]))
def test_results(sizes, N, K, settings):
    """Rows past the groups' sum are NaN and stay apart from the others."""
    x = inputs(sizes, N, K, M=sum(sizes) + 2)
    out = run(x, back_end(*settings))[: sum(sizes)]
    check(out, x.expected(), tolerance("bfloat16"))


def test_permuted_columns():
    """Column 32 q + 8 i + 2 t + h becomes column 32 i + 16 h + 4 q + t of its block of 128."""
    columns = jnp.asarray([np.arange(128.0), -np.arange(128.0)]).reshape(1, 256)
    permuted = np.asarray(w4a8.permute_columns(columns))[0]
    for q, i, t, h in np.ndindex(4, 4, 4, 2):
        at, column = 32 * i + 16 * h + 4 * q + t, 32 * q + 8 * i + 2 * t + h
        assert (permuted[at], permuted[128 + at]) == (column, -column)


def test_every_int4_becomes_its_float8():
    """The register code's arithmetic on words, in NumPy: bytes are the integers times 2^-9."""
    word = np.uint32(0)
    for first in range(0, 16, 4):
        for shift in (0, 4):
            word = np.uint32(sum((first + t) << (8 * t + shift) for t in range(4)))
            t, m = word >> np.uint32(shift), (word >> np.uint32(shift + 3)) & np.uint32(0x01010101)
            result = ((t & np.uint32(0x07070707)) ^ (m * np.uint32(7))) + m * np.uint32(0x81)
            got = result.reshape(1).view(jnp.float8_e4m3fn).astype(np.float64)
            integers = (np.arange(first, first + 4) ^ 8) - 8
            np.testing.assert_array_equal(got * 512, integers)


def test_error_of_float8_rows():
    """Compared with unrounded rows, each product is off by at most half a step of its float8.

    For a value x in a block with scale s that is 2^-4 |x|, or 2^-10 s near zero.
    """
    rng = np.random.default_rng(0)
    x = inputs((5, 7), K=512, lhs_dtype="float32")
    rows = rng.standard_normal(x.lhs.shape) * 2.0 ** rng.uniform(-6, 6, x.lhs.shape)
    values, scale = block_quant(jnp.asarray(rows, jnp.float32))
    rhs = x.values()[1][x.group_of_rows()]
    out = grouped_matmul(
        values, x.arrays()[1], x.arrays()[2], scale, x.arrays()[4], block_shape=(1, 128),
        implementation="reference",
    )  # fmt: skip
    least = E4M3_LEAST_ERROR * np.repeat(np.asarray(scale, np.float64), 128, axis=1)
    each = np.maximum(E4M3_ROUNDING * np.abs(rows), least)
    want = np.einsum("mnk,mk->mn", rhs, rows)
    bound = np.einsum("mnk,mk->mn", np.abs(rhs), each) + 2.0**-7 * np.abs(want)
    error = np.abs(np.asarray(out, np.float64) - want)
    assert (error <= bound).all()
    assert (error > bound / 100).any(), "the bound says nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lhs_dtype": "bfloat16"}, "takes float8_e4m3fn rows"),
        ({"rhs_dtype": FLOAT8, "block_shape": (128, 128)}, "takes int4 matrices"),
        ({"N": 64}, "N in 128"),
        ({"block_shape": (1, 64)}, "scales of 1 x 128"),
    ],
)
def test_refuses(change, message):
    x = inputs((3, 4), **change)
    with pytest.raises(NotImplementedError, match=message):
        w4a8.check_shapes(*x.arrays()[:2], x.block_shape)


@kernel_runs
@pytest.mark.slow
def test_it_is_a_kernel_of_the_back_end():
    x = inputs((3, 5))
    chosen = run(x, functools.partial(mosaic_gpu.grouped_matmul, interpret=INTERPRET))
    np.testing.assert_array_equal(chosen, run(x, back_end()))


@off_gpu
def test_other_platforms_are_refused():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        run(inputs((3, 4)), "mosaic_gpu")


@off_gpu
def test_other_platforms_compute_it_without_the_kernel():
    x = inputs((3, 4))
    check(run(x, None), x.expected(), tolerance("bfloat16"))
