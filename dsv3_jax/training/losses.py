"""What training minimises: next-token loss and the MTP layers' loss."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.model import Aux


class Losses(NamedTuple):
    """Mean cross-entropies in nats a token."""

    main: Float32[Array, ""]
    mtp: Float32[Array, ""]
    """Mean over the MTP layers; zero without any."""
    mtp_agreement: Float32[Array, ""]
    """How often the first MTP layer's best token is the main model's best for the same place."""


def cross_entropy(
    logits: Float32[Array, "B T W"], targets: Int[Array, "B T"], counted: Bool[Array, "B T"]
) -> Float32[Array, ""]:
    """Mean of ``-log softmax(logits)[target]`` over the counted places."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * counted) / jnp.maximum(jnp.sum(counted), 1)


def losses(
    logits: Float32[Array, "B T W"], aux: Aux, tokens: Int[Array, "B T"], bos_token_id: int
) -> Losses:
    """Losses of one forward pass over packed documents, each of which begins with BOS.

    A place whose prediction would cross into another document does not count: the first token of a
    document does not follow from the one before it.
    """
    starts = tokens == bos_token_id
    main = cross_entropy(logits[:, :-1], tokens[:, 1:], ~starts[:, 1:])
    mtp, agreement = jnp.float32(0), jnp.float32(0)
    for k, mtp_logits in enumerate(aux.mtp_logits):
        # Position i of this layer predicts token i+2+k and has seen tokens up to i+1+k.
        span = tokens.shape[1] - 2 - k
        crossed = jnp.zeros_like(starts[:, :span])
        for ahead in range(1, k + 3):
            crossed |= starts[:, ahead : ahead + span]
        mtp += cross_entropy(mtp_logits[:, :span], tokens[:, 2 + k :], ~crossed)
        if k == 0:
            same = jnp.argmax(mtp_logits[:, :span], -1) == jnp.argmax(logits[:, 1 : 1 + span], -1)
            agreement = jnp.sum(same & ~crossed) / jnp.maximum(jnp.sum(~crossed), 1)
    return Losses(main, mtp / max(len(aux.mtp_logits), 1), agreement)
