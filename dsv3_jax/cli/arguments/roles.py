"""Arguments of the roles of a server: prefill, decode or both."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments.parser import Flags


def add_roles(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the parser of ``dsv3 serve``."""
    add = Flags(parser.add_argument_group("prefill and decode on separate servers"))
    add.choice(
        "--role",
        "prefill: also computes cache pages of prompts for decode servers; decode: pulls these"
        " pages from the servers of --prefill-url and computes what does not arrive (default:"
        " both, a server on its own)",
        choices=("both", "prefill", "decode"),
        default="both",
    )
    add.argument(
        "--prefill-url",
        action="append",
        metavar="URL",
        help="a prefill server, for --role decode; can be given several times",
    )
    add.path(
        "--prefill-api-key-file",
        "file whose first key the prefill servers expect (default: no key)",
    )
    add.real(
        "--prefill-seconds",
        "longest time for the pages of a prompt to arrive; after it the decode server computes"
        " them (default: 30)",
    )
    add.integer(
        "--prefill-min-tokens",
        "prompts with fewer tokens that are not cached are left to the decode server (default: 64)",
    )
    add.choice(
        "--transfer",
        "transport of the pages, the same on both sides: HTTP answers, or"
        " jax.experimental.transfer, whose port must be reachable by decode servers alone"
        " (default: http)",
        choices=("http", "jax"),
    )
    add.integer(
        "--transfer-port",
        "TCP port of --transfer jax on a prefill server; 0 takes a free one (default: 0)",
    )
