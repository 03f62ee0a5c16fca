"""Tool calls are found in the same way, whatever the pieces of a text; other markup is content."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3_jax.server.parsers.answer_parser import AnswerParser
from dsv3_jax.server.parsers.deepseek_v3 import DeepSeekV3Parser
from dsv3_jax.server.parsers.deepseek_v31 import DeepSeekV31Parser
from dsv3_jax.server.parsers.deepseek_v32 import DeepSeekV32Parser
from dsv3_jax.server.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.parsers.kimi_k2 import KimiK2Parser
from dsv3_jax.server.parsers.reasoning import ReasoningParser
from dsv3_jax.server.parsers.tool_parser import ToolParser

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


FRAGMENTS = [
    *(*V3, CALL, SEPARATOR, CALL_END, "\n```json\n", "\n```", "function", "```json", "f"),
    *(*KIMI, KIMI_CALL, KIMI_ARGUMENTS, KIMI_END, "functions.f:0", "f:1", "{}", '{"a": 1}', " "),
    *(*DSML, DSML[0].strip(), '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "\n", '">', "x<"),
    *('<｜DSML｜parameter name="k" string="true">', '<｜DSML｜parameter name="k">'),
    *("</｜DSML｜parameter>", "<｜DSML｜", "<｜tool▁call", "<|tool_call", "</think>", "<eos>", "<"),
]


@pytest.mark.parametrize("parser", PARSERS.values())
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14), data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_markup_is_read_whatever_the_pieces(parser, fragments, data):
    """The whole path of an answer, with markup that is mostly malformed."""
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))

    def read(cuts: list[int]) -> list[Event]:
        return split(AnswerParser(ReasoningParser("reasoning"), parser(), ["<eos>"]), text, cuts)

    whole, pieces = parts(read([])), parts(read(cuts))
    assert pieces == whole
    assert "<eos>" not in whole[0] + whole[2]


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
            '\n<｜DSML｜parameter name="b"" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>',
            [("f", '{"a": 1')],
        ),
        ("dsml", dsml(("f", '{"a": "x"}')).partition("</")[0], "", [("f", '{"a": "x')]),
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
