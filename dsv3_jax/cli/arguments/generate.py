"""Arguments of ``dsv3 generate``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.generation.settings import DEFAULT_NEW_TOKENS

SUMMARY = "Complete prompts with a model."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="demo, a directory, a store, or a Hub name (default: demo)")
    add(
        "--prompt",
        dest="prompts",
        action="append",
        type=lambda text: ("--prompt", text),
        default=[],
        metavar="TEXT",
        help="text to complete; give it several times for a batch; - reads standard input",
    )
    add(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=lambda name: ("--prompt-file", name),
        metavar="FILE",
        help="complete the text of a file; several times for a batch, also beside --prompt",
    )
    add("--chat", action="store_true", help="render each prompt as a user's message")
    add("--system", metavar="TEXT", help="with --chat: a system message before each prompt")
    add(
        "--special-tokens",
        action="store_true",
        help="make control tokens of those that prompts spell, such as <think>; else they are text",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"most tokens of a completion (default: {DEFAULT_NEW_TOKENS}, or what the model can)",
    )
    add("--max-len", type=int, metavar="N", help="cache length (default: what the request needs)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    add("--min-p", type=float, default=0.0, metavar="P")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="of each prompt; default: the i-th completion has seed i, counted from 0",
    )
    add("--n", type=int, metavar="N", help="completions for each prompt (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    add("--ignore-eos", action="store_true", help="go on past the end of the text")
    add(
        "--logprobs",
        type=int,
        default=0,
        metavar="N",
        help="alternatives for each token; needs --json",
    )
    add(
        "--draft",
        default="none",
        metavar="WHO",
        help="speculate: mtp, ngram, synthetic:RATE (speed alone, not the model's text), or none",
    )
    add("--draft-depth", default="1", metavar="N", help="1 to 4 tokens ahead (default 1), or auto")
    add("--dtype", choices=["bfloat16", "float32"], help="default: float32 on a CPU, else bfloat16")
    add(
        "--quantization",
        choices=["fp8", "int8", "int4"],
        help="keep weights in memory as stored: float8 as published, integers of a store",
    )
    add(
        "--activations",
        choices=["float8"],
        help="with --quantization fp8: rounds activations too, where rows are many",
    )
    shared.add_layout(parser, default="the first device")
    shared.add_exchange(parser)
    shared.add_compile_cache(parser)
    add("--echo", action="store_true", help="print the prompt before its completion")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object on stdout")
    output.add_argument("--stream", action="store_true", help="print text as it comes (one prompt)")
