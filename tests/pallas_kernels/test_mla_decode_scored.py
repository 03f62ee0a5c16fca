"""mla_decode's scored kernel: a float8 cache, scores from registers. No call uses it by default.

The interpreter runs everything but the code of single threads, whose order of columns the last
tests check.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.scored_plan import Plan, ScoredQueries
from pallas_kernels.mla_decode.scorer_registers import permute_queries
from tests.pallas_kernels.machine import ON_GPU, kernel_runs
from tests.pallas_kernels.mla_decode_cases import compiled
from tests.pallas_kernels.mla_decode_hopper_cases import HopperCases, kernel
from tests.pallas_kernels.numerics import TOLERANCES
from tests.pallas_kernels.test_mla_decode_float8 import Float8Cases

SCORED = ScoredQueries()


@kernel_runs
class TestScored(Float8Cases, HopperCases):
    config = SCORED
    implementation = staticmethod(kernel(132 if ON_GPU else 3, SCORED))

    @pytest.mark.parametrize(
        ("partitions", "config", "T"),
        [
            (2, SCORED, 1),
            pytest.param(2, ScoredQueries(stages=4), 2, marks=pytest.mark.slow),
            pytest.param(1, ScoredQueries(stages=5, prefetch=0), 1, marks=pytest.mark.slow),
        ],
    )
    def test_segments(self, partitions, config, T):
        """Successive sequences with an even and an odd number of blocks, with one and with none."""
        x = self.random((300, 70, 0, 640, 1, 64, 9 * 64 - 3), H=16, T=T, max_pages=10)
        self.check(x, kernel(partitions, config))

    @pytest.mark.slow
    @pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
    def test_moonlights_heads(self, T):
        """With three tokens and more, two or three programs share a sequence's query rows."""
        self.check(self.random((9 * 64 + 2, 70, 3), H=16, T=T, max_pages=10))

    def test_rising_maximum(self):
        """The maximum rises from block to block by more than SLACK, in either scorer."""
        x = self.random((6 * 64 + 9,), H=16, max_pages=8)
        pages, table = x.pages.copy(), x.block_tables[0]
        for block in range(7):
            pages[table[block]] *= 0.25 * 2**block
        x = dataclasses.replace(x, pages=pages)
        self.check(x, kernel(1, SCORED), bound=TOLERANCES["large scores"])

    @pytest.mark.slow
    def test_scales_of_other_writers(self):
        """The kernel rounds scales to the nearest bfloat16."""
        x = self.random((200, 64))
        q_latent, q_rope, pages, *rest = x.arrays()
        tokens = np.array(pages)
        scale = tokens[..., 512:528].copy().view(np.float32) * np.float32(1.00123)
        tokens[..., 512:528] = scale.view(np.uint8)
        run = compiled(self.implementation, x.scale)
        got, want = (run(q_latent, q_rope, jnp.asarray(p), *rest) for p in (tokens, pages))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def arguments(T=1, H=16, width=656, dtype="uint8"):
    return (
        jnp.ones((2, T, H, 512), "bfloat16"),
        jnp.ones((2, T, H, 64), "bfloat16"),
        jnp.zeros((8, 64, width), dtype),
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 576, "dtype": "bfloat16"}, "takes a float8 cache"),
        ({"T": 3, "H": 12}, "or a multiple of 8, got 36"),
        ({"T": 11, "H": 12}, "or a multiple of 8, got 132"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.mla_decode(*arguments(**changes), scale=0.1, config=SCORED, interpret=object())


@pytest.mark.parametrize("stages", [3, 7])
def test_ring_that_does_not_fit(stages):
    with pytest.raises(ValueError, match="stages: expected 4 to 6, got"):
        _ = Plan(ScoredQueries(stages=stages), 16, 1, 16, 0.1, 4, None).stages


@pytest.mark.parametrize(
    ("rows", "tiles", "per_program"),
    [(8, 1, 8), (16, 1, 16), (24, 1, 32), (48, 2, 32), (64, 2, 32), (80, 3, 32)],
)
def test_programs_per_sequence(rows, tiles, per_program):
    plan = Plan(SCORED, rows, 1, rows, 0.1, 4, None)
    assert (plan.tiles, plan.rows) == (tiles, per_program)
    assert plan.stages >= 4
    scorer, values, producer = plan.registers
    assert 2 * scorer + values + producer <= 512


def columns_of_thread(quarter, unit):
    """Latent columns whose pairs a thread has in operand ``unit``, in the order of its words."""
    first = 128 * (unit // 2) + 32 * quarter + 16 * (unit % 2)
    return np.arange(first, first + 16).reshape(8, 2)


def test_queries_have_the_order_of_the_keys():
    """wgmma pairs its K index 16 s + 8 half + 2 quarter + b with pair 2 s + half of a thread."""
    number = jnp.arange(512)  # in two parts, because bfloat16 is exact only up to 256
    latent = jnp.stack([number % 128, number // 128]).astype(jnp.bfloat16)[None]
    rope = jnp.stack([jnp.arange(64, dtype=jnp.bfloat16)] * 2)[None]
    latent, rope = (np.asarray(x[0], np.int64) for x in permute_queries(latent, rope))
    order = 128 * latent[1] + latent[0]
    for unit in range(8):
        for quarter in range(4):
            pairs = columns_of_thread(quarter, unit)
            for p in range(8):
                k = 64 * unit + 16 * (p // 2) + 8 * (p % 2) + 2 * quarter
                assert order[k : k + 2].tolist() == pairs[p].tolist()
    for quarter in range(4):
        for p in range(8):
            k = 16 * (p // 2) + 8 * (p % 2) + 2 * quarter
            assert rope[0, k : k + 2].tolist() == [16 * quarter + 2 * p, 16 * quarter + 2 * p + 1]


def test_values_use_all_banks_and_are_stored_back_in_order():
    """Each quarter of a warp stores to eight different groups of banks; odd tiles are swapped."""
    stored = np.full((8, 64, 8), -1)  # tile, token, chunk of eight columns: the first true column
    for unit in range(8):
        for e in range(2):
            for first in range(0, 32, 8):
                banks = set()
                for lane in range(first, first + 8):
                    row, quarter = lane // 4, lane % 4
                    x = ((quarter & 1) * 4) ^ ((quarter >> 1) * 2) ^ row
                    place = x ^ (2 * (unit % 2) + e)
                    banks.add(place)
                    tile = 2 * (unit // 2) + quarter // 2
                    column = columns_of_thread(quarter, unit)[4 * e, 0]
                    for half in range(2):
                        stored[tile, row + 8 * half, place ^ row] = column
                assert len(banks) == 8
    for tile in range(8):
        swapped = [c ^ 2 for c in range(8)] if tile % 2 else list(range(8))
        for token in range(16):
            assert stored[tile, token].tolist() == [64 * tile + 8 * c for c in swapped]
