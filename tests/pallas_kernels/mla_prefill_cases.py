"""Test cases that every back-end of mla_prefill must pass; see MlaPrefillCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import merge_attention, mla_prefill
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels.numerics import (
    TOLERANCES,
    Array,
    central_difference,
    check,
    check_slope,
    device,
    rounded,
    tolerance,
)
from tests.support.covering import slow_except


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random arguments. Keys and values past a sequence's length are NaN."""

    q: Array
    k: Array
    v: Array
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    scale: float
    dtype: npt.DTypeLike
    first_keys: Array | None = None

    @classmethod
    def random(
        cls,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        *,
        T: int,
        S: int,
        H: int = 2,
        widths: tuple[int, int],
        scale: float = 0.3,
        dtype: npt.DTypeLike = "float32",
        seed: int = 0,
    ) -> "Inputs":
        rng = np.random.default_rng(seed)
        B, (K, V) = len(lengths), widths
        k, v = rng.standard_normal((B, S, H, K)), rng.standard_normal((B, S, H, V))
        for b, length in enumerate(lengths):
            k[b, length:] = v[b, length:] = np.nan
        q = rng.standard_normal((B, T, H, K))
        return cls(
            rounded(q, dtype), rounded(k, dtype), rounded(v, dtype), starts, lengths, scale, dtype
        )

    def arrays(self) -> tuple[jax.Array, ...]:
        """The arguments of mla_prefill."""
        bounds = self.starts, self.lengths, self.first_keys
        return (
            *(device(a, self.dtype) for a in (self.q, self.k, self.v)),
            *(device(each, "int32") for each in bounds if each is not None),
        )

    def keys(self, first: int, last: int | None = None) -> "Inputs":
        """Returns the same queries over keys first, ..., last - 1."""
        k, v = self.k[:, first:last], self.v[:, first:last]
        lengths = tuple(min(max(n - first, 0), k.shape[1]) for n in self.lengths)
        starts = tuple(start - first for start in self.starts)
        return dataclasses.replace(self, k=k, v=v, starts=starts, lengths=lengths)

    def expected(self) -> tuple[Array, Array]:
        """Returns out [B, T, H, V] and lse [B, T, H], computed one query and head at a time."""
        B, T, H, _ = self.q.shape
        out, lse = np.zeros((B, T, H, self.v.shape[-1])), np.full((B, T, H), -np.inf)
        for b, t, h in np.ndindex(B, T, H):
            visible = min(self.starts[b] + t + 1, self.lengths[b])
            first = 0 if self.first_keys is None else max(self.first_keys[b, t], 0)
            if visible <= first:
                continue
            scores = self.scale * (self.k[b, first:visible, h] @ self.q[b, t, h])
            lse[b, t, h] = np.logaddexp.reduce(scores)
            out[b, t, h] = np.exp(scores - lse[b, t, h]) @ self.v[b, first:visible, h]
        return out, lse


Operation = Implementation | Callable[..., tuple[jax.Array, ...]]
"""An ``implementation`` argument of mla_prefill, or a back-end's function."""


@functools.cache
def compiled(implementation: Operation, scale: float) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the jitted operation, cached so that tests of the same shapes share a compilation."""
    if callable(implementation):
        return jax.jit(functools.partial(implementation, scale=scale))
    return jax.jit(functools.partial(mla_prefill, scale=scale, implementation=implementation))


def run(x: Inputs, implementation: Operation) -> tuple[npt.NDArray, ...]:
    """Returns results as NumPy arrays, because slicing a device array compiles a program."""
    return tuple(map(np.asarray, compiled(implementation, x.scale)(*x.arrays())))


def check_gradients(implementation: Operation, x: Inputs, *, of_lse: bool = True) -> None:
    """Compares the gradients of a loss with those of the reference in float32. Their errors are
    relative to the norm of the whole gradient, because single rows may cancel out. With one key,
    all of those by queries and keys cancel out, up to the rounding of a float32 sum.

    Where the gradients are not sums over keys, that is past a sequence's length, they are zero.
    """
    _, _, _, *bounds = x.arrays()
    rng = np.random.default_rng(1)
    out_weights = rounded(rng.standard_normal((*x.q.shape[:-1], x.v.shape[-1])), x.dtype)
    lse_weights = rng.standard_normal(x.q.shape[:-1]) * of_lse

    def gradients(implementation: Operation, dtype: npt.DTypeLike, *qkv: Array) -> list[Array]:
        operation = compiled(implementation, x.scale)

        def loss(*qkv: jax.Array) -> jax.Array:
            out, lse = operation(*qkv, *bounds)
            loss = jnp.sum(out.astype(jnp.float32) * out_weights)
            if of_lse:
                loss += jnp.sum(jnp.where(lse == -jnp.inf, 0, lse) * lse_weights)
            return loss

        inputs = [device(each, dtype) for each in qkv]
        return list(map(np.asarray, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)))

    got = gradients(implementation, x.dtype, x.q, x.k, x.v)
    finite = np.nan_to_num(x.k), np.nan_to_num(x.v)
    want = gradients("reference", "float32", x.q, *finite)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == x.dtype, f"expected {x.dtype}, got {a.dtype}"
        if not b.any():
            terms = x.scale * np.linalg.norm(out_weights) * np.linalg.norm(finite[1])
            largest = max(np.linalg.norm(x.q), np.linalg.norm(finite[0]))
            assert np.linalg.norm(np.float64(a)) <= TOLERANCES["float32"] * terms * largest
            continue
        check(np.ravel(a), np.ravel(b), tolerance(x.dtype))


class MlaPrefillCases:
    """Each back-end subclasses this, and sets ``implementation`` and the shapes it requires."""

    implementation: ClassVar[Operation]
    dtype: ClassVar[str] = "float32"
    widths: ClassVar[tuple[int, int]] = (24, 16)  # K, V
    more_widths: ClassVar[tuple[tuple[int, int], ...]] = ((8, 24), (16, 16), (192, 128))
    heads: ClassVar[tuple[int, ...]] = (1, 16)

    def random(self, *args, **kwargs) -> Inputs:
        return Inputs.random(*args, **{"widths": self.widths, "dtype": self.dtype, **kwargs})

    def check(self, x: Inputs, *, bound: float = TOLERANCES["float32"]) -> None:
        """Compares with ``x.expected()``. ``bound``: error bound of float32 computations."""
        out, lse = run(x, self.implementation)
        want_out, want_lse = x.expected()
        assert out.dtype == x.dtype, f"out: expected {x.dtype}, got {out.dtype}"
        assert lse.dtype == np.float32, f"lse: expected float32, got {lse.dtype}"
        check(out, want_out, max(bound, tolerance(x.dtype)))
        # Products of bfloat16 are exact in float32, so the log-sum-exp is equally accurate.
        check(np.ravel(lse), np.ravel(want_lse), bound)

    @pytest.mark.parametrize("T", [1, 7, 130])
    def test_causal_prompts(self, T):
        self.check(self.random((0, 0), (T, T // 2), T=T, S=T))

    @pytest.mark.parametrize(
        ("starts", "lengths"),
        [
            ((5, 0, 20), (14, 9, 29)),  # each sequence's last query sees its last key
            ((5, 0, 20), (8, 3, 22)),  # later queries see no further keys
            ((29, 40, 99), (29, 11, 1)),  # a prefix that all queries see whole
            ((0, 3, 0), (0, 29, 1)),  # a sequence without keys
            ((-4, -1, -9), (29, 29, 29)),  # the first queries precede all keys
        ],
        ids=["aligned", "short", "prefix", "empty", "before"],
    )
    def test_starts_and_lengths(self, starts, lengths):
        self.check(self.random(starts, lengths, T=9, S=29))

    def test_query_that_sees_no_key(self):
        x = self.random((0, -2), (0, 5), T=3, S=5)
        out, lse = run(x, self.implementation)
        for blind in ((0, slice(None)), (1, slice(2))):
            assert (np.asarray(out)[blind] == 0).all()
            assert (np.asarray(lse)[blind] == -np.inf).all()
        assert np.isfinite(lse[1, 2]).all()

    def test_widths_of_keys_and_values(self):
        for widths in self.more_widths:
            self.check(self.random((3, 0), (12, 8), T=9, S=12, widths=widths))

    def test_heads(self):
        for H in self.heads:
            self.check(self.random((0, 2), (9, 6), T=9, S=9, H=H))

    def test_bfloat16(self):
        self.check(self.random((0, 7), (33, 40), T=33, S=40, dtype="bfloat16"))

    def test_large_scores(self):
        """Scores are in the hundreds, so their exponentials overflow float32."""
        scale = 40.0 * (24 / self.widths[0]) ** 0.5
        x = self.random((0, 5), (20, 25), T=20, S=25, scale=scale)
        assert np.abs(x.expected()[1]).max() > 400
        self.check(x, bound=TOLERANCES["large scores"])

    @pytest.mark.parametrize("cut", slow_except((4, 16, 23), quick=(1,)))
    def test_prefix_and_rest_merge_into_the_whole(self, cut):
        x = self.random((20, 12), (29, 14), T=9, S=29)
        merged = jax.jit(merge_attention)(
            *run(x.keys(0, cut), self.implementation), *run(x.keys(cut), self.implementation)
        )
        out, lse = x.expected()
        check(merged[0], out, tolerance(x.dtype))
        check(np.ravel(merged[1]), np.ravel(lse), TOLERANCES["float32"])


class MlaPrefillGradientCases:
    """Test cases for back-ends that training uses."""

    implementation: ClassVar[Operation]
    widths: ClassVar[tuple[int, int]] = (24, 16)  # K, V

    def test_bfloat16_gradients(self):
        """They are those of the reference in float32, up to roundings to bfloat16."""
        x = Inputs.random((0, 2), (9, 5), T=9, S=9, widths=self.widths, dtype="bfloat16")
        check_gradients(self.implementation, x)


class MlaPrefillFloat32GradientCases(MlaPrefillGradientCases):
    """Test cases for back-ends that take float32."""

    def test_gradients(self):
        """Gradients of out and lse match central differences in float64 along random directions."""
        x = Inputs.random((0, 0, 0), (7, 4, 0), T=7, S=7, widths=self.widths)
        x = dataclasses.replace(x, k=np.nan_to_num(x.k), v=np.nan_to_num(x.v))
        rng = np.random.default_rng(2)
        out, lse = x.expected()
        visible = np.isfinite(lse)
        *_, starts, lengths = x.arrays()
        out_weights, lse_weights = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)

        def loss(q, k, v):
            out, lse = compiled(self.implementation, x.scale)(q, k, v, starts, lengths)
            return jnp.sum(out * out_weights) + jnp.sum(jnp.where(visible, lse, 0) * lse_weights)

        inputs = (x.q, x.k, x.v)
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(
            *(device(a, "float32") for a in inputs)
        )
        for i, gradient in enumerate(gradients):

            def expected_loss(moved: Array, name: str = "qkv"[i]) -> float:
                out, lse = dataclasses.replace(x, **{name: moved}).expected()
                return np.sum(out * out_weights) + np.sum(lse[visible] * lse_weights[visible])

            direction = rng.standard_normal(inputs[i].shape)
            slope = central_difference(expected_loss, inputs[i], direction)
            check_slope(gradient, direction, slope)


def documents(*lengths: int, total: int) -> list[int]:
    """Returns the first key of each query of documents with these lengths, and a last one."""
    starts = np.cumsum([0, *lengths])
    return list(np.repeat(starts, np.diff([*starts, total])))


class MlaPrefillDocumentCases:
    """Test cases for back-ends that take ``first_keys``."""

    implementation: ClassVar[Operation]

    def packed(self, dtype: str) -> Inputs:
        """Documents of one token and of many, one sequence that ends early, queries that see no
        key, and queries after 8 cached keys."""
        x = Inputs.random((0, 0, 0, 8), (29, 29, 11, 37), T=29, S=37, widths=(24, 16), dtype=dtype)
        rows = [
            documents(1, 1, 6, 9, 3, total=29),
            documents(total=29),
            documents(10, 4, total=29),
            [0] * 5 + [10] * 13 + [33] * 11,
        ]
        return dataclasses.replace(x, first_keys=np.array(rows))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_documents(self, dtype):
        x = self.packed(dtype)
        for got, want in zip(run(x, self.implementation), x.expected(), strict=True):
            check(np.ravel(got), np.ravel(want), tolerance(dtype))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_gradients_of_documents(self, dtype):
        check_gradients(self.implementation, self.packed(dtype))

    def test_a_document_is_a_sequence(self):
        """Results and gradients are those of the document alone."""
        x = Inputs.random((0,), (29,), T=29, S=29, widths=(24, 16))
        packed = dataclasses.replace(x, first_keys=np.array([documents(7, 9, total=29)]))
        q, k, v = x.arrays()[:3]

        def sums(first, last, *bounds):
            def loss(q, k, v):
                out, _ = compiled(self.implementation, x.scale)(q, k, v, *bounds)
                return jnp.sum(jnp.sin(out[:, first:last])), out[:, first:last]

            return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)

        (_, out), gradients = sums(7, 16, *packed.arrays()[3:])(q, k, v)
        alone = [each[:, 7:16] for each in (q, k, v)]
        bounds = device((0,), "int32"), device((9,), "int32")
        (_, want), wanted = sums(0, 9, *bounds)(*alone)
        check(out, want, tolerance("float32"))
        for got, want in zip(gradients, wanted, strict=True):
            check(got[:, 7:16], want, tolerance("float32"))
            assert not np.delete(np.asarray(got), np.s_[7:16], axis=1).any()
