"""Test cases that every back-end of sparse_index must pass; see SparseIndexCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels import sparse_index
from pallas_kernels.dispatch import Implementation
from pallas_kernels.sparse_index.scaled_pages import pages_of, token_bytes
from tests.pallas_kernels.numerics import TOLERANCES, Array, check, device, random_e4m3, rounded

_STRAY_ENTRIES = (10**6, -1, 0, -(10**6), 2**31 - 1)


Operation = Implementation | Callable[..., jax.Array]
"""An ``implementation`` argument of sparse_index, or a back-end's function."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random queries, and keys in pages in random order. What no sequence wrote is NaN."""

    q: Array
    weights: Array
    pages: Array
    block_tables: npt.NDArray[np.int32]
    lengths: tuple[int, ...]
    dtype: str
    scales: Array | None = None
    unused: int = 0
    """Columns of wider pages with scales that are no keys, and as many rows."""

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        *,
        T: int = 1,
        J: int = 3,
        D: int = 12,
        page: int = 8,
        max_pages: int = 4,
        dtype: str = "float32",
    ) -> "Inputs":
        rng, B = np.random.default_rng(0), len(lengths)
        float8 = dtype == "float8_e4m3fn"
        pages = np.full((B * max_pages + 3, page, D), np.nan)
        scales = np.full((*pages.shape[:2], 1), np.nan)
        free = iter(rng.permutation(np.arange(1, len(pages) - 1)))
        tables = np.resize(_STRAY_ENTRIES, (B, max_pages)).astype(np.int32)
        for b, length in enumerate(lengths):
            for i in range(-(-min(length, max_pages * page) // page)):
                tables[b, i] = number = next(free)
                slots = min(length - i * page, page)
                keys = random_e4m3(rng, (slots, D)) if float8 else rng.standard_normal((slots, D))
                pages[number, :slots] = keys
                scales[number, :slots] = rng.uniform(0.5, 2, (slots, 1))
        q = random_e4m3(rng, (B, T, J, D)) if float8 else rng.standard_normal((B, T, J, D))
        return cls(
            q=rounded(q, dtype),
            weights=rounded(rng.standard_normal((B, T, J)), "float32"),
            pages=rounded(pages, dtype),
            block_tables=tables,
            lengths=lengths,
            dtype=dtype,
            scales=rounded(scales, "float32") if float8 else None,
        )

    def run(self, implementation: Operation) -> Array:
        pages = device(self.pages, self.dtype)
        if self.scales is not None:
            pages = pages_of(token_bytes(pages, device(self.scales, "float32")))
            unused = ((0, 0), (0, self.unused), (0, self.unused))
            pages = jnp.pad(pages, unused, constant_values=0xFF)  # NaN
        arrays = (
            device(self.q, self.dtype),
            device(self.weights, "float32"),
            pages,
            jax.device_put(self.block_tables),
            device(self.lengths, "int32"),
        )
        page_size = None if self.scales is None else self.pages.shape[1]
        return np.asarray(compiled(implementation, page_size)(*arrays))

    def expected(self, products_of: Callable[[Array, Array], Array] = np.matmul) -> Array:
        """Returns scores [B, T, S], computed key by key in float64.

        Args:
          products_of: returns the products [J] of queries [J, D] and a key [D].
        """
        (B, T, _, D), page = self.q.shape, self.pages.shape[1]
        S = self.block_tables.shape[1] * page
        scores = np.full((B, T, S), -np.inf)
        for b, t in np.ndindex(B, T):
            for s in range(min(S, self.lengths[b] - T + 1 + t)):
                number, slot = self.block_tables[b, s // page], s % page
                products = products_of(self.q[b, t], self.pages[number, slot, :D])
                scores[b, t, s] = self.weights[b, t] @ np.maximum(products, 0)
                if self.scales is not None:
                    scores[b, t, s] *= self.scales[number, slot, 0]
        return scores


def tensor_core_products(q: Array, key: Array) -> Array:
    """Returns products [J] as Hopper's tensor cores compute them in float8.

    An instruction adds 32 products to the sum before. It drops the bits of each term that are below
    2^-13 of the largest term's power of two. Measured on an H200: the only difference between a
    kernel's scores and exact ones.
    """
    total = np.zeros(len(q))
    for first in range(0, len(key), 32):
        terms = np.append(q[:, first : first + 32] * key[first : first + 32], total[:, None], 1)
        largest = np.abs(terms).max(axis=1, keepdims=True)
        unit = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1))) - 13)
        total = (np.trunc(terms / unit) * unit).sum(axis=1)
    return total


@functools.cache
def compiled(implementation: Operation, page_size: int | None):
    if callable(implementation):
        return jax.jit(functools.partial(implementation, page_size=page_size))
    partial = functools.partial(sparse_index, page_size=page_size, implementation=implementation)
    return jax.jit(partial)


class SparseIndexCases:
    """Each back-end subclasses this, and sets ``implementation`` and the shapes it requires."""

    implementation: ClassVar[Operation]
    dtype: ClassVar[str] = "float32"
    page: ClassVar[int] = 8
    heads: ClassVar[int] = 3
    width: ClassVar[int] = 12
    float8_bound: ClassVar[float] = TOLERANCES["float32"]
    unused: ClassVar[int] = 32
    """Columns of wider pages that are no keys."""

    def float8_products(self, q: Array, key: Array) -> Array:
        """Returns the products [J] of float8 queries [J, D] and a key [D]."""
        return q @ key

    def random(self, lengths: tuple[int, ...], **kwargs) -> Inputs:
        """Random inputs. Lengths are given as for pages of eight tokens."""
        shapes = {"dtype": self.dtype, "page": self.page, "J": self.heads, "D": self.width}
        longer = tuple(length // 8 * self.page + length % 8 for length in lengths)
        return Inputs.random(longer, **(shapes | kwargs))

    def check(self, x: Inputs) -> None:
        self.check_result(x, x.run(self.implementation))

    def check_result(self, x: Inputs, got: Array) -> None:
        float8 = x.scales is not None
        want = x.expected(self.float8_products) if float8 else x.expected()
        assert got.dtype == np.float32
        # A row at a time: products of bfloat16 and float8 are exact in float32.
        check(got, want, self.float8_bound if float8 else TOLERANCES["float32"])

    def test_queries_and_ragged_lengths(self):
        """Query t sees one token more than the query before, and none past a sequence's end."""
        self.check(self.random((21, 4, 8, 24, 9, 0), T=4))

    def test_heads_and_long_table(self):
        self.check(self.random((40, 130), J=16, max_pages=90))

    def test_padding_past_the_table(self):
        x = self.random((34, 7), T=4)
        got, want = x.run(self.implementation), x.expected()
        check(got[0, :2], want[0, :2], TOLERANCES["float32"])
        check(got[1], want[1], TOLERANCES["float32"])

    def test_bfloat16(self):
        self.check(self.random((21, 2), T=2, dtype="bfloat16"))

    def test_float8_keys_with_scales(self):
        self.check(self.random((21, 2), T=2, dtype="float8_e4m3fn"))

    def test_float8_keys_in_wider_pages(self):
        x = self.random((21, 2), T=2, dtype="float8_e4m3fn")
        self.check(dataclasses.replace(x, unused=128))

    def test_wider_pages(self):
        x = self.random((21, 2), T=2)
        unused = np.full((*x.pages.shape[:2], self.unused), np.nan)
        pages = np.concatenate([x.pages, unused], axis=-1)
        self.check(dataclasses.replace(x, pages=pages))

    def test_heads_below_zero_count_nothing(self):
        """A key opposite to every query scores 0, also where the weights are negative."""
        x = self.random((8,), T=1)
        opposite = dataclasses.replace(
            x, q=np.abs(x.q), pages=-np.abs(x.pages), weights=-np.abs(x.weights)
        )
        assert (jnp.asarray(opposite.run(self.implementation))[0, 0, : self.page] == 0).all()
