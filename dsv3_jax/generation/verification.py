"""Which drafts stay, and the token after them: the model's own distribution, to the letter.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023). With p the model's distribution at a
place and q the drafter's, both after the row's temperature and filters, a draft x stays with
probability ``min(1, p(x) / q(x))``. At the first place where one does not, the token is drawn from
``max(p - q, 0)``, normalised; behind the last draft, from p. Each token is then distributed as p:
``min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p``. At temperature 0, p and
q are certain of one token, and the rule says: accept while equal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.generation.drafters import Drafts
from dsv3_jax.generation.sampling import ACCEPT, NEXT, Sampling, filtered, noise, pick


def verify(
    logits: Float32[Array, "B T W"],
    drafts: Drafts,
    sampling: Sampling,
    positions: Int[Array, " B"],
    acceptance: float | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """The tokens of one step: accepted drafts, then one of the model's own.

    Args:
      logits: the model's, at the last known token and behind each of the T - 1 drafts.
      positions: the first draft's.
      acceptance: accept drafts at this rate instead, for benchmarks.

    Returns:
      Tokens, of which the first ``accepted + 1`` count, and the number of accepted drafts.
    """
    K = drafts.tokens.shape[1]
    offered = jnp.arange(K) < drafts.counts[:, None]
    chances = [noise(jax.random.uniform, sampling, positions + k, ACCEPT) for k in range(K)]
    u = jnp.stack(chances, axis=1) if chances else jnp.zeros(drafts.tokens.shape)
    forced = None if acceptance is None else u < acceptance
    padded = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    # Not in the branch that wants it: the loop asks for it too, and XLA then passes over the logits
    # once for both.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def greedy() -> tuple[jax.Array, jax.Array]:
        good = best[:, :K] == drafts.tokens if forced is None else forced
        accepted = _leading(good & offered)
        return jnp.where(jnp.arange(K + 1) < accepted[:, None], padded, best), accepted

    def drawn() -> tuple[jax.Array, jax.Array]:
        log_p = filtered(logits, sampling)
        p = jax.nn.softmax(log_p, axis=-1)
        q = _draft_probabilities(drafts, sampling, logits.shape[-1])
        p_x, q_x = (_at(x, drafts.tokens) for x in (p[:, :K], q))
        accepted = _leading((u * q_x < p_x if forced is None else forced) & offered)
        rest = _place(log_p, accepted)
        if K:
            # Where no draft was refused, q counts for nothing, and all of p is left.
            refused = (accepted < drafts.counts) & (forced is None)
            q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
            left = jnp.where(refused[:, None], _place(q, accepted), 0.0)
            rest = _residual(rest, _place(p, accepted), left)
        own = pick(rest, sampling, positions + accepted, NEXT)
        return jnp.where(jnp.arange(K + 1) == accepted[:, None], own[:, None], padded), accepted

    return jax.lax.cond(sampling.any_drawn, drawn, greedy)


def _leading(good: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """How many are good before the first that is not."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)


def _at(x: Float32[Array, "B K W"], tokens: Int[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]


def _place(x: Float32[Array, "B T W"], place: Int[Array, " B"]) -> Float32[Array, "B W"]:
    """One place of each row. Not ``x[row, place]``: on a mesh XLA would send all rows to all."""
    return jnp.take_along_axis(x, place[:, None, None], axis=1)[:, 0]


def _draft_probabilities(drafts: Drafts, sampling: Sampling, W: int) -> Float32[Array, "B K W"]:
    if drafts.logits is None:
        return jax.nn.one_hot(drafts.tokens, W, dtype=jnp.float32)
    return jax.nn.softmax(filtered(drafts.logits, sampling), axis=-1)


def _residual(
    log_p: Float32[Array, "B W"], p: Float32[Array, "B W"], q: Float32[Array, "B W"]
) -> Float32[Array, "B W"]:
    """``log max(p - q, 0)`` up to a constant; exactly ``log_p`` where q is zero."""
    rest = jnp.where(q < p, log_p + jnp.log1p(-q / jnp.where(q < p, p, 1.0)), -jnp.inf)
    # Rounding may refuse a draft although p and q are as good as equal, and leave nothing.
    nothing = jnp.all(rest == -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(nothing, log_p, rest)
