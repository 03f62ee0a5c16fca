"""Entry point of the ``dsv3`` command: parses, runs the subcommand, and returns the exit status.

Exit status 0: success. 1: an internal error, with its traceback. 2: bad usage, bad input, or a file
that the system cannot read or write, with one line on stderr. 130: interrupted. Results go to
stdout, everything else to stderr.

Arguments are parsed before anything slow is imported. ``cli/arguments`` defines the arguments of
subcommands and does not import JAX; ``cli/NAME.py`` runs one.
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
from dsv3_jax.cli.arguments import checkpoints, models, plan, servers, train
from dsv3_jax.cli.arguments.parser import Parser
from dsv3_jax.interrupts import STATUS, Interrupts

COMMANDS = {
    "generate": (models.add_generate, "Complete prompts with a model."),
    "convert": (
        checkpoints.add_convert,
        "Convert a published checkpoint to a store of bf16, fp8, int8 or int4 weights; resumable.",
    ),
    "verify": (
        checkpoints.add_verify,
        "Check every value of a checkpoint, or compare two checkpoints.",
    ),
    "export": (
        checkpoints.add_export,
        "Write a store, or a checkpoint of a training run, as a Hugging Face directory.",
    ),
    "train": (train.add_arguments, train.SUMMARY),
    "eval": (models.add_eval, "Measure the perplexity of a model on texts."),
    "plan": (plan.add_arguments, plan.SUMMARY),
    "doctor": (
        servers.add_doctor,
        "Report this machine's versions, devices, and which kernels work on it.",
    ),
    "serve": (servers.add_serve, "Serve a model over HTTP with the APIs of OpenAI and Anthropic."),
    "chat": (models.add_chat, "Chat with a model in the terminal."),
    "bench": (
        servers.add_bench,
        "Measure a server: throughput and latencies of a trace of requests.",
    ),
}
"""The function that adds the arguments of each subcommand, and its summary."""


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
    for name, (add_arguments, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Runs one command, the words after ``dsv3``, and returns its exit status. A command that has
    the process to itself has a handler of Ctrl-C, ``interrupts``, and sets JAX's allocator."""
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
