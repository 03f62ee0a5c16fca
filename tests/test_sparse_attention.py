"""DeepSeek-V3.2's sparse attention against a float64 oracle, in every form of the model.

Queries attend to 16 tokens, sequences have up to 100, and pages of 8 are scattered. Bounds are for
float32. The selections are compared too, because a wrong one may change the logits little.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.inspection import capture
from dsv3_jax.kv_cache import LatentKVCache, PagePool, SequenceTables
from dsv3_jax.layers import attention, sparse_attention
from dsv3_jax.layers import indexer as indexer_module
from dsv3_jax.layers.indexer import hadamard
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import mla_decode
from pallas_kernels.hopper.split_kv import Schedule
from pallas_kernels.sparse_index import reference as index_reference
from sharding import make_layout
from tests.support.checkpoints import (
    random_tensors,
    sparse_config,
    tiny_config,
    write_checkpoint,
)
from tests.support.oracle import OracleOutput, relative_error
from tests.support.running import extend, forward
from tests.support.selection import selected_tokens
from tests.support.sparse_oracle import SparseOracle

BOUND = 1e-5
PAGE, PAGES, SPARE = 8, 13, 3
LENGTHS = np.array([100, 37, 9])
BATCH, VOCAB = len(LENGTHS), 160
TOKENS = np.random.default_rng(7).integers(0, VOCAB, (BATCH, LENGTHS.max()))
CONFIG = sparse_config(num_hidden_layers=2)
TOPK = CONFIG["index_topk"]


@pytest.fixture(scope="module", autouse=True)
def _short_blocks():
    """Sets the blocks of keys to three pages, and those of queries to 16 of a whole sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_reference, "_BLOCK_TOKENS", 3 * PAGE)
        patch.setattr(indexer_module, "SCORE_BYTES", 16 * 4 * BATCH * LENGTHS.max())
        yield


@pytest.fixture(scope="module")
def oracle() -> SparseOracle:
    return SparseOracle(CONFIG, random_tensors(CONFIG), latent_norm_eps=1e-6)


@pytest.fixture(scope="module")
def whole(oracle) -> OracleOutput:
    """One pass of the oracle. It is causal, so padding has no effect."""
    return oracle.forward(TOKENS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    home = tmp_path_factory.mktemp("sparse")
    write_checkpoint(home, CONFIG, random_tensors(CONFIG))
    return home


@pytest.fixture(scope="module")
def model(directory) -> DeepSeekV3:
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


@pytest.fixture
def empty(model) -> LatentKVCache:
    """A cache with scattered pages. Spare pages are NaN."""
    numbers = np.random.default_rng(5).permutation(BATCH * PAGES + SPARE).astype(np.int32)
    tables, spare = numbers[SPARE:].reshape(BATCH, PAGES), numbers[:SPARE]
    layer = {
        name: jnp.zeros((len(numbers), PAGE, array.width), array.dtype).at[spare].set(jnp.nan)
        for name, array in model.cache_spec().layers[0].items()
    }
    return LatentKVCache(
        pool=PagePool((layer,) * model.config.num_hidden_layers),
        sequences=SequenceTables(jnp.asarray(tables), jnp.zeros(BATCH, jnp.int32)),
    )


def run_in_chunks(model, tokens, targets, cache, chunk, form):
    """Extends each sequence to its target. Returns its new logits, and the cache."""
    logits = np.zeros((BATCH, max(targets), VOCAB), np.float32)
    while (counts := np.clip(targets - np.asarray(cache.lengths), 0, chunk)).any():
        starts = np.asarray(cache.lengths)
        window = np.zeros((BATCH, chunk), np.int64)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            window[b, :count] = tokens[b, start : start + count]
        out, cache = extend(model, window, counts, cache, form)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            logits[b, start : start + count] = np.asarray(out)[b, :count]
    return logits, cache


def check(logits, want, starts=(0, 0, 0), lengths=LENGTHS):
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert relative_error(logits[b, start:length], want[b, start:length]) < BOUND


# ---- logits --------------------------------------------------------------------------------------


def test_logits_of_whole_sequences(model, oracle, whole):
    """The MTP layer, which has an indexer of its own, is compared too."""
    logits, aux = forward(model, TOKENS)
    assert relative_error(logits, whole.logits) < BOUND
    assert relative_error(aux.mtp_logits[0], whole.mtp_logits[0]) < BOUND
    assert min(margins.min() for margins in oracle.margins.values()) > 1e-6, "expected no ties"
    assert [len(selected[0, 98]) for selected in oracle.selected.values()] == [TOPK] * 3


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("chunk", "form"),
    [(7, "expanded"), slow(1, "absorbed"), slow(3, "absorbed")],
)
def test_logits_in_chunks(chunk, form, model, whole, empty):
    """Chunks of three tokens are those of a decode step with two drafts."""
    logits, _ = run_in_chunks(model, TOKENS, LENGTHS, empty, chunk, form)
    check(logits, whole.logits)


@pytest.mark.slow
def test_logits_of_devices_that_share_tokens(directory, whole):
    """Each device scores its own tokens, and all select the same. The logits of every token are
    compared, not only those that an engine samples from."""
    layout = make_layout("context_parallel", devices=jax.devices()[:4])
    model, _ = dsv3_jax.load(directory, dtype=jnp.float32, layout=layout)
    cache = LatentKVCache.init(
        model.cache_spec(), BATCH, PAGE * PAGES, page_size=PAGE, layout=layout
    )
    targets = np.array([60, 37, 9])
    logits, _ = run_in_chunks(model, TOKENS, targets, cache, 15, "absorbed")
    check(logits, whole.logits, lengths=targets)


def test_rewind_leaves_no_stale_key(model, oracle, whole, empty):
    """Other tokens after a rewind get the logits of a fresh run."""
    remaining, targets = np.array([40, 30, 0]), np.array([64, 37, 9])
    other = TOKENS.copy()
    for b, count in enumerate(remaining):
        other[b, count:] = (other[b, count:] + 1) % VOCAB
    _, cache = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, "expanded")
    rewound = cache.with_lengths(jnp.asarray(remaining, jnp.int32))
    again, _ = run_in_chunks(model, other, targets, rewound, 7, "expanded")
    fresh = SparseOracle(CONFIG, random_tensors(CONFIG), latent_norm_eps=1e-6)
    check(again, fresh.forward(other[:, : targets.max()]).logits, remaining, targets)


@pytest.mark.slow
def test_dense_below_topk_is_latent_attention_bit_for_bit(model, tmp_path):
    """A model without indexer and with the same weights has the same logits, whole and cached, as
    long as no query sees more than ``index_topk`` tokens."""
    plain = tiny_config(num_hidden_layers=2)
    write_checkpoint(tmp_path, plain, random_tensors(plain))
    dense, _ = dsv3_jax.load(tmp_path, dtype=jnp.float32)
    tokens = TOKENS[:, :TOPK]
    for got, want in zip(forward(model, tokens), forward(dense, tokens), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    caches = (
        LatentKVCache.init(each.cache_spec(), BATCH, 2 * TOPK, page_size=PAGE)
        for each in (model, dense)
    )
    counts = np.array([TOPK, 5, 0])
    (got, _), (want, _) = (
        extend(each, tokens, counts, cache, "absorbed")
        for each, cache in zip((model, dense), caches, strict=True)
    )
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(np.asarray(got)[b, :count], np.asarray(want)[b, :count])


def count_ones(jaxpr, in_branch=False):
    """Returns how many equations outside and inside of conditionals' branches count ones."""
    counts = np.zeros(2, int)
    for equation in jaxpr.eqns:
        counts[int(in_branch)] += equation.primitive.name == "population_count"
        is_branch = in_branch or equation.primitive.name == "cond"
        for inner in jaxprs_in_params(equation.params):
            counts += count_ones(inner, is_branch)
    return counts


@pytest.fixture
def without_traces():
    """JAX keeps traces of layers: earlier ones would lack a test's stand-ins, and later tests would
    run them."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_layers_share_the_schedule_of_dense_attention(model, empty, monkeypatch, without_traces):
    """Each layer has a conditional, and none of its branches computes a schedule, so that XLA
    computes the same one once. The stand-ins count ones, which nothing else in the model does."""

    def schedule(lengths, *, queries, heads, max_pages):
        assert (queries, heads, max_pages) == (3, CONFIG["num_attention_heads"], PAGES)
        ones = jax.lax.population_count(lengths)
        return Schedule(jnp.stack([ones] * 4, axis=1), jnp.zeros((1, 4), jnp.int32))

    def scheduled(*arrays, schedule, scale):
        out, lse = mla_decode(*arrays, scale=scale)
        return out + 1e-30 * jnp.sum(schedule.table), lse

    monkeypatch.setattr(sparse_attention, "mla_decode_schedule", schedule)
    monkeypatch.setattr(attention, "mla_decode", scheduled)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten((state, empty))

    def step(leaves):
        state, cache = jax.tree.unflatten(tree, leaves)
        tokens, counts = jnp.asarray(TOKENS[:, :3]), jnp.full(BATCH, 3)
        return nnx.merge(graph, state).extend(tokens, counts, cache, "absorbed")[0].post_norm

    traced = jax.jit(step).trace(leaves)
    assert tuple(count_ones(traced.jaxpr.jaxpr)) == (2, 0)
    assert traced.lower().compile().as_text().count(" popcnt(") == 1


# ---- selections ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(model):
    """Inputs of an indexer at LENGTHS[0] positions."""
    x = np.random.default_rng(7).normal(size=(1, LENGTHS[0], CONFIG["hidden_size"]))
    rotation = rotation_at(model.config, jnp.arange(LENGTHS[0])[None])
    return x, jnp.asarray(x, jnp.float32), rotation


def test_selected_tokens(model, oracle, inputs):
    x, x32, rotation = inputs
    prefix = "model.layers.0.self_attn"
    oracle._attention(prefix, x, False)
    want, margins = oracle.selected[prefix], oracle.margins[prefix][0]
    got = selected_tokens(model.layers[0].self_attn, x32, rotation)
    assert np.sort(margins)[2] > 1e-6, "expected hardly any ties"
    assert [got[t] == want[0, t] or margins[t] < 1e-6 for t in range(len(got))] == [True] * len(got)
    assert got[:TOPK] == [set(range(t + 1)) for t in range(TOPK)]


@pytest.mark.slow
def test_float8_keys_select_nearly_the_same(model, inputs):
    """Hadamard-rotated float8 keys agree with exact ones in most selected tokens."""
    _, x, rotation = inputs
    attention = nnx.clone(model.layers[0].self_attn)
    exact = selected_tokens(attention, x, rotation)
    attention.indexer.use_float8_keys()
    spec = attention.cache_spec(jnp.float32)
    arrays = [(name, array.width, array.is_scaled) for name, array in spec.items()]
    assert arrays == [("latent", 40, False), ("index_key", 16, True)]
    rounded = selected_tokens(attention, x, rotation)
    common = np.mean([len(a & b) / len(a) for a, b in zip(exact, rounded, strict=True)])
    assert 0.9 < common < 1


def test_hadamard_matrices_keep_dot_products():
    matrix = hadamard(16)
    assert set(np.unique(matrix)) == {-1, 1}
    np.testing.assert_array_equal(matrix @ matrix.T, 16 * np.eye(16))


@pytest.mark.slow
def test_cached_float8_keys(model, empty):
    """Chunks equal the whole sequence, also where keys are float8 and have scales."""
    rounded = nnx.clone(model)
    rounded.use_float8_activations()
    cache = LatentKVCache.init(rounded.cache_spec(), BATCH, PAGE * PAGES, page_size=PAGE)
    assert cache.pool.layers[0]["index_key"].dtype == jnp.uint8
    got, _ = run_in_chunks(rounded, TOKENS, LENGTHS, cache, 7, "expanded")
    check(got, np.asarray(forward(rounded, TOKENS)[0]))
    exact, _ = run_in_chunks(model, TOKENS, LENGTHS, empty, 7, "expanded")
    assert relative_error(got, exact) > 1e-3, "expected another selection somewhere"


# ---- refusals ------------------------------------------------------------------------------------


def test_sparse_attention_has_no_variants(model):
    message = "attn_impl: expected None for deepseek_v32, whose attention is sparse, got A_CC"
    with pytest.raises(ValueError, match=message):
        model.use_attn_impl("A_CC")
    model.use_attn_impl(None)
    assert type(model.layers[0].self_attn).__name__ == "SparseAttention"


def test_the_entropy_of_sparse_attention_is_refused(model):
    with pytest.raises(ValueError, match="attention_entropy: expected at most index_topk=16"):
        capture(model, TOKENS[:, :17], what="attention_entropy")


def test_float8_keys_need_a_hadamard_matrix():
    config = ModelConfig.from_hf(sparse_config(index_head_dim=24, num_hidden_layers=1))
    odd = dsv3_jax.initialization.abstract_model(config)
    with pytest.raises(ValueError, match=r"index_head_dim: expected a power of two .* got 24"):
        odd.use_float8_activations()


def test_heads_narrower_than_the_rotation_are_refused():
    with pytest.raises(ValueError, match=r"rotates qk_rope_head_dim .* index_head_dim=4"):
        ModelConfig.from_hf(sparse_config(index_head_dim=4))


@pytest.mark.parametrize(
    ("name", "value"), [("indexer_types", ["full", "shared"]), ("index_topk_freq", 2)]
)
def test_selections_shared_by_layers_are_refused(name, value):
    config = sparse_config(model_type="glm_moe_dsa", num_hidden_layers=2)
    assert ModelConfig.from_hf(config).indexer_rope_interleave
    with pytest.raises(ValueError, match=f"{name} contradicts the other keys: expected"):
        ModelConfig.from_hf({**config, name: value})


def test_config_round_trip():
    config = ModelConfig.from_hf(sparse_config())
    assert not config.indexer_rope_interleave
    interleaved = dataclasses.replace(config, indexer_rope_interleave=True)
    for each in (config, interleaved):
        assert ModelConfig.from_hf(each.to_hf()) == each
    assert "indexer_rope_interleave" not in config.to_hf()
