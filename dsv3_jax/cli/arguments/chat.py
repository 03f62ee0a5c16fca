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
        help="demo, a Hugging Face directory, a store, or a name on the Hub (default: demo); with"
        " --url: the id of a model (default: the server's first)",
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
        default=4096,
        metavar="N",
        help="largest number of tokens of a conversation (default: 4096, or the model's last"
        " position)",
    )
    add(
        "--draft",
        default="none",
        metavar="DRAFTER",
        help="speculative decoding with mtp or ngram drafts (default: none)",
    )
    add(
        "--draft-depth",
        default="1",
        metavar="N",
        help="number of tokens to draft in each step, 1 to 4, or auto (default: 1)",
    )
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="dtype of weights and activations (default: bfloat16; float32 on a CPU)",
    )
    add(
        "--quantization",
        choices=["fp8", "int8", "int4"],
        help="keep weights in memory as stored (default: dequantize them to --dtype)",
    )
    shared.add_layout(parser)
    shared.add_exchange(parser)
    shared.add_compile_cache(parser)
