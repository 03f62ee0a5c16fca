"""Prompts from the command line, from files and from standard input. Imports no JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def read_prompts(sources: Sequence[tuple[str, str]]) -> list[str]:
    """The texts of ``--prompt`` and ``--prompt-file``, in their order.

    Args:
      sources: pairs of the flag and its value. ``--prompt -`` is standard input.

    Raises:
      ValueError: no source, an empty text, a file that cannot be read, standard input twice, or
        what is not UTF-8.
    """
    if not sources:
        raise ValueError("--prompt: expected a --prompt or a --prompt-file, got none")
    if list(sources).count(("--prompt", "-")) > 1:
        raise ValueError("--prompt: expected - once, for standard input is read once; got it twice")
    return [_read(flag, value) for flag, value in sources]


def _read(flag: str, value: str) -> str:
    if flag == "--prompt-file":
        name = f"{flag} {value}"
        try:
            text = _decoded(name, Path(value).read_bytes())
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


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, content[error.start], f"byte {error.start}") from None


def check_text(name: str, text: str) -> None:
    """Raises ValueError, naming the source, for text from bytes that are not UTF-8.

    Python decodes arguments, and standard input in the C locale, so that such a byte becomes a lone
    surrogate.
    """
    for at, character in enumerate(text):
        if 0xDC80 <= ord(character) <= 0xDCFF:
            raise _not_utf8(name, ord(character) - 0xDC00, f"character {at}")
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise ValueError(
                f"{name}: expected Unicode text, got the lone surrogate U+{ord(character):04X} at"
                f" character {at}"
            )


def _not_utf8(name: str, byte: int, where: str) -> ValueError:
    return ValueError(f"{name}: expected UTF-8, got the byte 0x{byte:02x} at {where}")
