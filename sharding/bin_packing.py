"""Bin packing with equal item counts: each pack gets the same number of items, and the heaviest
pack should be light.

Items of one kind are copies of each other and belong into different packs. A pack has one too many
of a kind if it has more than there would be if they were spread evenly, which is one if there are
not more of them than packs.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer

# Smallest improvement, relative to a pack's load, that counts. A smaller one may be rounding, and
# two swaps could alternate forever.
_MIN_GAIN = 1e-12


def pack(
    load: Float64[np.ndarray, " n"],
    num_packs: int,
    kind: Integer[np.ndarray, " n"] | None = None,
) -> Integer[np.ndarray, "{num_packs} room"]:
    """Packs greedily: the heaviest item first, each into the lightest pack with room.

    Ties between items or packs go to the lower number.

    Args:
      load: load of each item.
      num_packs: number of packs; it divides n.
      kind: number of each item's kind; None for items of different kinds. Among the packs with room
        are only those that do not get one too many, if there are any.

    Returns:
      The items in each pack.
    """
    room = load.size // num_packs
    if room == 1:  # all packings are equally good; this one does not depend on the loads
        return np.arange(num_packs)[:, None]
    kind = np.arange(load.size) if kind is None else kind
    packs = np.empty((num_packs, room), np.int64)
    total, filled = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    allowed = _allowed(kind, num_packs)
    count = np.zeros((num_packs, len(allowed)), np.int64)
    for item in np.argsort(-load, kind="stable"):
        has_room = filled < room
        is_separate = has_room & (count[:, kind[item]] < allowed[kind[item]])
        open_packs = is_separate if is_separate.any() else has_room
        lightest = np.argmin(np.where(open_packs, total, np.inf))
        packs[lightest, filled[lightest]] = item
        total[lightest] += load[item]
        filled[lightest] += 1
        count[lightest, kind[item]] += 1
    return packs


def improve(
    load: Float64[np.ndarray, " n"],
    packs: Integer[np.ndarray, "packs room"],
    kind: Integer[np.ndarray, " n"] | None = None,
) -> Integer[np.ndarray, "packs room"]:
    """Swaps items of the heaviest pack with items of others until no swap helps.

    Each step makes the swap of two items that leaves the heavier of the two packs lightest. There
    are at most n steps. The heaviest pack never becomes heavier.

    Args:
      kind: number of each item's kind; None for items of different kinds. No swap gives a pack one
        too many.
    """
    kind = np.arange(load.size) if kind is None else kind
    packs = packs.copy()
    for _ in range(packs.size):
        total = load[packs].sum(1)
        heaviest = int(np.argmax(total))
        moved = load[packs[heaviest]][:, None, None] - load[packs]  # [room, packs, room]
        after = np.maximum(total[heaviest] - moved, total[:, None] + moved)
        after = np.where(_can_swap(kind, packs, heaviest), after, np.inf)
        item, other, other_item = np.unravel_index(np.argmin(after), after.shape)
        if after[item, other, other_item] >= total[heaviest] * (1 - _MIN_GAIN):
            break
        packs[heaviest, item], packs[other, other_item] = (
            packs[other, other_item],
            packs[heaviest, item],
        )
    return packs


def separate(
    load: Float64[np.ndarray, " n"],
    packs: Integer[np.ndarray, "packs room"],
    kind: Integer[np.ndarray, " n"],
    most: float,
) -> Integer[np.ndarray, "packs room"]:
    """Swaps items that are one too many in their packs with items of others.

    Each swap is the one that leaves the heavier of both packs lightest. An item stays where it is
    if that pack would be heavier than ``most``.

    Args:
      kind: number of each item's kind.
    """
    packs = packs.copy()
    allowed = _allowed(kind, len(packs))
    for number in range(len(packs)):
        for item in range(packs.shape[1]):
            kinds = kind[packs[number]]
            if (kinds == kinds[item]).sum() <= allowed[kinds[item]]:
                continue
            total = load[packs].sum(1)
            moved = load[packs[number, item]] - load[packs]
            after = np.maximum(total[number] - moved, total[:, None] + moved)
            after = np.where(_can_swap(kind, packs, number)[item], after, np.inf)
            other, other_item = np.unravel_index(np.argmin(after), after.shape)
            if after[other, other_item] <= most:
                packs[number, item], packs[other, other_item] = (
                    packs[other, other_item],
                    packs[number, item],
                )
    return packs


def too_many(kind: Integer[np.ndarray, " n"], packs: Integer[np.ndarray, "packs room"]) -> int:
    """Returns how many items are one too many in their packs."""
    return int(np.maximum(_counts(kind, packs) - _allowed(kind, len(packs)), 0).sum())


def _allowed(kind: Integer[np.ndarray, " n"], num_packs: int) -> Int64[np.ndarray, " kinds"]:
    """Returns how many items of each kind a pack may have."""
    return -(-np.bincount(kind) // num_packs)


def _counts(
    kind: Integer[np.ndarray, " n"], packs: Integer[np.ndarray, "packs room"]
) -> Int64[np.ndarray, "packs kinds"]:
    """Returns how many items of each kind each pack has."""
    counts = np.zeros((len(packs), kind.max() + 1), np.int64)
    np.add.at(counts, (np.arange(len(packs))[:, None], kind[packs]), 1)
    return counts


def _can_swap(
    kind: Integer[np.ndarray, " n"], packs: Integer[np.ndarray, "packs room"], number: int
) -> Bool[np.ndarray, "room packs room"]:
    """Returns whether each item of a pack can be swapped with each item of all packs, so that
    neither pack gets one too many."""
    kinds, counts, allowed = kind[packs], _counts(kind, packs), _allowed(kind, len(packs))
    own = kinds[number]
    to_others = (counts[:, own] < allowed[own]).T[:, :, None]
    from_others = (counts[number] < allowed)[kinds]
    return (to_others & from_others) | (own[:, None, None] == kinds)
