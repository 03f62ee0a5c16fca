"""Structured output: answers that match a JSON schema, a regular expression, or a grammar.

llguidance compiles a grammar for the model's vocabulary and computes the tokens that may come next.
Compiling takes place in threads of its own, before a request enters the engine. The engine computes
masks in several threads, in which llguidance releases Python's lock, while the device runs the step
of other requests. Both have limits, so that a hostile grammar is refused or ends its own request.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import json
import logging
import math
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import llguidance
import numpy as np

from dsv3_jax.generation.request import TokenMask
from dsv3_jax.server.parsers.answer_parser import BEGIN, END, Part, ReasoningParser
from dsv3_jax.server.parsers.tool_formats import TOOL_PARSERS
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_TEXT = 2**17
"""Most characters of a schema or grammar."""

MAX_DEPTH = 100
"""Most levels of nesting of a schema."""

MAX_PATTERN = 2**15
"""Most characters of a regular expression, whose compilation can take quadratic time."""

_MAX_PROPERTIES = 1000  # of one object, which can take quadratic time, too

# An automaton has a state for each remainder of the division; 10,000 of them compile in 0.05 s.
_MAX_MULTIPLE = 10_000


def schema_text(schema: object, field: str) -> str:
    """Returns a schema as JSON. Schemas that differ in their white space have the same text."""
    _check(schema, field)
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"{field}: expected at most {MAX_TEXT} characters of JSON, got {len(text)}"
        )
    return text


def _check(schema: object, field: str) -> None:
    """Raises ValueError for a schema that would take too long to compile."""
    multiple = 1
    nodes: list[tuple[Any, int]] = [(schema, 0)]
    while nodes:
        node, depth = nodes.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{field}: expected at most {MAX_DEPTH} levels of nesting, got more")
        if isinstance(node, dict):
            multiple = math.lcm(multiple, _multiple(node.get("multipleOf")))
            _check_size(node.get("pattern"), str, MAX_PATTERN, f"{field}: characters of a pattern")
            _check_size(
                node.get("properties"), dict, _MAX_PROPERTIES, f"{field}: properties of an object"
            )
            nodes += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            nodes += [(value, depth + 1) for value in node]
        if multiple > _MAX_MULTIPLE:  # the whole schema's, as they can apply to the same number
            raise ValueError(
                f"{field}: multipleOf: expected {_MAX_MULTIPLE} or less as the least common"
                " multiple of all, without their decimal points; got more"
            )


def _check_size(value: Any, kind: type, most: int, name: str) -> None:
    if isinstance(value, kind) and len(value) > most:
        raise ValueError(f"{name}: expected at most {most}, got {len(value)}")


def _multiple(value: object) -> int:
    """Returns a value of multipleOf without its decimal point, or 1 if it has no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    if isinstance(value, float) and not math.isfinite(value):
        return 1
    number = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
    digits = number.normalize().as_tuple().digits
    return max(int("".join(map(str, digits[:20]))), 1)


_CACHED = 32  # grammars; a hostile one takes up to 20 MB
_THREADS = 2  # that compile
# llguidance recurses once per level of a schema, through its references, and once per rule of a
# grammar; without enough stack, the process would end. The deepest schemas of MAX_TEXT characters
# need 90 MiB. A thread's stack takes memory only where it has been used.
_STACK_BYTES = 128 * 2**20

# They bound the time of compiling a grammar and of computing a mask, however hostile it is.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)

# Models write JSON in one line or indented. White space is limited, as some would never end it.
JSON_OPTIONS: Any = {
    "whitespace_pattern": r" |\r?\n[ \t]{0,64}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarError(ValueError):
    """A grammar is refused, or became too complex for its limits while an answer was written. The
    message begins with the name of the body's field."""


@dataclasses.dataclass(frozen=True)
class GrammarSource:
    """Describes the text of an answer."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON, the regular expression, or the grammar in llguidance's form of Lark."""
    field: str = dataclasses.field(compare=False)
    """Name of the body's field that it comes from."""
    is_trusted: bool = False
    """Whether the server wrote the grammar, with schemas within their limits."""

    @classmethod
    def of_schema(cls, schema: object, field: str) -> GrammarSource:
        """Returns the source of JSON that is valid under a schema."""
        return cls("json_schema", schema_text(schema, field), field)

    @classmethod
    def of_choices(cls, choices: Sequence[str], field: str) -> GrammarSource:
        """Returns the source of one of several texts."""
        # A schema's strings would be in quotation marks.
        text = llguidance.grammar_from("choice", json.dumps(list(choices)))
        return cls("lark", text, field, is_trusted=True)

    def grammar(self) -> str:
        """Returns llguidance's description of the grammar."""
        is_pattern = not self.is_trusted and self.kind != "json_schema"
        most = MAX_PATTERN if is_pattern else MAX_TEXT
        if len(self.text) > most:
            raise ValueError(f"expected at most {most} characters, got {len(self.text)}")
        if not self.is_trusted and self.kind == "lark" and "%json" in self.text:
            raise ValueError("expected none with %json, whose schemas have other limits")
        if self.kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(self.text, overrides=JSON_OPTIONS)
        return llguidance.grammar_from(self.kind, self.text)


class Grammars:
    """Compiles grammars, and keeps those that were used last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._tags = _tag_ids(tokenizer)
        # The grammar would not see what comes after them.
        self._ends_reasoning = [
            i
            for i, text in tokenizer.control_tokens.items()
            if any(text in marker for parser in TOOL_PARSERS for marker in parser.ends_reasoning)
        ]
        self._compiled: collections.OrderedDict[GrammarSource, llguidance.LLMatcher] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()
        self._threads = _threads()

    def load(self) -> None:
        """Reads the vocabulary, which takes two seconds if it is large. Without it all grammars are
        refused."""
        try:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._end_tokens
            )
        except Exception as error:  # the library raises different ones
            logger.warning("structured output is refused: llguidance: %s", _line(str(error)))

    async def compile(self, source: GrammarSource) -> None:
        """Compiles a grammar in another thread, unless it is cached."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, source)

    def start(self, source: GrammarSource, prompt: Sequence[int] | None = None) -> AnswerGrammar:
        """Returns the grammar of one answer. ``prompt`` has the ids of a conversation, whose answer
        may begin with reasoning: the grammar applies after it. None stands for other text."""
        begins_in: Part = "content"
        if prompt is not None and self._tags is not None:
            begins_in = ReasoningParser.of_prompt(self._tokenizer, prompt).part
        return AnswerGrammar(
            self._cached(source) or self._threads.submit(self._compile, source).result(),
            source.field,
            begins_in,
            tags=self._tags or (-1, -1),
            free=TokenMask.of(self._vocab_size, banned=[*self._end_tokens, *self._ends_reasoning]),
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _cached(self, source: GrammarSource) -> llguidance.LLMatcher | None:
        with self._lock:
            if (matcher := self._compiled.get(source)) is None:
                return None
            self._compiled.move_to_end(source)
            return matcher.deep_copy()

    def _compile(self, source: GrammarSource) -> llguidance.LLMatcher:
        """Returns a matcher at the beginning of an answer. It runs in one of the threads."""
        if (matcher := self._cached(source)) is not None:
            return matcher
        if self._vocabulary is None:
            raise GrammarError(
                f"{source.field}: expected none, as llguidance cannot read this model's tokenizer"
            )
        try:
            grammar = source.grammar()
        except ValueError as error:
            raise GrammarError(f"{source.field}: {error}") from None
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        first = matcher.deep_copy()
        is_possible = any(first.compute_bitmask())
        if (failure := matcher.get_error() or first.get_error()) or not is_possible:
            raise GrammarError(f"{source.field}: {_line(failure or 'no text matches it')}")
        with self._lock:
            self._compiled[source] = matcher
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()


class AnswerGrammar:
    """Decides which tokens of one answer may come next, as :class:`dsv3_jax.engine.Grammar` asks.
    The matcher is at the beginning of the answer, which begins in one of the parts of
    :class:`ReasoningParser`. ``tags`` begin and end reasoning, which may have the tokens
    ``free``."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        field: str,
        begins_in: Part,
        *,
        tags: tuple[int, int],
        free: TokenMask,
    ):
        self._matcher = matcher
        self._field = field
        self._part: Part = begins_in
        self._begin, self._end = tags
        self._free = free

    def mask(self) -> np.ndarray:
        if self._part == "reasoning":
            return self._free.words
        words = np.zeros_like(self._free.words)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        if self._part == "undecided":
            words[self._begin // 32] |= np.uint32(1 << self._begin % 32)
        return words

    def accept(self, token: int) -> None:
        if self._part == "reasoning":
            if token == self._end:
                self._part = "content"
        elif self._part == "undecided" and token == self._begin:
            self._part = "reasoning"
        else:
            self._part = "content"
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"{self._field}: the grammar became too complex while the answer was written:"
                f" {_line(self._matcher.get_error())}"
            )


def _threads() -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads with a large stack, which have been started."""
    threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "dsv3-grammar")
    started = threading.Barrier(_THREADS)  # the executor starts a thread if no other one is idle
    before = threading.stack_size(_STACK_BYTES)
    try:
        concurrent.futures.wait([threads.submit(started.wait) for _ in range(_THREADS)])
    finally:
        threading.stack_size(before)
    return threads


def _tag_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Returns the tokens that begin and end reasoning, or None if the model has none."""
    tags = [
        tokenizer.encode(tag, add_special_tokens=False, split_special_tokens=False)
        for tag in (BEGIN, END)
    ]
    return (tags[0][0], tags[1][0]) if all(len(ids) == 1 for ids in tags) else None


def _line(message: str) -> str:
    """Returns a message of llguidance as one line."""
    return " ".join(message.removesuffix("<non-verbose/>").split())[:300]
