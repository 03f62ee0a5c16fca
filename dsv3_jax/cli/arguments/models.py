"""Arguments of ``dsv3 generate``, ``eval`` and ``chat``, which run a model."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.generation.settings import DEFAULT_NEW_TOKENS


def add_generate(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.text("--model", shared.MODEL, "demo")
    add.argument(
        "--prompt",
        dest="prompts",
        action="append",
        type=lambda text: ("--prompt", text),
        default=[],
        metavar="TEXT",
        help="text to complete; repeat it for a batch; - reads standard input",
    )
    add.argument(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=lambda name: ("--prompt-file", name),
        metavar="FILE",
        help="file with a text to complete; can be repeated and combined with --prompt",
    )
    add.switch("--chat", "treat each prompt as a user message of a chat")
    add.text("--system", "with --chat: system message before each prompt", metavar="TEXT")
    add.switch(
        "--special-tokens",
        "read control tokens in prompts, such as <think>, as control tokens and not as text",
    )
    add.integer(
        "--max-new-tokens",
        f"largest number of tokens to generate for each completion (default:"
        f" {DEFAULT_NEW_TOKENS}, or fewer near the model's last position)",
    )
    add.integer(
        "--max-len",
        "positions of the cache, for prompt and completion together (default: the number that"
        " the request needs)",
    )
    _add_sampling(add, temperature=0.0, top_p=1.0)
    add.integer("--top-k", "sample from the K most probable tokens; 0 is all", 0, metavar="K")
    add.real(
        "--min-p",
        "sample from tokens with at least P times the highest probability",
        0.0,
        metavar="P",
    )
    add.real("--presence-penalty", "subtract X from the logits of tokens in the completion", 0.0)
    add.real(
        "--frequency-penalty", "subtract X for every time that a token is in the completion", 0.0
    )
    add.real(
        "--repetition-penalty",
        "divide positive logits of tokens in the prompt or the completion by X, and multiply"
        " negative ones",
        1.0,
    )
    add.integer("--min-tokens", "number of tokens before which a completion does not end", 0)
    add.integer(
        "--seed", "random seed of each prompt (default: completion i has seed i, counted from 0)"
    )
    add.integer("--n", "number of completions of each prompt (default: 1)")
    add.argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text; can be repeated",
    )
    add.switch("--ignore-eos", "continue after an end-of-text token")
    add.integer("--logprobs", "with --json: report the N most probable tokens at each position", 0)
    shared.add_drafts(add)
    shared.add_weights(add)
    shared.add_layout(add)
    shared.add_distributed(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)
    add.switch("--echo", "print each prompt before its completion")
    output = Flags(parser.add_mutually_exclusive_group())
    output.switch("--json", "print one JSON object on stdout")
    output.switch("--stream", "print text as it is generated; needs a single prompt")


def add_eval(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.text("--model", shared.MODEL, "demo")
    add.text(
        "--data",
        "text files, glob patterns or directories; each line of a .jsonl file is a JSON object"
        " with a text",
        nargs="+",
        required=True,
        metavar="PATH",
    )
    add.integer(
        "--length", "tokens per window (default: 1024, or fewer if the model takes no more)"
    )
    add.integer("--stride", "tokens from one window of a text to the next (default: the length)")
    add.integer("--batch", "windows per forward pass", 8)
    add.integer(
        "--cache",
        "read windows through the KV cache in the form of decoding, N tokens per step (16 if"
        " not given; 1 is decoding itself)",
        nargs="?",
        const=16,
    )
    add.path("--out", "JSON file for the sums so far, with which an interrupted command continues")
    add.switch("--resume", "continue with the sums in --out")
    shared.add_weights(add)
    shared.add_layout(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)
    shared.add_json(add)


def add_chat(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.text(
        "--model",
        f"{shared.MODEL} (default: demo); with --url: the id of a model (default: the server's"
        " first)",
    )
    add.text(
        "--url", "talk to a server with OpenAI's API at this address, instead of loading a model"
    )
    add.path("--api-key-file", "with --url: file with the API key")
    add.text("--system", "system message of the conversation", metavar="TEXT")
    add.integer("--max-new-tokens", "largest number of tokens of an answer (default: what fits)")
    _add_sampling(add, temperature=0.6, top_p=0.95)
    add.integer(
        "--max-len",
        "largest number of tokens of a conversation (default: 4096, or the model's last position)",
    )
    shared.add_drafts(add)
    shared.add_weights(add)
    shared.add_layout(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)


def _add_sampling(add: Flags, *, temperature: float, top_p: float) -> None:
    add.real("--temperature", "sampling temperature; 0 is greedy", temperature, metavar="T")
    add.real(
        "--top-p",
        "sample from the most probable tokens whose probabilities sum to P",
        top_p,
        metavar="P",
    )
