"""Entry point of the ``dsv3`` command: parses, runs the subcommand, and returns the exit status.

Exit status 0: success. 1: an internal error, with its traceback. 2: bad usage, bad input, or a file
that the system cannot read or write, with one line on stderr. 130: interrupted. Results go to
stdout, everything else to stderr.

Arguments are parsed before anything slow is imported. ``cli/arguments/NAME.py`` defines the
arguments of a subcommand and does not import JAX; ``cli/NAME.py`` runs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import dsv3_jax
from dsv3_jax.cli import allocator
from dsv3_jax.cli.arguments import (
    bench,
    chat,
    convert,
    doctor,
    export,
    generate,
    plan,
    serve,
    train,
    verify,
)
from dsv3_jax.cli.arguments import eval as evaluation
from dsv3_jax.cli.arguments.parser import Parser
from dsv3_jax.interrupts import STATUS, Interrupts


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and all subcommands."""
    top = Parser(
        prog="dsv3",
        description="DeepSeek-V3 and R1 in JAX: generate text, convert checkpoints, train, and plan"
        " deployments.",
        epilog="dsv3 COMMAND --help explains a command. Results go to stdout, messages to stderr.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"dsv3 {dsv3_jax.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    checkpoints, others = (convert, verify, export), (plan, doctor, serve, chat, bench)
    for module in (generate, *checkpoints, train, evaluation, *others):
        name = module.__name__.rsplit(".", 1)[1]
        summary = module.SUMMARY
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
      arguments: the words after ``dsv3``. None takes those of the process.
      interrupts: handler of Ctrl-C, if the command has the process to itself. Then the command also
        sets JAX's allocator.
    """
    parsed = parser().parse_args(arguments)
    parsed.allocator = allocator.describe(os.environ)
    if interrupts is not None:
        allocator.configure(parsed.command)  # before JAX uses a device
    try:
        command = importlib.import_module(f"dsv3_jax.cli.{parsed.command}")
        if interrupts is not None:
            interrupts.raise_from_now_on()
        command.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout, such as head, has closed it. Discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ValueError as error:
        return _refuse(parsed.command, str(error))
    except OSError as error:
        # For example a full disk or a read-only directory, where a traceback would not help.
        from dsv3_jax.words import os_error_message

        return _refuse(parsed.command, os_error_message(error))
    except KeyboardInterrupt:
        return STATUS
    except Exception:
        if interrupts is not None and interrupts.seen:
            return STATUS
        raise
    return 0


def _refuse(command: str, reason: str) -> int:
    print(f"dsv3 {command}: error: {reason}", file=sys.stderr)
    return 2
