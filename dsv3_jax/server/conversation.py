"""Conversations, in the form to which the endpoints of all APIs translate them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dsv3_jax.chat_template import strings_in
from dsv3_jax.generation.request import Prompt, check_fits
from dsv3_jax.generation.text import ReasoningMarkers
from dsv3_jax.server.job import Job
from dsv3_jax.server.parsers.answer_parser import BEGIN, END, AnswerParser, ReasoningParser
from dsv3_jax.server.parsers.tool_formats import find_tool_parser
from dsv3_jax.server.service import Service
from dsv3_jax.server.tool_grammar import tool_call_grammar
from dsv3_jax.tokenizer import Tokenizer

_SWITCHES = ("thinking", "enable_thinking")
"""Names of the argument that switches reasoning on. DeepSeek's templates read the first, those of
many other models the second, and clients send one or the other, or both."""

# Variables of templates that are no arguments of clients.
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}

_MOST_NESTED = 64  # levels of a JSON object; clients, templates and parsers follow it recursively


@dataclasses.dataclass(frozen=True)
class SubmittedConversation:
    """A conversation in the engine."""

    job: Job
    parsers: Sequence[AnswerParser]  # the parser of each answer
    prompt_tokens: int
    reasoning: ReasoningMarkers | None  # markers of the reasoning with which the answers may begin
    skips_special_tokens: bool  # whether the texts of the answers are without special tokens


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages and tools, as chat templates read them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    required_tools: Sequence[Mapping[str, Any]] = ()
    """An answer has to call one of these. If there are any, it consists of valid calls."""
    parallel_calls: bool = True
    thinking: bool | None = None
    """Whether answers begin with reasoning, if the template leaves the choice. None: its default,
    or what ``arguments`` say."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The client's further arguments of the template. The template has to read them. ``thinking``
    and ``enable_thinking`` are synonyms."""

    def encode(
        self, tokenizer: Tokenizer, max_len: int, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the ids of the conversation, at most ``max_len``. Text never becomes a control
        token. Raises ValueError if there is no template, it refuses the messages, does not read an
        argument, or they are too long."""
        tools = {"tools": list(self.tools)} if self.tools else {}
        messages = _with_readable_calls(self.messages, tokenizer.chat_template or "")
        arguments = {
            "add_generation_prompt": add_generation_prompt,
            **self._template_arguments(tokenizer.chat_template_variables),
            **tools,
        }
        # Only what the template shows of a long conversation counts.
        if sum(map(len, strings_in([messages, arguments]))) > max_len:
            text = tokenizer.render_chat(messages, **arguments)
            check_fits("prompt", text, tokenizer, max_len)
        return tokenizer.chat(messages, **arguments)

    def _template_arguments(self, variables: Collection[str]) -> dict[str, Any]:
        """Returns the arguments under the names that the template reads."""
        arguments = {name: v for name, v in self.arguments.items() if v is not None}
        switch = next((name for name in _SWITCHES if name in variables), None)
        switches = {name: arguments[name] for name in _SWITCHES if name in arguments}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(
                    f"chat_template_kwargs: expected true or false as {name!r}, got {value!r:.80}"
                )
        if switch is not None and switches:
            if len(set(switches.values())) > 1:
                raise ValueError(
                    "chat_template_kwargs: expected the same value for thinking and"
                    f" enable_thinking, which are synonyms; got {switches}"
                )
            arguments = {n: v for n, v in arguments.items() if n not in _SWITCHES or n in variables}
            arguments[switch] = next(iter(switches.values()))
        for name in arguments:
            if name not in variables:
                known = sorted({*variables, *(_SWITCHES if switch else ())} - _OWN_VARIABLES)
                raise ValueError(
                    f"chat_template_kwargs: expected names that the chat template reads"
                    f" ({', '.join(known) or 'it reads none'}), got {name!r:.80}"
                )
        if self.thinking is not None and switch is not None:
            arguments.setdefault(switch, self.thinking)
        return arguments

    async def submit(
        self, service: Service, *, n: int, prompt_field: str, **settings: Any
    ) -> SubmittedConversation:
        """Puts requests for ``n`` answers into the engine's queue. ``prompt_field`` is the name of
        the messages in the body, and ``settings`` are those of :meth:`Service.submit`."""
        if self.required_tools:
            settings["grammar"] = functools.partial(
                tool_call_grammar,
                service.tokenizer,
                self.required_tools,
                parallel=self.parallel_calls,
            )
        prompt: list[int] = []
        parsers: list[AnswerParser] = []
        markers: ReasoningMarkers | None = None

        def read_prompt() -> list[Prompt]:
            nonlocal markers
            tokenizer = service.tokenizer
            tools = find_tool_parser(tokenizer) if self.tools else None
            ends = tools.ends_reasoning if tools else ()
            prompt.extend(self.encode(tokenizer, service.settings.max_len))
            for _ in range(n):
                parser = AnswerParser(
                    ReasoningParser.of_prompt(tokenizer, prompt, ends),
                    tools() if tools else None,
                    tokenizer.special_tokens if tools else (),
                    parallel=self.parallel_calls,
                    required=bool(self.required_tools),
                )
                parsers.append(parser)
            part = ReasoningParser.of_prompt(tokenizer, prompt).part
            if part != "content":
                markers = ReasoningMarkers("" if part == "reasoning" else BEGIN, (END, *ends))
            return [prompt]

        job = await service.submit(
            read_prompt,
            1,
            n=n,
            prompt_field=prompt_field,
            settings_of=lambda: {"reasoning": markers} if settings.get("stop") else {},
            skip_special_tokens=not self.tools,
            **settings,
        )
        return SubmittedConversation(job, parsers, len(prompt), markers, not self.tools)


def json_object(text: str) -> dict[str, Any] | None:
    """Returns the arguments of a tool call as an object, or None if they are no JSON object that
    every reader of JSON accepts. Clients write no text, or white space, if there are none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text, parse_constant=refuse) if text.strip() else {}
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogates
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _depth(value) <= _MOST_NESTED else None


def _depth(value: Any) -> int:
    """Returns the number of levels of nested JSON."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
    return depth


def _with_readable_calls(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """Returns messages whose tool calls have arguments that the template can write.

    Arguments without text become ``{}``. A template that reads them as JSON, that of DeepSeek-V3.2,
    gets other text that is no object as one parameter, ``arguments``. The encoder that DeepSeek
    published with V4 does the same; that of V3.2 fails. All other formats write the text.
    """

    def readable(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if not arguments.strip():
            arguments = "{}"
        elif "from_json" in template and json_object(arguments) is None:
            arguments = json.dumps({"arguments": arguments}, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [readable(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
