"""Completes a trace of requests with a Generator, and measures the throughput."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.serving.replay import lengths_scaled
from dsv3_jax import Generator
from dsv3_jax.traces import Trace


def complete(
    generator: Generator,
    trace: Trace,
    *,
    count: int | None = None,
    vocab_size: int,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Completes all requests of a trace in one call, and returns throughput in tokens per second.

    Every request generates exactly its number of output tokens, greedily. The programs are compiled
    first.

    Args:
      count: number of requests; None takes all.
      scale: factor of prompt and output lengths, for small models.
    """
    prompts, outputs = lengths_scaled(trace, count, vocab_size, scale)
    warm_up_s = generator.warm_up(min(len(prompts), generator.batch_sizes[-1]))
    began = time.perf_counter()
    generation = generator.generate(prompts, max_new_tokens=outputs, ignore_eos=True)
    seconds = time.perf_counter() - began
    tokens = sum(len(completion.tokens) for completion in generation)
    return {
        "requests": len(prompts),
        "batch_sizes": list(generator.batch_sizes),
        "warm_up_s": round(warm_up_s, 2),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "output_tokens_per_second": round(tokens / seconds, 1),
    }
