"""Tests of gather_rows: both back-ends against NumPy's indexing, bit by bit, and their refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gather_rows
from pallas_kernels.gather_rows import mosaic_gpu
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu, on_gpu

kernel = functools.partial(mosaic_gpu.gather_rows, interpret=INTERPRET)
reference = functools.partial(gather_rows, implementation="reference")


def inputs(shape, count, dtype="bfloat16"):
    """Returns rows of all values, NaN included, and indices from -2 to M + 1, repeated or not."""
    random = np.random.default_rng(0)
    size = jnp.dtype(dtype).itemsize
    bits = random.integers(0, 2 ** (8 * size), shape).astype(f"uint{8 * size}")
    rows = random.integers(-2, shape[0] + 2, count).astype(np.int32)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype), jnp.asarray(rows)


def check(gather, x, rows):
    got = np.asarray(gather(x, rows))
    want = np.asarray(x)[np.clip(rows, 0, len(x) - 1)]
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "count"), [((5, 24), 40), ((1, 3), 1), ((4, 8), 0)])
def test_reference(shape, count, dtype):
    check(jax.jit(reference), *inputs(shape, count, dtype))


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """Makes a program copy several of few rows."""
    monkeypatch.setattr(mosaic_gpu, "multiprocessors", lambda: 1)


# A program copies 1, 8, 2 and 4 rows, except the last one, and 16, 16, 16 and 8 bytes at a time.
@kernel_runs
@pytest.mark.parametrize(
    ("shape", "count", "dtype"),
    [
        ((3, 2048), 5, "bfloat16"),
        ((9, 2048), 37, "bfloat16"),
        ((9, 7168), 13, "bfloat16"),
        ((9, 7168), 19, "float8_e4m3fn"),
    ],
)
def test_kernel(shape, count, dtype, few_multiprocessors):
    check(
        functools.partial(mosaic_gpu.copy_rows, interpret=INTERPRET), *inputs(shape, count, dtype)
    )


@on_gpu
@pytest.mark.parametrize(("D", "dtype"), [(2048, "bfloat16"), (7168, "float8_e4m3fn")])
def test_many_rows(D, dtype):
    check(gather_rows, *inputs((2560, D), 15360, dtype))


@kernel_runs
def test_gradient_adds_up_the_copies(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_MIN_ROWS", 1)
    random = np.random.default_rng(1)
    x = jnp.asarray(random.standard_normal((4, 1024)), jnp.bfloat16)
    rows = jnp.asarray(random.integers(0, 4, 24), jnp.int32)
    factors = jnp.asarray(random.integers(-2, 3, (24, 1)), jnp.bfloat16)

    def gradient(gather):
        loss = lambda x: jnp.sum((gather(x, rows) * factors).astype(jnp.float32))  # noqa: E731
        return np.asarray(jax.jit(jax.grad(loss))(x), np.float32)

    np.testing.assert_array_equal(gradient(kernel), gradient(reference))


@pytest.mark.parametrize(
    ("shape", "count", "dtype", "message"),
    [
        ((4, 2048), 511, "bfloat16", "takes 512 rows or more, got 511"),
        ((4, 2048), 512, "float32", "numbers of one or two bytes, got float32"),
        ((4, 2112), 512, "bfloat16", "a multiple of 1024 bytes, got 4224"),
        ((4, 256), 512, "bfloat16", "a multiple of 1024 bytes, got 512"),
    ],
)
def test_kernel_refusals(shape, count, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.gather_rows(*inputs(shape, count, dtype), interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        gather_rows(*inputs((4, 2048), 512), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("x", "rows", "message"),
    [
        (np.zeros((0, 4)), np.zeros(2, np.int32), r"at least one row, got shape \(0, 4\)"),
        (np.zeros((2, 4)), np.zeros(2, np.int16), "rows: expected int32, got int16"),
    ],
)
def test_wrong_arguments(x, rows, message):
    with pytest.raises(ValueError, match=message):
        gather_rows(jnp.asarray(x, jnp.float32), jnp.asarray(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_lowers_for_cuda(dtype, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    traced = jax.jit(mosaic_gpu.gather_rows).trace(*inputs((4, 7168), 4096, dtype))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
