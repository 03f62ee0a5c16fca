"""rms_norm and add_rms_norm: compares both back-ends with float64, and tests refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.rms_norm import mosaic_gpu
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, device, tolerance

EPS = 1e-6
kernel = functools.partial(mosaic_gpu.rms_norm, eps=EPS, interpret=INTERPRET)
add_kernel = functools.partial(mosaic_gpu.add_rms_norm, eps=EPS, interpret=INTERPRET)
REFERENCE = jax.jit(functools.partial(rms_norm, eps=EPS, implementation="reference"))


def inputs(shape, dtype="bfloat16", scale=3.0):
    """Returns (x, weight), and the result in float64."""
    random = np.random.default_rng(0)
    x = device(random.standard_normal(shape) * scale, dtype)
    weight = device(random.uniform(0.5, 1.5, shape[-1:]), dtype)
    exact, factors = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    mean = np.mean(exact**2, axis=-1, keepdims=True)
    return (x, weight), exact / np.sqrt(mean + EPS) * factors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "scale"), [((24,), 3), ((2, 3, 24), 3), ((2, 3, 24), 1e-3), ((0, 24), 3)]
)
def test_reference(shape, scale, dtype):
    """The cases include squares of about eps."""
    arrays, want = inputs(shape, dtype, scale)
    got = REFERENCE(*arrays)
    assert got.dtype == dtype
    check(got, want, tolerance(dtype))


def check_sum(norm, shape, dtype):
    """Checks that the sum is exact, and that the norm is that of the rounded sum."""
    (x, weight), _ = inputs(shape, dtype)
    y = device(np.random.default_rng(1).standard_normal(shape), dtype)
    total, normed = norm(x, y, weight)
    want = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(dtype)
    np.testing.assert_array_equal(total, want)
    exact, factors = np.asarray(want, np.float64), np.asarray(weight, np.float64)
    mean = np.mean(exact**2, axis=-1, keepdims=True)
    check(normed, exact / np.sqrt(mean + EPS) * factors, tolerance(dtype))
    assert total.dtype == normed.dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_of_a_sum(dtype):
    norm = functools.partial(add_rms_norm, eps=EPS, implementation="reference")
    check_sum(norm, (2, 3, 24), dtype)


@kernel_runs
@pytest.mark.parametrize("D", [2048, 2304])
def test_kernel_of_a_sum(D):
    check_sum(jax.jit(add_kernel), (1, 1, D), "bfloat16")


# Threads load 16, 16, 8 and 4 bytes each.
@kernel_runs
@pytest.mark.parametrize("D", [2048, 7168, 2560, 2304])
@pytest.mark.parametrize("scale", [3.0, 1e-4, 0.0])
def test_kernel(D, scale):
    """The cases include squares of about eps, and zeros."""
    arrays, want = inputs((1, 1, D), scale=scale)
    check(jax.jit(kernel)(*arrays), want, tolerance("bfloat16"))


@kernel_runs
@pytest.mark.parametrize(("ours", "op"), [(kernel, rms_norm), (add_kernel, add_rms_norm)])
def test_gradients_are_the_reference_s(ours, op):
    (x, weight), _ = inputs((1, 2048))
    arrays = (x, weight) if op is rms_norm else (x, x[:, ::-1], weight)

    def gradients(norm):
        def loss(*arrays):
            return sum(jnp.sum(a.astype(jnp.float32) ** 3) for a in jax.tree.leaves(norm(*arrays)))

        return jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)

    want = gradients(functools.partial(op, eps=EPS, implementation="reference"))
    for got, exact in zip(gradients(ours), want, strict=True):
        check(got, np.asarray(exact, np.float64), 2 * tolerance("bfloat16"))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 2048), "bfloat16", "takes one row, got 2"),
        ((0, 2048), "bfloat16", "takes one row, got 0"),
        ((1, 2048), "float32", "takes bfloat16, got float32"),
        ((1, 512), "bfloat16", "2048 or more, got 512"),
        ((1, 2176), "bfloat16", "multiple of 256 columns, .* got 2176"),
    ],
)
def test_kernel_refusals(shape, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.rms_norm(*inputs(shape, dtype)[0], eps=EPS, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        rms_norm(*inputs((1, 2048))[0], eps=EPS, implementation="mosaic_gpu")


@pytest.mark.parametrize("D", [2048, 7168])
def test_lowers_for_cuda(D, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.rms_norm, eps=EPS))
    x, weight = inputs((1, D))[0]
    assert kernels_of(f, x, weight) == 1
    f = jax.jit(functools.partial(mosaic_gpu.add_rms_norm, eps=EPS))
    assert kernels_of(f, x, x, weight) == 1


def kernels_of(f, *arrays):
    text = f.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu")
