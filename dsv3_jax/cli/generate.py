"""Complete prompts with a model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from dsv3_jax.checkpoint.load import load
from dsv3_jax.cli import compile_cache
from dsv3_jax.cli.layouts import add_exchange, add_layout, layout_of, one_speaks
from dsv3_jax.generation.generator import Generator
from dsv3_jax.tokenizer import Tokenizer
from sharding import Layout

_LENGTH_STEP = 256  # max_len is rounded up to this, so that few lengths are ever compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="demo, a directory, a store, or a Hub name (default: demo)")
    add(
        "--prompt",
        action="append",
        required=True,
        help="text to complete; give it several times for a batch; - reads standard input",
    )
    add("--chat", action="store_true", help="render each prompt as a user's message")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--max-len", type=int, metavar="N", help="cache length (default: what the request needs)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--seed", type=int, default=0, metavar="N", help="of every request")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    add("--ignore-eos", action="store_true", help="go on past the end of the text")
    add("--logprobs", type=int, default=0, metavar="N", help="alternatives a token, with --json")
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
    add_layout(parser, default="the first device")
    add_exchange(parser)
    add("--compile-cache", type=Path, metavar="DIR", help="default: ~/.cache/dsv3_jax/xla")
    add("--echo", action="store_true", help="print the prompt before its completion")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object on stdout")
    output.add_argument("--stream", action="store_true", help="print text as it comes (one prompt)")


def run(arguments: argparse.Namespace) -> None:
    compile_cache.enable(arguments.compile_cache)
    layout = layout_of(arguments)
    with one_speaks():
        _generate(arguments, layout)


def _generate(arguments: argparse.Namespace, layout: Layout | None) -> None:
    began = time.perf_counter()
    model, tokenizer = load(
        arguments.model,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        activations=arguments.activations,
        layout=layout,
    )
    _say(f"loaded {arguments.model} in {time.perf_counter() - began:.1f} s")
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer.json; expected one to read a prompt")
    texts = [sys.stdin.read() if p == "-" else p for p in arguments.prompt]
    prompts = [_encode(tokenizer, text, arguments.chat) for text in texts]
    if arguments.stream and len(prompts) != 1:
        raise ValueError(f"--stream: expected one prompt, got {len(prompts)}")
    needed = max(map(len, prompts)) + max(arguments.max_new_tokens, 1)
    reach = model.config.max_position_embeddings
    max_len = arguments.max_len or min(-(-needed // _LENGTH_STEP) * _LENGTH_STEP, reach)
    generator = Generator(model, tokenizer, max_len)
    settings = {
        name: getattr(arguments, name)
        for name in (
            *("max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
            *("seed", "stop", "ignore_eos", "logprobs"),
        )
    }
    depth = arguments.draft_depth
    speculation = {
        "draft": None if arguments.draft == "none" else arguments.draft,
        "draft_depth": int(depth) if depth.isdecimal() else depth,
    }
    settings |= speculation
    generator.requests(prompts, **settings)  # refuses wrong ones before minutes of compilation
    compiled = generator.warm_up(len(prompts), logprobs=arguments.logprobs, **speculation)
    _say(f"compiled, or found in the cache, in {compiled:.1f} s")
    if arguments.draft.startswith("synthetic"):
        _say(f"draft {arguments.draft}: what follows is NOT the model's text; it shows speed alone")
    if arguments.stream:
        _stream(generator, texts[0], prompts[0], settings, arguments.echo)
        return
    generation = generator.generate(prompts, **settings)
    if arguments.json:
        result = {
            "model": arguments.model,
            "completions": [completion.as_json() for completion in generation],
            "stats": generation.stats.as_json(),
        }
        print(json.dumps(result, ensure_ascii=False))
    else:
        for text, completion in zip(texts, generation, strict=True):
            print((text if arguments.echo else "") + completion.text)
    stats = generation.stats
    _report(stats.new_tokens, stats.tokens_per_second, stats.time_to_first_token)
    if (drafts := stats.speculation) is not None:
        by_place = ", ".join(f"{rate:.0%}" for rate in drafts.acceptance)
        _say(f"{drafts.draft}: {drafts.accept_length:.2f} tokens a step, accepted {by_place}")


def _encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    if not text:
        raise ValueError("prompt: expected text, got an empty prompt")
    if chat:
        return tokenizer.chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def _stream(
    generator: Generator, text: str, prompt: list[int], settings: dict[str, Any], echo: bool
) -> None:
    if echo:
        print(text, end="", flush=True)
    began = first = time.perf_counter()
    tokens = 0
    for piece in generator.stream(prompt, **settings):
        if not tokens:
            first = time.perf_counter()
        print(piece, end="", flush=True)
        tokens += len(piece.tokens)
    print(flush=True)
    seconds = time.perf_counter() - first
    _report(tokens, (tokens - 1) / seconds if tokens > 1 else 0.0, first - began)


def _report(tokens: int, rate: float, first: float) -> None:
    _say(f"{tokens} tokens, {rate:.0f} tokens/s, first token after {first * 1000:.0f} ms")


def _say(line: str) -> None:
    print(f"dsv3: {line}", file=sys.stderr, flush=True)
