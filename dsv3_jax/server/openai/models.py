"""/v1/models: the served model."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from dsv3_jax.server.service import Service, service_of

router = APIRouter(prefix="/v1/models")


class Model(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dsv3_jax"
    max_model_len: int  # most tokens of a prompt and its completion together


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("")
async def list_models(request: Request) -> ModelList:
    """Returns the served model."""
    return ModelList(data=[_model(service_of(request))])


@router.get("/{name:path}")
async def get_model(name: str, request: Request) -> Model:
    """Returns the model with this id."""
    service = service_of(request)
    service.check_model(name)
    return _model(service)


def _model(service: Service) -> Model:
    settings = service.settings
    return Model(id=settings.model_name, created=service.created, max_model_len=settings.max_len)
