"""What every back-end of grouped_swiglu must do; see GroupedSwigluCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_swiglu
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels import grouped_matmul_cases
from tests.pallas_kernels.grouped_matmul_cases import FLOAT8
from tests.pallas_kernels.numerics import Array, check, tolerance

BackEnd = Callable[..., jax.Array]

# Both sums and the result are rounded, and silu multiplies its argument's relative error by at
# most 1 + |x|: gates here are near 1 and hardly exceed 4.
ROUNDINGS = 4


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One set of rows and two of matrices; sums are near 1."""

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
        # Powers of two, which every dtype holds exactly: random float8 values are near 10.
        if gate.rhs_scale is None:
            smaller = 2.0 ** -np.round(np.log2(K) / 2)
            gate, up = (dataclasses.replace(x, rhs=x.rhs * smaller) for x in (gate, up))
        else:
            sums = np.std(gate.expected())
            smaller = np.float32(2.0 ** -np.round(np.log2(sums)))
            gate, up = (dataclasses.replace(x, rhs_scale=x.rhs_scale * smaller) for x in (gate, up))
        return cls(gate, dataclasses.replace(up, lhs=gate.lhs, lhs_scale=gate.lhs_scale))

    def arrays(self) -> tuple[jax.Array | None, ...]:
        """The arguments of grouped_swiglu."""
        lhs, gate, sizes, lhs_scale, gate_scale = self.gate.arrays()
        _, up, _, _, up_scale = self.up.arrays()
        return lhs, gate, up, sizes, lhs_scale, gate_scale, up_scale

    def expected(self) -> Array:
        """The defined rows."""
        gate, up = self.gate.expected(), self.up.expected()
        return gate / (1 + np.exp(-gate)) * up

    @property
    def defined(self) -> int:
        return sum(self.gate.group_sizes)


@functools.cache
def compiled(implementation: Implementation | BackEnd) -> Callable[..., jax.Array]:
    """Cached, so that tests of the same shapes share a compilation."""
    if callable(implementation):
        return jax.jit(implementation)
    return jax.jit(functools.partial(grouped_swiglu, implementation=implementation))


def run(x: Inputs, implementation: Implementation | BackEnd) -> jax.Array:
    return compiled(implementation)(*x.arrays())


class GroupedSwigluCases:
    """Subclassed by each back-end, which sets ``implementation``: a name, or a function that takes
    what grouped_swiglu takes, such as a kernel to be interpreted."""

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

    def test_columns_that_fill_no_tile(self):
        self.each((3, 0, 70), 75, F=320)

    @pytest.mark.parametrize("sizes", [(0, 40, 3), (1, 2, 0)])
    def test_gradients(self, sizes):
        """Against those of two products of the reference and silu, in the dtype's own rounding."""
        x = Inputs.random(sizes, F=self.F, K=self.K, dtype="bfloat16")
        lhs, gate, up, groups, *_ = x.arrays()
        weights = np.random.default_rng(3).standard_normal((x.defined, self.F))

        def loss(product, dtype):
            arrays = [array.astype(dtype) for array in (lhs, gate, up)]

            def of(*arrays):
                out = product(*arrays, groups)
                return jnp.sum(out[: x.defined].astype(jnp.float32) * weights)

            return jax.jit(jax.grad(of, (0, 1, 2)))(*arrays)

        chosen = self.implementation
        product = (
            chosen if callable(chosen) else functools.partial(grouped_swiglu, implementation=chosen)
        )
        exact = functools.partial(grouped_swiglu, implementation="reference")
        for got, want in zip(loss(product, "bfloat16"), loss(exact, "float32"), strict=True):
            got, want = (np.float64(a).reshape(1, -1) for a in (got, want))
            check(got, want, ROUNDINGS * tolerance("bfloat16"))
