"""Tests of grouped_swiglu's back-ends: the reference, and the Hopper kernel.

The kernel runs on a Hopper GPU or is interpreted with race detection.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_swiglu
from pallas_kernels.grouped_matmul import dense, dense_plan
from pallas_kernels.grouped_swiglu import mosaic_gpu
from sharding.fsdp import save_all_but_gathered
from tests.pallas_kernels import grouped_matmul_cases
from tests.pallas_kernels.grouped_matmul_cases import FLOAT8
from tests.pallas_kernels.grouped_swiglu_cases import (
    ROUNDINGS,
    GroupedSwigluCases,
    Inputs,
    named,
    run,
)
from tests.pallas_kernels.machine import INTERPRET, INTERPRETER, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import (
    BFLOAT16_ROUNDING,
    check,
    device,
    is_dense,
    rounded,
    tolerance,
)
from tests.support.covering import slow_except
from tests.support.jaxprs import equations


def back_end(config=None):
    return functools.partial(mosaic_gpu.grouped_swiglu, config=config, interpret=INTERPRET)


class TestReference(GroupedSwigluCases):
    implementation = "reference"
    dtypes = ("float32", FLOAT8)  # whose result is bfloat16


@kernel_runs
class TestHopper(GroupedSwigluCases):
    implementation = "mosaic_gpu" if ON_GPU else staticmethod(back_end())


CONFIGS = [
    (dtype, dataclasses.replace(config, stages=2))
    for dtype, many in (
        ("bfloat16", dense_plan.MANY_TOKENS_BFLOAT16[:2]),
        (FLOAT8, dense_plan.MANY_TOKENS_FLOAT8[:2]),
    )
    for config in (*dense_plan.FEW_TOKENS[2], *many)
]
QUICK = [0, 3, 6, 7, 8]  # every tile in one dtype


@kernel_runs
@pytest.mark.parametrize(
    ("form", "block_shape"), [("int8", (1, 256)), ("int4", (1, 128)), (FLOAT8, (128, 128))]
)
def test_quantized_matrices(form, block_shape):
    """Few bfloat16 rows: one kernel computes both matmuls."""
    x = quantized((5, 0, 1, 17), form, block_shape)
    got = jax.jit(functools.partial(back_end(), block_shape=block_shape))(*x.arrays())
    check(got, x.expected(), 2 * ROUNDINGS * tolerance("bfloat16"))


@kernel_runs
def test_many_rows_by_quantized_matrices():
    """The matrices are dequantized first: the few-token kernel takes 64 rows per group."""
    x = quantized((101, 29), "int4", (1, 128))
    got = back_end()(*x.arrays(), block_shape=(1, 128))
    check(got, x.expected(), ROUNDINGS * tolerance("bfloat16"))


@pytest.mark.slow
@kernel_runs
def test_gradients_of_many_rows_by_quantized_matrices():
    """Compares gradients with respect to the rows and the scales with the reference's in float32.
    The backward pass keeps no dense copy of the matrices."""
    x = quantized((70, 59), "int4", (1, 128))
    lhs, gate, up, groups, _, *scales = x.arrays()
    cotangent = rounded(np.random.default_rng(3).standard_normal((129, 128)), "bfloat16")

    def gradients(swiglu, dtype):
        def rows_and_scales(lhs, *scales):
            return swiglu(lhs, gate, up, groups, None, *scales, block_shape=(1, 128))

        _, vjp = jax.vjp(rows_and_scales, lhs.astype(dtype), *scales)
        if dtype == "bfloat16":
            assert not [leaf for leaf in jax.tree.leaves(vjp) if is_dense(leaf, (2, 128, 256))]
        return jax.jit(vjp)(device(cotangent, dtype))

    exact = functools.partial(grouped_swiglu, implementation="reference")
    each = zip(gradients(back_end(), "bfloat16"), gradients(exact, "float32"), strict=True)
    for got, want in each:
        got, want = (np.float64(a).reshape(1, -1) for a in (got, want))
        check(got, want, ROUNDINGS * tolerance("bfloat16"))


def quantized(sizes, form, block_shape) -> Inputs:
    gate, up = (
        grouped_matmul_cases.Inputs.random(
            sizes, N=128, K=256, lhs_dtype="bfloat16", rhs_dtype=form, block_shape=block_shape,
            seed=seed,
        )
        for seed in (0, 1)
    )  # fmt: skip
    up = dataclasses.replace(up, lhs=gate.lhs)
    smaller = np.float32(2.0 ** -np.round(np.log2(np.std(gate.expected()))))
    gate, up = (dataclasses.replace(x, rhs_scale=x.rhs_scale * smaller) for x in (gate, up))
    return Inputs(gate, up)


@kernel_runs
@pytest.mark.parametrize(
    ("dtype", "config"),
    slow_except(CONFIGS, QUICK),
    ids=lambda x: x if isinstance(x, str) else f"{x.tile_m}x{x.tile_n}",
)
def test_configs(dtype, config):
    """Groups of several tiles and of a part of one, overlapping tiles, NaN in unused rows."""
    x = Inputs.random((130, 0, 1, 3), M=140, F=(config.tile_n // 128 + 1) * 64, K=256, dtype=dtype)
    out = run(x, back_end(config))
    check(out[: x.defined], x.expected(), ROUNDINGS * tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize(
    "config",
    slow_except([*dense_plan.FEW_TOKENS[2], *dense_plan.MANY_TOKENS_BFLOAT16[:2]], [3]),
    ids=lambda x: f"{x.tile_m}x{x.tile_n}",
)
def test_sums_are_stored_for_the_gradient(config):
    """Groups and tiles as above. SwiGLU is that of the rounded sums, rounded once."""
    config = dataclasses.replace(config, stages=2, staging_buffers=mosaic_gpu.STAGING_BUFFERS)
    F = (config.tile_n // 128 + 1) * 64
    x = Inputs.random((130, 0, 1, 3), M=140, F=F, K=128, dtype="bfloat16")
    lhs, gate, up, sizes, *_ = x.arrays()
    options = {"config": config, "interpret": INTERPRET}
    results = dense.swiglu_and_sums(lhs, (gate, up), sizes, **options)
    # Other rows are undefined: numpy warns of conversions of signalling NaNs.
    hidden, *sums = (np.float64(y[: x.defined]) for y in results)
    for got, inputs in zip(sums, (x.gate, x.up), strict=True):
        check(got, inputs.expected(), BFLOAT16_ROUNDING)
    gates, ups = sums
    check(hidden, gates / (1 + np.exp(-gates)) * ups, BFLOAT16_ROUNDING)


NAMES = jax.checkpoint_policies.save_only_these_names


@pytest.mark.parametrize(
    ("policy", "kernels", "from_sums"),
    [
        (None, 1, 0),
        (save_all_but_gathered, 1, 0),
        (NAMES("matmul"), 1, 1),
        (NAMES(), 2, 0),
    ],
    ids=["no checkpoint", "all", "sums", "nothing"],
)
def test_what_the_backward_pass_computes_again(policy, kernels, from_sums, monkeypatch):
    """With the sums it computes SwiGLU of them, and otherwise it runs the kernel."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    arrays = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 64), (2, 128, 64), (2, 128, 64))]

    def layer(*arrays):
        return mosaic_gpu.grouped_swiglu(*arrays, jnp.array([300, 212])) ** 2  # reads it again

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
    loss = lambda *x: jnp.sum(layer(*x).astype(jnp.float32))  # noqa: E731
    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays)
    calls = [(e.primitive.name, e.params.get("again"), len(e.outvars)) for e in equations(program)]
    assert calls.count(("call_exported", None, 3)) == kernels
    assert calls.count(("from_saved", True, 1)) == from_sums


@kernel_runs
@pytest.mark.parametrize(
    "settings",
    slow_except([{}, {"paired": True}], [0]),
    ids=lambda x: "-".join(x) or "default",
)
def test_an_unrolled_loop_and_approximate_silu(settings):
    config = dataclasses.replace(dense_plan.UNROLLED_FLOAT8, stages=2, **settings)
    x = Inputs.random((70, 0, 3), F=256, K=512, dtype=FLOAT8)
    check(run(x, back_end(config)), x.expected(), ROUNDINGS * tolerance("bfloat16"))


@kernel_runs
def test_the_kernel_rounds_once():
    x = Inputs.random((5, 3), F=64, K=64, dtype="bfloat16")
    check(run(x, back_end()), x.expected(), tolerance("bfloat16") / 2)


def test_large_gates():
    """silu is the gate itself, or zero. No overflowing exponential becomes NaN."""
    gates = np.array([-1e4, -200.0, 0.0, 200.0, 1e4])
    for name, swiglu in {"reference": "reference", "kernel": back_end()}.items():
        if name == "kernel" and not (ON_GPU or INTERPRETER):
            continue
        lhs = np.zeros((5, 64))
        lhs[:, 0] = gates
        ones = np.zeros((1, 64, 64))
        ones[..., 0] = 1
        arrays = device(lhs, "bfloat16"), device(ones, "bfloat16")
        out = named(swiglu)(arrays[0], arrays[1], arrays[1], jnp.array([5]))
        rounded = np.float64(arrays[0][:, :1])
        want = np.where(rounded > 0, rounded**2, 0) * np.ones((1, 64))
        np.testing.assert_allclose(np.float64(out), want, rtol=2.0**-8, atol=1e-30)


def test_matrices_of_two_dtypes_are_refused():
    lhs, gate, up, *rest = Inputs.random((3, 4), F=64, K=64, dtype="bfloat16").arrays()
    with pytest.raises(ValueError, match=r"up: expected bfloat16 .*, got float32"):
        grouped_swiglu(lhs, gate, up.astype(jnp.float32), *rest)


def test_scales_are_checked():
    lhs, gate, up, sizes, of_lhs, of_gate, _ = Inputs.random(
        (3, 4), F=64, K=128, dtype=FLOAT8
    ).arrays()
    with pytest.raises(ValueError, match=r"float8 .* with no scale"):
        grouped_swiglu(lhs, gate, up, sizes, of_lhs, of_gate, None)


@pytest.mark.parametrize(
    ("F", "K", "dtype", "message"),
    [
        (64, 64, "float32", "takes bfloat16 by bfloat16 and .*, got float32 by float32"),
        (72, 64, "bfloat16", "multiples of 64, and multiples of 64 of K, got N 72 and K 64"),
        (64, 192, FLOAT8, "multiples of 64, and multiples of 128 of K, got N 64 and K 192"),
    ],
)
def test_refusals(F, K, dtype, message):
    x = Inputs.random((3, 4), F=F, K=K, dtype=dtype)
    anything = object()  # it is refused before the interpreter starts
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.grouped_swiglu(*x.arrays(), interpret=anything)


def test_part_tiles_are_refused():
    config = dataclasses.replace(dense_plan.FEW_TOKENS[2][0], tile_n=128)
    x = Inputs.random((3, 4), F=128, K=128, dtype=FLOAT8)
    with pytest.raises(
        NotImplementedError, match="multiples of 32 columns, or of 128 if split along N, got 64"
    ):
        mosaic_gpu.grouped_swiglu(*x.arrays(), config=config, interpret=object())


@off_gpu
def test_other_platforms_are_refused():
    x = Inputs.random((3, 4), F=64, K=64, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="mosaic_gpu: runs on Hopper GPUs, this is cpu"):
        grouped_swiglu(*x.arrays(), implementation="mosaic_gpu")
