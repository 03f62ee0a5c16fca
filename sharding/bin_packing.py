"""Bin packing with equal item counts: each pack gets the same number of items, and the heaviest
pack should be light."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Integer

# Smallest improvement, relative to a pack's load, that counts. A smaller one may be rounding, and
# two swaps could alternate forever.
_MIN_GAIN = 1e-12


def pack(
    load: Float64[np.ndarray, " n"], num_packs: int
) -> Integer[np.ndarray, "{num_packs} room"]:
    """Packs greedily: the heaviest item first, each into the lightest pack with room.

    Ties between items or packs go to the lower number.

    Args:
      load: load of each item.
      num_packs: number of packs; it divides n.

    Returns:
      The items in each pack.
    """
    room = load.size // num_packs
    if room == 1:  # all packings are equally good; this one does not depend on the loads
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
    """Swaps items of the heaviest pack with items of others until no swap helps.

    Each step makes the swap of two items that leaves the heavier of the two packs lightest. There
    are at most n steps. The heaviest pack never becomes heavier.
    """
    packs = packs.copy()
    for _ in range(packs.size):
        total = load[packs].sum(1)
        heaviest = np.argmax(total)
        moved = load[packs[heaviest]][:, None, None] - load[packs]  # [room, packs, room]
        after = np.maximum(total[heaviest] - moved, total[:, None] + moved)
        item, other, other_item = np.unravel_index(np.argmin(after), after.shape)
        if after[item, other, other_item] >= total[heaviest] * (1 - _MIN_GAIN):
            break
        packs[heaviest, item], packs[other, other_item] = (
            packs[other, other_item],
            packs[heaviest, item],
        )
    return packs
