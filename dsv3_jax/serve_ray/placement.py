"""Choice of a replica: equal prefixes meet, and no replica gets much more than its share.

Rendezvous hashing gives every key its own order of the replicas: a replica that is lost moves only
its own keys, and one that is added takes keys from all. It needs neither memory nor agreement, so
that several fronts choose alike.

The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
2016): a replica takes no request beyond ``load_bound`` times the mean load, and the next one in the
key's order gets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import xxhash


def ranked(key: bytes, replicas: Iterable[str]) -> list[str]:
    """Returns the replicas in the order in which they should get a key's requests."""
    return sorted(replicas, key=lambda replica: _weight(key, replica), reverse=True)


def choose(key: bytes | None, loads: Mapping[str, int], load_bound: float) -> list[str]:
    """Returns all replicas in the order in which to try them for one request.

    Args:
      key: what requests that share a prefix have in common. None goes to the least loaded replica.
      loads: open requests of each replica.
      load_bound: most load of a replica, in multiples of the mean load after this request; at
        least 1.
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
