"""Choice of a replica: equal prefixes meet, and no replica gets much more than its share.

The turns of a conversation begin with the same messages, so its key is made of those up to the
first one of the user. Conversations with the same instructions have different keys: every replica
soon has these instructions in its cache, but only one has the conversation.

Rendezvous hashing gives every key its own order of the replicas: a replica that is lost moves only
its own keys, and one that is added takes keys from all. It needs neither memory nor agreement, so
that several fronts choose alike.

The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
2016): a replica takes no request beyond ``load_bound`` times the mean load, and the next one in the
key's order gets it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from dsv3_jax.server.openai.body import read_json

_CHARACTERS = 1024  # of a text that count: four pages of 64 tokens, at four a token
_TOKENS = 256  # token ids of a prompt that count: four cache pages


def prefix_key(path: str, body: bytes) -> bytes | None:
    """Returns the key of a request, or None if its endpoint generates nothing or its body is not
    valid, which the server refuses. ``prompt_cache_key``, with which OpenAI's clients name what
    shares a prefix, is the key if the body has it."""
    read = _READERS.get(path)
    if read is None:
        return None
    try:
        fields = read_json(body, "body")
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    given = fields.get("prompt_cache_key")
    begin = given if isinstance(given, str) and given else read(fields)
    if not begin:
        return None
    text = json.dumps(begin, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def _prompt(fields: Mapping[str, Any]) -> Any:
    """Returns the beginning of the first prompt of /v1/completions."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:_CHARACTERS]
    return prompt[:_TOKENS] if isinstance(prompt, list) else None


def _messages(fields: Mapping[str, Any]) -> Any:
    """Returns the instructions and the beginning of the first message of the user."""
    instructions = fields.get("system") or fields.get("instructions")
    history = fields.get("messages") or fields.get("input")
    return [instructions, *_until_user(history)] if history else None


def _until_user(history: Any) -> list[Any]:
    if isinstance(history, str):
        return [history[:_CHARACTERS]]
    begin: list[Any] = []
    for message in history if isinstance(history, Sequence) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            text = json.dumps(message.get("content"), ensure_ascii=False)
            return [*begin, text[:_CHARACTERS]]
        begin.append(message)
    return begin


_READERS = {
    "/v1/completions": _prompt,
    "/v1/chat/completions": _messages,
    "/v1/responses": _messages,
    "/v1/messages": _messages,
    "/chat/spans": _messages,
}


def ranked(key: bytes, replicas: Iterable[str]) -> list[str]:
    """Returns the replicas in the order in which they should get a key's requests."""
    return sorted(replicas, key=lambda replica: _weight(key, replica), reverse=True)


def choose(key: bytes | None, loads: Mapping[str, int], load_bound: float) -> list[str]:
    """Returns all replicas in the order in which to try them for one request.

    Args:
      key: what requests that share a prefix have in common. None prefers the least loaded replica.
      loads: open requests of each replica.
      load_bound: most load of a replica, in multiples of the mean load after this request.
    """
    if key is None:
        return sorted(loads, key=lambda replica: (loads[replica], replica))
    most = capacity(loads, load_bound)
    order = ranked(key, loads)
    within = [replica for replica in order if loads[replica] < most]
    beyond = sorted((r for r in order if loads[r] >= most), key=lambda replica: loads[replica])
    return [*within, *beyond]


def capacity(loads: Mapping[str, int], load_bound: float) -> int:
    """Returns the most requests that a replica may have after one more request."""
    return math.ceil(load_bound * (sum(loads.values()) + 1) / max(len(loads), 1))


def _weight(key: bytes, replica: str) -> tuple[int, str]:
    seed = xxhash.xxh32_intdigest(replica.encode())
    return xxhash.xxh3_64_intdigest(key, seed=seed), replica
