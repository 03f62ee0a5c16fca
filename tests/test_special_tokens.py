"""Special tokens, and what else a tokenizer's files have stored that must not change its ids."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from dsv3_jax import tokenizer_files
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.tokenizer_files import with_bos_processor
from tests.support.tokenizer_files import (
    BOS,
    BY_ID,
    EOS,
    NAMES,
    PAD,
    SHAPES,
    TEXTS,
    TOKENS,
    TOOL,
    Shape,
    write_shape,
)

MARKED = Shape(NAMES, "be", marked="be")


@pytest.fixture(params=SHAPES)
def shape(request, tmp_path):
    """A shape whose files are in tmp_path."""
    write_shape(tmp_path, SHAPES[request.param])
    return SHAPES[request.param]


class TestShapes:
    def test_names(self, tmp_path, shape):
        ours = Tokenizer(tmp_path)
        ids = {text: id for id, text in enumerate(TOKENS)} | {None: None}
        assert (ours.bos_token, ours.eos_token) == (shape.bos, shape.eos)
        assert (ours.bos_token_id, ours.eos_token_id) == (ids[shape.bos], ids[shape.eos])

    def test_special_tokens_are_left_out_of_text(self, tmp_path, shape):
        ours = Tokenizer(tmp_path)
        left_out = {text for id, text in enumerate(TOKENS) if ours.decode([id]) == ""}
        expected = {text for text in TOKENS if text[2] in shape.special}
        assert left_out == set(ours.special_tokens) == expected
        for id, text in enumerate(TOKENS):
            assert ours.decode([id], skip_special_tokens=False) == text

    def test_they_are_single_tokens_only_in_trusted_text(self, tmp_path, shape):
        ours = Tokenizer(tmp_path)
        single = shape.special + shape.also
        for id, text in enumerate(TOKENS):
            trusted = ours.encode(text, add_special_tokens=False, split_special_tokens=False)
            assert (trusted == [id]) == (text[2] in single)
            assert len(ours.encode(text, add_special_tokens=False)) == len(text)

    def test_bos(self, tmp_path, shape):
        ours = Tokenizer(tmp_path)
        for text in TEXTS:
            plain = ours.encode(text, add_special_tokens=False)
            assert ours.encode(text) == ([0] if shape.adds_bos else []) + plain
            assert ours.decode(plain) == text

    def test_a_copy_adds_bos_itself(self, tmp_path, shape):
        """transformers ignores ``add_bos_token`` next to a tokenizer.json."""
        copied, again = tmp_path / "copied", tmp_path / "again"
        tokenizer_files.copy(tmp_path, copied)
        tokenizer_files.copy(copied, again)
        ours = Tokenizer(copied)
        library = tokenizers.Tokenizer.from_file(str(copied / "tokenizer.json"))
        library.no_truncation()
        library.no_padding()
        assert library.encode("ab").ids[:1] == ([0] if shape.adds_bos else ours.encode("a"))
        for text in TEXTS:
            assert ours.encode(text) == Tokenizer(tmp_path).encode(text)
        for path in copied.iterdir():
            assert (again / path.name).read_bytes() == path.read_bytes()


def test_new_tokens_follow_the_vocabulary(tmp_path):
    """A named token that no vocabulary contains gets the next id, as in transformers."""
    write_shape(tmp_path, Shape(NAMES | {"pad_token": "[PAD]"}, ""))
    ours = Tokenizer(tmp_path)
    assert ours.encode("[PAD]", split_special_tokens=False) == [260]
    assert ours.vocab_size == 261
    assert ours.decode([260]) == ""


def test_a_template_reads_all_names(tmp_path):
    config = NAMES | {"pad_token": PAD, "tool_token": TOOL}
    source = "{{ bos_token }}{{ pad_token }}{{ tool_token }}{{ messages[0].content }}"
    write_shape(tmp_path, Shape(config | {"chat_template": source}, ""))
    ours = Tokenizer(tmp_path)
    message = [{"role": "user", "content": f"{PAD}"}]
    assert ours.render_chat(message) == f"{BOS}{PAD}{TOOL}{PAD}"
    assert ours.chat(message) == [0, 2, 3, *ours.encode(PAD)]


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_what_its_training_stored_is_not_applied(tmp_path, setting):
    write_shape(
        tmp_path,
        Shape(NAMES | {"chat_template": "{{ messages[0].content }}x"}, "", settings=setting),
    )
    ours, text = (
        Tokenizer(tmp_path),
        "a long prompt of more than four tokens, and of more than forty",
    )
    for length in (0, 1, len(text)):
        assert len(ours.encode(text[:length])) == length
        assert len(ours.encode(text[:length], split_special_tokens=False)) == length
        assert len(ours.chat([{"role": "user", "content": text[:length]}])) == length + 1
    stored = json.loads(ours.to_json())
    assert stored["truncation"] is stored["padding"] is None


def test_merges_are_not_dropped_at_random(tmp_path):
    """Dropout of merges is a setting of a tokenizer's training."""
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.9))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    assert ours.encode("ab " * 50) == [2] * 50
    assert ours.encode("ab " * 50, split_special_tokens=False) == [2] * 50


@pytest.mark.parametrize("before", ["", "bytes", "both", "template"])
def test_a_processor_is_added_once(tmp_path, before):
    write_shape(tmp_path, MARKED._replace(settings=before))
    text = (tmp_path / "tokenizer.json").read_text("utf-8")
    changed = with_bos_processor(text, BOS)
    assert (changed == text) == (before in ("both", "template"))
    assert with_bos_processor(changed, BOS) == changed
    assert tokenizers.Tokenizer.from_str(changed).encode("a").ids.count(0) == 1
    assert {**json.loads(changed), "post_processor": None} == {
        **json.loads(text),
        "post_processor": None,
    }
    assert with_bos_processor(text, "<absent>") == text


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(NAMES | {"bos_token": 3}, ""), "tokenizer_config.json: bos_token: expected a token"),
        (Shape(NAMES | {"pad_token": {"id": 3}}, ""), "pad_token: expected a token, got {'id': 3}"),
        (
            Shape(NAMES | {"eos_token": {"content": EOS, "lstrip": 1}}, ""),
            "eos_token: expected a token",
        ),
        (
            Shape(NAMES, "", map={"eos_token": ["x"]}),
            "special_tokens_map.json: eos_token: expected a token",
        ),
        (
            Shape(NAMES | {"additional_special_tokens": TOOL}, ""),
            "additional_special_tokens: expected a list of tokens",
        ),
        (
            Shape(NAMES | {"extra_special_tokens": [TOOL, None]}, ""),
            "extra_special_tokens: expected a token, got None",
        ),
        (
            Shape(NAMES | {"added_tokens_decoder": [BOS]}, ""),
            "added_tokens_decoder: expected tokens by id",
        ),
        (
            Shape(NAMES | {"added_tokens_decoder": BY_ID | {"9": {"content": "<|new|>"}}}, ""),
            "added tokens: expected the id 260 for '<|new|>', as in tokenizer.json, got 9",
        ),
        (
            Shape(NAMES | {"added_tokens_decoder": {"1": {"content": BOS}}}, ""),
            "added tokens: expected the id 0 for '<|bos|>', as in tokenizer.json, got 1",
        ),
        (Shape(NAMES, "", added={TOOL: 7}), "expected the id 3 for '<|tool|>'"),
        (Shape(NAMES, "", added={TOOL: "3"}), "added_tokens.json: expected an id for each token"),
    ],
)
def test_a_wrong_declaration_is_named(tmp_path, shape, message):
    write_shape(tmp_path, shape)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Tokenizer(tmp_path)
    assert message in str(caught.value)
