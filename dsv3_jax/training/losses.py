"""The training losses: next-token and MTP cross-entropy, and expert balance."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.outputs import Aux
from dsv3_jax.training.balance import sequence_balance
from dsv3_jax.training.corpus import EndToken


class Losses(NamedTuple):
    """Losses of a batch, or the contribution of one of its microbatches.

    The contributions of all microbatches add up to the losses of the batch.
    """

    main: Float32[Array, ""]
    """Mean cross-entropy of the next token, in nats."""
    mtp: Float32[Array, ""]
    """Mean cross-entropy of each MTP layer, or with ``draft_depth`` of each draft, averaged over
    them, in nats. Zero without MTP layers."""
    balance: Float32[Array, ""]
    """Sum of :func:`sequence_balance` over all MoE layers, those of MTP included. Each term is
    about 1."""
    mtp_agreement: Float32[Array, ""]
    """Fraction of targets for which the first MTP layer and the main model predict the same most
    probable token."""
    indexer: Float32[Array, ""]
    """Mean over layers of :func:`dsv3_jax.training.indexer.divergence`, in nats. Zero without
    indexers."""
    drafts: Float32[Array, ""]
    """:func:`dsv3_jax.training.drafts.divergence`, in nats. Zero without ``draft_depth``."""


class TargetCounts(NamedTuple):
    """Denominators of a batch's mean losses."""

    sequences: int
    """Number of sequences."""
    main: Int[Array, ""]
    """Number of next-token targets."""
    mtp: tuple[Int[Array, ""], ...]
    """Number of targets of each MTP layer, or of each draft."""


def target_mask(tokens: Int[Array, "B T"], bos_token_id: int, ahead: int) -> Bool[Array, "B S"]:
    """Returns whether each of the S = T - ahead positions has a target when position i predicts
    token i+ahead.

    Sequences consist of packed documents that begin with BOS, or that end with EOS: then
    ``bos_token_id`` is an :class:`~dsv3_jax.training.corpus.EndToken`. A position has no target
    if a document begins among tokens i+1 to i+ahead, because a document's first token does not
    follow from the document before it.
    """
    starts = tokens == bos_token_id
    if isinstance(bos_token_id, EndToken):
        starts = jnp.pad(starts, ((0, 0), (1, 0)))[:, :-1]
    span = tokens.shape[1] - ahead
    crossed = jnp.zeros_like(starts[:, :span])
    for step in range(1, ahead + 1):
        crossed |= starts[:, step : step + span]
    return ~crossed


def count_targets(tokens: Int[Array, "B T"], bos_token_id: int, predictions: int) -> TargetCounts:
    """Returns the number of targets in a batch. Its microbatches are weighted by these numbers,
    although each may contain a different number of targets."""
    main, *mtp = (
        jnp.sum(target_mask(tokens, bos_token_id, ahead)) for ahead in range(1, predictions + 2)
    )
    return TargetCounts(tokens.shape[0], main, tuple(mtp))


def cross_entropy(
    logits: Float32[Array, "B T W"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    count: Int[Array, ""] | None = None,
) -> Float32[Array, ""]:
    """Returns the sum of ``-log softmax(logits)[target]`` over the positions in ``mask``, divided
    by ``count``. The result is zero if the mask is empty.

    Args:
      count: denominator, by default the number of positions in ``mask``.
    """
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(nats * mask) / jnp.maximum(jnp.sum(mask) if count is None else count, 1)


def losses(
    logits: Float32[Array, "B T W"],
    aux: Aux,
    tokens: Int[Array, "B T"],
    bos_token_id: int,
    counts: TargetCounts | None = None,
) -> Losses:
    """Returns the losses of one forward pass over packed documents that begin with BOS.

    Args:
      counts: target counts of the whole batch if ``tokens`` is one of its microbatches. By default
        ``tokens`` is the whole batch.

    The losses of indexers and drafts are zero here: :class:`~dsv3_jax.training.objective.Objective`
    adds them.
    """
    mtp_layers = len(aux.mtp_logits)
    if counts is None:
        counts = count_targets(tokens, bos_token_id, mtp_layers)
    mask = target_mask(tokens, bos_token_id, 1)
    main = cross_entropy(logits[:, :-1], tokens[:, 1:], mask, counts.main)
    mtp, agreement = jnp.float32(0), jnp.float32(0)
    for k, mtp_logits in enumerate(aux.mtp_logits):
        # Position i of MTP layer k predicts token i+2+k and depends on tokens up to i+1+k.
        mask = target_mask(tokens, bos_token_id, k + 2)
        span = mask.shape[1]
        mtp += cross_entropy(mtp_logits[:, :span], tokens[:, 2 + k :], mask, counts.mtp[k])
        if k == 0:
            same = jnp.argmax(mtp_logits[:, :span], -1) == jnp.argmax(logits[:, 1 : 1 + span], -1)
            agreement = jnp.sum(same & mask) / jnp.maximum(counts.mtp[0], 1)
    B = tokens.shape[0]
    balance = sum((sequence_balance(stats, B) for stats in aux.routing), jnp.float32(0))
    balance *= B / counts.sequences
    zero = jnp.float32(0)
    return Losses(main, mtp / max(mtp_layers, 1), balance, agreement, indexer=zero, drafts=zero)
