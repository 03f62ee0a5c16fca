"""few_rows, the decoding kernel of grouped_matmul: on a Hopper GPU, or interpreted with race
detection.

The interpreter runs everything but the instructions that unpack weights in registers, in whose
place it has the same order of columns in jax.numpy.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import few_rows
from pallas_kernels.grouped_matmul.few_rows_plan import Config, Weights, stages_that_fit
from pallas_kernels.grouped_matmul.waves import best_cut, best_width, visited
from tests.pallas_kernels.grouped_matmul_cases import (
    FLOAT8,
    GroupedMatmulRowCases,
    Inputs,
    run,
)
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, tolerance
from tests.support.covering import slow_except


def back_end(config: Config | None = None):
    return functools.partial(few_rows.grouped_matmul, config=config, interpret=INTERPRET)


def inputs(sizes, N, K, rhs_dtype, block_shape, M=None) -> Inputs:
    return Inputs.random(
        sizes,
        M=M,
        N=N,
        K=K,
        lhs_dtype="bfloat16",
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
    )


class FewRowsCases(GroupedMatmulRowCases):
    implementation = staticmethod(back_end())
    dtype = "bfloat16"
    rhs_dtype: ClassVar[str]
    block_shape: ClassVar[tuple[int, int]]

    def inputs(self, sizes, M=None):
        return inputs(sizes, self.N, self.K, self.rhs_dtype, self.block_shape, M)


@kernel_runs
class TestInt4(FewRowsCases):
    rhs_dtype, block_shape = "int4", (1, 128)
    N, K = 64, 128
    groups = 384 if ON_GPU else 64  # the interpreter is slow


CONFIGS = [
    # A ring that goes round, two warpgroups, tiles of every width.
    ("int8", 128, 512, (1, 512), Config(2, (8, 16), stages=2)),
    ("int4", 128, 1024, (1, 128), Config(2, (8, 16), stages=2)),
    (FLOAT8, 128, 512, (128, 128), Config(2, (8, 16), stages=2)),
    # Copies of 64 bytes of a row, a last tile that is moved back, one width of x.
    ("int8", 192, 320, (1, 320), Config(2, (8,), stages=3)),
    ("int4", 192, 384, (1, 128), Config(2, (8,), stages=3)),
    (FLOAT8, 192, 320, (128, 128), Config(2, (8,), stages=3)),
    # Scales by 64 columns, by 256, and one a row.
    ("int8", 64, 256, (1, 64), Config(1, (16,))),
    ("int8", 64, 512, (1, 256), Config(1, (16,))),
    ("int4", 64, 512, (1, 512), Config(1, (16,))),
    ("int4", 64, 512, (1, 256), Config(1, (16,))),
    (FLOAT8, 64, 256, (64, 64), Config(1, (16,))),
    # Warpgroups that share a tile, more tiles than blocks; K that ends early for some of them.
    ("int8", 192, 512, (1, 512), Config(2, (8, 16), split=2, stages=2)),
    ("int4", 128, 1024, (1, 128), Config(4, (8, 16), split=2)),
    (FLOAT8, 192, 512, (128, 128), Config(4, (8,), split=4, stages=2)),
    ("int8", 128, 320, (1, 64), Config(4, (8,), split=4)),
    (FLOAT8, 128, 384, (128, 128), Config(2, (8, 32), split=2)),
    # K in pieces: even, with a step that is none, and both with warpgroups that share a tile.
    ("int8", 192, 512, (1, 512), Config(2, (8, 16), pieces=2, stages=2)),
    ("int4", 128, 1280, (1, 128), Config(2, (8, 16), pieces=3)),
    (FLOAT8, 192, 896, (128, 128), Config(4, (8,), split=4, pieces=2, stages=2)),
    # Rows of a tile that warpgroups multiply.
    ("int8", 64, 256, (1, 256), Config(1, (32,))),
]
QUICK = [0, 5, 9, 13, 14, 17, 18, 19]  # every dtype and every kind of setting
QUICK_TOGETHER = [1, 18, 19]


@kernel_runs
@pytest.mark.parametrize(
    ("rhs_dtype", "N", "K", "block_shape", "config"), slow_except(CONFIGS, QUICK)
)
def test_configs(rhs_dtype, N, K, block_shape, config):
    x = inputs((19, 0, 3, 1), N, K, rhs_dtype, block_shape)
    check(run(x, back_end(config)), x.expected(), tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize(
    ("rhs_dtype", "N", "K", "block_shape", "config"), slow_except(CONFIGS, QUICK_TOGETHER)
)
def test_several_matrices(rhs_dtype, N, K, block_shape, config):
    """Side by side they are what each is alone, bit by bit."""
    sizes = (19, 0, 3, 1)
    several = [
        Inputs.random(
            sizes, N=N, K=K, lhs_dtype="bfloat16", rhs_dtype=rhs_dtype, block_shape=block_shape,
            seed=seed,
        )
        for seed in range(3 if rhs_dtype == "int8" else 2)
    ]  # fmt: skip
    alone = [run(dataclasses.replace(x, lhs=several[0].lhs), back_end(config)) for x in several]
    lhs, _, group_sizes, _, _ = several[0].arrays()
    matrices, scales = zip(*((x.arrays()[1], x.arrays()[4]) for x in several), strict=True)
    products = functools.partial(
        few_rows.grouped_products, block_shape=block_shape, config=config, interpret=INTERPRET
    )
    together = jax.jit(products)(lhs, matrices, group_sizes, scales)
    np.testing.assert_array_equal(together, jnp.concatenate(alone, axis=1))


@pytest.mark.parametrize(
    ("M", "G", "bits", "warpgroups", "classes", "split", "pieces"),
    [
        (8, 8, 4, 4, (8,), 4, 1),
        (8, 256, 8, 4, (8,), 4, 1),
        (640, 256, 4, 4, (8, 16), 1, 1),
        (512, 32, 4, 4, (8, 16, 32), 1, 1),
        (2048, 32, 4, 2, (16, 32, 64), 1, 1),
        (4096, 8, 8, 4, (16, 32, 64), 1, 1),
        (1, 1, 8, 4, (8,), 4, 2),
    ],
)
def test_default_config(M, G, bits, warpgroups, classes, split, pieces):
    weights = Weights.of(f"int{bits}", 4096, 7168, (1, 128))
    assert few_rows.default_config(M, G, weights) == Config(warpgroups, classes, split, pieces)


def test_a_step_is_not_cut():
    """All of K in one step, fewer than warpgroups that could share it."""
    weights = Weights.of("int4", 256, 256, (1, 128))
    assert weights.steps == 1
    assert few_rows.default_config(1, 1, weights).pieces == 1


def cut(widths, steps, N, K, M=1, G=1):
    """Of float8 matrices."""
    return best_cut(dict.fromkeys(widths, steps), M, G, N, matrix_row=K, row=2 * K)


def test_pieces_that_fill_the_multiprocessors():
    # DeepSeek-V3's q_a_proj: 24 tiles of 64 rows, each read in 14 steps.
    assert cut((64,), 14, N=1536, K=7168) == (64, 5)
    # Its o_proj: one round of 112 tiles, or several of a part of each; fewer when rows are many.
    few, many = cut((64,), 32, N=7168, K=16384), cut((64,), 32, N=7168, K=16384, M=256)
    assert few == (64, 4)
    assert many == (64, 1)
    # As even as can be: nothing to gain.
    assert cut((64,), 14, N=4 * 132 * 64, K=7168) == (64, 1)
    # Of a piece at least two steps, and none that has nothing to read.
    assert cut((64,), 3, N=64, K=7168) == (64, 1)
    assert cut((64,), 9, N=64, K=7168) == (64, 3)
    # 8 experts of DeepSeek-V3, gate and up: 124 tiles of 256 in a round that ends unevenly.
    assert cut((256, 128, 64), 28, N=2 * 2048, K=7168, M=8, G=256) == (64, 1)
    # q_b_proj, 24 blocks of 64 long: 384 tiles of 64 rows take longer to begin and end.
    assert cut((256, 128, 64), 6, N=24576, K=1536) == (256, 1)


def test_widths_that_fill_the_multiprocessors():
    # 6 experts of 11 tiles leave half of 132 multiprocessors idle, of 22 none.
    assert best_width((128, 64, 32), M=6, G=64, N=1408) == 64
    # As even, or within a tenth: the wider.
    assert best_width((256, 128, 64), M=384, G=64, N=2048) == 256
    # The narrowest spread reading best here, but are too small; not where there are few.
    assert best_width((256, 128, 64), M=512, G=8, N=7168) == 256
    assert best_width((128, 64, 32), M=64, G=1, N=2816) == 32
    assert visited(6, 64) == pytest.approx(5.77, abs=0.01)


@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "N", "K", "block_shape", "message"),
    [
        ("float32", "int8", 64, 64, (1, 64), "takes bfloat16 rows"),
        ("bfloat16", "bfloat16", 64, 64, (1, 64), "got bfloat16, bfloat16"),
        ("bfloat16", "int8", 72, 64, (1, 64), "N=72"),
        ("bfloat16", "int8", 64, 200, (1, 64), "K=200"),
        ("bfloat16", "int4", 64, 192, (1, 64), "K=192"),
        ("bfloat16", "int8", 64, 128, (1, 32), r"block_shape=\(1, 32\)"),
        ("bfloat16", "int8", 64, 128, (64, 128), r"block_shape=\(64, 128\)"),
        ("bfloat16", FLOAT8, 64, 128, (1, 128), r"block_shape=\(1, 128\)"),
    ],
)
def test_refuses(lhs_dtype, rhs_dtype, N, K, block_shape, message, monkeypatch):
    monkeypatch.setattr(few_rows, "require_hopper", lambda interpret: None)
    x = Inputs.random(
        (3, 0, 4),
        N=N,
        K=K,
        lhs_dtype=lhs_dtype,
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
    )
    with pytest.raises(NotImplementedError, match=message):
        few_rows.grouped_matmul(*x.arrays(), block_shape=block_shape)


@off_gpu
def test_elsewhere_it_refuses():
    x = inputs((3, 4), 64, 128, "int8", (1, 128))
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        few_rows.grouped_matmul(*x.arrays(), block_shape=x.block_shape)


def test_small_stages_are_no_more_than_mosaic_has_barriers():
    weights = Weights.of("int4", 64, 128, (1, 128))
    assert stages_that_fit(weights, Config(warpgroups=1, classes=(8,))) == 32
