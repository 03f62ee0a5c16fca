"""Training of the MTP layer to draft several tokens in turn.

In the V3 report an MTP layer learns to predict one token from the model's hidden state. To draft
more, it is applied to its own output, which it has not seen in training. Here it is applied
``draft_depth`` times, as in drafting, with the tokens of the text. The loss of draft k with the
distribution q_k is the mean over positions of::

    KL(p_k || q_k)

where p_k is the main model's distribution of the same token. Everything else is frozen: the text
that a model generates stays the same, and more of its drafts are accepted. Training on the layer's
own output comes from speculative decoding with feature-level drafters (HASS, arXiv 2408.15766).
Unlike in drafting, a draft attends to hidden states of the same k at earlier positions, where the
cache would have the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from dsv3_jax.model_io import HiddenStates
from dsv3_jax.training import cross_entropy
from dsv3_jax.training.cross_entropy import LossHead
from dsv3_jax.training.indexer import is_indexer
from dsv3_jax.training.losses import ahead_by, predicted


def is_drafter(path: tuple[Any, ...]) -> bool:
    """Returns whether the parameter at ``path`` in the model belongs to the layer that drafts.

    An indexer does not: only its own loss trains it.
    """
    return tuple(path[:2]) == ("mtp", 0) and not is_indexer(path)


def divergence(
    head: LossHead,
    states: HiddenStates,
    tokens: Int[Array, "B T"],
    bos_token_id: int,
    counts: Sequence[Int[Array, ""]],
) -> Float32[Array, ""]:
    """Returns the mean over drafts of their divergence from the main model, in nats. The gradient
    is that of the drafts.

    Args:
      head: LM head of the model.
      states: entry k of ``mtp`` is that of draft k, whose position i predicts token i+2+k.
      tokens: packed documents that begin with BOS.
      counts: number of positions of each draft that have a target, in the whole batch.
    """
    total = jnp.float32(0)
    for k, draft in enumerate(states.mtp):
        _, mask = predicted(tokens, bos_token_id, k + 2)
        main = ahead_by(states.main.post_norm, k + 1)
        nats, _ = head.sum(cross_entropy.divergence, draft.post_norm, main, mask)
        total += nats / jnp.maximum(counts[k], 1)
    return total / max(len(states.mtp), 1)
