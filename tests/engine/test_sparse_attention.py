"""The engine serves DeepSeek-V3.2: its pages have indexer keys and latents.

Requests attend to 16 of up to 120 tokens. Their tokens are the most probable ones of a pass over
the whole text on one device, whether pages come from the prefix cache, return from the host after a
preemption, hold rejected drafts, are in float8, or lie on eight devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine import CacheTiers, Engine, EngineRequest
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.page_packing import arrays_by_name
from dsv3_jax.model import DeepSeekV3
from sharding import make_layout
from tests.engine.conftest import MAX_LEN
from tests.engine.test_engine import run, trace
from tests.support.checkpoints import random_tensors, sparse_config, write_checkpoint
from tests.support.running import forward

pytestmark = pytest.mark.slow

CONFIG = sparse_config(num_hidden_layers=1, first_k_dense_replace=0)
PAGE_SIZE = 8
COUNT = 8
PROMPTS = [each.prompt for each in trace(COUNT)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    home = tmp_path_factory.mktemp("sparse")
    write_checkpoint(home, CONFIG, random_tensors(CONFIG))
    return home


def check_tokens(
    model: DeepSeekV3, prompts: Sequence[list[int]], handles: Sequence[EngineRequest]
) -> int:
    """Checks that each new token has the largest logit after the tokens before it. Returns the
    length of the longest text."""
    padded, lengths = np.zeros((len(prompts), MAX_LEN), int), []
    for row, prompt, handle in zip(padded, prompts, handles, strict=True):
        tokens = handle.result(0).tokens
        lengths.append((len(prompt), len(prompt) + len(tokens)))
        row[: lengths[-1][1]] = prompt + tokens
    best = np.asarray(forward(model, padded)[0]).argmax(axis=-1)
    for row, chosen, (begin, end) in zip(padded, best, lengths, strict=True):
        np.testing.assert_array_equal(row[begin:end], chosen[begin - 1 : end - 1])
    return max(end for _, end in lengths)


def submit_trace(engine: Engine) -> list[EngineRequest]:
    return [
        engine.submit(each.prompt, max_new_tokens=each.max_new_tokens, ignore_eos=each.ignore_eos)
        for each in trace(COUNT)
    ]


@pytest.mark.parametrize(
    ("layout", "draft", "cache_dtype"),
    [
        ("dp_attention_ep", "mtp", None),
        ("dp_attention_ep", "mtp", "fp8_index"),
        ("context_parallel", None, None),
    ],
)
def test_tokens_are_those_of_the_whole_text(directory, layout, draft, cache_dtype):
    model, _ = dsv3_jax.load(
        directory, layout=make_layout(layout, devices=jax.devices()), cache_dtype=cache_dtype
    )
    assert model.layout is not None
    shards, parts = (model.layout.num_shards(axis) for axis in ("batch", "cached_tokens"))
    assert (shards, parts) == {"dp_attention_ep": (8, 1), "context_parallel": (1, 8)}[layout]
    engine = Engine(
        model,
        None,
        MAX_LEN,
        max_running=4 if shards == 1 else shards,
        background=False,
        buckets=Buckets((4 // min(4, shards),), (1,), 32, 3),
        draft=draft,
        draft_depth=2,
        page_size=max(1, PAGE_SIZE // parts),
        # A shard has room for the longest request and little else.
        cache_tokens=(MAX_LEN + 2 * PAGE_SIZE) * shards,
    )
    pool = arrays_by_name(engine._executor._launcher.state.pool)
    stored = {name.split(".")[-1]: array.dtype for name, array in pool.items()}
    assert {"latent", "index_key"} <= stored.keys()
    assert (stored["index_key"].itemsize == 1) == (cache_dtype is not None)
    handles = submit_trace(engine)
    run(engine)
    alone = dsv3_jax.load(directory, cache_dtype=cache_dtype)[0]
    assert check_tokens(alone, PROMPTS, handles) > 6 * CONFIG["index_topk"]
    stats = engine.stats()
    if shards == 1:
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > 5 * PAGE_SIZE
    if draft is not None:
        assert stats.drafted_tokens > stats.accepted_tokens


def test_prefix_hits_restore_indexer_keys(directory):
    """A prompt that begins like an earlier one continues alike, whether its pages are still on the
    device or return from host memory."""
    model, _ = dsv3_jax.load(directory)
    random = np.random.default_rng(0)
    shared = random.integers(2, 160, 50).tolist()  # six pages
    prompts = [[*shared, *random.integers(2, 160, n).tolist()] for n in (5, 20, 40)]
    whole = [(len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in prompts]
    settings = {"max_running": 4, "background": False, "page_size": PAGE_SIZE}
    buckets, tiers = Buckets((4,), (1,), 32, 3), CacheTiers(host_bytes=2**24)
    with Engine(model, None, MAX_LEN, buckets=buckets, tiers=tiers, **settings) as engine:

        def complete() -> list[EngineRequest]:
            handles = []
            for prompt in prompts:  # one after the other
                handles.append(engine.submit(prompt, max_new_tokens=8, ignore_eos=True))
                run(engine)
            assert engine.flush_tiers(60)
            return handles

        for cached in ([0, 48, 48], whole):
            handles = complete()
            assert [handle.result(0).cached_tokens for handle in handles] == cached
            assert check_tokens(model, prompts, handles) > 4 * CONFIG["index_topk"]
            engine.clear_prefix_cache(tiers=False)
        assert engine.stats().loaded_tokens > 6 * PAGE_SIZE


def test_swapped_requests_keep_their_indexer_keys(directory):
    """With deterministic=True, a request whose pages are given to another one continues with its
    own from host memory."""
    model, _ = dsv3_jax.load(directory)
    engine = Engine(
        model,
        None,
        MAX_LEN,
        max_running=4,
        background=False,
        buckets=Buckets((4,), (1,), 32, 3),
        page_size=PAGE_SIZE,
        cache_tokens=2 * MAX_LEN,
        deterministic=True,
        swap_tokens=8 * MAX_LEN,
    )
    # Each request alone reaches the largest length, so that only two fit.
    handles = [
        engine.submit(prompt, max_new_tokens=MAX_LEN - len(prompt), ignore_eos=True)
        for prompt in PROMPTS[:4]
    ]
    run(engine)
    assert engine.stats().preemptions > 0
    check_tokens(model, PROMPTS[:4], handles)
