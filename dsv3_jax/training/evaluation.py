"""Evaluation on held-out text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.batches import held_out_batches, target_count
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus, separator
from dsv3_jax.training.losses import Losses, TargetCounts
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.trainer import Trainer


class Evaluation:
    """Computes the losses of a training state on the held-out batches of a run.

    Raises:
      ValueError: no position in the held-out batches has a target.
    """

    def __init__(self, trainer: Trainer, corpus: Corpus, settings: RunSettings):
        self._trainer = trainer
        bos = separator(trainer.model_config)
        mtp_layers = trainer.model_config.num_nextn_predict_layers
        predictions = trainer.config.mtp_predictions(mtp_layers)
        self._batches = held_out_batches(
            corpus.held_out, settings.batch, settings.length, bos, settings.eval_batches
        )
        main, *mtp = (
            jnp.int32(sum(target_count(tokens, bos, ahead) for tokens in self._batches))
            for ahead in range(1, predictions + 2)
        )
        if not main:
            raise ValueError(
                "data: expected tokens to predict in the held_out stream, got none that does not "
                "begin a document"
            )
        self._counts = TargetCounts(settings.batch * len(self._batches), main, tuple(mtp))

    def losses(self, state: TrainingState) -> dict[str, float]:
        """Returns the losses by their names in :class:`Losses`, as means over the targets of all
        batches. An MTP layer has fewer targets than the main model.

        The balance loss includes the padding sequences of the last batch.
        """
        trainer = self._trainer
        contributions = [
            trainer.evaluate(state, trainer.shard_batch(tokens), self._counts)
            for tokens in self._batches
        ]
        sums = np.sum(np.array(jax.device_get(contributions), np.float64), axis=0)
        return dict(zip(Losses._fields, sums.tolist(), strict=True))


def evaluate(
    model: DeepSeekV3, corpus: Corpus, config: TrainingConfig, settings: RunSettings
) -> dict[str, float]:
    """Returns the held-out losses of a model, as a run with these settings would record them."""
    trainer = Trainer(model, config)
    return Evaluation(trainer, corpus, settings).losses(trainer.init())
