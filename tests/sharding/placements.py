"""Loads for tests of expert placement, a greedy placement to compare with, and a validity check."""

import heapq
import itertools

import numpy as np


def random_cases(count: int, seed: int):
    """Yields (weight [1, E], arguments): uniform, zipf, sparse and equal loads on random
    clusters."""
    rng = np.random.default_rng(seed)
    for case in range(count):
        nodes, gpus_per_node, slots_per_gpu = (int(rng.integers(1, high)) for high in (5, 5, 6))
        gpus, P = nodes * gpus_per_node, nodes * gpus_per_node * slots_per_gpu
        groups = nodes * int(rng.integers(1, 4))
        if groups > P:
            groups = nodes
        E = groups * int(rng.integers(1, P // groups + 1))
        if case % 4 == 1:  # global policy: num_nodes does not divide num_groups
            groups = nodes * int(rng.integers(0, 3)) + 1 if nodes > 1 else 1
        kind = (case // 4) % 4
        if kind == 0:
            load = rng.random(E)
        elif kind == 1:
            load = rng.permutation(100 / np.arange(1, E + 1) ** rng.uniform(0.5, 2))
        elif kind == 2:
            load = rng.integers(0, 3, E) * rng.integers(0, 100, E)
        else:
            load = np.full(E, 7)
        yield load[None], (P, groups, nodes, gpus)


def heaviest_of_greedy(load, num_replicas, num_groups, num_nodes, num_gpus) -> float:
    """Returns the load of the heaviest GPU under EPLB's greedy algorithm, implemented on lists."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1

    def packed(items, packs):
        """Packs items (load, value): the heaviest first, into the lightest pack with room."""
        room, bins = len(items) // packs, [[] for _ in range(packs)]
        for item in sorted(items, key=lambda item: -item[0]):
            free = [items for items in bins if len(items) < room]
            min(free, key=lambda items: sum(load for load, _ in items)).append(item)
        return bins

    size = len(load) // num_groups
    groups = [list(load[i : i + size]) for i in range(0, len(load), size)]
    heaviest = 0.0
    for node in packed([(sum(group), group) for group in groups], num_nodes):
        experts = itertools.chain.from_iterable(group for _, group in node)
        heap = [(-load, i, load, 1) for i, load in enumerate(experts)]
        heapq.heapify(heap)
        for _ in range(num_replicas // num_nodes - len(heap)):
            _, i, load, count = heap[0]
            heapq.heapreplace(heap, (-load / (count + 1), i, load, count + 1))
        replicas = [(load / count, None) for _, _, load, count in heap for _ in range(count)]
        gpus = packed(replicas, num_gpus // num_nodes)
        heaviest = max(heaviest, *(sum(load for load, _ in gpu) for gpu in gpus))
    return heaviest


def check_tables(phy2log, log2phy, logcnt, num_experts):
    """Checks that the three arrays agree on every replica of every expert."""
    for experts, slots_by_expert, count in zip(phy2log, log2phy, logcnt, strict=True):
        assert len(slots_by_expert) == len(count) == num_experts
        for expert in range(num_experts):
            slots = [slot for slot, other in enumerate(experts) if other == expert]
            assert slots, f"expert {expert} has no slot"
            assert count[expert] == len(slots)
            padding = [-1] * (slots_by_expert.shape[1] - len(slots))
            assert slots_by_expert[expert].tolist() == slots + padding
        assert sum(count) == len(experts)
