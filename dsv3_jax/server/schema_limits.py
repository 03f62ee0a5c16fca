"""Limits of JSON schemas from clients: size, nesting, and what would take long to compile."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

MAX_TEXT = 2**17
"""Most characters of a schema or grammar."""

_MAX_DEPTH = 100
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
    """Raises ValueError for a schema that is nested too deeply, or has too many multiples."""
    multiple = 1
    nodes: list[tuple[Any, int]] = [(schema, 0)]
    while nodes:
        node, depth = nodes.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"{field}: expected at most {_MAX_DEPTH} levels of nesting, got more")
        if isinstance(node, dict):
            multiple = math.lcm(multiple, _multiple(node.get("multipleOf")))
            nodes += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            nodes += [(value, depth + 1) for value in node]
        if multiple > _MAX_MULTIPLE:  # the whole schema's, as they can apply to the same number
            raise ValueError(
                f"{field}: multipleOf: expected {_MAX_MULTIPLE} or less as the least common"
                " multiple of all, without their decimal points; got more"
            )


def _multiple(value: object) -> int:
    """Returns a value of multipleOf without its decimal point, or 1 if it has no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    if isinstance(value, float) and not math.isfinite(value):
        return 1
    digits = Decimal(str(value)).normalize().as_tuple().digits
    return max(int("".join(map(str, digits[:20]))), 1)
