"""Settings of several sequences as arrays, which an engine writes into the arguments of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.generation.adjustments import Adjustments, Penalties
from dsv3_jax.generation.request import Request, num_words
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.settings import MAX_LOGIT_BIAS


def pack_sampling(
    *,
    seed: np.ndarray,
    temperature: np.ndarray | float = 0.0,
    top_k: np.ndarray | int = 0,
    top_p: np.ndarray | float = 1.0,
    min_p: np.ndarray | float = 0.0,
    stop_tokens: np.ndarray | None = None,
) -> Sampling:
    """Converts host arrays to the dtypes for which the decode loop is compiled.

    A scalar applies to all sequences. With ``seed`` alone, sampling is greedy and stops at no
    token.
    """

    def column(values: np.ndarray | float | int, dtype: type[np.generic]) -> jax.Array:
        return jnp.asarray(np.broadcast_to(values, len(seed)).astype(dtype))

    if stop_tokens is None:
        stop_tokens = np.full((len(seed), 1), -1)
    return Sampling(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seed=column(seed, np.uint32),
        stop_tokens=jnp.asarray(stop_tokens.astype(np.int32)),
    )


def empty_penalties(count: int) -> Penalties:
    """Returns host arrays that change nothing, for :meth:`Penalties.put`."""
    zeros: Any = {name: np.zeros(count, np.float32) for name in Penalties._fields}
    return Penalties(**zeros)._replace(
        repetition_penalty=np.ones(count, np.float32),
        prompt_lengths=np.zeros(count, np.int32),
        min_lengths=np.zeros(count, np.int32),
        bias_tokens=np.zeros((count, MAX_LOGIT_BIAS), np.int32),
        biases=np.zeros((count, MAX_LOGIT_BIAS), np.float32),
    )


def adjustments_of(requests: Sequence[Request], vocab_size: int) -> Adjustments:
    """Returns the penalties and masks of several requests, for logits of ``vocab_size`` ids."""
    penalties = empty_penalties(len(requests))
    allowed = np.full((len(requests), num_words(vocab_size)), ~np.uint32(0))
    for row, request in enumerate(requests):
        penalties.put(row, request)
        if request.allowed is not None:
            allowed[row] = request.allowed.words
    arrays: Any = penalties, allowed
    return jax.tree.map(jnp.asarray, Adjustments(*arrays))
