"""Output of the commands: JSON on stdout for other programs, and lines on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def log(line: str) -> None:
    """Prints a line on stderr."""
    print(f"dsv3: {line}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints one line of JSON on stdout, see :func:`json_text`."""
    print(json_text(value))


def json_text(value: Any) -> str:
    """Returns one line of JSON, in which floats that are not finite become null: JSON has
    neither."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
