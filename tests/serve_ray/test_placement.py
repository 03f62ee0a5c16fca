"""The choice of a replica: balance within the bound, equal prefixes meet, few keys move."""

from __future__ import annotations

import collections
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3_jax.serve_ray.placement import capacity, choose, prefix_key, ranked

names = st.lists(st.text("abcdefgh0123456789", min_size=8, max_size=8), min_size=1, unique=True)
keys = st.binary(min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(names, st.lists(keys, max_size=60), st.sampled_from([1.0, 1.25, 2.0]))
def test_no_replica_gets_more_than_the_bound(replicas, requests, bound):
    loads = dict.fromkeys(replicas, 0)
    for key in requests:
        most = capacity(loads, bound)
        chosen, *others = choose(key, loads, bound)
        assert sorted([chosen, *others]) == sorted(replicas)
        loads[chosen] += 1
        assert loads[chosen] <= most
        assert max(loads.values()) <= math.ceil(bound * sum(loads.values()) / len(replicas))


@settings(max_examples=50, deadline=None)
@given(names, keys)
def test_equal_keys_meet(replicas, key):
    loads = dict.fromkeys(replicas, 0)
    again = dict.fromkeys(reversed(replicas), 0)
    assert choose(key, loads, 1.25) == choose(key, again, 1.25) == ranked(key, replicas)


@settings(max_examples=50, deadline=None)
@given(names, st.lists(keys, unique=True), st.data())
def test_a_lost_replica_moves_its_own_keys_alone(replicas, requests, data):
    lost = data.draw(st.sampled_from(replicas))
    left = [replica for replica in replicas if replica != lost]
    for key in requests:
        order = ranked(key, replicas)
        assert ranked(key, left) == [replica for replica in order if replica != lost]


def test_keys_spread_over_the_replicas():
    replicas = [f"replica{i}" for i in range(4)]
    first = collections.Counter(ranked(b"%d" % i, replicas)[0] for i in range(2000))
    assert all(430 < first[replica] < 570 for replica in replicas)  # 500, within 3.6 deviations


def test_a_request_without_a_key_goes_to_the_least_loaded():
    assert choose(None, {"a": 2, "b": 0, "c": 1}, 1.25) == ["b", "c", "a"]


def test_beyond_the_bound_the_least_loaded_comes_first():
    loads = {"a": 9, "b": 1, "c": 6}
    order = choose(b"x", loads, 1.0)
    assert order == ["b", "c", "a"]


def chat(*contents: str, **fields) -> bytes:
    roles = ("system", "user", "assistant", "user")
    pairs = zip(roles, contents, strict=False)
    messages = [{"role": role, "content": content} for role, content in pairs]
    return json.dumps({"messages": messages, **fields}).encode()


CHAT = "/v1/chat/completions"


def test_turns_of_a_conversation_have_one_key():
    first = prefix_key(CHAT, chat("be brief", "hello"))
    assert first is not None
    assert prefix_key(CHAT, chat("be brief", "hello", "hi", "how?", temperature=1)) == first
    assert prefix_key(CHAT, chat("be brief", "good morning")) != first
    assert prefix_key(CHAT, chat("be long", "hello")) != first


def test_a_long_document_meets_itself_whatever_is_asked():
    document = "x" * 5000
    assert prefix_key(CHAT, chat("s", document + "?")) == prefix_key(
        CHAT, chat("s", document + "!")
    )


def test_the_client_can_name_what_is_shared():
    one = prefix_key(CHAT, chat("a", "b", prompt_cache_key="me"))
    assert one == prefix_key(CHAT, chat("c", "d", prompt_cache_key="me"))
    assert one != prefix_key(CHAT, chat("a", "b"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def f("}),
        ("/v1/completions", {"prompt": ["def f(", "other"]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4]]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/responses", {"input": [{"role": "user", "content": "hello"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "system": "s"}),
    ],
)
def test_endpoints_have_keys(path, body):
    key = prefix_key(path, json.dumps(body).encode())
    assert key is not None
    assert key == prefix_key(path, json.dumps({**body, "max_tokens": 3}).encode())
    changed = json.loads(json.dumps(body).replace("hello", "other").replace("def", "class"))
    if changed != body:
        assert prefix_key(path, json.dumps(changed).encode()) != key


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"{}", b'{"messages": 3}', b'{"messages": []}', b'{"prompt": 1}',
             b"[" * 100000, b'{"messages": [3, {"role": []}]}', b"\xff", b'{"prompt": "\\ud800"}'],
)  # fmt: skip
def test_no_body_is_too_strange(body):
    for path in (CHAT, "/v1/completions", "/v1/models"):
        prefix_key(path, body)
    assert prefix_key("/v1/models", b"{}") is None
