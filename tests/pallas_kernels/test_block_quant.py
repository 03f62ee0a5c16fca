"""Tests of block_quant, integer_quant and block_dequant through the public functions."""

import numpy as np

from pallas_kernels import block_dequant, block_quant
from tests.pallas_kernels.block_quant_cases import (
    BlockDequantCases,
    BlockQuantCases,
    IntegerQuantCases,
    activations,
)
from tests.pallas_kernels.numerics import device


class TestReference(BlockQuantCases, IntegerQuantCases, BlockDequantCases):
    implementation = "reference"


def test_default():
    """The default equals the only back-end, bit for bit."""
    x = device(activations((3, 200)), "float32")
    values, scale = block_quant(x, (2, 128), scale_fmt="ue8m0")
    want = block_quant(x, (2, 128), scale_fmt="ue8m0", implementation="reference")
    np.testing.assert_array_equal(np.float32(values), np.float32(want[0]))
    np.testing.assert_array_equal(scale, want[1])
    np.testing.assert_array_equal(
        block_dequant(values, scale, (2, 128)),
        block_dequant(values, scale, (2, 128), implementation="reference"),
    )
