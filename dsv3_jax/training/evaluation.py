"""Losses on held-out text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.batches import counted, held_out_batches
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.losses import Losses, Totals
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.step import Trainer, TrainingState


class Evaluation:
    """A run's held-out batches, cut once.

    Raises:
      ValueError: no position in them has a target.
    """

    def __init__(self, trainer: Trainer, corpus: Corpus, settings: RunSettings):
        self._trainer = trainer
        config = trainer.model_config
        bos = config.bos_token_id
        self._batches = held_out_batches(
            corpus.held_out, settings.batch, settings.length, bos, settings.eval_batches
        )
        main, *mtp = (
            jnp.int32(sum(counted(tokens, bos, ahead) for tokens in self._batches))
            for ahead in range(1, config.num_nextn_predict_layers + 2)
        )
        if not main:
            raise ValueError(
                "data: expected tokens to predict in the held_out stream, got none that does not "
                "begin a document"
            )
        self._totals = Totals(settings.batch * len(self._batches), main, tuple(mtp))

    def losses(self, state: TrainingState) -> dict[str, float]:
        """Returns the losses by their names in :class:`Losses`: means over the targets in all
        batches. An MTP layer has fewer targets than the main model.

        The balance loss counts the sequences that fill up the last batch, too.
        """
        trainer = self._trainer
        shares = [
            trainer.evaluate(state, trainer.batch(tokens), self._totals) for tokens in self._batches
        ]
        sums = np.sum(np.array(jax.device_get(shares), np.float64), axis=0)
        return dict(zip(Losses._fields, sums.tolist(), strict=True))


def evaluate(
    model: DeepSeekV3, corpus: Corpus, config: TrainingConfig, settings: RunSettings
) -> dict[str, float]:
    """Held-out losses of a model as a run of these settings would write them down."""
    trainer = Trainer(model, config)
    return Evaluation(trainer, corpus, settings).losses(trainer.init())
