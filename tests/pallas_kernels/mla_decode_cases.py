"""Test cases that every back-end of mla_decode must pass; see MlaDecodeCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import mla_decode
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels.numerics import TOLERANCES, Array, check, device, rounded, tolerance
from tests.support.covering import slow_except

# Entries that a table may have past a sequence's last page.
_STRAY_ENTRIES = (10**6, -1, 0, -(10**6), 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random queries and a page pool in which every sequence has its own pages, in random order.

    Everything that no sequence wrote is NaN: the slots after a sequence's last token, and the
    unused pages. These include the first and the last page, to which clipped stray entries lead.
    """

    q_latent: Array
    q_rope: Array
    pages: Array
    block_tables: npt.NDArray[np.int32]
    lengths: tuple[int, ...]
    scale: float
    dtype: npt.DTypeLike

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        *,
        T: int = 1,
        H: int = 2,
        page: int = 16,
        max_pages: int = 4,
        widths: tuple[int, int],
        scale: float = 0.3,
        dtype: npt.DTypeLike = "float32",
        seed: int = 0,
    ) -> "Inputs":
        rng = np.random.default_rng(seed)
        B, (C, R) = len(lengths), widths
        page_counts = [-(-min(length, max_pages * page) // page) for length in lengths]
        pages = np.full((B * max_pages + 3, page, C + R), np.nan)
        free = iter(rng.permutation(np.arange(1, len(pages) - 1)))
        tables = np.resize(_STRAY_ENTRIES, (B, max_pages)).astype(np.int32)
        for b, length in enumerate(lengths):
            for i in range(page_counts[b]):
                tables[b, i] = page_number = next(free)
                slots = min(length - i * page, page)
                pages[page_number, :slots] = rng.standard_normal((slots, C + R))
        return cls(
            q_latent=rounded(rng.standard_normal((B, T, H, C)), dtype),
            q_rope=rounded(rng.standard_normal((B, T, H, R)), dtype),
            pages=rounded(pages, dtype),
            block_tables=tables,
            lengths=lengths,
            scale=scale,
            dtype=dtype,
        )

    def arrays(self) -> tuple[jax.Array, ...]:
        """The arguments of mla_decode."""
        return (
            *(device(a, self.dtype) for a in (self.q_latent, self.q_rope, self.pages)),
            jax.device_put(self.block_tables),
            device(self.lengths, "int32"),
        )

    def wider(self) -> "Inputs":
        """Returns the same tokens in pages with 64 unused columns."""
        pages = np.pad(self.pages, ((0, 0), (0, 0), (0, 64)), constant_values=np.nan)
        return dataclasses.replace(self, pages=pages)

    def shuffled(self, seed: int) -> "Inputs":
        """Returns the same tokens in another order of pages."""
        order = np.random.default_rng(seed).permutation(len(self.pages))
        new_number = np.argsort(order)
        tables, page = self.block_tables.copy(), self.pages.shape[1]
        for b, length in enumerate(self.lengths):
            page_count = -(-length // page)
            tables[b, :page_count] = new_number[tables[b, :page_count]]
        return dataclasses.replace(self, pages=self.pages[order], block_tables=tables)

    def tokens(self, b: int, count: int) -> Array:
        """Returns the first ``count`` cached tokens of sequence b, looked up one by one."""
        page = self.pages.shape[1]
        count = max(0, min(count, self.block_tables.shape[1] * page))
        slots_of_tokens = [(self.block_tables[b, s // page], s % page) for s in range(count)]
        cached = [self.pages[number, slot] for number, slot in slots_of_tokens]
        return np.array(cached).reshape(-1, self.pages.shape[-1])

    def expected(self) -> tuple[Array, Array]:
        """Returns out [B, T, H, C] and lse [B, T, H], computed query by query in float64."""
        B, T, H, C = self.q_latent.shape
        out, lse = np.zeros((B, T, H, C)), np.full((B, T, H), -np.inf)
        for b, t in np.ndindex(B, T):
            seen = self.tokens(b, self.lengths[b] - T + 1 + t)
            if not len(seen):
                continue
            latents, keys = seen[:, :C], seen[:, C : C + self.q_rope.shape[-1]]
            scores = self.scale * (self.q_latent[b, t] @ latents.T + self.q_rope[b, t] @ keys.T)
            lse[b, t] = np.logaddexp.reduce(scores, axis=-1)
            out[b, t] = np.exp(scores - lse[b, t, :, None]) @ latents
        return out, lse


Operation = Implementation | Callable[..., tuple[jax.Array, ...]]
"""An ``implementation`` argument of mla_decode, or a back-end's function."""


@functools.cache
def compiled(implementation: Operation, scale: float) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the jitted operation, cached so that tests of the same shapes share a compilation."""
    if callable(implementation):
        return jax.jit(functools.partial(implementation, scale=scale))
    return jax.jit(functools.partial(mla_decode, scale=scale, implementation=implementation))


def run(x: Inputs, implementation: Operation) -> tuple[npt.NDArray, ...]:
    """Returns results as NumPy arrays, because slicing a device array compiles a program."""
    return tuple(map(np.asarray, compiled(implementation, x.scale)(*x.arrays())))


class MlaDecodeCases:
    """Each back-end subclasses this, and sets ``implementation`` and the shapes it requires."""

    implementation: ClassVar[Operation]
    dtype: ClassVar[str] = "float32"
    widths: ClassVar[tuple[int, int]] = (24, 8)  # C, R
    page: ClassVar[int] = 16
    heads: ClassVar[int] = 2
    more_heads: ClassVar[tuple[tuple[int, int], ...]] = ((1, 2), (16, 1))  # H, T
    page_borders: ClassVar[tuple[tuple[int, tuple[int, ...]], ...]] = (
        (1, (9, 2, 290)),
        (64, (320, 63, 256)),
        (320, (10, 330)),
    )
    """Page sizes, each with lengths around its multiples."""

    def random(self, lengths: tuple[int, ...], **kwargs) -> Inputs:
        fixed = {"widths": self.widths, "dtype": self.dtype, "page": self.page, "H": self.heads}
        return Inputs.random(lengths, **{**fixed, **kwargs})

    def check(
        self,
        x: Inputs,
        implementation: Operation = None,
        *,
        bound: float = TOLERANCES["float32"],
    ) -> None:
        """Compares the results with ``x.expected()``.

        Args:
          implementation: by default the class's.
          bound: error bound of float32 computations.
        """
        out, lse = run(x, implementation or self.implementation)
        want_out, want_lse = x.expected()
        assert out.dtype == x.dtype, f"out: expected {x.dtype}, got {out.dtype}"
        assert lse.dtype == np.float32, f"lse: expected float32, got {lse.dtype}"
        check(out, want_out, max(bound, tolerance(x.dtype)))
        # Products of bfloat16 are exact in float32, so the log-sum-exp is equally accurate.
        check(np.ravel(lse), np.ravel(want_lse), bound)

    @pytest.mark.parametrize("T", slow_except((1, 2, 3, 4, 5), quick=(0, 4)))
    def test_queries_and_ragged_lengths(self, T):
        page = self.page
        self.check(self.random((2 * page + 5, 5, page, 3 * page, page + 1), T=T))

    def test_heads(self):
        for H, T in self.more_heads:
            self.check(self.random((self.page + 5, 2 * self.page + 2), H=H, T=T))

    def test_page_borders(self):
        """Includes a full table of five pages of 64, which blocks of two or four do not divide."""
        for page, lengths in self.page_borders:
            max_pages = -(-max(lengths) // page)
            self.check(self.random(lengths, page=page, max_pages=max_pages))

    def test_table_far_longer_than_sequences(self):
        self.check(self.random((self.page + 2, 2 * self.page + 8), T=2, max_pages=90))

    @pytest.mark.parametrize("lengths", [(2, 20, 0, 5, 1), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0)])
    def test_query_that_sees_no_token(self, lengths):
        T = 5
        x = self.random(lengths, T=T)
        out, lse = (np.asarray(a, np.float32) for a in run(x, self.implementation))
        blind = np.array([[length < T - t for t in range(T)] for length in lengths])
        assert (out[blind] == 0).all()
        assert (lse[blind] == -np.inf).all()
        self.check(x)

    def test_queries_across_the_last_page_s_border(self):
        """The last page has tokens that only the last queries, or the last query, see."""
        page = self.page
        self.check(self.random((2 * page + 2, page + 4, 3 * page + 1, page, page + 3), T=5))

    @pytest.mark.parametrize("past", [1, 3])
    def test_padding_past_the_table(self, past):
        """A length that counts queries past the table does not affect the other queries."""
        T, max_pages = 4, 17
        x = self.random((max_pages * self.page + past, 7), T=T, max_pages=max_pages)
        results = zip(
            run(x, self.implementation),
            x.expected(),
            (tolerance(x.dtype), TOLERANCES["float32"]),
            strict=True,
        )
        for got, want, bound in results:
            check(got[0, : T - past], want[0, : T - past], bound)
            check(got[1], want[1], bound)

    @pytest.mark.parametrize("T", [1, 3])
    def test_bfloat16(self, T):
        lengths = (3 * self.page + 2, 2, 2 * self.page + 1, 0, self.page - 1)
        self.check(self.random(lengths, T=T, dtype="bfloat16"))

    def test_published_widths(self):
        fixed = {"page": 64, "widths": (512, 64), "dtype": "bfloat16"}
        self.check(self.random((70, 129), T=2, scale=0.1352338, **fixed))

    def test_large_scores(self):
        """Scores are in the hundreds, so their exponentials overflow float32."""
        scale = 40.0 * (32 / sum(self.widths)) ** 0.5
        x = self.random((2 * self.page + 8, 4 * self.page), T=2, scale=scale)
        assert np.abs(x.expected()[1]).max() > 400
        self.check(x, bound=TOLERANCES["large scores"])

    def test_scale_zero_is_the_mean(self):
        T, lengths = 2, (12, 2 * self.page + 3)
        x = self.random(lengths, T=T, scale=0.0)
        out, lse = run(x, self.implementation)
        for b, t in np.ndindex(len(lengths), T):
            p = lengths[b] - T + 1 + t
            mean = x.tokens(b, p)[:, : self.widths[0]].mean(axis=0)
            check(out[b, t], np.tile(mean, (self.heads, 1)), tolerance(x.dtype))
            check(lse[b, t], np.full(self.heads, np.log(p)), TOLERANCES["float32"])

    def test_pages_wider_than_tokens(self):
        self.check(self.random((2 * self.page + 5, 0, self.page), T=2).wider())

    def test_sequences_are_independent(self):
        """Another sequence's length and the order of pages do not change a bit."""
        x = self.random((2 * self.page + 1, 4 * self.page), T=2)
        out, lse = run(x, self.implementation)
        moved = dataclasses.replace(x.shuffled(1), lengths=(x.lengths[0], 0))
        moved_out, moved_lse = run(moved, self.implementation)
        np.testing.assert_array_equal(moved_out[0], out[0])
        np.testing.assert_array_equal(moved_lse[0], lse[0])
