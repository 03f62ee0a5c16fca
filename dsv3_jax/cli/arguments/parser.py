"""An ArgumentParser that complains in one line, by the name of what is wrong."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Names an unknown flag and the nearest one that there is, rather than what is missing because
    of it, and refers to the help of the subcommand it was given to."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        for word in self._own(words):
            flag = word.partition("=")[0]
            if _is_flag(word) and flag not in self._option_string_actions:
                self.error(f"unknown argument {flag}" + nearest(flag, self._option_string_actions))
        parsed, extra = super().parse_known_args(words, namespace)
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        return parsed, extra

    def _own(self, words: list[str]) -> list[str]:
        """The words before those of a subcommand, or before ``--``."""
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


def nearest(word: str, names: Iterable[str]) -> str:
    """``"; did you mean X?"``, where X begins with ``word`` or is spelt like it; empty if no name
    does."""
    spelt = {name.lstrip("-"): name for name in names}
    bare = word.lstrip("-")
    found = [each for each in spelt if bare and each.startswith(bare)]
    found = found or difflib.get_close_matches(bare, spelt, n=1, cutoff=0.7)
    return f"; did you mean {spelt[found[0]]}?" if found else ""


def _is_flag(word: str) -> bool:
    """Whether argparse takes a word for a flag, known or not."""
    number = re.fullmatch(r"-\d+|-\d*\.\d+", word)
    return len(word) > 1 and word.startswith("-") and not number and " " not in word
