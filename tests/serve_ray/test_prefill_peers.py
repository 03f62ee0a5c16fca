"""The prefill replicas that a decode replica knows."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from dsv3_jax.disaggregation import peers as peers_module
from dsv3_jax.disaggregation.peers import Peers, PrefillAddress, keep_current

A, B, C = (PrefillAddress(f"http://{name}:1", f"key of {name}") for name in "abc")


def test_peers_follow_the_replicas(monkeypatch):
    monkeypatch.setattr(peers_module, "PERIOD_SECONDS", 0.0)
    looks = iter([[A], [A, B], TimeoutError(), RuntimeError("Ray's"), [B, C], []])
    seen = []
    peers = Peers([])

    async def addresses():
        seen.append({peer.url: peer.api_key for peer in peers.all})
        given = next(looks, "end")
        if given == "end":
            raise asyncio.CancelledError
        if isinstance(given, Exception):
            raise given
        return given

    async def run():
        with contextlib.suppress(asyncio.CancelledError):
            await keep_current(peers, addresses, (TimeoutError, RuntimeError))

    asyncio.run(run())
    with pytest.raises(ZeroDivisionError):  # it is no failed look, so it ends the task
        asyncio.run(keep_current(peers, lambda: 1 // 0, (TimeoutError, RuntimeError)))  # pyright: ignore
    both = {A.url: A.api_key, B.url: B.api_key}
    assert seen == [{}, {A.url: A.api_key}, both, both, both, dict([B, C]), {}], (
        "unless a look fails"
    )
