"""Replicas are chosen round-robin, slots have the right weights, and shapes never change."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv3_jax.layers.moe import MoE, Replicas
from pallas_kernels.route.reference import Routes
from sharding import Placement, choose_replicas, make_layout, physical_experts
from tests.sharding.placements import check_tables

GOOD = Placement.identity(2, 12, 16)


def loads(seed, L=2, E=12):
    return np.random.default_rng(seed).zipf(1.5, (L, E)).clip(max=10_000)


def check(placement, E):
    check_tables(*map(np.asarray, jax.tree.leaves(placement)), E)


@pytest.mark.parametrize("seed", range(5))
def test_balanced(seed):
    placement = Placement.balanced(loads(seed), 16, 4, 2, 8)
    check(placement, 12)
    assert placement.log2phy.shape == (2, 12, 5)


def test_all_replicas_of_one_expert_fit():
    placement = Placement.balanced([[0, 1, 0]], 8, 1, 1, 2)
    check(placement, 3)
    assert placement.log2phy[0, 1, -1] >= 0


@pytest.mark.parametrize("P", [None, 12, 14, 30])
def test_identity(P):
    placement = Placement.identity(3, 12, P)
    check(placement, 12)
    assert placement.phy2log.shape == (3, P or 12)
    np.testing.assert_array_equal(placement.phy2log[:, :12], np.tile(np.arange(12), (3, 1)))
    assert placement.logcnt.max() - placement.logcnt.min() == ((P or 12) % 12 > 0)


def test_every_slot_has_the_chosen_expert():
    rng = np.random.default_rng(0)
    for seed in range(5):
        placement = Placement.balanced(loads(seed), 24, 4, 2, 8)
        experts = jnp.asarray(rng.integers(0, 12, (33, 4)), jnp.int32)
        for phy2log, log2phy, logcnt in zip(*jax.tree.leaves(placement), strict=True):
            chosen = choose_replicas(experts, log2phy, logcnt)
            assert chosen.dtype == jnp.int32
            np.testing.assert_array_equal(phy2log[chosen], experts)


def test_replicas_are_used_round_robin():
    """Expert 0 is in slots 0, 2 and 4, expert 1 in slot 3, expert 2 in slot 1."""
    placement = Placement.from_phy2log(np.array([[0, 2, 0, 1, 0]]), 3)
    experts = jnp.array([[0, 1], [0, 2], [2, 0], [0, 1], [1, 0]], jnp.int32)
    chosen = choose_replicas(experts, placement.log2phy[0], placement.logcnt[0])
    assert chosen.tolist() == [[0, 3], [2, 1], [1, 4], [0, 3], [3, 2]]


def test_replicas_get_equal_numbers_of_tokens():
    placement = Placement.balanced(loads(1), 16, 4, 2, 8)
    for expert in range(12):
        experts = jnp.full((100, 1), expert, jnp.int32)
        chosen = choose_replicas(experts, placement.log2phy[0], placement.logcnt[0])
        _, tokens = np.unique(chosen, return_counts=True)
        assert len(tokens) == placement.logcnt[0, expert]
        assert tokens.max() - tokens.min() <= 1


@pytest.mark.parametrize(("shards", "count"), [(16, 1), (16, 3), (7, 1), (2, 40)])
def test_replicas_get_equal_numbers_of_the_tokens_of_all_shards(shards, count):
    """With one token on each of 16 shards, nine replicas got 16, 0, 0, ..."""
    slots = np.array([[0] * 9 + [1, 2, 3]])
    placement = Placement.from_phy2log(slots, 4)
    experts = jnp.zeros((count, 1), jnp.int32)
    tables = placement.log2phy[0], placement.logcnt[0]
    chosen = [choose_replicas(experts, *tables, shard) for shard in range(shards)]
    tokens = np.bincount(np.concatenate(chosen).ravel(), minlength=9)
    assert tokens.sum() == shards * count
    assert tokens.max() - tokens.min() <= min(shards, count)
    # The first tokens of all shards alone, such as those that are no padding.
    first = np.bincount([int(each[0, 0]) for each in chosen], minlength=9)
    assert first.max() - first.min() <= 1


@pytest.mark.parametrize(
    ("name", "sets"), [("dp_attention_ep", 8), ("tp_attention_ep", 1), (None, 1)]
)
def test_a_layer_begins_with_another_replica_on_each_shard_of_the_batch(name, sets):
    """Devices with the same tokens choose the same replicas."""
    layout = None if name is None else make_layout(name)
    placement = Placement.from_phy2log(np.array([[0] * 8 + list(range(1, 9))]), 9)
    replicas = Replicas(placement.log2phy[0], placement.logcnt[0])
    layer = SimpleNamespace(layout=layout, replicas=replicas)
    zero = jnp.zeros((1, 1), jnp.int32)
    routes = Routes(zero + 1.0, zero, zero + 1.0, zero[0], zero[0], zero[0])

    def slots() -> jax.Array:
        return MoE._slots(layer, routes)

    if layout is not None:
        axes = jax.sharding.PartitionSpec(layout.mesh.axis_names)
        slots = layout.shard_map(slots, (), axes)
    chosen = np.asarray(slots()).ravel()
    assert len(chosen) == (1 if layout is None else 8)
    assert len(set(chosen.tolist())) == sets


def test_a_choice_does_not_depend_on_other_tokens():
    placement = Placement.balanced(loads(2), 24, 4, 2, 8)
    tables = placement.log2phy[0], placement.logcnt[0]
    rng = np.random.default_rng(3)
    experts = rng.integers(0, 12, (20, 3)).astype(np.int32)
    want = choose_replicas(jnp.asarray(experts), *tables)
    others = rng.integers(0, 12, (30, 3)).astype(np.int32)
    others[7] = experts[7]
    np.testing.assert_array_equal(choose_replicas(jnp.asarray(others), *tables)[7], want[7])
    reversed_choice = choose_replicas(jnp.asarray(experts[:, ::-1]), *tables)
    np.testing.assert_array_equal(reversed_choice[:, ::-1], want)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e4m3fn, np.uint8])
def test_slots_have_their_experts_weights(dtype):
    """A token gets its own expert's weights under every placement."""
    stack = jnp.asarray(np.random.default_rng(4).integers(0, 100, (12, 3, 5)), dtype)
    experts = jnp.asarray(np.random.default_rng(5).integers(0, 12, (9, 2)), jnp.int32)
    for seed in range(3):
        placement = Placement.balanced(loads(seed), 24, 4, 2, 8)
        slot_weights = physical_experts(stack, placement.phy2log[1])
        assert (slot_weights.shape, slot_weights.dtype) == ((24, 3, 5), stack.dtype)
        chosen = choose_replicas(experts, placement.log2phy[1], placement.logcnt[1])
        np.testing.assert_array_equal(
            np.asarray(slot_weights[chosen], np.float32), np.asarray(stack[experts], np.float32)
        )


def test_a_new_placement_compiles_nothing():
    traced = []

    @jax.jit
    def step(placement, experts, stack):
        traced.append(placement)
        chosen = choose_replicas(experts, placement.log2phy[0], placement.logcnt[0])
        return physical_experts(stack, placement.phy2log[0])[chosen]

    experts, stack = jnp.zeros((4, 2), jnp.int32), jnp.ones((12, 2))
    step(Placement.identity(2, 12, 16), experts, stack)
    for seed in range(3):
        step(Placement.balanced(loads(seed), 16, 4, 2, 8), experts, stack)
    step(Placement.balanced(loads(0), 16, 1, 1, 8), experts, stack)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.identity(0, 12), "num_layers: expected 1 or more, got 0"),
        (lambda: Placement.identity(1, 0), "num_experts: expected 1 or more, got 0"),
        (lambda: Placement.identity(1, 12, 11), "num_replicas: expected 12 experts .*, got 11"),
        (
            lambda: dataclasses.replace(GOOD, phy2log=GOOD.phy2log[:, ::-1]).check(),
            "placement: expected log2phy and logcnt to be those of phy2log, got others; .*",
        ),
        (
            lambda: dataclasses.replace(GOOD, phy2log=GOOD.phy2log + 9).check(),
            "phy2log: expected experts 0 to 11, got 12",
        ),
        (
            lambda: Placement.from_phy2log(np.array([[0, 0]]), 2),
            ".* got none of expert 1 in layer 0",
        ),
        (lambda: Placement.from_phy2log(np.array([[0]]), 2), ".* got none of expert 1 in layer 0"),
        (lambda: Placement.balanced([[1, 2]], 3, 1, 1, 2), "num_replicas: .* num_gpus=2, got 3"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Placement.from_phy2log(np.arange(8), 8),
            r"phy2log: expected integers of shape \[L, P\], got int64 of shape \(8,\)",
        ),
        (
            lambda: Placement.from_phy2log(np.zeros((1, 2)), 1),
            r"phy2log: expected integers of shape \[L, P\], got float64 of shape \(1, 2\)",
        ),
        (
            lambda: dataclasses.replace(GOOD, logcnt=GOOD.logcnt[:1]).check(),
            r"placement: .* logcnt of shape \(2, 12\) for phy2log of shape \(2, 16\), got .*",
        ),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_refusals_of_wrong_types(make, message):
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        make()
