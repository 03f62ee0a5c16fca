"""mla_decode over a float8 cache: the format, and each back-end that reads it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dequantize_latent, mla_decode, quantize_latent
from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.mosaic_gpu_kernel import Config
from tests.pallas_kernels.machine import kernel_runs, off_gpu
from tests.pallas_kernels.mla_decode_cases import Inputs, MlaDecodeCases, compiled
from tests.pallas_kernels.mla_decode_hopper_cases import HopperCases, kernel
from tests.pallas_kernels.numerics import (
    BFLOAT16_ROUNDING,
    E4M3_LEAST_ERROR,
    E4M3_ROUNDING,
    check,
    device,
    random_e4m3,
    rounded,
)

WIDTHS = (512, 64)
QUANTIZE = jax.jit(quantize_latent)
DEQUANTIZE = jax.jit(dequantize_latent, static_argnums=1)


def packed(values, scale, rope):
    """Bytes of tokens, of float8_e4m3fn [..., 4, 128], float32 [..., 4] and bfloat16 [..., 64]."""
    parts = [np.ascontiguousarray(part) for part in (values, scale, rope)]
    batch = rope.shape[:-1]
    return np.concatenate([p.view(np.uint8).reshape(*batch, -1) for p in parts], axis=-1)


def encoded(tokens):
    """Bytes of float64 tokens [..., 576]; of a token that is NaN, bytes that are NaN too."""
    batch = tokens.shape[:-1]
    groups = tokens[..., :512].reshape(*batch, 4, 128)
    amax = np.abs(groups).max(axis=-1).astype(np.float32)
    scale = amax / np.float32(448)
    near = scale.astype(ml_dtypes.bfloat16)
    near = np.where(near < scale, np.nextafter(near, near.dtype.type(np.inf)), near)
    scale = np.where(amax > 0, near.astype(np.float32), np.float32(1))
    values = (groups / scale[..., None]).astype(ml_dtypes.float8_e4m3fn)
    found = packed(values, scale, tokens[..., 512:].astype(ml_dtypes.bfloat16))
    # All is NaN, of float8 either of its two.
    unused = np.isnan(tokens).any(axis=-1)
    found[unused] = 0xFF
    found[unused, :256] = 0x7F
    return found


def decoded(tokens):
    """float64 [..., 576]."""
    values = tokens[..., :512].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = tokens[..., 512:528].copy().view(np.float32).astype(np.float64)
    rope = tokens[..., 528:].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([values * np.repeat(scale, 128, axis=-1), rope], axis=-1)


class Float8Inputs(Inputs):
    """Pages hold what the bytes say exactly; the operation sees it in the queries' dtype."""

    @classmethod
    def random(cls, lengths, **kwargs):
        x = super().random(lengths, **kwargs)
        tokens = decoded(encoded(x.pages))
        return dataclasses.replace(x, pages=np.where(np.isnan(x.pages), np.nan, tokens))

    def arrays(self):
        q_latent, q_rope, _, block_tables, lengths = super().arrays()
        return q_latent, q_rope, jax.device_put(encoded(self.pages)), block_tables, lengths

    def tokens(self, b, count):
        return rounded(super().tokens(b, count), self.dtype)


class Float8Cases(MlaDecodeCases):
    widths = WIDTHS
    dtype = "bfloat16"
    # As all others.
    test_bfloat16 = None  # pyright: ignore[reportAssignmentType]
    test_published_widths = None  # pyright: ignore[reportAssignmentType]
    # A token has 656 bytes.
    test_pages_wider_than_tokens = None  # pyright: ignore[reportAssignmentType]

    def random(self, lengths, **kwargs):
        fixed = {"widths": self.widths, "dtype": self.dtype, "page": self.page, "H": self.heads}
        return Float8Inputs.random(lengths, **{**fixed, **kwargs})


@pytest.mark.slow
class TestReference(Float8Cases):
    implementation = "reference"

    def test_float32_queries(self):
        self.check(self.random((37, 16, 0), T=2, scale=0.05, dtype="float32"))


class TestCpu(Float8Cases):
    implementation = "cpu"

    def test_float32_queries(self):
        self.check(self.random((37, 16, 0), T=2, scale=0.05, dtype="float32"))


@kernel_runs
class TestMosaicGpu(Float8Cases, HopperCases):
    @pytest.mark.parametrize(
        ("H", "parts"),
        [
            (8, 2),
            pytest.param(8, 1, marks=pytest.mark.slow),
            pytest.param(128, 5, marks=pytest.mark.slow),
        ],
    )
    def test_rows_in_pieces(self, H, parts):
        """Segments that begin with either of the two warpgroups, and end with either."""
        self.check(self.random((640, 9 * 64 - 3, 0, 1), H=H, max_pages=10), kernel(parts))

    def test_query_that_sees_nothing_of_a_piece(self):
        """The last of three pieces is a block of two tokens, the last two of five queries."""
        self.check(self.random((12 * 64 + 2,), T=5, max_pages=13), kernel(3))


# ---- what the kernel does not take ---------------------------------------------------------------


def arrays(H=8, page=64, widths=WIDTHS, bytes_=656, dtype="bfloat16"):
    C, R = widths
    return (
        jnp.ones((2, 1, H, C), dtype),
        jnp.ones((2, 1, H, R), dtype),
        jnp.zeros((8, page, bytes_), jnp.uint8),
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16, got float32"),
        ({"page": 32}, r"got \(32, 512, 64\)"),
        ({"widths": (256, 64)}, r"got \(64, 256, 64\)"),
        ({"bytes_": 576}, "takes tokens of 656 bytes, got 576"),
    ],
)
def test_what_the_kernel_does_not_take(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.mla_decode(*arrays(**changes), scale=0.1, interpret=object())


def test_settings_are_those_of_the_other_kernel():
    with pytest.raises(NotImplementedError, match=r"has no settings, got Config\("):
        mosaic_gpu.mla_decode(*arrays(), scale=0.1, config=Config(), interpret=object())


@off_gpu
@pytest.mark.parametrize("changes", [{"widths": (256, 64)}, {"widths": (512, 32)}])
def test_no_backend_takes_other_widths(changes):
    """One line with each back-end's reason."""
    with pytest.raises(NotImplementedError, match=r"cpu: .*; reference: takes float8"):
        mla_decode(*arrays(**changes), scale=0.1)


@pytest.mark.parametrize("H", [8, pytest.param(128, marks=pytest.mark.slow)])
def test_lowers_for_cuda(H, monkeypatch):
    """SMEM's size and the layouts of registers are checked without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.mla_decode, scale=0.1))
    text = f.trace(*arrays(H)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


# ---- the format ----------------------------------------------------------------------------------


def test_bytes():
    """A token's latent, scales and rope key, each at its place."""
    latent = np.zeros(512, np.float32)
    latent[[0, 1, 128, 511]] = 448, -1, 896, 2**-9 * 448 * 0.5
    rope = np.zeros(64, np.float32)
    rope[1] = -2
    found = np.asarray(QUANTIZE(latent, rope))
    assert found.dtype == np.uint8
    assert found.shape == (656,)
    assert found[[0, 1, 2, 128, 511]].tolist() == [0x7E, 0xB8, 0, 0x7E, 0x7E]
    scales = found[512:528].view(np.float32)
    np.testing.assert_array_equal(scales, [1, 2, 1, 2**-10])
    assert found[528:534].tolist() == [0, 0, 0, 0xC0, 0, 0]
    for dtype in (jnp.float32, jnp.bfloat16):
        got_latent, got_rope = DEQUANTIZE(found, dtype)
        assert got_latent.dtype == got_rope.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got_latent, np.float32), latent)
        np.testing.assert_array_equal(np.asarray(got_rope, np.float32), rope)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(dtype):
    """Each value to half a step of float8 under a scale of at most 2^-7 more than amax / 448."""
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((3, 5, 4, 128)) * 2.0 ** rng.integers(-20, 20, (3, 5, 4, 1))
    latent[0, 0, 1] = 0
    latent = rounded(latent.reshape(3, 5, 512), dtype)
    rope = rounded(rng.standard_normal((3, 5, 64)), dtype)
    tokens = QUANTIZE(device(latent, dtype), device(rope, dtype))
    got, got_rope = DEQUANTIZE(tokens)
    np.testing.assert_array_equal(np.asarray(got_rope, np.float64), rounded(rope, "bfloat16"))
    groups, want = np.asarray(got, np.float64).reshape(3, 5, 4, 128), latent.reshape(3, 5, 4, 128)
    largest = np.abs(want).max(axis=-1, keepdims=True)
    step = largest / 448 * (1 + 2 * BFLOAT16_ROUNDING)
    allowed = np.maximum(np.abs(want) * E4M3_ROUNDING, E4M3_LEAST_ERROR * step)
    assert (np.abs(groups - want) <= allowed * (1 + 1e-6)).all()


def test_what_float8_holds_comes_back():
    """Values of every kind under a scale that bfloat16 holds."""
    rng = np.random.default_rng(1)
    values = random_e4m3(rng, (7, 4, 128))
    values[..., 5] = 448
    scale = rounded(rng.uniform(1e-4, 10, (7, 4)), "bfloat16").astype(np.float32)
    rope = rng.standard_normal((7, 64)).astype(ml_dtypes.bfloat16)
    want = packed(values, scale, rope)
    latent, got_rope = DEQUANTIZE(want)
    exact = decoded(want)
    np.testing.assert_array_equal(np.asarray(latent, np.float64), exact[:, :512])
    np.testing.assert_array_equal(np.asarray(got_rope, np.float64), exact[:, 512:])
    np.testing.assert_array_equal(QUANTIZE(latent, got_rope), want)


def test_scales_of_other_writers():
    """Scales that only float32 holds: the reference multiplies in float32, then rounds once."""
    rng = np.random.default_rng(2)
    values, rope = random_e4m3(rng, (3, 4, 128)), np.ones((3, 64), ml_dtypes.bfloat16)
    tokens = packed(values, rng.uniform(0.1, 1, (3, 4)).astype(np.float32), rope)
    want = decoded(tokens)[:, :512]
    for dtype, bound in ((jnp.float32, 2.0**-24), (jnp.bfloat16, BFLOAT16_ROUNDING)):
        got, _ = DEQUANTIZE(tokens, dtype)
        check(np.ravel(got)[:, None], np.ravel(want)[:, None], bound * (1 + 1e-6))


@kernel_runs
@pytest.mark.parametrize("factor", [1.00123, 0.99877])
def test_the_kernel_rounds_scales_of_other_writers(factor):
    """To the nearest bfloat16: here those of our own writer."""
    x = TestMosaicGpu().random((200, 64))
    q_latent, q_rope, pages, *rest = x.arrays()
    tokens = np.array(pages)
    scale = tokens[..., 512:528].copy().view(np.float32) * np.float32(factor)
    tokens[..., 512:528] = scale.view(np.uint8)
    run = compiled(TestMosaicGpu.implementation, x.scale)
    for got, want in zip(
        run(q_latent, q_rope, jax.device_put(tokens), *rest),
        run(q_latent, q_rope, pages, *rest),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
