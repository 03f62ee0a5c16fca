"""Tests of held-out losses, which are means over batches with unequal numbers of targets."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.training.batches import held_out_batches, target_count
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.losses import target_mask
from dsv3_jax.training.settings import RunSettings
from tests.support.running import forward
from tests.training.tiny import TOKENS

SETTINGS = RunSettings(batch=6, length=12, eval_batches=0)
# Most positions of the first batch have a target two tokens ahead, but few of the second batch.
SHORT = np.where(np.arange(72) % 3, TOKENS.reshape(-1).clip(1), 0)
HELD_OUT = np.concatenate([np.where(np.arange(72) % 12, SHORT.clip(1), 0), SHORT])
CORPUS = Corpus(HELD_OUT, HELD_OUT)


def test_each_loss_is_the_mean_over_its_own_targets(trainer):
    """Compares main and MTP loss with means of float64 log-probabilities over both batches."""
    state = trainer.init()
    losses = Evaluation(trainer, CORPUS, SETTINGS).losses(state)
    model = trainer.model(state)
    terms: dict[int, list[float]] = {1: [], 2: []}
    for tokens in held_out_batches(CORPUS.held_out, 6, 12, 0):
        logits, aux = forward(model, tokens)
        mtp = np.asarray(aux.mtp_logits[0], np.float64)
        for scores, ahead in ((np.asarray(logits, np.float64), 1), (mtp, 2)):
            for sequence, logits_of in zip(tokens, scores, strict=True):
                for i in range(len(sequence) - ahead):
                    if 0 not in sequence[i + 1 : i + 1 + ahead]:
                        odds = np.exp(logits_of[i])
                        terms[ahead].append(-np.log(odds[sequence[i + ahead]] / odds.sum()))
    assert [len(terms[ahead]) for ahead in (1, 2)] == [66 + 48, 60 + 24]
    assert losses["main"] == pytest.approx(np.mean(terms[1]), rel=1e-5)
    assert losses["mtp"] == pytest.approx(np.mean(terms[2]), rel=1e-5)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_counts_on_the_host_are_the_losses_own(ahead):
    want = int(target_mask(jnp.asarray(TOKENS), 0, ahead).sum())
    assert target_count(TOKENS.astype(np.int32), 0, ahead) == want


def test_held_out_text_without_a_target_is_refused(trainer):
    corpus = Corpus(HELD_OUT, np.zeros(24, np.int32))
    with pytest.raises(ValueError, match=r"^data: expected tokens to predict"):
        Evaluation(trainer, corpus, dataclasses.replace(SETTINGS, eval_batches=1))
