"""Base class of the answers of all endpoints that generate text."""

from __future__ import annotations

import abc
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.job import Job
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import EventFormat, EventStream, while_connected


class Answer(abc.ABC):
    """The answer to one request: a body with all completions, or a stream of events."""

    id_prefix: ClassVar[str]  # beginning of the answer's id, which tells clients the endpoint
    event_format = EventFormat()  # format of its stream

    def __init__(self, request: Request, model: str, job: Job, *, n: int = 1):
        self.id = self.id_prefix + uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self.job = job
        self.service = service_of(request)
        self.tokenizer = self.service.tokenizer
        self.n = n
        self._request = request

    @abc.abstractmethod
    def body(self, completions: list[Completion]) -> BaseModel:
        """Returns the body with all completions. It runs in a thread."""

    @abc.abstractmethod
    def events(self) -> AsyncGenerator[BaseModel, None]:
        """Yields the events of a stream."""

    async def respond(self, *, stream: bool, further: Mapping[str, Any] | None = None) -> Response:
        """Returns the response, whose whole body has the fields ``further`` too. The job is closed
        at its end, also if the client goes away."""
        self._request.state.job = self.job  # the application's caller can look at its progress
        if stream:
            return EventStream(self.events(), self.job.close, self.event_format)
        try:
            return await while_connected(self._request, self._whole(further or {}))
        finally:
            self.job.close()

    async def _whole(self, further: Mapping[str, Any]) -> Response:
        completions = await self.job.completions()

        def dump() -> str:
            body = self.body(completions)
            if further:
                return json.dumps({**body.model_dump(mode="json"), **further})
            return body.model_dump_json()

        content = await self.service.in_thread(dump, "answers")
        return Response(content, media_type="application/json")

    def usage(self, completions: list[Completion]) -> Usage:
        """Returns the usage of completions, and logs it."""
        usage = Usage.of(completions, self.n)
        self._request.state.log.update(
            usage.model_dump(include={"prompt_tokens", "completion_tokens"})
        )
        return usage

    def final_usage(self) -> Usage:
        """Returns the usage of all completions, which are at their end, and logs it."""
        return self.usage([self.job.completion(i) for i in range(len(self.job.handles))])
