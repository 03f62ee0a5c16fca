"""The text of single tokens, for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dsv3_jax.generation.text import INCOMPLETE
from dsv3_jax.server.openai.chat_types import ChatLogprobs, ChosenLogprob, TokenLogprob
from dsv3_jax.server.openai.completion_types import CompletionLogprobs
from dsv3_jax.tokenizer import Tokenizer

Top = Sequence[tuple[int, float]]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token's text. Bytes that are part of a character only become U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False)


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[Top | None],
) -> CompletionLogprobs:
    """Returns log-probabilities in the shape of /v1/completions.

    ``top_logprobs`` of a token contains the token itself, even if it is not among the most probable
    ones. Of tokens with the same text, it contains the most probable one.

    Args:
      tokens: ids.
      logprobs: of each token; None where nothing precedes it.
      top_logprobs: most probable tokens at each position, best first.
    """
    texts = [token_text(tokenizer, token) for token in tokens]
    tops: list[dict[str, float] | None] = []
    for text, logprob, top in zip(texts, logprobs, top_logprobs, strict=True):
        if logprob is None or top is None:
            tops.append(None)
            continue
        pairs: dict[str, float] = {}
        for token, value in top:
            pairs.setdefault(token_text(tokenizer, token), value)
        pairs.setdefault(text, logprob)
        tops.append(pairs)
    offsets, end = [], 0
    for text in texts:
        offsets.append(end)
        end += len(text)
    return CompletionLogprobs(
        tokens=texts, token_logprobs=list(logprobs), top_logprobs=tops, text_offset=offsets
    )


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
) -> ChatLogprobs:
    """Returns log-probabilities in the shape of /v1/chat/completions.

    Args:
      tokens: ids.
      logprobs: of each token.
      tops: most probable tokens at each position, best first.
    """

    def entry(token: int, logprob: float) -> TokenLogprob:
        text = token_text(tokenizer, token)
        content = None if INCOMPLETE in text else list(text.encode())
        return TokenLogprob(token=text, logprob=logprob, bytes=content)

    return ChatLogprobs(
        content=[
            ChosenLogprob(
                **entry(token, logprob).model_dump(), top_logprobs=[entry(*pair) for pair in top]
            )
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
    )
