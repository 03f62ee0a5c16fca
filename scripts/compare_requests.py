"""Completes 200 requests of every kind and compares their tokens and log-probabilities bit by bit.

    python -m scripts.compare_requests record before.json
    python -m scripts.compare_requests compare before.json after.json

Run ``record`` at two commits on one machine. ``compare`` prints how many requests of each kind are
equal, and the first difference of each other one; its exit status is 1 if there is any. The
requests go to the trained checkpoint of this package: greedy ones, sampled ones, some with drafts
of the MTP layer, with a grammar, in a cache so small that requests are preempted, in deterministic
mode, and to a Generator. A log-probability is recorded as the hexadecimal digits of its float, so
that equal records mean equal bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dsv3_jax
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.files import atomic_write
from dsv3_jax.generation.completion import Completion
from dsv3_jax.generation.request import TokenMask

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\ndef read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "# Sorts a list in place.\ndef quicksort(items, low, high):\n",
    "for i in range(10):\n    if i % 2 == 0:\n",
    "from collections import defaultdict\n\ncounts = defaultdict(int)\nfor word in words:\n",
    'def main():\n    parser = argparse.ArgumentParser(description="',
    "try:\n    with open(path) as file:\n        data = json.load(file)\nexcept",
    "    def __repr__(self):\n        return f'",
    "x = [",
)
"""Beginnings of Python files, which the checkpoint was trained on."""

LONG = "\n\n".join(PROMPTS)

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
)


class Digits:
    """A grammar of tokens with and without digits in turn, whose text ends after some tokens."""

    def __init__(self, masks: Sequence[np.ndarray], length: int):
        *self._masks, self._end = masks
        self._tokens, self._length = 0, length

    @staticmethod
    def masks(model: dsv3_jax.DeepSeekV3, tokenizer: dsv3_jax.Tokenizer) -> list[np.ndarray]:
        """Returns the masks of tokens with digits, of those without, and of the end."""
        ends = list(model.config.eos_token_id)
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        digits = [i for i, text in enumerate(texts) if text.strip().isdigit()]
        others = sorted({*range(len(texts))} - {*digits, *ends})
        size = model.config.vocab_size
        return [TokenMask.of(size, tokens).words for tokens in (digits, others, ends)]

    def mask(self) -> np.ndarray:
        return self._end if self._tokens == self._length else self._masks[self._tokens % 2]

    def accept(self, token: int) -> None:
        self._tokens += 1


def settings_of(i: int, *, sampled: bool) -> dict[str, Any]:
    """Returns the settings of the i-th request of a kind."""
    settings = {"max_new_tokens": 16 + 5 * (i % 7), "logprobs": (0, 3)[i % 2], "seed": i}
    return settings | SAMPLING[i % len(SAMPLING)] if sampled else settings


def prompt_of(i: int) -> str:
    return PROMPTS[i % len(PROMPTS)] + LONG[: 97 * (i // len(PROMPTS))]


def served(
    model: dsv3_jax.DeepSeekV3,
    tokenizer: dsv3_jax.Tokenizer,
    requests: Sequence[tuple[str, dict[str, Any]]],
    **settings: Any,
) -> tuple[list[Completion], dsv3_jax.engine.EngineStats]:
    """Returns the completions of requests that an engine got all at once, and its figures.

    Every dispatch decodes one step. How many it would choose depends on the clock, and the programs
    of later steps, whose sums differ in the last bit, on the requests that are left by then.
    """
    slots = 8
    buckets = dataclasses.replace(Buckets.of_devices(slots, None), max_steps=1)
    with dsv3_jax.Engine(
        model, tokenizer, 512, max_running=slots, buckets=buckets, background=False, **settings
    ) as engine:
        handles = [engine.submit(prompt, **request) for prompt, request in requests]
        while engine.step():
            pass
        return [handle.result() for handle in handles], engine.stats()


def completions() -> Iterator[tuple[str, list[Completion]]]:
    """Yields each kind of requests with their completions, 200 in all."""
    model, tokenizer = dsv3_jax.load("demo")
    assert tokenizer is not None, "the checkpoint has a tokenizer"

    def requests(count: int, sampled: bool | None = None) -> list[tuple[str, dict[str, Any]]]:
        return [
            (prompt_of(i), settings_of(i, sampled=i % 2 == 1 if sampled is None else sampled))
            for i in range(count)
        ]

    yield "greedy", served(model, tokenizer, requests(40, sampled=False))[0]
    yield "sampled", served(model, tokenizer, requests(40, sampled=True))[0]
    yield "drafts", served(model, tokenizer, requests(40), draft="mtp", draft_depth=2)[0]

    masks = Digits.masks(model, tokenizer)
    constrained = [
        (prompt, settings | {"grammar": Digits(masks, 12 + i)})
        for i, (prompt, settings) in enumerate(requests(20))
    ]
    yield "grammar", served(model, tokenizer, constrained, draft="mtp")[0]

    grown = [(prompt, settings | {"max_new_tokens": 150}) for prompt, settings in requests(20)]
    results, stats = served(model, tokenizer, grown, cache_tokens=1024)
    if not stats.preemptions:
        raise RuntimeError("expected a cache of 1,024 tokens to preempt requests, got none")
    yield "preempted", results

    yield "deterministic", served(model, tokenizer, requests(20), deterministic=True)[0]

    generator = dsv3_jax.Generator(model, tokenizer, max_len=512)
    drafters = itertools.cycle(("mtp", "ngram", None))
    results = []
    for (prompt, settings), draft in zip(requests(20), drafters, strict=False):
        results += generator.generate(prompt, draft=draft, **settings)
    yield "Generator", results


def bits(completion: Completion) -> dict[str, Any]:
    """Returns what must not change of a completion."""
    top = completion.top_logprobs
    return {
        "text": completion.text,
        "tokens": list(map(int, completion.tokens)),
        "finish_reason": completion.finish_reason,
        "logprobs": [float(value).hex() for value in completion.logprobs],
        "top_logprobs": top
        and [[(int(token), float(value).hex()) for token, value in each] for each in top],
    }


def record(out: Path) -> int:
    kinds = {}
    for kind, results in completions():
        kinds[kind] = list(map(bits, results))
        print(f"{kind}: {len(results)} requests", file=sys.stderr)
    device = jax.devices()[0].device_kind
    atomic_write(out, json.dumps({"device": device, "jax": jax.__version__, "kinds": kinds}))
    return 0


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    for name in ("device", "jax"):
        if before[name] != after[name]:
            raise SystemExit(f"{name}: expected records of one, got {before[name]}, {after[name]}")
    counts: Counter[str] = Counter()
    for kind, old in before["kinds"].items():
        for i, (a, b) in enumerate(zip(old, after["kinds"][kind], strict=True)):
            counts["requests"] += 1
            changed = [field for field in a if a[field] != b[field]]
            if changed:
                counts["different"] += 1
                print(
                    f"{kind} {i}: {', '.join(changed)} differ: {a[changed[0]]} -> {b[changed[0]]}"
                )
        print(f"{kind}: {len(old)} requests compared")
    print(f"{counts['requests']} requests on {before['device']}, {counts['different']} different")
    return int(counts["different"] > 0)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("out", type=Path)
    command = commands.add_parser("compare")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    arguments = parser.parse_args(words)
    if arguments.command == "record":
        return record(arguments.out)
    return compare(*(json.loads(p.read_text()) for p in (arguments.before, arguments.after)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
