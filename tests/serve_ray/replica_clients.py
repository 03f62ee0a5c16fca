"""Clients of replicas: each sends its next request when it has an answer, until told to end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one request."""

    start: float
    """Time of sending, in seconds of ``time.monotonic()``."""
    seconds: float
    """Time until its end."""
    streamed: bool
    """Whether it asked for a stream."""
    status: int
    """HTTP status; 0 if the connection ended."""
    replica: str = ""
    """Id of the replica that answered."""
    attempts: int = 0
    """Replicas that the front sent it to."""
    error: str = ""
    """Message of the error, or how the answer ended early."""
    has_begun: bool = False
    """Whether text had arrived before the error."""
    is_repeat: bool = False
    """Whether the client sent it again, because its stream ended with an error."""

    @property
    def is_complete(self) -> bool:
        """Whether it has its whole answer."""
        return self.status == 200 and not self.error


class Clients:
    """A number of clients of one server, which can be changed at any time.

    Args:
      url: of the server.
      seed: of the prompts.
    """

    def __init__(self, url: str, *, max_tokens: int, seed: int = 0):
        self._url = url
        self._max_tokens = max_tokens
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted = 0
        self.open = 0
        """Requests without their whole answer."""
        self.outcomes: list[Outcome] = []

    async def run(self, script: Callable[[Clients], Any]) -> None:
        """Runs a script, which changes the number of clients, and waits for the last answers."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            await script(self)
            self.set(0)
            await asyncio.gather(*self._tasks)

    def set(self, count: int) -> None:
        """Changes the number of clients. Those that are too many end after their next answer."""
        self._wanted = count
        alive = [task for task in self._tasks if not task.done()]
        new = range(len(alive), count)
        self._tasks = [*alive, *(asyncio.create_task(self._client(i)) for i in new)]

    async def _client(self, number: int) -> None:
        while number < self._wanted:
            self.open += 1
            streamed, topic = self._random.random() < 0.5, self._random.randrange(64)
            outcome = await self._ask(streamed, topic)
            self.outcomes.append(outcome)
            if outcome.has_begun:
                outcome = await self._ask(streamed, topic)
                self.outcomes.append(dataclasses.replace(outcome, is_repeat=True))
            self.open -= 1

    async def _ask(self, streamed: bool, topic: int) -> Outcome:
        messages = [
            {"role": "system", "content": "You write Python."},
            {"role": "user", "content": f"Write function number {topic}, which reads a file."},
        ]
        body = {
            "model": "demo",
            "messages": messages,
            "max_tokens": self._max_tokens,
            "seed": topic,
            "ignore_eos": True,
            "stream": streamed,
        }
        start = time.monotonic()
        fields: dict[str, Any] = {"status": 0}
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                fields = {
                    "status": answer.status,
                    "replica": answer.headers.get("x-replica-id", ""),
                    "attempts": int(answer.headers.get("x-attempts", 0)),
                }
                text = await answer.text()
            if answer.status != 200:
                fields["error"] = text
            elif streamed:
                fields |= _stream_fields(text)
        except (aiohttp.ClientError, TimeoutError) as error:
            fields["error"] = repr(error)
        seconds = time.monotonic() - start
        return Outcome(start=start, seconds=seconds, streamed=streamed, **fields)


def _stream_fields(text: str) -> dict[str, Any]:
    """Returns how a stream ended: with all of its answer, or with one event with an error."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not events or events.pop() != "[DONE]":
        return {"error": "the stream has no end", "has_begun": bool(events)}
    errors = [json.loads(event)["error"] for event in events if '"error"' in event]
    if errors:
        assert len(errors) == 1
        return {"error": errors[0]["message"], "has_begun": len(events) > 1}
    if not any('"finish_reason":"length"' in event for event in events):
        return {"error": "the stream has no finish reason", "has_begun": True}
    return {}
