"""Tests of few_tokens, grouped_matmul's kernel for decoding, on a Hopper GPU or interpreted.

The interpreter detects races. It runs everything but the inline instructions that unpack weights in
registers. In their place it runs jax.numpy code with the same order of columns.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import few_tokens, mosaic_gpu
from pallas_kernels.grouped_matmul.dense_plan import choose_tile_width
from pallas_kernels.grouped_matmul.few_tokens_plan import (
    Config,
    Weights,
    choose_tile_and_split_k,
    default_config,
    stages_that_fit,
)
from pallas_kernels.grouped_matmul.schedule import expected_groups
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
    return functools.partial(mosaic_gpu.grouped_matmul, config=config, interpret=INTERPRET)


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


class FewTokensCases(GroupedMatmulRowCases):
    implementation = staticmethod(back_end())
    dtype = "bfloat16"
    rhs_dtype: ClassVar[str]
    block_shape: ClassVar[tuple[int, int]]

    def inputs(self, sizes, M=None):
        return inputs(sizes, self.N, self.K, self.rhs_dtype, self.block_shape, M)


@kernel_runs
class TestInt4(FewTokensCases):
    rhs_dtype, block_shape = "int4", (1, 128)
    N, K = 64, 128
    groups = 384 if ON_GPU else 64  # the interpreter is slow


CONFIGS = [
    # A ring buffer that wraps around, two warpgroups, tiles of every width.
    ("int8", 128, 512, (1, 512), Config(2, (8, 16), stages=2)),
    ("int4", 128, 1024, (1, 128), Config(2, (8, 16), stages=2)),
    (FLOAT8, 128, 512, (128, 128), Config(2, (8, 16), stages=2)),
    # Copies of 64 bytes of a row, a last tile that overlaps the one before, one token width.
    ("int8", 192, 320, (1, 320), Config(2, (8,), stages=3)),
    ("int4", 192, 384, (1, 128), Config(2, (8,), stages=3)),
    (FLOAT8, 192, 320, (128, 128), Config(2, (8,), stages=3)),
    # Scales per 64 columns, per 256, and per row.
    ("int8", 64, 256, (1, 64), Config(1, (16,))),
    ("int8", 64, 512, (1, 256), Config(1, (16,))),
    ("int4", 64, 512, (1, 512), Config(1, (16,))),
    ("int4", 64, 512, (1, 256), Config(1, (16,))),
    (FLOAT8, 64, 256, (64, 64), Config(1, (16,))),
    # Warpgroups that share a tile, more tiles than thread blocks, K that ends early for some.
    ("int8", 192, 512, (1, 512), Config(2, (8, 16), k_warpgroups=2, stages=2)),
    ("int4", 128, 1024, (1, 128), Config(4, (8, 16), k_warpgroups=2)),
    (FLOAT8, 192, 512, (128, 128), Config(4, (8,), k_warpgroups=4, stages=2)),
    ("int8", 128, 320, (1, 64), Config(4, (8,), k_warpgroups=4)),
    (FLOAT8, 128, 384, (128, 128), Config(2, (8, 32), k_warpgroups=2)),
    # Split-K: even, with a step past the end, and both with warpgroups that share a tile.
    ("int8", 192, 512, (1, 512), Config(2, (8, 16), split_k=2, stages=2)),
    ("int4", 128, 1280, (1, 128), Config(2, (8, 16), split_k=3)),
    (FLOAT8, 192, 896, (128, 128), Config(4, (8,), k_warpgroups=4, split_k=2, stages=2)),
    # A tile that is wide enough for wgmma.
    ("int8", 64, 256, (1, 256), Config(1, (32,))),
    # Tokens whose columns are not permuted.
    ("int8", 128, 512, (1, 128), Config(2, (8,), k_warpgroups=2, tokens_in_order=True)),
    ("int8", 64, 256, (1, 64), Config(1, (32,), tokens_in_order=True)),
]
QUICK = [0, 5, 9, 13, 14, 17, 18, 19, 20, 21]  # every dtype and every kind of setting
QUICK_SEVERAL = [1, 18, 19]


@kernel_runs
@pytest.mark.parametrize(
    ("rhs_dtype", "N", "K", "block_shape", "config"), slow_except(CONFIGS, QUICK)
)
def test_configs(rhs_dtype, N, K, block_shape, config):
    x = inputs((19, 0, 3, 1), N, K, rhs_dtype, block_shape)
    check(run(x, back_end(config)), x.expected(), tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize(
    ("rhs_dtype", "N", "K", "block_shape", "config"), slow_except(CONFIGS, QUICK_SEVERAL)
)
def test_several_matrices(rhs_dtype, N, K, block_shape, config):
    """Each matrix's columns equal the result of that matrix alone, bit for bit."""
    sizes = (19, 0, 3, 1)
    several = [
        Inputs.random(
            sizes, N=N, K=K, lhs_dtype="bfloat16", rhs_dtype=rhs_dtype, block_shape=block_shape,
            seed=seed,
        )
        for seed in range(3 if rhs_dtype == "int8" else 2)
    ]  # fmt: skip
    separate = [run(dataclasses.replace(x, lhs=several[0].lhs), back_end(config)) for x in several]
    lhs, _, group_sizes, _, _ = several[0].arrays()
    matrices, scales = zip(*((x.arrays()[1], x.arrays()[4]) for x in several), strict=True)
    matmuls = functools.partial(
        few_tokens.grouped_matmuls, block_shape=block_shape, config=config, interpret=INTERPRET
    )
    together = jax.jit(matmuls)(lhs, matrices, group_sizes, scales)
    np.testing.assert_array_equal(together, jnp.concatenate(separate, axis=1))


@pytest.mark.parametrize(
    ("M", "G", "bits", "warpgroups", "token_widths", "k_warpgroups", "split_k"),
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
def test_default_config(M, G, bits, warpgroups, token_widths, k_warpgroups, split_k):
    weights = Weights.of(f"int{bits}", 4096, 7168, (1, 128))
    in_order = token_widths[-1] <= 32 and bits == 8
    expected = Config(warpgroups, token_widths, k_warpgroups, split_k, tokens_in_order=in_order)
    assert default_config(M, G, weights) == expected


def test_tokens_by_float8_matrices_are_permuted():
    weights = Weights.of("float8", 4096, 7168, (128, 128))
    assert not default_config(8, 8, weights).tokens_in_order


@kernel_runs
def test_int4_takes_no_tokens_in_order():
    x = inputs((3, 1), 64, 512, "int4", (1, 128))
    with pytest.raises(NotImplementedError, match="in order for int8, got int4"):
        run(x, back_end(Config(1, (8,), tokens_in_order=True)))


def test_instructions_of_tiles():
    """Columns in their own order are multiplied with mma.sync, whatever the width."""
    assert [Config(4, (16, 32)).uses_wgmma(width) for width in (16, 32)] == [False, True]
    assert not Config(4, (16, 32), tokens_in_order=True).uses_wgmma(32)


def test_a_step_is_not_split():
    """All of K is one step, fewer than the warpgroups that could share it."""
    weights = Weights.of("int4", 256, 256, (1, 128))
    assert weights.k_steps == 1
    assert default_config(1, 1, weights).split_k == 1


def choose(widths, steps, N, K, M=1, G=1):
    """Chooses the width and split-K for float8 matrices."""
    return choose_tile_and_split_k(
        dict.fromkeys(widths, steps), M, G, N, weight_row_bytes=K, token_bytes=2 * K
    )


def test_split_k_that_fills_the_multiprocessors():
    # DeepSeek-V3's q_a_proj: 24 tiles of 64 features, each in 14 K steps.
    assert choose((64,), 14, N=1536, K=7168) == (64, 5)
    # Its o_proj: one wave of 112 tiles, or several of smaller ones; fewer slices for many tokens.
    few, many = choose((64,), 32, N=7168, K=16384), choose((64,), 32, N=7168, K=16384, M=256)
    assert few == (64, 4)
    assert many == (64, 1)
    # Four full waves: nothing to gain.
    assert choose((64,), 14, N=4 * 132 * 64, K=7168) == (64, 1)
    # A slice has at least two steps, and none is empty.
    assert choose((64,), 3, N=64, K=7168) == (64, 1)
    assert choose((64,), 9, N=64, K=7168) == (64, 3)
    # 8 experts of DeepSeek-V3, gate and up: 124 tiles of 256, a wave that ends unevenly.
    assert choose((256, 128, 64), 28, N=2 * 2048, K=7168, M=8, G=256) == (64, 1)
    # q_b_proj, whose K is short: 384 tiles of 64 features spend longer in prologue and epilogue.
    assert choose((256, 128, 64), 6, N=24576, K=1536) == (256, 1)


def test_widths_that_fill_the_multiprocessors():
    # 6 experts of 11 tiles leave half of 132 multiprocessors idle, and of 22 tiles none.
    assert choose_tile_width((128, 64, 32), M=6, G=64, N=1408) == 64
    # If a narrower tile is not clearly more even, the wider one is chosen.
    assert choose_tile_width((256, 128, 64), M=384, G=64, N=2048) == 256
    # The narrowest tiles balance the reads best here, but are considered only for few tiles.
    assert choose_tile_width((256, 128, 64), M=512, G=8, N=7168) == 256
    assert choose_tile_width((128, 64, 32), M=64, G=1, N=2816) == 32
    assert expected_groups(6, 64) == pytest.approx(5.77, abs=0.01)


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
    monkeypatch.setattr(few_tokens, "require_hopper", lambda interpret: None)
    x = Inputs.random(
        (3, 0, 4),
        N=N,
        K=K,
        lhs_dtype=lhs_dtype,
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
    )
    lhs, rhs, sizes, _, scale = x.arrays()
    scales = () if scale is None else (scale,)
    with pytest.raises(NotImplementedError, match=message):
        few_tokens.grouped_matmuls(lhs, (rhs,), sizes, scales, block_shape=block_shape)


@off_gpu
def test_other_platforms_are_refused():
    lhs, rhs, sizes, _, scale = inputs((3, 4), 64, 128, "int8", (1, 128)).arrays()
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        few_tokens.grouped_matmuls(lhs, (rhs,), sizes, (scale,), block_shape=(1, 128))


def test_the_number_of_stages_is_limited_by_barriers():
    weights = Weights.of("int4", 64, 128, (1, 128))
    assert stages_that_fit(weights, Config(warpgroups=1, token_widths=(8,))) == 32
