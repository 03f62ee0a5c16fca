"""Tests of quantized_matmul: all back-ends against float64, and their refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_dequant, integer_quant, quantized_matmul
from pallas_kernels.grouped_matmul import few_tokens, mosaic_gpu
from pallas_kernels.quantized_matmul import one_group
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import (
    check,
    device,
    is_dense,
    random_e4m3,
    rounded,
    tolerance,
)

BLOCKS = {"float8": (128, 128), "int8": (1, 320), "int4": (1, 128)}
QUICK = [("float8", (64,)), ("int8", (1,)), ("int4", (2, 3))]
WIDTHS = {"float8": (192, 320), "int8": (192, 320), "int4": (192, 384)}  # N, K


def inputs(form, batch=(5,), widths=None, block=None, dtype="bfloat16", seed=0):
    """Returns (x, weight, scale) and the result in float64. ``seed`` changes all but x."""
    (N, K), block = widths or WIDTHS[form], block or BLOCKS[form]
    rng = np.random.default_rng(len(form) + N + sum(batch))
    x = rounded(rng.standard_normal((*batch, K)), dtype)
    rng = np.random.default_rng([seed, N, K])
    if form == "float8":
        values = random_e4m3(rng, (N, K))
        weight, exact = jax.device_put(values), np.asarray(values, np.float64)
        scale = rng.uniform(0.5, 2, (-(-N // block[0]), -(-K // block[1]))).astype(np.float32)
    else:
        weight, scale = integer_quant(
            device(rng.standard_normal((N, K)), "float32"), int(form[3:]), block[1]
        )
        exact = np.asarray(weight).astype(np.int64)
        if form == "int4":
            exact = np.stack([exact & 15, exact >> 4], axis=-1).reshape(N, K)
            exact = (exact ^ 8) - 8
        scale = np.asarray(scale)
    spread = np.repeat(np.repeat(scale.astype(np.float64), block[0], 0), block[1], 1)[:N, :K]
    arrays = device(x, dtype), weight, jax.device_put(scale)
    return arrays, np.einsum("...k,nk->...n", x, exact * spread)


def kernel(*arrays, **options):
    return one_group.on_hopper(
        *arrays, **{"out_dtype": jnp.bfloat16, "interpret": INTERPRET, **options}
    )


@pytest.mark.parametrize("form", list(BLOCKS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference(form, dtype):
    arrays, want = inputs(form, (2, 3), dtype=dtype)
    f = functools.partial(quantized_matmul, block_shape=BLOCKS[form], implementation="reference")
    got = jax.jit(f)(*arrays)
    assert got.dtype == dtype
    check(got, want, tolerance(dtype))
    got = jax.jit(functools.partial(f, out_dtype=jnp.float32))(*arrays)
    assert got.dtype == jnp.float32
    check(got, want, tolerance(dtype))


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
    check(got, want, tolerance("bfloat16"))
    if batch == (1,):
        cast = jax.jit(functools.partial(kernel, block_shape=BLOCKS[form], out_dtype=jnp.float32))(
            *arrays
        )
        assert cast.dtype == jnp.float32
        np.testing.assert_array_equal(cast, got.astype(jnp.float32))


@kernel_runs
def test_gradient_of_the_rows():
    """The kernel's gradient is that of the reference."""
    (x, *weights), _ = inputs("float8", (5,))
    cotangent = device(np.random.default_rng(0).standard_normal((5, 192)), "bfloat16")

    def pulled(f):
        matmul = functools.partial(f, block_shape=BLOCKS["float8"])
        return jax.jit(lambda x: jax.vjp(lambda x: matmul(x, *weights), x)[1](cotangent)[0])(x)

    want = pulled(lambda *a, **k: quantized_matmul(*a, **k, implementation="reference"))
    check(pulled(kernel), np.asarray(want, np.float64), 2 * tolerance("bfloat16"))


@pytest.mark.parametrize("form", list(BLOCKS))
def test_gradient_dequantizes_again(form):
    """It is the cotangent times the matrix, and the backward pass keeps no dense copy of it."""
    (x, *weights), _ = inputs(form, (2, 3))
    cotangent = rounded(np.random.default_rng(0).standard_normal((2, 3, WIDTHS[form][0])), x.dtype)
    matmul = functools.partial(quantized_matmul, block_shape=BLOCKS[form])
    _, vjp = jax.vjp(lambda x: matmul(x, *weights, implementation="reference"), x)
    assert not [leaf for leaf in jax.tree.leaves(vjp) if is_dense(leaf, WIDTHS[form])]
    dense = block_dequant(*weights, BLOCKS[form])
    check(vjp(device(cotangent, x.dtype))[0], cotangent @ np.float64(dense), tolerance("bfloat16"))


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
        quantized_matmul(*arrays, block_shape=(128, 128), implementation="mosaic_gpu")


def test_shapes_that_do_not_fit():
    (x, weight, scale), _ = inputs("int4")
    with pytest.raises(ValueError, match="weight: expected 383 columns as x has, got 384"):
        quantized_matmul(x[:, :-1], weight, scale, block_shape=(1, 128))
    with pytest.raises(ValueError, match=r"scale: expected shape \(192, 3\), got \(192, 2\)"):
        quantized_matmul(x, weight, scale[:, :-1], block_shape=(1, 128))


@pytest.mark.parametrize("form", list(BLOCKS))
def test_lowers_for_cuda(form, monkeypatch):
    for module in (one_group, mosaic_gpu, few_tokens):
        monkeypatch.setattr(module, "require_hopper", lambda interpret: None)
    monkeypatch.setattr(few_tokens, "multiprocessors", lambda: 132)
    arrays, _ = inputs(form)
    f = functools.partial(one_group.on_hopper, block_shape=BLOCKS[form], out_dtype=jnp.bfloat16)
    text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("form", "block"), [("float8", (128, 128)), ("int8", (1, 128)), ("int4", None)]
)
def test_on_a_tpu(form, block):
    arrays, want = inputs(form, (2, 3), widths=(192, 384), block=block)
    options = {"block_shape": block or BLOCKS[form], "interpret": True}
    run = functools.partial(one_group.on_tpu, **options)
    got = jax.jit(functools.partial(run, out_dtype=jnp.bfloat16))(*arrays)
    check(got, want, tolerance("bfloat16"))
    cast = jax.jit(functools.partial(run, out_dtype=jnp.float32))(*arrays)
    np.testing.assert_array_equal(cast, got.astype(jnp.float32))


def test_int8_with_one_scale_per_row_is_left_to_xla():
    arrays, _ = inputs("int8", widths=(192, 384), block=(1, 384))
    options = {"block_shape": (1, 384), "out_dtype": jnp.bfloat16}
    with pytest.raises(NotImplementedError, match="XLA reads int8 with one scale a row as it is"):
        one_group.on_tpu(*arrays, **options, interpret=True)
    with pytest.raises(NotImplementedError, match="mosaic_tpu: runs on TPUs, this is cpu"):
        quantized_matmul(*arrays, block_shape=(1, 384), implementation="mosaic_tpu")
