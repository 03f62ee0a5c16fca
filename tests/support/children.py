"""Runs the dsv3 command in child processes, which can be killed or run out of disk space.

They are forked from a server that has already imported the command, so that they start quickly.
"""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dsv3_jax.cli.main import main
from dsv3_jax.interrupts import Interrupts

Hook = Callable[[], object]
"""Function that the child calls before the command. It must be picklable."""

_VERBS = ("convert", "export", "verify")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    # Commands import orbax when they run, which takes half of a child's time.
    [f"dsv3_jax.{part}.{verb}" for part in ("checkpoint", "cli") for verb in _VERBS]
    + ["tests.support.children"]
)


class Child:
    """A command that is running or has ended."""

    def __init__(self, log: Path, *arguments: object, hook: Hook | None = None):
        self._log = log
        words = [str(argument) for argument in arguments]
        self._process = _CONTEXT.Process(target=_run, args=(words, str(log), hook), daemon=True)
        self._process.start()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    @property
    def output(self) -> str:
        """stdout and stderr of the command so far."""
        return self._log.read_text()

    def kill(self) -> None:
        self._process.kill()

    def interrupt(self) -> None:
        """Sends the signal of Ctrl-C."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self, timeout: float = 120) -> int:
        """Waits and returns the exit status, which is negative if a signal ended the child."""
        self._process.join(timeout)
        if self.running:
            self.kill()
            raise AssertionError(f"still running after {timeout} s: {self.output}")
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(arguments: list[str], log: str, hook: Hook | None) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A process that a shell started in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = lambda descriptor: None  # syncing is slow, and these tests have no power failures
    if hook is not None:
        hook()
    # As in the real command. Otherwise Python drops an interrupt that arrives in a callback of the
    # garbage collector, and the command goes on to the end.
    status = main(arguments, Interrupts())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- hooks ---------------------------------------------------------------------------------------


def slow_reads(seconds: float) -> None:
    """Delays every read of a tensor, so that even a small checkpoint takes some time."""
    _wrap(os, "preadv", partial(time.sleep, seconds))


def small_files(limit: int) -> None:
    """Makes writes past `limit` bytes of a file fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def believes_in_space() -> None:
    """Makes the disk look empty, so that it becomes full although the check of free space
    passed."""
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: usage._replace(total=2**60, free=2**60)
    real = os.statvfs

    def statvfs(path: Any) -> os.statvfs_result:
        fields = list(real(path))
        fields[2:5] = [2**40] * 3  # f_blocks, f_bfree, f_bavail
        return os.statvfs_result(fields)

    os.statvfs = statvfs


def dies_at(directory: str, number: int) -> None:
    """Sends SIGKILL to this process at the `number`-th call that touches files in `directory`."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if _touches(event, arguments, directory):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def counts_touches(directory: str, out: str) -> None:
    """Logs the calls that `dies_at` would count, one line each."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if _touches(event, arguments, directory):
            lines.append(f"{event} {arguments[0]}\n".encode())
            os.pwrite(descriptor, lines[-1], sum(map(len, lines[:-1])))

    lines: list[bytes] = []
    descriptor = os.open(out, os.O_CREAT | os.O_WRONLY)
    sys.addaudithook(watch)


def _touches(event: str, arguments: tuple[Any, ...], directory: str) -> bool:
    kinds = ("open", "os.", "shutil.")
    return event.startswith(kinds) and bool(arguments) and directory in str(arguments[0])


class FailingReads:
    """Replacement for `os.preadv` that counts its calls and fails after the first `after` calls."""

    def __init__(self, after: int):
        self.after = after
        self.calls = 0
        self._real = os.preadv

    def __call__(self, descriptor: int, *arguments: Any) -> int:
        self.calls += 1
        if self.calls > self.after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._real(descriptor, *arguments)


def _wrap(module: Any, name: str, before: Hook) -> None:
    real = getattr(module, name)

    def call(*arguments: Any) -> Any:
        before()
        return real(*arguments)

    setattr(module, name, call)
