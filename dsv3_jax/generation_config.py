"""BOS and end tokens from the files next to config.json."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import as_json, is_int
from dsv3_jax.hf_config import read_json
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NAME = "generation_config.json"


def with_end_tokens(config: ModelConfig, directory: Path) -> ModelConfig:
    """Returns ``config`` with the end tokens of the directory's generation_config.json, if any.

    transformers stops at these tokens instead of those in config.json. Instruct models share the
    config.json of their base model but end their turns with another token. No other key is read:
    sampling settings are the caller's choice. Raises ValueError if the file is not a JSON object,
    or its token ids are not in the vocabulary.
    """
    ids = _token_ids(config, directory, "eos_token_id")
    return config if not ids else dataclasses.replace(config, eos_token_id=ids)


def with_absent_tokens(
    config: ModelConfig, directory: Path, tokenizer: Tokenizer | None
) -> ModelConfig:
    """Returns ``config`` with BOS and end tokens where config.json has none: those of
    generation_config.json, or else of the tokenizer. A model without BOS stays one.

    transformers would assume the ids 0 and 1, which are ordinary tokens in some vocabularies.
    Raises ValueError as :func:`with_end_tokens`.
    """
    tokens: dict[str, Any] = {}
    for name, is_absent in (
        ("bos_token_id", config.bos_token_id is None),
        ("eos_token_id", not config.eos_token_id),
    ):
        if not is_absent:
            continue
        ids = _token_ids(config, directory, name)
        own = getattr(tokenizer, name, None)
        if not ids and own is not None and own < config.vocab_size:
            ids = (own,)
        if ids:
            tokens[name] = ids if name == "eos_token_id" else ids[0]
        elif name == "eos_token_id":
            logger.warning(
                "%s: no file names an end token, so that texts end only at their limits", directory
            )
    return dataclasses.replace(config, **tokens) if tokens else config


def _token_ids(config: ModelConfig, directory: Path, name: str) -> tuple[int, ...]:
    """Returns a key of generation_config.json, which has one token or a list. Empty without it."""
    path = directory / _NAME
    value = read_json(path).get(name) if path.is_file() else None
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    vocabulary = range(config.vocab_size)
    if not ids or any(not is_int(i) or i not in vocabulary for i in ids):
        raise ValueError(
            f"{path}: {name}: expected token ids from 0 to {config.vocab_size - 1},"
            f" got {as_json(value)}"
        )
    return tuple(dict.fromkeys(ids))
