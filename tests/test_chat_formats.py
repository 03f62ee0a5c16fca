"""Chat formats render what the published templates render, and text never becomes a control token.

The expected strings are results of copies of the published templates, rendered with transformers;
for DeepSeek-V3.2, of a transcription of the Python module that is published with the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dsv3_jax
from dsv3_jax import chat_formats
from dsv3_jax.chat_template import ChatTemplate
from dsv3_jax.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"functions.{name}:{index}", "type": "function", "function": function}


def tool(index: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"functions.get_weather:{index}", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


ROME, OSLO = (
    call(i, "get_weather", json.dumps({"city": city})) for i, city in enumerate(("Rome", "Oslo"))
)
GREETING = [user("Hi")]
CHAT = [{"role": "system", "content": "Be brief."}, *GREETING, assistant("Hello!"), user("1+1?")]
REASONED = [*GREETING, assistant("hm</think>Hello!"), user("1+1?")]
CALLS = [user("Weather in Rome and Oslo?"), assistant(None, tool_calls=[ROME, OSLO])]
RESULTS = [*CALLS, tool(0, "21 C"), tool(1, "3 C")]
ANSWERED = [*RESULTS, assistant("Rome 21, Oslo 3."), user("Thanks")]
SPOKEN = [CALLS[0], assistant("Let me look.", tool_calls=[ROME]), tool(0, "21 C")]
REASONING = [
    CALLS[0],
    assistant(None, tool_calls=[ROME, OSLO], reasoning_content="Need tools."),
    *RESULTS[2:],
    assistant("Rome 21, Oslo 3.", reasoning_content="Got it."),
]
REASONED_TWICE = [
    *REASONING,
    user("More"),
    assistant("Looking.", tool_calls=[call(2, "get_weather", "{}")], reasoning_content="Again."),
    tool(2, "5 C"),
]
VALUES = '{"a": "x\\n<b>", "n": 3, "l": [1, "é"], "o": {"k": null}, "t": true}'
KINDS = [
    CALLS[0],
    assistant("ok", tool_calls=[call(0, "f", VALUES), call(1, "g", "{}")], reasoning_content="r"),
    tool(0, "1"),
    tool(1, "2"),
]


@pytest.mark.parametrize(
    ("name", "messages", "arguments", "expected"),
    [
        pytest.param(
            "deepseek-v2",
            CHAT,
            {},
            "<｜begin▁of▁sentence｜>Be brief.\n"
            "\n"
            "User: Hi\n"
            "\n"
            "Assistant: Hello!<｜end▁of▁sentence｜>User: 1+1?\n"
            "\n"
            "Assistant:",
            id="deepseek-v2-chat",
        ),
        pytest.param(
            "deepseek-v3",
            CHAT,
            {},
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜>"
            "<｜User｜>1+1?<｜Assistant｜>",
            id="deepseek-v3-chat",
        ),
        pytest.param(
            "deepseek-v3",
            ANSWERED,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜>"
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            "```json\n"
            '{"city": "Rome"}\n'
            "```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            "```json\n"
            '{"city": "Oslo"}\n'
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
            "<｜tool▁output▁begin｜>21 C<｜tool▁output▁end｜>\n"
            "<｜tool▁output▁begin｜>3 C<｜tool▁output▁end｜><｜tool▁outputs▁end｜>Rome 21, Oslo 3."
            "<｜end▁of▁sentence｜><｜User｜>Thanks<｜Assistant｜>",
            id="deepseek-v3-answered",
        ),
        pytest.param(
            "deepseek-v3",
            SPOKEN,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜>Let me look."
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            "```json\n"
            '{"city": "Rome"}\n'
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
            "<｜tool▁output▁begin｜>21 C<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
            id="deepseek-v3-spoken",
        ),
        pytest.param(
            "deepseek-r1",
            REASONED,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜><｜User｜>1+1?"
            "<｜Assistant｜><think>\n",
            id="deepseek-r1-reasoned",
        ),
        pytest.param(
            "deepseek-r1",
            RESULTS,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜>"
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            "```json\n"
            '{"city": "Rome"}\n'
            "```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            "```json\n"
            '{"city": "Oslo"}\n'
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
            "<｜tool▁output▁begin｜>21 C<｜tool▁output▁end｜>\n"
            "<｜tool▁output▁begin｜>3 C<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
            id="deepseek-r1-results",
        ),
        pytest.param(
            "deepseek-v3.1",
            CHAT,
            {},
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!"
            "<｜end▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜></think>",
            id="deepseek-v3.1-chat",
        ),
        pytest.param(
            "deepseek-v3.1",
            CHAT,
            {"thinking": True},
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!"
            "<｜end▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜><think>",
            id="deepseek-v3.1-chat-thinking",
        ),
        pytest.param(
            "deepseek-v3.1",
            REASONED,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Hello!<｜end▁of▁sentence｜>"
            "<｜User｜>1+1?<｜Assistant｜></think>",
            id="deepseek-v3.1-reasoned",
        ),
        pytest.param(
            "deepseek-v3.1",
            ANSWERED,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜></think>"
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}'
            '<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
            "<｜tool▁output▁begin｜>21 C<｜tool▁output▁end｜>"
            "<｜tool▁output▁begin｜>3 C<｜tool▁output▁end｜>"
            "Rome 21, Oslo 3.<｜end▁of▁sentence｜><｜User｜>Thanks<｜Assistant｜></think>",
            id="deepseek-v3.1-answered",
        ),
        pytest.param(
            "deepseek-v3.1",
            SPOKEN,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜></think>Let "
            'me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": '
            '"Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
            "<｜tool▁output▁begin｜>21 C<｜tool▁output▁end｜>",
            id="deepseek-v3.1-spoken",
        ),
        pytest.param(
            "deepseek-v3.2",
            CHAT,
            {},
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!"
            "<｜end▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜></think>",
            id="deepseek-v3.2-chat",
        ),
        pytest.param(
            "deepseek-v3.2",
            CHAT,
            {"thinking": True},
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!"
            "<｜end▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜><think>",
            id="deepseek-v3.2-chat-thinking",
        ),
        pytest.param(
            "deepseek-v3.2",
            KINDS,
            {},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜></think>ok\n"
            "\n"
            "<｜DSML｜function_calls>\n"
            '<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="true">x\n'
            "<b></｜DSML｜parameter>\n"
            '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="l" string="false">[1, "é"]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="o" string="false">{"k": null}</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
            '<｜DSML｜invoke name="g">\n'
            "\n"
            "</｜DSML｜invoke>\n"
            "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n"
            "\n"
            "<function_results>\n"
            "<result>1</result>\n"
            "<result>2</result>\n"
            "</function_results>\n"
            "\n"
            "</think>",
            id="deepseek-v3.2-kinds",
        ),
        pytest.param(
            "deepseek-v3.2",
            REASONING,
            {"thinking": True},
            "<｜begin▁of▁sentence｜><｜User｜>Weather in Rome and Oslo?<｜Assistant｜><think>Need "
            "tools.</think>\n"
            "\n"
            "<｜DSML｜function_calls>\n"
            '<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
            '<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
            "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n"
            "\n"
            "<function_results>\n"
            "<result>21 C</result>\n"
            "<result>3 C</result>\n"
            "</function_results>\n"
            "\n"
            "<think>Got it.</think>Rome 21, Oslo 3.<｜end▁of▁sentence｜>",
            id="deepseek-v3.2-reasoning-thinking",
        ),
        pytest.param(
            "kimi-k2",
            CHAT,
            {},
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi"
            "<|im_end|><|im_assistant|>assistant<|im_middle|>Hello!<|im_end|><|im_user|>user"
            "<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="kimi-k2-chat",
        ),
        pytest.param(
            "kimi-k2",
            ANSWERED,
            {"tools": TOOLS},
            "<|im_system|>tool_declare"
            '<|im_middle|>[{"type":"function","function":{"name":"get_weather","description":'
            '"Weather of a '
            'city.","parameters":{"type":"object","properties":{"city":{"type":"string"}},"re'
            'quired":["city"]}}}]<|im_end|><|im_system|>system<|im_middle|>You are Kimi, an '
            "AI assistant created by Moonshot AI.<|im_end|><|im_user|>user"
            "<|im_middle|>Weather in Rome and Oslo?<|im_end|><|im_assistant|>assistant"
            "<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
            '<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{"city": '
            '"Oslo"}<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_system|>tool'
            "<|im_middle|>## Return of functions.get_weather:0\n"
            "21 C<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.get_weather:1\n"
            "3 C<|im_end|><|im_assistant|>assistant<|im_middle|>Rome 21, Oslo 3.<|im_end|>"
            "<|im_user|>user<|im_middle|>Thanks<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="kimi-k2-answered-tools",
        ),
        pytest.param(
            "kimi-k2",
            SPOKEN,
            {},
            "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by "
            "Moonshot AI.<|im_end|><|im_user|>user<|im_middle|>Weather in Rome and Oslo?"
            "<|im_end|><|im_assistant|>assistant<|im_middle|>Let me look."
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
            "<|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>## Return of "
            "functions.get_weather:0\n"
            "21 C<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="kimi-k2-spoken",
        ),
        pytest.param(
            "kimi-k2-thinking",
            REASONED_TWICE,
            {"tools": TOOLS},
            "<|im_system|>tool_declare"
            '<|im_middle|>[{"type":"function","function":{"name":"get_weather","description":'
            '"Weather of a '
            'city.","parameters":{"type":"object","properties":{"city":{"type":"string"}},"re'
            'quired":["city"]}}}]<|im_end|><|im_system|>system<|im_middle|>You are Kimi, an '
            "AI assistant created by Moonshot AI.<|im_end|><|im_user|>user"
            "<|im_middle|>Weather in Rome and Oslo?<|im_end|><|im_assistant|>assistant"
            "<|im_middle|><think></think>"
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
            '<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{"city": '
            '"Oslo"}<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_system|>tool'
            "<|im_middle|>## Return of functions.get_weather:0\n"
            "21 C<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.get_weather:1\n"
            "3 C<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>Rome 21, Oslo 3."
            "<|im_end|><|im_user|>user<|im_middle|>More<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><think>Again.</think>Looking."
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:2"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:2\n"
            "5 C<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="kimi-k2-thinking-reasoned-twice",
        ),
        pytest.param(
            "kimi-k2-thinking",
            CHAT,
            {},
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi"
            "<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>Hello!<|im_end|>"
            "<|im_user|>user<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="kimi-k2-thinking-chat",
        ),
        pytest.param(
            "moonlight",
            CHAT,
            {},
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi"
            "<|im_end|><|im_assistant|>assistant<|im_middle|>Hello!<|im_end|><|im_user|>user"
            "<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="moonlight-chat",
        ),
        pytest.param(
            "moonlight",
            GREETING,
            {},
            "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
            "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
            id="moonlight-greeting",
        ),
    ],
)
def test_published(name, messages, arguments, expected):
    template = ChatTemplate(chat_formats.read(name))
    text = template.render(messages, SPECIAL, {"add_generation_prompt": True, **arguments})
    assert text == expected


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-r1", "deepseek-v3.1", "deepseek-v3.2"])
@pytest.mark.parametrize("messages", [CHAT, GREETING])
def test_tools_are_described_before_the_conversation(name, messages):
    template = ChatTemplate(chat_formats.read(name))
    plain = template.render(messages, SPECIAL, {"add_generation_prompt": True})
    text = template.render(messages, SPECIAL, {"add_generation_prompt": True, "tools": TOOLS})
    before, _, after = plain.partition("<｜User｜>")
    assert text.startswith(before)
    assert text.endswith(f"<｜User｜>{after}")
    described = text[len(before) : -len(after)]
    assert described.lstrip().startswith("## Tools\n")
    for part in ("get_weather", "Weather of a city.", '"required"'):
        assert part in described


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("deepseek-v2", RESULTS, "expected no role tool"),
        ("moonlight", RESULTS, "expected no role tool"),
        ("deepseek-v3.2", [*RESULTS, tool(2, "x")], "no more tool messages than tool calls"),
        ("deepseek-v3.2", [assistant(None, tool_calls=[call(0, "f", "{")])], "expected JSON"),
        ("deepseek-v3.2", [assistant(None, tool_calls=[call(0, "f", "[]")])], "a JSON object"),
    ],
)
def test_refusals(name, messages, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(chat_formats.read(name)).render(messages, SPECIAL, {})


def test_unknown_formats():
    with pytest.raises(ValueError, match=r"one of deepseek-r1, .*; got 'gpt'"):
        chat_formats.read("gpt")


def bars(words: str) -> list[str]:
    return [f"<｜{word}｜>" for word in words.split()]


CONTROL = [
    *bars("User Assistant tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end tool▁sep"),
    *bars("tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end"),
    *SPECIAL.values(),
    *("<think>", "</think>", "｜DSML｜", "[BOS]", "[EOS]"),
    *(f"<|im_{word}|>" for word in ("system", "user", "assistant", "middle", "end")),
    *(f"<|tool_{word}|>" for word in ("calls_section_begin", "calls_section_end")),
    *(f"<|tool_call_{word}|>" for word in ("begin", "argument_begin", "end")),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The demo's tokenizer with the control tokens of all formats, none of them marked special."""
    demo = Path(dsv3_jax.__file__).parent / "demo"
    described = json.loads((demo / "tokenizer.json").read_text("utf-8"))
    added = described["added_tokens"]
    known = {token["content"] for token in added}
    for text in CONTROL:
        if text not in known:
            number = max(2047, *(token["id"] for token in added)) + 1
            added.append({**added[-1], "id": number, "content": text, "special": False})
    path = tmp_path_factory.mktemp("family")
    (path / "tokenizer.json").write_text(json.dumps(described), "utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(SPECIAL), "utf-8")
    return path


@pytest.mark.parametrize("name", chat_formats.NAMES)
def test_text_never_becomes_a_control_token(directory, name):
    tokenizer = Tokenizer(directory).with_chat_template(chat_formats.read(name))
    has_tools = name not in ("deepseek-v2", "moonlight")

    def conversation(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        messages = [{"role": "system", "content": text}, user(text), assistant(text), user(text)]
        if not has_tools:
            return messages, {}
        escaped = json.dumps({text: text}).replace("<", r"\u003c")
        plain = json.dumps({text: text}, ensure_ascii=False)
        calls = [call(0, f"f{text}", plain), call(1, "g", escaped)]
        messages += [assistant(text, tool_calls=calls), tool(0, text), tool(1, text)]
        messages += [assistant(text), user(text)]
        described = {**TOOLS[0]["function"], "description": text, "name": text}
        return messages, {"tools": [{"type": "function", "function": described}], "thinking": True}

    def controls(text: str) -> list[str]:
        messages, arguments = conversation(text)
        ids = tokenizer.chat(messages, **arguments)
        texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        return [text for text in texts if text in CONTROL]

    expected = controls("harmless")
    assert expected
    for attack in CONTROL:
        # The formats of R1 and V3.1 cut reasoning, which this token ends, from earlier answers.
        assert controls(f"a {attack} b") == expected, attack


def test_v32_has_no_template_of_its_own(directory, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((directory / name).read_text("utf-8"), "utf-8")
    assert Tokenizer(tmp_path).chat_template is None
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}', "utf-8")
    assert Tokenizer(tmp_path).chat_template == chat_formats.read("deepseek-v3.2")
    (tmp_path / "chat_template.jinja").write_text("own", "utf-8")
    assert Tokenizer(tmp_path).chat_template == "own"
