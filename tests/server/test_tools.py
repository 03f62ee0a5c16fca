"""Tools in /v1/chat/completions, with OpenAI's own client and an engine that writes given texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from dsv3_jax import chat_formats
from dsv3_jax.server.tool_grammar import tool_call_grammar
from tests.server.conftest import RunningServer
from tests.server.scripted import ScriptedEngine
from tests.server.test_tool_parsers import dsml, kimi, v3, v31

MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": None}}},
    "strict": True,
}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = ['{"city": "Rome"}', '{"city": "Ōsaka \\"x\\"", "days": [1, 2]}']
CALLS = [("get_weather", arguments) for arguments in ARGUMENTS]
FORMATS = {"deepseek-v3": v3, "deepseek-v3.1": v31, "deepseek-v3.2": dsml, "kimi-k2": kimi}


@pytest.fixture
def client(scripted_server) -> Iterator[openai.OpenAI]:
    url = f"{scripted_server[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as it:
        yield it


@contextlib.contextmanager
def speaking(pair: tuple[RunningServer, ScriptedEngine], name: str) -> Iterator[None]:
    """Changes the chat format of a server."""
    server, engine = pair
    before = server.service.tokenizer
    after = before.with_chat_template(chat_formats.read(name))
    server.service.tokenizer = engine.tokenizer = after
    try:
        yield
    finally:
        server.service.tokenizer = engine.tokenizer = before


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "tools": TOOLS, **fields}


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """Returns the answer that OpenAI's client makes of a stream, and its chunks."""
    chunks = list(client.chat.completions.create(**body(**fields), stream=True))
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.get_final_completion(), chunks


def unparsed(client: openai.OpenAI, **fields: Any) -> Any:
    """Returns the answer of a stream, which may be cut off."""
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**body(**fields), stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


@pytest.mark.parametrize("piece_tokens", [1, 7, 10**6])
@pytest.mark.parametrize(("name", "write"), FORMATS.items())
def test_calls(scripted_server, client, engine, name, write, piece_tokens):
    eos = engine.tokenizer.eos_token
    engine.text = f"Let me look.{write(*CALLS)}{eos}"
    engine.piece_tokens = piece_tokens
    with speaking(scripted_server, name):
        whole = client.chat.completions.create(**body())
        stream, chunks = streamed(client)
    assert [request["skip_special_tokens"] for request in engine.requests] == [False, False]
    for completion in (whole, stream):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        calls = choice.message.tool_calls
        assert [(call.function.name, call.type) for call in calls] == [
            ("get_weather", "function")
        ] * 2
        assert [call.function.arguments for call in calls] == ARGUMENTS
        ids = [call.id for call in calls]
        if name == "kimi-k2":
            assert ids == ["functions.get_weather:0", "functions.get_weather:1"]
        else:
            assert len(set(ids)) == 2
            assert all(call_id.startswith("call_") for call_id in ids)
    deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    begins = [delta for delta in deltas if delta.id]
    assert [delta.function.name for delta in begins] == ["get_weather"] * 2
    rest = [delta for delta in deltas if not delta.id]
    assert all(d.type is None and d.function.name is None and d.function.arguments for d in rest)
    if piece_tokens == 1:
        assert len(rest) > 8  # arguments arrive as they are written


def test_a_call_alone_has_no_content(client, engine):
    engine.text = v31(CALLS[0])
    message = client.chat.completions.create(**body()).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1
    stream, chunks = streamed(client)
    assert not stream.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_content_and_calls(client, engine):
    engine.text = f"Need it.</think>Ok.{v31(CALLS[0])}"
    fields = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    message = client.chat.completions.create(**body(**fields)).choices[0].message
    assert (message.reasoning_content, message.content) == ("Need it.", "Ok.")
    assert message.tool_calls[0].function.arguments == ARGUMENTS[0]


def test_no_calls(client, engine):
    engine.text = f"Rome is <hot>.{engine.tokenizer.eos_token}"
    for fields in ({}, {"tool_choice": "none"}, {"tools": None}):
        choice = client.chat.completions.create(**body(**fields)).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content == "Rome is <hot>."
        assert streamed(client, **fields)[0].choices[0].message.content == "Rome is <hot>."
    prompts = [engine.tokenizer.decode(r["prompts"][0]) for r in engine.requests]
    assert ["get_weather" in prompt for prompt in prompts] == [True] * 2 + [False] * 4


def test_malformed_calls_are_content(client, engine):
    engine.text = "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>"
    choice = client.chat.completions.create(**body()).choices[0]
    assert choice.message.content == engine.text  # DeepSeek's markup is not marked special
    assert choice.finish_reason == "stop"


def test_a_cut_call_keeps_its_reason(client, engine):
    engine.text, engine.finish_reason = v31(CALLS[0]).partition("Rome")[0], "length"
    choice = client.chat.completions.create(**body()).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "'


CITY = [("get_weather", '{"city": "Rozzano", "days": 3}')]


@pytest.mark.parametrize("piece_tokens", [1, 10**6])
@pytest.mark.parametrize(("name", "write"), FORMATS.items())
@pytest.mark.parametrize("ending", ["stop", "eos", "length"])
def test_a_call_that_is_cut_off_is_not_finished(
    scripted_server, client, engine, name, write, piece_tokens, ending
):
    """By a stop string, the model's end token or the limit, in all APIs, streamed and whole."""
    engine.text, engine.piece_tokens = write(*CITY), piece_tokens
    fields: dict[str, Any] = {"stop": ["zz"]} if ending == "stop" else {}
    if ending != "stop":
        engine.text = engine.text.partition("zz")[0]
    if ending == "eos":
        engine.text += engine.tokenizer.eos_token
    engine.finish_reason = "length" if ending == "length" else "stop"
    with speaking(scripted_server, name):
        for answer in (
            client.chat.completions.create(**body(**fields)),
            unparsed(client, **fields),
        ):
            (choice,) = answer.choices
            assert choice.finish_reason == engine.finish_reason
            assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "Ro')
            with pytest.raises(ValueError, match="Unterminated string"):
                json.loads(choice.message.tool_calls[0].function.arguments)
        fields = {"stop_sequences": ["zz"]} if ending == "stop" else {}
        message = scripted_server[0].post("/v1/messages", messages_body(**fields))
        expected = {"stop": "stop_sequence", "eos": "end_turn", "length": "max_tokens"}[ending]
        assert message["stop_reason"] == expected
        if ending != "stop":  # this API has none
            response = scripted_server[0].post("/v1/responses", responses_body())
            assert response["output"][0]["status"] == "incomplete"


def messages_body(**fields: Any) -> dict[str, Any]:
    tool = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 99, "tools": [tool], **fields}


def responses_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "x", "tools": [{"type": "function", **FUNCTION}], **fields}


def test_a_finished_call_is_complete_in_responses(scripted_server, engine):
    engine.text = v31(*CALLS)
    output = scripted_server[0].post("/v1/responses", responses_body())["output"]
    assert [item["status"] for item in output] == ["completed"] * 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_body_that_cannot_be_read_is_no_call(scripted_server, client, engine, name):
    engine.text = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    engine.text += '<parameter name="city">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    engine.text += "</｜DSML｜function_calls>"
    with speaking(scripted_server, name):
        for answer in (client.chat.completions.create(**body()), streamed(client)[0]):
            assert answer.choices[0].finish_reason == "stop"
            assert not answer.choices[0].message.tool_calls
            assert answer.choices[0].message.content == engine.text


@pytest.mark.parametrize(("name", "write"), [*FORMATS.items(), ("deepseek-r1", v3)])
def test_calls_before_the_end_of_the_reasoning(scripted_server, client, engine, name, write):
    engine.text = f"Need it.{write(*CALLS)}"
    if name in ("deepseek-v3", "kimi-k2"):  # their prompts leave it to the model
        engine.text = "<think>" + engine.text
    has_switch = name in ("deepseek-v3.1", "deepseek-v3.2")
    fields = {"extra_body": {"chat_template_kwargs": {"thinking": True}} if has_switch else {}}
    with speaking(scripted_server, name):
        for answer in (
            client.chat.completions.create(**body(**fields)),
            streamed(client, **fields)[0],
        ):
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.reasoning_content == "Need it."
            assert not choice.message.content
            assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("name", "write"), FORMATS.items())
def test_a_named_tool_is_called_once(scripted_server, client, engine, name, write):
    engine.text = write(*CALLS)
    with speaking(scripted_server, name):
        fields = {"tool_choice": NAMED}
        for answer in (
            client.chat.completions.create(**body(**fields)),
            streamed(client, **fields)[0],
        ):
            assert len(answer.choices[0].message.tool_calls) == 1
        choice = {"type": "tool", "name": "get_weather"}
        message = scripted_server[0].post("/v1/messages", messages_body(tool_choice=choice))
        choice = {"type": "function", "name": "get_weather"}
        response = scripted_server[0].post("/v1/responses", responses_body(tool_choice=choice))
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert [item["type"] for item in response["output"]] == ["function_call"]


@pytest.mark.parametrize(("name", "write"), FORMATS.items())
def test_a_required_call_that_is_cut_off_leaves_no_markup(
    scripted_server, client, engine, name, write
):
    text = write(*CITY)
    engine.finish_reason = "length"
    with speaking(scripted_server, name):
        for end in (1, 5, len(text) // 3, text.index("weather"), text.index("weather") + 7):
            engine.text = text[:end]
            for answer in (
                client.chat.completions.create(**body(tool_choice="required")),
                unparsed(client, tool_choice="required"),
            ):
                assert not answer.choices[0].message.content
                assert not answer.choices[0].message.tool_calls
                assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["a:b", "a b", " a", "a\n", "", "é", 'a"', "<｜x｜>", "a" * 129])
def test_names_that_a_format_cannot_express_are_refused(scripted_server, name):
    """By all APIs, also in the history and in a choice."""
    server = scripted_server[0]
    call = {"id": "x", "type": "function", "function": {"name": name, "arguments": "{}"}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    items = [{"type": "function_call", "call_id": "x", "name": name, "arguments": "{}"}]
    use = {"type": "tool_use", "id": "x", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": "y"}
    blocks = [
        *MESSAGES,
        *({"role": r, "content": [b]} for r, b in (("assistant", use), ("user", result))),
    ]
    function = {"type": "function", "function": {**FUNCTION, "name": name}}
    for path, request in (
        ("/v1/chat/completions", body(tools=[function])),
        ("/v1/chat/completions", body(messages=history)),
        (
            "/v1/chat/completions",
            body(tool_choice={"type": "function", "function": {"name": name}}),
        ),
        ("/v1/responses", responses_body(tools=[{"type": "function", "name": name}])),
        ("/v1/responses", responses_body(input=items)),
        ("/v1/messages", messages_body(tools=[{"name": name, "input_schema": {}}])),
        ("/v1/messages", messages_body(messages=blocks)),
        ("/tokenize", {"messages": MESSAGES, "tools": [function]}),
    ):
        status, _, content = server.request("POST", path, request)
        assert status == 400
        assert "name" in json.loads(content)["error"]["message"]


def test_a_grammar_is_made_after_admission_in_a_thread(scripted_server, engine, monkeypatch):
    server, threads = scripted_server[0], []

    def make(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return tool_call_grammar(*arguments, **options)

    monkeypatch.setattr("dsv3_jax.server.conversation.tool_call_grammar", make)
    monkeypatch.setattr(server.service.admission, "open", 10**6)
    status, _ = server.refused("/v1/chat/completions", body(tool_choice="required"))
    assert (status, threads) == (503, [])
    monkeypatch.undo()
    monkeypatch.setattr("dsv3_jax.server.conversation.tool_call_grammar", make)
    engine.text = v31(*CITY)
    server.post("/v1/chat/completions", body(tool_choice="required"))
    assert [name.rpartition("_")[0] for name in threads] == ["dsv3-prompts"]
    fields = {**FUNCTION, "parameters": {"properties": {"x": {"multipleOf": 999983}}}}
    bad = body(tools=[{"type": "function", "function": fields}], tool_choice="required")
    status, error = server.refused("/v1/chat/completions", bad)
    assert (status, error["param"]) == (400, "tools")
    assert server.service.admission.open == 0


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions"])
def test_a_client_that_leaves_while_its_grammar_is_made(scripted_server, monkeypatch, path):
    """Its request does not wait for the grammar."""
    server = scripted_server[0]
    bodies = {
        "chat/completions": body(tool_choice="required"),
        "responses": responses_body(tool_choice="required"),
        "messages": messages_body(tool_choice={"type": "any"}),
        "completions": {"model": "demo", "prompt": "x", "structured_outputs": {"regex": "a"}},
    }

    async def never(source: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.service.grammars, "compile", never)
    content = json.dumps(bodies[path]).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: server.service.admission.open == 1)
    wait_until(lambda: server.service.admission.open == 0)


def wait_until(is_true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < 30
        time.sleep(0.01)


def test_one_call_alone(client, engine):
    engine.text = v31(*CALLS)
    whole = client.chat.completions.create(**body(parallel_tool_calls=False))
    stream, _ = streamed(client, parallel_tool_calls=False)
    for completion in (whole, stream):
        assert len(completion.choices[0].message.tool_calls) == 1


def test_several_answers(client, engine):
    engine.text = v31(CALLS[0])
    for completion in (client.chat.completions.create(**body(n=2)), streamed(client, n=2)[0]):
        assert [len(choice.message.tool_calls) for choice in completion.choices] == [1, 1]


@pytest.mark.parametrize("name", FORMATS)
def test_a_history_with_calls(scripted_server, client, engine, name):
    engine.text = FORMATS[name](*CALLS)
    with speaking(scripted_server, name):
        first = client.chat.completions.create(**body()).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"<result {i}｜DSML｜>"}
            for i, call in enumerate(first.tool_calls)
        ]
        history = [*MESSAGES, first.model_dump(exclude_none=True), *results]
        client.chat.completions.create(**body(messages=history))
        tokens = scripted_server[0].post("/tokenize", {"messages": history, "tools": TOOLS})
    prompt = engine.requests[-1]["prompts"][0]
    assert tokens["tokens"] == prompt
    text = engine.tokenizer.decode(prompt, skip_special_tokens=False)
    assert FORMATS[name](*CALLS).strip() in text
    assert text.index("<result 0") < text.index("<result 1")
    dsml_token = engine.tokenizer.encode("｜DSML｜", split_special_tokens=False)[-1]
    # Beyond those of the description and the calls, the text of results adds none.
    assert (name == "deepseek-v3.2") == (dsml_token in prompt)


def test_nulls_of_a_schema_reach_the_template(client, engine):
    engine.text = "x"
    client.chat.completions.create(**body())
    text = engine.tokenizer.decode(engine.requests[0]["prompts"][0])
    assert json.dumps(FUNCTION["parameters"]) in text
    assert '"strict"' not in text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": {"type": "x"}}, "tool_choice", "tool_choice: input should be 'none'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "expected the name of one of the tools, got 'other'",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type: input should be 'function'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function: field required"),
        ({"functions": [FUNCTION]}, "functions", "its successor is tools"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages",
            "messages.0.tool_call_id: expected the id of a tool call in a tool message, got None",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
            "messages",
            "messages.0.tool_call_id: expected none in a user message, got 'y'",
        ),
        (
            {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            "expected no 'tools', which is reserved",
        ),
    ],
)
def test_errors_name_the_field(scripted_server, fields, param, message):
    status, error = scripted_server[0].refused("/v1/chat/completions", body(**fields))
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


FORMATS_WITH_TOOLS = [*FORMATS, "deepseek-r1", "kimi-k2-thinking"]


@pytest.mark.parametrize("name", FORMATS_WITH_TOOLS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_call_without_arguments_in_the_history(scripted_server, engine, name, path):
    """Clients send no text, or ``{}``. All formats treat both alike."""
    server, prompts = scripted_server[0], []
    for arguments in ("{}", "", " "):
        if path == "/v1/responses":
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            output = {"type": "function_call_output", "call_id": "c", "output": "o"}
            fields: dict[str, Any] = {"input": [{"role": "user", "content": "u"}, item, output]}
        else:
            call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
            answer = {"role": "assistant", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "c", "content": "o"}
            fields = {"messages": [{"role": "user", "content": "u"}, answer, result]}
        with speaking(scripted_server, name):
            answer = server.post(path, {"model": "demo", **fields})
        is_text = path == "/tokenize"
        prompts.append(answer["tokens"] if is_text else engine.requests[-1]["prompts"][0])
    assert prompts[0] == prompts[1] == prompts[2]


def test_arguments_that_are_no_json_in_the_history(scripted_server, engine):
    """V3.2 writes parameters. It gets other arguments as one, as DeepSeek's encoder of V4 does."""
    for name in FORMATS_WITH_TOOLS:
        call = {"id": "c", "function": {"name": "f", "arguments": '{"city": "<｜User｜>'}}
        messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]
        with speaking(scripted_server, name):
            body = {"model": "demo", "messages": messages}
            tokens = scripted_server[0].post("/tokenize", body)["tokens"]
        text = engine.tokenizer.decode(tokens, skip_special_tokens=False)
        parameter = '<｜DSML｜parameter name="arguments" string="true">{"city": "<｜User｜></'
        assert (parameter if name == "deepseek-v3.2" else '{"city": "<｜User｜>') in text
        assert tokens.count(
            engine.tokenizer.encode("<｜User｜>", split_special_tokens=False)[-1]
        ) == (0 if name.startswith("kimi") else 2)


@pytest.mark.parametrize("name", ["deepseek-v3.1", "deepseek-v3.2"])
@pytest.mark.parametrize("switch", ["thinking", "enable_thinking"])
def test_names_of_the_reasoning_switch_are_synonyms(scripted_server, engine, name, switch):
    server, paths = scripted_server[0], ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
    chat = {"messages": MESSAGES, "max_tokens": 9}
    with speaking(scripted_server, name):
        for path in paths:
            fields = {"input": "x"} if path == "/v1/responses" else chat
            for value, end in ((True, "<think>"), (False, "</think>"), (None, "</think>")):
                arguments = {"chat_template_kwargs": {switch: value}}
                server.post(path, {"model": "demo", **fields, **arguments})
                ids = engine.requests[-1]["prompts"][0]
                text = engine.tokenizer.decode(ids, skip_special_tokens=False)
                assert text.endswith("<｜Assistant｜>" + end)
            both = {"thinking": True, "enable_thinking": True}
            server.post(path, {"model": "demo", **fields, "chat_template_kwargs": both})
            # They come before the API's own field.
            own = {
                "/v1/responses": {"reasoning": {"effort": "none"}},
                "/v1/messages": {"thinking": {"type": "disabled"}},
            }.get(path, {})
            arguments = {"chat_template_kwargs": {switch: True}, **own}
            server.post(path, {"model": "demo", **fields, **arguments})
            ids = engine.requests[-1]["prompts"][0]
            text = engine.tokenizer.decode(ids, skip_special_tokens=False)
            assert text.endswith("<｜Assistant｜><think>")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("deepseek-v3.1", {"enable_thinkng": True}, "reads (enable_thinking, thinking), got 'enab"),
        ("deepseek-v3.1", {"thinking": "false"}, "expected true or false as 'thinking', got 'fals"),
        ("deepseek-v3.2", {"enable_thinking": 1}, "expected true or false as 'enable_thinking'"),
        ("deepseek-v3.2", {"thinking": True, "enable_thinking": False}, "expected the same value"),
        ("deepseek-r1", {"enable_thinking": True}, "reads (it reads none), got 'enable_thinking'"),
        ("kimi-k2", {"documents": []}, "got 'documents'"),
    ],
)
def test_arguments_that_a_template_does_not_read(scripted_server, path, name, arguments, message):
    with speaking(scripted_server, name):
        fields = {"model": "demo", "messages": MESSAGES, "chat_template_kwargs": arguments}
        if path == "/v1/messages":
            fields["max_tokens"] = 9
        status, _, content = scripted_server[0].request("POST", path, fields)
    error = json.loads(content)["error"]
    assert status == 400
    assert message in error["message"]
    assert error.get("param", "chat_template_kwargs") == "chat_template_kwargs"


def test_templates_without_tools_refuse_them(scripted_server):
    server = scripted_server[0]
    with speaking(scripted_server, "moonlight"):
        status, error = server.refused("/v1/chat/completions", body())
    assert (status, error["param"]) == (400, "tools")
    assert "--chat-template selects another one" in error["message"]


@pytest.mark.parametrize("choice", ["required", "get_weather", "auto"])
def test_a_choice_becomes_a_grammar(client, engine, choice):
    """That of tests/server/test_tool_grammar.py. Here the engine ignores it."""
    engine.text = v31(*CALLS)
    named = {"type": "function", "function": {"name": choice}}
    fields = body(tool_choice=named if choice == "get_weather" else choice)
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len(engine.requests[-1]["grammars"]) == (choice != "auto")
