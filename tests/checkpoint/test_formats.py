"""Quantization on the host and on a device must produce the same numbers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv3_jax.checkpoint import formats
from dsv3_jax.quantization import INT4, INT8, BlockQuantization, IntegerQuantization
from pallas_kernels import block_dequant, block_quant, integer_quant

FORMS = {
    "fp8": BlockQuantization(),
    "fp8 ue8m0": BlockQuantization((24, 40), "ue8m0"),
    "int8": INT8,
    "int4": INT4,
    "int4 in 16s": IntegerQuantization(4, 16),
}


def on_device(weight, form):
    if isinstance(form, BlockQuantization):
        scale_fmt = "ue8m0" if form.scale_fmt == "ue8m0" else "float32"
        return block_quant(jnp.asarray(weight), form.weight_block_size, scale_fmt=scale_fmt)
    return integer_quant(jnp.asarray(weight), form.bits, form.group_size)


def weights(kind: str) -> np.ndarray:
    weight = np.random.default_rng(5).normal(0, 0.02, (200, 300)).astype(np.float32)
    if kind == "zeros":
        weight[:130, :140] = 0
    if kind == "tiny":
        weight[:130, :140] *= 1e-39  # below the smallest normal float32
    return weight


@pytest.mark.parametrize("kind", ["normal", "zeros", "tiny"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_host_and_device_quantise_alike(form, kind):
    """Scales agree to one rounding, because compilers multiply by the inverse of a constant.

    A value may then fall on the other side of a half, one step away.
    """
    weight = weights(kind)
    values, scale = formats.quantize(weight, form)
    their_values, their_scale = on_device(weight, form)
    assert values.dtype == their_values.dtype
    np.testing.assert_allclose(scale, their_scale, rtol=2.0**-23)
    block = form.block_shape(weight.shape[1])
    ours = formats.dequantize(values, scale, block, np.dtype(np.float32))
    theirs = np.asarray(block_dequant(their_values, their_scale, block))
    close = np.isclose(ours, theirs, rtol=3e-7, atol=1e-38)
    assert close.mean() > 0.999
    step = scale.repeat(block[0], 0)[:200].repeat(block[1], 1)[:, :300]
    assert (np.abs(ours - theirs) <= np.maximum(step, np.abs(ours) / 8) * 1.001).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_both_dequantise_alike(form):
    values, scale = formats.quantize(weights("normal"), form)
    block = form.block_shape(300)
    ours = formats.dequantize(values, scale, block, np.dtype(np.float32))
    theirs = block_dequant(jnp.asarray(values), jnp.asarray(scale), block)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rows", [(0, 200), (7, 60), (130, 131)])
@pytest.mark.parametrize("columns", [(0, 300), (6, 90), (132, 290)])
def test_a_part_is_a_part_of_the_whole(form, rows, columns):
    """Rounding to bfloat16 is correct at any offset into the blocks."""
    values, scale = formats.quantize(weights("normal"), form)
    N, K = form.block_shape(300)
    dtype = np.dtype(ml_dtypes.bfloat16)
    whole = formats.dequantize(values, scale, (N, K), dtype)
    packed = 2 if values.dtype == np.uint8 else 1
    part = values[slice(*rows), columns[0] // packed : columns[1] // packed]
    blocks = scale[rows[0] // N : -(-rows[1] // N), columns[0] // K : -(-columns[1] // K)]
    got = formats.dequantize(part, blocks, (N, K), dtype, (rows[0] % N, columns[0] % K))
    np.testing.assert_array_equal(got, whole[slice(*rows), slice(*columns)])
