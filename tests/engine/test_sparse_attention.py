"""The engine serves DeepSeek-V3.2: its pages have indexer keys and latents.

Requests attend to 16 of up to 120 tokens. Their tokens are the most probable ones of a pass over
the whole text on one device, whether pages come from the prefix cache, return from the host after a
preemption, hold rejected drafts, are in float8, or lie on eight devices.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine import Engine, EngineRequest
from dsv3_jax.engine.buckets import Buckets
from dsv3_jax.engine.page_swap import page_arrays
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    home = tmp_path_factory.mktemp("sparse")
    write_checkpoint(home, CONFIG, random_tensors(CONFIG))
    return home


def check_tokens(model: DeepSeekV3, handles: list[EngineRequest]) -> None:
    """Each new token has the largest logit after the tokens before it."""
    padded, lengths = np.zeros((COUNT, MAX_LEN), int), []
    for row, traced, handle in zip(padded, trace(COUNT), handles, strict=True):
        tokens = handle.result(0).tokens
        lengths.append((len(traced.prompt), len(traced.prompt) + len(tokens)))
        row[: lengths[-1][1]] = traced.prompt + tokens
    best = np.asarray(forward(model, padded)[0]).argmax(axis=-1)
    assert max(end for _, end in lengths) > 6 * CONFIG["index_topk"]
    for row, chosen, (begin, end) in zip(padded, best, lengths, strict=True):
        np.testing.assert_array_equal(row[begin:end], chosen[begin - 1 : end - 1])


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
    pool = page_arrays(engine._executor._launcher.state.pool)
    stored = {name.split("'")[1]: array.dtype for name, array in pool.items()}
    assert {"latent", "index_key"} <= stored.keys()
    assert (stored["index_key"].itemsize == 1) == (cache_dtype is not None)
    handles = [
        engine.submit(each.prompt, max_new_tokens=each.max_new_tokens, ignore_eos=each.ignore_eos)
        for each in trace(COUNT)
    ]
    run(engine)
    check_tokens(dsv3_jax.load(directory, cache_dtype=cache_dtype)[0], handles)
    stats = engine.stats()
    if shards == 1:
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > 5 * PAGE_SIZE
    if draft is not None:
        assert stats.drafted_tokens > stats.accepted_tokens
