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
    Array,
    check,
    tolerance,
)

BackEnd = Callable[..., jax.Array]

# Both sums and the result are rounded, and silu multiplies its argument's relative error by at most
# 1 + |x|. The gates here are near 1 and hardly exceed 4.
ROUNDINGS = 4


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
def compiled(implementation: Implementation | BackEnd) -> Callable[..., jax.Array]:
    """Returns the jitted function. It is cached, so that tests share compilations."""
    return jax.jit(named(implementation))


def run(x: Inputs, implementation: Implementation | BackEnd) -> npt.NDArray:
    """Returns the result in NumPy, because slicing a device array compiles a program."""
    return np.asarray(compiled(implementation)(*x.arrays()))


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
