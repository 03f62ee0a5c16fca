"""What training minimises: next-token loss, the MTP layers' loss, and the balance loss."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.model import Aux
from dsv3_jax.training.balance import sequence_balance


class Losses(NamedTuple):
    """Of a batch, or a part's share of them: the shares of all parts sum to the batch's."""

    main: Float32[Array, ""]
    """Mean cross-entropy of the next token, nats."""
    mtp: Float32[Array, ""]
    """Mean over the MTP layers of their mean cross-entropies, nats; zero without any."""
    balance: Float32[Array, ""]
    """Sum over MoE layers, the MTP layers' too, of :func:`sequence_balance`; each is about 1."""
    mtp_agreement: Float32[Array, ""]
    """How often the first MTP layer's best token is the main model's best for the same place."""


class Totals(NamedTuple):
    """What a batch's means are over."""

    sequences: int
    main: Int[Array, ""]
    """Places whose next token counts."""
    mtp: tuple[Int[Array, ""], ...]
    """The same of each MTP layer."""


def counted_places(tokens: Int[Array, "B T"], bos_token_id: int, ahead: int) -> Bool[Array, "B S"]:
    """Which of the S = T - ahead places count when place i predicts token i+ahead.

    Documents are packed, and each begins with BOS. A place counts unless a document begins among
    tokens i+1 to i+ahead: the first token of one does not follow from the one before it.
    """
    starts = tokens == bos_token_id
    span = tokens.shape[1] - ahead
    crossed = jnp.zeros_like(starts[:, :span])
    for step in range(1, ahead + 1):
        crossed |= starts[:, step : step + span]
    return ~crossed


def totals(tokens: Int[Array, "B T"], bos_token_id: int, mtp_layers: int) -> Totals:
    """Of a whole batch; parts of it are weighed by these, whatever they hold themselves."""
    main, *mtp = (
        jnp.sum(counted_places(tokens, bos_token_id, ahead)) for ahead in range(1, mtp_layers + 2)
    )
    return Totals(tokens.shape[0], main, tuple(mtp))


def cross_entropy(
    logits: Float32[Array, "B T W"],
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    total: Int[Array, ""] | None = None,
) -> Float32[Array, ""]:
    """Sum of ``-log softmax(logits)[target]`` over the counted places, by ``total``: their number
    unless given. Zero where nothing counts."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    each = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(each * counted) / jnp.maximum(jnp.sum(counted) if total is None else total, 1)


def losses(
    logits: Float32[Array, "B T W"],
    aux: Aux,
    tokens: Int[Array, "B T"],
    bos_token_id: int,
    batch: Totals | None = None,
) -> Losses:
    """Losses of one forward pass over packed documents, each of which begins with BOS.

    Args:
      batch: of the batch of which ``tokens`` are a part; by default they are all of it.
    """
    layers = len(aux.mtp_logits)
    if batch is None:
        batch = totals(tokens, bos_token_id, layers)
    counted = counted_places(tokens, bos_token_id, 1)
    main = cross_entropy(logits[:, :-1], tokens[:, 1:], counted, batch.main)
    mtp, agreement = jnp.float32(0), jnp.float32(0)
    for k, mtp_logits in enumerate(aux.mtp_logits):
        # Position i of this layer predicts token i+2+k and has seen tokens up to i+1+k.
        counted = counted_places(tokens, bos_token_id, k + 2)
        span = counted.shape[1]
        mtp += cross_entropy(mtp_logits[:, :span], tokens[:, 2 + k :], counted, batch.mtp[k])
        if k == 0:
            same = jnp.argmax(mtp_logits[:, :span], -1) == jnp.argmax(logits[:, 1 : 1 + span], -1)
            agreement = jnp.sum(same & counted) / jnp.maximum(batch.mtp[0], 1)
    rows = tokens.shape[0]
    balance = sum((sequence_balance(stats, rows) for stats in aux.routing), jnp.float32(0))
    return Losses(main, mtp / max(layers, 1), balance * (rows / batch.sequences), agreement)
