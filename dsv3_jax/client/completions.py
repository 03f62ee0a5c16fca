"""One streamed request to /v1/completions, and the times of its chunks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from dsv3_jax.words import one_line

_CONNECT_SECONDS = 10
_SILENCE_SECONDS = 600  # a server that sends nothing for this long has failed


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """Times of one request. A failed one has an error."""

    prompt_tokens: int
    start: float  # time of sending, in seconds of ``time.perf_counter()``
    chunks: tuple[float, ...] = ()  # arrival time of each chunk of text, in seconds after ``start``
    output_tokens: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model of a server."""

    name: str
    max_len: int  # most tokens of a prompt and its completion together


class CompletionClient:
    """Sends requests to a server with OpenAI's API. An async context manager."""

    def __init__(self, url: str, api_key: str | None = None):
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> CompletionClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
            ),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def served_model(self) -> ServedModel:
        """Returns the first model that the server lists. Raises ValueError if there is no server,
        or its answer is not that of OpenAI's API."""
        address = f"{self._url}/v1/models"
        try:
            async with self._session.get(address) as response:
                if response.status != 200:
                    raise ValueError(f"{address}: {await _error_of(response)}")
                model = json.loads(await response.read())["data"][0]
                return ServedModel(model["id"], int(model["max_model_len"]))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ValueError(f"{address}: expected a server, got: {_line(error)}") from None
        except (LookupError, TypeError, json.JSONDecodeError):
            expected = "a list of models, with max_model_len as in vLLM"
            raise ValueError(f"{address}: expected {expected}") from None

    async def complete(
        self, model: str, prompt: Sequence[int], output_tokens: int
    ) -> RequestRecord:
        """Sends a request, greedy and without an early end, and reads its stream."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        address = f"{self._url}/v1/completions"
        chunks: list[float] = []
        tokens, error = 0, ""
        start = time.perf_counter()
        try:
            async with self._session.post(address, data=content, headers=headers) as response:
                if response.status != 200:
                    error = await _error_of(response)
                else:
                    async for event in _events(response):
                        if "error" in event:
                            error = str(event["error"]["message"])
                        if event.get("choices"):
                            chunks.append(time.perf_counter() - start)
                        if event.get("usage"):
                            tokens = event["usage"]["completion_tokens"]
                    if not (error or tokens):
                        error = "expected a usage in the last event of the stream, got none"
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as raised:
            error = _line(raised)
        return RequestRecord(len(prompt), start, tuple(chunks), tokens, error)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream, without the last one, ``[DONE]``."""
    async for line in response.content:
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[5:])


async def _error_of(response: aiohttp.ClientResponse) -> str:
    """Returns the status and message of a response that is not a success."""
    text = await response.text(errors="replace")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = text
    return f"status {response.status}: {one_line(message, 300)}"


def _line(error: BaseException) -> str:
    return one_line(str(error), 300) or type(error).__name__
