"""A prefill and a decode server: the tokens are those of one engine, whatever arrives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from dsv3_jax.disaggregation.jax_transfer import JaxReceiver, JaxSender
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.disaggregation.transfer import HttpReceiver, HttpSender
from dsv3_jax.engine import Engine
from dsv3_jax.pages import CacheTiers
from tests.server.conftest import RunningServer, demo_engine, running

PAGE = 16
MOST = dict.fromkeys(("vllm:num_requests_running", "vllm:kv_cache_usage_perc"), 0.0)


def engine(**tiers: Any) -> tuple[Engine, Any]:
    """Returns an engine with small pages and an MTP cache, and its tokenizer."""
    return demo_engine(page_size=PAGE, draft="mtp", tiers=CacheTiers(**tiers))


@pytest.fixture(scope="module", params=["http", "jax"])
def transfer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prefill(transfer) -> Iterator[RunningServer]:
    """A prefill server."""
    sender = HttpSender() if transfer == "http" else JaxSender("127.0.0.1")
    with running(*engine(host_bytes=2**24), sender=sender) as it:
        yield it


@pytest.fixture(scope="module")
def decode(transfer, prefill) -> Iterator[tuple[Engine, RemotePrefill]]:
    """The engine of a decode server."""
    remote = RemotePrefill(
        Peers([prefill.url]),
        HttpReceiver() if transfer == "http" else JaxReceiver(),
        page_size=PAGE,
        max_page_bytes=2**20,
    )
    with engine(sources=(remote,), load_seconds=20.0)[0] as it:
        it.warm_up()
        yield it, remote
    remote.close()


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Returns random prompts. Some begin alike, and some end with a page."""
    begin = rng.choices(range(300, 2000), k=40)
    lengths = [1, PAGE, PAGE + 1, 5 * PAGE, *(rng.randint(20, 150) for _ in range(count))]
    return [
        (begin if i % 3 == 0 else []) + rng.choices(range(300, 2000), k=n)
        for i, n in enumerate(lengths[:count])
    ]


def settings(i: int) -> dict[str, Any]:
    """Returns settings of a request: greedy or sampled, with and without drafts."""
    return {
        "max_new_tokens": 8,
        "temperature": 0.0 if i % 2 else 0.9,
        "seed": i,
        "draft": i % 4 < 2,
    }


def tokens_of(engine: Engine, requests: list[list[int]]) -> list[list[int]]:
    handles = [engine.submit(prompt, **settings(i)) for i, prompt in enumerate(requests)]
    return [handle.result(60).tokens for handle in handles]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Tokens of one engine."""
    with demo_engine(page_size=PAGE, draft="mtp")[0] as alone:
        return tokens_of(alone, prompts(12, random.Random(0)))


def test_tokens_are_those_of_one_engine(prefill, decode, expected):
    engine, remote = decode
    requests = prompts(12, random.Random(0))
    assert tokens_of(engine, requests) == expected
    print(remote.figures, engine.stats().loaded_tokens)
    engine.check_integrity()
