"""The engine on meshes: tokens are those of one device, whatever is sharded.

``python -m tests.engine.random_trace --layout NAME`` runs longer traces in other layouts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.engine import Engine, EngineRequest
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.page_pool import PoolLayout
from dsv3_jax.layer_collectives import COLLECTIVES
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from sharding import DEFAULT_RULES, Layout, Rules, make_layout, make_mesh
from tests.engine.conftest import MAX_LEN
from tests.engine.test_engine import run, trace
from tests.engine.test_grammar import Alternating
from tests.engine.test_request_settings import REQUESTS
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8)
DEPTH = 2
PAGE_SIZE = 8
SLOTS = 2  # of a shard

LAYOUTS = {
    "dp_attention_ep": lambda: make_layout("dp_attention_ep"),
    "data 2, expert 2, tensor 2": lambda: Layout(make_mesh(data=2, expert=2, tensor=2)),
    "data 2, cached_tokens 2, 2 micro-batches": lambda: Layout(
        make_mesh(data=2, expert=2, devices=jax.devices()[:4]),
        Rules({**DEFAULT_RULES.table, "cached_tokens": "expert"}),
        micro_batches=2,
    ),
}
# With number of requests. All options together, and less where only the layout is of interest.
CASES = {
    "dp_attention_ep": ("mtp", 16),
    "data 2, expert 2, tensor 2": ("mtp", 8),
    "data 2, cached_tokens 2, 2 micro-batches": (None, 8),
}


@pytest.fixture(scope="module")
def load_in(tmp_path_factory) -> Callable[[str | None], DeepSeekV3]:
    """Loads the model in a layout of LAYOUTS, or on one device."""
    directory = tmp_path_factory.mktemp("shards")
    write_checkpoint(directory, CONFIG, random_tensors(CONFIG))

    def load(name: str | None) -> DeepSeekV3:
        layout = None if name is None else LAYOUTS[name]()
        return dsv3_jax.load(directory, layout=layout)[0]

    return load


@pytest.fixture(scope="module")
def expected(load_in) -> list[list[int]]:
    """Greedy tokens of the trace on one device."""
    prompts, new, ignore_eos = map(list, zip(*trace()[:16], strict=True))
    generator = Generator(load_in(None), None, MAX_LEN, batch_sizes=(8,), prefill_chunk=16)
    done = generator.generate(prompts, max_new_tokens=new, ignore_eos=ignore_eos)
    return [completion.tokens for completion in done]


@pytest.fixture(scope="module")
def serve(load_in) -> Callable[[str], tuple[Engine, list[EngineRequest], list[int]]]:
    """Serves the trace in a layout. Also returns the most requests that ran on each shard."""

    @functools.cache
    def serve(name: str) -> tuple[Engine, list[EngineRequest], list[int]]:
        draft, count = CASES[name]
        model = load_in(name)
        shards, parts = (model.layout.num_shards(axis) for axis in ("batch", "cached_tokens"))
        engine = Engine(
            model,
            None,
            MAX_LEN,
            max_running=SLOTS * shards,
            background=False,
            buckets=Buckets((SLOTS,), (2,), 16, 3),
            draft=draft,
            draft_depth=DEPTH,
            page_size=PAGE_SIZE // parts,
            # A shard has room for the longest request and little else.
            cache_tokens=(MAX_LEN + 2 * PAGE_SIZE) * shards,
        )
        handles = [
            engine.submit(
                each.prompt, max_new_tokens=each.max_new_tokens, ignore_eos=each.ignore_eos
            )
            for each in trace()[:count]
        ]
        most_running = [0] * shards
        while engine.step():
            engine.check_integrity()
            running = [shard.running for shard in engine.stats().shards]
            most_running = list(map(max, most_running, running))
        return engine, handles, most_running

    return serve


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_one_device(serve, expected, name):
    engine, handles, most_running = serve(name)
    assert [handle.result(0).tokens for handle in handles] == expected[: len(handles)]
    assert most_running == [SLOTS] * len(most_running)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert all((shard.running, shard.cache_usage) == (0, 0.0) for shard in stats.shards)


@pytest.mark.slow
def test_no_hidden_state_leaves_its_shard(serve):
    """Experts exchange tokens, in one pair of collectives per run of an MoE layer. All other
    collectives carry numbers of results or of steps."""
    engine, _, _ = serve("dp_attention_ep")
    programs = engine._executor.programs
    requests = programs.num_slots + 8 * 2
    for shape, compiled in programs._compiled.items():
        exchanges, others = [], []
        for line in compiled.as_text().splitlines():
            match = re.search(rf" = \(?\w+\[([\d,]*)\].* ({'|'.join(COLLECTIVES)})\(", line)
            if match and "shard_map" in line:
                exchanges.append(match[2])
            elif match:
                others.append(math.prod(int(n) for n in match[1].split(",") if n))
        # The MoE layer, and the MTP layer for each draft. For chunks it only fills its cache.
        runs = 1 + (DEPTH if shape.decodes else 0)
        assert exchanges.count("all-gather") == exchanges.count("reduce-scatter") == runs
        assert len(exchanges) == 2 * runs
        assert max(others) <= shape.max_steps * requests * (1 + DEPTH)


@pytest.mark.slow
def test_settings_of_requests_are_those_of_one_device(load_in):
    """Penalties, masks, a grammar and log-probabilities of prompts, with drafts."""
    prompts = [list(range(20 + i, 29 + 4 * i)) for i in range(8)]
    completions = []
    for name in (None, "dp_attention_ep"):
        model = load_in(name)
        engine = Engine(
            model,
            None,
            MAX_LEN,
            max_running=8,
            background=False,
            buckets=Buckets((8 if name is None else 1,), (1,), 16, 1),
            draft="mtp",
            page_size=PAGE_SIZE,
        )
        settings: list[dict[str, Any]] = [*REQUESTS, {"logprobs": 3}]
        settings.append({"grammar": Alternating(6), "ignore_eos": False})
        settings[4] = {"prompt_logprobs": 2}
        handles = [
            engine.submit(prompt, **{"max_new_tokens": 12, "ignore_eos": True, **each})
            for prompt, each in zip(prompts, settings, strict=True)
        ]
        run(engine)
        completions.append([handle.result(0) for handle in handles])
    for want, got in zip(*completions, strict=True):
        assert got.tokens == want.tokens
        assert got.finish_reason == want.finish_reason
        assert got.logprobs == pytest.approx(want.logprobs, abs=2e-5)
    want, got = (each[4].prompt_logprobs for each in completions)
    assert got[1:] == pytest.approx(want[1:], abs=2e-5)
    assert [len(pairs) for pairs in completions[1][6].top_logprobs] == [3] * 12


class TestRefusals:
    @pytest.fixture
    def model(self, tiny_mtp) -> DeepSeekV3:
        model = nnx.clone(tiny_mtp)
        layout = make_layout("dp_attention_ep", devices=jax.devices()[:4], micro_batches=2)
        model.lay_out(layout)
        return model

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_running": 6}, "max_running: expected a multiple of 4, the shards .*got 6"),
            ({"cache_tokens": 255}, "at least a page on each of 4 devices, 256, got 255"),
            ({"buckets": Buckets((1,), (2,), 8, 1)}, "expected at least 2 decodes, .*got 1"),
            ({"buckets": Buckets((2,), (1, 2), 8, 1)}, "chunks that are multiples of 2 micro-b"),
        ],
    )
    def test_sizes_that_do_not_divide(self, model, options, message):
        with pytest.raises(ValueError, match=message):
            Engine(model, None, MAX_LEN, background=False, **({"max_running": 8} | options))

    def test_a_mesh_of_several_processes(self, model, monkeypatch):
        monkeypatch.setattr(jax.sharding.Mesh, "is_multi_process", property(lambda mesh: True))
        with pytest.raises(ValueError, match="one that spans processes"):
            Engine(model, None, MAX_LEN, max_running=8, background=False)


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_default_buckets_are_multiples_of_micro_batches(multiple):
    buckets = Buckets.default(20, platform="cpu", multiple=multiple)
    buckets.check(20, multiple)
    assert buckets.decodes[-1] - 20 < multiple


class TestPoolLayout:
    def test_pages_of_devices_that_share_the_tokens_of_a_sequence(self):
        pool = PoolLayout(pages_per_device=5, page_size=16, shards=2, token_parts=3)
        first, second = pool.allocators(lookahead=0, prefix_cache=True)
        assert (pool.num_pages, first.page_size, first.num_pages) == (30, 48, 5)
        # The first device of the second shard has pages 15 to 19, its second one 20 to 24.
        pages = second.allocate(2)
        assert pages is not None
        np.testing.assert_array_equal(pool.table(pages), [15, 20, 25, 16, 21, 26])
        tables = np.full((3, 6), -1, np.int32)
        pool.fill_tables(tables, 1, [pages, pages[:1]])
        first = [15, 20, 25]  # entries without a page of their own refer to the shard's first one
        expected = [[*pool.table(pages)], [*pool.table(pages[:1]), *first], first * 2]
        np.testing.assert_array_equal(tables, expected)

    def test_one_device(self):
        pool = PoolLayout.of(None, 7, 16)
        (allocator,) = pool.allocators(lookahead=0, prefix_cache=True)
        assert (pool.num_pages, allocator.page_size, allocator.num_pages) == (7, 16, 7)
        np.testing.assert_array_equal(pool.table([3, 1]), [3, 1])
