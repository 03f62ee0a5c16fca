"""Tests of the corpus: document boundaries, held-out documents, and refused data."""

import dataclasses
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax import ModelConfig, Tokenizer
from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.training.batches import held_out_batches, target_count
from dsv3_jax.training.corpus import Corpus, EndToken, is_held_out, pack, read_corpus, separator
from dsv3_jax.training.losses import target_mask

CONFIG = ModelConfig.from_hf(DEMO)
BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def without_names(tmp_path_factory) -> Tokenizer:
    """The same tokenizer, which does not say which of its special tokens is BOS."""
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    return Tokenizer(directory)


def names(held_out: bool, count: int) -> list[str]:
    """Returns file names that are held out, or that are not."""
    candidates = (f"{i}.txt" for i in range(10_000))
    return [n for n in candidates if (zlib.crc32(n.encode()) % 25 == 0) == held_out][:count]


def test_documents_are_framed_and_joined_in_order(tokenizer):
    train_names, held_out_names = names(False, 2), names(True, 1)
    texts = [
        (train_names[0], "import os\n"),
        (held_out_names[0], "x = 1\n"),
        (train_names[1], "def f():\n"),
    ]
    corpus = pack(texts, tokenizer, BOS, EOS)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for _, text in texts}
    assert BOS not in ids["import os\n"]
    want = [BOS, *ids["import os\n"], EOS, BOS, *ids["def f():\n"], EOS]
    np.testing.assert_array_equal(corpus.train, want)
    np.testing.assert_array_equal(corpus.held_out, [BOS, *ids["x = 1\n"], EOS])


def test_masks_follow_the_framing(tokenizer):
    """In two documents every position has a next-token target, except EOS of the first document.
    Two tokens ahead, the position before that EOS has none either."""
    train_names = names(False, 2)
    text = "import os\n"
    length = len(tokenizer.encode(text, add_special_tokens=False)) + 2
    stream = pack(
        [(name, text) for name in (*train_names, *names(True, 1))], tokenizer, BOS, EOS
    ).train
    assert len(stream) == 2 * length
    for ahead in (1, 2):
        mask = np.asarray(target_mask(jnp.asarray(stream[None]), BOS, ahead))[0]
        crossing = list(range(length - ahead, length))
        assert np.flatnonzero(~mask).tolist() == crossing


def test_documents_without_bos(without_names):
    """EOS separates them. The last token of a document has no target, and padding has none."""
    config = dataclasses.replace(CONFIG, bos_token_id=None)
    texts = [(name, text) for name, text in zip(names(False, 2), ("a\n", "b c\n"), strict=True)]
    ids = [without_names.encode(text, add_special_tokens=False) for _, text in texts]
    stream = pack([*texts, (names(True, 1)[0], "d\n")], without_names, None, EOS).train
    assert stream.tolist() == [*ids[0], EOS, *ids[1], EOS]
    end = separator(config)
    for ahead in (1, 2, 3):
        mask = np.asarray(target_mask(jnp.asarray(stream[None]), end, ahead))[0]
        crossing = range(max(len(ids[0]) + 1 - ahead, 0), len(ids[0]) + 1)
        assert np.flatnonzero(~mask).tolist() == [i for i in crossing if i < len(mask)]
        (batch,) = held_out_batches(stream, batch=3, length=len(stream) + 4, bos=end)
        padded = np.asarray(target_mask(jnp.asarray(batch), end, ahead))
        assert padded.sum() == target_count(batch, end, ahead) == mask.sum()


def test_a_corpus_of_a_model_without_bos(tmp_path, without_names):
    text = "import os\n" * 40
    (tmp_path / "a.txt").write_text(text)
    config = dataclasses.replace(CONFIG, bos_token_id=None)
    stream = np.concatenate(read_corpus([tmp_path / "a.txt"], config, without_names))
    assert stream.tolist() == [*without_names.encode(text, add_special_tokens=False), EOS]


def test_documents_need_a_separator():
    neither = dataclasses.replace(CONFIG, bos_token_id=None, eos_token_id=())
    with pytest.raises(ValueError, match=r"^bos_token_id, eos_token_id: expected at least one"):
        separator(neither)
    assert type(separator(CONFIG)) is int
    assert separator(dataclasses.replace(neither, eos_token_id=(5, 7))) == EndToken(5) != 5


@pytest.mark.parametrize(("bos", "eos", "name"), [(70, EOS, "bos"), (None, 71, "eos")])
def test_an_ordinary_token_is_no_boundary(without_names, bos, eos, name):
    """transformers writes the ids 0 and 1 into files of models whose vocabulary begins otherwise.
    Their losses would be masked at every such token."""
    token = bos if name == "bos" else eos
    message = f"{name}_token_id: expected a special token of the tokenizer, or null, got {token}"
    with pytest.raises(ValueError, match=f"^{message}, the ordinary token '.'$"):
        pack([("a", "text")], without_names, bos, eos)


def test_a_directory_gives_its_text_by_name(tmp_path, tokenizer):
    """Subdirectories are included. Hidden files, empty files and binary files are skipped."""
    train_names, held_out_names = names(False, 2), names(True, 1)
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / train_names[1]).write_text("b = 2\n")
    (tmp_path / train_names[0]).write_text("a = 1\n")
    (tmp_path / held_out_names[0]).write_text("c = 3\n")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "zeros").write_bytes(b"a\0b")
    (tmp_path / ".git" / "config").write_text("hidden")
    want = pack(
        [(train_names[0], "a = 1\n"), (train_names[1], "b = 2\n"), (held_out_names[0], "c = 3\n")],
        tokenizer,
        BOS,
        EOS,
    )
    for data in (
        [tmp_path],
        [tmp_path / "*.txt"],
        [tmp_path / n for n in (*train_names, *held_out_names)],
    ):
        got = read_corpus(data, CONFIG, tokenizer)
        np.testing.assert_array_equal(got.train, want.train)
        np.testing.assert_array_equal(got.held_out, want.held_out)


def test_one_document_is_held_out_by_its_end(tmp_path, tokenizer):
    (tmp_path / "book.txt").write_text("import os\n" * 200)
    corpus = read_corpus([tmp_path / "book.txt"], CONFIG, tokenizer)
    total = len(corpus.train) + len(corpus.held_out)
    assert len(corpus.held_out) == total // 25 > 10
    ids = [BOS, *tokenizer.encode("import os\n" * 200, add_special_tokens=False), EOS]
    np.testing.assert_array_equal(np.concatenate(corpus), ids)


def test_about_one_name_in_25_is_held_out():
    assert sum(is_held_out(f"lib/{i}.py") for i in range(10_000)) == pytest.approx(400, rel=0.2)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64])
def test_arrays(dtype, tmp_path):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 1000).astype(dtype)
    np.savez(tmp_path / "both.npz", train=tokens[:900], held_out=tokens[900:])
    both = read_corpus([tmp_path / "both.npz"], CONFIG)
    np.testing.assert_array_equal(both.train, tokens[:900])
    np.testing.assert_array_equal(both.held_out, tokens[900:])
    np.save(tmp_path / "one.npy", tokens)
    one = read_corpus([tmp_path / "one.npy"], CONFIG)
    assert isinstance(one.train, np.memmap), "expected a memory-mapped file"
    np.testing.assert_array_equal(one.train, tokens[:960])
    np.testing.assert_array_equal(one.held_out, tokens[960:])


def test_fingerprint_is_of_the_values():
    tokens = np.random.default_rng(0).integers(0, 2048, 300_000)
    one = Corpus(tokens.astype(np.uint16), tokens[:10].astype(np.uint16)).fingerprint()
    assert one == Corpus(tokens.astype(np.int64), tokens[:10]).fingerprint()
    assert one["train"].startswith("300000 tokens")
    for position in (0, 150_000, 299_999):
        changed = tokens.copy()
        changed[position] += 1
        assert Corpus(changed, tokens[:10]).fingerprint()["train"] != one["train"]


def refused(data, tokenizer=None) -> str:
    with pytest.raises(ValueError, match=r"expected|lacks|not|no text|differs|has") as error:
        read_corpus(data, CONFIG, tokenizer)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_arrays_are_refused(tmp_path):
    good = np.zeros(100, np.int32)
    assert "found none at" in refused([tmp_path / "no.npz"])
    (tmp_path / "text.npy").write_text("hello")
    assert "not a NumPy file" in refused([tmp_path / "text.npy"])
    (tmp_path / "text.npz").write_text("hello")
    assert "not a NumPy file" in refused([tmp_path / "text.npz"])
    np.savez(tmp_path / "train.npz", train=good)
    assert "lacks the array 'held_out'; it contains train" in refused([tmp_path / "train.npz"])
    np.save(tmp_path / "square.npy", good.reshape(10, 10))
    assert "int32 of shape (10, 10)" in refused([tmp_path / "square.npy"])
    np.save(tmp_path / "float.npy", good.astype(np.float32))
    assert "float32 of shape (100,)" in refused([tmp_path / "float.npy"])
    np.save(tmp_path / "high.npy", good + 2048)
    assert "contains token 2048; expected 0 to 2047" in refused([tmp_path / "high.npy"])
    np.save(tmp_path / "low.npy", good - 1)
    assert "contains token -1" in refused([tmp_path / "low.npy"])
    np.save(tmp_path / "short.npy", good[:24])
    assert "the held_out stream has 0 tokens" in refused([tmp_path / "short.npy"])
    assert "expected one token array" in refused([tmp_path / "short.npy", tmp_path / "low.npy"])


def test_bad_text_is_refused(tmp_path, tokenizer):
    assert "expected text files, found none at" in refused([tmp_path / "no.txt"], tokenizer)
    assert "expected text files, found none at" in refused([tmp_path], tokenizer)
    (tmp_path / "empty.txt").write_text("\n")
    assert "no text in the files" in refused([tmp_path], tokenizer)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    assert "latin.txt is not UTF-8" in refused([tmp_path / "latin.txt"], tokenizer)
    (tmp_path / "good.txt").write_text("good")
    assert "text needs a tokenizer" in refused([tmp_path])


def test_a_tokenizer_with_another_bos_is_refused(tokenizer):
    other = dataclasses.replace(CONFIG, bos_token_id=7)
    with pytest.raises(ValueError, match="expected the model's BOS 7 to be its"):
        pack([("a", "text")], tokenizer, other.bos_token_id, EOS)
