"""Replication and placement of experts: which experts get replicas, and which GPU holds which.

The contract is that of deepseek-ai/EPLB. A logical expert is one of the model's E experts. A
physical expert is an expert slot with a replica of one of them; there are ``num_replicas`` slots,
the same number on each GPU. Everything here runs on the host, in float64, between steps.

Each of EPLB's greedy choices is kept as the start of a few improvements, so that no placement is
less balanced than the greedy one:

1. groups of experts are packed to nodes, the heaviest first, each to the lightest node with room;
2. within a node, the expert with the most load per replica gets one more replica, until no slot is
   left: no other counts have a smaller heaviest replica;
3. within a node, replicas are packed to GPUs as groups were to nodes;
4. beyond EPLB: while that makes the heaviest pack lighter, one of its items is swapped with one of
   another pack. GPUs are always improved. Nodes are tried both ways and the better way is taken,
   because better packed groups need not make better packed GPUs;
5. beyond EPLB: a GPU gets no expert twice, or more often than an even spread over the GPUs of the
   node would give it, unless the heaviest GPU would have more load than under EPLB. A second
   replica on a GPU takes a slot and moves no load.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int32, Integer

from sharding.bin_packing import improve, pack, separate, too_many


def rebalance_experts(
    weight: npt.ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[
    Int32[np.ndarray, "L {num_replicas}"],
    Int32[np.ndarray, "L E max_rep"],
    Int32[np.ndarray, "L E"],
]:
    """Replicates the experts of each layer and places them on GPUs so that loads are balanced.

    If ``num_nodes`` divides ``num_groups``, the experts of a group stay on one node and every node
    holds the same number of groups (hierarchical policy). Otherwise groups and nodes are ignored
    (global policy). Equal arguments give equal placements.

    Args:
      weight: [L, E], load of each expert in any unit, such as a number of tokens.
      num_replicas: number of expert slots per layer, on all GPUs together.
      num_groups: number of groups of consecutive experts that routing is limited to.

    Returns:
      phy2log: logical expert in each slot. GPU g holds the slots from
        ``g * num_replicas // num_gpus``, node n the GPUs from ``n * num_gpus // num_nodes``.
      log2phy: slots of each logical expert in ascending order, padded with -1. max_rep is the
        largest number of replicas in this placement, so it depends on the loads.
      logcnt: number of replicas of each logical expert, at least 1.

    Raises:
      ValueError: ``weight`` is not [L, E] or not finite and non-negative; a number is below 1;
        there are fewer slots than experts; slots do not divide over the GPUs; or, in the
        hierarchical policy, experts do not divide into groups or GPUs do not divide over nodes.
    """
    weight = _checked_weight(weight)
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
        phy2log[layer] = _place_layer(weight[layer], num_replicas, num_groups, num_nodes, num_gpus)
    return phy2log, *replica_tables(phy2log, E)


def replica_tables(
    phy2log: Integer[np.ndarray, "L P"], num_experts: int, max_rep: int | None = None
) -> tuple[Int32[np.ndarray, "L E max_rep"], Int32[np.ndarray, "L E"]]:
    """Returns ``log2phy`` and ``logcnt`` of a placement, as :func:`rebalance_experts` does.

    Args:
      max_rep: number of columns of ``log2phy``; None takes the largest number of replicas.

    Raises:
      ValueError: ``phy2log`` contains a number that is not one of the ``num_experts``, leaves an
        expert out, or has more than ``max_rep`` replicas of one.
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
    largest = int(logcnt.max(initial=1))
    if max_rep is None:
        max_rep = largest
    if largest > max_rep:
        raise ValueError(
            f"phy2log: expected at most {max_rep} replicas of an expert, got {largest}"
        )

    log2phy = np.full((L, num_experts, max_rep), -1, np.int32)
    for layer in range(L):
        slots = np.argsort(phy2log[layer], kind="stable")
        experts = phy2log[layer][slots]
        rank = np.arange(P) - np.searchsorted(experts, experts)
        log2phy[layer, experts, rank] = slots
    return log2phy, logcnt


def balancedness(
    weight: npt.ArrayLike, phy2log: Integer[np.ndarray, "L P"], num_gpus: int
) -> Float64[np.ndarray, " L"]:
    """Returns the mean load of the GPUs divided by the load of the heaviest GPU, for each layer.

    1 is perfectly balanced; 1/``num_gpus`` means that one GPU has all the load. An expert's load is
    split evenly over its replicas. A layer without load counts as balanced.

    Args:
      weight: [L, E], load of each expert.
      phy2log: logical expert in each slot.

    Raises:
      ValueError: as for :func:`rebalance_experts` and :func:`replica_tables`.
    """
    weight = _checked_weight(weight)
    L, E = weight.shape
    if phy2log.shape[0] != L:
        raise ValueError(f"phy2log: expected {L} layers as weight has, got {phy2log.shape[0]}")
    if num_gpus < 1:
        raise ValueError(f"num_gpus: expected 1 or more, got {num_gpus}")
    _check_divides("num_replicas", phy2log.shape[1], "num_gpus", num_gpus)
    _, logcnt = replica_tables(phy2log, E)
    replica_loads = np.take_along_axis(weight / logcnt, phy2log, axis=1)
    gpu_loads = replica_loads.reshape(L, num_gpus, -1).sum(2)
    mean, heaviest = gpu_loads.mean(1), gpu_loads.max(1)
    return np.divide(mean, heaviest, out=np.ones(L), where=heaviest > 0)


def _checked_weight(weight: npt.ArrayLike) -> Float64[np.ndarray, "L E"]:
    weight = np.asarray(weight, np.float64)
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise ValueError(f"weight: expected shape [layers, experts], got {weight.shape}")
    wrong = weight[~(np.isfinite(weight) & (weight >= 0))]
    if wrong.size:
        raise ValueError(f"weight: expected finite loads of 0 or more, got {wrong[0]}")
    return weight


def _check_divides(name: str, number: int, divisor_name: str, divisor: int) -> None:
    if number % divisor:
        raise ValueError(f"{name}: expected a multiple of {divisor_name}={divisor}, got {number}")


def _place_layer(
    weight: Float64[np.ndarray, " E"],
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
) -> Integer[np.ndarray, " {num_replicas}"]:
    """Returns one layer's ``phy2log``."""
    groups = np.arange(weight.size).reshape(num_groups, -1)
    group_loads = weight[groups].sum(1)
    greedy = pack(group_loads, num_nodes)
    candidates = []
    for packs in (greedy, improve(group_loads, greedy)):
        nodes = [
            _Node.of(weight, groups[pack].ravel(), num_replicas // num_nodes, num_gpus // num_nodes)
            for pack in packs
        ]
        heaviest = max(node.heaviest for node in nodes)
        slots = np.concatenate([node.separated(heaviest).slots for node in nodes])
        candidates.append((heaviest, slots))
    return min(candidates, key=lambda candidate: candidate[0])[1]


@dataclasses.dataclass(frozen=True)
class _Node:
    """Replicas on the GPUs of one node."""

    replicas: Integer[np.ndarray, " n"]
    """Logical expert of each replica."""
    load: Float64[np.ndarray, " n"]
    """Load of each replica."""
    gpus: Integer[np.ndarray, "gpus room"]
    """Replicas on each GPU."""

    @classmethod
    def of(
        cls,
        weight: Float64[np.ndarray, " E"],
        experts: Integer[np.ndarray, " e"],
        num_replicas: int,
        num_gpus: int,
    ) -> _Node:
        """Places replicas so that no GPU is heavier than the heaviest one of EPLB.

        Args:
          experts: logical experts of this node.
          num_replicas: slots of this node.
          num_gpus: GPUs of this node.
        """
        count = _replica_counts(weight[experts], num_replicas)
        replicas = np.repeat(experts, count)
        load = np.repeat(weight[experts] / count, count)
        greedy = cls(replicas, load, pack(load, num_gpus))
        improved = dataclasses.replace(greedy, gpus=improve(load, greedy.gpus))
        return improved.separated(greedy.heaviest)

    @property
    def slots(self) -> Integer[np.ndarray, " n"]:
        """The logical expert in each slot."""
        return self.replicas[self.gpus].ravel()

    @property
    def heaviest(self) -> float:
        """Load of the heaviest GPU."""
        return float(self.load[self.gpus].sum(1).max())

    @property
    def too_many(self) -> int:
        """Replicas that are on the same GPU as others of their expert, and need not be."""
        return too_many(self.replicas, self.gpus)

    def separated(self, most: float) -> _Node:
        """Returns a placement with fewer such replicas, if there are any and one is found in which
        no GPU has more load than ``most``."""
        if not self.too_many:
            return self
        kind, load = self.replicas, self.load
        starts = separate(load, self.gpus, kind, most), pack(load, len(self.gpus), kind)
        placements = [dataclasses.replace(self, gpus=improve(load, gpus, kind)) for gpus in starts]
        return min(
            (self, *(each for each in placements if each.heaviest <= most)),
            key=lambda each: (each.too_many, each.heaviest),
        )


def _replica_counts(weight: Float64[np.ndarray, " E"], total: int) -> Integer[np.ndarray, " E"]:
    """Returns the number of replicas of each expert; they sum to ``total``."""
    count = np.ones(weight.size, np.int64)
    for _ in range(total - weight.size):
        count[np.argmax(weight / count)] += 1
    return count
