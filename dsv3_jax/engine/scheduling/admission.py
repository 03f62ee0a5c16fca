"""Chooses the waiting request that is admitted next, and its data-parallel shard. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from dsv3_jax.engine.scheduling.balancers import choose_shard, shard_load
from dsv3_jax.engine.scheduling.prefix_loads import PrefixLoads
from dsv3_jax.engine.scheduling.scheduler_shard import SchedulerShard
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest


def next_admission(
    waiting: Sequence[ScheduledRequest],
    shards: Sequence[SchedulerShard],
    loads: PrefixLoads | None,
    now: float,
) -> ScheduledRequest | None:
    """Returns the first waiting request, or the first one in host memory if the first one lacks
    room there on every shard that has a slot for it.

    Args:
      waiting: the waiting requests in their order.
      loads: requests whose pages are being loaded are passed over.
    """
    first = next((r for r in waiting if not (loads and loads.is_loading(r, now))), None)
    if first is None:
        return None
    free = [shard for shard in shards if shard.has_free_slot]
    if not free or any(shard.can_be_swapped(first) for shard in free):
        return first
    swapped = [r for r in waiting if any(s.swap and r in s.swap for s in free)]
    return swapped[0] if swapped else first


def shard_with_room(
    request: ScheduledRequest,
    shards: Sequence[SchedulerShard],
    rooms: Sequence[int],
    max_running: int,
) -> tuple[SchedulerShard, list[int]] | None:
    """Returns the shard for a request, and the cached pages that it reuses there, or None if no
    shard has room.

    Args:
      rooms: number of chunks that each shard can still prefill in this step.
      max_running: most requests that run on a shard.
    """
    hits: dict[int, list[int]] = {}
    home = [s.number for s in shards if s.swap and request in s.swap]

    def hit_with_room(number: int) -> int | None:
        if home and number not in home:
            return None
        shard = shards[number]
        if rooms[number] < 1 or len(shard.running) >= max_running:
            return None
        hit = shard.hit_with_room(request)
        if hit is None:
            return None
        hits[number] = hit
        return len(hit) * shard.pages.page_size

    loads = [shard_load(s.pages.used * s.pages.page_size, len(s.running)) for s in shards]
    number = choose_shard(loads, hit_with_room, len(request.tokens))
    return None if number is None else (shards[number], hits[number])
