"""Flags from the fields of a settings dataclass, and the dataclass from the flags.

A flag that was not given is None: what it means then is for the command to say.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

_NUMBERS = {int: "N", float: "X"}


def add_fields(
    parser: argparse.ArgumentParser,
    title: str,
    settings: type,
    meanings: Mapping[str, str],
    defaults: Mapping[str, str],
) -> None:
    """A flag ``--some-name`` for each field ``some_name``.

    Args:
      meanings: a few words for the help, by field.
      defaults: for the help, where the command has a default of its own.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        flag = "--" + field.name.replace("_", "-")
        default = defaults.get(field.name, _show(field.default))
        says = f"{meanings[field.name]} (default: {default})"
        group.add_argument(flag, help=says, **_reading(hints[field.name]))


def given(arguments: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Values of the flags that were given, by field."""
    found = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(settings)}
    return _with_tuples({name: value for name, value in found.items() if value is not None})


def recorded(values: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Returns values that a run.json has for the fields of a settings dataclass, to make one of.

    Raises:
      ValueError: it has one that is no field, because another version wrote it.
    """
    names = [field.name for field in dataclasses.fields(settings)]
    if unknown := [name for name in values if name not in names]:
        raise ValueError(
            f"run.json: {unknown[0]}: expected a setting of this version ({settings.__name__})"
        )
    return _with_tuples(values)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with tuples for the lists that argparse and JSON make of them."""
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def _show(default: Any) -> str:
    if isinstance(default, float):
        return f"{default:.3g}"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        (hint,) = (part for part in parts if part is not types.NoneType)
        return _reading(hint)
    if kind is typing.Literal:
        return {"choices": parts}
    if kind is tuple:
        return {"type": parts[0], "nargs": len(parts), "metavar": _NUMBERS[parts[0]]}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint in _NUMBERS:
        return {"type": hint, "metavar": _NUMBERS[hint]}
    if hint is str:
        return {"metavar": "NAME"}
    raise TypeError(f"no flag for a field of type {hint}")
