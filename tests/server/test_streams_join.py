"""Joined streams are the answers without a stream: text, reasoning, tool calls, log-probabilities.

An engine without a model writes random texts, token by token as an engine with a model does.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from dsv3_jax.engine import EngineRequest
from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.scheduling.step_plan import RequestResult, ScheduledRequest, StepTokens
from dsv3_jax.generation.completion import RUNNING, STOPPED
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.text import ReasoningMarkers
from dsv3_jax.tokenizer import SpecialTokenDecoder
from tests.server.conftest import RunningServer, running
from tests.server.scripted import ScriptedEngine, family_tokenizer
from tests.server.test_tool_parsers import v31
from tests.server.test_tools import TOOLS

STOPS = ["STOP", "🙂🙂", "\n\n", "世a", "</thing>", " x"]
PARTS = [
    *(
        "a",
        "é",
        "世",
        "🙂",
        " ",
        "\n",
        "x",
        "ST",
        "STO",
        "OP",
        "👩‍👩‍👧",
        "\ufffd",
        "<",
        "</",
        "</thi",
    ),
    *("word ", '{"a": "ü"}', "<th", "<think>", "</think>", "<｜tool▁calls▁beg", "`", "１"),
]


@dataclasses.dataclass
class TokenEngine(ScriptedEngine):
    """Gives every request the text in tokens, several at a time, with random log-probabilities."""

    seed: int = 0

    def _answer(
        self,
        prompt: list[int],
        *,
        skip_special_tokens: bool = True,
        reasoning: ReasoningMarkers | None = None,
        **settings: Any,
    ) -> EngineRequest:
        rng = random.Random(self.seed)
        ids = self.tokenizer.encode(self.text, add_special_tokens=False, split_special_tokens=False)
        del ids[len(ids) - rng.choice((0, 0, 1)) :]  # perhaps in the middle of a character
        stop = settings.get("stop") or ()
        request = Request(
            prompt=tuple(prompt),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=settings.get("logprobs", 0),
        )
        decoder = self.tokenizer if skip_special_tokens else SpecialTokenDecoder(self.tokenizer)
        handle = EngineRequest(lambda request: None)
        scheduled = ScheduledRequest(list(prompt), len(prompt) + len(ids))
        output = RequestOutput(handle, request, decoder, reasoning=reasoning)
        while ids and not output.is_stopped:
            count = rng.randrange(1, 5)
            new, ids = ids[:count], ids[count:]
            values = [rng.uniform(-9, 0) for _ in new]
            top = (np.array([[i, 7] for i in new]), np.array([[v, v - 1] for v in values]))
            steps = [StepTokens(new, values, 0, top)]
            output.add(RequestResult(scheduled, steps, RUNNING, False))
        output.end(STOPPED)
        return handle


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    tokenizer = family_tokenizer(tmp_path_factory.mktemp("tokenizer"), "deepseek-v3.1")
    engine = TokenEngine(tokenizer)
    with running(engine, tokenizer) as server:  # pyright: ignore[reportArgumentType]
        yield server, engine


def chunks(server: RunningServer, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    status, _, content = server.request("POST", path, {**fields, "stream": True})
    assert status == 200, content
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(PARTS) for _ in range(rng.randrange(60)))


def common_fields(rng: random.Random) -> dict[str, Any]:
    stop = rng.sample(STOPS, rng.randrange(5))
    return {"model": "demo", "n": rng.randrange(1, 3), "stop": stop}


def chat_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Returns the text of an answer, and a request."""
    fields = common_fields(rng) | {"messages": [{"role": "user", "content": "x"}]}
    text = random_text(rng)
    if rng.random() < 0.4:
        fields["chat_template_kwargs"] = {"thinking": True}
        text += "</think>" * rng.randrange(2) + random_text(rng)
    if rng.random() < 0.4:
        fields["tools"] = TOOLS
        arguments = json.dumps({"city": random_text(rng)}, ensure_ascii=False)
        text += v31(*[("get_weather", arguments)] * rng.randrange(1, 3))
    if rng.random() < 0.5:
        fields |= {"logprobs": True, "top_logprobs": rng.randrange(3)}
    return text, fields


def joined_message(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a client makes of the choices with one index."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
    for part in parts:
        delta = part["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                message["calls"].append((call["function"]["name"], ""))
            name, arguments = message["calls"][call["index"]]
            arguments += call["function"].get("arguments", "")
            message["calls"][call["index"]] = name, arguments
        message["logprobs"] += (part["logprobs"] or {}).get("content", ())
    return message


@pytest.mark.slow
def test_chats(pair):
    server, engine = pair
    rng, seen = random.Random(0), {"reasoning": 0, "calls": 0, "logprobs": 0}
    for seed in range(350):
        engine.text, fields = chat_request(rng)
        engine.seed = seed
        whole = server.post("/v1/chat/completions", fields)["choices"]
        choices = [
            c for chunk in chunks(server, "/v1/chat/completions", fields) for c in chunk["choices"]
        ]
        for choice in whole:
            parts = [part for part in choices if part["index"] == choice["index"]]
            message, got = choice["message"], joined_message(parts)
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            assert got == {
                "content": message["content"] or "",
                "reasoning": message["reasoning"] or "",
                "calls": [(call["name"], call["arguments"]) for call in calls],
                "logprobs": (choice["logprobs"] or {}).get("content", []),
            }
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
                choice["finish_reason"]
            ]
            for name in seen:
                seen[name] += bool(got[name])
    assert min(seen.values()) > 50


@pytest.mark.slow
def test_completions(pair):
    server, engine = pair
    rng = random.Random(1)
    names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
    stopped = 0
    for seed in range(150):
        fields = common_fields(rng) | {"prompt": "x = '🙂", "echo": rng.random() < 0.5}
        if rng.random() < 0.5 and not fields["echo"]:
            fields["logprobs"] = rng.randrange(3)
        engine.text, engine.seed = random_text(rng), seed
        whole = server.post("/v1/completions", fields)["choices"]
        choices = [
            c for chunk in chunks(server, "/v1/completions", fields) for c in chunk["choices"]
        ]
        for choice in whole:
            parts = [part for part in choices if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            if choice["logprobs"] is not None:
                got = {n: [e for part in parts for e in part["logprobs"][n]] for n in names}
                assert got == choice["logprobs"]
            stopped += any(stop in engine.text for stop in fields["stop"])
            new = choice["text"].removeprefix(fields["prompt"] * fields["echo"])
            assert not any(stop in new for stop in fields["stop"])
    assert stopped > 20
