"""Test cases that all Hopper kernels of mla_decode share."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.hopper.split_kv import schedule, whole_sequences
from pallas_kernels.mla_decode import merge, mosaic_gpu
from tests.pallas_kernels.machine import INTERPRET, ON_GPU
from tests.pallas_kernels.mla_decode_cases import MlaDecodeCases, run
from tests.pallas_kernels.numerics import device


@functools.cache
def kernel(partitions: int):
    """The back-end with a schedule of few partitions, which the interpreter runs one by one."""

    def decode(q_latent, q_rope, pages, block_tables, lengths, *, scale):
        return mosaic_gpu.mla_decode(
            q_latent,
            q_rope,
            pages,
            block_tables,
            lengths,
            scale=scale,
            schedule=schedule(lengths, max_pages=block_tables.shape[1], partitions=partitions),
            interpret=INTERPRET,
        )

    return decode


@functools.cache
def kernel_in_parts(partitions: int):
    """Like :func:`kernel`, but the parts are merged by plain operations, without a log-sum-exp."""

    def decode(q_latent, q_rope, pages, block_tables, lengths, *, scale):
        made = schedule(lengths, max_pages=block_tables.shape[1], partitions=partitions)
        arrays = q_latent, q_rope, pages, block_tables, lengths
        options = {"scale": scale, "schedule": made}
        parts, lse = mosaic_gpu.mla_decode_parts(*arrays, **options, interpret=INTERPRET)
        B, T, H, C = q_latent.shape
        return parts.merged()[:, : T * H].reshape(B, T, H, C), lse

    return decode


@functools.cache
def kernel_of_whole_sequences():
    """The back-end with a partition for each sequence."""

    def decode(q_latent, q_rope, pages, block_tables, lengths, *, scale):
        return mosaic_gpu.mla_decode(
            q_latent,
            q_rope,
            pages,
            block_tables,
            lengths,
            scale=scale,
            schedule=whole_sequences(lengths, max_pages=block_tables.shape[1]),
            interpret=INTERPRET,
        )

    return decode


_schedule = jax.jit(schedule, static_argnames=("max_pages", "partitions"))


def segments_of_sequences(x, partitions):
    made = _schedule(
        device(x.lengths, "int32"), max_pages=x.block_tables.shape[1], partitions=partitions
    )
    return np.asarray(made.table)[partitions:, 1].tolist()


class HopperCases(MlaDecodeCases):
    implementation = staticmethod(kernel(132 if ON_GPU else 3))
    dtype = "bfloat16"
    widths = (512, 64)
    page = 64
    heads = 8
    # Two tiles; the second is not full and begins inside a query. Then the maximum number of query
    # rows of the kernel for few query rows.
    more_heads = ((24, 3), (16, 2))
    page_borders = ((64, (320, 63, 256, 64, 65, 128)),)

    @pytest.fixture(autouse=True)
    def _small_gpu(self, monkeypatch):
        """Gives the merge kernel few CTAs, so that each merges several rows as on a GPU."""
        if not ON_GPU:
            monkeypatch.setattr(merge, "multiprocessors", lambda: 1)

    # These are the same as the other cases, or nearly.
    test_bfloat16 = None  # pyright: ignore[reportAssignmentType]
    test_published_widths = None  # pyright: ignore[reportAssignmentType]

    @pytest.mark.slow
    @pytest.mark.parametrize(("H", "T"), [(64, 1), (64, 3), (16, 1)])
    def test_still_more_heads(self, H, T):
        """One full tile, three tiles, and few query rows."""
        self.check(self.random((69, 130), H=H, T=T))

    def test_pages_wider_than_tokens(self):
        with pytest.raises(NotImplementedError, match="takes tokens of 576 columns, got 640"):
            run(self.random((70,)).wider(), self.implementation)

    def test_sequences_are_independent(self):
        """Other sequences' contents and the order of pages do not change a bit."""
        x = self.random((637, 70), max_pages=10)
        assert segments_of_sequences(x, 3) == [2, 1]
        moved = x.shuffled(1)
        q_latent, pages = moved.q_latent.copy(), moved.pages.copy()
        q_latent[1] *= -2
        pages[moved.block_tables[1, :2]] *= 4
        moved = dataclasses.replace(moved, q_latent=q_latent, pages=pages)
        got, want = run(moved, kernel(3)), run(x, kernel(3))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
            assert not np.array_equal(a[1], b[1])
