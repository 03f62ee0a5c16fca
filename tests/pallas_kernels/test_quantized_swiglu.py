"""quantized_swiglu: both back-ends against float64, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantized_swiglu
from pallas_kernels.grouped_matmul import few_rows
from pallas_kernels.quantized_swiglu import mosaic_gpu
from tests.pallas_kernels import test_quantized_matmul as one_product
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, tolerance
from tests.pallas_kernels.test_quantized_matmul import BLOCKS

# Both products and the result are rounded, and silu multiplies its argument's relative error by at
# most 1 + |x|; sums here are near 1.
ROUNDINGS = 6


def inputs(form, batch=(5,), dtype="bfloat16", **given):
    """x, gate, up, their scales; and the result in float64."""
    matrices, scales, products = [], [], []
    for seed in range(2):
        (x, matrix, scale), product = one_product.inputs(
            form, batch, dtype=dtype, seed=seed, **given
        )
        smaller = 2.0 ** -np.round(np.log2(np.std(product) if product.size else 1))
        matrices.append(matrix)
        scales.append(scale * smaller)
        products.append(product * smaller)
    gated, upward = products
    return (x, *matrices, *scales), gated / (1 + np.exp(-gated)) * upward


def kernel(*arrays, **options):
    return mosaic_gpu.quantized_swiglu(*arrays, **{"interpret": INTERPRET, **options})


@pytest.mark.parametrize("form", list(BLOCKS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference(form, dtype):
    arrays, want = inputs(form, (2, 3), dtype)
    f = functools.partial(quantized_swiglu, block_shape=BLOCKS[form], implementation="reference")
    got = jax.jit(f)(*arrays)
    assert got.dtype == dtype
    check(got, want, ROUNDINGS * tolerance(dtype))


@kernel_runs
@pytest.mark.parametrize("form", list(BLOCKS))
@pytest.mark.parametrize("batch", [(1,), (2, 3), (64,)])
def test_kernel(form, batch):
    arrays, want = inputs(form, batch)
    got = jax.jit(functools.partial(kernel, block_shape=BLOCKS[form]))(*arrays)
    check(got, want, ROUNDINGS * tolerance("bfloat16"))


@kernel_runs
def test_gradient_of_the_rows():
    """The kernel's is that of the exact result."""
    (x, *weights), _ = inputs("float8")
    cotangent = jnp.asarray(np.random.default_rng(0).standard_normal((5, 192)), jnp.bfloat16)

    def pulled(f):
        result = functools.partial(f, block_shape=BLOCKS["float8"])
        return jax.jit(lambda x: jax.vjp(lambda x: result(x, *weights), x)[1](cotangent)[0])(x)

    want = pulled(lambda *a, **k: quantized_swiglu(*a, **k, implementation="reference"))
    check(pulled(kernel), np.asarray(want, np.float64), ROUNDINGS * tolerance("bfloat16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16 rows, got float32"),
        ({"batch": (65,)}, "takes 64 rows a group at most, .* got 65 rows for 1 groups"),
        ({"batch": (0,)}, "takes no empty arrays"),
        ({"widths": (72, 320)}, "N=72"),
    ],
)
def test_what_the_kernel_does_not_take(changes, message):
    arrays, _ = inputs("float8", **changes)
    with pytest.raises(NotImplementedError, match=message):
        kernel(*arrays, block_shape=(128, 128), interpret=object())


@off_gpu
def test_no_gpu():
    arrays, _ = inputs("float8")
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        quantized_swiglu(*arrays, block_shape=(128, 128), implementation="mosaic_gpu")


def test_matrices_that_do_not_fit():
    (x, gate, up, *scales), _ = inputs("int8")
    with pytest.raises(ValueError, match=r"up: expected int8 \(192, 320\) as gate is, got float8"):
        quantized_swiglu(x, gate, up.astype(jnp.float8_e4m3fn), *scales, block_shape=(1, 320))
    (x, gate, up, *scales), _ = inputs("int4")
    scales = [scale[:, :-1] for scale in scales]
    with pytest.raises(ValueError, match=r"scale: expected shape \(192, 3\), got \(192, 2\)"):
        quantized_swiglu(x, gate, up, *scales, block_shape=(1, 128))


@pytest.mark.parametrize("form", list(BLOCKS))
def test_is_one_kernel(form, monkeypatch):
    for module in (mosaic_gpu, mosaic_gpu.mosaic_gpu, few_rows):
        monkeypatch.setattr(module, "require_hopper", lambda interpret: None)
    monkeypatch.setattr(few_rows, "multiprocessors", lambda: 132)
    arrays, _ = inputs(form)
    f = functools.partial(mosaic_gpu.quantized_swiglu, block_shape=BLOCKS[form])
    text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
