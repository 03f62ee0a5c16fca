"""The text of single tokens, for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dsv3_jax.generation.completion import Completion, Piece, TopLogprobs
from dsv3_jax.generation.text import INCOMPLETE
from dsv3_jax.server.openai.chat_types import ChatLogprobs, ChosenLogprob, TokenLogprob
from dsv3_jax.server.openai.completion_types import CompletionLogprobs
from dsv3_jax.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token's text. Bytes that are part of a character only become U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False)


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[TopLogprobs | None],
    *,
    begin: int = 0,
) -> CompletionLogprobs:
    """Returns log-probabilities in the shape of /v1/completions.

    ``top_logprobs`` of a token contains the token itself, even if it is not among the most probable
    ones. Of tokens with the same text, it contains the most probable one.

    Args:
      tokens: ids.
      logprobs: of each token; None where nothing precedes it.
      top_logprobs: most probable tokens at each position, best first.
      begin: characters of the tokens before these.
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
    offsets, end = [], begin
    for text in texts:
        offsets.append(end)
        end += len(text)
    return CompletionLogprobs(
        tokens=texts, token_logprobs=list(logprobs), top_logprobs=tops, text_offset=offsets
    )


def chat_logprobs(tokenizer: Tokenizer, parts: Sequence[Completion | Piece]) -> ChatLogprobs:
    """Returns log-probabilities in the shape of /v1/chat/completions.

    Args:
      parts: a completion, or successive pieces of one.
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
            for part in parts
            for token, logprob, top in zip(
                part.tokens,
                part.logprobs,
                part.top_logprobs or [[] for _ in part.tokens],
                strict=True,
            )
        ]
    )
