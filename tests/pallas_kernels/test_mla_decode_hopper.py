"""mla_decode's kernels for Hopper GPUs: on one, or interpreted with race detection."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_decode
from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.mosaic_gpu_kernel import Config
from tests.pallas_kernels.machine import kernel_runs, off_gpu
from tests.pallas_kernels.mla_decode_cases import run
from tests.pallas_kernels.mla_decode_hopper_cases import HopperCases, kernel, pieces_of_rows
from tests.pallas_kernels.numerics import BFLOAT16_ROUNDING, TOLERANCES, check


@kernel_runs
class TestMosaicGpu(HopperCases):
    def test_another_row_s_length_changes_a_rounding(self):
        """It decides where this row is cut: float32 sums are then rounded in other places, and
        their result to bfloat16 once, maybe to the neighbour."""
        x = self.random((637, 300), max_pages=10)
        other = dataclasses.replace(x, lengths=(637, 70))
        assert pieces_of_rows(x, 3)[0] == 1
        assert pieces_of_rows(other, 3)[0] == 2
        (out, lse), (other_out, other_lse) = (run(each, kernel(3)) for each in (x, other))
        check(other_out[0], out[0], BFLOAT16_ROUNDING)
        check(np.ravel(other_lse[0]), np.ravel(lse[0]), TOLERANCES["float32"])

    # Of one tile of query rows, and of two, which form a pair.
    @pytest.mark.parametrize(
        ("H", "parts", "pieces"),
        [
            (8, 1, [1, 1, 1]),
            (8, 5, [2, 2, 1]),
            (128, 1, [1, 1, 1]),
            (128, 2, [1, 2, 1]),
            (128, 5, [2, 2, 1]),
        ],
    )
    def test_rows_in_pieces(self, H, parts, pieces):
        """The last of five parts has nothing to do."""
        x = self.random((640, 9 * 64 - 3, 0), H=H, max_pages=10)
        assert pieces_of_rows(x, parts) == pieces
        self.check(x, kernel(parts))

    def test_query_that_sees_nothing_of_a_piece(self):
        """The last of three pieces is a block of two tokens, the last two of five queries."""
        x = self.random((12 * 64 + 2,), T=5, max_pages=13)
        assert pieces_of_rows(x, 3) == [3]
        self.check(x, kernel(3))

    def test_without_multicast(self):
        x = self.random((640, 9 * 64 - 3, 0), H=128, max_pages=10)
        self.check(x, kernel(2, multicast=False))


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
def test_what_it_does_not_take(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.mla_decode(*arrays(**changes), scale=0.1, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        mla_decode(*arrays(), scale=0.1, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("T", "H", "multicast"), [(1, 8, True), (3, 24, True), (2, 128, False), (3, 64, True)]
)
def test_lowers_for_cuda(T, H, multicast, monkeypatch):
    """SMEM's size and the layouts of registers are checked without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    config = Config(multicast=multicast)
    f = jax.jit(functools.partial(mosaic_gpu.mla_decode, scale=0.1, config=config))
    text = f.trace(*arrays(T, H)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
