"""A conversation in the terminal: reads messages, and prints answers as they arrive."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from typing import Protocol

from dsv3_jax.cli.output import log
from dsv3_jax.client.chat import Delta, Message

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = "Ctrl-C stops an answer; /new begins a new conversation; /exit or Ctrl-D ends"


class ChatModel(Protocol):
    """A model that answers."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    def answer(self, messages: Sequence[Message]) -> Generator[Delta, None, None]:
        """Yields an answer as it arrives. Closing it ends the request."""
        ...


class Conversation:
    """Messages and answers so far, after the system message, if there is one."""

    def __init__(self, model: ChatModel, system: str | None):
        self._model = model
        self._beginning: list[Message] = []
        if system is not None:
            self._beginning.append({"role": "system", "content": system})
        self._messages = list(self._beginning)
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Reads messages until ``/exit`` or the end of the input, and answers each. A message that
        is refused ends it with a ValueError, except at a terminal, where it is reported."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, which gives input() editing and a history
        log(f"chat with {self._model.model}; {_HELP}")
        while True:
            try:
                text = input("> " if self._is_terminal else "")
            except EOFError:
                if self._is_terminal:
                    print()
                return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print()
                continue
            match text.strip():
                case "":
                    pass
                case "/exit":
                    return
                case "/new":
                    self._messages = list(self._beginning)
                    log("a new conversation")
                case "/help":
                    log(_HELP)
                case command if command.startswith("/") and " " not in command:
                    log(f"expected /new, /exit, /help or a message, got {command}")
                case _:
                    self._send(text)

    def _send(self, text: str) -> None:
        message = {"role": "user", "content": text}
        try:
            content = self._print_answer([*self._messages, message])
        except ValueError as error:
            if not self._is_terminal:
                raise
            log(f"error: {error}")
            return
        self._messages += [message, {"role": "assistant", "content": content}]

    def _print_answer(self, messages: Sequence[Message]) -> str:
        """Prints the answer and returns it without its reasoning. Ctrl-C ends it early."""
        content, in_reasoning, is_stopped = "", False, False
        with contextlib.closing(self._model.answer(messages)) as answer:
            try:
                for delta in answer:
                    if delta.reasoning:
                        self._print(delta.reasoning if in_reasoning else self._dim(delta.reasoning))
                        in_reasoning = True
                    if delta.content:
                        self._print(self._end_of_reasoning() if in_reasoning else "")
                        in_reasoning = False
                        self._print(delta.content)
                        content += delta.content
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                is_stopped = True
        self._print(self._end_of_reasoning() if in_reasoning else "\n")
        if is_stopped:
            log("stopped")
        return content

    def _dim(self, text: str) -> str:
        return _DIM + text if self._is_terminal else text

    def _end_of_reasoning(self) -> str:
        return f"{_PLAIN}\n" if self._is_terminal else "\n"

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)
