"""The training corpus: text files or token arrays, as two streams of packed documents."""

from __future__ import annotations

import glob
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from dsv3_jax.config import ModelConfig
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.words import counted

_ARRAYS = (".npy", ".npz")
_HELD_OUT_EVERY = 25  # one document in 25, or the last 25th of the tokens
_PIECE_BYTES, _MAX_PIECES = 65_536, 1_024  # of a stream, for its checksum


class EndToken(int):
    """Id of the token that ends documents, in a stream of documents that do not begin with BOS.

    It differs from the same id as BOS, because compiled programs are cached by it.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is EndToken and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((EndToken, int(self)))


class Corpus(NamedTuple):
    """Two streams of token ids. Each document is BOS ... EOS, or ... EOS for a model without BOS.
    Documents follow each other without padding. A stream may be a memory-mapped file."""

    train: Integer[np.ndarray, " N"]
    """Tokens to train on."""
    held_out: Integer[np.ndarray, " M"]
    """Tokens to evaluate on."""

    def fingerprint(self) -> dict[str, str]:
        """Returns the number of tokens and a CRC-32 of each stream. For a stream over 64 MiB the
        checksum covers pieces spread over it."""
        return {name: _fingerprint(tokens) for name, tokens in self._asdict().items()}


def read_corpus(
    data: Sequence[str | os.PathLike[str]], config: ModelConfig, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Reads a corpus from one token array or from any number of text files.

    Args:
      data: a token array, or text files. A token array contains integers, whole documents with
        their BOS and EOS: either a ``.npz`` with the arrays ``train`` and ``held_out``, or a
        ``.npy``, whose last 25th is held out. Text is given as files, patterns (``*``, ``**``) and
        directories. Hidden files in directories are skipped, and so are files that are not
        UTF-8 unless they are named themselves. One document in 25 is held out, by the CRC-32 of its
        name. If that leaves a stream empty, the last 25th of all tokens is held out instead.
      config: the model's configuration, for its vocabulary, BOS and EOS.
      tokenizer: required for text.

    Raises:
      ValueError: one line. A file is missing, empty, not UTF-8 or not an array of token ids; a
        token id is outside the vocabulary; or the tokenizer and the model have different BOS ids.
    """
    paths = [os.path.expanduser(entry) for entry in data]
    arrays = [path for path in paths if path.endswith(_ARRAYS)]
    if arrays and len(paths) > 1:
        raise ValueError(f"data: expected one token array or text files, got {', '.join(paths)}")
    if arrays:
        corpus = _read_array(Path(arrays[0]))
    elif tokenizer is None:
        raise ValueError("data: text needs a tokenizer; expected one, or a .npz of token ids")
    else:
        corpus = pack(_documents(paths), tokenizer, *document_tokens(config))
    for name, tokens in corpus._asdict().items():
        _check(name, tokens, config.vocab_size)
    return corpus


def document_tokens(config: ModelConfig) -> tuple[int | None, int | None]:
    """Returns the tokens that begin and end a document, None for those that the model lacks."""
    return config.bos_token_id, next(iter(config.eos_token_id), None)


def separator(config: ModelConfig) -> int:
    """Returns the token by which a stream's documents are told apart: BOS, or EOS as EndToken.

    Raises:
      ValueError: the model has neither.
    """
    bos, eos = document_tokens(config)
    if bos is not None:
        return bos
    if eos is None:
        raise ValueError(
            "bos_token_id, eos_token_id: expected at least one, which separates documents, got none"
        )
    return EndToken(eos)


def read_documents(data: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every document, in the order of the files' paths.

    A text file is a document. Each line of a file that ends in ``.jsonl`` is one: a JSON object
    with the text as its ``text``. An empty text is none.

    Args:
      data: files, patterns and directories, as :func:`read_corpus` takes them.

    Raises:
      ValueError: one line. A file is missing, empty or not UTF-8, is an array, or has a line
        without a text.
    """
    paths = [os.path.expanduser(entry) for entry in data]
    for path in paths:
        if path.endswith(_ARRAYS):
            raise ValueError(f"data: expected text or .jsonl files, got the array {path}")
    for name, text in _documents(paths):
        if not name.endswith(".jsonl"):
            yield name, text
            continue
        # A line ends with a line feed alone: a string may contain the other ends of lines.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)["text"]
            except (ValueError, TypeError, KeyError, IndexError, RecursionError):
                document = None
            if not isinstance(document, str):
                raise ValueError(
                    f"data: {name}, line {number}: expected a JSON object with a string text, got"
                    f" {line[:60]!r}"
                )
            if document:
                yield f"{name}:{number}", document


def is_held_out(name: str) -> bool:
    """Returns whether a document is held out, by its name alone. About one in 25 is."""
    return zlib.crc32(name.encode()) % _HELD_OUT_EVERY == 0


def check_document_tokens(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Checks that the tokens that begin and end documents are the tokenizer's own.

    Raises:
      ValueError: the tokenizer has another BOS, or ``bos`` or ``eos`` is an ordinary token of it.
    """
    if tokenizer.bos_token_id not in (None, bos):
        raise ValueError(
            f"tokenizer: expected the model's BOS {bos} to be its {tokenizer.bos_token!r}, "
            f"got {tokenizer.bos_token_id}"
        )
    for name, token in (("bos_token_id", bos), ("eos_token_id", eos)):
        if token is not None and token not in tokenizer.control_tokens:
            text = tokenizer.decode([token])
            raise ValueError(
                f"{name}: expected a special token of the tokenizer, or null, got {token}, the"
                f" ordinary token {text!r}"
            )


def pack(
    documents: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    bos: int | None,
    eos: int | None,
) -> Corpus:
    """Tokenises (name, text) pairs and concatenates them in order, each as BOS ... EOS.

    Args:
      bos: None for documents without BOS.
      eos: None for documents without EOS.

    Raises:
      ValueError: as :func:`check_document_tokens`.
    """
    check_document_tokens(tokenizer, bos, eos)
    begin, end = ([] if token is None else [token] for token in (bos, eos))

    def encode(document: tuple[str, str]) -> tuple[bool, np.ndarray]:
        name, text = document
        ids = tokenizer.encode(text, add_special_tokens=False)
        return is_held_out(name), np.array([*begin, *ids, *end], np.int32)

    with ThreadPoolExecutor() as pool:
        encoded = list(pool.map(encode, documents))
    train = [ids for held_out, ids in encoded if not held_out]
    held_out = [ids for held_out, ids in encoded if held_out]
    if train and held_out:
        return Corpus(np.concatenate(train), np.concatenate(held_out))
    return _split(np.concatenate([ids for _, ids in encoded] or [np.zeros(0, np.int32)]))


def _split(tokens: np.ndarray) -> Corpus:
    """Holds out the end of a stream."""
    end = len(tokens) - len(tokens) // _HELD_OUT_EVERY
    return Corpus(tokens[:end], tokens[end:])


def _read_array(path: Path) -> Corpus:
    if not path.is_file():
        raise ValueError(f"data: expected a file, found none at {path}")
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"data: {path} is not a NumPy file: {error}") from None
    if isinstance(stored, np.ndarray):
        return _split(_flat(path, stored))
    with stored:
        if missing := [name for name in Corpus._fields if name not in stored]:
            names = ", ".join(stored.files) or "nothing"
            raise ValueError(f"data: {path} lacks the array {missing[0]!r}; it contains {names}")
        return Corpus(*(_flat(path, stored[name]) for name in Corpus._fields))


def _flat(path: Path, tokens: np.ndarray) -> np.ndarray:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"data: {path}: expected a flat array of integers, "
            f"got {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def _check(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    if len(tokens) < 2:
        got = counted(len(tokens), "token")
        raise ValueError(f"data: the {name} stream has {got}; expected text")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"data: the {name} stream contains token {wrong}; expected 0 to {vocab_size - 1}, "
            "the model's vocabulary"
        )


def _documents(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and text of every text file, sorted by path. The name is the path below the
    common parent directory of all files."""
    files = {file: is_named for path in paths for file, is_named in _files(path)}
    if not files:
        raise ValueError(f"data: expected text files, found none at {', '.join(paths)}")
    root = os.path.commonpath([file.parent for file in files])
    is_empty = True
    for file, is_named in sorted(files.items()):
        content = file.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            if is_named:
                raise ValueError(f"data: {file} is not UTF-8: {error}") from None
            continue
        if text.strip() and "\0" not in text:
            is_empty = False
            yield file.relative_to(root).as_posix(), text
    if is_empty:
        raise ValueError(f"data: no text in the files at {', '.join(paths)}")


def _files(path: str) -> Iterator[tuple[Path, bool]]:
    """Yields the files that a path stands for, and whether the path is the file's own name rather
    than a directory or a pattern."""
    if os.path.isdir(path):
        for file in Path(path).rglob("*"):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                yield file.absolute(), False
    elif os.path.isfile(path):
        yield Path(path).absolute(), True
    else:
        for name in glob.iglob(path, recursive=True):
            if os.path.isfile(name):
                yield Path(name).absolute(), False


def _fingerprint(tokens: np.ndarray) -> str:
    piece_length = _PIECE_BYTES // tokens.itemsize
    step = max(len(tokens) // _MAX_PIECES, piece_length)
    crc = 0
    for start in range(0, len(tokens), step):
        piece = np.ascontiguousarray(tokens[start : start + piece_length])
        # The checksum is of the values, because the same tokens may be stored as uint16 or int32.
        crc = zlib.crc32(piece.astype("<i4").tobytes(), crc)
    return f"{len(tokens)} tokens, CRC-32 {crc:08x}"
