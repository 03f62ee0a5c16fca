"""Values of flags: fields of a settings dataclass as flags, checks of flags that commands share,
and errors that name their flag. Imports no JAX.

The value of a flag that was not given is None. The command decides what it means then.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv3_jax.generation.settings import check

if TYPE_CHECKING:
    from dsv3_jax.config import ModelConfig

_METAVARS = {int: "N", float: "X"}


def add_fields(
    parser: argparse.ArgumentParser,
    title: str,
    settings: type,
    descriptions: Mapping[str, str],
    defaults: Mapping[str, str],
) -> None:
    """Adds a flag ``--some-name`` for each field ``some_name`` of a dataclass of settings that has
    a description, in a group. ``defaults`` has those to show where they are not the dataclass's
    own."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if field.name not in descriptions:
            continue
        flag = "--" + field.name.replace("_", "-")
        default = defaults.get(field.name, _show(field.default))
        text = f"{descriptions[field.name]} (default: {default})"
        group.add_argument(flag, help=text, **_argparse_settings(hints[field.name]))


def given_values(arguments: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Returns the values of the flags that were given, by field."""
    values = {f.name: getattr(arguments, f.name, None) for f in dataclasses.fields(settings)}
    return _with_tuples({name: value for name, value in values.items() if value is not None})


def recorded_values(values: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Returns the values that a run.json has for the fields of a settings dataclass. Raises
    ValueError for one without a field, of another version."""
    names = [field.name for field in dataclasses.fields(settings)]
    if unknown := [name for name in values if name not in names]:
        raise ValueError(
            f"run.json: {unknown[0]}: expected a setting of this version ({settings.__name__});"
            " resume with the version that wrote it"
        )
    return _with_tuples(values)


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """Turns errors of what a flag names into a ValueError that begins with the flag."""
    try:
        yield
    except OSError as error:
        from dsv3_jax.words import os_error_message

        raise ValueError(f"{flag}: {os_error_message(error)}") from None
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with tuples in place of the lists that argparse and JSON make of them."""
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def _show(default: Any) -> str:
    if isinstance(default, float):
        return f"{default:.3g}"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()


def _argparse_settings(hint: Any) -> dict[str, Any]:
    """Returns the keyword arguments of ``add_argument`` for a field with this type hint."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union) and bool in parts:
        (choices,) = (part for part in parts if part is not bool)
        return {"action": _SwitchOrChoice, "choices": typing.get_args(choices)}
    if kind in (types.UnionType, typing.Union):
        (hint,) = (part for part in parts if part is not types.NoneType)
        return _argparse_settings(hint)
    if kind is typing.Literal:
        return {"choices": parts}
    if kind is tuple:
        return {"type": parts[0], "nargs": len(parts), "metavar": _METAVARS[parts[0]]}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint in _METAVARS:
        return {"type": hint, "metavar": _METAVARS[hint]}
    if hint is str:
        return {"metavar": "NAME"}
    raise TypeError(f"expected a field of a type that flags support, got {hint}")


class _SwitchOrChoice(argparse.Action):
    """``--name`` is True, ``--no-name`` is False, and ``--name CHOICE`` is the choice."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any):
        opposites = [option.replace("--", "--no-", 1) for option in option_strings]
        super().__init__([*option_strings, *opposites], dest, nargs="?", **settings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        is_on = option_string in self.option_strings[: len(self.option_strings) // 2]
        if values is not None and not is_on:
            raise argparse.ArgumentError(self, f"expected no value, got {values}")
        setattr(namespace, self.dest, is_on if values is None else values)


_DEFAULT_MAX_LEN = 4096


def check_weights(arguments: argparse.Namespace) -> None:
    """Raises ValueError if ``--activations`` is given without the weights that it needs."""
    if arguments.activations and arguments.quantization not in ("fp8", "int4"):
        got = arguments.quantization or "none"
        raise ValueError(f"--activations: expected --quantization fp8 or int4 with it, got {got}")


def check_ranges(
    arguments: argparse.Namespace, ranges: Mapping[str, tuple[str, type, *tuple[float, ...]]]
) -> None:
    """Raises ValueError for a value that was given and is out of its range. ``ranges`` has what
    :func:`check` takes after the value, by the value's name."""
    for name, limits in ranges.items():
        value = getattr(arguments, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                check(f"--{name.replace('_', '-')}", each, *limits)


def draft_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns ``--draft`` and ``--draft-depth`` as settings of an engine or a request."""
    draft, depth = arguments.draft, arguments.draft_depth
    return {
        "draft": None if draft == "none" else draft,
        "draft_depth": int(depth) if depth.isdecimal() else depth,
    }


def max_len_of(arguments: argparse.Namespace, config: ModelConfig) -> int:
    """Returns ``--max-len``, or its default. Raises ValueError if the model has fewer positions."""
    most = config.max_position_embeddings
    if arguments.max_len is None:
        return min(_DEFAULT_MAX_LEN, most)
    expected = f"2 to {most} (the model's max_position_embeddings)"
    check("--max-len", arguments.max_len, expected, Integral, 2, most)
    return arguments.max_len


def read_api_key(path: Path | None) -> str | None:
    """Returns the first key of ``--api-key-file``, as ``dsv3 serve`` reads it, or None."""
    if path is None:
        return None
    with naming("--api-key-file"):
        text = path.read_text("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(
            f"--api-key-file: {path}: expected an API key on a line of its own, got none"
        )
    return keys[0]
