"""Pages from prefill servers: right ones, or none, whatever a server does."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from dsv3_jax.disaggregation import jax_transfer
from dsv3_jax.disaggregation.jax_transfer import JaxReceiver, JaxSender
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.protocol import HttpReceiver, HttpSender, Receiver, Sender, frame
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from tests.disaggregation.scripted_peer import (
    ADDRESSES,
    IDENTITY,
    PROMPT,
    ScriptedPeer,
    is_right,
    running,
)

SECONDS = 2.0
"""Time of a request that runs into its deadline. What comes before it takes some milliseconds."""


@pytest.fixture(scope="module", params=["http", "jax"])
def transfer(request: pytest.FixtureRequest) -> tuple[Sender, Callable[[], Receiver]]:
    """Both sides of a transfer."""
    if request.param == "http":
        return HttpSender(), HttpReceiver
    sender, receiver = JaxSender("127.0.0.1"), JaxReceiver()
    return sender, lambda: receiver


@contextlib.contextmanager
def remote(*urls: str, receiver: Receiver, seconds: float = 20) -> Iterator[RemotePrefill]:
    """A source of pages with these peers."""
    source = RemotePrefill(
        Peers(urls),
        receiver,
        page_size=IDENTITY.page_size,
        max_page_bytes=IDENTITY.format.num_bytes,
        seconds=seconds,
    )
    try:
        yield source
    finally:
        source.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_pages_arrive(transfer):
    sender, receiver = transfer
    peer = ScriptedPeer(sender)
    with running(peer) as url, remote(url, receiver=receiver()) as source:
        assert source.lookup(ADDRESSES) == len(ADDRESSES)
        assert is_right(records := source.fetch(ADDRESSES).result(20))
        assert len(records) == len(ADDRESSES)
        assert is_right(source.fetch(ADDRESSES[3:]).result(20), 3)
        wait_until(lambda: not peer.open)
        figures = source.figures
    assert [(body.first_page, body.num_pages) for body in peer.bodies] == [(0, 5), (3, 2)]
    assert peer.bodies[0].tokens == PROMPT
    assert (figures.requests, figures.pages, figures.open_requests) == (2, 7, 0)
    assert not figures.failures
    assert not figures.recomputed_pages


def drop(count: int) -> Callable[[list[bytes]], list[bytes]]:
    """Ends the answer early."""
    return lambda frames: frames[:-count]


def flip(frames: list[bytes]) -> list[bytes]:
    """Changes one bit of the third record."""
    damaged = bytearray(frames[2])
    damaged[-100] ^= 4
    return [*frames[:2], bytes(damaged), *frames[3:]]


@pytest.mark.parametrize(
    ("change", "reason", "pages"),
    [
        pytest.param(drop(1), "connection", 5, id="no last frame"),
        pytest.param(drop(3), "connection", 3, id="ends early"),
        pytest.param(lambda f: [*f[:2], f[2][:50]], "connection", 2, id="ends in a record"),
        pytest.param(lambda f: [*f[:2], f[-1]], "evicted", 2, id="fewer"),
        pytest.param(flip, "damaged", 2, id="damaged"),
        pytest.param(lambda f: [f[1], f[0]], "damaged", 0, id="in another order"),
        pytest.param(lambda f: [*f[:5], f[0], f[5]], "protocol", 5, id="more"),
        pytest.param(lambda f: [struct.pack("<Q", 2**40)], "protocol", 0, id="too large"),
        pytest.param(lambda f: [frame(b"{}")], "damaged", 0, id="no record"),
        pytest.param(lambda f: [], "connection", 0, id="nothing"),
    ],
)
def test_an_answer_with_errors_gives_the_right_pages_before_the_first_one(change, reason, pages):
    with (
        running(ScriptedPeer(HttpSender(), change=change)) as url,
        remote(url, receiver=HttpReceiver()) as source,
    ):
        records = source.fetch(ADDRESSES).result(20)
        figures = source.figures
    assert is_right(records)
    assert len(records) == pages
    assert figures.recomputed_pages == ({reason: 5 - pages} if pages < 5 else {})
    assert figures.open_requests == 0


@pytest.mark.parametrize(
    ("status", "reason", "is_up"),
    [
        (503, "overloaded", True),
        (504, "deadline", False),
        (409, "refused", False),
        (307, "refused", False),
        (308, "refused", False),
    ],
)
def test_a_peer_that_refuses_costs_the_pages(status, reason, is_up, caplog):
    """A redirect is a refusal too: the prompt and the key are for this peer alone."""
    peer = ScriptedPeer(HttpSender(), status=status)
    with (
        running(peer) as url,
        remote(url, receiver=HttpReceiver()) as source,
    ):
        assert source.fetch(ADDRESSES).result(20) == []
        assert source.figures.failures == {reason: 1}
        assert source.figures.recomputed_pages == {reason: 5}
        assert source.peers.up == {url: is_up}
        assert bool(source.lookup(ADDRESSES)) == is_up
    assert len(peer.bodies) == 1
    assert "refused" in caplog.text
    assert "\x1b" not in caplog.text


def test_an_answer_that_stalls_is_given_up(transfer):
    sender, receiver = transfer
    peer = ScriptedPeer(sender, stalls=True, change=lambda frames: frames[:-1])
    with (
        running(peer) as url,
        remote(url, receiver=receiver(), seconds=SECONDS) as source,
    ):
        records = source.fetch(ADDRESSES).result(20)
        assert is_right(records)  # those that came before
        assert len(records) == 5
        assert source.figures.failures == {"deadline": 1}
        wait_until(lambda: not peer.open)


def test_a_pull_that_never_ends_is_given_up(monkeypatch):
    """The ticket names records that are not registered."""
    pulled, pull = [], jax_transfer._pull

    def spy(*arguments):
        pulled.extend(pull(*arguments))
        return pulled

    monkeypatch.setattr(jax_transfer, "_pull", spy)
    sender = JaxSender("127.0.0.1")
    ticket = frame(b'{"port": %d, "number": 7, "sizes": [100]}' % sender.port)
    peer = ScriptedPeer(sender, change=lambda frames: [ticket])
    with (
        running(peer) as url,
        remote(url, receiver=JaxReceiver(), seconds=SECONDS) as source,
    ):
        assert source.fetch(ADDRESSES).result(20) == []
        assert source.figures.failures == {"deadline": 1}
        wait_until(lambda: not peer.open)
        wait_until(lambda: pulled[0].is_ready())  # with an error, which frees its memory


@pytest.mark.parametrize(
    "ticket",
    [
        b"{}",
        b'{"port": 0, "number": 7, "sizes": [100]}',
        b'{"port": 9, "number": 7, "sizes": []}',
        b'{"port": 9, "number": 7, "sizes": [100], "host": "10.0.0.1"}',
        b'{"port": 9, "number": 7, "sizes": [%d]}' % 2**40,
        b'{"port": 9, "number": 7, "sizes": [%s]}' % b", ".join([b"100"] * 200),
        b"x" * 2**15,
    ],
)
def test_tickets_of_another_form_are_refused(ticket):
    peer = ScriptedPeer(HttpSender(), change=lambda frames: [frame(ticket)])
    with running(peer) as url, remote(url, receiver=JaxReceiver()) as source:
        assert source.fetch(ADDRESSES).result(20) == []
        assert source.figures.failures == {"protocol": 1}


def test_another_peer_continues_where_one_failed():
    first = ScriptedPeer(HttpSender(), change=drop(3))
    second = ScriptedPeer(HttpSender())
    with (
        running(first) as url,
        running(second) as other,
        remote(url, other, receiver=HttpReceiver()) as source,
    ):
        assert is_right(records := source.fetch(ADDRESSES).result(20))
        assert len(records) == 5
        assert source.peers.up == {url: False, other: True}
        assert not source.figures.recomputed_pages
    assert [body.first_page for body in second.bodies] == [3]


def test_another_peer_follows_one_that_cannot_be_connected_to(monkeypatch):
    """aiohttp's error is a TimeoutError, too, but not that of the request."""
    ask = RemotePrefill._ask

    async def unreachable(self, peer, *arguments):
        if peer is self.peers.all[0]:
            raise aiohttp.ServerTimeoutError("Connection timeout to host")
        await ask(self, peer, *arguments)

    monkeypatch.setattr(RemotePrefill, "_ask", unreachable)
    with (
        running(ScriptedPeer(HttpSender())) as url,
        remote("http://127.0.0.1:9", url, receiver=HttpReceiver()) as source,
    ):
        assert len(source.fetch(ADDRESSES).result(20)) == 5
        assert source.peers.up == {"http://127.0.0.1:9": False, url: True}
        assert source.figures.failures == {"connection": 1}


def test_nothing_is_registered_after_the_end_of_a_lease():
    """The decode server can go away while records are encoded."""
    registered = []
    server: Any = SimpleNamespace(await_pull=lambda number, arrays: registered.append(number))
    lease = jax_transfer._JaxLease(SimpleNamespace(server=server, port=1))  # pyright: ignore

    class Record:
        def encode(self) -> bytes:
            lease.close()
            return b"contents"

    assert lease.offer([Record()]) == []  # pyright: ignore
    assert not registered


def test_the_peer_that_has_the_pages_is_asked_first():
    peers = [ScriptedPeer(HttpSender()), ScriptedPeer(HttpSender())]
    with (
        running(peers[0]) as url,
        running(peers[1]) as other,
        remote(url, other, receiver=HttpReceiver()) as source,
    ):
        source.prefer(source.peers.all[1], ADDRESSES)
        assert len(source.fetch(ADDRESSES[:-1]).result(20)) == 4
        assert len(source.fetch(ADDRESSES).result(20)) == 5
        assert len(source.fetch(ADDRESSES[:2]).result(20)) == 2
    assert [len(peer.bodies) for peer in peers] == [1, 2]


def test_a_lost_peer_is_tried_again_later():
    peer = ScriptedPeer(HttpSender())
    with running(peer) as url:
        pass
    with remote(url, receiver=HttpReceiver()) as source:
        assert source.fetch(ADDRESSES).result(20) == []
        before = source.figures
        assert source.lookup(ADDRESSES) == 0
        assert source.fetch(ADDRESSES).result(20) == []
        assert source.figures.recomputed_pages == {"connection": 5, "no_peer": 5}
    # Figures are those of one moment.
    assert (before.requests, before.failures) == (1, {"connection": 1})
    assert before.recomputed_pages == {"connection": 5}


def test_cancelling_closes_the_connection(transfer):
    sender, receiver = transfer
    peer = ScriptedPeer(sender, delay=30)
    with running(peer) as url, remote(url, receiver=receiver()) as source:
        future = source.fetch(ADDRESSES)
        wait_until(lambda: peer.open == 1)
        assert future.cancel()
        wait_until(lambda: peer.open == 0)
        wait_until(lambda: source.figures.open_requests == 0)
        assert source.peers.up == {url: True}
        assert source.figures.recomputed_pages == {"cancelled": 5}


def test_closing_gives_up_what_is_under_way():
    peer = ScriptedPeer(HttpSender(), delay=30)
    with running(peer) as url:
        with remote(url, receiver=HttpReceiver()) as source:
            future = source.fetch(ADDRESSES)
            wait_until(lambda: peer.open == 1)
        assert future.cancelled()
        wait_until(lambda: peer.open == 0)


def test_listening_on_all_addresses_is_refused():
    with pytest.raises(ValueError, match="one network interface"):
        JaxSender("0.0.0.0")
