"""Log-probabilities of prompt tokens, from the hidden states of prefill chunks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.generation.sampling import mask_vocab_padding
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS
from dsv3_jax.model import DeepSeekV3


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the tokens after those of C chunks of T tokens."""

    logprobs: Float32[Array, "*C T"]
    top_tokens: Int[Array, "*C T k"]
    """The k most probable tokens, best first."""
    top_logprobs: Float32[Array, "*C T k"]


def prompt_logprobs(
    model: DeepSeekV3,
    hidden: Float[Array, "C T D"],
    next_tokens: Int[Array, "C T"],
    vocab_size: int,
) -> PromptLogprobs:
    """Returns the log-probability of each next token, given those before it.

    One chunk is computed after the other, so that the logits of a single one exist at a time.

    Args:
      hidden: hidden states after the final norm.
      vocab_size: ids from here on are padding of the embedding.
    """

    def of_chunk(arguments: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
        hidden, tokens = arguments
        logits = mask_vocab_padding(model.logits(hidden), vocab_size)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        top_logprobs, top_tokens = jax.lax.top_k(log_p, MAX_TOP_LOGPROBS)
        logprobs = jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0]
        return PromptLogprobs(logprobs, top_tokens, top_logprobs)

    return jax.lax.map(of_chunk, (hidden, next_tokens))


class PromptRecord:
    """Log-probabilities of one prompt on the host.

    Args:
      prompt_tokens: length of the prompt.
      count: number of most probable tokens to report.
    """

    def __init__(self, prompt_tokens: int, count: int):
        self._count = count
        # Nothing precedes the first token.
        self.logprobs: list[float | None] = [None] * prompt_tokens
        self.top_logprobs: list[list[tuple[int, float]] | None] = [None] * prompt_tokens

    def add(self, position: int, chunk: PromptLogprobs) -> None:
        """Adds the values of consecutive tokens from ``position`` on. Values past the prompt are
        dropped."""
        logprobs = np.maximum(np.asarray(chunk.logprobs), np.finfo(np.float32).min).tolist()
        tokens = np.asarray(chunk.top_tokens)[:, : self._count].tolist()
        top = np.asarray(chunk.top_logprobs)[:, : self._count].tolist()
        for i in range(min(len(logprobs), len(self.logprobs) - position)):
            self.logprobs[position + i] = logprobs[i]
            pairs = zip(tokens[i], top[i], strict=True)
            self.top_logprobs[position + i] = [(t, p) for t, p in pairs if np.isfinite(p)]
