"""``dsv3 chat`` through a pseudo-terminal, and with its input from a pipe."""

from __future__ import annotations

import functools
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv3_jax import compile_cache
from dsv3_jax.cli import loading, local_chat
from dsv3_jax.engine.device.buckets import Buckets
from tests.server.conftest import MAX_LEN
from tests.support.command import run

ROOT = Path(__file__).parents[2]

# The terminal becomes the child's own, so that Ctrl-C reaches it as a signal.
CODE = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from dsv3_jax.__main__ import main
sys.exit(main())
"""


class Terminal:
    """A ``dsv3`` command at a terminal."""

    def __init__(self, *words: str):
        self._terminal, child_end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, *words],
            stdin=child_end,
            stdout=child_end,
            stderr=child_end,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(child_end)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def read_until(self, pattern: str, seconds: float = 30) -> str:
        """Returns the output up to the first match of a pattern."""
        output, end = b"", time.monotonic() + seconds
        while not re.search(pattern.encode(), output):
            assert time.monotonic() < end, output
            if select.select([self._terminal], [], [], 0.1)[0]:
                output += os.read(self._terminal, 1)
        return output.decode(errors="replace").replace("\r\n", "\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(server) -> Iterator[Terminal]:
    it = Terminal("chat", "--url", server.url, "--temperature", "0")
    yield it
    it.close()


def test_a_conversation(server, terminal):
    server.wait_until_idle()
    assert "chat with demo" in terminal.read_until("> ")
    terminal.type("def f(x):\n")
    terminal.read_until(r"def f\(x\):\r\n.{12}")  # the answer has begun
    terminal.type("\x03")
    assert "dsv3: stopped" in terminal.read_until("\n> ")
    server.wait_until_idle()  # the server has ended the request
    terminal.type("/new\n")
    assert "a new conversation" in terminal.read_until("\n> ")
    terminal.type("thrown away")
    terminal.read_until("thrown away")  # it reads the line, and not only shows its prompt
    terminal.type("\x03")  # Ctrl-C at the prompt clears the line
    terminal.read_until("\n> ")
    terminal.type("\x1b[A\x1b[A\n")  # the message before /new, from the history
    terminal.read_until(r"def f\(x\):\r\n.{12}")
    terminal.type("\x03")
    terminal.read_until("stopped\r\n> ")
    terminal.type("/exti\n")
    assert "expected /new, /exit, /help or a message, got /exti" in terminal.read_until("\n> ")
    terminal.type(" ".join(map(str, range(200))) + "\n")
    assert "error: messages: expected" in terminal.read_until("\n> ")
    assert terminal.process.poll() is None
    terminal.type("/exit\n")
    assert terminal.process.wait(30) == 0


def answers(monkeypatch, capsys, lines: str, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status = run("chat", "--temperature", "0", "--max-new-tokens", "6", *words)
    return status, *capsys.readouterr()


def test_input_from_a_pipe(server, monkeypatch, capsys):
    """A model in this process answers as the server does. The second message sees the first."""
    lines = "def f(x):\n\nimport\n/new\nimport\n/exit\nnever"
    status, out, _ = answers(monkeypatch, capsys, lines, "--url", server.url)
    assert status == 0
    assert len(out) > 20
    monkeypatch.setattr(compile_cache, "enable", lambda directory: None)
    model = SimpleNamespace(layout=None)
    monkeypatch.setattr(loading, "load", lambda *_, **__: (model, server.tokenizer))
    engine = SimpleNamespace(
        submit=server.engine.submit, warm_up=lambda: None, shutdown=lambda drain: None
    )
    monkeypatch.setattr(local_chat, "Engine", lambda *_, **__: engine)
    max_len = ["--max-len", str(MAX_LEN)]
    assert answers(monkeypatch, capsys, lines, *max_len)[:2] == (0, out)
    status, _, err = answers(monkeypatch, capsys, "y" * 400, *max_len)
    assert status == 2
    assert "conversation: expected fewer than 256 tokens (--max-len), got" in err


@pytest.mark.slow
def test_a_model_in_this_process(server, monkeypatch, capsys, own_compile_cache):
    buckets = Buckets(decodes=(1,), chunks=(1,), chunk_tokens=32, max_steps=1).single()
    engine = functools.partial(local_chat.Engine, buckets=buckets)
    monkeypatch.setattr(local_chat, "Engine", engine)
    status, out, err = answers(monkeypatch, capsys, "def f(x):\nimport\n")
    assert status == 0
    assert "chat with demo" in err
    _, expected, _ = answers(monkeypatch, capsys, "def f(x):\nimport\n", "--url", server.url)
    assert out == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "localhost"], "--url: expected an address such as http://127.0.0.1:8000, got"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1: expected a server, got:"),
        (["--api-key-file", "x"], "--api-key-file: expected --url with it, got none"),
        (
            ["--url", "http://127.0.0.1:1", "--api-key-file", "/nowhere/keys"],
            "--api-key-file: /nowhere/keys: No such file or directory",
        ),
        (
            ["--max-len", "100000"],
            "--max-len: expected 2 to 4096 (the model's max_position_embeddings), got 100000",
        ),
        (
            ["--max-len", "100", "--max-new-tokens", "100"],
            "--max-new-tokens: expected fewer than 100 (--max-len), got 100",
        ),
        (
            ["--url", "http://127.0.0.1:1", "--max-len", "100"],
            "--max-len: expected no --url with it, whose server has its own limit",
        ),
        (["--top-p", "2"], "top_p: expected a number in (0, 1], got 2.0"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert run("chat", *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
