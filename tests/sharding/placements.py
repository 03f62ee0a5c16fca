"""Loads for tests of expert placement, a greedy placement to compare with, and a validity check."""

import heapq
import itertools

import numpy as np


def random_cases(count: int, seed: int):
    """(weight [1, E], arguments): uniform, zipf, sparse and equal loads, clusters of all kinds."""
    rng = np.random.default_rng(seed)
    for case in range(count):
        nodes, gpus_a_node, of_gpu = (int(rng.integers(1, high)) for high in (5, 5, 6))
        gpus, P = nodes * gpus_a_node, nodes * gpus_a_node * of_gpu
        groups = nodes * int(rng.integers(1, 4))
        if groups > P:
            groups = nodes
        E = groups * int(rng.integers(1, P // groups + 1))
        if case % 4 == 1:  # global: the nodes do not divide the groups, which divide nothing else
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
    """Returns the load of the heaviest GPU under EPLB's greedy algorithm, written on lists."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1

    def packed(items, packs):
        """Packs items (load, value), the heaviest first into the lightest pack with room."""
        room, bins = len(items) // packs, [[] for _ in range(packs)]
        for item in sorted(items, key=lambda item: -item[0]):
            free = [held for held in bins if len(held) < room]
            min(free, key=lambda held: sum(load for load, _ in held)).append(item)
        return bins

    size = len(load) // num_groups
    groups = [list(load[at : at + size]) for at in range(0, len(load), size)]
    heaviest = 0.0
    for node in packed([(sum(group), group) for group in groups], num_nodes):
        experts = itertools.chain.from_iterable(group for _, group in node)
        heap = [(-load, at, load, 1) for at, load in enumerate(experts)]
        heapq.heapify(heap)
        for _ in range(num_replicas // num_nodes - len(heap)):
            _, at, load_of, count = heap[0]
            heapq.heapreplace(heap, (-load_of / (count + 1), at, load_of, count + 1))
        replicas = [(load / count, None) for _, _, load, count in heap for _ in range(count)]
        gpus = packed(replicas, num_gpus // num_nodes)
        heaviest = max(heaviest, *(sum(load for load, _ in gpu) for gpu in gpus))
    return heaviest


def check_tables(phy2log, log2phy, logcnt, num_experts):
    """Checks that the three arrays agree on every replica of every expert."""
    for of_place, of_expert, count in zip(phy2log, log2phy, logcnt, strict=True):
        assert len(of_expert) == len(count) == num_experts
        for expert in range(num_experts):
            places = [place for place, held in enumerate(of_place) if held == expert]
            assert places, f"expert {expert} stands nowhere"
            assert count[expert] == len(places)
            padding = [-1] * (of_expert.shape[1] - len(places))
            assert of_expert[expert].tolist() == places + padding
        assert sum(count) == len(of_place)
