"""What a caller asks of the Generator, checked before anything runs."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.settings import (
    DEFAULT_NEW_TOKENS,
    MAX_STOP_TOKENS,
    Default,
    check,
    check_setting,
    check_unicode,
)
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.words import counted

Prompt = str | Sequence[int]

_BYTES = (bytes, bytearray, memoryview)  # sequences of integers too, but never meant as ids


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its settings.

    Raises:
      ValueError: a setting is out of range; the message names it, what was expected and what came.
    """

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "prompt":
                check_setting(field.name, getattr(self, field.name))


class RequestReader:
    """Turns the arguments of a call into requests, for one model and tokenizer.

    Raises, from :meth:`read`:
      ValueError: a prompt is empty, too long or has an id out of range, or a setting is wrong.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, max_len: int):
        self._config = config
        self._tokenizer = tokenizer
        self._max_len = max_len

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
        **settings: Any,
    ) -> list[Request]:
        """``n`` requests a prompt, the first prompt's first. Each setting is one value for all
        prompts, or a sequence with one for each; see :meth:`Generator.generate`."""
        check_setting("n", n)
        texts = [self._prompt_ids(prompt) for prompt in _several(prompts)]
        count = len(texts)
        seeds = list(range(0, n * count, n)) if seed is None else _spread("seed", seed, count)
        columns = {name: _spread(name, value, count) for name, value in settings.items()}
        columns["max_new_tokens"] = [
            self._new_tokens(value, len(ids))
            for value, ids in zip(
                _spread("max_new_tokens", max_new_tokens, count), texts, strict=True
            )
        ]
        stops = [_stop_strings(s) for s in _spread("stop", stop, count, of_sequences=True)]
        ends = _spread("stop_tokens", stop_tokens, count, of_sequences=True)
        ignores = _spread("ignore_eos", ignore_eos, count)
        columns["stop"] = [self._with_tokenizer(strings) for strings in stops]
        columns["stop_tokens"] = [
            self._stop_ids(*each) for each in zip(stops, ends, ignores, strict=True)
        ]
        first = [
            Request(
                prompt=ids,
                seed=seeds[i],
                **{name: column[i] for name, column in columns.items()},
            )
            for i, ids in enumerate(texts)
        ]
        return [
            dataclasses.replace(request, seed=(int(request.seed) + j) % 2**32)
            for request in first
            for j in range(n)
        ]

    def _new_tokens(self, value: Any, prompt_tokens: int) -> int:
        room = self._max_len - prompt_tokens
        if value is None or (isinstance(value, Default) and value > room):
            return room
        check_setting("max_new_tokens", value)
        if value > room:
            raise ValueError(
                f"max_new_tokens: expected at most {room} (max_len {self._max_len}, less a prompt "
                f"of {counted(prompt_tokens, 'token')}; None takes all of it), got {value}"
            )
        return value

    def _with_tokenizer(self, strings: tuple[str, ...]) -> tuple[str, ...]:
        if strings and self._tokenizer is None:
            raise ValueError(f"stop: expected none, for there is no tokenizer; got {strings[0]!r}")
        return strings

    def _stop_ids(
        self, stop: tuple[str, ...], stop_tokens: Any, ignore_eos: Any
    ) -> tuple[int, ...]:
        check_setting("ignore_eos", ignore_eos)
        ends = [*self._ids("stop_tokens", _plain(stop_tokens))]
        ends += () if ignore_eos else self._end_tokens()
        if self._tokenizer is not None:
            # A stop string that is a special token never appears in text, which leaves those out.
            special = map(self._tokenizer.special_token_id, stop)
            ends += [i for i in special if i is not None]
        ends = list(dict.fromkeys(ends))
        if len(ends) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_tokens: expected at most {MAX_STOP_TOKENS}, the model's own among them; "
                f"got {len(ends)}"
            )
        return tuple(ends)

    def _end_tokens(self) -> tuple[int, ...]:
        """The model's own, and the tokenizer's where it names another."""
        own = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        return self._config.eos_token_id if own is None else (*self._config.eos_token_id, own)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str) and prompt:
            if self._tokenizer is None:
                raise ValueError("prompt: expected token ids, for there is no tokenizer; got text")
            check_unicode("prompt", prompt)
            prompt = self._tokenizer.encode(prompt)
        ids = self._ids("prompt", _plain(prompt))
        if not ids:
            raise ValueError("prompt: expected text or token ids, got an empty prompt")
        if len(ids) >= self._max_len:
            raise ValueError(
                f"prompt: expected at most {counted(self._max_len - 1, 'token')} (max_len "
                f"{self._max_len}, less one to generate), got {len(ids)}"
            )
        return ids

    def _ids(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, _BYTES) or not isinstance(value, Sequence):
            raise ValueError(f"{name}: expected token ids, got {value!r}")
        ids = tuple(_plain(i) for i in value)
        last = self._config.vocab_size - 1
        for i in ids:
            check(name, i, f"token ids from 0 to {last}", numbers.Integral, 0, last)
        return ids


def _spread(name: str, value: Any, count: int, *, of_sequences: bool = False) -> list[Any]:
    """One value a prompt, from one for all or one for each. Values that are ``of_sequences`` are
    for each prompt where one of them is a sequence itself."""
    value = _plain(value)
    for_all = isinstance(value, str) or not isinstance(value, Sequence)
    if for_all or (of_sequences and not any(map(_is_collection, value))):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: expected one value or {count}, one a prompt; got {len(value)}")
    return [_plain(v) for v in value]


def _is_collection(value: Any) -> bool:
    return isinstance(_plain(value), Collection) and not isinstance(value, str | bytes)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    check_setting("stop", stop)
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _several(prompts: Any) -> list[Any]:
    """A list of prompts, from one or several."""
    prompts = _plain(prompts)
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        hint = "; decode it" if isinstance(prompts, _BYTES) else ""
        hint = "; make it a list" if isinstance(prompts, Iterable) and not hint else hint
        got = type(prompts).__name__ if hint else repr(prompts)
        raise ValueError(
            f"prompt: expected text, token ids, or a sequence of such prompts; got {got}{hint}"
        )
    several = list(prompts) if _are_several(prompts) else [prompts]
    if not several:
        raise ValueError("prompts: expected at least one, got none")
    return several


def _plain(value: Any) -> Any:
    """NumPy's and JAX's arrays as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are_several(prompts: Sequence[Any]) -> bool:
    """Whether these are prompts, and not one: text or token ids."""
    if isinstance(prompts, str):
        return False
    return not prompts or isinstance(_plain(prompts[0]), Sequence)
