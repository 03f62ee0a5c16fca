"""Tests that docs/claims.md names: that they exist, and those that only this page needs."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax import presets
from dsv3_jax.accounting import cache_bytes_per_token
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.running import forward

TESTS = Path(__file__).parent
CLAIMS = TESTS.parent / "docs" / "claims.md"


def named_tests() -> dict[str, list[str]]:
    """Returns the tests that the page names, by file."""
    tests: dict[str, list[str]] = {}
    for line in CLAIMS.read_text("utf-8").splitlines():
        file = ""
        for word in re.findall(r"`([\w/]+\.py|test_\w+)`", line):
            if word.endswith(".py"):
                file = word
                tests.setdefault(file, [])
            else:
                tests[file].append(word)
    return tests


def test_named_tests_exist():
    files = named_tests()
    assert len(files) > 10
    for file, tests in files.items():
        text = (TESTS / file).read_text("utf-8")
        for test in tests:
            assert re.search(rf"^ *def {test}\(", text, re.MULTILINE), f"{file}: {test}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0)  # one dense, one MoE
    write_checkpoint(directory, config, random_tensors(config))
    return dsv3_jax.load(directory)[0]


def counts(model, tokens: list[int]) -> np.ndarray:
    """Returns the number of tokens routed to each expert, [E]."""
    _, aux = forward(model, np.array([tokens]))
    return np.asarray(aux.routing_counts)[0]


@pytest.mark.slow
def test_the_same_token_goes_to_other_experts_elsewhere(tiny):
    """The experts of the last token are the difference between the counts with and without it."""
    before = [[3, 5, 7], [11, 2, 80], [40, 41, 42]]
    chosen = {tuple(counts(tiny, [*b, 9]) - counts(tiny, b)) for b in before}
    assert all(sum(c) == tiny.config.num_experts_per_tok and max(c) == 1 for c in chosen)
    assert len(chosen) > 1


def test_every_token_has_as_many_experts(tiny):
    assert counts(tiny, [1, 2, 3, 4]).sum() == 4 * tiny.config.num_experts_per_tok
    assert counts(tiny, [5, 5, 5, 5]).sum() == 4 * tiny.config.num_experts_per_tok


@pytest.mark.parametrize("tokens", [4096, 8192, 131072])
def test_a_cache_is_linear_in_its_length(tokens):
    """Counts the bytes of the cache's pages, without block tables and lengths."""

    config = presets.DEEPSEEK_V3
    spec = CacheSpec.of_config(config, "bfloat16")
    arrays = jax.eval_shape(lambda: jax.tree.leaves(LatentKVCache.init(spec, 1, tokens).pool))
    size = sum(array.size * array.dtype.itemsize for array in arrays)
    assert size == tokens * cache_bytes_per_token(config)
