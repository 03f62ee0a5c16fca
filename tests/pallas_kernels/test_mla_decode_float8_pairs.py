"""mla_decode's kernel in which two programs unpack a float8 cache together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.float8_pairs_plan import Float8Pairs
from pallas_kernels.mla_decode.plan import Config
from tests.pallas_kernels.machine import ON_GPU, kernel_runs, on_gpu
from tests.pallas_kernels.mla_decode_cases import compiled
from tests.pallas_kernels.mla_decode_hopper_cases import HopperCases, kernel
from tests.pallas_kernels.numerics import TOLERANCES
from tests.pallas_kernels.test_mla_decode_float8 import Float8Cases

PAIRS = Float8Pairs()


@kernel_runs
class TestPairs(Float8Cases, HopperCases):
    config = PAIRS
    implementation = staticmethod(kernel(132 if ON_GPU else 3, PAIRS))

    @pytest.mark.parametrize(
        ("H", "partitions", "config"),
        [
            (128, 2, PAIRS),
            pytest.param(128, 1, None, marks=pytest.mark.slow),
            pytest.param(128, 5, None, marks=pytest.mark.slow),
            pytest.param(8, 2, Float8Pairs(early=False), marks=pytest.mark.slow),
        ],
    )
    def test_segments(self, H, partitions, config):
        """Successive sequences with an even and an odd number of blocks, with one and with none."""
        x = self.random((300, 70, 0, 640, 1, 64, 9 * 64 - 3), H=H, max_pages=10)
        self.check(x, kernel(partitions, config))

    @pytest.mark.slow
    @pytest.mark.parametrize(("H", "T"), [(128, 2), (64, 2), (64, 3), (40, 3)])
    def test_tiles(self, H, T):
        """Two pairs, one, and pairs whose second tile is padding or not full."""
        self.check(self.random((9 * 64 + 2, 70, 3), H=H, T=T, max_pages=10))

    def test_rising_maximum(self):
        """The maximum rises from block to block by more than SLACK, in either consumer."""
        x = self.random((6 * 64 + 9, 64), max_pages=8)
        pages, table = x.pages.copy(), x.block_tables[0]
        for block in range(7):
            pages[table[block]] *= 0.25 * 2**block
        x = dataclasses.replace(x, pages=pages)
        self.check(x, kernel(1, PAIRS), bound=TOLERANCES["large scores"])

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


def arguments(width=656, dtype="uint8"):
    return (
        jnp.ones((2, 1, 128, 512), "bfloat16"),
        jnp.ones((2, 1, 128, 64), "bfloat16"),
        jnp.zeros((8, 64, width), dtype),
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
    )


def test_bfloat16_cache_is_refused():
    arrays = arguments(576, "bfloat16")
    with pytest.raises(NotImplementedError, match=r"takes a float8 cache with Float8Pairs\("):
        mosaic_gpu.mla_decode(*arrays, scale=0.1, config=PAIRS, interpret=object())


def test_config_of_another_kernel_is_refused():
    with pytest.raises(NotImplementedError, match=r"has no config, got Config\("):
        mosaic_gpu.mla_decode(*arguments(), scale=0.1, config=Config(), interpret=object())


@pytest.mark.parametrize(("heads", "is_pair"), [(128, True), (64, False)])
def test_default(heads, is_pair, monkeypatch):
    """Pairs need an even number of tiles."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    arrays = tuple(x[:, :, :heads] if x.ndim == 4 else x for x in arguments())
    decode = jax.jit(functools.partial(mosaic_gpu.mla_decode, scale=0.1))
    text = decode.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mla_decode_float8_pairs" in text) == is_pair
