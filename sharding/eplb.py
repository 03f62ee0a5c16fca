"""Which experts are held twice, and which GPU holds which: placements for given loads.

The contract is that of deepseek-ai/EPLB. A logical expert is one of the model's E; a physical
expert is one of the ``num_replicas`` places for a copy of one, the same number of places on each
GPU. All of this runs on the host, in float64, between steps.

Each of EPLB's greedy choices is kept as the start of a few improvements, so no placement is less
balanced than the greedy one:

1. groups of experts are packed to nodes, the heaviest first, each to the lightest node with room;
2. within a node, whichever expert has the most load a replica gets one more, until no place is
   left: no other counts have a smaller heaviest replica;
3. within a node, replicas are packed to GPUs as groups were to nodes;
4. beyond EPLB: while that makes the heaviest pack lighter, one of its items changes places with
   one of another pack. GPUs are always improved; nodes are tried both ways and the better way is
   taken, because better packed groups need not make better packed GPUs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int32, Integer

from sharding.bin_packing import improve, pack


def rebalance_experts(
    weight: npt.ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[
    Int32[np.ndarray, "L {num_replicas}"],
    Int32[np.ndarray, "L E max_rep"],
    Int32[np.ndarray, "L E"],
]:
    """Replicates the experts of each layer and lays them out over GPUs, evenly by load.

    Where ``num_nodes`` divides ``num_groups``, experts of a group stay on one node and a node holds
    as many groups as any other (hierarchical policy); otherwise groups and nodes are not looked at
    (global policy). Equal arguments give equal placements.

    Args:
      weight: [L, E], load of each expert in any unit, such as tokens counted.
      num_replicas: physical experts a layer, on all GPUs together.
      num_groups: groups of consecutive experts that a token's experts are limited to.

    Returns:
      phy2log: the logical expert at each place; GPU g holds the places from
        ``g * num_replicas // num_gpus``, node n the GPUs from ``n * num_gpus // num_nodes``.
      log2phy: the places of each logical expert, ascending, then -1. max_rep is the largest number
        of replicas in this placement: it depends on the loads.
      logcnt: number of replicas of each logical expert, at least 1.

    Raises:
      ValueError: a weight that is not [L, E] or not finite and non-negative; a number below 1;
        fewer replicas than experts; replicas that do not divide over the GPUs; in the hierarchical
        policy, experts that do not divide into groups or GPUs that do not divide over nodes.
    """
    weight = _checked(weight)
    L, E = weight.shape
    for name, number in (
        ("num_replicas", num_replicas),
        ("num_groups", num_groups),
        ("num_nodes", num_nodes),
        ("num_gpus", num_gpus),
    ):
        if number < 1:
            raise ValueError(f"{name}: expected 1 or more, got {number}")
    if num_replicas < E:
        raise ValueError(f"num_replicas: expected {E} experts or more, got {num_replicas}")
    _check_divides("num_replicas", num_replicas, "num_gpus", num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    _check_divides("experts", E, "num_groups", num_groups)
    _check_divides("num_gpus", num_gpus, "num_nodes", num_nodes)

    phy2log = np.empty((L, num_replicas), np.int32)
    for layer in range(L):
        phy2log[layer] = _place(weight[layer], num_replicas, num_groups, num_nodes, num_gpus)
    return phy2log, *replica_tables(phy2log, E)


def replica_tables(
    phy2log: Integer[np.ndarray, "L P"], num_experts: int, max_rep: int | None = None
) -> tuple[Int32[np.ndarray, "L E max_rep"], Int32[np.ndarray, "L E"]]:
    """``log2phy`` and ``logcnt`` of a placement, as :func:`rebalance_experts` returns them.

    Args:
      max_rep: columns of ``log2phy``; as many as needed if None.

    Raises:
      ValueError: an expert that is none of the ``num_experts``, one that stands nowhere, or one
        with more than ``max_rep`` replicas.
    """
    L, P = phy2log.shape
    outside = phy2log[(phy2log < 0) | (phy2log >= num_experts)]
    if outside.size:
        raise ValueError(f"phy2log: expected experts 0 to {num_experts - 1}, got {outside[0]}")
    logcnt = np.zeros((L, num_experts), np.int32)
    np.add.at(logcnt, (np.arange(L)[:, None], phy2log), 1)
    if not logcnt.all():
        layer, expert = np.argwhere(logcnt == 0)[0]
        raise ValueError(
            f"phy2log: expected each expert at least once, got none of expert {expert} "
            f"in layer {layer}"
        )
    most = int(logcnt.max(initial=1))
    if max_rep is None:
        max_rep = most
    if most > max_rep:
        raise ValueError(f"phy2log: expected at most {max_rep} replicas of an expert, got {most}")

    log2phy = np.full((L, num_experts, max_rep), -1, np.int32)
    for layer in range(L):
        places = np.argsort(phy2log[layer], kind="stable")
        experts = phy2log[layer][places]
        rank = np.arange(P) - np.searchsorted(experts, experts)
        log2phy[layer, experts, rank] = places
    return log2phy, logcnt


def balancedness(
    weight: npt.ArrayLike, phy2log: Integer[np.ndarray, "L P"], num_gpus: int
) -> Float64[np.ndarray, " L"]:
    """Mean load of a GPU over the heaviest one's, a layer: 1 is even, 1/``num_gpus`` is all on one.

    An expert's load is split evenly over its replicas. A layer without load is even.

    Args:
      weight: [L, E], load of each expert.

    Raises:
      ValueError: as :func:`rebalance_experts` and :func:`replica_tables` do.
    """
    weight = _checked(weight)
    L, E = weight.shape
    if phy2log.shape[0] != L:
        raise ValueError(f"phy2log: expected {L} layers as weight has, got {phy2log.shape[0]}")
    if num_gpus < 1:
        raise ValueError(f"num_gpus: expected 1 or more, got {num_gpus}")
    _check_divides("num_replicas", phy2log.shape[1], "num_gpus", num_gpus)
    _, logcnt = replica_tables(phy2log, E)
    replicas = np.take_along_axis(weight / logcnt, phy2log, axis=1)
    loads = replicas.reshape(L, num_gpus, -1).sum(2)
    mean, heaviest = loads.mean(1), loads.max(1)
    return np.divide(mean, heaviest, out=np.ones(L), where=heaviest > 0)


def _checked(weight: npt.ArrayLike) -> Float64[np.ndarray, "L E"]:
    weight = np.asarray(weight, np.float64)
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise ValueError(f"weight: expected shape [layers, experts], got {weight.shape}")
    wrong = weight[~(np.isfinite(weight) & (weight >= 0))]
    if wrong.size:
        raise ValueError(f"weight: expected finite loads of 0 or more, got {wrong[0]}")
    return weight


def _check_divides(name: str, number: int, by: str, divisor: int) -> None:
    if number % divisor:
        raise ValueError(f"{name}: expected a multiple of {by}={divisor}, got {number}")


def _place(
    weight: Float64[np.ndarray, " E"],
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
) -> Integer[np.ndarray, " {num_replicas}"]:
    """One layer's ``phy2log``."""
    groups = np.arange(weight.size).reshape(num_groups, -1)
    of_group = weight[groups].sum(1)
    greedy = pack(of_group, num_nodes)
    ways = []
    for nodes in (greedy, improve(of_group, greedy)):
        filled = [
            _fill(weight, groups[node].ravel(), num_replicas // num_nodes, num_gpus // num_nodes)
            for node in nodes
        ]
        held, heaviest = zip(*filled, strict=True)
        ways.append((max(heaviest), np.concatenate(held)))
    return min(ways, key=lambda way: way[0])[1]


def _fill(
    weight: Float64[np.ndarray, " E"],
    experts: Integer[np.ndarray, " n"],
    num_replicas: int,
    num_gpus: int,
) -> tuple[Integer[np.ndarray, " {num_replicas}"], float]:
    """One node's part of ``phy2log``, from the experts it is to hold, and its heaviest GPU."""
    count = _replicate(weight[experts], num_replicas)
    replicas = np.repeat(experts, count)
    load = np.repeat(weight[experts] / count, count)
    gpus = improve(load, pack(load, num_gpus))
    return replicas[gpus].ravel(), float(load[gpus].sum(1).max())


def _replicate(weight: Float64[np.ndarray, " E"], total: int) -> Integer[np.ndarray, " E"]:
    """Replicas of each expert, ``total`` in all."""
    count = np.ones(weight.size, np.int64)
    for _ in range(total - weight.size):
        count[np.argmax(weight / count)] += 1
    return count
