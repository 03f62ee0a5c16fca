"""The ``dsv3`` command: parsing, exit statuses, and the way to each subcommand.

Exit status 0: good. 2: bad usage, bad input, or a file that the system refuses, with one line on
stderr. 1: an internal error, with its traceback. 130: interrupted. Results go to stdout, everything
else to stderr.

Arguments are parsed before anything heavy is imported: ``cli/arguments/`` has those of a subcommand
and needs no JAX, the module of the same name in ``cli/`` runs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import dsv3_jax
from dsv3_jax.cli.arguments import convert, doctor, export, generate, plan, train, verify
from dsv3_jax.cli.arguments.parser import Parser
from dsv3_jax.cli.interrupts import STATUS, Interrupts


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="dsv3", description="DeepSeek-V3/R1 in JAX.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"dsv3 {dsv3_jax.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, convert, verify, export, train, plan, doctor):
        name = module.__name__.rsplit(".", 1)[1]
        summary = module.SUMMARY
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Runs one command; returns its exit status.

    Args:
      arguments: those behind ``dsv3``; None takes the process's own.
      interrupts: handles Ctrl-C, where the process is the command's own.
    """
    parsed = parser().parse_args(arguments)
    try:
        command = importlib.import_module(f"dsv3_jax.cli.{parsed.command}")
        if interrupts is not None:
            interrupts.raise_from_now_on()
        command.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read has read enough, as head does; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ValueError as error:
        return _refuse(parsed.command, str(error))
    except OSError as error:
        # A disk that is full, a directory that may not be written: nothing that a traceback tells.
        from dsv3_jax.checkpoint.messages import os_error_message

        return _refuse(parsed.command, os_error_message(error))
    except KeyboardInterrupt:
        return STATUS
    except Exception:
        if interrupts is not None and interrupts.seen:
            return STATUS
        raise
    return 0


def _refuse(command: str, why: str) -> int:
    print(f"dsv3 {command}: error: {why}", file=sys.stderr)
    return 2
