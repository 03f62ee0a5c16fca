"""The part of ``dsv3 generate`` that needs JAX: loads the model, generates, and prints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from dsv3_jax import compile_cache
from dsv3_jax.cli import loading
from dsv3_jax.cli.output import log, print_json
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.completion import Generation
from dsv3_jax.generation.drafters import DraftPlan
from dsv3_jax.generation.errors import Interrupted, NonFiniteLogitsError
from dsv3_jax.offline.generator import Generator
from dsv3_jax.words import counted


def run_generation(
    arguments: argparse.Namespace,
    config: ModelConfig,
    texts: Sequence[str],
    prompts: Sequence[list[int]],
    max_len: int,
    settings: dict[str, Any],
) -> None:
    """Completes prompts, as texts and ids, that were checked against the model's config and
    tokenizer, with settings of :meth:`Generator.generate`."""
    DraftPlan.read(settings["draft"], settings["draft_depth"], config)
    compile_cache.enable(arguments.compile_cache)
    layout = loading.make_layout_from(arguments)
    expected = (
        f"{arguments.model}: expected a model and a cache that fit on the devices (--quantization,"
        " --layout, --max-new-tokens and the number of prompts change their size; dsv3 plan reports"
        " what fits)"
    )
    with loading.only_first_process_prints(), loading.refused_if_too_large(expected):
        began = time.perf_counter()
        model, tokenizer = loading.load_model(arguments, arguments.model, layout)
        log(f"loaded {arguments.model} in {time.perf_counter() - began:.1f} s")
        generator = Generator(model, tokenizer, max_len)
        # Again, with the weights, which may lack a part that the config promises, such as MTP.
        generator.requests(prompts, **settings)
        speculation = {name: settings[name] for name in ("draft", "draft_depth")}
        with StatusLine("compiling"):
            batch_size = len(prompts) * settings.get("n", 1)
            compiled = generator.warm_up(batch_size, logprobs=arguments.logprobs, **speculation)
        log(f"compiled, or loaded from the compile cache, in {compiled:.1f} s")
        if arguments.draft.startswith("synthetic"):
            warning = "what follows is NOT the model's text; it shows speed alone"
            log(f"draft {arguments.draft}: {warning}")
        if arguments.stream:
            _stream(generator, texts[0], prompts[0], settings, arguments.echo)
            return
        try:
            with StatusLine("generating") as status:
                generation = generator.generate(
                    prompts,
                    **settings,
                    progress=lambda tokens: status.show(counted(tokens, "token")),
                )
        except (Interrupted, NonFiniteLogitsError) as error:
            _print(arguments, texts, error.generation)  # the completions so far
            raise
        _print(arguments, texts, generation)


def _print(arguments: argparse.Namespace, texts: Sequence[str], generation: Generation) -> None:
    if arguments.json:
        result = {
            "model": arguments.model,
            "completions": [completion.as_json() for completion in generation],
            "stats": generation.stats.as_json(),
        }
        print_json(result)
    else:
        n = arguments.n or 1
        for i, completion in enumerate(generation):
            prompt, number = divmod(i, n)
            if len(texts) * n > 1:
                print("\n" * (i > 0) + _label(texts, prompt, number, n))
            print((texts[prompt] if arguments.echo else "") + completion.text)
    sys.stdout.flush()
    stats = generation.stats
    _log_speed(stats.new_tokens, stats.tokens_per_second, stats.time_to_first_token)
    if (speculation := stats.speculation) is not None:
        accepted = ", ".join(f"{rate:.0%}" for rate in speculation.acceptance)
        log(
            f"{speculation.draft}: {speculation.accept_length:.2f} tokens per step, accepted"
            f" {accepted}"
        )


def _label(texts: Sequence[str], prompt: int, number: int, n: int) -> str:
    """Returns the line above a completion, if there are several."""
    which = f"prompt {prompt + 1} of {len(texts)}" if len(texts) > 1 else "prompt"
    if n > 1:
        which = f"completion {number + 1} of {n}, {which}"
    text = " ".join(texts[prompt].split())
    return f"==> {which}: {text if len(text) <= 40 else text[:37] + '...'} <=="


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
    _log_speed(tokens, (tokens - 1) / seconds if tokens > 1 else 0.0, first - began)


def _log_speed(tokens: int, tokens_per_s: float, first_token_s: float) -> None:
    count, first_token_ms = counted(tokens, "token"), first_token_s * 1000
    log(f"{count}, {tokens_per_s:.0f} tokens/s, first token after {first_token_ms:.0f} ms")
