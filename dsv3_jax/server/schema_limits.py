"""Limits of JSON schemas from clients: size, nesting, and what would take long to compile."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

MAX_TEXT = 2**17
"""Most characters of a schema or grammar."""

MAX_DEPTH = 100
"""Most levels of nesting of a schema."""

MAX_PATTERN = 2**15
"""Most characters of a regular expression, whose compilation can take quadratic time."""

_MAX_PROPERTIES = 1000  # of one object, which can take quadratic time, too

# An automaton has a state for each remainder of the division; 10,000 of them compile in 0.05 s.
_MAX_MULTIPLE = 10_000


def schema_text(schema: object, field: str) -> str:
    """Returns a schema as JSON. Schemas that differ in their white space have the same text.

    Args:
      field: name of the body's field, for errors.

    Raises:
      ValueError: the schema exceeds a limit.
    """
    _check(schema, field)
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"{field}: expected at most {MAX_TEXT} characters of JSON, got {len(text)}"
        )
    return text


def _check(schema: object, field: str) -> None:
    """Raises ValueError for a schema that would take too long to compile."""
    multiple = 1
    nodes: list[tuple[Any, int]] = [(schema, 0)]
    while nodes:
        node, depth = nodes.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{field}: expected at most {MAX_DEPTH} levels of nesting, got more")
        if isinstance(node, dict):
            multiple = math.lcm(multiple, _multiple(node.get("multipleOf")))
            _check_size(node.get("pattern"), str, MAX_PATTERN, f"{field}: characters of a pattern")
            _check_size(
                node.get("properties"), dict, _MAX_PROPERTIES, f"{field}: properties of an object"
            )
            nodes += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            nodes += [(value, depth + 1) for value in node]
        if multiple > _MAX_MULTIPLE:  # the whole schema's, as they can apply to the same number
            raise ValueError(
                f"{field}: multipleOf: expected {_MAX_MULTIPLE} or less as the least common"
                " multiple of all, without their decimal points; got more"
            )


def _check_size(value: Any, kind: type, most: int, name: str) -> None:
    if isinstance(value, kind) and len(value) > most:
        raise ValueError(f"{name}: expected at most {most}, got {len(value)}")


def _multiple(value: object) -> int:
    """Returns a value of multipleOf without its decimal point, or 1 if it has no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    if isinstance(value, float) and not math.isfinite(value):
        return 1
    number = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
    digits = number.normalize().as_tuple().digits
    return max(int("".join(map(str, digits[:20]))), 1)
