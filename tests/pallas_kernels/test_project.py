"""project: a norm and projections of its result, in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.project import mosaic_gpu, reference
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs
from tests.pallas_kernels.numerics import check, relative_error, tolerance

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def arguments(tokens, width, rows, dtype, weights):
    """Returns x, the norm's weights, and projections with these numbers of rows."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 2 * len(rows)))
    x = jax.random.normal(next(keys), (tokens, width), dtype)
    norm = 1 + jax.random.normal(next(keys), (width,), dtype) / 4
    projections = []
    for n in rows:
        weight = jax.random.normal(next(keys), (n, width), FLOAT32).astype(weights)
        shape = -(-n // 128), -(-width // 128)
        scale = jax.random.uniform(next(keys), shape, FLOAT32, 0.5, 2)
        projections.append(Projection(weight, (scale,) if weights == FLOAT8 else ()))
    return x, norm, projections


def expected(x, norm, projections, eps):
    """Returns the results in float64, after the norm's rounding."""
    row = np.asarray(x, np.float64)
    row = row / np.sqrt((row**2).mean(axis=-1, keepdims=True) + eps) * np.asarray(norm, np.float64)
    row = np.asarray(jnp.asarray(row, FLOAT32).astype(x.dtype), np.float64)
    results = []
    for weight, scales in projections:
        matrix = np.asarray(weight, np.float64)
        if scales:
            spread = np.kron(np.asarray(scales[0]), np.ones((128, 128)))
            matrix = matrix * spread[: matrix.shape[0], : matrix.shape[1]]
        results.append(row @ matrix.T)
    return results


CASES = {
    "one token": (1, 256, (64, 24), FLOAT32, FLOAT32),
    "tokens": (3, 128, (40,), BFLOAT16, BFLOAT16),
    "float8": (2, 256, (136, 8), BFLOAT16, jnp.dtype(FLOAT8)),
}


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_kernel(case):
    tokens, width, rows, dtype, weights = case
    if ON_GPU and dtype == FLOAT32:
        dtype = weights = BFLOAT16
    given = arguments(tokens, width, rows, dtype, weights)
    programs = None if ON_GPU else 2
    got = mosaic_gpu.project(*given, eps=1e-6, programs=programs, interpret=INTERPRET)
    plain = reference.project(*given, eps=1e-6)
    for result, other, want in zip(got, plain, expected(*given, 1e-6), strict=True):
        assert result.dtype == dtype
        check(result, want, tolerance(dtype))
        if dtype == BFLOAT16:
            assert relative_error(result, want) <= 1.1 * relative_error(other, want)
