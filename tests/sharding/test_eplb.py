"""Placements of experts are valid, and at least as balanced as the greedy ones."""

import numpy as np
import pytest

from sharding import balancedness, rebalance_experts
from sharding.bin_packing import improve, pack, separate, too_many
from sharding.eplb import replica_tables
from tests.sharding.placements import check_tables, heaviest_of_greedy, random_cases

# The example in the README of deepseek-ai/EPLB: 16 replicas, 4 groups, 2 nodes, 8 GPUs.
EXAMPLE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PUBLISHED = np.array(
    [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
)


def test_the_published_example():
    phy2log, log2phy, logcnt = rebalance_experts(EXAMPLE, 16, 4, 2, 8)
    check_tables(phy2log, log2phy, logcnt, 12)
    assert (phy2log.dtype, log2phy.dtype, logcnt.dtype) == (np.int32,) * 3
    assert log2phy.shape == (2, 12, 2)
    published = balancedness(EXAMPLE, PUBLISHED, 8)
    assert (balancedness(EXAMPLE, phy2log, 8) >= published - 1e-12).all()
    np.testing.assert_array_equal(logcnt, replica_tables(PUBLISHED, 12)[1])


def test_balancedness_of_the_published_example():
    """Layer 0: expert 0 and half of 1 on one GPU, 156, of 1033 on eight. Layer 1: 187/2 + 86."""
    want = [1033 / 8 / (90 + 132 / 2), 1156 / 8 / (187 / 2 + 172 / 2)]
    np.testing.assert_allclose(balancedness(EXAMPLE, PUBLISHED, 8), want, rtol=1e-14)


def check_placement(weight, phy2log, P, groups, nodes, gpus):
    """The hierarchical policy puts whole groups on nodes, the same number on each."""
    E = weight.shape[1]
    assert phy2log.shape == (len(weight), P)
    if groups % nodes:
        return
    for layer in phy2log:
        node_groups = [set((node // (E // groups)).tolist()) for node in layer.reshape(nodes, -1)]
        assert [len(on_node) for on_node in node_groups] == [groups // nodes] * nodes


@pytest.mark.slow
def test_a_thousand_loads():
    """Each placement is valid and no less balanced than the greedy one; many are better."""
    better = hierarchical = 0
    for weight, arguments in random_cases(1000, seed=0):
        tables = rebalance_experts(weight, *arguments)
        check_tables(*tables, weight.shape[1])
        check_placement(weight, tables[0], *arguments)
        gpus = arguments[3]
        balance = balancedness(weight, tables[0], gpus)[0]
        heaviest = heaviest_of_greedy(weight[0].tolist(), *arguments)
        greedy = weight.sum() / gpus / heaviest if heaviest else 1.0
        assert balance >= greedy - 1e-9, (weight, arguments)
        better += balance > greedy + 1e-9
        hierarchical += arguments[1] % arguments[2] == 0
    assert 100 < better < 1000
    assert 500 < hierarchical < 1000


@pytest.mark.parametrize("arguments", [(288, 8, 4, 32), (288, 8, 18, 144), (320, 8, 1, 8)])
def test_deepseek_v3(arguments):
    """No GPU exceeds the greedy maximum in V3's prefill and decode deployments and on one node."""
    weight = np.random.default_rng(1).lognormal(0, 0.7, (3, 256))
    phy2log, log2phy, logcnt = rebalance_experts(weight, *arguments)
    check_tables(phy2log, log2phy, logcnt, 256)
    check_placement(weight, phy2log, *arguments)
    heaviest = np.array([heaviest_of_greedy(layer, *arguments) for layer in weight.tolist()])
    greedy = weight.sum(1) / arguments[3] / heaviest
    assert (balancedness(weight, phy2log, arguments[3]) >= greedy - 1e-12).all()


def on_one_gpu(layer, nodes: int, gpus: int) -> int:
    """Returns how many replicas share a GPU with another one of their expert, though the node has
    enough GPUs for all."""
    count = 0
    for node in layer.reshape(nodes, gpus // nodes, -1):
        allowed = -(-np.bincount(node.ravel()) // len(node))
        for gpu in node:
            here = np.bincount(gpu, minlength=len(allowed))
            count += np.maximum(here - allowed, 0).sum()
    return count


@pytest.mark.parametrize(
    ("arguments", "sigma"),
    [
        ((288, 1, 1, 32), 1.5),  # 39 of 48 layers had an expert twice on a GPU
        ((288, 8, 1, 32), 0.7),
        ((288, 8, 4, 32), 0.7),
        ((320, 8, 1, 8), 1.5),
        ((512, 1, 1, 64), 1.5),
    ],
)
def test_no_gpu_has_an_expert_twice(arguments, sigma):
    """Without need, that is. No GPU exceeds the greedy maximum for it."""
    for seed in range(2):
        weight = np.random.default_rng(seed).lognormal(0, sigma, (12, 256))
        phy2log, log2phy, logcnt = rebalance_experts(weight, *arguments)
        check_tables(phy2log, log2phy, logcnt, 256)
        check_placement(weight, phy2log, *arguments)
        nodes, gpus = arguments[2:]
        assert [on_one_gpu(layer, nodes, gpus) for layer in phy2log] == [0] * 12
        heaviest = np.array([heaviest_of_greedy(layer, *arguments) for layer in weight.tolist()])
        greedy = weight.sum(1) / gpus / heaviest
        assert (balancedness(weight, phy2log, gpus) >= greedy - 1e-12).all()


def test_copies_are_packed_and_kept_apart():
    """Whatever the loads are, if copies can be in different packs, all are."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        packs, room = (int(n) for n in rng.integers(2, 7, 2))
        kind = np.sort(rng.integers(0, packs * room, packs * room))
        load = rng.random(kind.max() + 1)[kind]
        packed = pack(load, packs, kind)
        assert sorted(packed.ravel()) == list(range(load.size))
        before = load[packed].sum(1).max()
        improved = improve(load, packed, kind)
        assert sorted(improved.ravel()) == list(range(load.size))
        assert too_many(kind, improved) <= too_many(kind, packed)
        assert load[improved].sum(1).max() <= before + 1e-12
        greedy = improve(load, pack(load, packs))
        for most in (load[greedy].sum(1).max(), np.inf):
            apart = separate(load, greedy, kind, most)
            assert sorted(apart.ravel()) == list(range(load.size))
            assert too_many(kind, apart) <= too_many(kind, greedy)
            assert load[apart].sum(1).max() <= most


def test_layers_are_independent():
    weight = np.random.default_rng(2).random((4, 24))
    together = rebalance_experts(weight, 32, 4, 2, 8)[0]
    for layer in range(4):
        alone = rebalance_experts(weight[layer : layer + 1], 32, 4, 2, 8)[0]
        np.testing.assert_array_equal(together[layer], alone[0])


def test_units_of_loads_do_not_matter():
    weight = np.random.default_rng(3).integers(0, 1000, (2, 24))
    want = rebalance_experts(weight, 32, 4, 2, 8)
    for scaled in (weight.tolist(), weight * 4.0, weight.astype(np.float32)):
        for got, table in zip(rebalance_experts(scaled, 32, 4, 2, 8), want, strict=True):
            np.testing.assert_array_equal(got, table)


def test_one_replica_each_and_no_load():
    phy2log, log2phy, logcnt = rebalance_experts(np.zeros((2, 8)), 8, 1, 1, 4)
    check_tables(phy2log, log2phy, logcnt, 8)
    assert log2phy.shape == (2, 8, 1)
    np.testing.assert_array_equal(balancedness(np.zeros((2, 8)), phy2log, 4), [1, 1])
    phy2log, log2phy, logcnt = rebalance_experts(np.zeros((0, 8)), 16, 1, 1, 4)
    assert (phy2log.shape, log2phy.shape, logcnt.shape) == ((0, 16), (0, 8, 1), (0, 8))


def test_all_load_on_one_expert_is_shared_by_all_gpus():
    """The other experts need 4 of 12 slots; 8 are left, two per GPU."""
    phy2log, _, logcnt = rebalance_experts([[0, 0, 60, 0, 0]], 12, 1, 1, 4)
    assert logcnt.tolist() == [[1, 1, 8, 1, 1]]
    assert balancedness([[0, 0, 60, 0, 0]], phy2log, 4).tolist() == [1.0]


def test_groups_are_swapped_between_nodes():
    """Greedy packing gives nodes 9+6+5 and 8+7+1; one swap balances them."""
    load = np.array([9.0, 8, 7, 6, 5, 1])
    greedy = pack(load, 2)
    assert sorted(load[greedy].sum(1)) == [16, 20]
    assert sorted(load[improve(load, greedy)].sum(1)) == [18, 18]
    balance = balancedness([load], rebalance_experts([load], 6, 6, 2, 2)[0], 2)
    assert balance.tolist() == [1.0]


def test_balanced_nodes_are_not_taken_if_gpus_become_worse():
    """Better balanced nodes can make a GPU heavier; the better placement is returned."""
    differ = 0
    for weight, (P, groups, nodes, gpus) in random_cases(400, seed=4):
        if groups % nodes or groups in (1, nodes):
            continue
        size = weight.shape[1] // groups
        group_loads = weight.reshape(groups, size).sum(1, dtype=float)
        heaviest = []
        for packs in (pack(group_loads, nodes), improve(group_loads, pack(group_loads, nodes))):
            loads = []
            for node in packs:
                node_loads = weight.reshape(groups, size)[node].reshape(1, -1)
                placed = rebalance_experts(node_loads, P // nodes, 1, 1, gpus // nodes)[0]
                balance = balancedness(node_loads, placed, gpus // nodes)[0]
                loads.append(node_loads.sum() / (gpus // nodes) / balance)
            heaviest.append(max(loads))
        placed = rebalance_experts(weight, P, groups, nodes, gpus)[0]
        balance = balancedness(weight, placed, gpus)[0]
        if weight.sum():
            assert balance == pytest.approx(weight.sum() / gpus / min(heaviest), rel=1e-9)
        differ += heaviest[0] < heaviest[1] * (1 - 1e-9)
    assert differ


def test_one_item_per_pack_is_not_moved():
    assert pack(np.array([1.0, 3, 2]), 3).tolist() == [[0], [1], [2]]


def test_no_swap_improves_improved_packs():
    """No swap with another pack improves the heaviest, and every item is still packed once."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        packs, room = (int(n) for n in rng.integers(2, 6, 2))
        load = rng.random(packs * room)
        before = pack(load, packs)
        after = improve(load, before)
        assert sorted(after.ravel()) == list(range(load.size))
        total = load[after].sum(1)
        assert total.max() <= load[before].sum(1).max() + 1e-12
        heavy = total.argmax()
        for other in set(range(packs)) - {heavy}:
            for item in load[after[heavy]]:
                for other_item in load[after[other]]:
                    change = other_item - item
                    swapped = max(total[heavy] + change, total[other] - change)
                    assert swapped >= total[heavy] - 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": [1, 2]}, r"weight: expected shape \[layers, experts\], got \(2,\)"),
        ({"weight": np.zeros((2, 0))}, r"weight: expected shape .* got \(2, 0\)"),
        ({"weight": np.zeros((1, 2, 3))}, r"weight: expected shape .* got \(1, 2, 3\)"),
        ({"weight": [[1.0] * 11 + [-2.0]]}, "weight: expected finite loads of 0 or more, got -2.0"),
        ({"weight": [[1.0] * 11 + [np.nan]]}, "weight: expected finite .* got nan"),
        ({"weight": [[1.0] * 11 + [np.inf]]}, "weight: expected finite .* got inf"),
        ({"num_replicas": 8}, "num_replicas: expected 12 experts or more, got 8"),
        ({"num_replicas": 18}, "num_replicas: expected a multiple of num_gpus=8, got 18"),
        ({"num_replicas": 0}, "num_replicas: expected 1 or more, got 0"),
        ({"num_groups": 0}, "num_groups: expected 1 or more, got 0"),
        ({"num_nodes": -1}, "num_nodes: expected 1 or more, got -1"),
        ({"num_gpus": 0}, "num_gpus: expected 1 or more, got 0"),
        ({"num_groups": 8}, "experts: expected a multiple of num_groups=8, got 12"),
        (
            {"num_groups": 3, "num_nodes": 3},
            "num_gpus: expected a multiple of num_nodes=3, got 8",
        ),
    ],
)
def test_refusals(change, message):
    arguments = {"weight": EXAMPLE, "num_replicas": 16, "num_groups": 4, "num_nodes": 2}
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        rebalance_experts(**{**arguments, "num_gpus": 8, **change})


def test_the_global_policy_ignores_groups_and_nodes():
    want = rebalance_experts(EXAMPLE, 16, 1, 1, 8)[0]
    for groups, nodes in ((4, 3), (1, 2), (5, 2)):
        np.testing.assert_array_equal(rebalance_experts(EXAMPLE, 16, groups, nodes, 8)[0], want)


@pytest.mark.parametrize(
    ("phy2log", "max_rep", "message"),
    [
        ([[0, 1, 2, 3]], None, "phy2log: expected experts 0 to 2, got 3"),
        ([[0, 1, 2, -1]], None, "phy2log: expected experts 0 to 2, got -1"),
        (
            [[0, 1, 2, 2], [0, 2, 2, 2]],
            None,
            "phy2log: expected each expert at least once, got none of expert 1 in layer 1",
        ),
        ([[0, 1, 2, 2]], 1, "phy2log: expected at most 1 replicas of an expert, got 2"),
    ],
)
def test_replica_tables_refuses(phy2log, max_rep, message):
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        replica_tables(np.array(phy2log), 3, max_rep)


@pytest.mark.parametrize(
    ("weight", "gpus", "message"),
    [
        (EXAMPLE[:1], 8, "phy2log: expected 1 layers as weight has, got 2"),
        (EXAMPLE, 3, "num_replicas: expected a multiple of num_gpus=3, got 16"),
        (EXAMPLE, 0, "num_gpus: expected 1 or more, got 0"),
        (-EXAMPLE, 8, "weight: expected finite loads of 0 or more, got -90.0"),
        (EXAMPLE[:, :11], 8, "phy2log: expected experts 0 to 10, got 11"),
    ],
)
def test_balancedness_refuses(weight, gpus, message):
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        balancedness(weight, PUBLISHED, gpus)
