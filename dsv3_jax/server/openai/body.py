"""The base of all bodies of requests."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A body, or a part of one. Fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
