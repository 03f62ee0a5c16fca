"""Arguments of ``dsv3 generate``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.generation.settings import DEFAULT_NEW_TOKENS

SUMMARY = "Complete prompts with a model."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "--model",
        default="demo",
        help="demo, demo-sparse, a Hugging Face directory, a store, or a Hub name (default: demo)",
    )
    add(
        "--prompt",
        dest="prompts",
        action="append",
        type=lambda text: ("--prompt", text),
        default=[],
        metavar="TEXT",
        help="text to complete; repeat it for a batch; - reads standard input",
    )
    add(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=lambda name: ("--prompt-file", name),
        metavar="FILE",
        help="file with a text to complete; can be repeated and combined with --prompt",
    )
    add("--chat", action="store_true", help="treat each prompt as a user message of a chat")
    add("--system", metavar="TEXT", help="with --chat: system message before each prompt")
    add(
        "--special-tokens",
        action="store_true",
        help="read control tokens in prompts, such as <think>, as control tokens and not as text",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"largest number of tokens to generate for each completion (default:"
        f" {DEFAULT_NEW_TOKENS}, or fewer near the model's last position)",
    )
    add(
        "--max-len",
        type=int,
        metavar="N",
        help="positions of the cache, for prompt and completion together (default: the number"
        " that the request needs)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: 0)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most probable tokens whose probabilities sum to P (default: 1)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most probable tokens; 0 is all (default: 0)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens with at least P times the highest probability (default: 0)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtract X from the logits of tokens in the completion (default: 0)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtract X for every time that a token is in the completion (default: 0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divide positive logits of tokens in the prompt or the completion by X, and multiply "
        "negative ones (default: 1)",
    )
    add(
        "--min-tokens",
        type=int,
        default=0,
        metavar="N",
        help="number of tokens before which a completion does not end (default: 0)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="random seed of each prompt (default: completion i has seed i, counted from 0)",
    )
    add("--n", type=int, metavar="N", help="number of completions of each prompt (default: 1)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text; can be repeated",
    )
    add("--ignore-eos", action="store_true", help="continue after an end-of-text token")
    add(
        "--logprobs",
        type=int,
        default=0,
        metavar="N",
        help="with --json: report the N most probable tokens at each position (default: 0)",
    )
    shared.add_drafts(parser)
    shared.add_weights(parser)
    shared.add_layout(parser)
    shared.add_distributed(parser)
    shared.add_exchange(parser)
    shared.add_compile_cache(parser)
    add("--echo", action="store_true", help="print each prompt before its completion")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    output.add_argument(
        "--stream", action="store_true", help="print text as it is generated; needs a single prompt"
    )
