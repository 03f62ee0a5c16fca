"""Names, ranges and checks of the settings that one request may have.

Imports the standard library alone: a command can refuse a setting before it imports JAX or loads a
model. What depends on the model (its vocabulary, its MTP layer, the room for tokens) is checked
later, by RequestReader and DraftPlan.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any


class Default(int):
    """A default for ``max_new_tokens``: it takes the room that is left where that is less. The same
    number given by a caller is refused there."""


DEFAULT_NEW_TOKENS = Default(64)
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 8  # slots in the compiled program, the model's own end tokens among them
MAX_DEPTH = 4  # drafts a step

_FLOAT32_MAX = 2.0**128 - 2.0**104

# What was expected, its kind, and the least and greatest value. NumPy's numbers are of these kinds.
_NUMBERS: dict[str, tuple[str, type, float, float]] = {
    "max_new_tokens": ("an integer of at least 1", numbers.Integral, 1, math.inf),
    "temperature": ("a number in [0, 3.4e38]", numbers.Real, 0, _FLOAT32_MAX),
    "top_p": ("a number in (0, 1]", numbers.Real, math.ulp(0), 1),
    "top_k": ("an integer in [0, 2**31)", numbers.Integral, 0, 2**31 - 1),
    "min_p": ("a number in [0, 1]", numbers.Real, 0, 1),
    "seed": ("an integer in [0, 2**32)", numbers.Integral, 0, 2**32 - 1),
    "n": ("an integer of at least 1", numbers.Integral, 1, math.inf),
    "logprobs": (f"an integer from 0 to {MAX_TOP_LOGPROBS}", numbers.Integral, 0, MAX_TOP_LOGPROBS),
}


def check(
    name: str, value: Any, expected: str, kind: type, least: float, most: float = math.inf
) -> None:
    """Raises ValueError unless the value is of that kind, no bool, and from least to most."""
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right or not least <= value <= most:  # NaN compares false
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_settings(**settings: Any) -> None:
    """Checks settings of :meth:`Generator.generate` by name, one value each.

    ``stop`` is a string or several, ``stop_tokens`` are several ids. None for ``max_new_tokens``
    or ``seed`` leaves the choice to the Generator.

    Raises:
      ValueError: a setting is out of range; the message names it, what was expected and what came.
      TypeError: there is no such setting.
    """
    draft = {name: settings.pop(name) for name in ("draft", "draft_depth") if name in settings}
    for name, value in settings.items():
        if value is not None or name not in ("max_new_tokens", "seed"):
            check_setting(name, value)
    check_draft(**draft)


def check_setting(name: str, value: Any) -> None:
    """Checks one setting but ``draft`` and ``draft_depth``; raises as :func:`check_settings`."""
    if name in _NUMBERS:
        check(name, value, *_NUMBERS[name])
    elif name == "stop":
        _check_stop(value)
    elif name == "stop_tokens":
        _check_stop_tokens(value)
    elif name == "ignore_eos":
        if not isinstance(value, bool):
            raise ValueError(f"ignore_eos: expected True or False, got {value!r}")
    else:
        raise TypeError(f"unexpected keyword argument {name!r}")


def check_unicode(name: str, text: str) -> None:
    """Raises ValueError for half a surrogate pair, which no encoding of Unicode has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected Unicode text, got a lone surrogate, {text[error.start]!r}, at "
            f"character {error.start}"
        ) from None


def check_draft(draft: Any = None, draft_depth: Any = 1) -> None:
    """Checks who drafts, where that is a name, and how many tokens; raises ValueError."""
    if draft_depth != "auto":
        expected = f"an integer from 1 to {MAX_DEPTH}, or 'auto'"
        check("draft_depth", draft_depth, expected, numbers.Integral, 1, MAX_DEPTH)
    if isinstance(draft, str):
        parse_draft(draft)


def parse_draft(draft: str) -> tuple[str, float | None]:
    """Kind and acceptance rate, if any, of ``"mtp"``, ``"ngram"`` or ``"synthetic:RATE"``.

    Raises:
      ValueError: no such drafter.
    """
    kind, _, text = draft.partition(":")
    if draft in ("mtp", "ngram"):
        return draft, None
    try:
        rate = float(text)
    except ValueError:
        raise unknown_draft(draft) from None
    if kind != "synthetic" or not 0.0 <= rate <= 1.0:
        raise unknown_draft(draft)
    return kind, rate


def unknown_draft(draft: object) -> ValueError:
    """The error for a value of ``draft`` that names no drafter and is none."""
    several = isinstance(draft, Collection) and not isinstance(draft, str)
    return ValueError(
        "draft: expected None, 'mtp', 'ngram', 'synthetic:RATE' with a rate from 0 to 1, or a "
        f"Drafter{', the same for all prompts' if several else ''}; got {draft!r}"
    )


def _check_stop(value: Any) -> None:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Collection) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop: expected a string or several, got {value!r}")
    if "" in strings:
        raise ValueError("stop: expected strings that are not empty, got ''")
    for text in strings:
        check_unicode("stop", text)


def _check_stop_tokens(value: Any) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"stop_tokens: expected token ids, got {value!r}")
    for i in value:
        check("stop_tokens", i, "token ids of at least 0", numbers.Integral, 0)
