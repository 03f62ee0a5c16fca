"""Losses on held-out text."""

from __future__ import annotations

import jax
import numpy as np

from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.batches import counted, held_out_batches
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.step import Trainer, TrainingState


class Evaluation:
    """A run's held-out batches, cut once."""

    def __init__(self, trainer: Trainer, corpus: Corpus, settings: RunSettings):
        self._trainer = trainer
        bos = trainer.model_config.bos_token_id
        self._batches = held_out_batches(
            corpus.held_out, settings.batch, settings.length, bos, settings.eval_batches
        )
        self._weights = [counted(tokens, bos) for tokens in self._batches]

    def losses(self, state: TrainingState) -> dict[str, float]:
        """By the names in :class:`Losses`: means over the batches, each by its number of targets.

        The balance loss counts the places that fill up the last batch, too.
        """
        trainer = self._trainer
        found = [trainer.evaluate(state, trainer.batch(tokens)) for tokens in self._batches]
        means = [
            float(np.average(np.asarray(each, np.float64), weights=self._weights))
            for each in zip(*jax.device_get(found), strict=True)
        ]
        return dict(zip(Losses._fields, means, strict=True))


def evaluate(
    model: DeepSeekV3, corpus: Corpus, config: TrainingConfig, settings: RunSettings
) -> dict[str, float]:
    """Held-out losses of a model as a run of these settings would write them down."""
    trainer = Trainer(model, config)
    return Evaluation(trainer, corpus, settings).losses(trainer.init())
