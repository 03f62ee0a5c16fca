"""mla_decode's scored kernel: the order in which its threads unpack columns of a float8 cache.

The interpreter runs everything but the code of single threads (``test_mla_decode_float8``).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode.float8_registers import permute_queries
from pallas_kernels.mla_decode.scored import Plan


@pytest.mark.parametrize(("rows", "padded"), [(8, 8), (16, 16), (24, 32), (32, 32)])
def test_rows_of_a_cta(rows, padded):
    plan = Plan(rows, None)
    assert (plan.tiles, plan.rows) == (1, padded)
    assert plan.stages >= 4


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
