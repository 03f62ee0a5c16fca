"""Log-probabilities of tokens, and the text of single ones."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from pydantic import BaseModel

from dsv3_jax.generation.completion import Completion, Piece, TopLogprobs
from dsv3_jax.tokenizer import Tokenizer


class CompletionLogprobs(BaseModel):
    """Log-probabilities, with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the text before each token. Special tokens that it leaves out do not count."""


class TokenLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its bytes in UTF-8, which may be a part of a character. None for a special token."""


class ChosenLogprob(TokenLogprob):
    """A token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, those of its reasoning and end included."""

    content: list[ChosenLogprob]
    refusal: None = None


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token's text. Bytes that are part of a character only become U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False)


class TextGrowth:
    """Follows a text that grows token by token: where each token begins, and what it adds. Joined,
    the additions are the text: a character of several tokens belongs to the last of them, as in
    vLLM, and special tokens add nothing unless the text ``shows_special``, as that of answers with
    tools."""

    def __init__(self, tokenizer: Tokenizer, *, shows_special: bool = False):
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = _new_decoder()
        self.length = 0
        """Characters of the text so far."""

    def add(self, token: int, *, is_last: bool = False) -> str | None:
        """Adds a token. Returns the characters that it adds, None for a special token. At the end
        of the text, an incomplete character becomes U+FFFD."""
        content = self._bytes(token)
        text = self._decoder.decode(content or b"", is_last)
        self.length += len(text)
        return None if content is None and not text else text

    def addition(self, token: int, *, is_last: bool = False) -> str | None:
        """Returns what :meth:`add` would, and adds nothing."""
        decoder = _new_decoder()
        decoder.setstate(self._decoder.getstate())
        content = self._bytes(token)
        return None if content is None else decoder.decode(content, is_last)

    def _bytes(self, token: int) -> bytes | None:
        content = self._tokenizer.token_bytes(token)
        if content is None and self._shows_special:
            return token_text(self._tokenizer, token).encode()
        return content


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def completion_logprobs(
    tokenizer: Tokenizer,
    growth: TextGrowth,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[TopLogprobs | None],
    ends: Collection[int],
) -> CompletionLogprobs:
    """Returns log-probabilities in the shape of /v1/completions.

    A token's text is what it adds to ``growth``, the text before, or the name of a special token,
    and its offset is where that begins. ``top_logprobs`` of a token contains the token itself, even
    if it is not among the most probable ones. Of tokens with the same text, it contains the most
    probable one. A text ends after the tokens with the indices ``ends``: the prompt, or all of it.
    Where nothing precedes a token, its log-probability is None.
    """
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for i, (token, logprob, top) in enumerate(zip(tokens, logprobs, top_logprobs, strict=True)):
        is_last = i in ends
        pairs: dict[str, float] | None = None
        if logprob is not None and top is not None:
            pairs = {}
            for candidate, value in top:
                name = growth.addition(candidate, is_last=is_last)
                pairs.setdefault(token_text(tokenizer, candidate) if name is None else name, value)
        result.text_offset.append(growth.length)
        added = growth.add(token, is_last=is_last)
        text = token_text(tokenizer, token) if added is None else added
        if pairs is not None and logprob is not None:
            pairs.setdefault(text, logprob)
        result.tokens.append(text)
        result.token_logprobs.append(logprob)
        result.top_logprobs.append(pairs)
    return result


def chat_logprobs(tokenizer: Tokenizer, parts: Sequence[Completion | Piece]) -> ChatLogprobs:
    """Returns log-probabilities in the shape of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> TokenLogprob:
        content = tokenizer.token_bytes(token)
        return TokenLogprob(
            token=token_text(tokenizer, token),
            logprob=logprob,
            bytes=None if content is None else list(content),
        )

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
