"""The choice of a prefill server."""

import pytest

from dsv3_jax.disaggregation.peers import Peers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_peer_with_the_fewest_tokens_is_chosen():
    peers = Peers(["http://a:1", "http://b:1"])
    a, b = peers.begin(100), peers.begin(10)
    assert {a.host, b.host} == {"a", "b"}
    assert peers.begin(50) is b
    assert peers.begin(50) is b
    peers.end(a, 100, succeeded=True)
    assert peers.begin(1) is a
    assert peers.begin(1, {a}) is b


def test_a_failed_peer_rests_and_is_tried_by_one_request():
    clock = Clock()
    peers = Peers(["http://a:1"], clock)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        peer = peers.begin(5)
        assert peer is not None
        assert peers.has_ready == (pause == 1), "only one request tries a peer after a failure"
        peers.end(peer, 5, succeeded=False)
        clock.now += pause - 0.01
        assert peers.begin(5) is None
        clock.now += 0.02
        assert peers.has_ready
    peer = peers.begin(5)
    assert peer is not None
    assert peers.begin(5) is None
    peers.end(peer, 5, succeeded=True)
    assert peers.begin(5) is peers.begin(5) is peer


def test_a_cancelled_request_says_nothing_about_the_peer():
    peers = Peers(["http://a:1"])
    peer = peers.begin(5)
    peers.end(peer, 5, succeeded=None)
    assert peers.up == {"http://a:1": True}
    assert peer.open_tokens == peer.open_requests == 0


@pytest.mark.parametrize("url", ["a:1", "ftp://a:1", "http://", "http://a:1/x", "http://a:1?x=1"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="prefill URL: expected http://HOST:PORT, got"):
        Peers([url])


def test_peers_are_different():
    with pytest.raises(ValueError, match="different ones"):
        Peers(["http://a:1", "http://a:1/"])


def test_peers_are_replaced():
    """A peer that stays keeps what is known of it; one with another key is a new one."""
    peers = Peers([])
    assert not peers.has_ready
    assert peers.begin(1) is None
    peers.replace({"http://a:1": "k", "http://b:1": "k"})
    a, b = peers.all
    assert peers.begin(100) is a
    assert peers.begin(10) is b
    peers.end(b, 10, succeeded=False)
    peers.replace({"http://b:1": "k", "http://a:1": "other", "http://c:1": "k"})
    assert peers.all[0] is b
    assert peers.up == {"http://b:1": False, "http://a:1": True, "http://c:1": True}
    assert [peer.open_tokens for peer in peers.all] == [0, 0, 0]
    peers.end(a, 100, succeeded=True)
    assert peers.begin(5).api_key == "other"
    assert peers.begin(4, preferred=a).host == "c", "a peer that is gone is not preferred"
