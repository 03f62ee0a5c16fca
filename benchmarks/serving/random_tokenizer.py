"""A byte-level tokenizer of any size, for models with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsv3_jax.tokenizer import Tokenizer

_LETTERS = list("abcdefghijklmnopqrstuvwxyz")
_SPACE = "\u0120"  # as byte-level vocabularies spell it


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a tokenizer of ``vocab_size`` tokens: an end-of-sequence token, the letters, and
    random words of two to nine of them. It decodes as fast as one of a published model, which has
    as many tokens of such lengths, and encodes text letter by letter."""
    random = np.random.default_rng(0)
    tokens = dict.fromkeys(["<eos>", *_LETTERS, _SPACE])
    while len(tokens) < vocab_size:
        letters = random.choice(_LETTERS, int(random.integers(2, 10)))
        tokens[(_SPACE if random.random() < 0.6 else "") + "".join(letters)] = None
    vocab = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    with tempfile.TemporaryDirectory() as directory:
        made.save(str(Path(directory) / "tokenizer.json"))
        config = Path(directory) / "tokenizer_config.json"
        config.write_text(json.dumps({"eos_token": "<eos>"}))
        return Tokenizer(Path(directory))
