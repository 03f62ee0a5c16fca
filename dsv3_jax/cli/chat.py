"""``dsv3 chat``: a conversation in the terminal.

The model is on a server, or in this process: :mod:`dsv3_jax.cli.local_chat`, which imports JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Sequence
from numbers import Integral
from typing import Protocol

from dsv3_jax.cli.bench import check_url
from dsv3_jax.cli.flags import check_ranges, check_weights, draft_of, read_api_key
from dsv3_jax.cli.generate import check_text
from dsv3_jax.cli.output import log
from dsv3_jax.client.chat import Delta, Message
from dsv3_jax.generation.settings import check_settings


def run(arguments: argparse.Namespace) -> None:
    """Runs the command until ``/exit``, the end of the input, or Ctrl-D."""
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    new_tokens = arguments.max_new_tokens
    check_settings(max_new_tokens=new_tokens, **sampling, **draft_of(arguments))
    check_ranges(arguments, {"max_len": ("an integer of at least 2", Integral, 2)})
    if arguments.max_len is not None and arguments.url is not None:
        raise ValueError("--max-len: expected no --url with it, whose server has its own limit")
    if arguments.system is not None:
        check_text("--system", arguments.system)
    with contextlib.ExitStack() as until_end:
        if arguments.url is not None:
            from dsv3_jax.client.chat import ChatServer

            check_url(arguments.url)
            if new_tokens is not None:
                sampling["max_tokens"] = new_tokens
            key = read_api_key(arguments.api_key_file)
            model = ChatServer(arguments.url, arguments.model, key, sampling)
        else:
            if arguments.api_key_file is not None:
                raise ValueError("--api-key-file: expected --url with it, got none")
            from dsv3_jax.cli.local_chat import LocalChat

            check_weights(arguments)
            model = until_end.enter_context(LocalChat(arguments, sampling))
        Conversation(model, arguments.system).run()


_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = "Ctrl-C stops an answer; /new begins a new conversation; /exit or Ctrl-D ends"


class ChatModel(Protocol):
    """A model that answers."""

    @property
    def model(self) -> str: ...

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
