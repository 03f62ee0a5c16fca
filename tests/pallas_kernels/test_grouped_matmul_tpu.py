"""Tests of grouped_matmul's TPU kernel in Pallas' interpreter."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import mosaic_tpu, reference
from pallas_kernels.grouped_matmul.mosaic_tpu import Plan, choose_plan, visits_of
from pallas_kernels.tpu import CHIPS
from tests.pallas_kernels.grouped_matmul_cases import (
    FLOAT8,
    ROWS_OF_GROUPS,
    GroupedMatmulRowCases,
    Inputs,
    run,
)
from tests.pallas_kernels.numerics import check, device, tolerance
from tests.support.covering import slow_except

N, K = 128, 256
back_end = functools.partial(mosaic_tpu.grouped_matmul, interpret=True)


class TestBfloat16(GroupedMatmulRowCases):
    implementation = staticmethod(back_end)
    dtype, N, K = "bfloat16", N, K
    groups = 64


@pytest.mark.slow
class TestFloat32(GroupedMatmulRowCases):
    implementation = staticmethod(back_end)
    N, K = N, K
    groups = 64


@pytest.mark.slow
class TestFloat8(GroupedMatmulRowCases):
    implementation = staticmethod(back_end)
    dtype, N, K = FLOAT8, N, K
    groups = 64


# Formats of dsv3 convert and of DeepSeek's checkpoints, and scale blocks of other sizes.
QUANTIZED = [
    ("int8", (1, K)),
    ("int8", (1, 96)),
    ("int4", (1, 128)),
    ("int4", (1, K)),
    (FLOAT8, (128, 128)),
    (FLOAT8, (256, 200)),
    ("bfloat16", (128, 128)),
]

# One quick test for each way to convert.
QUICK = [("int8", (1, 96)), ("int4", (1, 128)), (FLOAT8, (128, 128))]
SOME_QUICK = [
    pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in QUANTIZED
]

STORED = [
    (*form, sizes, lhs_dtype)
    for form, sizes, lhs_dtype in itertools.product(
        QUANTIZED, ROWS_OF_GROUPS, ("bfloat16", "float32")
    )
]


# Each format once, with different group sizes and dtypes.
@pytest.mark.parametrize(
    ("rhs_dtype", "block_shape", "sizes", "lhs_dtype"),
    slow_except(STORED, (0, 21, 40)),
)
def test_stored_formats(rhs_dtype, block_shape, sizes, lhs_dtype):
    x = Inputs.random(
        sizes,
        M=sum(sizes) + 3,
        N=256,
        K=K,
        lhs_dtype=lhs_dtype,
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
    )
    out = run(x, back_end)
    check(out[: sum(sizes)], x.expected(), tolerance(lhs_dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), SOME_QUICK)
def test_expanded_matrices(rhs_dtype, block_shape):
    """Matrices are expanded to scratch, as with many rows."""
    x = Inputs.random(
        (37, 0, 4), N=256, K=K, lhs_dtype="bfloat16", rhs_dtype=rhs_dtype, block_shape=block_shape
    )
    conversion = "none" if rhs_dtype == "bfloat16" else "expand"
    plan = dataclasses.replace(planned(x), conversion=conversion)
    out = run(x, functools.partial(back_end, plan=plan))
    check(out, x.expected(), tolerance("bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), [("int8", (1, 128)), (FLOAT8, (256, 128))])
@pytest.mark.parametrize("columns", [128, 512])
def test_blocks_of_columns(rhs_dtype, block_shape, columns):
    """Groups of several tiles and of a part of one; scales of the second block of columns too."""
    x = Inputs.random(
        (50, 0, 1, 27, 3),
        M=85,
        N=512,
        K=K,
        lhs_dtype="bfloat16",
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
    )
    plan = dataclasses.replace(planned(x), rows=16, columns=columns)
    out = run(x, functools.partial(back_end, plan=plan))
    check(out[: sum(x.group_sizes)], x.expected(), tolerance("bfloat16"))


def planned(x: Inputs, chip: str = "v5p") -> Plan:
    lhs, rhs, _, _, scale = x.arrays()
    return choose_plan(CHIPS[chip], lhs, rhs, scale, x.block_shape)


@pytest.mark.slow
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), [("bfloat16", (1, 128)), ("int8", (1, 128))])
def test_copies_do_not_race(rhs_dtype, block_shape):
    """Runs in the interpreter that detects races, which simulates a TPU's asynchronous copies."""
    x = Inputs.random(
        (20, 0, 2),
        M=37,
        N=256,
        K=K,
        lhs_dtype="bfloat16",
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
    )
    plan = dataclasses.replace(planned(x), columns=128)
    params = pltpu.InterpretParams(detect_races=True)
    out = run(x, functools.partial(mosaic_tpu.grouped_matmul, plan=plan, interpret=params))
    check(out[: sum(x.group_sizes)], x.expected(), tolerance("bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("block_shape", [(1, 128), (1, 384)])
def test_int4_that_does_not_fill_registers(block_shape):
    """A row has 192 bytes, not a multiple of 128, as Moonlight's 1,408 columns have 704."""
    x = Inputs.random(
        (3, 0, 9), N=N, K=384, lhs_dtype="bfloat16", rhs_dtype="int4", block_shape=block_shape
    )
    check(run(x, back_end), x.expected(), tolerance("bfloat16"))


def test_matrices_of_empty_groups_are_not_read():
    x = Inputs.random((0, 5, 0), N=N, K=K, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    rhs = np.where(np.arange(3)[:, None, None] == 1, x.rhs, np.nan)
    check(run(dataclasses.replace(x, rhs=rhs), back_end), x.expected(), tolerance("bfloat16"))


def test_no_rows_at_all():
    x = Inputs.random((0, 0, 0), M=5, N=N, K=K, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    assert run(x, back_end).shape == (5, N)


def test_in_a_while_loop():
    """Group sizes that change from step to step, as in a decoding loop."""
    x = Inputs.random((2, 0, 5), N=N, K=K, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    lhs, rhs, sizes, *_ = x.arrays()

    def step(carry):
        i, _ = carry
        return i + 1, back_end(lhs, rhs, jnp.roll(sizes, i))

    _, out = jax.jit(
        lambda: lax.while_loop(lambda c: c[0] < 3, step, (0, jnp.zeros((7, N), jnp.bfloat16)))
    )()
    rolled = dataclasses.replace(x, group_sizes=tuple(np.roll(x.group_sizes, 2).tolist()))
    check(out, rolled.expected(), tolerance("bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rhs_dtype", "scale"), [((0, 40, 3), "float32", 0), ((1, 2, 0), FLOAT8, 1)]
)
def test_gradients_equal_the_reference_s(sizes, rhs_dtype, scale):
    """Gradients with respect to the rows, and to the matrices or their scales."""
    x = Inputs.random(sizes, N=N, K=K, rhs_dtype=rhs_dtype)
    lhs, rhs, group_sizes, _, of_rhs = x.arrays()
    weights = device(np.random.default_rng(3).standard_normal((sum(sizes), N)), "float32")

    def gradients(matmul):
        def loss(lhs, other):
            args = (lhs, rhs, group_sizes, None, other) if scale else (lhs, other, group_sizes)
            return jnp.sum(matmul(*args) * weights)

        return jax.jit(jax.grad(loss, (0, 1)))(lhs, of_rhs if scale else rhs)

    got, want = gradients(back_end), gradients(reference.grouped_matmul)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("height", [1, 4, 16])
@pytest.mark.parametrize(
    "sizes", [(0, 5, 0, 7), (0, 12, 0, 0), (4, 4, 4, 2), (1, 0, 2, 9), (0, 0, 0, 0), (0, 0, 0, 1)]
)
def test_visits(sizes, height):
    """Every tile of every group once, in the order of groups, then the last one again."""
    M = 14
    visits = jax.jit(visits_of, static_argnums=(1, 2))(device(sizes, "int32"), M, height)
    ends = np.cumsum([0, *sizes])
    expected = [
        (g, tile)
        for g, size in enumerate(sizes)
        if size
        for tile in range(ends[g] // height, (ends[g + 1] - 1) // height + 1)
    ]
    count = int(visits.total)
    assert count == max(len(expected), 1) <= len(visits.groups)
    assert len(visits.groups) == -(-M // height) + min(len(sizes), M)
    pairs = list(zip(visits.groups.tolist(), visits.tiles.tolist(), strict=True))
    assert pairs[: len(expected)] == expected
    assert all(g < len(sizes) and 0 <= tile <= (M - 1) // height for g, tile in pairs)
    np.testing.assert_array_equal(visits.ends, ends)


@pytest.mark.slow
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), SOME_QUICK)
def test_the_last_block_of_columns_is_partial(rhs_dtype, block_shape):
    """N is not a multiple of a block, as in kv_a_proj_with_mqa, where it is 576."""
    x = Inputs.random(
        (3, 0, 9), N=200, K=K, lhs_dtype="bfloat16", rhs_dtype=rhs_dtype, block_shape=block_shape
    )
    check(run(x, back_end), x.expected(), tolerance("bfloat16"))


@pytest.mark.parametrize(
    ("M", "G", "rows"),
    [(1, 256, 1), (16, 8, 16), (512, 256, 16), (4096, 64, 32), (8192, 8, 512), (10**6, 8, 512)],
)
def test_tiles_are_half_a_group(M, G, rows):
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, 256), (G, 512, 256)))
    assert choose_plan(CHIPS["v5p"], lhs, rhs, None, (1, 1)).rows == rows


@pytest.mark.parametrize(
    ("M", "dtype", "block_shape", "converts_slices"),
    [
        (64, "int8", (1, 256), True),
        (64, "int8", (1, 128), True),
        (64, "int8", (1, 96), False),
        (64, "uint8", (1, 128), True),
        (64, FLOAT8, (128, 128), True),
        (4096, FLOAT8, (128, 128), False),
        (64, "bfloat16", (1, 1), False),
    ],
)
def test_matrices_are_converted_in_slices_for_few_rows(M, dtype, block_shape, converts_slices):
    G, width = 8, 128 if dtype == "uint8" else 256
    lhs, rhs = (
        jax.ShapeDtypeStruct((M, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((G, 256, width), dtype),
    )
    scale = (G, -(-256 // block_shape[0]), -(-256 // block_shape[1]))
    scale = None if dtype == "bfloat16" else jax.ShapeDtypeStruct(scale, jnp.float32)
    plan = choose_plan(CHIPS["v5p"], lhs, rhs, scale, block_shape)
    expected = "none" if dtype == "bfloat16" else "slices" if converts_slices else "expand"
    assert plan.conversion == expected


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_float8_number(chip):
    """Chips before TPU7x convert float8_e4m3fn to another float8 dtype first."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    x = Inputs.random((2, 1), N=N, K=K, lhs_dtype="float32", rhs_dtype=FLOAT8)
    rhs = np.tile(np.where(np.isfinite(every), every, 0), (2, N, 1))
    x = dataclasses.replace(x, rhs=rhs, rhs_scale=np.ones_like(x.rhs_scale))
    plan = planned(x, chip)
    assert plan.unit == (1 if chip == "tpu7x" else 16)
    check(run(x, functools.partial(back_end, plan=plan)), x.expected(), tolerance("float32"))


@pytest.mark.parametrize(
    ("chip", "M", "K", "columns"),
    [
        ("v6e", 2**15, 7168, 2048),
        ("v5p", 2**15, 7168, 1024),
        ("tpu7x", 2**15, 7168, 1024),
        ("v5e", 64, 7168, 256),
        ("v5p", 2**15, 18432, 256),
    ],
)
def test_blocks_are_the_widest_that_fit(chip, M, K, columns):
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, K), (8, 2048, K)))
    assert choose_plan(CHIPS[chip], lhs, rhs, None, (1, 1)).columns == columns


@pytest.mark.parametrize(("chip", "columns"), [("v6e", 1408), ("v5p", 768)])
def test_each_core_has_the_same_number_of_blocks(chip, columns):
    """Moonlight's 1,408 columns are 768 and 640 on the two cores of a v5p."""
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2**15, 2048), (8, 1408, 2048)))
    assert choose_plan(CHIPS[chip], lhs, rhs, None, (1, 1)).columns == columns


def struct(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("lhs", "rhs", "scale", "block_shape", "message"),
    [
        (
            (4, 128),
            struct((2, 120, 128)),
            None,
            (1, 1),
            "N >= 128 and K % 128 == 0, got 120 and 128",
        ),
        ((4, 96), struct((2, 128, 96)), None, (1, 1), "K % 128 == 0, got 128 and 96"),
        ((4, 128), struct((2, 128, 128), "int8"), (2, 4, 1), (32, 128), r"rows, got .*\(32, 128\)"),
        ((4, 256), struct((2, 128, 128), "uint8"), (2, 128, 4), (1, 85), "even columns, got 85"),
        ((4, 128), struct((2, 128, 128), "float16"), None, (1, 1), "uint8, got bfloat16 and float"),
        (
            (4096, 2**17),
            struct((2, 128, 2**17)),
            None,
            (1, 1),
            r"56 MiB of VMEM at most on a v5p, got .* \(rows 256.0, matrix 64.0, result 0.2",
        ),
    ],
)
def test_refusals(lhs, rhs, scale, block_shape, message):
    scale = None if scale is None else struct(scale, "float32")
    args = struct(lhs), rhs, struct((2,), "int32"), None, scale
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(back_end, block_shape=block_shape), *args)


def test_other_platforms_are_refused():
    x = Inputs.random((3, 4), N=N, K=K)
    with pytest.raises(NotImplementedError, match="mosaic_tpu: runs on TPUs, this is cpu"):
        grouped_matmul(*x.arrays(), implementation="mosaic_tpu")
