"""grouped_matmul's kernel for TPUs, interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import mosaic_tpu, reference
from pallas_kernels.grouped_matmul.tpu_plan import Plan, choose_plan
from pallas_kernels.grouped_matmul.visits import visits_of
from pallas_kernels.tpu import CHIPS
from tests.pallas_kernels.grouped_matmul_cases import (
    FLOAT8,
    ROWS_OF_GROUPS,
    GroupedMatmulGradientCases,
    GroupedMatmulRowCases,
    Inputs,
    run,
)
from tests.pallas_kernels.numerics import check, tolerance

N, K = 128, 256
back_end = functools.partial(mosaic_tpu.grouped_matmul, interpret=True)


class TestBfloat16(GroupedMatmulRowCases):
    implementation = staticmethod(back_end)
    dtype, N, K = "bfloat16", N, K
    groups = 64


class TestFloat32(GroupedMatmulRowCases):
    implementation = staticmethod(back_end)
    N, K = N, K
    groups = 64


class TestFloat8(GroupedMatmulRowCases):
    implementation = staticmethod(back_end)
    dtype, N, K = FLOAT8, N, K
    groups = 64


# As dsv3 convert and DeepSeek store them, and blocks of other sizes.
QUANTIZED = [
    ("int8", (1, K)),
    ("int8", (1, 96)),
    ("int4", (1, 128)),
    ("int4", (1, K)),
    (FLOAT8, (128, 128)),
    (FLOAT8, (256, 200)),
    ("bfloat16", (128, 128)),
]


@pytest.mark.parametrize("lhs_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", ROWS_OF_GROUPS)
@pytest.mark.parametrize(("rhs_dtype", "block_shape"), QUANTIZED)
def test_matrices_as_they_are_stored(rhs_dtype, block_shape, sizes, lhs_dtype):
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
