"""mla_prefill's back-ends, called through the public function."""

import functools

import jax
import numpy as np

from pallas_kernels import mla_prefill
from tests.pallas_kernels.mla_prefill_cases import (
    Inputs,
    MlaPrefillCases,
    MlaPrefillGradientCases,
    run,
)


class TestReference(MlaPrefillCases, MlaPrefillGradientCases):
    implementation = "reference"


def test_default():
    """The default is bit for bit the only back-end that takes float32."""
    x = Inputs.random((0, 2), (9, 6), T=9, S=9, widths=(24, 16), scale=0.2)
    got = jax.jit(functools.partial(mla_prefill, scale=x.scale))(*x.arrays())
    for a, b in zip(got, run(x, "reference"), strict=True):
        np.testing.assert_array_equal(a, b)
