"""Tests of expert load balancing: bias updates, the sequence-wise loss, and their effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.router import RouterBias
from dsv3_jax.training.losses import imbalance, sequence_balance, update_bias
from tests.support.checkpoints import BIAS
from tests.support.oracle import relative_error
from tests.support.running import forward
from tests.training.tiny import CONFIG, RUN, TOKENS, biases, evaluate, step, weighted


def test_update_of_the_bias_by_hand():
    """With loads 0 4 2 2, mean 2, the bias of the first expert rises and that of the second
    falls."""
    old = jnp.array([0.5, 0.5, -0.25, 0.0])
    new = update_bias(old, jnp.array([0, 4, 2, 2]), 0.125)
    np.testing.assert_array_equal(new, [0.625, 0.375, -0.25, 0.0])


def test_imbalance_by_hand():
    """Maximum divided by mean: 4 / 2 and 3 / 3."""
    assert float(imbalance(jnp.array([[0, 4, 2, 2], [3, 3, 3, 3]]))) == pytest.approx(1.5)


@pytest.mark.slow
def test_step_moves_each_bias_by_the_loads_of_its_layer(trainer):
    start = trainer.init()
    _, aux = forward(trainer.model(start), TOKENS)
    loads = [np.asarray(stats.counts) for stats in aux.routing]
    np.testing.assert_array_equal(loads[0], aux.routing_counts[0])
    np.testing.assert_array_equal([load.sum() for load in loads], [6 * 12 * 3, 6 * 11 * 3])
    signs = [np.sign(load.mean() - load) for load in loads]
    assert (signs[0] != signs[1]).any(), "expected layers with different loads"

    stepped, metrics = step(trainer, start)
    for old, new, sign in zip(biases(start), biases(stepped), signs, strict=True):
        speed = np.float32(RUN.bias_update_speed)
        np.testing.assert_array_equal(new, old + speed * sign.astype(np.float32))
    np.testing.assert_array_equal(metrics.expert_load, loads)
    want = np.mean([load.max() / load.mean() for load in loads])
    assert float(metrics.expert_imbalance) == pytest.approx(want)


@pytest.mark.slow
def test_biases_stay_once_their_speed_is_zero(trainer):
    start = trainer.init()
    last = RUN.step_at(RUN.bias_update_end)
    for count, moves in ((last - 1, True), (last, False), (last + 100, False)):
        stepped, _ = step(trainer, start._replace(step=jnp.int32(count)))
        pairs = zip(biases(start), biases(stepped), strict=True)
        assert [bool((old != new).any()) for old, new in pairs] == [moves, moves]


@pytest.mark.slow
def test_bias_has_no_gradient_and_no_optimiser(trainer):
    """A bias that is the same for all experts changes no choice, and routing weights are unbiased,
    so the losses are equal."""
    start = trainer.init()
    assert not any(BIAS in path for path, _ in nnx.to_flat_state(start.params))
    raised = jax.tree.map(lambda bias: bias + 0.5, start.biases)
    moved = evaluate(trainer, start._replace(biases=raised))
    assert weighted(moved) == weighted(evaluate(trainer, start))
    assert len(jax.tree.leaves(nnx.state(trainer.model(start), RouterBias))) == 2


@pytest.mark.slow
def test_biases_balance_the_load(trainer):
    """Compares training with bias updates and with biases that are reset after each step."""

    def imbalances(has_updates: bool) -> list[float]:
        state = trainer.init()
        imbalances = []
        for _ in range(60):
            new, metrics = step(trainer, state._replace(step=jnp.int32(0)))
            state = new if has_updates else new._replace(biases=state.biases)
            imbalances.append(float(metrics.expert_imbalance))
        return imbalances

    balanced, unbalanced = imbalances(True), imbalances(False)
    assert balanced[0] == unbalanced[0] > 1.8
    assert np.mean(balanced[-10:]) < 1.25
    assert np.mean(unbalanced[-10:]) > 1.6


# ---- sequence-wise loss --------------------------------------------------------------------------


def balance_by_hand(scores: np.ndarray, experts: np.ndarray) -> float:
    """Computes equations 17 to 20 in loops, for scores [B, T, E] and experts [B, T, K]."""
    B, T, E = scores.shape
    K = experts.shape[-1]
    total = 0.0
    for b in range(B):
        for i in range(E):
            f = E / (K * T) * sum(i in experts[b, t] for t in range(T))
            P = sum(scores[b, t, i] / sum(scores[b, t]) for t in range(T)) / T
            total += f * P
    return total / B


def routed() -> RoutingStats:
    """Returns random choices that do not have the highest scores, as with biases and groups."""
    rng = np.random.default_rng(5)
    experts = np.stack([rng.permutation(8)[:3] for _ in range(12)])
    scores = rng.uniform(size=(12, 8)).astype(np.float32)
    counts = np.bincount(experts.ravel(), minlength=8)
    return RoutingStats(jnp.asarray(counts), jnp.asarray(scores), jnp.asarray(experts))


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_sequence_balance_by_hand(sequences):
    stats = routed()
    shape = (sequences, 12 // sequences, -1)
    scores, experts = (np.asarray(a).reshape(shape) for a in (stats.scores, stats.experts))
    want = balance_by_hand(scores.astype(np.float64), experts)
    assert abs(want - 1) > 1e-4
    assert float(sequence_balance(stats, sequences)) == pytest.approx(want, rel=1e-6)


def test_even_choices_or_even_scores_give_one():
    scores = jnp.asarray(np.random.default_rng(0).uniform(size=(4, 4)), jnp.float32)
    every = jnp.array([[0, 1], [2, 3], [1, 2], [3, 0]])
    even = RoutingStats(jnp.full(4, 2), scores, every)
    assert float(sequence_balance(even, 1)) == pytest.approx(1, rel=1e-6)
    one = RoutingStats(jnp.array([4, 4, 0, 0]), jnp.full((4, 4), 0.3), jnp.tile(every[:1], (4, 1)))
    assert float(sequence_balance(one, 1)) == pytest.approx(1, rel=1e-6)
    assert float(sequence_balance(one._replace(scores=scores), 1)) != pytest.approx(1, rel=0.01)


def test_gradient_of_the_sequence_balance():
    """Compares the gradient with central differences of the float64 loops, score by score."""
    stats = routed()
    got = jax.grad(lambda scores: sequence_balance(stats._replace(scores=scores), 2))(stats.scores)
    scores = np.asarray(stats.scores, np.float64)
    experts = np.asarray(stats.experts).reshape(2, 6, 3)
    want = np.zeros_like(scores)
    for index in np.ndindex(scores.shape):
        for sign in (1, -1):
            moved = scores.copy()
            moved[index] += sign * 1e-5
            want[index] += sign * balance_by_hand(moved.reshape(2, 6, 8), experts) / 2e-5
    assert relative_error(got, want) < 1e-5


def test_scores_of_zero_have_a_gradient():
    """All sigmoids of a token may underflow to zero."""
    stats = routed()._replace(scores=jnp.zeros((12, 8)))
    value, slope = jax.value_and_grad(
        lambda scores: sequence_balance(stats._replace(scores=scores), 1)
    )(stats.scores)
    assert float(value) == 0
    assert np.isfinite(slope).all()


@pytest.mark.slow
def test_balance_of_the_model_sums_its_layers(trainer):
    """The loss uses the router's choices, which are limited to 2 of 4 groups per token."""
    start = trainer.init()
    _, aux = forward(trainer.model(start), TOKENS)
    want = 0.0
    for stats, length in zip(aux.routing, (12, 11), strict=True):
        experts = np.asarray(stats.experts).reshape(6, length, 3)
        width = CONFIG["n_routed_experts"] // CONFIG["n_group"]
        assert all(len(set(chosen)) <= 2 for chosen in (experts // width).reshape(-1, 3))
        scores = np.asarray(stats.scores, np.float64).reshape(6, length, -1)
        unbiased = np.sort(np.argsort(-scores, axis=-1)[..., :3], axis=-1)
        assert (unbiased != np.sort(experts, axis=-1)).any()
        np.testing.assert_array_equal(np.bincount(experts.ravel(), minlength=8), stats.counts)
        want += balance_by_hand(scores, experts)
    assert float(evaluate(trainer, start).balance) == pytest.approx(want, rel=1e-5)
