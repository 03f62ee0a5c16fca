"""A checkpoint's chat template: someone else's program, run in a sandbox on checked messages.

The sandbox keeps a template from files, from Python's attributes and from changing the messages. It
does not bound time and memory, but for the length of ``range`` and what ``*`` and ``**`` make: a
loop in a loop, or ``center(10**9)``, runs as long as it runs.

A template returns text, in which a control token that it wrote looks like one that a user typed. To
tell them apart, the template runs a second time on messages whose brackets are replaced by private
characters, one for one. Where the second text, its brackets put back, equals the first, a control
token that is still whole in the second text was written by the template.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every template may be given; others must be spelled in the template."""

_KEYS = (
    *("role", "content", "name", "prefix"),
    *("tools", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking"),
)
_MAX_SIZE = 10**7  # characters, list entries or bits of a value that "*" or "**" makes
_MAX_DEPTH = 100  # of messages and arguments: Python's recursion goes a few times as far
_FIRST_MARK = 0x10F000  # private characters: they stand in no published vocabulary or template

# Methods that look for a string. It must be marked as the text that it is looked for in.
_SEARCHES = """
    split rsplit partition rpartition startswith endswith find rfind index rindex count
    strip lstrip rstrip removeprefix removesuffix replace
    """
SEARCHES = frozenset(_SEARCHES.split())


class ChatTemplate:
    """A compiled template.

    Args:
      brackets: first and last characters of the control tokens, which :meth:`render_marked` marks.

    Raises:
      ValueError: ``source`` is not a template.
    """

    def __init__(self, source: str, brackets: str = ""):
        if not isinstance(source, str):
            raise ValueError(f"expected the text of a template, got {type(source).__name__}")
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _to_json
        self._marks = {ord(c): chr(_FIRST_MARK + i) for i, c in enumerate(sorted(set(brackets)))}
        try:
            tree = environment.parse(source)
            self._spelled = {text.value for text in _strings(tree)}
            self._template = environment.from_string(tree)
            tree = environment.parse(source)
            for text in _searched_for(tree):
                text.value = self._mark(text.value)
            self._marked_template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError, OverflowError, MemoryError) as error:
            raise ValueError(_one_line(error)) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> str:
        """The conversation as text.

        Args:
          special: control tokens of the tokenizer that the template may use, such as bos_token.
          arguments: what else the template takes. Of one name they come before ``special``.

        Raises:
          ValueError: the messages are not as :func:`check_messages` wants them, an argument
            contains itself, or the template refuses them or fails on them.
        """
        check_messages(messages, self._spelled)
        for name, value in arguments.items():
            _check_depth(name, value)
        return self._run(self._template, list(messages), {**special, **arguments})

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> str | None:
        """:meth:`render`'s text with every bracket from messages or arguments replaced.

        Returns:
          Text as long as render's; None where the template does not treat marked messages as it
          treats the messages, so that the origin of its brackets is unknown.
        """
        text = self.render(messages, special, arguments)
        marked_messages, marked_arguments = self._mark(list(messages)), self._mark(arguments)
        unmark = {ord(mark): chr(c) for c, mark in self._marks.items()}
        for template in (self._marked_template, self._template):
            try:
                marked = self._run(template, marked_messages, {**special, **marked_arguments})
            except ValueError:
                continue
            if marked.translate(unmark) == text:
                return marked
        return None

    def _run(self, template: jinja2.Template, messages: Any, arguments: Mapping[str, Any]) -> str:
        try:
            return template.render({**arguments, "messages": messages})
        except Exception as error:  # whatever a stranger's program does wrong
            reason = _one_line(error)
            raise ValueError(f"the chat template refuses these messages: {reason}") from None

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(self._marks)
        if isinstance(value, Mapping):
            return {self._mark(k): self._mark(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(v) for v in value]
        return value


def strings_in(value: Any) -> Iterator[str]:
    """The strings at any depth of mappings and lists, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from strings_in(pair)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from strings_in(entry)


def check_messages(messages: Any, roles: frozenset[str] | set[str] = frozenset()) -> None:
    """Refuses what is not a conversation: mappings with a role and text as content.

    Content may be None or absent beside tool_calls.

    Args:
      roles: accepted besides :data:`ROLES`.

    Raises:
      ValueError: one line with the index of the message, what was expected and what came.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        got = type(messages).__name__
        raise ValueError(f"messages: expected a list of messages with role and content, got {got}")
    if not messages:
        raise ValueError("messages: expected at least one, got none")
    _check_depth("messages", list(messages))
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"messages[{i}]: expected a mapping with role and content, got {message!r:.80}"
            )
        for key in message:
            if key not in _KEYS:
                raise ValueError(
                    f"messages[{i}]: expected keys among {', '.join(_KEYS)}; got {key!r}"
                )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in {*ROLES, *roles}:
            raise ValueError(f"messages[{i}].role: expected {' or '.join(ROLES)}, got {role!r}")
        if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
            raise ValueError(f"messages[{i}].content: expected text, got {content!r:.80}")


def _check_depth(name: str, value: Any) -> None:
    """Refuses what contains itself, which has no end, and what Python cannot recurse into."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"{name}: expected values nested at most {_MAX_DEPTH} deep, got one that is nested"
                " deeper or contains itself"
            )
        if isinstance(value, Mapping):
            left += [(entry, depth + 1) for entry in value.values()]
        elif isinstance(value, list | tuple):
            left += [(entry, depth + 1) for entry in value]


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """transformers' environment, which templates are written for, and a bound on ``*``, ``**``."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "*":
            pairs = ((left, right), (right, left))
            size = max(
                (len(a) * b for a, b in pairs if hasattr(a, "__len__") and isinstance(b, int)),
                default=0,
            )
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        if size > _MAX_SIZE:
            raise OverflowError(f"{operator} makes a value of size {size}, more than {_MAX_SIZE}")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for masks of losses; here it changes
    nothing."""

    tags = {"generation"}  # pyright: ignore  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        # Not a bare list: what is set inside must not be seen outside, as in transformers.
        line = parser.stream.current.lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, jinja2.TemplateError | TypeError) and said:
        return said
    return f"{kind}: {said}" if said else kind


def _strings(node: nodes.Node) -> Iterator[nodes.Const]:
    """The string constants at and below a node."""
    if isinstance(node, nodes.Const):
        if isinstance(node.value, str):
            yield node
    else:
        for child in node.iter_child_nodes():
            yield from _strings(child)


def _searched_for(tree: nodes.Template) -> list[nodes.Const]:
    """String constants that text is compared with or searched for, and that are never output."""
    found = [*tree.find_all(nodes.Compare)]
    for test in tree.find_all(nodes.Test):
        found += test.args or ()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCHES:
            found += call.args[:1]
    for one in tree.find_all(nodes.Filter):
        if one.name == "replace":
            found += one.args[:1]
    return list({id(text): text for node in found for text in _strings(node)}.values())
