"""Arguments of ``dsv3 chat``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Chat with a model in the terminal."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "--model",
        help="demo, demo-sparse, a Hugging Face directory, a store, or a Hub name (default: demo);"
        " with --url: the id of a model (default: the server's first)",
    )
    add(
        "--url",
        help="talk to a server with OpenAI's API at this address, instead of loading a model",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="with --url: file with the API key")
    add("--system", metavar="TEXT", help="system message of the conversation")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="largest number of tokens of an answer (default: what fits)",
    )
    add(
        "--temperature",
        type=float,
        default=0.6,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: 0.6)",
    )
    add(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the most probable tokens whose probabilities sum to P (default: 0.95)",
    )
    add(
        "--max-len",
        type=int,
        metavar="N",
        help="largest number of tokens of a conversation (default: 4096, or the model's last"
        " position)",
    )
    shared.add_drafts(parser)
    shared.add_weights(parser)
    shared.add_layout(parser)
    shared.add_exchange(parser)
    shared.add_compile_cache(parser)
