"""Tests of perplexity, against losses computed window by window in float64."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.training import perplexity
from dsv3_jax.training.corpus import read_documents
from dsv3_jax.training.perplexity import Evaluator, Text, WindowSettings
from sharding import make_layout
from tests.support.checkpoints import tiny_config
from tests.support.running import forward

CONFIG = ModelConfig.from_hf(tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0))
RNG = np.random.default_rng(0)
# Shorter than a window, exactly one, several with a rest, and one without a token.
TEXTS = [Text(f"text {n}", RNG.integers(1, 160, n).astype(np.int32), 3 * n) for n in (5, 24, 61, 0)]


@pytest.fixture(scope="module")
def model():
    made = random_model(CONFIG, 0)
    graph, weights, rest = nnx.split(made, nnx.Param, ...)
    # Logits of order one.
    weights = jax.tree.map(lambda w: 5 * w if w.ndim > 1 else w, weights)
    return nnx.merge(graph, weights, rest)


def total(model, settings: WindowSettings, texts=TEXTS) -> float:
    evaluator = Evaluator(model, texts, settings)
    return sum(evaluator.nats(i) for i in range(len(evaluator.batch_tokens)))


def by_hand(model, length: int, stride: int, bos: int | None) -> tuple[float, int]:
    """Returns the nats and the number of all tokens: for each, the window is sought that scores it,
    the first one that contains it."""
    nats, count = 0.0, 0
    for _, ids, _ in TEXTS:
        stream = ids if bos is None else np.array([bos, *ids])
        for target in range(1, len(stream)):
            k = max(0, math.ceil((target - length) / stride))
            begin = k * stride
            window = stream[begin:target].copy()
            if bos is not None:
                window[0] = bos
            padded = np.pad(window, (0, length - len(window)))  # so that one length compiles
            logits = np.asarray(forward(model, padded[None])[0], np.float64)[0, len(window) - 1]
            nats += np.log(np.exp(logits - logits.max()).sum()) + logits.max()
            nats -= logits[stream[target]]
            count += 1
    return nats, count


@pytest.mark.slow
@pytest.mark.parametrize("stride", [24, 7])
def test_every_token_is_scored_once_in_its_window(model, stride):
    want, count = by_hand(model, 24, stride, bos=0)
    assert count == 90
    for settings in (
        WindowSettings(24, stride, batch=2),
        WindowSettings(24, stride, batch=3, cached=1),
        WindowSettings(24, stride, batch=1, cached=5),
    ):
        evaluator = Evaluator(model, TEXTS, settings)
        assert sum(evaluator.batch_tokens) == count
        assert total(model, settings) == pytest.approx(want, rel=1e-5)


def test_a_loss_by_hand(model):
    """One window: the mean of -log p of every token after BOS."""
    ids = TEXTS[1].ids
    logits = np.asarray(forward(model, np.array([[0, *ids[:-1]]]))[0], np.float64)[0]
    odds = np.exp(logits)
    want = -np.mean(np.log(odds[np.arange(24), ids] / odds.sum(-1)))
    for cached in (None, 8):
        evaluator = Evaluator(model, TEXTS[1:2], WindowSettings(24, batch=1, cached=cached))
        result = evaluator.result(evaluator.nats(0))
        assert (result.documents, result.tokens) == (1, 24)
        assert result.nats_per_token == pytest.approx(want, rel=1e-5)
        assert result.perplexity == pytest.approx(math.exp(want), rel=1e-4)
        assert result.bits_per_byte == pytest.approx(want * 24 / 72 / math.log(2), rel=1e-5)


@pytest.mark.slow
def test_without_bos_the_first_token_is_not_scored(model):
    graph, state = nnx.split(model)
    other = nnx.merge(graph, state)
    other.config = dataclasses.replace(CONFIG, bos_token_id=None)
    want, count = by_hand(model, 24, 7, bos=None)
    settings = WindowSettings(24, 7, batch=2)
    assert sum(Evaluator(other, TEXTS, settings).batch_tokens) == count == 87
    assert total(other, settings) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_logits_in_pieces_are_the_same(model, monkeypatch):
    settings = WindowSettings(24, 7, batch=2)
    whole = total(model, settings)
    monkeypatch.setattr(perplexity, "LOGITS_BYTES", 5 * 2 * 4 * 160)  # five tokens of two windows
    assert total(model, settings) == pytest.approx(whole, rel=1e-6)


def test_memory_never_has_all_logits(monkeypatch):
    """With a vocabulary of 20,000, those of two windows of 512 tokens are 82 MB."""
    small = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512}
    config = tiny_config(**small, hidden_size=16, vocab_size=20_000, num_nextn_predict_layers=0)
    model = random_model(ModelConfig.from_hf(config), 0)
    monkeypatch.setattr(perplexity, "LOGITS_BYTES", 1 << 20)
    ids = np.ones(1024, np.int32)
    evaluator = Evaluator(model, [Text("text", ids, 1024)], WindowSettings(512, batch=2))
    tokens = jnp.zeros((2, 512), jnp.int32)
    compiled = evaluator._nats_of.lower(evaluator._state, tokens, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 512 * 20_000 * 4 / 4


@pytest.mark.slow
def test_a_mesh_gives_the_same(model):
    want = total(model, WindowSettings(24, batch=2))
    layout = make_layout("dp_attention_ep", devices=jax.devices()[:2])
    laid_out = random_model(CONFIG, 0, layout)
    graph, weights, rest = nnx.split(laid_out, nnx.Param, ...)
    laid_out = nnx.merge(graph, jax.tree.map(lambda w: 5 * w if w.ndim > 1 else w, weights), rest)
    for cached in (None, 8):
        settings = WindowSettings(24, batch=3, cached=cached)  # rounded up to 4
        assert total(laid_out, settings) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_the_function_for_texts():
    model, tokenizer = dsv3_jax.load("demo", dtype="float32")
    assert tokenizer is not None
    text = "import os\n"
    result = perplexity.perplexity(model, tokenizer, [text], WindowSettings(16, batch=1))
    ids = tokenizer(text, add_special_tokens=False)
    assert (result.tokens, result.num_bytes) == (len(ids), 10)
    logits = model(jnp.array([[model.config.bos_token_id, *ids[:-1]]]))[0]
    want = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(ids)), jnp.array(ids)])
    assert result.nats_per_token == pytest.approx(float(want), rel=1e-5)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1}, "length: expected at least 2, got 1"),
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"stride": 0}, "stride: expected at least 1, got 0"),
        ({"stride": 9}, "stride: expected at most length, 8, got 9"),
        ({"cached": 0}, "cached: expected at least 1, got 0"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        WindowSettings(**{"length": 8} | settings)


def test_refused_models_and_texts(model):
    with pytest.raises(ValueError, match=r"^length: expected at most 128 \(max_position_emb"):
        Evaluator(model, TEXTS, WindowSettings(129))
    with pytest.raises(ValueError, match=r"^data: expected text with a token to predict"):
        Evaluator(model, TEXTS[3:], WindowSettings(24))
    graph, state = nnx.split(model)
    broken = nnx.merge(graph, jax.tree.map(lambda w: jnp.full_like(w, jnp.nan), state))
    evaluator = Evaluator(broken, TEXTS[:1], WindowSettings(24, batch=1))
    with pytest.raises(ValueError, match=r"^data: text 5: expected finite logits .* got nan"):
        evaluator.nats(0)


# ---- documents -----------------------------------------------------------------------------------


def test_lines_of_jsonl_are_documents(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    lines = [{"text": "two\u2028three"}, {"id": 1, "text": "four"}, {"text": ""}]
    (tmp_path / "b.jsonl").write_text(
        "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    )
    got = list(read_documents([tmp_path]))
    assert got == [("a.txt", "one\n"), ("b.jsonl:1", "two\u2028three"), ("b.jsonl:3", "four")]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '"text"', '{"text": 1}', '{"content": ""}', "[" * 2000]
)
def test_a_line_without_a_text_is_refused(line, tmp_path: Path):
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n' + line)
    with pytest.raises(
        ValueError, match=r"^data: b.jsonl, line 2: expected a JSON object"
    ) as error:
        list(read_documents([tmp_path / "b.jsonl"]))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_an_array_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected text or \.jsonl files, got the array"):
        list(read_documents([tmp_path / "tokens.npz"]))
