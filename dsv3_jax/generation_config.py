"""End tokens from generation_config.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import is_int
from dsv3_jax.hf_config import as_json, read_json


def with_end_tokens(config: ModelConfig, directory: Path) -> ModelConfig:
    """Returns ``config`` with the end tokens of the directory's generation_config.json, if any.

    transformers stops at these tokens instead of those in config.json. Instruct models share the
    config.json of their base model but end their turns with another token. No other key is read,
    because sampling settings are the caller's choice.

    Raises:
      ValueError: the file is not a JSON object, or its eos_token_id is not in the vocabulary.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return config
    eos = read_json(path).get("eos_token_id")
    if eos is None:
        return config
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    vocabulary = range(config.vocab_size)
    if not ids or any(not is_int(i) or i not in vocabulary for i in ids):
        raise ValueError(
            f"{path}: eos_token_id: expected token ids from 0 to {config.vocab_size - 1},"
            f" got {as_json(eos)}"
        )
    return dataclasses.replace(config, eos_token_id=tuple(dict.fromkeys(ids)))
