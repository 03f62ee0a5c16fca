"""mla_decode's Hopper kernels: run on a GPU, or interpreted with race detection."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_decode
from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.few_queries import CONSUMERS, Layout
from tests.pallas_kernels.machine import kernel_runs, off_gpu
from tests.pallas_kernels.mla_decode_cases import run
from tests.pallas_kernels.mla_decode_hopper_cases import (
    HopperCases,
    kernel,
    kernel_in_parts,
    kernel_of_whole_sequences,
    segments_of_sequences,
)
from tests.pallas_kernels.numerics import BFLOAT16_ROUNDING, TOLERANCES, check


@kernel_runs
class TestMosaicGpu(HopperCases):
    def test_another_sequence_s_length_changes_a_rounding(self):
        """The other length decides where this sequence is split. Its float32 sums are then rounded
        differently, and the bfloat16 result may differ by one step."""
        x = self.random((637, 300), max_pages=10)
        other = dataclasses.replace(x, lengths=(637, 70))
        assert segments_of_sequences(x, 3)[0] == 1
        assert segments_of_sequences(other, 3)[0] == 2
        (out, lse), (other_out, other_lse) = (run(each, kernel(3)) for each in (x, other))
        check(other_out[0], out[0], BFLOAT16_ROUNDING)
        check(np.ravel(other_lse[0]), np.ravel(lse[0]), TOLERANCES["float32"])

    @pytest.mark.parametrize("H", [8, pytest.param(40, marks=pytest.mark.slow)])
    def test_whole_sequences_depend_on_no_other(self, H):
        x = self.random((637, 300, 70), H=H, max_pages=10)
        others = dataclasses.replace(x, lengths=(637, 70, 300))
        whole = kernel_of_whole_sequences()
        for ours, theirs in zip(run(x, whole), run(others, whole), strict=True):
            np.testing.assert_array_equal(np.asarray(ours[0]), np.asarray(theirs[0]))
        self.check(x, whole)

    # One tile of query rows, and two, which form a cluster.
    @pytest.mark.parametrize(
        ("H", "partitions", "segments"),
        [
            (8, 5, [2, 2, 1]),
            (128, 2, [1, 2, 1]),
            pytest.param(8, 1, [1, 1, 1], marks=pytest.mark.slow),
            pytest.param(24, 2, [1, 2, 1], marks=pytest.mark.slow),
            pytest.param(32, 5, [2, 2, 1], marks=pytest.mark.slow),
            pytest.param(128, 1, [1, 1, 1], marks=pytest.mark.slow),
            pytest.param(128, 5, [2, 2, 1], marks=pytest.mark.slow),
        ],
    )
    def test_split_sequences(self, H, partitions, segments):
        """The last of five partitions has nothing to do."""
        x = self.random((640, 9 * 64 - 3, 0), H=H, max_pages=10)
        assert segments_of_sequences(x, partitions) == segments
        self.check(x, kernel(partitions))

    @pytest.mark.slow
    @pytest.mark.parametrize(("H", "T"), [(8, 2), (24, 3)])
    def test_parts(self, H, T):
        """There are sequences in one part and in several. Some queries do not see the last part."""
        x = self.random((12 * 64 + 2, 64, 0), H=H, T=T, max_pages=13)
        assert max(segments_of_sequences(x, 3)) > 1
        (got, _), (want, _) = (run(x, each(3)) for each in (kernel_in_parts, kernel))
        check(got, want, BFLOAT16_ROUNDING)

    def test_query_without_visible_tokens_in_a_segment(self):
        """The last of three segments has two tokens, which are the last two of five queries."""
        x = self.random((12 * 64 + 2,), T=5, max_pages=13)
        assert segments_of_sequences(x, 3) == [3]
        self.check(x, kernel(3))

    @pytest.mark.parametrize(
        ("H", "T"),
        [(40, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(16, 3), (56, 1)])],
    )
    def test_one_tile_that_is_not_full(self, H, T):
        x = self.random((640, 9 * 64 - 3, 0, 1), H=H, T=T, max_pages=10)
        self.check(x, kernel(3))

    # Slices of 192 and of 64 columns.
    @pytest.mark.parametrize("T", [1, 2])
    def test_segments_of_few_queries(self, T):
        """Successive sequences with an even and an odd number of blocks, with one and with none."""
        x = self.random((300, 70, 0, 640, 1, 64, 9 * 64 - 3), H=16, T=T, max_pages=10)
        self.check(x, kernel(2))

    def test_few_queries_without_visible_tokens(self):
        """Queries that see no token of a sequence, or of a segment: the last of three segments has
        two tokens, which two of four queries see."""
        x = self.random((2, 20, 0, 3, 1), T=4)
        out, lse = (np.asarray(a, np.float32) for a in run(x, kernel(3)))
        blind = np.array([[length < 4 - t for t in range(4)] for length in x.lengths])
        assert (out[blind] == 0).all()
        assert (lse[blind] == -np.inf).all()
        self.check(x)
        x = self.random((12 * 64 + 2,), T=4, max_pages=13)
        assert segments_of_sequences(x, 3) == [3]
        self.check(x, kernel(3))

    def test_few_queries_whose_maximum_rises(self):
        """The maximum rises from block to block by more than SLACK, in either warpgroup, and only
        for some query rows."""
        x = self.random((6 * 64 + 9,), H=16, max_pages=8)
        pages, table = x.pages.copy(), x.block_tables[0]
        for block in range(7):
            pages[table[block]] *= 0.25 * 2**block
        self.check(dataclasses.replace(x, pages=pages), kernel(1), bound=TOLERANCES["large scores"])


def test_rings_fill_shared_memory():
    """The ring buffers take at least 150 KB, and each has room for a key block."""
    for N in (8, 16, 24, 32):
        layout = Layout.of(N)
        assert CONSUMERS * layout.stages * 64 * layout.width * 2 >= 150_000
        assert layout.stages >= len(layout.slices)


def arrays(T=1, H=8, page=64, widths=(512, 64), dtype="bfloat16", B=2, max_pages=4):
    C, R = widths
    return (
        jnp.ones((B, T, H, C), dtype),
        jnp.ones((B, T, H, R), dtype),
        jnp.ones((B * max_pages, page, C + R), dtype),
        jnp.zeros((B, max_pages), jnp.int32),
        jnp.ones(B, jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16, got float32"),
        ({"page": 32}, r"got \(32, 512, 64\)"),
        ({"widths": (256, 64)}, r"got \(64, 256, 64\)"),
        ({"widths": (512, 32)}, r"got \(64, 512, 32\)"),
        ({"T": 3, "H": 4}, "got 12"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.mla_decode(*arrays(**changes), scale=0.1, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        mla_decode(*arrays(), scale=0.1, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("T", "H"),
    [
        (2, 16),
        (3, 64),
        pytest.param(1, 8, marks=pytest.mark.slow),
        pytest.param(3, 24, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda(T, H, monkeypatch):
    """Lowering checks shared memory size and register layouts without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.mla_decode, scale=0.1))
    text = f.trace(*arrays(T, H)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
