"""A small version of test_servers.py: one prompt, greedy and without drafts."""

from __future__ import annotations

import dsv3_jax
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.disaggregation.transfer import HttpReceiver, HttpSender
from tests.disaggregation.test_servers import PAGE, engine, write_tiny
from tests.server.conftest import running


def test_a_prompt_is_prefilled_by_another_engine(tmp_path, monkeypatch):
    model, tokenizer = dsv3_jax.load(write_tiny(tmp_path))[0], dsv3_jax.load("demo")[1]
    assert tokenizer is not None
    prefill = engine(model, draft=None, host_bytes=2**24)
    monkeypatch.setattr(prefill, "warm_up", lambda store: 0.0)  # most programs are not needed
    prompt = [9] * (5 * PAGE + 3)
    with running(prefill, tokenizer, sender=HttpSender()) as server:
        remote = RemotePrefill(
            Peers([server.url]), HttpReceiver(), page_size=PAGE, max_page_bytes=2**20
        )
        with engine(model, draft=None, sources=(remote,), load_seconds=60.0) as decode:
            got = decode.submit(prompt, max_new_tokens=6, ignore_eos=True).result(60)
            assert decode.stats().loaded_tokens == got.cached_tokens == 5 * PAGE
            assert decode.stats().prompt_tokens == 3
            decode.check_integrity()
        remote.close()
        assert remote.figures.pages == 5
        alone = prefill.submit(prompt, max_new_tokens=6, ignore_eos=True).result(60)
        assert got.tokens == alone.tokens
        server.wait_until_idle()
