"""Test cases that every back-end of grouped_swiglu inherits; see GroupedSwigluCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import grouped_swiglu
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels import grouped_matmul_cases
from tests.pallas_kernels.grouped_matmul_cases import FLOAT8
from tests.pallas_kernels.numerics import (
    E4M3_LEAST_ERROR,
    E4M3_ROUNDING,
    Array,
    check,
    spread,
    tolerance,
)

BackEnd = Callable[..., jax.Array]

# Both sums and the result are rounded, and silu multiplies its argument's relative error by at most
# 1 + |x|. The gates here are near 1 and hardly exceed 4.
ROUNDINGS = 4

BLOCK = 128  # columns of a quantized result that share a scale
SMALLEST_AMAX, FLOAT8_MAX = 1e-4, 448


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of grouped_swiglu: the same rows with two sets of matrices. Sums are near 1."""

    gate: grouped_matmul_cases.Inputs
    up: grouped_matmul_cases.Inputs

    @classmethod
    def random(
        cls, sizes: tuple[int, ...], M: int | None = None, *, F: int, K: int, dtype: str
    ) -> "Inputs":
        gate, up = (
            grouped_matmul_cases.Inputs.random(
                sizes, M=M, N=F, K=K, lhs_dtype=dtype, rhs_dtype=dtype, seed=seed
            )
            for seed in (0, 1)
        )
        # Random float8 values are near 10. Powers of two are exact in every dtype.
        if gate.rhs_scale is None:
            smaller = 2.0 ** -np.round(np.log2(K) / 2)
            gate, up = (dataclasses.replace(x, rhs=x.rhs * smaller) for x in (gate, up))
        else:
            sums = np.std(gate.expected())
            smaller = np.float32(2.0 ** -np.round(np.log2(sums)))
            gate, up = (dataclasses.replace(x, rhs_scale=x.rhs_scale * smaller) for x in (gate, up))
        return cls(gate, dataclasses.replace(up, lhs=gate.lhs, lhs_scale=gate.lhs_scale))

    def with_rows_times(self, factors: Array) -> "Inputs":
        """Multiplies the rows with ``factors``, which are powers of two or zero."""
        factors = factors[:, None]

        def scaled(x: grouped_matmul_cases.Inputs) -> grouped_matmul_cases.Inputs:
            if x.lhs_scale is None:
                return dataclasses.replace(x, lhs=x.lhs * factors)
            return dataclasses.replace(x, lhs_scale=x.lhs_scale * np.float32(factors))

        return Inputs(scaled(self.gate), scaled(self.up))

    def arrays(self) -> tuple[jax.Array | None, ...]:
        """Returns the arguments of grouped_swiglu."""
        lhs, gate, sizes, lhs_scale, gate_scale = self.gate.arrays()
        _, up, _, _, up_scale = self.up.arrays()
        return lhs, gate, up, sizes, lhs_scale, gate_scale, up_scale

    def expected(self) -> Array:
        """Returns the rows of the result that are defined."""
        gate, up = self.gate.expected(), self.up.expected()
        return gate / (1 + np.exp(-gate)) * up

    @property
    def defined(self) -> int:
        return sum(self.gate.group_sizes)


def named(implementation: Implementation | BackEnd) -> BackEnd:
    """Returns the function of a back-end that is given by its name or as a function."""
    if callable(implementation):
        return implementation
    return functools.partial(grouped_swiglu, implementation=implementation)


@functools.cache
def compiled(
    implementation: Implementation | BackEnd, quantize: bool = False
) -> Callable[..., jax.Array]:
    """Returns the jitted function. It is cached, so that tests share compilations."""
    return jax.jit(functools.partial(named(implementation), quantize=quantize))


def run(x: Inputs, implementation: Implementation | BackEnd) -> npt.NDArray:
    """Returns the result in NumPy, because slicing a device array compiles a program."""
    return np.asarray(compiled(implementation)(*x.arrays()))


def check_quantized(x: Inputs, implementation: Implementation | BackEnd, bound: float) -> None:
    """Checks the values and scales of the defined rows of a quantized result.

    Before quantization, an element may be wrong by ``bound`` times the largest of its block. Then
    it is rounded, with an error of at most half the distance between neighbouring float8 values.
    That is proportional to the value, or to the scale if the value is small. The largest value of a
    block becomes exactly 448.
    """
    values, scale = map(np.asarray, compiled(implementation, quantize=True)(*x.arrays()))
    M, F = len(x.gate.lhs), x.gate.rhs.shape[1]
    assert (values.shape, values.dtype) == ((M, F), FLOAT8), values
    blocks = -(-F // BLOCK)
    assert (scale.shape, scale.dtype) == ((M, blocks), "float32"), scale
    values, scale = np.float64(values[: x.defined]), np.float64(scale[: x.defined])
    want = x.expected()

    def largest(x: Array) -> Array:
        padded = np.pad(np.abs(x), ((0, 0), (0, blocks * BLOCK - F)))
        return padded.reshape(-1, blocks, BLOCK).max(-1)

    amax = largest(want)
    np.testing.assert_allclose(scale, np.maximum(amax, SMALLEST_AMAX) / FLOAT8_MAX, rtol=bound)
    scale, off = (spread(each, (1, BLOCK), want.shape) for each in (scale, bound * amax))
    most = off + E4M3_ROUNDING * (np.abs(want) + off) + E4M3_LEAST_ERROR * scale
    errors = np.abs(values * scale - want) / most
    assert np.all(errors <= 1), f"{np.max(errors):.3g} times the allowed error"
    assert np.all(largest(values)[amax > (1 + bound) * SMALLEST_AMAX] == FLOAT8_MAX)


class GroupedSwigluCases:
    """Test cases of grouped_swiglu.

    The test of a back-end inherits it and sets ``implementation`` to a name, or to a function with
    grouped_swiglu's arguments, such as an interpreted kernel.
    """

    implementation: ClassVar[Implementation | BackEnd]
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", FLOAT8)
    F: ClassVar[int] = 64
    K: ClassVar[int] = 128

    def check(self, x: Inputs) -> None:
        out = run(x, self.implementation)
        dtype = "bfloat16" if x.gate.lhs_dtype == FLOAT8 else x.gate.lhs_dtype
        assert out.dtype == dtype, f"out: expected {dtype}, got {out.dtype}"
        shape = len(x.gate.lhs), x.gate.rhs.shape[1]
        assert out.shape == shape, f"out: expected {shape}, got {out.shape}"
        check(out[: x.defined], x.expected(), ROUNDINGS * tolerance(dtype))

    def each(self, sizes: tuple[int, ...], M: int | None = None, F: int | None = None) -> None:
        for dtype in self.dtypes:
            self.check(Inputs.random(sizes, M, F=F or self.F, K=self.K, dtype=dtype))

    @pytest.mark.parametrize(
        ("sizes", "M"),
        [
            ((0, 5, 0, 0, 7, 0), 12),
            ((0, 3, 0, 1, 0, 2), 6),
            ((0, 0, 0, 0, 1, 0), 1),
            ((40, 31, 0, 2), 104),
            ((0, 0, 0, 104), 104),
        ],
    )
    def test_rows_of_groups(self, sizes, M):
        self.each(sizes, M)

    def test_columns_that_do_not_fill_tiles(self):
        self.each((3, 0, 70), 75, F=320)

    @pytest.mark.parametrize(
        ("sizes", "M", "F"),
        [
            ((0, 0, 0, 0, 1, 0), 1, 128),
            ((40, 31, 0, 2), 104, 128),
            ((3, 0, 70), 75, 384),
        ],
    )
    def test_quantized(self, sizes, M, F):
        for dtype in self.dtypes:
            x = Inputs.random(sizes, M, F=F, K=self.K, dtype=dtype)
            bound = ROUNDINGS * tolerance("bfloat16" if dtype == FLOAT8 else dtype)
            check_quantized(x, self.implementation, bound)

    def test_quantized_rows_of_any_size(self):
        """Rows of zeros, below the smallest scale, and too large for float8 without a scale."""
        factors = np.array([1, 0, 2.0**6, 2.0**-4, 2.0**-12, 2.0**-9, 0, 0, 2.0**3, 1])
        for dtype in self.dtypes:
            x = Inputs.random((7, 3), F=128, K=self.K, dtype=dtype).with_rows_times(factors)
            bound = ROUNDINGS * tolerance("bfloat16" if dtype == FLOAT8 else dtype)
            check_quantized(x, self.implementation, bound)
            arrays = x.arrays()
            values, scale = map(np.asarray, compiled(self.implementation, quantize=True)(*arrays))
            zeros = factors == 0
            assert not np.any(np.float64(values[zeros]))
            smallest = np.full((zeros.sum(), 1), SMALLEST_AMAX / FLOAT8_MAX)
            np.testing.assert_allclose(scale[zeros], smallest, rtol=2.0**-22)

    def test_a_quantized_result_has_no_gradient(self):
        lhs, *rest = Inputs.random((2, 1), F=128, K=self.K, dtype="bfloat16").arrays()

        def loss(lhs):
            values, scale = named(self.implementation)(lhs, *rest, quantize=True)
            return jnp.sum(scale) + jnp.sum(values.astype(jnp.float32))

        with pytest.raises(TypeError, match="a quantized result has no gradient"):
            jax.grad(loss)(lhs)
        jax.eval_shape(jax.grad(lambda lhs: loss(jax.lax.stop_gradient(lhs))), lhs)

    @pytest.mark.parametrize("sizes", [(0, 40, 3), (1, 2, 0)])
    def test_gradients(self, sizes):
        """Compares with the gradients of the reference in float32."""
        x = Inputs.random(sizes, F=self.F, K=self.K, dtype="bfloat16")
        lhs, gate, up, groups, *_ = x.arrays()
        weights = np.random.default_rng(3).standard_normal((x.defined, self.F))

        def gradients(swiglu, dtype):
            arrays = [array.astype(dtype) for array in (lhs, gate, up)]

            def loss(*arrays):
                out = swiglu(*arrays, groups)
                return jnp.sum(out[: x.defined].astype(jnp.float32) * weights)

            return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

        swiglu = named(self.implementation)
        exact = functools.partial(grouped_swiglu, implementation="reference")
        for got, want in zip(
            gradients(swiglu, "bfloat16"), gradients(exact, "float32"), strict=True
        ):
            got, want = (np.float64(a).reshape(1, -1) for a in (got, want))
            check(got, want, ROUNDINGS * tolerance("bfloat16"))
