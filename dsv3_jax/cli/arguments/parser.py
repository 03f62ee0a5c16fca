"""An ArgumentParser whose errors are one line that names the wrong argument."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsv3_jax.other_names import hint

_DEMOS = ("demo", "demo-sparse")  # of dsv3_jax.checkpoint.find, which imports JAX


class Parser(argparse.ArgumentParser):
    """Reports an unknown flag with the nearest known one, and refers to the subcommand's help.
    argparse itself would report the required arguments that are missing because of the typo."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        for word in self._words_of_this_parser(words):
            flag = word.partition("=")[0]
            if _is_flag(word) and flag not in (known := self._option_string_actions):
                self.error(f"unknown argument {flag}{hint(flag, known) or nearest(flag, known)}")
        parsed, extra = super().parse_known_args(words, namespace)
        if extra:
            self.error(f"unexpected argument {extra[0]!r}" + self._flag_of(extra[0]))
        return parsed, extra

    def _flag_of(self, word: str) -> str:
        """Returns ``"; did you mean --flag WORD?"`` with a flag that other projects do without."""
        is_model = word in _DEMOS or "/" in word or Path(word).is_dir()
        flags = ["--model", "--prompt"] if is_model else ["--prompt", "--model"]
        known = [flag for flag in flags if flag in self._option_string_actions]
        if not known:
            return ""
        shown = shlex.quote(word) if word.isprintable() and len(word) < 60 else "TEXT"
        return f"; did you mean {known[0]} {shown}?"

    def _words_of_this_parser(self, words: list[str]) -> list[str]:
        """Returns the words before the subcommand, or before ``--``."""
        for i, word in enumerate(words):
            if word == "--" or (self._subparsers is not None and not _is_flag(word)):
                return words[:i]
        return words

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        expected = f"expected one of {', '.join(choices)}; got {value!r}"
        raise argparse.ArgumentError(action, expected + nearest(str(value), choices))


class Flags:
    """Adds arguments of a kind to a parser or a group, with the settings of
    ``ArgumentParser.add_argument``. A default is shown behind a help text that does not describe
    it."""

    def __init__(self, parser: argparse._ActionsContainer):
        self.argument = parser.add_argument

    def integer(self, name: str, text: str, default: int | None = None, **settings: Any) -> None:
        self._add(name, text, default, {"type": int, "metavar": "N"} | settings)

    def real(
        self, name: str, text: str, default: float | Sequence[float] | None = None, **settings: Any
    ) -> None:
        self._add(name, text, default, {"type": float, "metavar": "X"} | settings)

    def path(self, name: str, text: str, **settings: Any) -> None:
        self._add(name, text, None, {"type": Path, "metavar": "FILE"} | settings)

    def text(self, name: str, text: str, default: str | None = None, **settings: Any) -> None:
        self._add(name, text, default, settings)

    def choice(
        self, name: str, text: str, default: str | None = None, *, choices: Sequence[str]
    ) -> None:
        self._add(name, text, default, {"choices": choices})

    def switch(self, name: str, text: str) -> None:
        self.argument(name, help=text, action="store_true")

    def _add(self, name: str, text: str, default: Any, settings: dict[str, Any]) -> None:
        if default is not None and "(default: " not in text:
            text += (
                f" (default: {default:g})"
                if isinstance(default, float)
                else f" (default: {default})"
            )
        self.argument(name, help=text, default=default, **settings)


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns ``"; did you mean X?"`` with the name that begins with ``word`` or is spelled like
    it, or ``""`` if there is none."""
    full_names = {name.lstrip("-"): name for name in names}
    bare = word.lstrip("-")
    close = [each for each in full_names if bare and each.startswith(bare)]
    close = close or difflib.get_close_matches(bare, full_names, n=1, cutoff=0.7)
    return f"; did you mean {full_names[close[0]]}?" if close else ""


def _is_flag(word: str) -> bool:
    """Returns whether argparse reads a word as a flag, known or not."""
    number = re.fullmatch(r"-\d+|-\d*\.\d+", word)
    return len(word) > 1 and word.startswith("-") and not number and " " not in word
