"""mla_decode over a float8 cache: the format, and the back-ends that read it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dequantize_latent, mla_decode, quantize_latent
from pallas_kernels.mla_decode import mosaic_gpu
from tests.pallas_kernels.machine import kernel_runs, off_gpu
from tests.pallas_kernels.mla_decode_cases import Inputs, MlaDecodeCases, compiled
from tests.pallas_kernels.mla_decode_hopper_cases import HopperCases, kernel
from tests.pallas_kernels.numerics import (
    BFLOAT16_ROUNDING,
    E4M3_LEAST_ERROR,
    E4M3_ROUNDING,
    TOLERANCES,
    check,
    device,
    random_e4m3,
    rounded,
)

WIDTHS = (512, 64)
QUANTIZE = jax.jit(quantize_latent)
DEQUANTIZE = jax.jit(dequantize_latent, static_argnums=1)


def packed(values, scale, rope):
    """Packs float8_e4m3fn [..., 4, 128], float32 [..., 4] and bfloat16 [..., 64] into bytes."""
    fields = [np.ascontiguousarray(field) for field in (values, scale, rope)]
    batch = rope.shape[:-1]
    return np.concatenate([p.view(np.uint8).reshape(*batch, -1) for p in fields], axis=-1)


def encoded(tokens):
    """Quantizes float64 tokens [..., 576] to bytes. A token of NaN becomes bytes that are NaN."""
    batch = tokens.shape[:-1]
    groups = tokens[..., :512].reshape(*batch, 4, 128)
    amax = np.abs(groups).max(axis=-1).astype(np.float32)
    scale = amax / np.float32(448)
    near = scale.astype(ml_dtypes.bfloat16)
    near = np.where(near < scale, np.nextafter(near, near.dtype.type(np.inf)), near)
    scale = np.where(amax > 0, near.astype(np.float32), np.float32(1))
    values = (groups / scale[..., None]).astype(ml_dtypes.float8_e4m3fn)
    encoded_bytes = packed(values, scale, tokens[..., 512:].astype(ml_dtypes.bfloat16))
    # Every field is NaN; the float8 values use both of its NaN encodings.
    unused = np.isnan(tokens).any(axis=-1)
    encoded_bytes[unused] = 0xFF
    encoded_bytes[unused, :256] = 0x7F
    return encoded_bytes


def decoded(tokens):
    """Dequantizes bytes to float64 tokens [..., 576]."""
    values = tokens[..., :512].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = tokens[..., 512:528].copy().view(np.float32).astype(np.float64)
    rope = tokens[..., 528:].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([values * np.repeat(scale, 128, axis=-1), rope], axis=-1)


class Float8Inputs(Inputs):
    """Pages contain exact dequantized values; the operation casts them to the queries' dtype."""

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
    # These are the same as the other cases.
    test_bfloat16 = None  # pyright: ignore[reportAssignmentType]
    test_published_widths = None  # pyright: ignore[reportAssignmentType]
    # A token always has 656 bytes.
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
        ("H", "partitions"),
        [
            (8, 2),
            pytest.param(8, 1, marks=pytest.mark.slow),
            pytest.param(8, 5, marks=pytest.mark.slow),
            pytest.param(128, 2, marks=pytest.mark.slow),
            pytest.param(128, 5, marks=pytest.mark.slow),
        ],
    )
    def test_split_sequences(self, H, partitions):
        """Segments whose first and last block are scored by either of the two warpgroups."""
        self.check(self.random((640, 9 * 64 - 3, 0, 1), H=H, max_pages=10), kernel(partitions))

    @pytest.mark.parametrize("T", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_segments_of_few_queries(self, T):
        """Successive sequences with an even and an odd number of blocks, with one and with none."""
        x = self.random((300, 70, 0, 640, 1, 64, 9 * 64 - 3), H=16, T=T, max_pages=10)
        self.check(x, kernel(2))

    @pytest.mark.slow
    @pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
    def test_moonlights_heads(self, T):
        """16 heads: the scored kernel, one tile, and a pair of tiles."""
        self.check(self.random((9 * 64 + 2, 70, 3), H=16, T=T, max_pages=10))

    def test_few_queries_whose_maximum_rises(self):
        """The maximum rises from block to block by more than SLACK, in either warpgroup."""
        x = self.random((6 * 64 + 9,), H=16, max_pages=8)
        pages, table = x.pages.copy(), x.block_tables[0]
        for block in range(7):
            pages[table[block]] *= 0.25 * 2**block
        self.check(dataclasses.replace(x, pages=pages), kernel(1), bound=TOLERANCES["large scores"])

    def test_query_without_visible_tokens_in_a_segment(self):
        """The last of three segments has two tokens, which are the last two of five queries."""
        self.check(self.random((12 * 64 + 2,), T=5, max_pages=13), kernel(3))


# ---- refusals ------------------------------------------------------------------------------------


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
def test_kernel_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.mla_decode(*arrays(**changes), scale=0.1, interpret=object())


@off_gpu
@pytest.mark.parametrize("changes", [{"widths": (256, 64)}, {"widths": (512, 32)}])
def test_no_backend_takes_other_widths(changes):
    """The message has each back-end's reason, in one line."""
    with pytest.raises(NotImplementedError, match=r"cpu: .*; reference: takes float8"):
        mla_decode(*arrays(**changes), scale=0.1)


@pytest.mark.parametrize("H", [8, 32, pytest.param(128, marks=pytest.mark.slow)])
def test_lowers_for_cuda(H, monkeypatch):
    """Lowering checks shared memory size and register layouts without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.mla_decode, scale=0.1))
    text = f.trace(*arrays(H)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


# ---- the format ----------------------------------------------------------------------------------


def test_bytes():
    """A token's latent, scales and rope key are at their byte offsets."""
    latent = np.zeros(512, np.float32)
    latent[[0, 1, 128, 511]] = 448, -1, 896, 2**-9 * 448 * 0.5
    rope = np.zeros(64, np.float32)
    rope[1] = -2
    encoded_bytes = np.asarray(QUANTIZE(latent, rope))
    assert encoded_bytes.dtype == np.uint8
    assert encoded_bytes.shape == (656,)
    assert encoded_bytes[[0, 1, 2, 128, 511]].tolist() == [0x7E, 0xB8, 0, 0x7E, 0x7E]
    scales = encoded_bytes[512:528].view(np.float32)
    np.testing.assert_array_equal(scales, [1, 2, 1, 2**-10])
    assert encoded_bytes[528:534].tolist() == [0, 0, 0, 0xC0, 0, 0]
    for dtype in (jnp.float32, jnp.bfloat16):
        got_latent, got_rope = DEQUANTIZE(encoded_bytes, dtype)
        assert got_latent.dtype == got_rope.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got_latent, np.float32), latent)
        np.testing.assert_array_equal(np.asarray(got_rope, np.float32), rope)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(dtype):
    """Each value is within half a float8 step, at a scale of at most (1 + 2^-7) * amax / 448."""
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


def test_float8_values_round_trip_exactly():
    """All float8 values, with scales that bfloat16 represents exactly."""
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
    """With float32 scales, the reference multiplies in float32 and rounds once."""
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
    """It rounds to the nearest bfloat16, which here is the scale that quantize_latent writes."""
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
