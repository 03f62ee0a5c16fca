"""Packs: items shared out so that each pack holds as many and the heaviest is light."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Integer

_LEAST_GAIN = 1e-12  # of a pack's load: less may be rounding, and two swaps could alternate


def pack(
    load: Float64[np.ndarray, " n"], num_packs: int
) -> Integer[np.ndarray, "{num_packs} room"]:
    """The items of each pack: the heaviest item first, each to the lightest pack with room.

    ``num_packs`` divides n. Equal items and equal packs are taken in their order.
    """
    room = load.size // num_packs
    if room == 1:  # all ways are alike: the one that stays the same whatever the loads
        return np.arange(num_packs)[:, None]
    packs = np.empty((num_packs, room), np.int64)
    total, filled = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for item in np.argsort(-load, kind="stable"):
        lightest = np.argmin(np.where(filled < room, total, np.inf))
        packs[lightest, filled[lightest]] = item
        total[lightest] += load[item]
        filled[lightest] += 1
    return packs


def improve(
    load: Float64[np.ndarray, " n"], packs: Integer[np.ndarray, "packs room"]
) -> Integer[np.ndarray, "packs room"]:
    """Exchanges items of the heaviest pack for others until no exchange makes the two lighter.

    Each time, of all exchanges of one item for one, it is the one that leaves the heavier of its
    two packs lightest. There are n exchanges at most. The heaviest pack never becomes heavier.
    """
    packs = packs.copy()
    for _ in range(packs.size):
        total = load[packs].sum(1)
        heaviest = np.argmax(total)
        moved = load[packs[heaviest]][:, None, None] - load[packs]  # room, packs, room
        after = np.maximum(total[heaviest] - moved, total[:, None] + moved)
        item, other, its_item = np.unravel_index(np.argmin(after), after.shape)
        if after[item, other, its_item] >= total[heaviest] * (1 - _LEAST_GAIN):
            break
        packs[heaviest, item], packs[other, its_item] = (
            packs[other, its_item],
            packs[heaviest, item],
        )
    return packs
