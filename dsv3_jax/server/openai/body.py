"""The base of all bodies of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """A body, or a part of one. Fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class AnswerPart(Body):
    """A part of an earlier answer. Nulls in place of fields that it does not have are left out:
    clients keep answers in types of their own, and send all fields of these back."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {k: v for k, v in part.items() if v is not None or k in cls.model_fields}


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
