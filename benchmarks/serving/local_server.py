"""A server of an engine in this process, and a tokenizer for models with random weights."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsv3_jax.engine import Engine
from dsv3_jax.server.frontend.process import HttpProcess
from dsv3_jax.server.run import bind
from dsv3_jax.server.service import ServerSettings
from dsv3_jax.tokenizer import Tokenizer

_LETTERS = list("abcdefghijklmnopqrstuvwxyz")
_SPACE = "\u0120"  # as byte-level vocabularies spell it


@contextlib.contextmanager
def serving(
    engine: Engine, tokenizer: Tokenizer, model_name: str, *, max_requests: int, max_len: int
) -> Iterator[str]:
    """Serves an engine of this process from another one, as ``dsv3 serve`` does. Yields the URL."""
    settings = ServerSettings(model_name, max_len, max_requests)
    with bind("127.0.0.1", 0) as bound, HttpProcess(engine, tokenizer, settings, bound) as http:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        while True:
            try:
                with urllib.request.urlopen(f"{url}/ready"):
                    break
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 503 or engine.failure is not None:
                    raise
            except urllib.error.URLError:  # it does not listen yet
                if not http.is_alive:
                    raise
            time.sleep(0.05)
        yield url


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
