"""/v1/messages with Anthropic's own client: text on the demo, tools on an engine that writes given
texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from dsv3_jax.server.anthropic.request_types import MessagesRequest
from tests.server.conftest import RunningServer
from tests.server.test_tool_parsers import v31

USER = {"role": "user", "content": "def f(x):"}
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLS = [("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo", "days": [1]}')]


def body(**fields: Any) -> dict[str, Any]:
    """Returns arguments of Anthropic's client, which itself knows no temperature."""
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": "demo", "messages": [USER], "max_tokens": 12, **greedy, **fields}


def client_of(server: RunningServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def client(server) -> Iterator[Any]:
    with client_of(server) as it:
        yield it


@pytest.fixture
def scripted_client(scripted_server, engine) -> Iterator[Any]:
    with client_of(scripted_server[0]) as it:
        yield it


def streamed(client: Any, **fields: Any) -> tuple[Any, list[Any]]:
    """Returns the message that Anthropic's client makes of a stream, and its events."""
    with client.messages.stream(**body(**fields)) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def test_text_is_that_of_the_engine(client, server):
    message = client.messages.create(**body(system="Code: "))
    prompt = server.tokenizer.chat([{"role": "system", "content": "Code: "}, USER])
    expected = server.engine.submit(prompt, max_new_tokens=12).result(60)
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected.text)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "max_tokens", "demo")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
    assert usage.output_tokens == 12


def test_a_stream_is_the_text(client):
    whole = client.messages.create(**body(max_tokens=10))
    message, events = streamed(client, max_tokens=10)
    assert message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == 10
    kinds = [event.type for event in events if event.type not in ("text", "content_block_delta")]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_stop_sequences(client):
    text = client.messages.create(**body(max_tokens=24)).content[0].text
    stop = text[10:14]
    for message in (
        client.messages.create(**body(max_tokens=24, stop_sequences=["\0", stop])),
        streamed(client, max_tokens=24, stop_sequences=["\0", stop])[0],
    ):
        assert message.content[0].text == text[: text.index(stop)]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_stop_sequence_at_the_beginning(scripted_client, engine):
    engine.text = "Hello"
    message = scripted_client.messages.create(**body(stop_sequences=["He"]))
    assert (message.content, message.stop_sequence) == ([], "He")


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("piece_tokens", [1, 10**6])
def test_a_stop_sequence_is_named_if_it_ended_the_answer(
    scripted_client, engine, has_tools, piece_tokens
):
    """EOS is none of a stop sequence that is the beginning of its text."""
    eos = engine.tokenizer.eos_token
    cases = [
        ("Hello" + eos, ["<", "<｜end", "｜>", ">"], "Hello", ("end_turn", None)),
        ("Hello" + eos, [eos[:4], eos], "Hello", ("stop_sequence", eos)),
        ("Hello <b>" + eos, ["<", "<b"], "Hello ", ("stop_sequence", "<")),
        ("Hello <b>" + eos, ["<b>", "b>"], "Hello ", ("stop_sequence", "<b>")),
        ("世界" + eos, ["界", "<"], "世", ("stop_sequence", "界")),
    ]
    engine.piece_tokens = piece_tokens
    tools = {"tools": [TOOL]} if has_tools else {}
    for engine.text, stops, text, expected in cases:
        fields = {"stop_sequences": stops, **tools}
        for message in (
            scripted_client.messages.create(**body(**fields)),
            streamed(scripted_client, **fields)[0],
        ):
            assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
                text,
                *expected,
            )


def test_the_assistants_messages_are_one_turn(scripted_client, engine):
    """Results of tools follow all calls, as in Anthropic's API."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    history = [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, call]},
        {"role": "assistant", "content": "and"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
    ]
    messages = MessagesRequest(model="demo", messages=history, max_tokens=1).conversation().messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    answer = messages[1]
    assert (answer["reasoning_content"], answer["content"]) == ("t", "and")
    assert [each["id"] for each in answer["tool_calls"]] == ["c"]


def test_counting(client, server):
    count = client.messages.count_tokens(model="demo", messages=[USER], system="Code: ")
    prompt = server.tokenizer.chat([{"role": "system", "content": "Code: "}, USER])
    assert count.input_tokens == len(prompt)


@pytest.mark.parametrize("piece_tokens", [1, 9, 10**6])
def test_thinking_text_and_tools(scripted_client, engine, piece_tokens):
    engine.text = f"Need it.</think>Ok.{v31(*CALLS)}{engine.tokenizer.eos_token}"
    engine.piece_tokens = piece_tokens
    fields = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = scripted_client.messages.create(**body(**fields))
    message, events = streamed(scripted_client, **fields)
    for answer in (whole, message):
        assert answer.stop_reason == "tool_use"
        thinking, text, *calls = answer.content
        assert (thinking.thinking, text.text) == ("Need it.", "Ok.")
        assert [(call.type, call.name) for call in calls] == [("tool_use", "get_weather")] * 2
        assert [call.input for call in calls] == [json.loads(a) for _, a in CALLS]
        assert answer.usage.cache_read_input_tokens == 2
    assert [e.index for e in events if e.type == "content_block_stop"] == [0, 1, 2, 3]
    assert len({call.id for call in whole.content[2:]}) == 2
    prompt = engine.tokenizer.decode(engine.requests[0]["prompts"][0], skip_special_tokens=False)
    assert prompt.endswith("<｜Assistant｜><think>")
    assert "Weather of a city." in prompt


def test_a_history_with_tools(scripted_client, engine):
    engine.text = v31(*CALLS)
    first = scripted_client.messages.create(**body(tools=[TOOL]))
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": content}
        for call, content in zip(
            first.content, ("21 C", [{"type": "text", "text": "3 C"}]), strict=True
        )
    ]
    history = [
        USER,
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
    ]
    scripted_client.messages.create(**body(messages=history, tools=[TOOL]))
    prompt = engine.tokenizer.decode(engine.requests[-1]["prompts"][0], skip_special_tokens=False)
    outputs = "".join(f"<｜tool▁output▁begin｜>{t}<｜tool▁output▁end｜>" for t in ("21 C", "3 C"))
    expected = f"{v31(*CALLS)}<｜end▁of▁sentence｜>{outputs}<｜User｜>And now?"
    # The tokens around results are no tokens of this vocabulary, but text.
    assert expected in prompt


def test_tool_choice(scripted_client, engine):
    engine.text = v31(*CALLS)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(scripted_client.messages.create(**body(tools=[TOOL], tool_choice=one)).content) == 1
    none = {"type": "none"}
    message = scripted_client.messages.create(**body(tools=[TOOL], tool_choice=none))
    assert (message.content[0].type, message.stop_reason) == ("text", "end_turn")
    assert engine.requests[-1]["skip_special_tokens"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (" \n", {}),
        ('{"a": 1}', {"a": 1}),
        *(
            (text, {"INVALID_JSON": text})
            for text in (
                *("no JSON", "[1]", "null", '"x"', '{"a": ', '{"a": NaN}', '{"a": 1e999}'),
                *('{"a": "\\ud800"}', '{"a": ' * 200 + "1" + "}" * 200),
            )
        ),
    ],
)
def test_the_input_of_a_call_is_an_object(scripted_client, engine, arguments, expected):
    engine.text = v31(("f", arguments))
    (block,) = scripted_client.messages.create(**body(tools=[TOOL])).content
    assert block.input == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frobnicate": 1}, "Unrecognized request argument supplied: frobnicate"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "the user's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}],
                    }
                ]
            },
            "messages.0.content.0.type: expected no tool_use in a message of the user",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice: expected none or auto without tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "expected none or auto without tools"),
        ({"tools": [TOOL]}, "tools: expected none"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"messages": [{"role": "user", "content": "a " * 999}]}, "at most 255"),
    ],
)
def test_errors_have_the_shape_of_this_api(client, fields, message):
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**body(extra_body=fields))
    error = raised.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert message in error["error"]["message"]


def test_other_models(client):
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**body(model="claude"))


def test_an_error_in_a_stream(scripted_client, engine):
    engine.text, engine.finish_reason = "some words", "timeout"
    with pytest.raises(anthropic.APIStatusError, match="longer than the server allows"):
        streamed(scripted_client)
