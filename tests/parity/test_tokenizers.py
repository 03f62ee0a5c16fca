"""Compares token ids and special tokens with those of transformers' AutoTokenizer.

The directories have every form in which published checkpoints declare special tokens, or are ours.
"""

import json
import shutil
from pathlib import Path

import pytest

import dsv3_jax
from dsv3_jax import tokenizer_files
from dsv3_jax.tokenizer import Tokenizer
from tests.support.tokenizer_files import NAMES, SHAPES, TEXTS, Shape, token, write_shape

pytestmark = [pytest.mark.parity, pytest.mark.slow]


def compare(directory: Path) -> None:
    """Compares ids of trusted and of untrusted text, names and decoded text."""
    from transformers import AutoTokenizer

    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    special = {ours.special_token_id(text) for text in ours.special_tokens}
    for text in TEXTS:
        ids = ours.encode(text, split_special_tokens=False)
        assert ids == theirs.encode(text)
        # transformers splits special tokens, we split all control tokens.
        if not any(i in ours.control_tokens.keys() - special for i in ids):
            assert ours.encode(text) == theirs.encode(text, split_special_tokens=True)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("name", [n for n, shape in SHAPES.items() if shape.in_transformers])
def test_published_forms(tmp_path, name):
    write_shape(tmp_path, SHAPES[name])
    compare(tmp_path)


@pytest.mark.parametrize("name", ["flag", "bos null", "template after bytes", "by id"])
def test_copies(tmp_path, name):
    """Also where transformers ignores ``add_bos_token``, because the copy adds BOS itself."""
    write_shape(tmp_path, SHAPES[name])
    tokenizer_files.copy(tmp_path, tmp_path / "copy")
    compare(tmp_path / "copy")


def test_a_copy_whose_bos_is_in_no_vocabulary(tmp_path):
    new = token("<|new|>", special=True)
    config = NAMES | {"bos_token": "<|new|>", "added_tokens_decoder": {"260": new}}
    write_shape(tmp_path, Shape(config | {"add_bos_token": True}, ""))
    tokenizer_files.copy(tmp_path, tmp_path / "copy")
    assert Tokenizer(tmp_path / "copy").encode("a")[0] == 260
    compare(tmp_path / "copy")


@pytest.mark.parametrize("name", ["demo", "demo_sparse"])
def test_demos(tmp_path, name):
    demo = Path(dsv3_jax.__file__).parent / name
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / file, tmp_path)
    compare(tmp_path)
