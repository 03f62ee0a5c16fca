"""The base of all bodies of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A body, or a part of one. Fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def without_refused(body: Any, refused: Mapping[str, str]) -> Any:
    """Returns a body without fields that are refused. Clients may send them as null or empty.

    Args:
      refused: names of fields, with the reasons.

    Raises:
      ValueError: the body has a value for one of them.
    """
    if not isinstance(body, dict):
        return body
    for name, reason in refused.items():
        if body.get(name):
            raise ValueError(f"{name}: expected none: {reason}")
    return {name: value for name, value in body.items() if name not in refused}
