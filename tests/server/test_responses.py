"""/v1/responses with OpenAI's own client: text on the demo, tools on an engine that writes given
texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dsv3_jax.server.openai.response_types import ResponsesRequest
from tests.server.conftest import RunningServer
from tests.server.test_tool_parsers import v31

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALLS = [("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo", "days": [1]}')]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "def f(x):", "temperature": 0, **fields}


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def scripted_client(scripted_server, engine) -> Iterator[openai.OpenAI]:
    with client_of(scripted_server[0]) as it:
        yield it


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """Returns the response that OpenAI's client makes of a stream, and its events."""
    with client.responses.stream(**body(**fields)) as stream:
        events = list(stream)
        return stream.get_final_response(), events


def test_text_is_that_of_the_engine(client, server):
    response = client.responses.create(**body(instructions="Code: ", max_output_tokens=12))
    messages = [{"role": "system", "content": "Code: "}, {"role": "user", "content": "def f(x):"}]
    prompt = server.tokenizer.chat(messages)
    expected = server.engine.submit(prompt, max_new_tokens=12).result(60)
    assert response.output_text == expected.text
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.usage.input_tokens == len(prompt)
    assert response.usage.output_tokens == 12
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.object, response.instructions) == ("response", "Code: ")


def test_a_stream_is_the_text(client):
    whole = client.responses.create(**body(max_output_tokens=10))
    events = list(client.responses.create(**body(max_output_tokens=10), stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[: -len(deltas) - 4] == [
        f"response.{name}"
        for name in ("created", "in_progress", "output_item.added", "content_part.added")
    ]
    assert kinds[-4:] == [
        f"response.{name}"
        for name in ("output_text.done", "content_part.done", "output_item.done", "incomplete")
    ]
    assert events[-1].response.output_text == whole.output_text
    assert events[0].response.output == []
    assert events[0].response.status == "in_progress"


def test_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = client.responses.create(**body(text={"format": form}, max_output_tokens=40))
    assert json.loads(response.output_text)["x"] in (1, 2)
    assert response.text.format.name == "x"


@pytest.mark.parametrize("piece_tokens", [1, 9, 10**6])
def test_reasoning_text_and_calls(scripted_client, engine, piece_tokens):
    engine.text = f"Need it.</think>Ok.{v31(*CALLS)}{engine.tokenizer.eos_token}"
    engine.piece_tokens = piece_tokens
    fields = {"tools": [TOOL], "reasoning": {"effort": "high"}}
    whole = scripted_client.responses.create(**body(**fields))
    stream, events = streamed(scripted_client, **fields)
    for response in (whole, stream):
        reasoning, message, *calls = response.output
        assert reasoning.content[0].text == "Need it."
        assert (message.content[0].text, response.output_text) == ("Ok.", "Ok.")
        assert [(call.name, call.arguments) for call in calls] == CALLS
        assert {item.status for item in response.output} == {"completed"}
        assert response.status == "completed"
        assert response.usage.input_tokens_details.cached_tokens == 2
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == ["reasoning", "message", *["function_call"] * 2]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in done]
    assert added[2].arguments == ""
    prompt = engine.tokenizer.decode(engine.requests[0]["prompts"][0], skip_special_tokens=False)
    assert prompt.endswith("<｜Assistant｜><think>")
    assert "Weather of a city." in prompt


def test_a_history_with_calls(scripted_client, engine):
    engine.text = f"Ok.{v31(*CALLS)}"
    first = scripted_client.responses.create(**body(tools=[TOOL]))
    history = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    for call, output in zip(first.output[1:], ("21 C", "3 C"), strict=True):
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    scripted_client.responses.create(**body(input=history, tools=[TOOL]))
    prompt = engine.tokenizer.decode(engine.requests[-1]["prompts"][0], skip_special_tokens=False)
    outputs = "".join(f"<｜tool▁output▁begin｜>{t}<｜tool▁output▁end｜>" for t in ("21 C", "3 C"))
    assert (
        f"Weather?<｜Assistant｜></think>Ok.{v31(*CALLS)}<｜end▁of▁sentence｜>{outputs}" in prompt
    )


def test_earlier_reasoning_reaches_the_template():
    text = {"type": "reasoning_text", "text": "t"}
    thought = {"type": "reasoning", "summary": [], "content": [text]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "o"}
    history = [{"role": "user", "content": "u"}, thought, call, output, thought]
    messages = ResponsesRequest(model="demo", input=history).conversation().messages
    assert [message.get("reasoning_content") for message in messages] == [None, "t", None]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]


def _items(text: str) -> list[dict[str, Any]]:
    """Returns input items. ``r1`` is reasoning, ``m1`` a message, ``c1`` a call, ``o1`` its result,
    ``u1`` the user's; a hyphen in place of the number makes an empty one."""
    kinds = {
        "r": lambda t: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": t}]},
        "m": lambda t: {"role": "assistant", "content": t},
        "u": lambda t: {"role": "user", "content": t},
        "c": lambda t: {"type": "function_call", "call_id": t, "name": "f", "arguments": "{}"},
        "o": lambda t: {"type": "function_call_output", "call_id": t, "output": t},
    }
    items = [kinds[word[0]]("" if word[1:] == "-" else word[1:]) for word in text.split()]
    for i, item in enumerate(items):  # ids, which change nothing
        item["id"] = f"x{i}"
        item["status"] = "incomplete"
    return items


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # An answer that ended in its reasoning keeps it; the next one has its own.
        ("u1 r1 u2 r2 m2 u3", "u1 a:r1 u2 a:r2:m2 u3"),
        ("u1 r1 r2 m1 u2", "u1 a:r12:m1 u2"),
        ("u1 r- m1 u2", "u1 a:m1 u2"),
        ("u1 r1 r- u2", "u1 a:r1 u2"),
        ("u1 r1 m- u2", "u1 a:r1 u2"),
        ("u1 m- u2", "u1 a u2"),
        ("u1 r1 m1 c1 c2 o1 o2 r3 c3 o3", "u1 a:r1:m1:c1:c2 o1 o2 a:r3:c3 o3"),
        # Results follow their calls, wherever they and other parts of the answer are.
        ("u1 m1 c1 m2 o1", "u1 a:m12:c1 o1"),
        ("u1 r1 c1 r2 c2 o1 o2", "u1 a:r12:c1:c2 o1 o2"),
        ("u1 c1 c2 o2 u2 o1 u3", "u1 a:c1:c2 o2 o1 u2 u3"),
        ("u1 c1 c2 o1 c3 o2 o3", "u1 a:c1:c2 o1 o2 a:c3 o3"),
        ("u1 c1 r1 o1 u2", "u1 a:r1:c1 o1 u2"),
        # Answers without anything between them stay apart, as far as their parts tell.
        ("u1 m1 m2 u2", "u1 a:m1 a:m2 u2"),
        ("u1 r1 m1 r2 m2 u2", "u1 a:r1:m1 a:r2:m2 u2"),
        ("u1 r1 m1 r2 c2 o2", "u1 a:r1:m1 a:r2:c2 o2"),
        # Reasoning at the end is left out: the answer is written anew.
        ("u1 r1", "u1"),
        ("u1 c1 o1 r1", "u1 a:c1 o1"),
        ("u1 r1 m1 r2", "u1 a:r1:m1"),
    ],
)
def test_items_in_any_order(items, expected):
    request = ResponsesRequest(model="demo", input=_items(items))
    got = []
    for message in request.conversation().messages:
        if message["role"] == "assistant":
            parts = {"r": message.get("reasoning_content"), "m": message["content"]}
            words = [kind + text for kind, text in parts.items() if text]
            words += ["c" + call["id"] for call in message.get("tool_calls", ())]
            got.append(":".join(["a", *words]))
            # Templates of published checkpoints tell calls by the lack of content.
            assert (message["content"] is None) == ("tool_calls" in message and not parts["m"])
        else:
            got.append({"user": "u", "tool": "o"}[message["role"]] + message["content"])
    assert " ".join(got) == expected


def test_one_call_alone(scripted_client, engine):
    engine.text = v31(*CALLS)
    response = scripted_client.responses.create(**body(tools=[TOOL], parallel_tool_calls=False))
    assert [item.type for item in response.output] == ["function_call"]


def test_a_cut_call_is_incomplete(scripted_client, engine):
    engine.text, engine.finish_reason = v31(CALLS[0]).partition("Rome")[0], "length"
    (item,) = scripted_client.responses.create(**body(tools=[TOOL])).output
    assert (item.status, item.arguments) == ("incomplete", '{"city": "')


def test_an_error_in_a_stream(scripted_client, engine):
    engine.text, engine.finish_reason = "some words", "timeout"
    events = list(scripted_client.responses.create(**body(), stream=True))
    assert (events[-1].type, events[-1].code) == ("error", "timeout_error")
    assert "longer than the server allows" in events[-1].message
    assert events[-1].sequence_number == len(events) - 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no answers"),
        ({"conversation": "conv_1"}, "conversation", "stores no conversations"),
        ({"background": True}, "background", "stores no answers"),
        ({"tool_choice": "required"}, "tool_choice", "expected none or auto without tools"),
        ({"tools": [{"type": "web", "name": "x"}]}, "tools", "tools.0.type: input should be"),
        ({"tools": [TOOL]}, "tools", "the chat template of this model does not describe tools"),
        ({"text": {"format": {"type": "xml"}}}, "text", "expected tags: 'text', 'json_object'"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input.0"),
        ({"input": "a " * 999}, "input", "input: expected at most 255"),
        ({"truncation": "auto"}, "truncation", "should be 'disabled'"),
        ({"frobnicate": 1}, "frobnicate", "Unrecognized request argument supplied"),
    ],
)
def test_errors_name_the_field(server, fields, param, message):
    status, error = server.refused("/v1/responses", body(**fields))
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
