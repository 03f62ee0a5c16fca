"""What a caller asks of the Generator, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any

from dsv3_jax.config import ModelConfig
from dsv3_jax.tokenizer import Tokenizer

FLOAT32_MAX = 2.0**128 - 2.0**104

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 8  # slots in the compiled program, the model's own end tokens among them

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its settings.

    Raises:
      ValueError: a setting is out of range; the message names it, what was expected and what came.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int = 0

    def __post_init__(self) -> None:
        integer, real = numbers.Integral, numbers.Real  # NumPy's are among them
        check("max_new_tokens", self.max_new_tokens, "an integer of at least 1", integer, 1)
        expected = "a number in [0, 3.4e38]"
        check("temperature", self.temperature, expected, real, 0, FLOAT32_MAX)
        check("top_p", self.top_p, "a number in (0, 1]", real, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p: expected a number in (0, 1], got 0")
        check("top_k", self.top_k, "an integer in [0, 2**31)", integer, 0, 2**31 - 1)
        check("min_p", self.min_p, "a number in [0, 1]", real, 0, 1)
        check("seed", self.seed, "an integer in [0, 2**32)", integer, 0, 2**32 - 1)
        if "" in self.stop:
            raise ValueError("stop: expected strings that are not empty, got ''")
        expected = f"an integer from 0 to {MAX_TOP_LOGPROBS}"
        check("logprobs", self.logprobs, expected, integer, 0, MAX_TOP_LOGPROBS)


def check(
    name: str, value: Any, expected: str, kind: type, least: float, most: float = math.inf
) -> None:
    """Raises ValueError unless the value is of that kind, no bool, and from least to most."""
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right or not least <= value <= most:  # NaN compares false
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


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
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        **settings: Any,
    ) -> list[Request]:
        """One request a prompt; each of ``settings`` is one value for all, or one for each."""
        prompts = _plain(prompts)
        several: list[Any] = list(prompts) if _are_several(prompts) else [prompts]
        if not several:
            raise ValueError("prompts: expected at least one, got none")
        columns = {name: _spread(name, v, len(several)) for name, v in settings.items()}
        stop = self._stop_strings(stop)
        ends = self._stop_ids(stop, stop_tokens, ignore_eos)
        return [
            Request(
                prompt=self._prompt_ids(prompt),
                stop=stop,
                stop_tokens=ends,
                logprobs=logprobs,
                **{name: column[i] for name, column in columns.items()},
            )
            for i, prompt in enumerate(several)
        ]

    def _stop_strings(self, stop: str | Sequence[str]) -> tuple[str, ...]:
        strings = (stop,) if isinstance(stop, str) else stop
        if not isinstance(strings, Collection) or not all(isinstance(s, str) for s in strings):
            raise ValueError(f"stop: expected a string or several, got {stop!r}")
        strings = tuple(strings)
        if strings and self._tokenizer is None:
            raise ValueError(f"stop: expected none, for there is no tokenizer; got {strings[0]!r}")
        return strings

    def _stop_ids(
        self, stop: tuple[str, ...], stop_tokens: Sequence[int], ignore_eos: bool
    ) -> tuple[int, ...]:
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
            prompt = self._tokenizer.encode(prompt)
        ids = self._ids("prompt", _plain(prompt))
        if not ids:
            raise ValueError("prompt: expected text or token ids, got an empty prompt")
        if len(ids) >= self._max_len:
            raise ValueError(
                f"prompt: expected at most {self._max_len - 1} tokens (max_len {self._max_len}, "
                f"less one to generate), got {len(ids)}"
            )
        return ids

    def _ids(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, bytes) or not isinstance(value, Sequence):
            raise ValueError(f"{name}: expected token ids, got {value!r}")
        ids = tuple(_plain(i) for i in value)
        last = self._config.vocab_size - 1
        for i in ids:
            check(name, i, f"token ids from 0 to {last}", numbers.Integral, 0, last)
        return ids


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value a prompt, from one for all or one for each."""
    value = _plain(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: expected one value or {count}, one a prompt; got {len(value)}")
    return list(value)


def _plain(value: Any) -> Any:
    """NumPy's and JAX's arrays as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are_several(prompts: Any) -> bool:
    """Whether these are prompts, and not one: text or token ids."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return False
    return not prompts or isinstance(_plain(prompts[0]), Sequence)
