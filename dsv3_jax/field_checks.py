"""Checks of values that come from a file: types, ranges, allowed names, and unknown keys."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Kind = tuple[Callable[[Any], bool], str]
"""Predicate that accepts a value, and the words that describe accepted values."""


def is_int(value: Any) -> bool:
    """Returns whether ``value`` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Returns whether ``value`` is a positive integer."""
    return is_int(value) and value >= 1


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ValueError, with ``name`` and the choices, if ``value`` is not one of ``choices``."""
    if value not in tuple(choices):
        raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r}")


def check_fields(
    instance: Any,
    prefix: str = "",
    *,
    kinds: Mapping[str, Kind] | None = None,
    may_be_zero: Iterable[str] = (),
) -> None:
    """Raises ValueError if a field of a dataclass has another type than annotated or is out of
    range.

    Fields are checked if they are annotated as int, float, bool, str or a key of ``kinds``,
    possibly with ``| None``. Numbers must be finite and positive; those in ``may_be_zero`` may be
    0. Messages begin with ``prefix`` and the field's name.
    """
    known = _KINDS | dict(kinds or {})
    for field in dataclasses.fields(instance):
        annotation = str(field.type)
        kind = annotation.removesuffix(" | None")
        is_left_out = kind != annotation and getattr(instance, field.name) is None
        if is_left_out or kind not in known:
            continue
        value = getattr(instance, field.name)
        accepts, description = known[kind]
        if not accepts(value):
            raise ValueError(f"{prefix}{field.name}: expected {description}, got {value!r}")
        zero = field.name in may_be_zero
        if kind in ("int", "float") and not (value > 0 or (value == 0 and zero)):
            least = "at least 0" if zero else "more than 0"
            raise ValueError(f"{prefix}{field.name}: expected {least}, got {value}")


def refuse_unknown(name: str, keys: Iterable[str]) -> None:
    """Raises ValueError if there are keys whose meaning is unknown."""
    if listed := ", ".join(keys):
        raise ValueError(f"{name} has keys this code does not know: {listed}")


def check_accepted(name: str, value: Any, accepted: Sequence[Any], prefix: str = "") -> None:
    """Raises ValueError unless ``value`` is one of those that are implemented."""
    if value not in accepted:
        expected = f"expected {as_json(accepted[0])}, got {as_json(value)}"
        raise ValueError(f"{name}: {prefix}{expected}")


def agreed(synonyms: Mapping[str, Any]) -> Any:
    """Returns the common value of synonymous keys, or None if all are None."""
    given = {name: value for name, value in synonyms.items() if value is not None}
    first, *others = given.values() or (None,)
    if any(other != first for other in others):
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"contradictory values: {listed}")
    return first


def as_float(value: Any) -> Any:
    """Converts integers to float, because JSON writes 1e4 and 10000 alike. Other values stay."""
    return float(value) if is_int(value) else value


def as_json(value: Any) -> str:
    """Returns ``value`` as JSON text, for error messages."""
    return json.dumps(value, default=repr)


def _is_finite(value: Any) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


_KINDS: dict[str, Kind] = {
    "int": (is_int, "an integer"),
    "float": (_is_finite, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a string"),
}
