"""A byte-level tokenizer for a random model, in whose text many characters are incomplete.

Ids 0 to 2 are special. Then come the letters and the space, then longer tokens of three kinds,
alternately: a word with its space; one that begins and ends inside an "é"; one that begins with the
last two bytes of a "€" and ends with its first byte. Some pairs of neighbours complete each other's
characters, and others leave invalid UTF-8.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dsv3_jax.engine.device.executor import Executor
from dsv3_jax.engine.scheduling.step_plan import StepPlan
from dsv3_jax.tokenizer import Tokenizer

MAX_LEN = 96  # of the shared Generators: more than one page of the cache

BOS, EOS, TURN = range(3)  # words: ok
SPECIAL = ("<bos>", "<eos>", "<turn>")
LETTERS = tuple(bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz ")
LONG = 122  # number of longer tokens, of all three kinds


def _long(i: int) -> bytes:
    pair = list(product(b"klmnprst", b"aeiou"))[i // 3 % 40]
    core = bytes(pair) + (b"n" if i >= 120 else b"")
    return (core + b"s ", b"\xa9" + core + b"\xc3", b"\x82\xac" + core + b"\xe2")[i % 3]


FRAGMENTS = (b"", b"", b"", *LETTERS, *(_long(i) for i in range(LONG)))
"""Bytes of each token. Special tokens have none, because decoding skips them."""

VOCAB_SIZE = len(FRAGMENTS)


def as_text(tokens: Sequence[int]) -> str:
    """Decodes tokens with Python's own decoder."""
    return b"".join(FRAGMENTS[i] for i in tokens).decode("utf-8", "replace")


def stop_by_hand(tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, list[int]]:
    """Returns text and tokens of a request that checks its stop strings after every token."""
    for n in range(1, len(tokens) + 1):
        text = as_text(tokens[:n])
        if positions := [text.index(s) for s in stop if s in text]:
            return text[: min(positions)], list(tokens[:n])
    return as_text(tokens), list(tokens)


def letters(text: str) -> list[int]:
    """Encodes lower-case text with one token per letter."""
    return [3 + LETTERS.index(bytes([c])) for c in text.encode()]


def write_tokenizer(directory: Path) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json, and returns the Tokenizer."""
    vocab = {text: i for i, text in enumerate(SPECIAL)}
    vocab |= {_spelled(FRAGMENTS[i]): i for i in range(3, VOCAB_SIZE)}
    assert len(vocab) == VOCAB_SIZE
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIAL])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"add_bos_token": true, "bos_token": "<bos>", "eos_token": "<eos>"}'
    )
    return Tokenizer(directory)


def _spelled(fragment: bytes) -> str:
    """Maps bytes to the characters of a byte-level vocabulary: printable Latin-1 characters to
    themselves, the others to U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return "".join(chr(b) if b in printable else chr(0x100 + others.index(b)) for b in fragment)


def watch_dispatches(monkeypatch, seen: Callable[[StepPlan], None]) -> None:
    """Calls ``seen`` with the plan of every dispatch, once it has been launched."""
    dispatch = Executor.dispatch

    def watched(self: Executor, plan: StepPlan) -> None:
        dispatch(self, plan)
        seen(plan)

    monkeypatch.setattr(Executor, "dispatch", watched)
