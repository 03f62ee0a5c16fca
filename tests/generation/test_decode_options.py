"""A Generator's call compiles the programs of its requests' temperatures and filters."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.offline import call
from dsv3_jax.offline.generator import Generator


def options_of(generator, platform, *, separate=True, all_modes=False, **settings):
    """Returns the modes of the prefill and of the decode programs of a call."""
    requests = generator.requests([[2, 3], [4]], **settings)
    buckets = SimpleNamespace(separate=separate)
    programs: Any = SimpleNamespace(buckets=buckets, platform=platform)
    return [o.sampling for o in call._options(programs, requests, all_modes=all_modes)]


@pytest.fixture(scope="module")
def generator(tiny) -> Generator:
    return Generator(tiny, None, 16, batch_sizes=(2,))


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "greedy"),
        ({"temperature": [0.0, 0.5]}, "unfiltered"),
        ({"temperature": [0.0, 0.5], "top_p": [0.5, 1.0]}, "unfiltered"),
        ({"temperature": [0.0, 0.5], "top_p": 0.5}, "sampled"),
    ],
)
def test_modes(generator, settings, mode):
    assert options_of(generator, "gpu", **settings) == [None, mode]
    for platform in ("cpu", "tpu"):  # where a branch costs nothing
        assert options_of(generator, platform, **settings) == [None, None]
        assert options_of(generator, platform, all_modes=True, **settings) == [None, None]
    assert options_of(generator, "gpu", separate=False, **settings) == [mode, mode]
    first, *others = options_of(generator, "gpu", all_modes=True, **settings)[1:]
    assert first == mode
    assert {first, *others} == {"greedy", "unfiltered", "sampled"}
    assert len(others) == 2


def test_a_call_reads_the_temperatures_where_it_compiles_no_mode(generator, monkeypatch):
    seen = []
    choose = Sampling.choose

    def watched(self, *branches):
        seen.append(self.mode)
        return choose(self, *branches)

    monkeypatch.setattr(Sampling, "choose", watched)
    generator.generate([[2, 3]], max_new_tokens=3, temperature=0.5, seed=1)
    assert set(seen) == {None}
