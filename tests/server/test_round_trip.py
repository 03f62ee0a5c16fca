"""Answers are accepted as history, on all APIs and in all chat formats.

An engine without a model writes random answers: reasoning, text and calls in any order, whole or
cut anywhere. Clients keep them in types of their own and send them back with results of the calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.server.test_messages import TOOL as ANTHROPIC_TOOL
from tests.server.test_messages import client_of as anthropic_client
from tests.server.test_responses import TOOL as RESPONSE_TOOL
from tests.server.test_responses import client_of as openai_client
from tests.server.test_tool_parsers import invoke, kimi, v3, v31
from tests.server.test_tools import TOOLS, speaking

WRITERS: dict[str, Callable[..., str]] = {
    "deepseek-v3": v3,
    "deepseek-r1": v3,
    "deepseek-v3.1": v31,
    "deepseek-v3.2": lambda *calls: "".join(
        f"<｜DSML｜function_calls>\n{invoke(name, text)}</｜DSML｜function_calls>"
        for name, text in calls
    ),
    "kimi-k2": kimi,
    "kimi-k2-thinking": kimi,
}
ARGUMENTS = [
    *('{"city": "Rome"}', "", " \n", "{}", "[1]", "null", '"x"', "no JSON", "{", '{"city": "'),
    *('{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}', '{"<think>": "</think>"}', "{} {}"),
    '{"a": ' * 60 + "1" + "}" * 60,
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n',
    '<｜DSML｜parameter name="city" string="false">Rome</｜DSML｜parameter>\n',
    '<｜DSML｜parameter name="city" string="false">',
]
PARTS = [
    "a",
    " ",
    "\n\n",
    "世",
    "🙂",
    "</think>",
    "<think>",
    "<",
    "<｜tool▁calls▁begin｜>",
    "｜DSML｜",
]
USER = "Weather?"


def random_answer(rng: random.Random, name: str) -> str:
    def text() -> str:
        return "".join(rng.choice(PARTS) for _ in range(rng.randrange(4)))

    def calls() -> str:
        count = rng.randrange(1, 3)
        return WRITERS[name](*[("get_weather", rng.choice(ARGUMENTS)) for _ in range(count)])

    parts = [rng.choice([text, calls])() for _ in range(rng.randrange(4))]
    answer = text() + "</think>" * rng.randrange(2) + "".join(parts)
    return answer[: rng.randrange(len(answer) + 1)] if rng.random() < 0.4 else answer


def chats(client: openai.OpenAI, fields: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """Returns the answer of /v1/chat/completions as clients keep it, with results of its calls."""
    fields = {"messages": [{"role": "user", "content": USER}], "tools": TOOLS, **fields}
    if stream:
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**fields, stream=True):
            state.handle_chunk(chunk)
        message = state.current_completion_snapshot.choices[0].message
    else:
        message = client.chat.completions.create(**fields).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "21 C"}
        for call in message.tool_calls or ()
    ]
    return [message.model_dump(), *results]


def responses(client: openai.OpenAI, fields: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """Returns the items of /v1/responses, with results of its calls."""
    fields = {"input": USER, "tools": [RESPONSE_TOOL], **fields}
    if stream:
        *_, last = client.responses.create(**fields, stream=True)
        items = last.response.output
    else:
        items = client.responses.create(**fields).output
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "21 C"}
        for item in items
        if item.type == "function_call"
    ]
    return [*(item.model_dump() for item in items), *results]


def messages(
    client: anthropic.Anthropic, fields: dict[str, Any], stream: bool
) -> list[dict[str, Any]]:
    """Returns the answer of /v1/messages, with results of its calls."""
    user = {"role": "user", "content": USER}
    fields = {"messages": [user], "tools": [ANTHROPIC_TOOL], "max_tokens": 9, **fields}
    if stream:
        blocks = kept_blocks(client, fields)
    else:
        blocks = [block.model_dump() for block in client.messages.create(**fields).content]
    assert all(isinstance(b["input"], dict) for b in blocks if b["type"] == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "21 C"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    further = [{"role": "user", "content": results}] if results else []
    return [{"role": "assistant", "content": blocks}, *further]


def kept_blocks(client: anthropic.Anthropic, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the blocks of a stream. Anthropic's client fails for arguments that are no JSON, and
    asks for them to be sent back in an object."""
    blocks: list[dict[str, Any]] = []
    names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    for event in client.messages.create(**fields, stream=True):
        if event.type == "content_block_start":
            blocks.append(event.content_block.model_dump() | {"partial_json": ""})
        elif event.type == "content_block_delta":
            name = names[event.delta.type]
            blocks[event.index][name] += getattr(event.delta, name)
    for block in blocks:
        text = block.pop("partial_json")
        if block["type"] == "tool_use":
            try:
                value = json.loads(text or "{}")
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except ValueError:
                value = None
            block["input"] = value if isinstance(value, dict) else {"INVALID_JSON": text}
    return blocks


def bodies(answers: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    user = {"role": "user", "content": "And now?"}
    for path, answer in answers.items():
        name, tools = ("input", [RESPONSE_TOOL]) if path == "/v1/responses" else ("messages", TOOLS)
        tools = [ANTHROPIC_TOOL] if path == "/v1/messages" else tools
        fields = {"model": "demo", "tools": tools, name: [user, *answer, user]}
        yield path, fields | ({"max_tokens": 9} if path == "/v1/messages" else {})


@pytest.fixture(scope="module")
def clients(scripted_server) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    server = scripted_server[0]
    with openai_client(server) as one, anthropic_client(server) as other:
        yield one, other


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_answers_are_accepted_as_history(scripted_server, engine, clients, name, stream, count):
    server, rng = scripted_server[0], random.Random(f"{name}{count}")
    fields: dict[str, Any] = {"model": "demo"}
    if name in ("deepseek-v3.1", "deepseek-v3.2"):
        fields["extra_body"] = {"chat_template_kwargs": {"thinking": True}}
    called = 0
    with speaking(scripted_server, name):
        for _ in range(count):
            engine.text = random_answer(rng, name)
            engine.finish_reason = rng.choice(["stop", "length"])
            answers = {
                "/v1/chat/completions": chats(clients[0], fields, stream),
                "/v1/responses": responses(clients[0], fields, stream),
                "/v1/messages": messages(clients[1], fields, stream),
            }
            prompts = []
            for path, body in bodies(answers):
                status, _, content = server.request("POST", path, body)
                assert status == 200, (path, engine.text, content)
                ids = engine.requests[-1]["prompts"][0]
                prompts.append(engine.tokenizer.decode(ids, skip_special_tokens=False))
                assert "And now?" in prompts[-1]
            called += "21 C" in prompts[0]
            assert len({"21 C" in prompt for prompt in prompts}) == 1
    assert called
