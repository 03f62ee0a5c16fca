"""A model with sharded cached tokens gives the logits and tokens of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache
from dsv3_jax.layers import cached_attention
from dsv3_jax.layers.logical_axes import check_layout
from dsv3_jax.layers.paged_cache import PageShard
from dsv3_jax.offline.generator import Generator
from pallas_kernels.mla_decode import cpu as mla_decode_cpu
from sharding import DEFAULT_RULES, Layout, Rules, make_layout, make_mesh
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.oracle import relative_error
from tests.support.running import cached_latents, extend, forward

BOUND = 1e-5
PAGE, ROOM = 4, 60  # tokens per page, tokens per sequence
# No token, one token, tokens before, at and after page boundaries, more pages than devices.
STARTS = np.array([0, 1, 3, 4, 5, 15, 33, 50])
BATCH = len(STARTS)
TOKENS = np.random.default_rng(2).integers(0, 160, (BATCH, ROOM))
CONFIG = tiny_config(num_hidden_layers=1, first_k_dense_replace=0)


def sharing_tokens(n):
    return make_layout("context_parallel", devices=jax.devices()[:n])


def sharing_everything():
    """Shards sequences, cached tokens and heads over two devices each."""
    rules = Rules({**DEFAULT_RULES.table, "cached_tokens": "expert"})
    return Layout(make_mesh(data=2, expert=2, tensor=2), rules)


LAYOUTS = {
    "2": lambda: sharing_tokens(2),
    "4": lambda: sharing_tokens(4),
    "8": lambda: sharing_tokens(8),
    "sequences and heads too": sharing_everything,
}


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Sets context blocks to two and three pages, so that outputs of a prompt's chunk are summed
    and those of a decode step gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_attention, "_CONTEXT_TOKENS", 2 * PAGE * BATCH)
        patch.setattr(mla_decode_cpu, "_BLOCK_TOKENS", 3 * PAGE)
        patch.setattr(cached_attention, "_GATHERED_BYTES", 38_000)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    home = tmp_path_factory.mktemp("shared")
    write_checkpoint(home, CONFIG, random_tensors(CONFIG))
    return home


@pytest.fixture(scope="module")
def on_one_device(directory):
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="module")
def whole(on_one_device):
    """Logits of one pass over all sequences on one device."""
    return forward(on_one_device, TOKENS)


# ---- distribution of pages -----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_shares(page_size, parts):
    """Round-robin distribution of pages, written again in plain Python."""
    lengths = np.arange(40)

    @jax.jit
    def local_parts(lengths):
        all_parts = [PageShard(page_size, parts, part) for part in range(parts)]
        return [(s.local_lengths(lengths), s.local_positions(lengths)) for s in all_parts]

    for part, (local_lengths, (cached, positions)) in enumerate(local_parts(jnp.asarray(lengths))):
        own = [s for s in lengths if s // page_size % parts == part]
        want = [sum(s < length for s in own) for length in lengths]
        np.testing.assert_array_equal(local_lengths, want)
        cached = np.asarray(cached)
        np.testing.assert_array_equal(lengths[cached], own)
        np.testing.assert_array_equal(np.asarray(positions)[cached], np.arange(len(own)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_of_an_empty_cache(name):
    """Page p of a sequence is on its p % n-th device; all devices hold equally many pages."""
    layout, config = LAYOUTS[name](), ModelConfig.from_hf(CONFIG)
    room = 17 * PAGE
    spec = CacheSpec.of_config(config, "float32", mtp=True)
    cache = LatentKVCache.init(spec, 4, room, page_size=PAGE, layout=layout)
    tables, n = np.asarray(cache.block_tables), layout.num_shards("cached_tokens")
    num_pages = len(cache.pool.layers[0]["latent"])
    assert sorted(tables.ravel()) == list(range(num_pages))
    assert tables.shape[1] == -(-17 // n) * n
    pages_per_device = num_pages // (layout.num_shards("batch") * n)
    sequences_per_device = 4 // layout.num_shards("batch")
    for b, page in np.ndindex(*tables.shape):
        assert tables[b, page] // pages_per_device == b // sequences_per_device * n + page % n
    for pages in jax.tree.leaves(cache.pool):
        shard_shape = pages.sharding.shard_shape(pages.shape)
        assert shard_shape == (pages_per_device, PAGE, config.latent_dim)


# ---- merging of partial outputs ------------------------------------------------------------------


@pytest.mark.parametrize(("bytes_at_once", "collectives"), [(0, [1, 1]), (1 << 20, [1, 0])])
def test_merged(monkeypatch, bytes_at_once, collectives):
    """Compares with the formula in float64, with one collective or two, for queries for which some
    or all devices have no token, and log-sum-exps whose exponentials float32 cannot hold."""
    monkeypatch.setattr(cached_attention, "_GATHERED_BYTES", bytes_at_once)
    layout, rng = sharing_tokens(4), np.random.default_rng(0)
    outs, lses = rng.standard_normal((4, 2, 3, 4, 8)), 300 * rng.standard_normal((4, 2, 3, 4))
    blind = rng.random(lses.shape) < 0.4
    blind[:, 0, 0], blind[2] = True, True
    lses[blind], outs[blind] = -np.inf, 0
    spec = layout.partition_spec(("cached_tokens",))

    def body(out, lse):
        return cached_attention.merge_devices(out[0], lse[0], layout)[None]

    run = jax.jit(layout.shard_map(body, (spec, spec), spec))
    got = run(outs.astype("float32"), lses.astype("float32"))
    top = np.maximum(lses.max(0), -1e9)
    weights = np.exp(lses - top)[..., None]
    want = (weights * outs).sum(0) / np.maximum(weights.sum(0), 1e-300)
    for of_device in got:
        np.testing.assert_array_equal(of_device, got[0])
    np.testing.assert_array_equal(got[0][0, 0], 0)
    assert relative_error(got[0], want) < BOUND
    text = run.lower(got, got[..., 0]).compile().as_text()
    assert [text.count(f" {name}(") for name in ("all-gather", "all-reduce")] == collectives


# ---- the model -----------------------------------------------------------------------------------


def empty(model):
    """A cache whose slots are NaN before they are written."""
    spec = model.cache_spec(mtp=True)
    cache = LatentKVCache.init(spec, BATCH, ROOM, page_size=PAGE, layout=model.layout)

    def nan_filled(x):
        return jax.device_put(np.full(x.shape, np.nan, np.float32), x.sharding)

    return jax.tree.map(lambda x: nan_filled(x) if x.dtype == jnp.float32 else x, cache)


def extend_and_check(model, cache, want, counts, form, queries):
    """Runs each sequence's next tokens, checks their logits, and returns the longer cache."""
    starts = np.asarray(cache.lengths)
    positions = np.minimum(starts[:, None] + np.arange(queries), ROOM - 1)
    tokens = np.take_along_axis(TOKENS, positions, axis=1)
    logits, cache = extend(model, tokens, counts, cache, form)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count:
            expected = want[b, start : start + count]
            assert relative_error(np.asarray(logits)[b, :count], expected) < BOUND
    return cache


def prefilled_cache(model, want):
    """A cache with STARTS tokens, filled in chunks."""
    cache = empty(model)
    while (counts := np.clip(STARTS - np.asarray(cache.lengths), 0, 13)).any():
        cache = extend_and_check(model, cache, want, counts, "expanded", 13)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2", "8", "sequences and heads too"])
def test_logits_of_prefill_and_decode(directory, whole, name):
    """Expanded in chunks; absorbed with three tokens at once, which may be on two devices; and one
    by one across a page border."""
    model, want = dsv3_jax.load(directory, layout=LAYOUTS[name]())[0], np.asarray(whole[0])
    cache = prefilled_cache(model, want)
    counts = np.array([3, 3, 2, 3, 3, 3, 1, 0])
    cache = extend_and_check(model, cache, want, counts, "absorbed", 3)
    for _ in range(3):
        cache = extend_and_check(model, cache, want, (STARTS != 4).astype(int), "absorbed", 1)
    lengths = STARTS + counts + 3 * (STARTS != 4)
    assert cache.lengths.tolist() == lengths.tolist()
    for b, length in enumerate(lengths):
        cached = cached_latents(cache, 0, b)
        assert len(cached) == length
        assert np.isfinite(cached).all()


@pytest.fixture
def small_pages(monkeypatch):
    init = functools.partial(LatentKVCache.init, page_size=PAGE)
    monkeypatch.setattr(LatentKVCache, "init", staticmethod(init))


PROMPTS = [[5], [7] * 11, [1, 2, 3, 4, 5], [9, 2, 6, 5]]


def generated(model, draft, **settings):
    generator = Generator(model, None, 40, batch_sizes=(4,), prefill_chunk=8)
    out = generator.generate(PROMPTS, ignore_eos=True, draft=draft, **settings)
    return [c.tokens for c in out], [c.speculation for c in out]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("4", None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("2", "mtp"), ("8", None))),
    ],
)
def test_generated_tokens(directory, on_one_device, name, draft):
    """Each token is the most probable one in a pass over the whole text on one device."""
    model = dsv3_jax.load(directory, layout=LAYOUTS[name]())[0]
    lengths = [17, 9, 20, 12]
    got, _ = generated(model, draft, max_new_tokens=lengths, draft_depth=2)
    assert [len(tokens) for tokens in got] == lengths
    padded = np.zeros((BATCH, ROOM), int)  # a shape that is compiled already
    for row, prompt, tokens in zip(padded, PROMPTS, got, strict=False):
        row[: len(prompt) + len(tokens)] = prompt + tokens
    best = np.asarray(forward(on_one_device, padded)[0]).argmax(axis=-1)
    for row, prompt, tokens in zip(best, PROMPTS, got, strict=False):
        begin = len(prompt) - 1
        assert tokens == row[begin : begin + len(tokens)].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("small_pages")
def test_drafts_of_a_trained_model():
    """The demo's MTP layer makes the same drafts with the same acceptance."""
    (want, stats_of_one), (got, stats_of_four) = (
        generated(dsv3_jax.load("demo", layout=layout)[0], "mtp", max_new_tokens=28, draft_depth=3)
        for layout in (None, LAYOUTS["4"]())
    )
    assert got == want
    assert stats_of_four == stats_of_one
    assert sum(sum(s.accepted) for s in stats_of_one) > 20


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_devices_that_share_tokens_run_the_same_queries(axis):
    config = ModelConfig.from_hf(CONFIG)
    rules = {**dict.fromkeys(DEFAULT_RULES.table), "cached_tokens": "data", axis: "data"}
    check_layout(config, Layout(make_mesh(tensor=8), Rules(rules)))  # an axis of one device
    with pytest.raises(
        ValueError, match=rf"^rules: expected .* and '{axis}' over [^\n]*data[^\n]*$"
    ):
        check_layout(config, Layout(make_mesh(data=2, tensor=4), Rules(rules)))
