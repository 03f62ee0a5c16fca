"""Logits of a prompt are equal in every form: whole, cached, in chunks, absorbed, expanded.

Float32, compared to 1e-5 with the whole forward pass, which test_model_oracle.py compares with the
oracle. Sequences have different lengths and right padding, pages are scattered, positions go past
the 32 of the tiny config's original context, and a prefix spans several context blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.kv_cache import LatentKVCache, PagePool, SequenceTables
from dsv3_jax.layers import cached_attention
from dsv3_jax.layers.moe import MoE
from dsv3_jax.layers.paged_cache import LayerCache, PageShard
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import mla_prefill
from pallas_kernels.mla_decode import cpu as mla_decode_cpu
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.oracle import relative_error
from tests.support.running import cached_latents, extend, forward

BOUND = 1e-5
PAGE, PAGES, SPARE = 8, 15, 5  # tokens per page, pages per sequence, pages of no sequence
LENGTHS = np.array([113, 38, 7])
BATCH = len(LENGTHS)
VOCAB = 160
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (BATCH, LENGTHS.max()))


@pytest.fixture(scope="module", autouse=True)
def _short_blocks():
    """Sets context blocks to two and three pages, so that 113 tokens span several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_attention, "_CONTEXT_TOKENS", 2 * PAGE * BATCH)
        patch.setattr(mla_decode_cpu, "_BLOCK_TOKENS", 3 * PAGE)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> DeepSeekV3:
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0)  # one dense, one MoE
    write_checkpoint(directory, config, random_tensors(config))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


@pytest.fixture(scope="module")
def whole(model) -> np.ndarray:
    """Logits [BATCH, 113, VOCAB] of one pass. It is causal, so padding has no effect."""
    return np.asarray(forward(model, TOKENS)[0])


@pytest.fixture
def empty(model) -> LatentKVCache:
    """A cache with sequences scattered over more pages than needed; spare pages are not empty."""
    numbers = np.random.default_rng(5).permutation(BATCH * PAGES + SPARE).astype(np.int32)
    tables, spare = numbers[SPARE:].reshape(BATCH, PAGES), numbers[:SPARE]
    assert not (np.diff(tables) == 1).all()
    pages = jnp.zeros((len(numbers), PAGE, model.config.latent_dim)).at[spare].set(1e4)
    return LatentKVCache(
        pool=PagePool(({"latent": pages},) * model.config.num_hidden_layers),
        sequences=SequenceTables(jnp.asarray(tables), jnp.zeros(BATCH, jnp.int32)),
    )


def run_in_chunks(model, tokens, targets, cache, chunk, form):
    """Extends each sequence to its target length, `chunk` tokens at a time.

    Returns the logits [BATCH, max target, VOCAB], zero where there was no token, and the cache.
    Padding is token 0, which the sequences contain too.
    """
    logits = np.zeros((BATCH, max(targets), VOCAB), np.float32)
    while (counts := np.clip(targets - np.asarray(cache.lengths), 0, chunk)).any():
        starts = np.asarray(cache.lengths)
        window = np.zeros((BATCH, chunk), np.int64)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            window[b, :count] = tokens[b, start : start + count]
        out, cache = extend(model, window, counts, cache, form)
        out = np.asarray(out)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            logits[b, start : start + count] = out[b, :count]
    return logits, cache


def check(logits, whole, lengths=LENGTHS):
    for b, length in enumerate(lengths):
        assert relative_error(logits[b, :length], whole[b, :length]) < BOUND


def slow(*values):
    """Each form and chunk size is a program."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("chunk", "form"),
    [
        (7, "expanded"),
        slow(7, "absorbed"),
        slow(113, "expanded"),
        slow(1, "absorbed"),
        slow(1, "expanded"),
        slow(3, "expanded"),
        slow(3, "absorbed"),
        slow(113, "absorbed"),
    ],
)
def test_chunks_equal_the_whole(chunk, form, model, whole, empty):
    logits, cache = run_in_chunks(model, TOKENS, LENGTHS, empty, chunk, form)
    assert cache.lengths.tolist() == LENGTHS.tolist()
    check(logits, whole)


def test_decode_after_a_prefill(model, whole, empty):
    """As in a generator: the prompt in expanded chunks, then token by token, absorbed."""
    prompts = np.array([90, 20, 1])
    before, cache = run_in_chunks(model, TOKENS, prompts, empty, 7, "expanded")
    after, _ = run_in_chunks(model, TOKENS, LENGTHS, cache, 1, "absorbed")
    after[:, : prompts.max()] += before
    check(after, whole)


@pytest.mark.slow
def test_both_forms_leave_the_same_cache(model, empty):
    caches = [
        run_in_chunks(model, TOKENS, LENGTHS, empty, 7, form)[1]
        for form in ("expanded", "absorbed")
    ]
    for layer in range(model.config.num_hidden_layers):
        for b in range(BATCH):
            expanded, absorbed = (cached_latents(cache, layer, b) for cache in caches)
            assert expanded.shape == (LENGTHS[b], model.config.latent_dim)
            assert relative_error(absorbed, expanded) < BOUND


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_the_order_of_pages_does_not_matter(form, model, empty):
    plain = LatentKVCache.init(model.cache_spec(), BATCH, PAGE * PAGES, page_size=PAGE)
    assert plain.block_tables.tolist() == np.arange(BATCH * PAGES).reshape(BATCH, PAGES).tolist()
    padding = ((0, SPARE), (0, 0), (0, 0))  # the same shapes, hence the same program
    pool = jax.tree.map(lambda pages: jnp.pad(pages, padding), plain.pool)
    plain = dataclasses.replace(plain, pool=pool)
    one, _ = run_in_chunks(model, TOKENS, LENGTHS, plain, 7, form)
    other, _ = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, form)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_unused_table_entries_are_not_read(form, model, empty):
    """Table entries that name another sequence's pages, or no page at all, are not read."""
    clean, _ = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, form)
    tables = np.array(empty.block_tables)
    spare = np.setdiff1d(np.arange(BATCH * PAGES + SPARE), tables)
    tables[1, 5:10], tables[1, 10:], tables[2, 1:] = spare, 10**6, -1
    sequences = dataclasses.replace(empty.sequences, block_tables=jnp.asarray(tables))
    messy = dataclasses.replace(empty, sequences=sequences)
    got, _ = run_in_chunks(model, TOKENS, LENGTHS, messy, 7, form)
    np.testing.assert_array_equal(got, clean)


@pytest.mark.slow
@pytest.mark.parametrize("form", [slow("expanded"), "absorbed"])
def test_wider_pages_of_a_tpu(form, model, empty):
    """Pages may be wider than tokens; the extra columns do not matter."""
    settings = {"page_size": PAGE, "platform": "tpu"}
    cache = LatentKVCache.init(model.cache_spec(), BATCH, PAGE * PAGES, **settings)
    wide = cache.pool.layers[0]["latent"].shape[-1]
    assert wide == 128 > model.config.latent_dim
    columns = ((0, 0), (0, 0), (0, wide - model.config.latent_dim))
    pool = jax.tree.map(lambda p: jnp.pad(p, columns, constant_values=jnp.nan), empty.pool)
    got, _ = run_in_chunks(model, TOKENS, LENGTHS, dataclasses.replace(empty, pool=pool), 7, form)
    want, _ = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, form)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_rewind_equals_a_fresh_run(form, model, empty):
    """Lowering `lengths` removes tokens; their cache entries are overwritten later."""
    kept_lengths = np.array([61, 30, 0])
    targets = np.array([80, 38, 12])
    other = TOKENS.copy()
    for b, count in enumerate(kept_lengths):
        other[b, count:] = (other[b, count:] + 1) % VOCAB

    _, cache = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, "expanded")
    rewound = cache.with_lengths(jnp.asarray(kept_lengths, jnp.int32))
    again, _ = run_in_chunks(model, other, targets, rewound, 7, form)
    fresh, _ = run_in_chunks(model, other, targets, empty, 7, form)
    for b, (start, target) in enumerate(zip(kept_lengths, targets, strict=True)):
        assert relative_error(again[b, start:target], fresh[b, start:target]) < BOUND


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_padding_changes_no_sequence(form, model, empty):
    """Other padding tokens, or tokens in a finished sequence, change nothing else, bit for bit."""
    _, cache = run_in_chunks(model, TOKENS, np.array([50, 20, 7]), empty, 7, "expanded")
    window = TOKENS[:, 50:57].copy()
    counts = np.array([7, 4, 0])
    out, longer = extend(model, window, counts, cache, form)
    window[1, 4:] = (window[1, 4:] + 1) % VOCAB
    window[2] = (window[2] + 1) % VOCAB
    again, longer_again = extend(model, window, counts, cache, form)
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(out[b, :count], again[b, :count])
    assert longer.lengths.tolist() == [57, 24, 7]
    pools = jax.tree.leaves(longer.pool), jax.tree.leaves(longer_again.pool)
    for one, other in zip(*pools, strict=True):
        np.testing.assert_array_equal(one, other)
    for layer in range(model.config.num_hidden_layers):
        np.testing.assert_array_equal(
            cached_latents(longer, layer, 2), cached_latents(cache, layer, 2)
        )


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_sequences_are_independent(form, model, empty):
    shared, _ = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, form)
    changed = TOKENS.copy()
    changed[[0, 2]] = (changed[[0, 2]] + 1) % VOCAB
    other, _ = run_in_chunks(model, changed, np.array([60, LENGTHS[1], 30]), empty, 7, form)
    assert relative_error(other[1, : LENGTHS[1]], shared[1, : LENGTHS[1]]) < BOUND


def test_a_prompt_of_many_blocks_really_has_them(model):
    """The compiled programs used the patched sizes."""
    longest = LENGTHS.max()
    assert longest > 5 * cached_attention._CONTEXT_TOKENS / BATCH
    assert longest > 3 * model.config.rope_scaling.original_max_position_embeddings


def test_a_block_is_no_longer_than_the_page_table(model, empty, monkeypatch):
    """Otherwise a short table would be padded, and the padding expanded and attended to."""
    lengths = []

    def watched(q, keys, *rest, **options):
        lengths.append(keys.shape[1])
        return mla_prefill(q, keys, *rest, **options)

    monkeypatch.setattr(cached_attention, "mla_prefill", watched)
    monkeypatch.setattr(cached_attention, "_CONTEXT_TOKENS", 2 * PAGE * PAGES * BATCH)
    layer = model.layers[0].self_attn
    c, starts = model.config, jnp.full(BATCH, PAGE, jnp.int32)
    cache = LayerCache(empty.pool.layers[0], empty.block_tables, starts, jnp.ones((BATCH, 7), bool))
    q = jnp.ones((BATCH, 7, c.num_attention_heads, c.qk_head_dim))
    new = jnp.ones((BATCH, 7, c.latent_dim))
    shard = PageShard(PAGE)
    cached_attention.attend_by_heads(
        q, new, cache.pages["latent"], cache, shard, layer.expand, scale=1.0
    )
    assert set(lengths) == {7, PAGE * PAGES}


# ---- padding in the experts ----------------------------------------------------------------------


def test_padding_goes_to_no_expert(model):
    moe = model.layers[1].mlp
    assert isinstance(moe, MoE)
    x = jnp.asarray(np.random.default_rng(7).normal(size=(2, 9, 64)), jnp.float32)
    valid = jnp.arange(9) < jnp.array([[6], [2]])
    run = jax.jit(lambda x, valid: moe(x, valid))
    out, stats = run(x, valid)

    rows = x[valid]
    alone, alone_stats = jax.jit(lambda x: moe(x))(rows[None])
    assert stats.counts.sum() == rows.shape[0] * model.config.num_experts_per_tok
    np.testing.assert_array_equal(stats.counts, alone_stats.counts)
    assert relative_error(out[valid], alone[0]) < BOUND

    noise = jnp.where(valid[..., None], x, jnp.inf)  # padding affects only itself
    noisy, noisy_stats = run(noise, valid)
    np.testing.assert_array_equal(noisy[valid], out[valid])
    np.testing.assert_array_equal(noisy_stats.counts, stats.counts)


def test_nothing_but_padding(model):
    moe = model.layers[1].mlp
    run = jax.jit(lambda x, valid: moe(x, valid))
    _, stats = run(jnp.ones((2, 9, 64)), jnp.zeros((2, 9), bool))
    assert stats.counts.tolist() == [0] * 8
