"""Tests of swiglu: both back-ends against float64, and their refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import swiglu
from pallas_kernels.grouped_matmul import few_tokens
from pallas_kernels.grouped_swiglu import mosaic_gpu as grouped_mosaic_gpu
from pallas_kernels.swiglu import gpu
from tests.pallas_kernels import test_quantized_matmul as quantized_matmul_tests
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, device, tolerance
from tests.pallas_kernels.test_quantized_matmul import BLOCKS

# The results of both matmuls and of swiglu are rounded, and silu multiplies its argument's relative
# error by at most 1 + |x|. The sums here are near 1.
ROUNDINGS = 6
QUICK = [("float8", (2, 3)), ("int8", (64,)), ("int4", (1,))]
FORMS = ["dense", *BLOCKS]
ROWS = 33  # supported by the kernel for all formats


def inputs(form, batch=(5,), dtype="bfloat16", **given) -> tuple[Any, Any]:
    """Returns (x, gate, up, and their scales if they have any), and the result in float64."""
    if form == "dense":
        return dense_inputs(batch, dtype, **given)
    matrices, scales, products = [], [], []
    for seed in range(2):
        (x, matrix, scale), product = quantized_matmul_tests.inputs(
            form, batch, dtype=dtype, seed=seed, **given
        )
        smaller = 2.0 ** -np.round(np.log2(np.std(product) if product.size else 1))
        matrices.append(matrix)
        scales.append(scale * smaller)
        products.append(product * smaller)
    gated, upward = products
    return (x, *matrices, *scales), gated / (1 + np.exp(-gated)) * upward


def dense_inputs(batch, dtype, widths=(192, 320)) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    F, K = widths
    x = device(random.standard_normal((*batch, K)), dtype)
    gate, up = (device(random.standard_normal((F, K)) / K**0.5, dtype) for _ in range(2))
    gated, upward = (np.asarray(x, np.float64) @ np.asarray(w, np.float64).T for w in (gate, up))
    return (x, gate, up, None, None), gated / (1 + np.exp(-gated)) * upward


def options(form):
    return {"block_shape": BLOCKS.get(form, (128, 128))}


def kernel(*arrays, **options):
    return gpu.one_kernel(*arrays, **{"interpret": INTERPRET, "block_shape": (128, 128), **options})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference(form, dtype):
    arrays, want = inputs(form, (2, 3), dtype)
    f = functools.partial(swiglu, **options(form), implementation="reference")
    got = jax.jit(f)(*arrays)
    assert got.dtype == dtype
    check(got, want, ROUNDINGS * tolerance(dtype))


@kernel_runs
@pytest.mark.parametrize(
    ("form", "batch"),
    [
        pytest.param(form, batch, marks=() if (form, batch) in QUICK else pytest.mark.slow)
        for form in BLOCKS
        for batch in [(1,), (2, 3), (64,)]
    ],
)
def test_kernel(form, batch):
    arrays, want = inputs(form, batch)
    got = jax.jit(functools.partial(kernel, block_shape=BLOCKS[form]))(*arrays)
    check(got, want, ROUNDINGS * tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize("batch", [(32,), (7, 5), (128,)])
def test_kernel_of_dense_matrices(batch):
    arrays, want = inputs("dense", batch)
    check(jax.jit(kernel)(*arrays), want, ROUNDINGS * tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize("form", ["dense", "float8"])
def test_gradient_of_the_rows(form):
    """The kernel's gradient is that of the reference."""
    (x, *weights), _ = inputs(form, (ROWS,))
    cotangent = device(np.random.default_rng(0).standard_normal((ROWS, 192)), "bfloat16")

    def pulled(f):
        result = functools.partial(f, **options(form))
        return jax.jit(lambda x: jax.vjp(lambda x: result(x, *weights), x)[1](cotangent)[0])(x)

    want = pulled(lambda *a, **k: swiglu(*a, **k, implementation="reference"))
    check(pulled(kernel), np.asarray(want, np.float64), ROUNDINGS * tolerance("bfloat16"))


@pytest.mark.parametrize("rows", [0, 31, 129])
def test_dense_matrices_are_left_to_xla(rows):
    with pytest.raises(NotImplementedError, match=f"takes 32 to 128 rows .*, got {rows}"):
        kernel(*inputs("dense", (rows,))[0], interpret=object())


def test_large_dense_matrices_take_fewer_rows(monkeypatch):
    for module in (gpu, grouped_mosaic_gpu):
        monkeypatch.setattr(module, "require_hopper", lambda interpret: None)
    large = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    shape = functools.partial(jax.eval_shape, functools.partial(gpu.one_kernel, **options("dense")))
    for rows in (1, 128):
        x = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16)
        assert shape(x, large, large, None, None).shape == (rows, 8192)
    x = jax.ShapeDtypeStruct((129, 2048), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"takes 1 to 128 rows .*, got 129"):
        shape(x, large, large, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16 rows, got float32"),
        ({"batch": (65,)}, "takes 64 rows a group at most, .* got 65 rows for 1 groups"),
        ({"batch": (0,)}, "takes no empty arrays"),
        ({"widths": (72, 320)}, "N=72"),
    ],
)
def test_refusals(changes, message):
    arrays, _ = inputs("float8", **changes)
    with pytest.raises(NotImplementedError, match=message):
        kernel(*arrays, block_shape=(128, 128), interpret=object())


@off_gpu
def test_no_gpu():
    arrays, _ = inputs("float8")
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        swiglu(*arrays, block_shape=(128, 128), implementation="mosaic_gpu")


def test_matrices_that_do_not_fit():
    (x, gate, up, *scales), _ = inputs("int8")
    with pytest.raises(ValueError, match=r"up: expected int8 \(192, 320\) as gate is, got float8"):
        swiglu(x, gate, up.astype(jnp.float8_e4m3fn), *scales, block_shape=(1, 320))
    (x, gate, up, *scales), _ = inputs("int4")
    scales = [scale[:, :-1] for scale in scales]
    with pytest.raises(ValueError, match=r"scale: expected shape \(192, 3\), got \(192, 2\)"):
        swiglu(x, gate, up, *scales, block_shape=(1, 128))
    with pytest.raises(ValueError, match="for both matrices or for none, got one"):
        swiglu(x, gate, up, scales[0], block_shape=(1, 128))
    with pytest.raises(ValueError, match=r"384 columns of bfloat16 .* got 192 of uint8"):
        swiglu(x, gate, up)
    x, gate, up, *_ = inputs("dense")[0]
    with pytest.raises(ValueError, match=r"320 columns of bfloat16 .* got 320 of float32"):
        swiglu(x, gate.astype(jnp.float32), up.astype(jnp.float32))


@pytest.mark.parametrize("form", FORMS)
def test_is_one_kernel(form, monkeypatch):
    for module in (gpu, grouped_mosaic_gpu, few_tokens):
        monkeypatch.setattr(module, "require_hopper", lambda interpret: None)
    monkeypatch.setattr(few_tokens, "multiprocessors", lambda: 132)
    arrays, _ = inputs(form, (ROWS,))
    f = functools.partial(gpu.one_kernel, **options(form))
    text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_two_matmuls_that_are_not_merged():
    arrays, want = dense_inputs((2, 70), "bfloat16")
    separately, arrays = jax.jit(gpu.multiply_apart), arrays[:3]
    check(separately(*arrays), want, ROUNDINGS * tolerance("bfloat16"))
    assert "optimization_barrier" in separately.lower(*arrays).as_text()


def test_gradients_of_two_matmuls_that_are_not_merged():
    arrays = dense_inputs((3,), "float32")[0][:3]

    def gradients(op):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(op(*arrays) ** 2), (0, 1, 2)))(*arrays)

    want = gradients(functools.partial(swiglu, implementation="reference"))
    for got, exact in zip(gradients(gpu.multiply_apart), want, strict=True):
        check(got, np.asarray(exact, np.float64), 2 * tolerance("float32"))


@pytest.mark.parametrize(
    ("form", "rows", "where", "message"),
    [
        ("dense", 200, "cpu", "is for GPUs, this is cpu"),
        ("dense", 128, "gpu", "takes 129 rows or more, got 128"),
        ("int8", 200, "gpu", "takes matrices without scales"),
    ],
)
def test_refusals_of_two_matmuls(form, rows, where, message, monkeypatch):
    monkeypatch.setattr(gpu, "platform", lambda: where)
    with pytest.raises(NotImplementedError, match=message):
        gpu.two_matmuls(*inputs(form, (rows,))[0], **options(form))
