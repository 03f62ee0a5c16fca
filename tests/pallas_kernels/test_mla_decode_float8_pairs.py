"""mla_decode's kernel in which two programs unpack a float8 cache together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_gpu
from tests.pallas_kernels.machine import kernel_runs, on_gpu
from tests.pallas_kernels.mla_decode_cases import compiled
from tests.pallas_kernels.mla_decode_hopper_cases import HopperCases, kernel
from tests.pallas_kernels.numerics import TOLERANCES
from tests.pallas_kernels.test_mla_decode_float8 import Float8Cases


@kernel_runs
class TestPairs(Float8Cases, HopperCases):
    heads = 128
    # A pair whose second tile is not full and begins inside a query, and two pairs.
    more_heads = ((24, 3), (128, 2))

    @pytest.mark.parametrize(
        ("H", "partitions"),
        [
            (128, 2),
            pytest.param(128, 1, marks=pytest.mark.slow),
            pytest.param(128, 5, marks=pytest.mark.slow),
            pytest.param(72, 2, marks=pytest.mark.slow),
        ],
    )
    def test_segments(self, H, partitions):
        """Successive sequences with an even and an odd number of blocks, with one and with none."""
        x = self.random((300, 70, 0, 640, 1, 64, 9 * 64 - 3), H=H, max_pages=10)
        self.check(x, kernel(partitions))

    @pytest.mark.slow
    @pytest.mark.parametrize(("H", "T"), [(128, 2), (64, 2), (40, 3), (16, 5)])
    def test_tiles(self, H, T):
        """Two pairs, one, and pairs whose second tile is not full."""
        self.check(self.random((9 * 64 + 2, 70, 3), H=H, T=T, max_pages=10))

    def test_rising_maximum(self):
        """The maximum rises from block to block by more than SLACK, in either consumer."""
        x = self.random((6 * 64 + 9, 64), max_pages=8)
        pages, table = x.pages.copy(), x.block_tables[0]
        for block in range(7):
            pages[table[block]] *= 0.25 * 2**block
        x = dataclasses.replace(x, pages=pages)
        self.check(x, kernel(1), bound=TOLERANCES["large scores"])

    @on_gpu
    def test_equal_runs(self):
        """The interpreter has no stores to another program's memory. On a GPU a block that is read
        before it has arrived would differ from run to run."""
        x = self.random((4096, 300, 4096, 70) * 16, H=128, max_pages=64)
        run, arrays = compiled(self.implementation, x.scale), x.arrays()
        first = run(*arrays)
        for _ in range(100):
            for got, want in zip(run(*arrays), first, strict=True):
                np.testing.assert_array_equal(got, want)


def arguments():
    return (
        jnp.ones((2, 1, 128, 512), "bfloat16"),
        jnp.ones((2, 1, 128, 64), "bfloat16"),
        jnp.zeros((8, 64, 656), "uint8"),
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
    )


@pytest.mark.parametrize(("heads", "is_pair"), [(128, True), (64, False)])
def test_default(heads, is_pair, monkeypatch):
    """Pairs need an even number of tiles."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    arrays = tuple(x[:, :, :heads] if x.ndim == 4 else x for x in arguments())
    decode = jax.jit(functools.partial(mosaic_gpu.mla_decode, scale=0.1))
    text = decode.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mla_decode_float8_pairs" in text) == is_pair
