"""The chat template of a checkpoint: untrusted Jinja code, run in a sandbox on checked messages.

**Sandbox.** A template can neither access files or Python attributes nor modify the messages. Its
time and memory are not bounded, except for the length of ``range`` and the size of the results of
``*`` and ``**``: nested loops, or ``center(10**9)``, run as long as they take.

**Control tokens.** A template returns text, in which a control token that the template wrote looks
the same as one that a user typed. To distinguish them, the template renders the conversation a
second time, with *marked* messages: every bracket in them is replaced by a private-use character.
If replacing the marks by brackets again gives the text of the first run, then the control tokens
that are intact in the second text are those of the template.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that are accepted for every template. Other roles must appear as strings in it."""

# Keys that a message may have.
_KEYS = (
    *("role", "content", "name", "prefix"),
    *("tools", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking"),
)
_MAX_SIZE = 10**7  # characters, list elements or bits of a result of "*" or "**"
_PIECE = 2**16  # characters that are translated at a time
_MAX_DEPTH = 100  # nesting of messages and arguments; Python's recursion limit is several times it
_PARSER = "parser of JSON"  # variable of a run. No template can name it, and no argument replace it
_FIRST_MARK = 0x10F000  # private-use characters that no published vocabulary or template contains

_SEARCH_METHODS = """
    split rsplit partition rpartition startswith endswith find rfind index rindex count
    strip lstrip rstrip removeprefix removesuffix replace
    """
SEARCH_METHODS = frozenset(_SEARCH_METHODS.split())
"""String methods whose first argument is searched for. In marked text, it must be marked too."""


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: Jinja source.
      brackets: first and last characters of all control tokens. :meth:`render_marked` marks them.

    Raises:
      ValueError: ``source`` is not a valid template.
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
        environment.filters |= {"tojson": _to_json, "from_json": _from_json}
        self.source = source
        self._marks = {ord(c): chr(_FIRST_MARK + i) for i, c in enumerate(sorted(set(brackets)))}
        self._unmark = {ord(mark): chr(c) for c, mark in self._marks.items()}
        try:
            tree = environment.parse(source)
            self._roles = {constant.value for constant in _string_constants(tree)}
            self.variables = jinja2.meta.find_undeclared_variables(tree)
            self._template = environment.from_string(tree)
            tree = environment.parse(source)
            for constant in _search_constants(tree):
                constant.value = self._mark(constant.value)
            self._marked_template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError, OverflowError, MemoryError) as error:
            raise ValueError(_one_line(error)) from None

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, str]]:
        """Pickles the source. Compiled templates cannot be pickled."""
        return ChatTemplate, (self.source, "".join(map(chr, self._marks)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> str:
        """Returns the conversation as text. ``special`` has the control tokens of the tokenizer by
        variable name, such as ``bos_token``, and ``arguments`` further variables, which take
        precedence.

        Raises:
          ValueError: :func:`check_messages` rejects the messages, an argument is nested too deeply,
            or the template raises an exception.
        """
        check_messages(messages, self._roles)
        for name, value in arguments.items():
            _check_depth(name, value)
        return self._run(self._template, list(messages), {**special, **arguments})

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> str | None:
        """Returns the text of :meth:`render`, in which brackets from messages and arguments are
        marked: private-use characters replace them. Raises ValueError as :meth:`render`.

        Returns None if the template renders marked messages differently. Then the origin of each
        bracket is unknown.
        """
        text = self.render(messages, special, arguments)
        marked_messages, marked_arguments = self._mark(list(messages)), self._mark(arguments)
        for template in (self._marked_template, self._template):
            try:
                marked = self._run(
                    template, marked_messages, {**special, **marked_arguments}, marks=True
                )
            except ValueError:
                continue
            if _translated(marked, self._unmark) == text:
                return marked
        return None

    def _run(
        self,
        template: jinja2.Template,
        messages: Any,
        arguments: Mapping[str, Any],
        *,
        marks: bool = False,
    ) -> str:
        parse = self._parse_marked if marks else _parse
        try:
            return template.render({**arguments, "messages": messages, _PARSER: parse})
        except Exception as error:  # a template may raise anything
            reason = _one_line(error)
            raise ValueError(f"the chat template refuses these messages: {reason}") from None

    def _parse_marked(self, text: str) -> Any:
        """Parses marked JSON. A bracket that is escaped in it, such as U+003C, is marked after."""
        return self._mark(_parse(_translated(text, self._unmark)))

    def _mark(self, value: Any) -> Any:
        """Marks the brackets of all strings in nested mappings and lists."""
        if isinstance(value, str):
            return _translated(value, self._marks)
        if isinstance(value, Mapping):
            return {self._mark(k): self._mark(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(v) for v in value]
        return value


def _translated(text: str, table: Mapping[int, Any]) -> str:
    """Does the same as ``text.translate(table)``, which keeps the interpreter's lock for a tenth of
    a second in a text of some megabytes."""
    pieces = (text[i : i + _PIECE] for i in range(0, len(text), _PIECE))
    return "".join([piece.translate(table) for piece in pieces])


def strings_in(value: Any) -> Iterator[str]:
    """Yields the strings in nested mappings and lists, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from strings_in(pair)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from strings_in(entry)


def check_messages(messages: Any, roles: frozenset[str] | set[str] = frozenset()) -> None:
    """Raises ValueError, with the index of the message, unless ``messages`` are a conversation: a
    non-empty list of mappings with a role, a string as content, and known keys only.

    The role is one of :data:`ROLES` or ``roles``. The content may be None or missing if there are
    tool_calls.
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
    """Raises ValueError if ``value`` is nested too deeply for Python's recursion, or contains
    itself."""
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"{name}: expected values nested at most {_MAX_DEPTH} deep, got one that is nested"
                " deeper or contains itself"
            )
        if isinstance(value, Mapping):
            stack += [(entry, depth + 1) for entry in value.values()]
        elif isinstance(value, list | tuple):
            stack += [(entry, depth + 1) for entry in value]


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja environment like that of transformers, for which templates are written. It bounds the
    size of the results of ``*`` and ``**``."""

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
            raise OverflowError(
                f"{operator}: expected a result of size {_MAX_SIZE} at most, got {size}"
            )
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks the assistant's text for loss masks. Here it has no
    effect."""

    tags = {"generation"}  # pyright: ignore  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        # A call block, because it has a scope: as in transformers, variables that are set inside
        # are not visible outside.
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


@jinja2.pass_context
def _from_json(context: jinja2.runtime.Context, text: str) -> Any:
    """Parses the arguments of a tool call. Templates of transformers have no such filter."""
    return context[_PARSER](text)


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{error}, in {text!r:.80}"
        raise jinja2.TemplateError(f"arguments: expected JSON: {reason}") from None
    if not isinstance(value, dict):
        raise jinja2.TemplateError(f"arguments: expected a JSON object, got {text!r:.80}")
    return value


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, jinja2.TemplateError | TypeError) and message:
        return message
    return f"{kind}: {message}" if message else kind


def _string_constants(node: nodes.Node) -> Iterator[nodes.Const]:
    """Yields the string constants of a syntax tree."""
    if isinstance(node, nodes.Const):
        if isinstance(node.value, str):
            yield node
    else:
        for child in node.iter_child_nodes():
            yield from _string_constants(child)


def _search_constants(tree: nodes.Template) -> list[nodes.Const]:
    """Returns the string constants that a template searches for, or compares text with. They do not
    appear in its output."""
    searches: list[nodes.Node] = [*tree.find_all(nodes.Compare)]
    for test in tree.find_all(nodes.Test):
        searches += test.args or ()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCH_METHODS:
            searches += call.args[:1]
    for filter_node in tree.find_all(nodes.Filter):
        if filter_node.name == "replace":
            searches += filter_node.args[:1]
    constants = (constant for node in searches for constant in _string_constants(node))
    return list({id(constant): constant for constant in constants}.values())
