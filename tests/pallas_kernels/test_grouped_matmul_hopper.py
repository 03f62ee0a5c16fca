"""Tests of grouped_matmul's Hopper kernel, on a Hopper GPU or interpreted with race detection."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import (
    dense_plan,
    few_tokens,
    gradients,
    mosaic_gpu,
    reference,
)
from pallas_kernels.grouped_matmul.dense_plan import Config, choose_config
from pallas_kernels.grouped_matmul.schedule import GroupTiles
from tests.pallas_kernels.grouped_matmul_cases import (
    FLOAT8,
    GroupedMatmulRowCases,
    Inputs,
    run,
)
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu, on_gpu
from tests.pallas_kernels.numerics import BFLOAT16_ROUNDING, check, device, rounded, tolerance
from tests.support.covering import slow_except


def back_end(config: Config | None = None):
    return functools.partial(mosaic_gpu.grouped_matmul, config=config, interpret=INTERPRET)


@kernel_runs
class TestBfloat16(GroupedMatmulRowCases):
    implementation = "mosaic_gpu" if ON_GPU else staticmethod(back_end())
    dtype, N, K = "bfloat16", 64, 64


@kernel_runs
class TestFloat8(GroupedMatmulRowCases):
    implementation = "mosaic_gpu" if ON_GPU else staticmethod(back_end())
    dtype, N, K = FLOAT8, 64, 128
    groups = 384 if ON_GPU else 64  # the interpreter is slow with row scales


def configs(float8: bool) -> list[Config]:
    """Returns every tile that is chosen for some shape, and every setting, with two stages so that
    the ring buffer wraps around."""
    few = dense_plan.FEW_TOKENS[1]
    many = dense_plan.MANY_TOKENS_FLOAT8 if float8 else dense_plan.MANY_TOKENS_BFLOAT16
    return [dataclasses.replace(config, stages=2) for config in (*few, *many)]


CONFIGS = [(dtype, c) for dtype in ("bfloat16", FLOAT8) for c in configs(dtype == FLOAT8)]
QUICK = [0, 3, 5, 7, 8, 10]  # every tile in one dtype


@kernel_runs
@pytest.mark.parametrize(
    ("dtype", "config"),
    slow_except(CONFIGS, QUICK),
    ids=lambda x: x if isinstance(x, str) else f"{x.tile_m}x{x.tile_n}-{x.few_rows}",
)
def test_configs(dtype, config):
    """Groups of several tiles and of a part of one, overlapping tiles, NaN in unused rows."""
    N = config.tile_n + 64
    x = Inputs.random((130, 0, 1, 67, 3), M=230, N=N, K=256, lhs_dtype=dtype, rhs_dtype=dtype)
    out = run(x, back_end(config))
    check(out[: sum(x.group_sizes)], x.expected(), tolerance("bfloat16"))


MANY_TOKENS = dense_plan.MANY_TOKENS_FLOAT8


@kernel_runs
@pytest.mark.parametrize(
    ("config", "N"),
    slow_except(list(zip(MANY_TOKENS, (320, 192, 192), strict=True)), [0]),
    ids=lambda x: f"{x}" if isinstance(x, int) else f"{x.tile_m}x{x.tile_n}",
)
def test_unrolled_loops(config, N):
    """The sums are the same, in the same order. Some tiles touch two blocks of columns."""
    config = dataclasses.replace(config, stages=2)
    x = Inputs.random(
        (130, 0, 1, 67), M=210, N=N, K=512, lhs_dtype=FLOAT8, rhs_dtype=FLOAT8
    )  # fmt: skip
    rows = sum(x.group_sizes)
    out = run(x, back_end(dataclasses.replace(config, unrolled=True)))[:rows]
    check(out, x.expected(), tolerance("bfloat16"))
    np.testing.assert_array_equal(out, run(x, back_end(config))[:rows])


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "N"), [((129, 0, 3), 192), ((129, 0, 257), 256)])
def test_pairs(sizes, N):
    """The sums are the same, in the same order. The second tile is full, has one row, or has
    none."""
    config = dataclasses.replace(MANY_TOKENS[0], stages=2, unrolled=True)
    x = Inputs.random(sizes, N=N, K=512, lhs_dtype=FLOAT8, rhs_dtype=FLOAT8)
    out = run(x, back_end(dataclasses.replace(config, paired=True)))
    check(out, x.expected(), tolerance("bfloat16"))
    np.testing.assert_array_equal(out, run(x, back_end(config)))


@on_gpu
def test_pairs_wait_for_the_readers_of_both_ctas():
    """The interpreter runs a multicast copy when both CTAs of a pair have come to it. So only a
    GPU can show that a CTA copies to a stage which the other one still reads: it would, in some
    of many calls, change some sums."""
    sizes, N, K = jnp.array([2049, 3000, 1, 3142]), 4096, 7168
    M, G = int(sizes.sum()), len(sizes)
    keys = jax.random.split(jax.random.key(0), 4)
    lhs, rhs = (
        jax.random.normal(key, shape, jnp.bfloat16).astype(FLOAT8)
        for key, shape in zip(keys, [(M, K), (G, N, K)], strict=False)
    )
    scales = (
        jax.random.uniform(key, (*shape, K // 128))
        for key, shape in zip(keys[2:], [(M,), (G, N // 128)], strict=True)
    )
    arguments = lhs, rhs, sizes, *scales
    assert choose_config(M, G, N, K, True).paired
    expected = back_end(dense_plan.UNROLLED_FLOAT8)(*arguments)
    paired = jax.jit(back_end())
    assert all(jnp.array_equal(paired(*arguments), expected) for _ in range(200))


@pytest.mark.parametrize(
    ("rows", "K", "expected"),
    [(4096, 7168, True), (2048, 4096, True), (2047, 7168, False), (4096, 2048, False)],
)
def test_pairs_take_long_k_and_many_rows(rows, K, expected):
    configs = [
        choose_config(8 * rows, 8, 4096, K, True),
        choose_config(8 * rows, 8, 2048, K, True, matrices=2),
    ]
    assert [(config.unrolled, config.paired) for config in configs] == [(True, expected)] * 2


@kernel_runs
@pytest.mark.parametrize(("dtype", "settings"), [(FLOAT8, {"unrolled": False}), ("bfloat16", {})])
def test_pairs_that_are_refused(dtype, settings):
    x = Inputs.random((3,), N=192, K=512, lhs_dtype=dtype, rhs_dtype=dtype)
    config = dataclasses.replace(
        MANY_TOKENS[0], stages=2, **{"unrolled": True, "paired": True, **settings}
    )
    with pytest.raises(NotImplementedError, match="pairs take an unrolled loop over float8"):
        run(x, back_end(config))


@kernel_runs
@pytest.mark.parametrize(
    ("N", "K", "settings"), [(192, 384, {}), (192, 512, {"few_rows": True}), (128, 512, {})]
)
def test_what_an_unrolled_loop_does_not_support(N, K, settings):
    x = Inputs.random((3,), N=N, K=K, lhs_dtype=FLOAT8, rhs_dtype=FLOAT8)
    config = dataclasses.replace(MANY_TOKENS[1], stages=2, unrolled=True, **settings)
    with pytest.raises(NotImplementedError, match=f"got {K // 128} steps, N {N}"):
        run(x, back_end(config))


@kernel_runs
def test_matrices_of_empty_groups_are_not_read():
    x = Inputs.random((0, 5, 0), N=64, K=64, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    rhs = np.where(np.arange(3)[:, None, None] == 1, x.rhs, np.nan)
    out = run(dataclasses.replace(x, rhs=rhs), back_end())
    check(out, x.expected(), tolerance("bfloat16"))


@kernel_runs
def test_in_a_while_loop():
    """Group sizes that change from step to step, as in a decoding loop."""
    x = Inputs.random((2, 0, 5), N=64, K=64, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    lhs, rhs, sizes, *_ = x.arrays()

    def step(carry):
        i, _ = carry
        return i + 1, back_end()(lhs, rhs, jnp.roll(sizes, i))

    _, out = jax.jit(
        lambda: lax.while_loop(lambda c: c[0] < 3, step, (0, jnp.zeros((7, 64), jnp.bfloat16)))
    )()
    rolled = dataclasses.replace(x, group_sizes=tuple(np.roll(x.group_sizes, 2).tolist()))
    check(out, rolled.expected(), tolerance("bfloat16"))


# Groups that start at any row, of no rows, one, 15 and 17, with spare rows, all in one group.
GROUPS = [
    ((130, 0, 1, 67, 3), 230),
    ((15, 17, 0, 64), 96),
    ((0, 5, 0), 9),
    ((1,), 1),
    ((0, 300, 0), 300),
    ((0, 0), 3),
]
# Tiles are 128 x 256 and 256 x 128: one narrower than either, several, and partial ones.
WIDTHS = [(64, 64), (320, 192), (192, 320), (256, 256)]
GRADIENTS = [
    (groups, widths, dataclasses.replace(config, stages=2))
    for groups in GROUPS
    for widths in WIDTHS
    for config in gradients.CONFIGS
]


@kernel_runs
@pytest.mark.parametrize(
    ("groups", "widths", "config"),
    slow_except(GRADIENTS, [2, 5, 14, 16, 24, 36, 45]),
    ids=lambda x: f"{x.tile_m}x{x.tile_n}" if isinstance(x, Config) else str(x).replace(" ", ""),
)
def test_gradient_kernels(groups, widths, config):
    """Compares with sums in float64. NaN in what belongs to no group must not get into a sum."""
    (sizes, M), (N, K) = groups, widths
    x = Inputs.random(sizes, M=M, N=N, K=K, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    rows = np.where(np.isnan(x.lhs[:, :1]), np.nan, 1) * rounded(
        np.random.default_rng(3).standard_normal((M, N)), "bfloat16"
    )
    lhs, rhs, group_sizes, *_ = x.arrays()
    d_out = device(rows, "bfloat16")
    options = {"config": config, "interpret": INTERPRET}
    d_lhs = gradients.rows_gradient((d_out,), (rhs,), group_sizes, **options)
    d_rhs = gradients.matrices_gradient(d_out, lhs, group_sizes, **options)
    of_group = [x.group_of_rows() == g for g in range(len(sizes))]
    used = sum(sizes)
    want = [rows[:used][own].T @ x.lhs[:used][own] for own in of_group]
    check(d_rhs, want, tolerance("bfloat16"))
    want = np.zeros((M, K))
    for own, matrix in zip(of_group, x.rhs, strict=True):
        want[:used][own] = rows[:used][own] @ matrix
    check(d_lhs, want, tolerance("bfloat16"))


@kernel_runs
def test_rows_gradient_adds_two_products():
    """The sum of both is rounded once, as grouped_swiglu needs it."""
    x, y = (
        Inputs.random((40, 0, 33), N=64, K=128, lhs_dtype="bfloat16", rhs_dtype="bfloat16", seed=n)
        for n in range(2)
    )
    rows = [rounded(np.random.default_rng(n).standard_normal((73, 64)), "bfloat16") for n in (2, 3)]
    got = gradients.rows_gradient(
        tuple(device(each, "bfloat16") for each in rows),
        tuple(each.arrays()[1] for each in (x, y)),
        x.arrays()[2],
        interpret=INTERPRET,
    )
    groups = x.group_of_rows()
    pairs = zip(rows, (x.rhs, y.rhs), strict=True)
    check(got, sum(np.einsum("mn,mnk->mk", a, b[groups]) for a, b in pairs), BFLOAT16_ROUNDING)


@kernel_runs
@pytest.mark.parametrize("sizes", [(0, 40, 3), (1, 2, 0)])
def test_gradients_equal_the_reference_s(sizes, monkeypatch):
    """Through the public function's gradient, which takes no other back-end's."""
    x = Inputs.random(sizes, N=64, K=64, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    lhs, rhs, group_sizes, *_ = x.arrays()
    weights = device(np.random.default_rng(3).standard_normal((sum(sizes), 64)), "bfloat16")

    def gradients_of(matmul):
        return jax.grad(lambda a, b: jnp.sum(matmul(a, b, group_sizes) * weights), (0, 1))(lhs, rhs)

    want = gradients_of(reference.grouped_matmul)
    monkeypatch.delattr(reference, "grouped_matmul")
    for a, b in zip(gradients_of(back_end()), want, strict=True):
        check(a, np.float64(b), tolerance("bfloat16"))


@on_gpu
@pytest.mark.slow
def test_a_thousand_equal_gradients():
    """At a quarter of Moonlight's rows. A race would change some sums in some of many calls."""
    sizes = jnp.asarray(np.random.default_rng(0).multinomial(24_000, np.full(64, 1 / 64)))
    keys = jax.random.split(jax.random.key(0), 3)
    d_out, lhs, rhs = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, [(24_576, 1408), (24_576, 2048), (64, 1408, 2048)], strict=True)
    )

    @jax.jit
    def both(d_out, lhs, rhs):
        d_lhs = gradients.rows_gradient((d_out,), (rhs,), sizes)
        return d_lhs, gradients.matrices_gradient(d_out, lhs, sizes)

    @jax.jit
    def differences(*arrays):
        return sum(jnp.sum(a != b) for a, b in zip(arrays[:2], arrays[2:], strict=True))

    first = both(d_out, lhs, rhs)
    assert not any(bool(jnp.isnan(x).any()) for x in first)
    assert not sum(differences(*first, *both(d_out, lhs, rhs)) for _ in range(999))


# Formats of dsv3 convert, and of DeepSeek's checkpoints.
QUANTIZED = [("int8", (1, 128)), ("int4", (1, 128)), (FLOAT8, (128, 128))]


def quantized(rhs_dtype, block_shape, sizes=(3, 0, 9), **settings) -> Inputs:
    return Inputs.random(
        sizes,
        N=64,
        K=128,
        lhs_dtype="bfloat16",
        rhs_dtype=rhs_dtype,
        block_shape=block_shape,
        **settings,
    )


@kernel_runs
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), QUANTIZED)
def test_quantized_matrices_use_few_tokens(rhs_dtype, block_shape, monkeypatch):
    calls = []
    matmul = few_tokens.grouped_matmuls
    monkeypatch.setattr(
        few_tokens, "grouped_matmuls", lambda *a, **k: [calls.append(1), matmul(*a, **k)][1]
    )
    x = quantized(rhs_dtype, block_shape, M=14)
    out = functools.partial(back_end(), block_shape=block_shape)(*x.arrays())
    assert calls
    check(out[: sum(x.group_sizes)], x.expected(), tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize(
    ("rhs_dtype", "block_shape", "sizes"),
    [*((*each, (3, 0, 9)) for each in QUANTIZED), ("int8", (1, 128), (100, 29))],
)
def test_gradients_of_quantized_matrices_equal_the_reference_s(rhs_dtype, block_shape, sizes):
    """Gradients with respect to the rows and to the scales."""
    x = quantized(rhs_dtype, block_shape, sizes)
    lhs, rhs, sizes, _, scale = x.arrays()

    def gradients(matmul):
        def loss(lhs, scale):
            out = matmul(lhs, rhs, sizes, None, scale, block_shape=block_shape)
            return jnp.sum(out * jnp.arange(64, dtype=jnp.float32))

        return jax.grad(loss, (0, 1))(lhs, scale)

    for got, want in zip(gradients(back_end()), gradients(reference.grouped_matmul), strict=True):
        check(got, np.float64(want), tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), QUANTIZED)
def test_many_rows_by_quantized_matrices_use_the_kernel_for_bfloat16(
    rhs_dtype, block_shape, monkeypatch
):
    """129 rows for 2 groups. The few-token kernel takes 64 per group."""
    monkeypatch.delattr(few_tokens, "grouped_matmuls")
    x = quantized(rhs_dtype, block_shape, sizes=(100, 29), M=133)
    out = functools.partial(back_end(), block_shape=block_shape)(*x.arrays())
    check(out[: sum(x.group_sizes)], x.expected(), tolerance("bfloat16"))


@pytest.mark.parametrize(
    ("settings", "block_shape", "message"),
    [
        ({}, (128, 128), "takes bfloat16 by bfloat16 and .*, got float32 by float32"),
        ({"rhs_dtype": FLOAT8}, (128, 128), f"got float32 by {FLOAT8}"),
        ({"lhs_dtype": FLOAT8}, (128, 128), f"got {FLOAT8} by float32"),
        (
            {"lhs_dtype": FLOAT8, "rhs_dtype": FLOAT8},
            (64, 128),
            r"scales of blocks of 128 x 128, got \(64, 128\)",
        ),
        (
            {"lhs_dtype": "bfloat16", "rhs_dtype": "bfloat16", "K": 96},
            (128, 128),
            "multiples of 64, and multiples of 64 of K, got N 64 and K 96",
        ),
        (
            {"lhs_dtype": FLOAT8, "rhs_dtype": FLOAT8, "K": 192},
            (128, 128),
            "multiples of 64, and multiples of 128 of K, got N 64 and K 192",
        ),
        (
            {"lhs_dtype": "bfloat16", "rhs_dtype": "bfloat16", "N": 72},
            (128, 128),
            "multiples of 64, and multiples of 64 of K, got N 72 and K 64",
        ),
    ],
)
def test_refusals(settings, block_shape, message):
    x = Inputs.random((3, 4), **{"N": 64, "K": 64, "block_shape": block_shape, **settings})
    anything = object()  # it is refused before the interpreter starts
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.grouped_matmul(*x.arrays(), block_shape=block_shape, interpret=anything)


@off_gpu
def test_other_platforms_are_refused():
    x = Inputs.random((3, 4), N=64, K=64, lhs_dtype="bfloat16", rhs_dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="mosaic_gpu: runs on Hopper GPUs, this is cpu"):
        grouped_matmul(*x.arrays(), implementation="mosaic_gpu")


@pytest.mark.parametrize("sizes", [(130, 0, 1, 67, 3), (0, 0, 0), (64,), (0, 5)])
def test_group_tiles(sizes):
    """Compares each tile's rows with a loop over the groups."""
    rows = 64
    expected, first = [], 0
    for group, size in enumerate(sizes):
        expected += [(group, first + r, min(rows, size - r)) for r in range(0, size, rows)]
        first += size
    tiles = GroupTiles(device(sizes, "int32"), rows, on_gpu=False)
    assert tiles.count() == len(expected)
    located = [tuple(map(int, tiles.locate(jnp.int32(t)))) for t in range(len(expected) + 3)]
    assert located[: len(expected)] == expected
    assert all(rows == 0 for _, _, rows in located[len(expected) :])
