"""Names, ranges and checks of the settings of one request.

This module imports only the standard library, so that a command can reject a setting before it
imports JAX or loads a model. RequestReader and DraftPlan later check what depends on the model: its
vocabulary, its MTP layer, and the room for tokens.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class Default(int):
    """A default for ``max_new_tokens``. If less room is left, it is reduced to that, while the same
    number from a caller is an error."""


DEFAULT_NEW_TOKENS = Default(64)
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 8
"""Number of stop tokens that compiled programs have room for, including the model's own."""
MAX_DEPTH = 4
"""Maximum number of drafts per step."""
MAX_LOGIT_BIAS = 300
"""Number of biases that compiled programs have room for."""

_FLOAT32_MAX = 2.0**128 - 2.0**104

# Description, type, minimum and maximum of each number. NumPy's numbers have these types too.
_NUMBERS: dict[str, tuple[str, type, float, float]] = {
    "max_new_tokens": ("an integer of at least 1", numbers.Integral, 1, math.inf),
    "temperature": ("a number in [0, 3.4e38]", numbers.Real, 0, _FLOAT32_MAX),
    "top_p": ("a number in (0, 1]", numbers.Real, math.ulp(0), 1),
    "top_k": ("an integer in [0, 2**31)", numbers.Integral, 0, 2**31 - 1),
    "min_p": ("a number in [0, 1]", numbers.Real, 0, 1),
    "seed": ("an integer in [0, 2**32)", numbers.Integral, 0, 2**32 - 1),
    "n": ("an integer of at least 1", numbers.Integral, 1, math.inf),
    "presence_penalty": ("a number in [-2, 2]", numbers.Real, -2, 2),
    "frequency_penalty": ("a number in [-2, 2]", numbers.Real, -2, 2),
    # Bounded so that no logit overflows.
    "repetition_penalty": ("a number in [0.001, 1000]", numbers.Real, 1e-3, 1e3),
    "min_tokens": ("an integer of at least 0", numbers.Integral, 0, math.inf),
    "logprobs": (f"an integer from 0 to {MAX_TOP_LOGPROBS}", numbers.Integral, 0, MAX_TOP_LOGPROBS),
}

NAMES = (
    *_NUMBERS,
    *("stop", "stop_tokens", "banned_tokens", "allowed_tokens", "logit_bias", "ignore_eos"),
    "prompt_logprobs",
)
"""Names of the settings of one request other than ``draft`` and ``draft_depth``."""


def check(
    name: str, value: Any, expected: str, kind: type, minimum: float, maximum: float = math.inf
) -> None:
    """Raises ValueError unless ``value`` is a ``kind`` other than bool, in [minimum, maximum]. The
    message has ``expected``, a description of valid values."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:  # NaN compares false
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_settings(**settings: Any) -> None:
    """Checks settings of :meth:`Generator.generate`, given by name with the value for one prompt,
    and raises ValueError or TypeError. ``stop`` is a string or a collection of strings, and lists
    of tokens are sequences of ids. None for ``max_new_tokens`` or ``seed`` leaves the choice to the
    Generator."""
    draft = {name: settings.pop(name) for name in ("draft", "draft_depth") if name in settings}
    for name, value in settings.items():
        if value is not None or name not in ("max_new_tokens", "seed"):
            check_setting(name, value)
    check_draft(**draft)


def check_setting(name: str, value: Any) -> None:
    """Checks one setting other than ``draft`` and ``draft_depth``, as :func:`check_settings`."""
    if name == "prompt_logprobs":
        if value is not None:
            check(name, value, *_NUMBERS["logprobs"])
    elif name in _NUMBERS:
        check(name, value, *_NUMBERS[name])
    elif name == "stop":
        _check_stop(value)
    elif name in ("stop_tokens", "banned_tokens"):
        _check_tokens(name, value)
    elif name == "allowed_tokens":
        if value is not None:
            _check_tokens(name, value)
    elif name == "logit_bias":
        _check_logit_bias(value)
    elif name == "ignore_eos":
        if not isinstance(value, bool):
            raise ValueError(f"ignore_eos: expected True or False, got {value!r}")
    else:
        raise TypeError(f"unexpected keyword argument {name!r}")


def check_unicode(name: str, text: str) -> None:
    """Raises ValueError if ``text`` contains a lone surrogate, which has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected Unicode text, got a lone surrogate, {text[error.start]!r}, at "
            f"character {error.start}"
        ) from None


def check_draft(draft: Any = None, draft_depth: Any = 1) -> None:
    """Raises ValueError unless the depth is valid and a drafter that is a string exists."""
    if draft_depth != "auto":
        expected = f"an integer from 1 to {MAX_DEPTH}, or 'auto'"
        check("draft_depth", draft_depth, expected, numbers.Integral, 1, MAX_DEPTH)
    if isinstance(draft, str):
        parse_draft(draft)


def parse_draft(draft: str) -> tuple[str, float | None]:
    """Splits ``"mtp"``, ``"ngram"`` or ``"synthetic:RATE"`` into the kind of drafter and its
    acceptance rate, which only the last has. Raises ValueError for another name."""
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
    """Returns the error for a value of ``draft`` that is neither a drafter nor the name of one."""
    is_several = isinstance(draft, Collection) and not isinstance(draft, str)
    return ValueError(
        "draft: expected None, 'mtp', 'ngram', 'synthetic:RATE' with a rate from 0 to 1, or a "
        f"Drafter{', the same for all prompts' if is_several else ''}; got {draft!r}"
    )


def _check_stop(value: Any) -> None:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Collection) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop: expected a string or several, got {value!r}")
    if "" in strings:
        raise ValueError("stop: expected strings that are not empty, got ''")
    for text in strings:
        check_unicode("stop", text)


def _check_tokens(name: str, value: Any) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name}: expected token ids, got {value!r}")
    for i in value:
        check(name, i, "token ids of at least 0", numbers.Integral, 0)


def _check_logit_bias(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias: expected a mapping from ids to biases, got {value!r:.80}")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias: expected at most {MAX_LOGIT_BIAS} tokens, got {len(value)}")
    for token, bias in value.items():
        check("logit_bias", token, "token ids of at least 0", numbers.Integral, 0)
        check("logit_bias", bias, "biases in [-100, 100]", numbers.Real, -100, 100)
