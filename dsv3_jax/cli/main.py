"""The ``dsv3`` command: parsing, exit statuses, and the way to each subcommand.

Exit status 0: good. 2: bad usage or bad input, with one line on stderr. 1: an internal error, with
its traceback. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import dsv3_jax
from dsv3_jax.cli import convert, doctor, export, generate, plan, train, verify


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="dsv3", description="DeepSeek-V3/R1 in JAX.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"dsv3 {dsv3_jax.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, convert, verify, export, train, plan, doctor):
        name = module.__name__.rsplit(".", 1)[1]
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parsed = parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read has read enough, as head does; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ValueError as error:
        print(f"dsv3 {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
