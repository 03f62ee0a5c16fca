"""python -m tests.engine.random_trace [--requests 300] [--layout NAME] [--variants NAME ...]

Serves a random trace in every variant of ``OPTIONS`` and compares each request's greedy tokens with
those of the Generator. On two cores, 300 requests of the demo take some minutes per variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax.numpy as jnp
import numpy as np

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.programs import Buckets
from dsv3_jax.engine.stats import EngineStats
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from sharding import make_layout

OPTIONS = {
    "chunks of 16, no overlap": {"chunk_tokens": 16, "page_size": 16, "overlap": False},
    "chunks of 512, no prefix cache": {"chunk_tokens": 512, "prefix_cache": False},
    "preemptions": {"chunk_tokens": 32, "page_size": 16, "few_pages": True, "is_static": True},
    "MTP with one draft": {
        "chunk_tokens": 32,
        "is_static": True,
        "draft": "mtp",
        "draft_depth": 1,
        "page_size": 16,
    },
    "MTP with two drafts": {
        "chunk_tokens": 64,
        "draft": "mtp",
        "draft_depth": 2,
        "page_size": 16,
        "overlap": False,
    },
    "preemptions, MTP with three drafts": {
        "chunk_tokens": 64,
        "draft": "mtp",
        "draft_depth": 3,
        "page_size": 16,
        "few_pages": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Served:
    """A model with random requests, and the tokens that the Generator gives them."""

    model: DeepSeekV3
    requests: list[tuple[list[int], int]]
    expected: list[list[int]]
    max_len: int

    @classmethod
    def of(cls, model: DeepSeekV3, count: int, max_len: int) -> Served:
        made = requests(count, model.config.vocab_size, max_len)
        prompts, new = map(list, zip(*made, strict=True))
        generator = Generator(model, None, max_len, batch_sizes=(min(count, 32),), prefill_chunk=64)
        done = generator.generate(prompts, max_new_tokens=new, ignore_eos=True)
        return cls(model, made, [completion.tokens for completion in done], max_len)


def requests(count: int, vocab_size: int, max_len: int) -> list[tuple[list[int], int]]:
    """Prompts of up to three quarters of ``max_len``; every third begins like others."""
    random = np.random.default_rng(7)
    longest = 3 * max_len // 4
    families = random.integers(10, vocab_size, (2, longest)).tolist()
    made = []
    for i in range(count):
        length = int(random.integers(1, longest))
        prompt = random.integers(10, vocab_size, length).tolist()
        if i % 3 == 0:
            shared = int(random.integers(length // 2, length))
            prompt[:shared] = families[i % 2][:shared]
        made.append((prompt, int(random.integers(1, max_len - length))))
    return made


def serve(
    served: Served,
    *,
    count: int,
    chunk_tokens: int,
    few_pages: bool = False,
    is_static: bool = False,
    **options,
) -> EngineStats:
    """Submits the first requests over time, cancels some, and compares every token.

    Args:
      few_pages: whether a shard's cache has room for only one and a half of the longest requests.
      is_static: whether programs have no loops, as on GPUs.
    """
    layout = served.model.layout
    shards = 1 if layout is None else layout.num_shards("batch")
    buckets = Buckets((8,), (2,), chunk_tokens, 4)
    if is_static:
        buckets = dataclasses.replace(buckets, chunk_form="absorbed", multi_step_decodes=0)
    if few_pages:
        options["cache_tokens"] = 3 * (served.max_len + 8) // 2 * shards
    engine = Engine(
        served.model,
        None,
        served.max_len,
        max_running=8 * shards,
        background=False,
        buckets=buckets,
        **options,
    )
    random = np.random.default_rng(3)
    handles, cancelled = [], set()
    for i, (prompt, new) in enumerate(served.requests[:count]):
        handles.append(engine.submit(prompt, max_new_tokens=new, ignore_eos=True))
        for _ in range(int(random.integers(0, 4))):
            engine.step()
        if random.random() < 0.05:
            handles[i].cancel()
            cancelled.add(i)
    while engine.step():
        engine.check_integrity()
    for i, (handle, tokens) in enumerate(zip(handles, served.expected[:count], strict=True)):
        got = handle.result(0)
        if i in cancelled and got.finish_reason == "cancelled":
            assert got.tokens == tokens[: len(got.tokens)]
        else:
            assert got.tokens == tokens, f"request {i}"
    stats = engine.stats()
    if few_pages:
        assert stats.preemptions > 0
    elif options.get("prefix_cache", True):
        assert stats.prefix_hit_tokens > 0
    else:
        assert stats.prefix_hit_tokens == 0
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--model", default="demo", help="checkpoint (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--max-len", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--layout", help="mesh layout of all devices (default: one device)")
    parser.add_argument("--variants", nargs="*", default=list(OPTIONS), help="(default: all)")
    arguments = parser.parse_args()
    layout = make_layout(arguments.layout) if arguments.layout else None
    model = dsv3_jax.load(arguments.model, dtype=jnp.float32, layout=layout)[0]
    served = Served.of(model, arguments.requests, arguments.max_len)
    for name in arguments.variants:
        began = time.perf_counter()
        stats = serve(served, count=arguments.requests, **OPTIONS[name])
        print(
            f"{name}: {arguments.requests} requests equal, {stats.preemptions} preemptions, "
            f"{stats.prefix_hit_tokens} tokens from the prefix cache, "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
