"""A conversation with /v1/chat/completions, without other packages."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

Message = dict[str, str]
"""A message of a conversation, with ``role`` and ``content``."""

_SILENCE_SECONDS = 600  # a server that sends nothing for this long has failed


class Delta(NamedTuple):
    """New text of an answer."""

    content: str = ""
    reasoning: str = ""


class ChatServer:
    """A server with OpenAI's API at an address without ``/v1``. Its first model answers if none is
    named, with ``settings`` as further fields of each request. Raises ValueError if there is no
    server."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, settings: dict[str, Any]
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Without proxies, which a server of one's own is rarely behind.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.model = model or self._first_model()
        self._settings = settings

    def answer(self, messages: Sequence[Message]) -> Generator[Delta, None, None]:
        """Yields the answer to a conversation as it arrives. Closing it ends the request. Raises
        ValueError if the server refuses the request, or fails."""
        fields = {"model": self.model, "messages": list(messages), "stream": True}
        try:
            with self._open("/v1/chat/completions", fields | self._settings) as response:
                for line in response:
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    for choice in event["choices"]:
                        delta = choice["delta"]
                        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                        yield Delta(delta.get("content") or "", reasoning or "")
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"the connection ended: {error}") from None

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            try:
                return json.load(response)["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"{self._url}/v1/models: expected a list of models") from None

    def _open(self, path: str, fields: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        content = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(self._url + path, content, self._headers)
        try:
            return self._opener.open(request, timeout=_SILENCE_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(_message(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(f"{self._url}: expected a server, got: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Returns the message of a response in OpenAI's shape, or its status."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {error.code} {error.reason}"
