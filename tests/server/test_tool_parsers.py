"""Tool calls are found in the same way, whatever the pieces of a text; other markup is content."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3_jax.server.parsers.answer_parser import AnswerParser, Part, ReasoningParser
from dsv3_jax.server.parsers.deepseek_v3 import DeepSeekV3Parser, DeepSeekV31Parser
from dsv3_jax.server.parsers.deepseek_v32 import DeepSeekV32Parser
from dsv3_jax.server.parsers.kimi_k2 import KimiK2Parser
from dsv3_jax.server.parsers.tool_parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    ToolParser,
)

V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL, KIMI_ARGUMENTS, KIMI_END = (
    f"<|tool_call_{word}|>" for word in ("begin", "argument_begin", "end")
)
DSML = ("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>")

Call = tuple[str, str]  # name and arguments


def v3(*calls: Call) -> str:
    texts = (f"{CALL}function{SEPARATOR}{n}\n```json\n{a}\n```{CALL_END}" for n, a in calls)
    return "\n".join(texts).join(V3)


def v31(*calls: Call) -> str:
    return "".join(f"{CALL}{n}{SEPARATOR}{a}{CALL_END}" for n, a in calls).join(V3)


def kimi(*calls: Call) -> str:
    texts = (
        f"{KIMI_CALL}functions.{n}:{i}{KIMI_ARGUMENTS}{a}{KIMI_END}"
        for i, (n, a) in enumerate(calls)
    )
    return "".join(texts).join(KIMI)


def parameter(key: str, value: object) -> str:
    is_string = isinstance(value, str)
    text = value if is_string else json.dumps(value, ensure_ascii=False)
    flag = str(is_string).lower()
    return f'<｜DSML｜parameter name="{key}" string="{flag}">{text}</｜DSML｜parameter>\n'


def invoke(name: str, body: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>\n'


def dsml(*calls: Call) -> str:
    texts = (
        invoke(n, "".join(parameter(*item) for item in json.loads(a).items())) for n, a in calls
    )
    return "".join(texts).join(DSML)


# The first parameter has no end tag.
UNCLOSED = invoke("f", parameter("a", "x").replace("</｜DSML｜parameter>", "") + parameter("b", 2))

FORMATS = [
    (DeepSeekV3Parser, v3),
    (DeepSeekV31Parser, v31),
    (KimiK2Parser, kimi),
    (DeepSeekV32Parser, dsml),
]
PARSERS = dict(zip(("v3", "v31", "kimi", "dsml"), (parser for parser, _ in FORMATS), strict=True))


def parts(events: Iterable[Event]) -> tuple[str, list[Call], str]:
    """Returns the joined content, tool calls and reasoning, and checks their order."""
    content, reasoning, calls = "", "", list[Call]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = calls[index][0], calls[index][1] + text
    return content, calls, reasoning


def split(parser: ToolParser | AnswerParser, text: str, cuts: Iterable[int]) -> list[Event]:
    ends = [*sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    last = len(pieces) - 1
    return [e for i, piece in enumerate(pieces) for e in parser.add(piece, is_last=i == last)]


NAMES = st.from_regex(
    r"[a-zA-Z_][\w.-]{0,9}", fullmatch=True, alphabet=st.characters(codec="ascii")
)
TEXT = st.text(st.sampled_from(["a", "é", " ", "\n", "<", ">", '"', "\\", "`", "｜", "{", "}"]))
VALUES = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3).map(json.dumps))


@pytest.mark.parametrize(("parser", "write"), FORMATS)
@given(content=TEXT, calls=st.lists(CALLS, min_size=1, max_size=3), data=st.data())
@settings(max_examples=40, deadline=None)
def test_calls_are_found_whatever_the_pieces(parser, write, content, calls, data):
    text = content + write(*calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    result = parts(split(parser(), text, cuts))
    assert result[0] == content
    assert [name for name, _ in result[1]] == [name for name, _ in calls]
    assert [json.loads(a) for _, a in result[1]] == [json.loads(a) for _, a in calls]
    if write is not dsml:
        assert result[1] == calls  # as the model wrote them


SPECIAL = ["<eos>", "<｜pad｜>", "<|im_end|>"]
SHARED = [
    *SPECIAL,
    "<eo",
    "</think>",
    "</thi",
    "<think>",
    " ",
    "\n",
    "x<",
    "<｜",
    "é ",
    '{"a": 1}',
    '{"',
]
FRAGMENTS = {
    DeepSeekV3Parser: [
        *V3,
        CALL,
        SEPARATOR,
        CALL_END,
        "\n```json\n",
        "\n```",
        "function",
        "f",
        "```",
    ],
    DeepSeekV31Parser: [*V3, CALL, SEPARATOR, CALL_END, "f", " g ", "<｜tool▁call", "a b", "{}}"],
    KimiK2Parser: [
        *KIMI,
        KIMI_CALL,
        KIMI_ARGUMENTS,
        KIMI_END,
        "functions.f:0",
        "f:1",
        "a:b:2",
        "<|tool",
    ],
    DeepSeekV32Parser: [
        *(
            *DSML,
            DSML[0].strip(),
            "<｜DSML｜",
            '<｜DSML｜invoke name="f">',
            "</｜DSML｜invoke>",
            '">',
        ),
        *(
            '<｜DSML｜parameter name="k" string="true">',
            '<｜DSML｜parameter name="l" string="false">',
        ),
        *('<｜DSML｜parameter name="k">', "</｜DSML｜parameter>", "1", "}"),
    ],
}
"""Markup that is mostly malformed."""


def answer_parser(parser: type[ToolParser], state: Part, *, required: bool) -> AnswerParser:
    reasoning = ReasoningParser(state, parser.ends_reasoning)
    return AnswerParser(reasoning, parser(), SPECIAL, required=required)


def check_answer(parser: type[ToolParser], write, required: bool, data: st.DataObject) -> None:
    """Checks what holds for any text, cut into any pieces, that may end anywhere."""
    markup = FRAGMENTS[parser]
    fragment = st.sampled_from([*markup, *markup, *SHARED]) | st.lists(
        CALLS, min_size=1, max_size=2
    ).map(lambda calls: write(*calls))
    text = "".join(data.draw(st.lists(fragment, max_size=14)))
    text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
    state = data.draw(st.sampled_from(["reasoning", "undecided", "content"]))
    whole = answer_parser(parser, state, required=required)
    events = whole.add(text, is_last=True)
    for cuts in (data.draw(st.lists(st.integers(0, len(text)), max_size=8)), range(len(text))):
        pieces = answer_parser(parser, state, required=required)
        assert parts(split(pieces, text, cuts)) == parts(events)
        assert pieces.finish_reason("stop") == whole.finish_reason("stop")
    content, calls, reasoning = parts(events)
    assert not any(token in content + reasoning for token in SPECIAL)
    cut = cut_calls(events)
    assert not any(is_object(calls[index][1]) for index in cut)
    if not calls or cut:
        assert whole.finish_reason("stop") == "stop"
    assert whole.finish_reason("length") == "length"


def cut_calls(events: Iterable[Event]) -> list[int]:
    """Returns the calls that are not at their end."""
    begun = [event.index for event in events if isinstance(event, CallBegin)]
    ended = {event.index for event in events if isinstance(event, CallArguments) and event.is_last}
    return [index for index in begun if index not in ended]


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("parser", "write"), FORMATS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_text_gives_the_same_messages_streamed_and_whole(parser, write, required, data):
    check_answer(parser, write, required, data)


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("parser", "write"), FORMATS)
@given(data=st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_many_texts_give_the_same_messages_streamed_and_whole(parser, write, required, data):
    check_answer(parser, write, required, data)


@pytest.mark.parametrize(("parser", "write"), FORMATS)
def test_an_answer_that_ends_early_has_no_executable_call(parser, write):
    arguments = json.dumps({"a": 'b {"c": 1} \\', "n": {"d": [1, {}]}})
    text = f"Let me see.{write(('f', arguments), ('g', '{}'))}"
    finished = parser()
    assert not cut_calls(finished.add(text, is_last=True))
    assert finished.is_finished
    last_end = {dsml: "</｜DSML｜invoke>", kimi: KIMI_END}.get(write, CALL_END)
    ends = [match.end() for match in re.finditer(re.escape(last_end), text)]
    for end in range(len(text)):
        answer = AnswerParser(ReasoningParser("content"), parser())
        calls = parts(answer.add(text[:end], is_last=True))[1]
        assert answer.finish_reason("stop") == "stop"
        assert sum(is_object(each) for _, each in calls) == sum(at <= end for at in ends)


@pytest.mark.parametrize("parser", PARSERS.values())
def test_the_end_that_the_model_chose_needs_no_end_of_the_section(parser):
    """A model may leave it out. A stop string there leaves no special token."""
    write = dict(FORMATS)[parser]
    text = write(("f", '{"a": "b"}')).rpartition(DSML[1] if write is dsml else "<")[0]
    for rest, reason in (("<eos>", "tool_calls"), ("", "stop"), ("\n", "stop")):
        answer = AnswerParser(ReasoningParser("content"), parser(), SPECIAL)
        assert parts(answer.add(text + rest, is_last=True))[1] == [("f", '{"a": "b"}')]
        assert answer.finish_reason("stop") == reason


@pytest.mark.parametrize("parser", PARSERS.values())
@pytest.mark.parametrize("after", ["", "</think>", "</think>Done."])
def test_calls_end_the_reasoning_of_all_formats(parser, after):
    write = dict(FORMATS)[parser]
    text = f"hm {write(('f', '{}'))}{after}"
    for cuts in ([], range(len(text))):
        answer = answer_parser(parser, "reasoning", required=False)
        expected = after.removeprefix("</think>"), [("f", "{}")], "hm "
        assert parts(split(answer, text, cuts)) == expected
        assert answer.finish_reason("stop") == "tool_calls"
    # A tag in the arguments belongs to them.
    arguments = '{"a": "</think>"}'
    answer = answer_parser(parser, "reasoning", required=False)
    assert parts(answer.add(write(("f", arguments)), is_last=True)) == ("", [("f", arguments)], "")


@pytest.mark.parametrize("parser", PARSERS.values())
@pytest.mark.parametrize("name", ["a:b", "a b", "", "a/b", "é", "x" * 129, 'a"b'])
def test_other_names_are_no_calls(parser, name):
    text = dict(FORMATS)[parser]((name, "{}"))
    assert parts(parser().add(text, is_last=True)) == (text, [], "")


@pytest.mark.parametrize("parser", PARSERS.values())
def test_an_unfinished_call_of_an_answer_that_must_call_is_left_out(parser):
    text = dict(FORMATS)[parser](("get_weather", '{"a": "b"}'))
    for end in range(len(text)):
        answer = answer_parser(parser, "content", required=True)
        assert parts(split(answer, text[:end], range(0, end, 3)))[0] == ""


@pytest.mark.parametrize("parser", PARSERS.values())
def test_white_space_between_calls_does_not_depend_on_the_pieces(parser):
    write = dict(FORMATS)[parser]
    text = write(("f", "{}"))
    at = text.rindex("</｜DSML｜f" if write is dsml else "<")
    text = f"{text[:at]}\n x \n{text[at:]} "
    expected = parts(parser().add(text, is_last=True))
    assert expected[0].strip() == "x"
    for cuts in (range(len(text)), range(0, len(text), 2), [at], [at + 2], [at + 3], [at + 4]):
        assert parts(split(parser(), text, cuts)) == expected


@pytest.mark.parametrize("parser", PARSERS.values())
def test_adjacent_texts_of_a_whole_answer_are_one(parser):
    """Otherwise, an endpoint that adds up texts would copy the text before each of them."""
    begin = parser.ends_reasoning[-1]
    end = dict(FORMATS)[parser]().rpartition(begin)[2].strip()
    text = f"{begin}x{end}" * 1000 + dict(FORMATS)[parser](("f", json.dumps({"a": "\n" * 999})))
    types = [type(event) for event in parser().add(text, is_last=True)]
    assert types == [Content, CallBegin, CallArguments]


def test_many_special_tokens_take_linear_time():
    """In a whole answer, where the rest was once searched anew after each for each of them."""
    special = [f"<｜place▁holder▁no▁{i}｜>" for i in range(800)]
    text = "".join(f"a < {special[i % 800]}" for i in range(8000))
    for parser in PARSERS.values():
        answer = AnswerParser(ReasoningParser("reasoning"), parser(), special)
        began = time.monotonic()
        assert parts(answer.add(f"{text}</think>{text}", is_last=True))[2] == "a < " * 8000
        assert time.monotonic() - began < 10  # 0.2; it was 70


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("v3", f"a{V3[0]}b{V3[1]}c", f"a{V3[0]}b{V3[1]}c", []),
        ("v3", f"a{V3[0]}{V3[1]}", f"a{V3[0]}{V3[1]}", []),
        ("v3", f"a{V3[0]}{CALL}f", f"a{V3[0]}{CALL}f", []),
        ("v3", f"a{V3[0]}", f"a{V3[0]}", []),
        # Other kinds of tools are unknown.
        ("v3", v3(("f", "{}")).replace("function", "code"), None, []),
        # The end of a call without its fence, or of the section without that of the call.
        ("v3", v3(("f", "{}")).replace("\n```<", "<"), "", [("f", "{}")]),
        ("v31", v31(("f", "{}")).replace(CALL_END, ""), "", [("f", "{}")]),
        ("v31", f"{v31(('f', '{}'))} and {v31(('g', '1'))}", " and ", [("f", "{}"), ("g", "1")]),
        ("v31", v31(("f", "no JSON")), "", [("f", "no JSON")]),
        ("v31", v31(("f", '{"a": 1}')).partition("1}")[0], "", [("f", '{"a": ')]),
        ("v31", v31(("", "{}")), None, []),
        ("kimi", kimi(("f", "{}")).replace("functions.", ""), "", [("f", "{}")]),
        ("kimi", kimi(("f", "{}")).replace(":0", ""), None, []),
        # A malformed call between others.
        ("kimi", kimi(("f", "1"), ("", "2"), ("h", "3")), None, [("f", "1"), ("h", "3")]),
        ("dsml", dsml(("f", "{}")).strip(), "", [("f", "{}")]),
        # Calls whose body cannot be read. DeepSeek's own parser refuses them, too.
        ("dsml", invoke("f", "{}").join(DSML), None, []),
        ("dsml", invoke("f", 'name="k">v</｜DSML｜parameter>').join(DSML), None, []),
        ("dsml", invoke('f"', "").join(DSML), None, []),
        ("dsml", "".join(DSML), "".join(DSML), []),
        ("dsml", f"{DSML[0]}rest", f"{DSML[0]}rest", []),
        (
            "dsml",
            invoke("f", parameter("a", 1) + parameter('b"', 2)).join(DSML),
            "\n" + parameter('b"', 2) + "</｜DSML｜invoke>",
            [("f", '{"a": 1')],
        ),
        ("dsml", dsml(("f", '{"a": "x"}')).partition("</")[0], "", [("f", '{"a": "x')]),
        # Without its end tag, a parameter ends where the next one or the end of the call begins.
        ("dsml", UNCLOSED.join(DSML), "", [("f", '{"a": "x", "b": 2}')]),
        (
            "dsml",
            UNCLOSED.replace("</｜DSML｜parameter>", "").join(DSML),
            "",
            [("f", '{"a": "x", "b": 2}')],
        ),
        # A parameter that comes twice, and values that are no JSON.
        ("dsml", invoke("f", parameter("a", 1) * 2).join(DSML), None, [("f", '{"a": 1')]),
        (
            "dsml",
            invoke("f", parameter("a", 1).replace("1", "x")).join(DSML),
            None,
            [("f", '{"a": x')],
        ),
        (
            "dsml",
            (invoke("f", parameter("a", 1).replace("1", '1}, "b": {2}')) + invoke("g", "")).join(
                DSML
            ),
            None,
            [("f", '{"a": 1'), ("g", "{}")],
        ),
        # A call without its end before the next one, and arguments that are left out.
        (
            "v31",
            v31(("f", "{}"), ("g", "{}")).replace(CALL_END, "", 1),
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("v31", v31(("f", f'{{"a": "{CALL}"}}')), "", [("f", f'{{"a": "{CALL}"}}')]),
        ("kimi", kimi(("f", " \n")), "", [("f", "{}")]),
        ("kimi", kimi(("f", "")).partition(KIMI_END)[0], None, []),
    ],
)
def test_malformed_markup_is_content(parser, text, content, calls):
    result = parts(PARSERS[parser]().add(text, is_last=True))
    assert result[1] == calls
    if content is not None:
        assert result[0] == content
    if not calls:
        assert result[0] == text


@pytest.mark.parametrize("cut", [*range(1, 12), None])
def test_calls_end_the_reasoning_of_kimi(cut):
    """Also where the marker arrives in two pieces. Without tools, it is reasoning."""
    text = f"hm <|{kimi(('f', '1'))}"
    begin = text.index(KIMI[0])
    for ends, expected in (
        (KimiK2Parser.ends_reasoning, ("", [("f", "1")], "hm <|")),
        ((), ("", [], text)),
    ):
        parser = AnswerParser(ReasoningParser("reasoning", ends), KimiK2Parser())
        assert parts(split(parser, text, [] if cut is None else [begin + cut])) == expected
    parser = AnswerParser(ReasoningParser("reasoning", KimiK2Parser.ends_reasoning))
    assert parts(split(parser, f"hm</think>{text}", [])) == (text, [], "hm")


def test_kimi_writes_ids():
    events = KimiK2Parser().add(kimi(("f", "{}"), ("f", "{}")))
    assert [event.id for event in events if isinstance(event, CallBegin)] == [
        "functions.f:0",
        "functions.f:1",
    ]


def test_arguments_arrive_before_the_end_of_a_call():
    for parser, text in (
        (DeepSeekV31Parser, v31(("f", "x" * 99))),
        (DeepSeekV32Parser, dsml(("f", '{"a": "b c"}'))),
    ):
        events = parser().add(text.partition(CALL_END)[0].partition(" c")[0])
        assert len(parts(events)[1][0][1]) > 5


def test_one_call_alone():
    parser = AnswerParser(ReasoningParser("content"), KimiK2Parser(), parallel=False)
    assert parts(parser.add(kimi(("f", "1"), ("g", "2")), is_last=True))[1] == [("f", "1")]
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_special_tokens_are_left_out():
    special = ["<eos>", *KIMI, KIMI_CALL, KIMI_ARGUMENTS, KIMI_END]
    parser = AnswerParser(ReasoningParser("reasoning"), KimiK2Parser(), special)
    text = f"hm<eos> <</think>a<eos>b{KIMI_CALL}c <{kimi(('f', '1'))}<eos>"
    for size in (1, 3, 1000):
        parser = AnswerParser(ReasoningParser("reasoning"), KimiK2Parser(), special)
        result = parts(split(parser, text, range(0, len(text), size)))
        assert result == ("abc <", [("f", "1")], "hm <")


def test_content_comes_before_the_call_that_follows_it():
    parser = AnswerParser(ReasoningParser("content"), KimiK2Parser(), ["<eos>"])
    events = parser.add(f"a <{kimi(('f', '1'))}", is_last=True)
    assert [type(event) for event in events] == [Content, Content, CallBegin, CallArguments]
