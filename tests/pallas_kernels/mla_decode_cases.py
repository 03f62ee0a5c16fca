"""What every back-end of mla_decode must do; see MlaDecodeCases."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import mla_decode
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels.numerics import TOLERANCES, Array, check, device, rounded, tolerance

# What a table may hold past a row's last page.
_STRAY_ENTRIES = (10**6, -1, 0, -(10**6), 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A pool in which every row's tokens stand in pages of their own, in no order.

    Whatever no row wrote is NaN: slots after a row's last token, and pages of nobody, among which
    are the first and the last, where wrong numbers and padding lead.
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
        held = [-(-min(length, max_pages * page) // page) for length in lengths]
        pages = np.full((B * max_pages + 3, page, C + R), np.nan)
        free = iter(rng.permutation(np.arange(1, len(pages) - 1)))
        tables = np.resize(_STRAY_ENTRIES, (B, max_pages)).astype(np.int32)
        for b, length in enumerate(lengths):
            for i in range(held[b]):
                tables[b, i] = own = next(free)
                slots = min(length - i * page, page)
                pages[own, :slots] = rng.standard_normal((slots, C + R))
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
            jnp.asarray(self.block_tables),
            jnp.asarray(self.lengths, jnp.int32),
        )

    def tokens(self, b: int, count: int) -> Array:
        """The first ``count`` cached tokens of row b, or all, one by one through its table."""
        page = self.pages.shape[1]
        count = max(0, min(count, self.block_tables.shape[1] * page))
        where = [(self.block_tables[b, s // page], s % page) for s in range(count)]
        found = [self.pages[number, slot] for number, slot in where]
        return np.array(found).reshape(-1, self.pages.shape[-1])

    def expected(self) -> tuple[Array, Array]:
        """out [B, T, H, C] and lse [B, T, H], one query after the other."""
        B, T, H, C = self.q_latent.shape
        out, lse = np.zeros((B, T, H, C)), np.full((B, T, H), -np.inf)
        for b, t in np.ndindex(B, T):
            seen = self.tokens(b, self.lengths[b] - T + 1 + t)
            if not len(seen):
                continue
            latents, keys = seen[:, :C], seen[:, C:]
            scores = self.scale * (self.q_latent[b, t] @ latents.T + self.q_rope[b, t] @ keys.T)
            lse[b, t] = np.logaddexp.reduce(scores, axis=-1)
            out[b, t] = np.exp(scores - lse[b, t, :, None]) @ latents
        return out, lse


@functools.cache
def compiled(implementation: Implementation, scale: float) -> Callable[..., tuple[jax.Array, ...]]:
    """Cached, so that tests of the same shapes share a compilation."""
    return jax.jit(functools.partial(mla_decode, scale=scale, implementation=implementation))


def run(x: Inputs, implementation: Implementation) -> tuple[jax.Array, jax.Array]:
    return compiled(implementation, x.scale)(*x.arrays())


class MlaDecodeCases:
    """Subclassed by each back-end, which sets ``implementation`` and what else it asks for."""

    implementation: ClassVar[Implementation]
    widths: ClassVar[tuple[int, int]] = (24, 8)  # C, R

    def check(self, x: Inputs, *, bound: float | None = None) -> None:
        out, lse = run(x, self.implementation)
        want_out, want_lse = x.expected()
        assert out.dtype == x.dtype, f"out: expected {x.dtype}, got {out.dtype}"
        assert lse.dtype == np.float32, f"lse: expected float32, got {lse.dtype}"
        check(out, want_out, bound or tolerance(x.dtype))
        # Products of bfloat16 are exact in float32: the log-sum-exp is as good from either.
        check(np.ravel(lse), np.ravel(want_lse), bound or TOLERANCES["float32"])

    @pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
    def test_queries_and_ragged_rows(self, T):
        self.check(Inputs.random((37, 5, 16, 48, 17), T=T, widths=self.widths))

    @pytest.mark.parametrize(("H", "T"), [(1, 1), (3, 2), (16, 1)])
    def test_heads(self, H, T):
        self.check(Inputs.random((21, 34), H=H, T=T, widths=self.widths))

    @pytest.mark.parametrize(
        ("page", "lengths"),
        [(1, (9, 2, 290)), (8, (1, 8, 9)), (64, (320, 63, 256)), (320, (10, 330))],
    )
    def test_page_sizes(self, page, lengths):
        """Also a full table: five pages of 64, which no block of two or four divides."""
        max_pages = -(-max(lengths) // page)
        x = Inputs.random(lengths, T=1, page=page, max_pages=max_pages, widths=self.widths)
        self.check(x)

    def test_table_far_longer_than_rows(self):
        self.check(Inputs.random((18, 40), T=2, max_pages=90, widths=self.widths))

    @pytest.mark.parametrize("lengths", [(2, 20, 0, 5, 1), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0)])
    def test_query_that_sees_no_token(self, lengths):
        T = 5
        x = Inputs.random(lengths, T=T, widths=self.widths)
        out, lse = (np.asarray(a, np.float32) for a in run(x, self.implementation))
        blind = np.array([[length < T - t for t in range(T)] for length in lengths])
        assert (out[blind] == 0).all()
        assert (lse[blind] == -np.inf).all()
        self.check(x)

    @pytest.mark.parametrize("past", [1, 3])
    def test_padding_past_the_table(self, past):
        """A length that counts queries beyond the table leaves the others as they are."""
        T, max_pages = 4, 17
        x = Inputs.random((max_pages * 16 + past, 7), T=T, max_pages=max_pages, widths=self.widths)
        for got, want in zip(run(x, self.implementation), x.expected(), strict=True):
            check(got[0, : T - past], want[0, : T - past], TOLERANCES["float32"])
            check(got[1], want[1], TOLERANCES["float32"])

    @pytest.mark.parametrize("T", [1, 3])
    def test_bfloat16(self, T):
        x = Inputs.random((50, 2, 33), T=T, H=4, widths=self.widths, dtype="bfloat16")
        self.check(x)

    def test_published_widths(self):
        x = Inputs.random(
            (70, 129), T=2, page=64, widths=(512, 64), scale=0.1352338, dtype="bfloat16"
        )
        self.check(x)

    def test_large_scores(self):
        """Scores of hundreds, whose exponentials float32 cannot hold."""
        x = Inputs.random((40, 64), T=2, widths=self.widths, scale=40.0)
        assert np.abs(x.expected()[1]).max() > 400
        self.check(x, bound=TOLERANCES["large scores"])

    def test_scale_zero_is_the_mean(self):
        T, lengths = 2, (12, 35)
        x = Inputs.random(lengths, T=T, widths=self.widths, scale=0.0)
        out, lse = run(x, self.implementation)
        for b, t in np.ndindex(len(lengths), T):
            p = lengths[b] - T + 1 + t
            mean = x.tokens(b, p)[:, : self.widths[0]].mean(axis=0)
            check(out[b, t], np.tile(mean, (2, 1)), TOLERANCES["float32"])
            check(lse[b, t], np.full(2, np.log(p)), TOLERANCES["float32"])

    def test_rows_do_not_depend_on_each_other(self):
        """Bit for bit: another row's length, and where the pages stand, change nothing."""
        x = Inputs.random((33, 64), T=2, widths=self.widths)
        out, lse = run(x, self.implementation)
        shuffle = np.random.default_rng(1).permutation(len(x.pages))
        tables = x.block_tables.copy()
        tables[0, :3] = np.argsort(shuffle)[tables[0, :3]]
        moved = dataclasses.replace(x, pages=x.pages[shuffle], block_tables=tables, lengths=(33, 0))
        moved_out, moved_lse = run(moved, self.implementation)
        np.testing.assert_array_equal(moved_out[0], out[0])
        np.testing.assert_array_equal(moved_lse[0], lse[0])
