"""Losses: cross-entropy of the next tokens and of MTP, and the balance of experts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int, Shaped

from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.model_io import HiddenStates
from dsv3_jax.training.corpus import EndToken
from dsv3_jax.training.cross_entropy import LossHead, next_token
from dsv3_jax.training.tree import Tree


def update_bias(
    bias: Float32[Array, " E"], counts: Int[Array, " E"], speed: ArrayLike
) -> Float32[Array, " E"]:
    """Returns ``bias_e + speed * sign(mean load - load_e)``, where load_e is the number of tokens
    in the whole batch that chose expert e.

    The bias affects only the choice of experts and has no gradient (V3 report, section 2.1.2).
    """
    load = counts.astype(jnp.float32)
    return bias + speed * jnp.sign(jnp.mean(load) - load)


def update_biases(biases: Tree, counts: Int[Array, "L_moe E"], speed: ArrayLike) -> Tree:
    """Applies :func:`update_bias` to every router.

    Args:
      biases: nnx.State with one bias per router, or an empty one: routers that score with a softmax
        have no bias.
      counts: load of each expert, in the main model's MoE layers and then in the MTP layers.
    """
    flat = sorted(nnx.to_flat_state(biases), key=lambda item: (item[0][0] == "mtp", item[0][1]))
    if not flat:
        return biases
    updated = [
        (path, bias.replace(update_bias(bias.get_value(), layer_counts, speed)))
        for (path, bias), layer_counts in zip(flat, counts, strict=True)
    ]
    return nnx.from_flat_state(updated)


def imbalance(counts: Int[Array, "L E"]) -> Float32[Array, ""]:
    """Returns the maximum load divided by the mean load, averaged over layers. It is 1 for a
    perfectly balanced load, and without layers."""
    if counts.shape[0] == 0:
        return jnp.float32(1)
    load = counts.astype(jnp.float32)
    return jnp.mean(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9))


def sequence_balance(stats: RoutingStats, sequences: int) -> Float32[Array, ""]:
    """Returns ``sum_i f_i P_i`` of one MoE layer, averaged over sequences (V3 report, equations 17
    to 20).

    In a sequence of T tokens, ``f_i = E / (K T) * (number of tokens that chose expert i)``, and
    ``P_i`` is the mean over its tokens of ``s_i / sum_j s_j``. The sum is 1 if either f or P is
    uniform. Only P has a gradient, because the choice of experts is not differentiable.

    f counts the experts that the router chose, by biased scores and within the selected groups.
    Equation 18 of the report counts the K largest unbiased scores. The two are equal only without
    biases and groups.

    Args:
      stats: routing of tokens in order, one sequence after the other.
      sequences: number of sequences, all of equal length.
    """
    E, K = stats.scores.shape[-1], stats.experts.shape[-1]
    scores = stats.scores.reshape(sequences, -1, E)
    experts = stats.experts.reshape(sequences, -1)
    # Counted by comparison: on a mesh, a scatter would send every sequence to every device.
    counts = jnp.sum(experts[..., None] == jnp.arange(E), axis=1, dtype=jnp.float32)
    fractions = counts * (E / (K * scores.shape[1]))
    # All sigmoids of a token may underflow. The gradient divides by the square of this bound, which
    # does not underflow.
    shares = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-12)
    return jnp.mean(jnp.sum(fractions * jnp.mean(shares, axis=1), axis=-1))


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


def is_document_start(tokens: Int[Array, "B T"], bos_token_id: int) -> Bool[Array, "B T"]:
    """Returns whether each token is the first of a document. Documents begin with BOS, or end with
    EOS: then ``bos_token_id`` is an :class:`~dsv3_jax.training.corpus.EndToken`."""
    if isinstance(bos_token_id, EndToken):
        return jnp.pad(tokens == bos_token_id, ((0, 0), (1, 0)))[:, :-1]
    return tokens == bos_token_id


def first_keys(tokens: Int[Array, "B T"], bos_token_id: int) -> Int[Array, "B T"]:
    """Returns the position of the first token of each token's document in the sequence: 0 for a
    document that began before the sequence."""
    starts = is_document_start(tokens, bos_token_id)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)


def target_mask(tokens: Int[Array, "B T"], bos_token_id: int, ahead: int) -> Bool[Array, "B S"]:
    """Returns whether each of the S = T - ahead positions has a target when position i predicts
    token i+ahead.

    Sequences consist of packed documents, see :func:`is_document_start`. A position has no target
    if a document begins among tokens i+1 to i+ahead, because a document's first token does not
    follow from the document before it.
    """
    starts = is_document_start(tokens, bos_token_id)
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


def losses(
    head: LossHead,
    states: HiddenStates,
    tokens: Int[Array, "B T"],
    bos_token_id: int,
    counts: TargetCounts | None = None,
) -> Losses:
    """Returns the losses of one forward pass over packed documents that begin with BOS.

    Args:
      head: LM head of the model.
      counts: target counts of the whole batch if ``tokens`` is one of its microbatches. By default
        ``tokens`` is the whole batch.

    The losses of indexers and drafts are zero here: :class:`~dsv3_jax.training.objective.Objective`
    adds them.
    """
    mtp_layers = len(states.mtp)
    if counts is None:
        counts = count_targets(tokens, bos_token_id, mtp_layers)
    targets, mask = predicted(tokens, bos_token_id, 1)
    nats, main_best = head.sum(next_token, states.main.post_norm, targets, mask)
    main = nats / jnp.maximum(counts.main, 1)
    mtp, agreement = jnp.float32(0), jnp.float32(0)
    for k, hidden in enumerate(states.mtp):
        # Position i of MTP layer k predicts token i+2+k and depends on tokens up to i+1+k.
        targets, mask = predicted(tokens, bos_token_id, k + 2)
        nats, best = head.sum(next_token, hidden.post_norm, targets, mask)
        mtp += nats / jnp.maximum(counts.mtp[k], 1)
        if k == 0:
            same = best == ahead_by(main_best, 1)
            agreement = jnp.sum(same & mask) / jnp.maximum(counts.mtp[0], 1)
    B = tokens.shape[0]
    routing = states.routing + states.mtp_routing
    balance = sum((sequence_balance(stats, B) for stats in routing), jnp.float32(0))
    balance *= B / counts.sequences
    zero = jnp.float32(0)
    return Losses(main, mtp / max(mtp_layers, 1), balance, agreement, indexer=zero, drafts=zero)


def predicted(
    tokens: Int[Array, "B T"], bos_token_id: int, ahead: int
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Returns the target of every position when position i predicts token i+ahead, and whether it
    has one, see :func:`target_mask`. The last positions have none."""
    mask = jnp.pad(target_mask(tokens, bos_token_id, ahead), ((0, 0), (0, ahead)))
    return ahead_by(tokens, ahead), mask


def ahead_by(x: Shaped[Array, "B T *rest"], ahead: int) -> Shaped[Array, "B T *rest"]:
    """Returns the array whose position i has that of position i+ahead, and zeros at the end."""
    return jnp.pad(x[:, ahead:], ((0, 0), (0, ahead), *((0, 0),) * (x.ndim - 2)))
