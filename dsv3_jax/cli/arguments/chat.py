"""Arguments of ``dsv3 chat``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

SUMMARY = "Chat with a model in the terminal."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.text(
        "--model",
        "demo, demo-sparse, a Hugging Face directory, a store, or a Hub name (default: demo);"
        " with --url: the id of a model (default: the server's first)",
    )
    add.text(
        "--url", "talk to a server with OpenAI's API at this address, instead of loading a model"
    )
    add.path("--api-key-file", "with --url: file with the API key")
    add.text("--system", "system message of the conversation", metavar="TEXT")
    add.integer("--max-new-tokens", "largest number of tokens of an answer (default: what fits)")
    add.real("--temperature", "sampling temperature; 0 is greedy", 0.6, metavar="T")
    add.real(
        "--top-p",
        "sample from the most probable tokens whose probabilities sum to P",
        0.95,
        metavar="P",
    )
    add.integer(
        "--max-len",
        "largest number of tokens of a conversation (default: 4096, or the model's last position)",
    )
    shared.add_drafts(add)
    shared.add_weights(add)
    shared.add_layout(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)
