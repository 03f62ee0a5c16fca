"""Attention as a phase of the whole layer's kernel, as a kernel of its own and on NumPy."""

from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.mla_decode import reference
from pallas_kernels.whole_layer import registers
from pallas_kernels.whole_layer.attention import MOST_PARTS, Sizes
from pallas_kernels.whole_layer.attention_kernel import attend
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs
from tests.pallas_kernels.numerics import check, tolerance
from tests.pallas_kernels.one_block import THREADS, Buffer, emulate

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCALE = 192**-0.5


def cache_of(rng, pages, columns, dtype, cached):
    """Returns pages in random order and the table. What is not cached is not a number."""
    stored = np.full((pages + 2, 64, columns), np.nan, np.float32)
    table = rng.permutation(pages + 2)[:pages]
    for position in range(cached):
        stored[table[position // 64], position % 64] = rng.standard_normal(columns)
    return jnp.asarray(stored, dtype), jnp.asarray(table, jnp.int32)


# Tokens, heads, latent and rope columns, cached tokens with the new ones, pages of the table.
CASES = {
    "a token alone": (1, 16, 256, 16, 1, 2),
    "two groups, a full page": (1, 32, 256, 16, 128, 2),
    "two tokens over an edge": (2, 16, 256, 16, 65, 3),
    "several pages per part": (1, 16, 256, 16, 300, 6),
    "moonlight": (1, 16, 512, 64, 1025, 32),
    "moonlight, all positions": (2, 16, 512, 64, 8192, 128),
    "v3": (1, 128, 512, 64, 1024, 17),
    "v3, two tokens, several pages": (2, 128, 512, 64, 3010, 64),
}


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "heads", "latent", "rope", "cached", "pages"),
    [pytest.param(*case, id=name) for name, case in CASES.items() if (case[2] == 512) == ON_GPU],
)
def test_kernel(tokens, heads, latent, rope, cached, pages):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16
    programs = multiprocessors() if ON_GPU else 5
    sizes = Sizes(tokens, heads, latent, rope, SCALE, programs)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    q_latent, q_rope = normal(tokens, heads, latent), normal(tokens, heads, rope)
    stored, table = cache_of(rng, pages, latent + rope, dtype, cached)
    start = jnp.asarray([cached - tokens], jnp.int32)
    parts = attend(q_latent, q_rope, stored, table, start, sizes=sizes, interpret=INTERPRET)
    got = parts.merged()[0].reshape(tokens, heads, latent)
    exact = [x.astype(jnp.float32) for x in (q_latent[None], q_rope[None], stored)]
    want, lse = reference.mla_decode(
        exact[0], exact[1], exact[2], table[None], start + tokens, scale=SCALE
    )
    check(got, want[0], tolerance("bfloat16"))
    count = int(sizes.split(start[0])[2])
    assert 1 <= count <= sizes.parts
    got_lse = np.logaddexp.reduce(np.asarray(parts.lse[:count], np.float64), axis=0)
    np.testing.assert_allclose(got_lse.reshape(tokens, heads), lse[0], atol=2e-3)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [1, 2])
def test_parts_share_every_page_once(tokens, heads):
    sizes = Sizes(tokens, heads, 512, 64, SCALE, 132)
    assert sizes.parts * sizes.groups <= 132
    assert sizes.parts <= MOST_PARTS
    for cached in (0, 62, 63, 64, 1000, 4095, 8190):
        pages, each, count = (int(n) for n in sizes.split(jnp.int32(cached)))
        assert pages == -(-(cached + tokens) // 64)
        assert (count - 1) * each < pages <= count * each
        assert count <= sizes.parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 3}, "1 or 2 tokens, got 3"),
        ({"heads": 24}, "multiple of 16 heads"),
        ({"page": 32}, "pages of 64 tokens, got 32"),
        ({"positions": 8256}, "8192 positions at most, got 8256"),
        ({"columns": 640}, r"got \(512, 64, 640\)"),
    ],
)
def test_refusals(changes, message):
    given = {"tokens": 1, "heads": 16, "page": 64, "positions": 8192, "columns": 576} | changes
    sizes = Sizes(given["tokens"], given["heads"], 512, 64, SCALE, 132)
    with pytest.raises(NotImplementedError, match=message):
        sizes.check(given["page"], given["columns"], given["positions"], None)


# ---- the code of single threads ------------------------------------------------------------------


class Registers(list):
    """An array in registers, some numbers per thread each."""

    @property
    def registers(self):
        return SimpleNamespace(flat=list(self))


@pytest.fixture
def on_numpy(monkeypatch, untyped):
    emulate(monkeypatch, registers)
    monkeypatch.setattr(registers, "array", lambda made, *_: Registers(made))


@pytest.mark.parametrize(("tokens_before", "tokens", "visible"), [(0, 64, 64), (37, 3, 39)])
def test_two_pages(tokens_before, tokens, visible, on_numpy):
    """All threads of a program, for two pages; ``tokens`` of the second one are new."""
    rng = np.random.default_rng(0)
    stored = rng.standard_normal((5 * 64, 576)).astype(BFLOAT16)
    numbers = [3, 1]
    last = tokens_before + tokens - 1
    stored[64 * numbers[1] + last + 1 : 64 * numbers[1] + 64] = np.nan
    early = stored.copy()
    early[64 * numbers[1] + tokens_before :][: 64 - tokens_before] = np.nan
    q = rng.standard_normal((32, 576)).astype(BFLOAT16)
    q_latent, q_rope = Buffer(q[:, :512]), Buffer(q[:, 512:])
    queries = Buffer(np.full(16 * registers.QUERY_STRIDE, np.nan, BFLOAT16))
    probabilities = Buffer(np.full(16 * registers.PROBABILITY_STRIDE, np.nan, BFLOAT16))
    maxima, sums = (Buffer(np.full(128, np.nan, np.float32)) for _ in range(2))
    partials = Buffer(np.full((64, 512), np.nan, np.float32))
    lse = Buffer(np.full(64, np.nan, np.float32))

    registers.copy_queries(q_latent, q_rope, 16, queries)
    running = registers.zeros(registers.RUNNING, NO_SCORE, NO_SCORE)
    acc = registers.zeros(registers.ACC)
    keys = registers.zeros(registers.KEYS)
    for page, known, seen, end in zip(
        numbers, (64, tokens_before), (64, visible), (63, last), strict=True
    ):
        keys = registers.load_keys(keys, Buffer(early), page, 0, known)
        keys = registers.load_keys(keys, Buffer(stored), page, known, end + 1)
        scored = registers.scores(keys, queries, SCALE * LOG2E, seen, maxima)
        running, factors = registers.probabilities(scored, running, maxima, probabilities)
        for half in range(2):
            values = registers.load_values(Buffer(stored), page, end, half)
            acc = registers.add_values(acc, factors, values, probabilities, half)
    registers.store_sums(running, sums)
    registers.store_results(acc, running, sums, partials, lse, 32)

    exact = stored.astype(np.float64)
    rows = [exact[64 * numbers[0] :][:64], exact[64 * numbers[1] :][:visible]]
    cached = np.concatenate(rows)
    scores = q[16:].astype(np.float64) @ cached.T * SCALE
    weights = np.exp(scores)
    want = weights @ cached[:, :512] / weights.sum(axis=1, keepdims=True)
    results = partials.bytes.view(np.float32).reshape(64, 512)
    check(results[32:48], want, tolerance("bfloat16"))
    stored_lse = lse.bytes.view(np.float32)
    np.testing.assert_allclose(stored_lse[32:48], np.log(weights.sum(axis=1)), atol=1e-4)
    assert np.isnan(results[:32]).all()
    assert np.isnan(results[48:]).all()
    assert THREADS == 256
