"""Random requests: greedy tokens equal the Generator's, however the requests are served."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.engine.programs import Buckets
from dsv3_jax.generation.generator import Generator
from dsv3_jax.model import DeepSeekV3
from tests.engine.conftest import MAX_LEN

pytestmark = pytest.mark.slow

OPTIONS = {
    "chunks of 16, no overlap": {"chunk_tokens": 16, "page_size": 16, "overlap": False},
    "chunks of 512, no prefix cache": {"chunk_tokens": 512, "prefix_cache": False},
    "preemptions": {"chunk_tokens": 32, "page_size": 16, "cache_tokens": 16 * 12},
    "MTP with one draft": {
        "chunk_tokens": 32,
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
        "cache_tokens": 16 * 12,
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
        generator = Generator(model, None, max_len, batch_sizes=(32,), prefill_chunk=64)
        done = generator.generate(prompts, max_new_tokens=new, ignore_eos=True)
        return cls(model, made, [completion.tokens for completion in done], max_len)


def requests(count: int, vocab_size: int, max_len: int) -> list[tuple[list[int], int]]:
    """Prompts of up to three quarters of ``max_len``; every third begins like others."""
    random = np.random.default_rng(7)
    longest = 3 * max_len // 4
    families = random.integers(10, vocab_size, (4, longest)).tolist()
    made = []
    for i in range(count):
        length = int(random.integers(1, longest))
        prompt = random.integers(10, vocab_size, length).tolist()
        if i % 3 == 0:
            shared = int(random.integers(0, length))
            prompt[:shared] = families[i % 4][:shared]
        made.append((prompt, int(random.integers(1, max_len - length))))
    return made


@pytest.fixture(scope="module")
def tiny(tiny_mtp) -> Served:
    return Served.of(tiny_mtp, 120, MAX_LEN)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_tiny_model(tiny, name):
    serve(tiny, count=120 if "three drafts" in name else 60, **OPTIONS[name])


def test_the_demo():
    model = dsv3_jax.load("demo", dtype=jnp.float32)[0]
    serve(Served.of(model, 10, 128), count=10, **OPTIONS["preemptions, MTP with three drafts"])


def serve(served: Served, *, count: int, chunk_tokens: int, **options) -> None:
    """Submits the first requests over time, cancels some, and compares every token."""
    buckets = Buckets((8,), (2,), chunk_tokens, 4)
    engine = Engine(
        served.model,
        None,
        served.max_len,
        max_running=8,
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
    if "cache_tokens" in options:
        assert engine.stats().preemptions > 0
    elif options.get("prefix_cache", True):
        assert engine.stats().prefix_hit_tokens > 0
    else:
        assert engine.stats().prefix_hit_tokens == 0
