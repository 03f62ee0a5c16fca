"""Tests of losses computed by hand: targets at document boundaries, and weights of positions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.training.corpus import EndToken
from dsv3_jax.training.losses import Losses, count_targets, losses, target_mask
from tests.support.running import forward
from tests.training.tiny import TOKENS, evaluate, logits_as_states


def logits_for(tokens: list[int], ahead: int, losses_at: list[float], vocabulary: int = 8):
    """Returns logits [1, T, W] with which position i has a loss of losses_at[i] nats on token
    i+ahead.

    The target's logit is a and the others are 0, so its probability is e^a / (e^a + W - 1).
    """
    logits = np.zeros((1, len(losses_at), vocabulary), np.float32)
    for i, loss in enumerate(losses_at):
        if i + ahead < len(tokens):
            p = math.exp(-loss)
            logits[0, i, tokens[i + ahead]] = math.log(p * (vocabulary - 1) / (1 - p))
    return jnp.asarray(logits)


# BOS is 0: documents 0 5 6 7, 0 3 and 0 4 2 begin at positions 0, 4 and 6.
PACKED = [0, 5, 6, 7, 0, 3, 0, 4, 2]
POWERS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]  # a sum identifies its terms
LOSSES = [power / 64 for power in POWERS]


@functools.partial(jax.jit, static_argnums=1)
def run_losses(logits: tuple[jax.Array, ...], bos: int, tokens: jax.Array) -> Losses:
    return losses(*logits_as_states(*logits), tokens, bos)


def test_the_beginning_of_a_document_is_no_target():
    """Positions 3 and 5 would predict one; position 8 has nothing to predict."""
    result = run_losses((logits_for(PACKED, 1, LOSSES),), 0, jnp.array([PACKED]))
    want = (1 + 2 + 4 + 16 + 64 + 128) / 64 / 6
    assert float(result.main) == pytest.approx(want, rel=1e-5)
    assert float(result.mtp) == 0


def test_mtp_targets_in_another_document_do_not_count():
    """Layer k at position i reads token i+1+k and predicts i+2+k. None of i+1 .. i+2+k may be BOS.

    Layer 0 has targets at positions 0 (5 6), 1 (6 7) and 6 (4 2); layer 1 only at 0 (5 6 7).
    """
    main = logits_for(PACKED, 1, LOSSES)
    first = logits_for(PACKED, 2, LOSSES[:8])
    second = logits_for(PACKED, 3, LOSSES[:7])
    tokens = jnp.array([PACKED])
    result = run_losses((main, first), 0, tokens)
    assert float(result.mtp) == pytest.approx((1 + 2 + 64) / 64 / 3, rel=1e-5)
    result = run_losses((main, first, second), 0, tokens)
    assert float(result.mtp) == pytest.approx(((1 + 2 + 64) / 64 / 3 + 1 / 64) / 2, rel=1e-5)


def test_targets_by_hand():
    """Counts the targets of two documents, 0 5 6 and 0 3 4."""
    tokens = jnp.array([[0, 5, 6, 0, 3, 4]])
    for ahead, want in ((1, [1, 1, 0, 1, 1]), (2, [1, 0, 0, 1]), (3, [0, 0, 0])):
        np.testing.assert_array_equal(target_mask(tokens, 0, ahead)[0], np.array(want, bool))
    counts = count_targets(tokens, 0, 2)
    assert (counts.sequences, int(counts.main), *map(int, counts.mtp)) == (1, 4, 2, 0)


def test_targets_of_documents_that_end_with_eos():
    """The documents are 5 6 1 and 3 4 1. Nothing follows from the end of the first."""
    tokens, end = jnp.array([[5, 6, 1, 3, 4, 1]]), EndToken(1)
    for ahead, want in ((1, [1, 1, 0, 1, 1]), (2, [1, 0, 0, 1]), (3, [0, 0, 0])):
        np.testing.assert_array_equal(target_mask(tokens, end, ahead)[0], np.array(want, bool))
    counts = count_targets(tokens, end, 2)
    assert (counts.sequences, int(counts.main), *map(int, counts.mtp)) == (1, 4, 2, 0)
    logits = logits_for([5, 6, 1, 3, 4, 1], 1, [1.0, 2.0, 64.0, 4.0, 8.0, 0.0])
    assert float(run_losses((logits,), end, tokens).main) == pytest.approx(15 / 4, rel=1e-5)


def test_losses_of_microbatches_sum_to_the_batch():
    """The sequences have 5 and 2 targets, so the loss is not the mean of their means, 1 and 2."""
    sequences = [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 0]]
    logits = jnp.concatenate(
        [logits_for(s, 1, [loss] * 6) for s, loss in zip(sequences, (1.0, 2.0), strict=True)]
    )
    tokens = jnp.array(sequences)
    counts = count_targets(tokens, 0, 0)
    whole = run_losses((logits,), 0, tokens)
    parts = [
        losses(*logits_as_states(logits[i : i + 1]), tokens[i : i + 1], 0, counts).main
        for i in range(2)
    ]
    assert float(whole.main) == pytest.approx((5 * 1 + 2 * 2) / 7, rel=1e-5)
    assert [float(part) for part in parts] == pytest.approx([5 / 7, 4 / 7], rel=1e-5)


def test_agreement_of_the_first_mtp_layer():
    """Its targets are at positions 0, 1 and 6. The main model predicts the same tokens one position
    later, where two of three agree."""
    main = jax.nn.one_hot(jnp.array([[0, 3, 4, 0, 0, 0, 0, 5, 0]]), 8)
    first = jax.nn.one_hot(jnp.array([[3, 1, 0, 0, 0, 0, 5, 0]]), 8)
    result = run_losses((main, first), 0, jnp.array([PACKED]))
    assert float(result.mtp_agreement) == pytest.approx(2 / 3)


def test_losses_of_the_model_are_those_of_its_logits(trainer):
    """Compares the losses of `evaluate` with float64 log-probabilities."""
    start = trainer.init()
    logits, aux = forward(trainer.model(start), TOKENS)
    result = evaluate(trainer, start)
    for got, array, ahead in ((result.main, logits, 1), (result.mtp, aux.mtp_logits[0], 2)):
        terms = []
        for tokens, scores in zip(TOKENS, np.asarray(array, np.float64), strict=True):
            for i in range(len(tokens) - ahead):
                if 0 not in tokens[i + 1 : i + 1 + ahead]:
                    odds = np.exp(scores[i])
                    terms.append(-np.log(odds[tokens[i + ahead]] / odds.sum()))
        assert len(terms) == {1: 57, 2: 45}[ahead]
        assert float(got) == pytest.approx(np.mean(terms), rel=1e-5)
