"""``dsv3 generate``: completes prompts with a model.

This module checks everything that can be wrong with a call before JAX is imported and before
weights are read: first the ranges, then the prompts, then both against the model's config and
tokenizer. :mod:`dsv3_jax.cli.run_generation` does the rest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv3_jax.cli.flags import check_ranges, check_weights, draft_of, max_len_of
from dsv3_jax.generation.settings import DEFAULT_NEW_TOKENS, check_settings

if TYPE_CHECKING:
    from dsv3_jax.config import ModelConfig
    from dsv3_jax.tokenizer import Tokenizer

_MAX_LEN_MULTIPLE = 256  # max_len is rounded up to a multiple, so that few lengths are compiled


def run(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments)
    texts = read_prompts(arguments.prompts)
    if arguments.stream and len(texts) != 1:
        raise ValueError(f"--stream: expected one prompt, got {len(texts)}")
    if arguments.stream and arguments.n not in (None, 1):
        raise ValueError(f"--stream: expected one completion, got --n {arguments.n}")

    from dsv3_jax.generation.request import RequestReader

    config, tokenizer = _read_config_and_tokenizer(arguments.model)
    prompts = [_encode(arguments, tokenizer, text) for text in texts]
    max_len = _max_len(arguments, config, max(map(len, prompts)), settings)
    available = max_len - max(map(len, prompts))
    if arguments.max_new_tokens is None:
        settings["max_new_tokens"] = min(DEFAULT_NEW_TOKENS, available)
    elif 1 <= available < arguments.max_new_tokens:
        raise ValueError(
            f"--max-new-tokens: expected at most {available} (a cache of {max_len} tokens, less the"
            f" prompt), got {arguments.max_new_tokens}"
        )
    of_requests = {n: v for n, v in settings.items() if n not in ("draft", "draft_depth")}
    RequestReader(config, tokenizer, max_len).read(prompts, **of_requests)

    from dsv3_jax.cli.run_generation import run_generation

    run_generation(arguments, config, texts, prompts, max_len, settings)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of :meth:`Generator.generate`, with ranges checked."""
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed", "n")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    others = ("min_tokens", "stop", "ignore_eos", "logprobs")
    settings = {name: getattr(arguments, name) for name in (*sampling, *penalties, *others)}
    settings["max_new_tokens"] = arguments.max_new_tokens
    settings |= draft_of(arguments)
    # The Generator has its own defaults for settings that were not given.
    settings = {n: v for n, v in settings.items() if v is not None or n == "draft"}
    for stop in arguments.stop:
        check_text("--stop", stop)
    check_settings(**settings)
    check_ranges(arguments, {"max_len": ("an integer of at least 2", int, 2)})
    if arguments.logprobs and not arguments.json:
        raise ValueError("--logprobs: expected --json with it, which prints them; got none")
    if arguments.system is not None:
        if not arguments.chat:
            raise ValueError("--system: expected --chat with it, got none")
        check_text("--system", arguments.system)
    check_weights(arguments)
    return settings


def _read_config_and_tokenizer(model: str) -> tuple[ModelConfig, Tokenizer]:
    """Reads the config and the tokenizer of a model, but no weights."""
    from dsv3_jax.checkpoint.find import find_config_directory
    from dsv3_jax.config import ModelConfig
    from dsv3_jax.generation_config import with_end_tokens
    from dsv3_jax.tokenizer import Tokenizer

    directory = find_config_directory(model)
    config = with_end_tokens(ModelConfig.from_hf(directory), directory)
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(
            f"{model}: expected a tokenizer.json, which encodes the prompt; found none"
        )
    return config, Tokenizer(directory)


def _encode(arguments: argparse.Namespace, tokenizer: Tokenizer, text: str) -> list[int]:
    split = not arguments.special_tokens
    if not arguments.chat:
        return tokenizer.encode(text, split_special_tokens=split)
    messages = [{"role": "user", "content": text}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return tokenizer.chat(messages, split_special_tokens=split)


def _max_len(
    arguments: argparse.Namespace, config: ModelConfig, longest: int, settings: dict[str, Any]
) -> int:
    """Returns the cache length: ``--max-len``, or what the longest prompt and the new tokens
    need."""
    most = config.max_position_embeddings
    if arguments.max_len is not None:
        return max_len_of(arguments, config)
    needed = longest + settings.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    return min(-(-needed // _MAX_LEN_MULTIPLE) * _MAX_LEN_MULTIPLE, most)


def read_prompts(sources: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the texts of ``--prompt`` and ``--prompt-file``, given as pairs of the flag and its
    value, in their order. ``--prompt -`` is standard input."""
    if not sources:
        raise ValueError("--prompt: expected a --prompt or a --prompt-file, got none")
    if list(sources).count(("--prompt", "-")) > 1:
        raise ValueError("--prompt: expected - once, as standard input is read once; got it twice")
    return [_read(flag, value) for flag, value in sources]


def _read(flag: str, value: str) -> str:
    if flag == "--prompt-file":
        name = f"{flag} {value}"
        try:
            text = _decode(name, Path(value).read_bytes())
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror or error}") from None
    elif value == "-":
        name = "standard input"
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise _not_utf8(name, error.object[error.start], f"byte {error.start}") from None
    else:
        name, text = flag, value
    check_text(name, text)
    if not text:
        raise ValueError(f"prompt: expected text, got an empty prompt from {name}")
    return text


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, content[error.start], f"byte {error.start}") from None


def check_text(name: str, text: str) -> None:
    """Raises ValueError unless a text came from valid UTF-8. Python turns an invalid byte of an
    argument, and in the C locale of standard input, into a lone surrogate. ``name`` is the source
    of the text."""
    for position, character in enumerate(text):
        if 0xDC80 <= ord(character) <= 0xDCFF:
            raise _not_utf8(name, ord(character) - 0xDC00, f"character {position}")
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise ValueError(
                f"{name}: expected Unicode text, got the lone surrogate U+{ord(character):04X} at"
                f" character {position}"
            )


def _not_utf8(name: str, byte: int, where: str) -> ValueError:
    return ValueError(f"{name}: expected UTF-8, got the byte 0x{byte:02x} at {where}")
