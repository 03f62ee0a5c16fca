"""Losses by hand: what counts at the borders of documents, and what each place weighs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.outputs import Aux
from dsv3_jax.training.losses import count_targets, cross_entropy, losses, target_mask
from tests.support.running import forward
from tests.training.tiny import TOKENS, evaluate


def logits_for(tokens: list[int], ahead: int, losses_at: list[float], vocabulary: int = 8):
    """[1, T, W] logits under which place i loses losses_at[i] nats on the token `ahead` of it.

    Of W logits, the target's is a and the others 0: its probability is e^a / (e^a + W - 1).
    """
    logits = np.zeros((1, len(losses_at), vocabulary), np.float32)
    for place, loss in enumerate(losses_at):
        if place + ahead < len(tokens):
            p = math.exp(-loss)
            logits[0, place, tokens[place + ahead]] = math.log(p * (vocabulary - 1) / (1 - p))
    return jnp.asarray(logits)


def test_cross_entropy_counts_what_it_is_told_to():
    logits = logits_for([0, 3, 5, 1], 1, [0.5, 2.0, 4.0])
    targets = jnp.array([[3, 5, 1]])
    for counted, want in (([1, 1, 1], 6.5 / 3), ([1, 0, 1], 2.25), ([0, 0, 0], 0.0)):
        got = cross_entropy(logits, targets, jnp.array([counted], bool))
        assert float(got) == pytest.approx(want, rel=1e-5)


# BOS is 0: documents 0 5 6 7, 0 3 and 0 4 2 begin at places 0, 4 and 6.
PACKED = [0, 5, 6, 7, 0, 3, 0, 4, 2]
POWERS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]  # a sum tells its terms
LOSSES = [power / 64 for power in POWERS]


run_losses = jax.jit(losses, static_argnums=3)


def aux_of(*mtp_logits: jax.Array) -> Aux:
    return Aux(jnp.zeros((1, 4), jnp.int32), mtp_logits, ())


def test_no_place_is_counted_that_predicts_the_begin_of_a_document():
    """Places 3 and 5 would; 8 has nothing to predict."""
    found = run_losses(logits_for(PACKED, 1, LOSSES), aux_of(), jnp.array([PACKED]), 0)
    want = (1 + 2 + 4 + 16 + 64 + 128) / 64 / 6
    assert float(found.main) == pytest.approx(want, rel=1e-5)
    assert float(found.mtp) == 0


def test_mtp_places_that_cross_a_document_are_not_counted():
    """Layer k at place i reads token i+1+k and predicts i+2+k: none of i+1 .. i+2+k may be BOS.

    Layer 0 keeps 0 (5 6), 1 (6 7) and 6 (4 2); layer 1 keeps 0 (5 6 7) alone.
    """
    main = logits_for(PACKED, 1, LOSSES)
    first = logits_for(PACKED, 2, LOSSES[:8])
    second = logits_for(PACKED, 3, LOSSES[:7])
    tokens = jnp.array([PACKED])
    found = run_losses(main, aux_of(first), tokens, 0)
    assert float(found.mtp) == pytest.approx((1 + 2 + 64) / 64 / 3, rel=1e-5)
    found = run_losses(main, aux_of(first, second), tokens, 0)
    assert float(found.mtp) == pytest.approx(((1 + 2 + 64) / 64 / 3 + 1 / 64) / 2, rel=1e-5)


def test_counted_places_by_hand():
    """Two documents: 0 5 6 and 0 3 4."""
    tokens = jnp.array([[0, 5, 6, 0, 3, 4]])
    for ahead, want in ((1, [1, 1, 0, 1, 1]), (2, [1, 0, 0, 1]), (3, [0, 0, 0])):
        np.testing.assert_array_equal(target_mask(tokens, 0, ahead)[0], np.array(want, bool))
    found = count_targets(tokens, 0, 2)
    assert (found.sequences, int(found.main), *map(int, found.mtp)) == (1, 4, 2, 0)


def test_shares_of_parts_sum_to_the_batch():
    """Rows of 5 and 2 counted places: their own means, 1 and 2, are not what sums."""
    rows = [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 0]]
    logits = jnp.concatenate(
        [logits_for(row, 1, [loss] * 6) for row, loss in zip(rows, (1.0, 2.0), strict=True)]
    )
    tokens = jnp.array(rows)
    batch = count_targets(tokens, 0, 0)
    found = run_losses(logits, aux_of(), tokens, 0)
    parts = [
        losses(logits[i : i + 1], aux_of(), tokens[i : i + 1], 0, batch).main for i in range(2)
    ]
    assert float(found.main) == pytest.approx((5 * 1 + 2 * 2) / 7, rel=1e-5)
    assert [float(part) for part in parts] == pytest.approx([5 / 7, 4 / 7], rel=1e-5)


def test_agreement_of_the_first_mtp_layer():
    """Of its places 0, 1 and 6, the best tokens are those of the main model at 1, 2 and 7."""
    main = jax.nn.one_hot(jnp.array([[0, 3, 4, 0, 0, 0, 0, 5, 0]]), 8)
    first = jax.nn.one_hot(jnp.array([[3, 1, 0, 0, 0, 0, 5, 0]]), 8)
    found = run_losses(main, aux_of(first), jnp.array([PACKED]), 0)
    assert float(found.mtp_agreement) == pytest.approx(2 / 3)


def test_losses_of_the_model_are_those_of_its_logits(trainer):
    """Through `evaluate`, against log-probabilities in float64."""
    start = trainer.init()
    logits, aux = forward(trainer.model(start), TOKENS)
    found = evaluate(trainer, start)
    for got, array, ahead in ((found.main, logits, 1), (found.mtp, aux.mtp_logits[0], 2)):
        terms = []
        for row, scores in zip(TOKENS, np.asarray(array, np.float64), strict=True):
            for place in range(len(row) - ahead):
                if 0 not in row[place + 1 : place + 1 + ahead]:
                    odds = np.exp(scores[place])
                    terms.append(-np.log(odds[row[place + ahead]] / odds.sum()))
        assert len(terms) == {1: 57, 2: 45}[ahead]
        assert float(got) == pytest.approx(np.mean(terms), rel=1e-5)
