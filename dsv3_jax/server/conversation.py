"""Conversations, in the form to which the endpoints of all APIs translate them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from dsv3_jax.generation.request import Prompt
from dsv3_jax.generation.stop_scope import ReasoningMarkers
from dsv3_jax.server.job import Job
from dsv3_jax.server.parsers.answer_parser import AnswerParser
from dsv3_jax.server.parsers.reasoning import BEGIN, END, ReasoningParser
from dsv3_jax.server.parsers.tool_formats import find_tool_parser
from dsv3_jax.server.parsers.tool_parser import ToolParser
from dsv3_jax.server.service import Service
from dsv3_jax.server.tool_grammar import tool_call_grammar
from dsv3_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class SubmittedConversation:
    """A conversation in the engine."""

    job: Job
    parsers: Sequence[AnswerParser]
    """The parser of each answer."""
    prompt_tokens: int
    """Tokens of the conversation."""
    reasoning: ReasoningMarkers | None
    """Markers of the reasoning with which the answers may begin."""
    skips_special_tokens: bool
    """Whether the texts of the answers are without special tokens."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages and tools, as chat templates read them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call."""
    required_tools: Sequence[Mapping[str, Any]] = ()
    """An answer has to call one of these. If there are any, it consists of valid calls."""
    parallel_calls: bool = True
    """Whether an answer may contain several tool calls."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the template."""

    def encode(self, tokenizer: Tokenizer, *, add_generation_prompt: bool = True) -> list[int]:
        """Returns the ids of the conversation. Text never becomes a control token.

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        tools = {"tools": list(self.tools)} if self.tools else {}
        return tokenizer.chat(
            self.messages,
            add_generation_prompt=add_generation_prompt,
            **{**self.arguments, **tools},
        )

    async def submit(
        self, service: Service, *, n: int, prompt_field: str, **settings: Any
    ) -> SubmittedConversation:
        """Puts requests for ``n`` answers into the engine's queue.

        Args:
          prompt_field: name of the messages in the body, for errors.
          settings: of :meth:`Service.submit`.

        Raises:
          ApiError: as :meth:`Service.submit`.
        """
        if self.required_tools:
            settings["grammar"] = functools.partial(
                tool_call_grammar,
                service.tokenizer,
                self.required_tools,
                parallel=self.parallel_calls,
            )
        prompt: list[int] = []
        parsers: list[AnswerParser] = []
        markers: list[ReasoningMarkers | None] = []

        def read_prompt() -> list[Prompt]:
            tools = find_tool_parser(service.tokenizer) if self.tools else None
            prompt.extend(self.encode(service.tokenizer))
            special_tokens = service.tokenizer.special_tokens if tools else ()
            for _ in range(n):
                parsers.append(self._parser(service.tokenizer, prompt, tools, special_tokens))
            markers.append(_reasoning_markers(service.tokenizer, prompt, tools))
            return [prompt]

        def scope_of_stop() -> dict[str, Any]:
            return {"reasoning": markers[0]} if settings.get("stop") else {}

        job = await service.submit(
            read_prompt,
            1,
            n=n,
            prompt_field=prompt_field,
            settings_of=scope_of_stop,
            skip_special_tokens=not self.tools,
            **settings,
        )
        return SubmittedConversation(job, parsers, len(prompt), markers[0], not self.tools)

    def _parser(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        tools: type[ToolParser] | None,
        special_tokens: Sequence[str],
    ) -> AnswerParser:
        return AnswerParser(
            ReasoningParser.of_prompt(tokenizer, prompt, tools.ends_reasoning if tools else ()),
            tools() if tools else None,
            special_tokens,
            parallel=self.parallel_calls,
            required=bool(self.required_tools),
        )


def _reasoning_markers(
    tokenizer: Tokenizer, prompt: Sequence[int], tools: type[ToolParser] | None
) -> ReasoningMarkers | None:
    """Returns the markers of the reasoning with which answers to a prompt may begin."""
    part = ReasoningParser.of_prompt(tokenizer, prompt).part
    if part == "content":
        return None
    ends = tools.ends_reasoning if tools else ()
    return ReasoningMarkers("" if part == "reasoning" else BEGIN, (END, *ends))
