"""300 random requests on the demo: greedy tokens equal the Generator's, however they are served."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.engine.programs import Buckets
from dsv3_jax.generation.generator import Generator

pytestmark = pytest.mark.slow

REQUESTS, MAX_LEN = 300, 256
# Every option at least once: programs of the demo take a minute to compile.
OPTIONS = {
    "chunks of 16, no overlap, MTP with one draft": {
        "chunk_tokens": 16,
        "overlap": False,
        "draft": "mtp",
        "draft_depth": 1,
    },
    "chunks of 512, no prefix cache": {"chunk_tokens": 512, "prefix_cache": False},
    "preemptions, MTP with three drafts": {
        "chunk_tokens": 64,
        "draft": "mtp",
        "draft_depth": 3,
        "page_size": 16,
        "cache_tokens": 16 * 24,
    },
}


@pytest.fixture(scope="module")
def model():
    return dsv3_jax.load("demo", dtype=jnp.float32)[0]


def requests() -> list[tuple[list[int], int]]:
    """Prompts of 1 to 200 tokens; every third begins like others of its family."""
    random = np.random.default_rng(7)
    families = random.integers(10, 2000, (4, 150)).tolist()
    made = []
    for i in range(REQUESTS):
        prompt = random.integers(10, 2000, int(random.integers(1, 200))).tolist()
        if i % 3 == 0:
            shared = min(len(prompt) - 1, int(random.integers(20, 150)))
            prompt[:shared] = families[i % 4][:shared]
        made.append((prompt, int(random.integers(1, 40))))
    return made


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    prompts, new = map(list, zip(*requests(), strict=True))
    generator = Generator(model, None, MAX_LEN, batch_sizes=(32,), prefill_chunk=64)
    done = generator.generate(prompts, max_new_tokens=new, ignore_eos=True)
    return [completion.tokens for completion in done]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_request_gets_the_tokens_of_the_generator(model, expected, name):
    options = dict(OPTIONS[name])
    buckets = Buckets((8,), (2,), options.pop("chunk_tokens"), 4)
    engine = Engine(
        model, None, MAX_LEN, max_running=8, background=False, buckets=buckets, **options
    )
    random = np.random.default_rng(3)
    handles, cancelled = [], set()
    for i, (prompt, new) in enumerate(requests()):
        handles.append(engine.submit(prompt, max_new_tokens=new, ignore_eos=True))
        for _ in range(int(random.integers(0, 4))):
            engine.step()
        if random.random() < 0.05:
            handles[i].cancel()
            cancelled.add(i)
    while engine.step():
        engine.check_integrity()
    for i, (handle, tokens) in enumerate(zip(handles, expected, strict=True)):
        got = handle.result(0)
        if i in cancelled and got.finish_reason == "cancelled":
            assert got.tokens == tokens[: len(got.tokens)]
        else:
            assert got.tokens == tokens, f"request {i}"
    if "cache_tokens" in options:
        assert engine.stats().preemptions > 0
    if options.get("prefix_cache", True) and "cache_tokens" not in options:
        assert engine.stats().prefix_hit_tokens > 0
