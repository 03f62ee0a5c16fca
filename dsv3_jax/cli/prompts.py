"""Reads prompts from the command line, from files and from standard input. Imports no JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def read_prompts(sources: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the texts of ``--prompt`` and ``--prompt-file``, in the order of the flags.

    Args:
      sources: pairs of a flag and its value. ``--prompt -`` is standard input.

    Raises:
      ValueError: there is no source, a text is empty or not UTF-8, a file cannot be read, or
        standard input is used twice.
    """
    if not sources:
        raise ValueError("--prompt: expected a --prompt or a --prompt-file, got none")
    if list(sources).count(("--prompt", "-")) > 1:
        raise ValueError("--prompt: expected - once, as standard input is read once; got it twice")
    return [_read(flag, value) for flag, value in sources]


def _read(flag: str, value: str) -> str:
    if flag == "--prompt-file":
        name = f"{flag} {value}"
        try:
            text = _decode(name, Path(value).read_bytes())
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror or error}") from None
    elif value == "-":
        name = "standard input"
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise _not_utf8(name, error.object[error.start], f"byte {error.start}") from None
    else:
        name, text = flag, value
    check_text(name, text)
    if not text:
        raise ValueError(f"prompt: expected text, got an empty prompt from {name}")
    return text


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, content[error.start], f"byte {error.start}") from None


def check_text(name: str, text: str) -> None:
    """Checks that a text came from valid UTF-8.

    Python turns an invalid byte of an argument, and in the C locale of standard input, into a lone
    surrogate.

    Raises:
      ValueError: the text has such a character. The message has ``name``, the source of the text.
    """
    for position, character in enumerate(text):
        if 0xDC80 <= ord(character) <= 0xDCFF:
            raise _not_utf8(name, ord(character) - 0xDC00, f"character {position}")
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise ValueError(
                f"{name}: expected Unicode text, got the lone surrogate U+{ord(character):04X} at"
                f" character {position}"
            )


def _not_utf8(name: str, byte: int, where: str) -> ValueError:
    return ValueError(f"{name}: expected UTF-8, got the byte 0x{byte:02x} at {where}")
