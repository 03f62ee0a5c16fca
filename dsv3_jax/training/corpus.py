"""What a model is trained on: text files or token arrays, as two streams of packed documents."""

from __future__ import annotations

import glob
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
_ONE_IN = 25  # of the documents, or of a single stream's tokens, is held out
_PIECE, _PIECES = 65_536, 1_024


class Corpus(NamedTuple):
    """Token ids, each document BOS ... EOS, one behind the other. A stream may be a mapped file."""

    train: Integer[np.ndarray, " N"]
    held_out: Integer[np.ndarray, " M"]

    def fingerprint(self) -> dict[str, str]:
        """Number of tokens and CRC-32 of each stream, of spread pieces where it is over 64 MiB."""
        return {name: _fingerprint(tokens) for name, tokens in self._asdict().items()}


def read_corpus(
    data: Sequence[str | os.PathLike[str]], config: ModelConfig, tokenizer: Tokenizer | None = None
) -> Corpus:
    """The corpus in one token array, or in any number of text files.

    Args:
      data: ``.npz`` with the arrays ``train`` and ``held_out``; or ``.npy``, whose last 25th is
        held out; of integers, whole documents with their BOS. Or text files, patterns (``*``,
        ``**``) and directories, of which every file counts that is not hidden and is UTF-8. One
        document in 25 is held out, by the CRC-32 of its name; where that leaves a stream empty,
        the last 25th of all tokens.
      config: of the model: vocabulary, BOS and EOS.
      tokenizer: for text.

    Raises:
      ValueError: one line: no such file, nothing in it, not UTF-8 or not token ids, an id that the
        model has no embedding for, or a tokenizer that disagrees with the model about BOS.
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
        corpus = pack(_documents(paths), tokenizer, config.bos_token_id, config.eos_token_id[0])
    for name, tokens in corpus._asdict().items():
        _check(name, tokens, config.vocab_size)
    return corpus


def is_held_out(name: str) -> bool:
    """About one document in 25, by its name alone."""
    return zlib.crc32(name.encode()) % _ONE_IN == 0


def pack(documents: Iterable[tuple[str, str]], tokenizer: Tokenizer, bos: int, eos: int) -> Corpus:
    """Tokenises (name, text) pairs, frames each as BOS ... EOS, and joins them in their order."""
    if tokenizer.bos_token_id not in (None, bos):
        raise ValueError(
            f"tokenizer: expected the model's BOS {bos} to be its {tokenizer.bos_token!r}, "
            f"got {tokenizer.bos_token_id}"
        )

    def encode(document: tuple[str, str]) -> tuple[bool, np.ndarray]:
        name, text = document
        ids = tokenizer.encode(text, add_special_tokens=False)
        return is_held_out(name), np.array([bos, *ids, eos], np.int32)

    with ThreadPoolExecutor() as pool:
        encoded = list(pool.map(encode, documents))
    streams = {part: [ids for is_held, ids in encoded if is_held == part] for part in (False, True)}
    if streams[False] and streams[True]:
        return Corpus(np.concatenate(streams[False]), np.concatenate(streams[True]))
    return _split(np.concatenate([ids for _, ids in encoded] or [np.zeros(0, np.int32)]))


def _split(tokens: np.ndarray) -> Corpus:
    kept = len(tokens) - len(tokens) // _ONE_IN
    return Corpus(tokens[:kept], tokens[kept:])


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
            found = ", ".join(stored.files) or "nothing"
            raise ValueError(f"data: {path} lacks the array {missing[0]!r}; it holds {found}")
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
            f"data: the {name} stream holds token {wrong}; expected 0 to {vocab_size - 1}, "
            "the model's vocabulary"
        )


def _documents(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name below the folder that all files share, text) of every file, by name."""
    found = {file: named for path in paths for file, named in _files(path)}
    if not found:
        raise ValueError(f"data: expected text files, found none at {', '.join(paths)}")
    root = os.path.commonpath([file.parent for file in found])
    some = False
    for file, named in sorted(found.items()):
        content = file.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            if named:
                raise ValueError(f"data: {file} is not UTF-8: {error}") from None
            continue
        if text.strip() and "\0" not in text:
            some = True
            yield file.relative_to(root).as_posix(), text
    if not some:
        raise ValueError(f"data: no text in the files at {', '.join(paths)}")


def _files(path: str) -> Iterator[tuple[Path, bool]]:
    """Files behind a path, and whether it names them itself."""
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
    step = max(len(tokens) // _PIECES, _PIECE // tokens.itemsize)
    crc = 0
    for start in range(0, len(tokens), step):
        piece = np.ascontiguousarray(tokens[start : start + _PIECE // tokens.itemsize])
        # Of the values: the same tokens may come as uint16 and as int32.
        crc = zlib.crc32(piece.astype("<i4").tobytes(), crc)
    return f"{len(tokens)} tokens, CRC-32 {crc:08x}"
