"""Test cases that back-ends of block_quant, integer_quant and block_dequant inherit."""

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import block_dequant, block_quant, integer_quant
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels.numerics import (
    BFLOAT16_ROUNDING,
    E4M3_LEAST_ERROR,
    E4M3_ROUNDING,
    FLOAT32_ROUNDING,
    Array,
    device,
    pack_int4,
    random_e4m3,
    rounded,
    spread,
    unpack_int4,
)

FLOAT8_MAX = 448.0
FLOOR = 1e-4  # smallest amax: smaller blocks have the scale of this one

SHAPES = [
    ((4, 256), (1, 128)),
    ((3, 200), (1, 128)),
    ((576, 200), (128, 128)),  # kv_a_proj_with_mqa's 576 rows: four blocks and a half
    ((100, 30), (128, 128)),
    ((2, 3, 40, 72), (32, 64)),
    ((5, 7), (1, 1)),
]


def activations(shape: tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
    """Returns magnitudes from 1e-9 to 1e6, similar within a row and different between rows."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-9, 6, (*shape[:-1], 1)) * 4.0 ** rng.standard_normal(shape)
    return rounded(rng.standard_normal(shape) * sizes, dtype)


def largest(x: Array, block: tuple[int, int]) -> Array:
    """Returns the largest magnitude of each block, [..., Nb, Kb]."""
    N, K = x.shape[-2:]
    rows, columns = range(0, N, block[0]), range(0, K, block[1])
    return np.stack(
        [
            np.stack(
                [
                    np.abs(x[..., n : n + block[0], k : k + block[1]]).max(axis=(-2, -1))
                    for k in columns
                ],
                axis=-1,
            )
            for n in rows
        ],
        axis=-2,
    )


@functools.cache
def compiled(
    implementation: Implementation, block_shape: tuple[int, int], scale_fmt: str
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the jitted function. It is cached, so that tests share compilations."""
    return jax.jit(
        lambda x: block_quant(x, block_shape, scale_fmt=scale_fmt, implementation=implementation)
    )


class BlockQuantCases:
    """The test of a back-end inherits it and sets ``implementation``."""

    implementation: ClassVar[Implementation]

    def quantise(
        self, x: Array, block: tuple[int, int], scale_fmt: str, dtype: npt.DTypeLike = "float32"
    ) -> tuple[Array, Array]:
        """Returns values and scales in float64."""
        N, K = x.shape[-2:]
        values, scale = compiled(self.implementation, block, scale_fmt)(device(x, dtype))
        assert values.dtype == jnp.float8_e4m3fn, f"values: got {values.dtype}"
        assert scale.dtype == jnp.float32, f"scale: got {scale.dtype}"
        expected = (*x.shape[:-2], -(-N // block[0]), -(-K // block[1]))
        assert scale.shape == expected, f"scale: expected {expected}, got {scale.shape}"
        assert values.shape == x.shape, f"values: expected {x.shape}, got {values.shape}"
        return np.asarray(values, np.float64), np.asarray(scale, np.float64)

    @pytest.mark.parametrize("scale_fmt", ["float32", "ue8m0"])
    @pytest.mark.parametrize(("shape", "block"), SHAPES)
    def test_round_trip(self, shape, block, scale_fmt):
        """Each element has an error of at most half a step of float8_e4m3fn."""
        x = activations(shape)
        values, scale = self.quantise(x, block, scale_fmt)
        assert np.isfinite(values).all()
        every = spread(scale, block, shape)
        allowed = np.maximum(E4M3_ROUNDING * np.abs(x), E4M3_LEAST_ERROR * every)
        # x / scale is rounded to float32 before it is rounded to float8.
        assert (np.abs(values * every - x) <= allowed * (1 + 8 * FLOAT32_ROUNDING)).all()

    @pytest.mark.parametrize(("shape", "block"), SHAPES)
    def test_scale(self, shape, block):
        x = activations(shape)
        _, scale = self.quantise(x, block, "float32")
        want = np.maximum(largest(x, block), FLOOR) / FLOAT8_MAX
        # A compiler may multiply by the rounded inverse of 448, which has one rounding more.
        assert (np.abs(scale / want - 1) <= 4 * FLOAT32_ROUNDING).all()

    @pytest.mark.parametrize(("shape", "block"), SHAPES)
    def test_ue8m0_scale_is_the_next_power_of_two(self, shape, block):
        x = activations(shape)
        _, scale = self.quantise(x, block, "ue8m0")
        plain = np.maximum(largest(x, block), FLOOR) / FLOAT8_MAX
        mantissa, _ = np.frexp(scale)
        assert (mantissa == 0.5).all()
        assert (scale >= plain * (1 - 4 * FLOAT32_ROUNDING)).all()
        assert (scale < 2 * plain).all()

    def test_ue8m0_keeps_a_power_of_two(self):
        """A largest value of 448 * 2^e has exactly the scale 2^e, for all exponents."""
        exponents = np.arange(-22, 119)
        x = np.zeros((len(exponents), 8))
        x[:, 3] = -FLOAT8_MAX * 2.0**exponents
        values, scale = self.quantise(x, (1, 8), "ue8m0")
        np.testing.assert_array_equal(scale[:, 0], 2.0**exponents)
        np.testing.assert_array_equal(values[:, 3], -FLOAT8_MAX)

    @pytest.mark.parametrize("scale_fmt", ["float32", "ue8m0"])
    def test_largest_values_stay_finite(self, scale_fmt):
        """Blocks of +-amax, for random mantissas of amax."""
        amax = np.float32(np.random.default_rng(0).uniform(1, 2, 3000)).astype(np.float64)
        x = np.stack([amax, -amax], axis=-1)
        values, scale = self.quantise(x, (1, 2), scale_fmt)
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values[:, 0], -values[:, 1])
        if scale_fmt == "float32":
            assert (values[:, 0] == FLOAT8_MAX).all()
        else:
            assert (values[:, 0] >= FLOAT8_MAX / 2).all()
        assert (np.abs(values * scale - x) <= E4M3_ROUNDING * np.abs(x)).all()

    @pytest.mark.parametrize(("scale_fmt", "floor"), [("float32", None), ("ue8m0", 2.0**-22)])
    def test_zeros_and_blocks_below_the_floor(self, scale_fmt, floor):
        x = np.zeros((3, 8))
        x[1], x[2] = 1e-30, 0.99e-4
        values, scale = self.quantise(rounded(x, "float32"), (1, 8), scale_fmt)
        want = floor or FLOOR / FLOAT8_MAX
        np.testing.assert_allclose(scale, np.full((3, 1), want), rtol=4 * FLOAT32_ROUNDING)
        np.testing.assert_array_equal(values[:2], np.zeros((2, 8)))
        assert (values[2] > 0).all()

    def test_rounds_to_nearest_even(self):
        """Every float8 value, every midpoint between two, and their float32 neighbours."""
        grid = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
        middle = (grid[1:] + grid[:-1]) / 2
        down, up = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(500))
        even = np.where(np.arange(126) % 2 == 0, grid[:-1], grid[1:])
        x = np.concatenate([grid, middle, down, up]).astype(np.float64)
        want = np.concatenate([grid, even, grid[:-1], grid[1:]])
        x, want = np.stack([x, -x]), np.stack([want, -want])
        # The largest value is 448, so the scale is 1 and x is rounded without scaling.
        values, scale = self.quantise(x, (2, x.shape[1]), "float32")
        assert scale.item() == 1.0
        np.testing.assert_array_equal(values, want)

    def test_bfloat16_is_quantised_as_its_float32(self):
        x = activations((3, 200), "bfloat16")
        for got, want in zip(
            self.quantise(x, (1, 128), "float32", "bfloat16"),
            self.quantise(x, (1, 128), "float32"),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)

    def test_batch_axes_are_independent(self):
        x = activations((2, 3, 40, 72))
        values, scale = self.quantise(x, (32, 64), "float32")
        for i in np.ndindex(2, 3):
            alone_values, alone_scale = self.quantise(x[i], (32, 64), "float32")
            np.testing.assert_array_equal(values[i], alone_values)
            np.testing.assert_array_equal(scale[i], alone_scale)

    def test_blocks_of_activations_are_the_default(self):
        x = device(activations((3, 200)), "float32")
        got = block_quant(x, implementation=self.implementation)
        want = compiled(self.implementation, (1, 128), "float32")(x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))


INTEGER_SHAPES = [
    ((4, 256), 128),
    ((3, 200), 128),
    ((3, 200), None),
    ((2, 3, 40, 72), 64),
    ((5, 30), 128),
    ((6, 8), 2),
]


@functools.cache
def compiled_integers(
    implementation: Implementation, bits: int, group_size: int | None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the jitted function. It is cached, so that tests share compilations."""
    return jax.jit(lambda x: integer_quant(x, bits, group_size, implementation=implementation))


class IntegerQuantCases:
    """The test of a back-end inherits it and sets ``implementation``."""

    implementation: ClassVar[Implementation]

    def integers(
        self, x: Array, bits: int, group_size: int | None, dtype: npt.DTypeLike = "float32"
    ) -> tuple[Array, Array]:
        """Returns unpacked values and scales in float64."""
        K = x.shape[-1]
        run = compiled_integers(self.implementation, bits, group_size)
        values, scale = run(device(x, dtype))
        dtype, width = ("int8", K) if bits == 8 else ("uint8", K // 2)
        assert values.dtype == dtype, f"values: expected {dtype}, got {values.dtype}"
        assert values.shape == (expected := (*x.shape[:-1], width)), f"values: expected {expected}"
        assert scale.dtype == jnp.float32, f"scale: got {scale.dtype}"
        expected = (*x.shape[:-1], -(-K // (group_size or K)))
        assert scale.shape == expected, f"scale: expected {expected}, got {scale.shape}"
        stored = np.asarray(values)
        return (stored if bits == 8 else unpack_int4(stored)).astype(np.float64), np.float64(scale)

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize(("shape", "group"), INTEGER_SHAPES)
    def test_integers_are_within_half_a_step(self, shape, group, bits):
        x = activations(shape)
        values, scale = self.integers(x, bits, group)
        every = spread(scale, (1, group or shape[-1]), shape)
        # x / scale is rounded to float32 before it is rounded to an integer of at most 127.
        assert (np.abs(values - x / every) <= 0.5 + 512 * FLOAT32_ROUNDING).all()

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize(("shape", "group"), INTEGER_SHAPES)
    def test_integer_scale(self, shape, group, bits):
        x = activations(shape)
        _, scale = self.integers(x, bits, group)
        block = (1, group or shape[-1])
        high, low = largest(np.maximum(x, 0), block), largest(np.minimum(x, 0), block)
        want = np.maximum(high / 127, low / 127) if bits == 8 else np.maximum(high / 7, low / 8)
        # A compiler may multiply by a rounded inverse.
        assert (np.abs(scale / want - 1) <= 4 * FLOAT32_ROUNDING).all()

    @pytest.mark.parametrize(
        ("bits", "x", "want", "scale"),
        [
            (8, [-127, 63.5, 62.5, 127], [-127, 64, 62, 127], 1),
            (8, [-254, 2, 0, 8], [-127, 1, 0, 4], 2),
            (4, [-8, 7, 2.5, -0.5], [-8, 7, 2, 0], 1),
            (4, [-16, 2, 0, 8], [-8, 1, 0, 4], 2),
            (4, [14, 14, 2, 7], [7, 7, 1, 4], 2),
            (4, [-7, 0, 3.5, 1], [-8, 0, 4, 1], 0.875),
        ],
    )
    def test_integers_by_hand(self, bits, x, want, scale):
        """Both ends of the range, one sign alone, and ties, which are rounded to even."""
        values, got = self.integers(np.array([x], np.float64), bits, None)
        np.testing.assert_allclose(got, [[scale]], rtol=4 * FLOAT32_ROUNDING)
        np.testing.assert_array_equal(values, [want])

    @pytest.mark.parametrize("bits", [8, 4])
    def test_groups_of_zeros_have_scale_one(self, bits):
        """Groups of subnormal numbers have scale one too."""
        x = np.zeros((2, 12))
        x[0, 4], x[1, 9] = 3.0, 1e-40
        values, scale = self.integers(rounded(x, "float32"), bits, 4)
        np.testing.assert_array_equal(scale != 1, [[False, True, False], [False, False, False]])
        np.testing.assert_array_equal(values != 0, x > 1)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_nan_is_not_lost(self, bits):
        x = np.ones((2, 8), np.float32)
        x[0, 5] = np.nan
        values, scale = compiled_integers(self.implementation, bits, 4)(x)
        back = jax.jit(block_dequant, static_argnums=2)(values, scale, (1, 4))
        assert np.argwhere(np.isnan(back)).tolist() == [[0, k] for k in (4, 5, 6, 7)]

    def test_even_columns_are_the_low_halves(self):
        x = np.array([[-8, 7, 1, -1, 0, 5]], np.float32)
        values, _ = compiled_integers(self.implementation, 4, None)(x)
        np.testing.assert_array_equal(values, [[0x78, 0xF1, 0x50]])

    @pytest.mark.parametrize("bits", [8, 4])
    def test_bfloat16_is_quantised_to_integers_as_its_float32(self, bits):
        x = activations((3, 200), "bfloat16")
        for got, want in zip(
            self.integers(x, bits, 128, "bfloat16"), self.integers(x, bits, 128), strict=True
        ):
            np.testing.assert_array_equal(got, want)

    def test_unsupported_integers_are_refused(self):
        for shape, bits, message in (
            ((2, 8), 2, "bits: expected 8 or 4, got 2"),
            ((2, 9), 4, "int4 packs columns in pairs: expected an even number, got 9"),
        ):
            with pytest.raises(ValueError, match=message):
                integer_quant(jnp.ones(shape), bits, implementation=self.implementation)


class BlockDequantCases:
    """The test of a back-end inherits it and sets ``implementation``."""

    implementation: ClassVar[Implementation]

    def dequantise(
        self,
        values: npt.NDArray,
        scale: npt.NDArray[np.float32],
        block: tuple[int, int],
        dtype: npt.DTypeLike,
    ) -> Array:
        @jax.jit
        def run(values, scale):
            return block_dequant(values, scale, block, dtype, implementation=self.implementation)

        out = run(jax.device_put(values), jax.device_put(scale))
        assert out.dtype == dtype, f"expected {dtype}, got {out.dtype}"
        assert out.shape == values.shape, f"expected {values.shape}, got {out.shape}"
        return np.asarray(out, np.float64)

    @pytest.mark.parametrize(("shape", "block"), SHAPES)
    def test_powers_of_two_are_exact(self, shape, block):
        rng = np.random.default_rng(0)
        values, scale = random_e4m3(rng, shape), self.scales(shape, block)
        scale = np.exp2(np.round(np.log2(scale)))
        got = self.dequantise(values, scale, block, jnp.float32)
        np.testing.assert_array_equal(got, values.astype(np.float64) * spread(scale, block, shape))

    @pytest.mark.parametrize(
        ("dtype", "rounding"),
        [(jnp.float32, FLOAT32_ROUNDING), (jnp.bfloat16, BFLOAT16_ROUNDING + FLOAT32_ROUNDING)],
    )
    def test_products_are_rounded_once(self, dtype, rounding):
        """Every finite float8 value, times scales with all bits."""
        every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
        values = np.resize(every[np.isfinite(every.astype(np.float32))], (70, 254))
        scale = self.scales(values.shape, (32, 64))
        got = self.dequantise(values, scale, (32, 64), dtype)
        want = values.astype(np.float64) * spread(scale, (32, 64), values.shape)
        assert (np.abs(got - want) <= rounding * np.abs(want)).all()

    @pytest.mark.parametrize("block", [(1, 128), (1, 200), (32, 64), (1, 2)])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_int8(self, block, dtype):
        """Every integer, including -128, which integer_quant does not produce."""
        values = np.resize(np.arange(-128, 128).astype(np.int8), (2, 33, 200))
        scale = self.scales(values.shape, block)
        got = self.dequantise(values, scale, block, dtype)
        rounding = FLOAT32_ROUNDING + (dtype == jnp.bfloat16) * BFLOAT16_ROUNDING
        want = values.astype(np.float64) * spread(scale, block, values.shape)
        assert (np.abs(got - want) <= rounding * np.abs(want)).all()

    @pytest.mark.parametrize("block", [(1, 128), (1, 200), (32, 64), (1, 2)])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_int4(self, block, dtype):
        """Every byte, so every pair of int4 values."""
        values = unpack_int4(np.resize(np.arange(256).astype(np.uint8), (2, 33, 100)))
        scale = self.scales(values.shape, block)
        rounding = FLOAT32_ROUNDING + (dtype == jnp.bfloat16) * BFLOAT16_ROUNDING
        run = jax.jit(
            lambda v, s: block_dequant(v, s, block, dtype, implementation=self.implementation)
        )
        got = run(jax.device_put(pack_int4(values)), jax.device_put(scale))
        assert got.dtype == dtype, f"expected {dtype}, got {got.dtype}"
        want = values.astype(np.float64) * spread(scale, block, values.shape)
        assert (np.abs(np.float64(got) - want) <= rounding * np.abs(want)).all()

    def test_scale_for_the_number_of_bytes_is_refused(self):
        """100 bytes have 200 columns, which are two blocks of 128."""
        with pytest.raises(ValueError, match=r"scale: expected shape \(3, 2\), got \(3, 1\)"):
            block_dequant(
                jnp.ones((3, 100), jnp.uint8),
                jnp.ones((3, 1)),
                (1, 128),
                implementation=self.implementation,
            )

    def test_nan_stays_where_it_is(self):
        values = np.ones((4, 6), jnp.float8_e4m3fn)
        values[1, 2] = np.nan
        got = self.dequantise(values, np.ones((2, 2), np.float32), (2, 3), jnp.float32)
        assert np.argwhere(np.isnan(got)).tolist() == [[1, 2]]

    @pytest.mark.parametrize("blocks", [(4, 2), (5, 1), (6, 2)])
    def test_scale_of_another_shape_is_refused(self, blocks):
        """576 rows have five blocks of 128, not four."""
        with pytest.raises(ValueError, match=r"scale: expected shape \(5, 2\), got \(\d, \d\)"):
            block_dequant(
                jnp.ones((576, 200), jnp.float8_e4m3fn),
                jnp.ones(blocks),
                (128, 128),
                implementation=self.implementation,
            )

    @staticmethod
    def scales(shape: tuple[int, ...], block: tuple[int, int]) -> npt.NDArray[np.float32]:
        *batch, N, K = shape
        blocks = (*batch, -(-N // block[0]), -(-K // block[1]))
        return np.exp(np.random.default_rng(1).uniform(-9, 3, blocks)).astype(np.float32)
