"""Measures decoding with and without speculation: throughput, acceptance and step cost.

    python scripts/bench_speculation.py --model runs/large/model --tokens runs/demo/tokens.npz \\
        --out benchmarks/results/speculation.json

Prompts are windows of held-out text. Every drafter decodes the same prompts at every temperature,
after a warm-up, as many in a call as the batch has. A result is the median of several runs.
``speed_up`` is the throughput divided by that without speculation in the same run. It equals
``accept_length`` (tokens per step) divided by ``step_cost`` (relative cost of a step). Comparing
with ``ngram`` at the same depth separates the cost of the MTP layer from that of the main model's
wider pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

import dsv3_jax
from benchmarks import machine
from dsv3_jax.files import atomic_write
from dsv3_jax.generation.completion import Generation, Speculation
from dsv3_jax.initialization import parameter_count

PROMPT, NEW = 128, 256
Drafting = tuple[str | None, int | Literal["auto"]]


def held_out_prompts(tokens: np.ndarray, count: int) -> list[list[int]]:
    """Returns prompts from windows that are spread evenly over the held-out stream."""
    starts = np.linspace(0, len(tokens) - PROMPT, count, endpoint=False, dtype=int)
    return [tokens[start : start + PROMPT].tolist() for start in starts]


def measure(
    generator: dsv3_jax.Generator,
    prompts: list[list[int]],
    drafting: Drafting,
    temperature: float,
    repeats: int,
) -> tuple[dict[str, Any], list[list[int]]]:
    draft, depth = drafting
    (size,) = generator.batch_sizes
    # One batch per call, so that no prompt waits for another one's end.
    groups = [range(i, i + size) for i in range(0, len(prompts), size)]

    def generate() -> list[Generation]:
        return [
            generator.generate(
                [prompts[i] for i in group],
                max_new_tokens=NEW,
                ignore_eos=True,
                temperature=temperature,
                seed=group,
                draft=draft,
                draft_depth=depth,
            )
            for group in groups
        ]

    # "auto" measured its step costs while others were compiling: a few runs correct them.
    for _ in range(4 if depth == "auto" else 1):
        generate()
    runs = [generate() for _ in range(repeats)]
    rates, steps = [], []
    for outs in runs:
        # The first token of each completion is not among those that the rate counts.
        later = [out.stats.new_tokens - len(out) for out in outs]
        seconds = sum(n / out.stats.tokens_per_second for n, out in zip(later, outs, strict=True))
        rates.append(sum(later) / seconds)
        steps.append(seconds / sum(out.stats.steps for out in outs))
    completions = [completion for out in runs[-1] for completion in out]
    drafts = Speculation.total([completion.speculation for completion in completions])
    row = {
        "tokens_per_s": round(statistics.median(rates), 1),
        "ms_per_step": round(1000 * statistics.median(steps), 3),
        "accept_length": round(drafts.accept_length, 3) if drafts else 1.0,
        "acceptance": [round(a, 3) for a in drafts.acceptance] if drafts else [],
    }
    return row, [c.tokens for c in completions]


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Returns the share of generations that are equal."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def compare(
    generator: dsv3_jax.Generator,
    prompts: list[list[int]],
    depths: list[int | Literal["auto"]],
    temperatures: list[float],
    repeats: int,
) -> list[dict[str, Any]]:
    """Measures all drafters on the same prompts, in batches of the generator's size."""
    (batch,) = generator.batch_sizes
    draftings: list[Drafting] = [
        (None, 1),
        *(("mtp", depth) for depth in depths),
        ("ngram", 1),
    ]

    def warm(drafting: Drafting) -> float:
        draft, depth = drafting
        if depth == "auto":  # it also measures what a depth costs
            return generator.warm_up(batch, draft=draft, draft_depth=depth)
        began = time.perf_counter()
        for temperature in temperatures:  # without the programs for filters
            generator.generate(
                prompts[:batch],
                max_new_tokens=2,
                temperature=temperature,
                draft=draft,
                draft_depth=depth,
            )
        return time.perf_counter() - began

    with ThreadPoolExecutor(len(draftings)) as pool:  # XLA compiles them concurrently
        compiled = list(pool.map(warm, draftings))
    rows = []
    for temperature in temperatures:
        plain: dict[str, Any] = {}
        plain_tokens: list[list[int]] = []
        for drafting, seconds in zip(draftings, compiled, strict=True):
            row, tokens = measure(generator, prompts, drafting, temperature, repeats)
            if drafting[0] is None:
                plain, plain_tokens = row, tokens
            row = {
                "batch": batch,
                "temperature": temperature,
                "draft": drafting[0],
                "depth": drafting[1] if drafting[0] else 0,
                **row,
                "speed_up": round(row["tokens_per_s"] / plain["tokens_per_s"], 3),
                "step_cost": round(row["ms_per_step"] / plain["ms_per_step"], 3),
                "compile_s": round(seconds, 1),
            }
            if temperature == 0.0:
                row["same_generations"] = agreement(tokens, plain_tokens)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def _depth(word: str) -> int | Literal["auto"]:
    return "auto" if word == "auto" else int(word)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure decoding with and without speculation.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=Path, required=True, help=".npz with `held_out`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=_depth, nargs="+", default=[1, 2, 4, "auto"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    model, _ = dsv3_jax.load(arguments.model, dtype=arguments.dtype)
    held_out = np.load(arguments.tokens)["held_out"]
    rows = []
    for batch in arguments.batches:
        generator = dsv3_jax.Generator(model, None, 512, batch_sizes=(batch,))
        windows = held_out_prompts(held_out, max(batch, 4))  # acceptance varies from text to text
        rows += compare(
            generator, windows, arguments.depths, arguments.temperatures, arguments.repeats
        )
    result = {
        **machine.description(),
        "model": arguments.model,
        "parameters": parameter_count(model),
        "mtp_parameters": parameter_count(model, mtp=True),
        "dtype": str(model.dtype),
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
