"""Requests: one prompt with its settings, checked before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt32

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.settings import (
    DEFAULT_NEW_TOKENS,
    MAX_STOP_TOKENS,
    NAMES,
    Default,
    check,
    check_setting,
    check_unicode,
)
from dsv3_jax.other_names import check_arguments
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.words import counted

Prompt = str | Sequence[int]

_BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but never meant as token ids


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMask:
    """The tokens that a request may generate: bit ``i % 32`` of word ``i // 32`` is 1 if token i is
    allowed."""

    words: UInt32[np.ndarray, " n_words"]

    @classmethod
    def of(
        cls, vocab_size: int, allowed: Sequence[int] | None = None, banned: Sequence[int] = ()
    ) -> TokenMask:
        """Returns the mask of ``allowed``, or of all ids below ``vocab_size``, without
        ``banned``."""
        is_allowed = np.full(vocab_size, allowed is None)
        is_allowed[list(allowed or ())] = True
        is_allowed[list(banned)] = False
        return cls.pack(is_allowed)

    @classmethod
    def pack(cls, is_allowed: Bool[np.ndarray, " W"]) -> TokenMask:
        """Returns the mask with a bit for each entry."""
        padded = np.zeros(num_words(len(is_allowed)) * 32, bool)
        padded[: len(is_allowed)] = is_allowed
        return cls(np.packbits(padded, bitorder="little").view(np.dtype("<u4")).astype(np.uint32))

    def __and__(self, other: TokenMask) -> TokenMask:
        return TokenMask(self.words & other.words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenMask) and np.array_equal(self.words, other.words)

    def __hash__(self) -> int:
        return hash(self.words.tobytes())

    def __bool__(self) -> bool:
        """Whether any token is allowed."""
        return bool(self.words.any())

    def __contains__(self, token: int) -> bool:
        return bool(self.words[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def without(self, tokens: Sequence[int]) -> TokenMask:
        """Returns the mask without some tokens."""
        words = self.words.copy()
        for token in tokens:
            words[token // 32] &= ~np.uint32(1 << token % 32)
        return TokenMask(words)


def num_words(vocab_size: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocab_size // 32)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its settings. Raises ValueError for a setting that is out of range, with its
    name."""

    prompt: tuple[int, ...]
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report for each token of the prompt. None reports nothing;
    only an engine reports them."""
    allowed: TokenMask | None = None
    """Tokens that it may generate; None allows all."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in ("prompt", "logit_bias", "allowed"):
                check_setting(field.name, getattr(self, field.name))
        check_setting("logit_bias", dict(self.logit_bias))
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_new_tokens, {self.max_new_tokens}, got "
                f"{self.min_tokens}"
            )

    @functools.cached_property
    def has_penalties(self) -> bool:
        """Whether its logits are changed other than by excluding all but ``allowed``."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
        )

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p exclude some tokens."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)


class RequestReader:
    """Converts the arguments of :meth:`Generator.generate` to requests of at most ``max_len``
    tokens. Without a tokenizer, all prompts are token ids."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, max_len: int):
        self._config = config
        self._tokenizer = tokenizer
        self._max_len = max_len
        # Ids from here on are padding of the embedding and never selected.
        own = config.vocab_size if tokenizer is None else tokenizer.vocab_size
        self._vocab_size = min(config.vocab_size, own)

    def read(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        max_new_tokens: Any = DEFAULT_NEW_TOKENS,
        seed: Any = None,
        stop: Any = (),
        stop_tokens: Any = (),
        ignore_eos: Any = False,
        logit_bias: Any = None,
        allowed_tokens: Any = None,
        banned_tokens: Any = (),
        **settings: Any,
    ) -> list[Request]:
        """Returns ``n`` requests per prompt; those of the first prompt come first. Each setting is
        one value for all prompts, or a sequence with one value per prompt, see
        :meth:`Generator.generate`."""
        check_arguments(settings, NAMES)
        check_setting("n", n)
        prompts = _prompts(prompts)
        for prompt in prompts:  # all of them before the first is encoded, which may take long
            if isinstance(prompt, str) and self._tokenizer is not None:
                check_fits("prompt", prompt, self._tokenizer, self._max_len)
        prompt_ids = [self._prompt_ids(prompt) for prompt in prompts]
        count = len(prompt_ids)
        seeds = list(range(0, n * count, n)) if seed is None else _per_prompt("seed", seed, count)
        columns = {name: _per_prompt(name, value, count) for name, value in settings.items()}
        columns["max_new_tokens"] = [
            self._max_new_tokens(value, len(ids))
            for value, ids in zip(
                _per_prompt("max_new_tokens", max_new_tokens, count), prompt_ids, strict=True
            )
        ]
        stops = [_stop_strings(s) for s in _per_prompt("stop", stop, count, is_sequence=True)]
        ends = _per_prompt("stop_tokens", stop_tokens, count, is_sequence=True)
        ignores = _per_prompt("ignore_eos", ignore_eos, count)
        if self._tokenizer is None and (given := [strings[0] for strings in stops if strings]):
            raise ValueError(f"stop: expected none, as there is no tokenizer; got {given[0]!r}")
        columns["stop"] = stops
        columns["stop_tokens"] = [
            self._stop_token_ids(*each) for each in zip(stops, ends, ignores, strict=True)
        ]
        columns["logit_bias"] = [
            self._logit_bias(value) for value in _per_prompt("logit_bias", logit_bias, count)
        ]
        allowed = _per_prompt("allowed_tokens", allowed_tokens, count, is_sequence=True)
        banned = _per_prompt("banned_tokens", banned_tokens, count, is_sequence=True)
        early = [bool(value) for value in columns.get("min_tokens", [0] * count)]
        columns["allowed"] = [
            self._allowed(*each)
            for each in zip(allowed, banned, early, columns["stop_tokens"], strict=True)
        ]
        requests = [
            Request(
                prompt=ids,
                seed=seeds[i],
                **{name: column[i] for name, column in columns.items()},
            )
            for i, ids in enumerate(prompt_ids)
        ]
        return [
            dataclasses.replace(request, seed=(int(request.seed) + j) % 2**32)
            for request in requests
            for j in range(n)
        ]

    def _max_new_tokens(self, value: Any, prompt_tokens: int) -> int:
        room = self._max_len - prompt_tokens
        if value is None or (isinstance(value, Default) and value > room):
            return room
        check_setting("max_new_tokens", value)
        if value > room:
            raise ValueError(
                f"max_new_tokens: expected at most {room} (max_len {self._max_len}, less a prompt "
                f"of {counted(prompt_tokens, 'token')}; None means the maximum), got {value}"
            )
        return value

    def _stop_token_ids(
        self, stop: tuple[str, ...], stop_tokens: Any, ignore_eos: Any
    ) -> tuple[int, ...]:
        check_setting("ignore_eos", ignore_eos)
        ends = [*self._token_ids("stop_tokens", _to_python(stop_tokens))]
        ends += () if ignore_eos else self.end_tokens
        if self._tokenizer is not None:
            # Text does not contain special tokens, so a stop string that spells one is its id.
            special_ids = map(self._tokenizer.special_token_id, stop)
            ends += [i for i in special_ids if i is not None]
        ends = list(dict.fromkeys(ends))
        if len(ends) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_tokens: expected at most {MAX_STOP_TOKENS}, including the model's own; "
                f"got {len(ends)}"
            )
        return tuple(ends)

    def _logit_bias(self, value: Any) -> tuple[tuple[int, float], ...]:
        check_setting("logit_bias", value)
        pairs = {int(token): float(bias) for token, bias in (value or {}).items()}
        self._token_ids("logit_bias", list(pairs))
        return tuple((token, bias) for token, bias in pairs.items() if bias)

    def _allowed(
        self, allowed: Any, banned: Any, has_min_tokens: bool, stop_tokens: tuple[int, ...]
    ) -> TokenMask | None:
        """Returns the tokens that a request may generate, or None for all."""
        allowed = _to_python(allowed)
        if allowed is not None:
            allowed = self._token_ids("allowed_tokens", allowed)
        banned = self._token_ids("banned_tokens", _to_python(banned))
        if allowed is None and not banned:
            return None
        mask = TokenMask.of(self._config.vocab_size, allowed, banned)
        real = TokenMask.of(self._config.vocab_size, range(self._vocab_size))
        if not mask & (real.without(stop_tokens) if has_min_tokens else real):
            name = "banned_tokens" if allowed is None else "allowed_tokens"
            stops = ", other than stop tokens, with min_tokens" if has_min_tokens else ""
            raise ValueError(
                f"{name}: expected at least one token that may be generated{stops}; got none"
            )
        return mask

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the model and of the tokenizer."""
        own = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        return self._config.eos_token_id if own is None else (*self._config.eos_token_id, own)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str) and prompt:
            if self._tokenizer is None:
                raise ValueError("prompt: expected token ids, as there is no tokenizer; got text")
            check_unicode("prompt", prompt)
            prompt = self._tokenizer.encode(prompt)
        ids = self._token_ids("prompt", _to_python(prompt))
        if not ids:
            raise ValueError("prompt: expected text or token ids, got an empty prompt")
        if len(ids) >= self._max_len:
            raise ValueError(
                f"prompt: expected at most {counted(self._max_len - 1, 'token')} (max_len "
                f"{self._max_len}, less one to generate), got {len(ids)}"
            )
        return ids

    def _token_ids(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, _BYTES) or not isinstance(value, Sequence):
            raise ValueError(f"{name}: expected token ids, got {value!r}")
        last = self._config.vocab_size - 1
        ids = tuple(value)
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= last:
            return ids  # the usual case, a hundred times faster than looking at each
        ids = tuple(_to_python(i) for i in ids)
        for i in ids:
            check(name, i, f"token ids from 0 to {last}", numbers.Integral, 0, last)
        return ids


def check_fits(name: str, text: str, tokenizer: Tokenizer, max_len: int) -> None:
    """Raises ValueError for text that cannot have at most ``max_len`` tokens, without encoding it.
    Text that passes may still be too long."""
    if (least := tokenizer.least_tokens(text)) > max_len:
        raise ValueError(
            f"{name}: expected at most {counted(max_len - 1, 'token')} (max_len {max_len}, less one"
            f" to generate), got text of {counted(least, 'token')} or more"
        )


def _per_prompt(name: str, value: Any, count: int, *, is_sequence: bool = False) -> list[Any]:
    """Returns one value per prompt, from one value for all or a sequence of ``count`` values. If a
    single value is a sequence itself, ``value`` has one per prompt if any of its elements is a
    collection."""
    value = _to_python(value)
    is_scalar = isinstance(value, str) or not isinstance(value, Sequence)
    if is_scalar or (is_sequence and not any(map(_is_collection, value))):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: expected one value or {count}, one per prompt; got {len(value)}")
    return [_to_python(v) for v in value]


def _is_collection(value: Any) -> bool:
    return isinstance(_to_python(value), Collection) and not isinstance(value, str | bytes)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    check_setting("stop", stop)
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _prompts(prompts: Any) -> list[Any]:
    """Returns a list of prompts, from a single prompt or a sequence of prompts."""
    prompts = _to_python(prompts)
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        hint = "; decode it" if isinstance(prompts, _BYTES) else ""
        hint = "; make it a list" if isinstance(prompts, Iterable) and not hint else hint
        got = type(prompts).__name__ if hint else repr(prompts)
        raise ValueError(
            f"prompt: expected text, token ids, or a sequence of such prompts; got {got}{hint}"
        )
    result = [prompts] if _is_single_prompt(prompts) else list(prompts)
    if not result:
        raise ValueError("prompts: expected at least one, got none")
    return result


def _to_python(value: Any) -> Any:
    """Converts NumPy and JAX arrays to lists and numbers; returns anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_single_prompt(prompts: Sequence[Any]) -> bool:
    """Returns whether ``prompts`` is one prompt, text or token ids, rather than several."""
    if isinstance(prompts, str):
        return True
    return bool(prompts) and not isinstance(_to_python(prompts[0]), Sequence)
