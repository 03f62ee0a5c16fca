"""Test cases that every back-end of grouped_matmul inherits; see GroupedMatmulCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels.numerics import (
    TOLERANCES,
    Array,
    check,
    device,
    is_dense,
    pack_int4,
    random_e4m3,
    rounded,
    spread,
    tolerance,
)
from tests.support.covering import covering

FLOAT8 = "float8_e4m3fn"
INTEGERS = {"int8": 127, "int4": 7}
BackEnd = Callable[..., jax.Array]

# A back-end may treat these differently: at most as many rows as groups, few rows per group, many.
ROWS_OF_GROUPS = [(0, 2, 0), (3, 0, 4), (37, 0, 4)]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of grouped_matmul, in float64 and NumPy.

    Rows of lhs past the groups' sum are NaN. Scales differ by factors of up to 16 between blocks.
    """

    lhs: Array
    rhs: Array
    group_sizes: tuple[int, ...]
    lhs_scale: npt.NDArray[np.float32] | None
    rhs_scale: npt.NDArray[np.float32] | None
    block_shape: tuple[int, int]
    lhs_dtype: npt.DTypeLike
    rhs_dtype: npt.DTypeLike

    @classmethod
    def random(
        cls,
        group_sizes: tuple[int, ...],
        *,
        M: int | None = None,
        N: int = 16,
        K: int = 24,
        lhs_dtype: npt.DTypeLike = "float32",
        rhs_dtype: npt.DTypeLike = "float32",
        block_shape: tuple[int, int] = (128, 128),
        seed: int = 0,
    ) -> "Inputs":
        rng = np.random.default_rng(seed)
        M, G = M or sum(group_sizes), len(group_sizes)

        def operand(shape, dtype, block):
            """Returns values, and scales if the dtype needs them."""
            if dtype != FLOAT8 and dtype not in INTEGERS:
                return rounded(rng.standard_normal(shape), dtype), None
            *batch, rows, columns = shape
            blocks = (*batch, -(-rows // block[0]), -(-columns // block[1]))
            scale = 2.0 ** rng.uniform(-2, 2, blocks)
            if most := INTEGERS.get(dtype):
                values = rng.integers(-most - 1, most + 1, shape).astype(np.float64)
                return values, scale.astype(np.float32)
            return random_e4m3(rng, shape).astype(np.float64), scale.astype(np.float32)

        lhs, lhs_scale = operand((M, K), lhs_dtype, (1, block_shape[1]))
        rhs, rhs_scale = operand((G, N, K), rhs_dtype, block_shape)
        lhs[sum(group_sizes) :] = np.nan
        return cls(lhs, rhs, group_sizes, lhs_scale, rhs_scale, block_shape, lhs_dtype, rhs_dtype)

    def arrays(self) -> tuple[jax.Array | None, ...]:
        """Returns the arguments of grouped_matmul."""
        packed = self.rhs_dtype == "int4"
        return (
            device(self.lhs, self.lhs_dtype),
            jax.device_put(pack_int4(self.rhs)) if packed else device(self.rhs, self.rhs_dtype),
            device(self.group_sizes, "int32"),
            None if self.lhs_scale is None else jax.device_put(self.lhs_scale),
            None if self.rhs_scale is None else jax.device_put(self.rhs_scale),
        )

    def values(self) -> tuple[Array, Array]:
        """Returns lhs and rhs with their scales applied."""
        lhs, rhs = self.lhs, self.rhs
        if self.lhs_scale is not None:
            lhs = lhs * spread(self.lhs_scale, (1, self.block_shape[1]), lhs.shape)
        if self.rhs_scale is not None:
            rhs = rhs * spread(self.rhs_scale, self.block_shape, rhs.shape)
        return lhs, rhs

    def group_of_rows(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(len(self.group_sizes)), self.group_sizes)

    def expected(self) -> Array:
        """Returns the rows of the result that are defined."""
        lhs, rhs = self.values()
        return np.array([rhs[g] @ lhs[m] for m, g in enumerate(self.group_of_rows())])


@functools.cache
def compiled(
    implementation: Implementation | BackEnd, block_shape: tuple[int, int]
) -> Callable[..., jax.Array]:
    """Returns the jitted function. It is cached, so that tests share compilations."""
    if callable(implementation):
        return jax.jit(functools.partial(implementation, block_shape=block_shape))
    return jax.jit(
        functools.partial(grouped_matmul, block_shape=block_shape, implementation=implementation)
    )


def run(x: Inputs, implementation: Implementation | BackEnd) -> npt.NDArray:
    """Returns the result in NumPy, because slicing a device array compiles a program."""
    return np.asarray(compiled(implementation, x.block_shape)(*x.arrays()))


class GroupedMatmulRowCases:
    """Distributions of rows over groups, for one dtype and one size of matrix.

    The test of a back-end inherits it and sets ``implementation`` to a name, or to a function with
    grouped_matmul's arguments, such as an interpreted kernel.
    """

    implementation: ClassVar[Implementation | BackEnd]
    dtype: ClassVar[str] = "float32"
    N: ClassVar[int] = 16
    K: ClassVar[int] = 24
    groups: ClassVar[int] = 384
    """Number of groups in test_many_groups."""

    def inputs(self, sizes: tuple[int, ...], M: int | None = None) -> Inputs:
        return Inputs.random(
            sizes, M=M, N=self.N, K=self.K, lhs_dtype=self.dtype, rhs_dtype=self.dtype
        )

    def check(self, x: Inputs) -> None:
        out = run(x, self.implementation)
        dtype = "bfloat16" if x.lhs_dtype == FLOAT8 else x.lhs_dtype
        assert out.dtype == dtype, f"out: expected {dtype}, got {out.dtype}"
        M, N = len(x.lhs), x.rhs.shape[1]
        assert out.shape == (M, N), f"out: expected {(M, N)}, got {out.shape}"
        check(out[: sum(x.group_sizes)], x.expected(), tolerance(dtype))

    @pytest.mark.parametrize(
        ("sizes", "M"),
        [
            ((2, 2, 2, 2, 2, 2), 12),
            ((0, 5, 0, 0, 7, 0), 12),
            ((12, 0, 0, 0, 0, 0), 12),
            ((0, 0, 0, 0, 0, 12), 12),
            ((0, 3, 0, 2, 0, 0), 12),
            ((0, 0, 0, 0, 0, 1), 12),
            ((9,), 9),
        ],
    )
    def test_more_rows_than_groups(self, sizes, M):
        self.check(self.inputs(sizes, M))

    @pytest.mark.parametrize(
        ("sizes", "M"),
        [
            ((1, 1, 1, 1, 1, 1), 6),
            ((0, 3, 0, 1, 0, 2), 6),
            ((6, 0, 0, 0, 0, 0), 6),
            ((0, 0, 0, 0, 0, 6), 6),
            ((0, 2, 0, 0, 1, 0), 6),
            ((0, 0, 0, 0, 1, 0), 1),
        ],
    )
    def test_at_most_as_many_rows_as_groups(self, sizes, M):
        self.check(self.inputs(sizes, M))

    @pytest.mark.parametrize(
        ("sizes", "M"),
        [
            ((33, 0, 1, 70), 104),
            ((32, 64, 0, 8), 104),
            ((0, 0, 0, 104), 104),
            ((1, 1, 1, 101), 104),
            ((40, 31, 0, 2), 104),
        ],
    )
    def test_many_rows_a_group(self, sizes, M):
        self.check(self.inputs(sizes, M))

    @pytest.mark.parametrize("M", [8, 400])
    def test_many_groups(self, M):
        sizes = np.bincount(
            np.random.default_rng(1).integers(0, self.groups, M), minlength=self.groups
        )
        self.check(self.inputs(tuple(sizes.tolist())))


class GroupedMatmulCases(GroupedMatmulRowCases):
    """Also all dtypes and scale blocks, with matrices of odd sizes."""

    # 576, 200, 72 and 136 leave partial blocks; kv_a_proj_with_mqa has 576 rows. dsv3 convert makes
    # int8 with one scale per row, and int4 with one per 128 columns.
    @covering(
        {
            "rhs_dtype": ["float32", "bfloat16", FLOAT8, *INTEGERS],
            "block_shape": [(128, 128), (32, 64), (64, 32), (1, 128), (1, 264)],
            "sizes": ROWS_OF_GROUPS,
            "lhs_dtype": ["float32", "bfloat16", FLOAT8],
            "N, K": [(72, 200), (136, 264), (576, 24)],
        },
        sample=2,
    )
    def test_dtypes_and_blocks(self, sizes, lhs_dtype, rhs_dtype, block_shape, N, K):
        self.check(
            Inputs.random(
                sizes,
                N=N,
                K=K,
                lhs_dtype=lhs_dtype,
                rhs_dtype=rhs_dtype,
                block_shape=block_shape,
            )
        )

    def test_float8_extremes(self):
        """Every finite float8 value times a scale of one, in both operands."""
        every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64)
        every = every[np.isfinite(every)]
        K = len(every)
        x = Inputs.random((2, 1), N=4, K=K, lhs_dtype=FLOAT8, rhs_dtype=FLOAT8)
        ones = np.ones_like
        x = dataclasses.replace(
            x,
            lhs=np.stack([every, ones(every), np.abs(every)]),
            rhs=np.stack([np.stack([every, np.abs(every), ones(every), every[::-1]])] * 2),
            lhs_scale=ones(x.lhs_scale),
            rhs_scale=ones(x.rhs_scale),
        )
        self.check(x)

    def test_scales_are_checked(self):
        lhs, rhs, sizes, *_ = Inputs.random((3, 0, 4), N=160, K=200).arrays()
        x = Inputs.random((3, 0, 4), N=160, K=200, lhs_dtype=FLOAT8, rhs_dtype=FLOAT8)
        lhs8, rhs8, _, lhs_scale, rhs_scale = x.arrays()
        for args, block_shape, message in (
            ((lhs8, rhs, sizes), (128, 128), "lhs: float8 .* float8_e4m3fn with no scale"),
            ((lhs, rhs8, sizes), (128, 128), "rhs: float8 .* float8_e4m3fn with no scale"),
            ((lhs, rhs, sizes, lhs_scale), (128, 128), r"lhs: float8 .* float32 .* scale \(7, 2\)"),
            (
                (lhs, rhs, sizes, None, rhs_scale),
                (128, 128),
                r"rhs: float8 .* float32 .* scale \(3, 2, 2\)",
            ),
            (
                (lhs8, rhs, sizes, jnp.ones((7, 1))),
                (128, 128),
                r"lhs_scale: expected shape \(7, 2\), got \(7, 1\)",
            ),
            (
                (lhs, rhs8, sizes, None, jnp.ones((3, 1, 2))),
                (128, 128),
                r"rhs_scale: expected shape \(3, 2, 2\), got \(3, 1, 2\)",
            ),
            (
                (lhs8, rhs8, sizes, lhs_scale, rhs_scale),
                (64, 128),
                r"rhs_scale: expected shape \(3, 3, 2\), got \(3, 2, 2\)",
            ),
            (
                (lhs8, rhs8, sizes, lhs_scale, rhs_scale),
                (128, 64),
                r"lhs_scale: expected shape \(7, 4\), got \(7, 2\)",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                grouped_matmul(*args, block_shape=block_shape, implementation=self.implementation)

    @pytest.mark.parametrize(("rhs_dtype", "name"), [("int8", "int8"), ("int4", "uint8")])
    def test_scales_of_integers_are_checked(self, rhs_dtype, name):
        x = Inputs.random((3, 0, 4), K=200, rhs_dtype=rhs_dtype, block_shape=(1, 128))
        lhs, rhs, sizes, _, scale = x.arrays()
        for args, message in (
            ((lhs, rhs, sizes), f"rhs: float8 or integer .* {name} with no scale"),
            (
                (lhs, rhs, sizes, None, scale[..., :1]),
                r"rhs_scale: expected shape \(3, 16, 2\), got \(3, 16, 1\)",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                grouped_matmul(*args, block_shape=(1, 128), implementation=self.implementation)

    def test_int4_of_another_width_is_refused(self):
        """100 bytes have 200 columns, but the rows have 100."""
        _, rhs, sizes, _, scale = Inputs.random((3, 4), K=200, rhs_dtype="int4").arrays()
        with pytest.raises(ValueError, match="rhs: expected 100 columns as lhs has, got 200"):
            grouped_matmul(
                jnp.ones((7, 100)), rhs, sizes, None, scale, implementation=self.implementation
            )


class GroupedMatmulGradientCases:
    """Gradients, for back-ends that training uses."""

    implementation: ClassVar[Implementation]

    @pytest.mark.parametrize(("sizes", "M"), [((2, 0, 5), 7), ((0, 34, 1), 37), ((0, 1, 0, 2), 3)])
    def test_gradients(self, sizes, M):
        """Compares with sums in float64. Rows past the groups' sum must not affect the weights."""
        x = Inputs.random(sizes, M=M)
        self.check_gradients(dataclasses.replace(x, lhs=np.where(np.isnan(x.lhs), 3.0, x.lhs)))

    def check_gradients(self, x: Inputs) -> None:
        """Compares the gradients of float32 rows and matrices with sums in float64."""
        d_lhs, d_rhs = self.gradients(x, (0, 1))
        cotangent, groups = cotangents(x), x.group_of_rows()
        want = np.zeros_like(x.rhs)
        for m, g in enumerate(groups):
            want[g] += np.outer(cotangent[m], x.lhs[m])
        check(d_rhs, want, TOLERANCES["float32"])
        rows = np.array([cotangent[m] @ x.rhs[g] for m, g in enumerate(groups)])
        check(d_lhs[: len(rows)], rows, TOLERANCES["float32"])

    @pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 2, 0)])
    def test_gradients_through_float8_weights(self, sizes):
        """Gradients with respect to the rows and to the scales."""
        x = Inputs.random(sizes, N=40, K=72, rhs_dtype=FLOAT8, block_shape=(32, 64))
        d_lhs, d_scale = self.gradients(x, (0, 4))
        cotangent, groups = cotangents(x), x.group_of_rows()
        weights = x.values()[1]
        rows = np.array([cotangent[m] @ weights[g] for m, g in enumerate(groups)])
        check(d_lhs, rows, TOLERANCES["float32"])
        each = np.zeros_like(x.rhs)
        for m, g in enumerate(groups):
            each[g] += np.outer(cotangent[m], x.lhs[m]) * x.rhs[g]
        want = np.add.reduceat(np.add.reduceat(each, [0, 32], axis=1), [0, 64], axis=2)
        check(d_scale, want, TOLERANCES["float32"])

    @pytest.mark.parametrize("rhs_dtype", INTEGERS)
    @pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 2, 0)])
    def test_gradients_through_integer_weights(self, sizes, rhs_dtype):
        """Gradients with respect to the rows."""
        x = Inputs.random(sizes, N=40, K=72, rhs_dtype=rhs_dtype, block_shape=(1, 64))
        (d_lhs,) = self.gradients(x, (0,))
        weights = x.values()[1]
        rows = [cotangents(x)[m] @ weights[g] for m, g in enumerate(x.group_of_rows())]
        check(d_lhs, rows, TOLERANCES["float32"])

    @pytest.mark.parametrize("rhs_dtype", [FLOAT8, "int4"])
    def test_gradients_dequantize_again(self, rhs_dtype):
        """The backward pass keeps no dense copies of the matrices."""
        x = Inputs.random((70, 58), N=40, K=72, rhs_dtype=rhs_dtype, block_shape=(1, 64))
        lhs, *others = x.arrays()
        options = {"block_shape": x.block_shape, "implementation": self.implementation}
        _, vjp = jax.vjp(lambda lhs: grouped_matmul(lhs, *others, **options), lhs)
        assert not [leaf for leaf in jax.tree.leaves(vjp) if is_dense(leaf, (2, 40, 72))]

    def gradients(self, x: Inputs, argnums: tuple[int, ...]) -> tuple[npt.NDArray, ...]:
        """Returns the gradients of sum(out * cotangents) over the defined rows."""
        f = compiled_gradients(self.implementation, x.block_shape, argnums)
        defined = np.arange(len(x.lhs))[:, None] < sum(x.group_sizes)
        return tuple(map(np.asarray, f(x.arrays(), cotangents(x), defined)))


@functools.cache
def compiled_gradients(
    implementation: Implementation, block_shape: tuple[int, int], argnums: tuple[int, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def gradients(
        arrays: tuple[jax.Array | None, ...], weights: Array, defined: npt.NDArray[np.bool_]
    ) -> tuple[jax.Array, ...]:
        def loss(*args: jax.Array | None) -> jax.Array:
            out = grouped_matmul(*args, block_shape=block_shape, implementation=implementation)
            return jnp.sum(jnp.where(defined, out, 0) * weights)

        return jax.grad(loss, argnums)(*arrays)

    return jax.jit(gradients)


def cotangents(x: Inputs) -> Array:
    return np.random.default_rng(3).standard_normal((len(x.lhs), x.rhs.shape[1]))
