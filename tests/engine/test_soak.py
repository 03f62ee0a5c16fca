"""The soak: a tiny model at full load leaves nothing behind, and growth is noticed."""

from __future__ import annotations

import dataclasses

import pytest

from dsv3_jax.engine import Engine
from tests.engine.conftest import BUCKETS, MAX_LEN
from tests.engine.soak import Count, growth, soak

COUNT = Count(
    seconds=1.0,
    requests=100,
    output_tokens=1000,
    handles=0,
    objects=500_000,
    arrays=200,
    device_bytes=10**7,
    rss_bytes=10**9,
    threads=3,
    cache_usage=0.0,
)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("handles", 1),
        ("cache_usage", 0.1),
        ("arrays", 1),
        ("threads", 1),
        ("objects", 201),
        ("device_bytes", 1),
        ("rss_bytes", 4 * 10**7),
    ],
)
def test_growth_is_noticed(name, change):
    later = dataclasses.replace(COUNT, requests=300)
    assert growth([COUNT, COUNT, later]) == []
    grown = dataclasses.replace(later, **{name: getattr(later, name) + change})
    (line,) = growth([COUNT, COUNT, grown])
    assert line.startswith(f"{name}: expected")


@pytest.mark.slow
def test_nothing_grows(tiny_mtp):
    options = {"draft": "mtp", "page_size": 16, "cache_tokens": 16 * 9, "max_running": 4}
    with Engine(tiny_mtp, None, MAX_LEN, buckets=BUCKETS, max_waiting=16, **options) as engine:
        engine.warm_up()
        vocab_size = tiny_mtp.config.vocab_size
        counts = soak(engine, 10.0, vocab_size=vocab_size, max_len=MAX_LEN, rounds=4)
        stats = engine.stats()
    assert growth(counts) == []
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.compiled_after_warm_up == 0
    assert counts[-1].requests > counts[1].requests > 20
