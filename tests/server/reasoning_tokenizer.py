"""A tokenizer like DeepSeek's, with tokens that begin and end reasoning and are not special."""

from __future__ import annotations

import json
from pathlib import Path

import dsv3_jax
from dsv3_jax.tokenizer import Tokenizer


def reasoning_tokenizer(directory: Path) -> Tokenizer:
    """Returns the demo's tokenizer with the tokens ``<think>`` and ``</think>``.

    Args:
      directory: for its file.
    """
    demo = Path(dsv3_jax.__file__).parent / "demo"
    described = json.loads((demo / "tokenizer.json").read_text("utf-8"))
    added = described["added_tokens"]
    for number, text in ((2048, "<think>"), (2049, "</think>")):
        added.append({**added[-1], "id": number, "content": text, "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(described), "utf-8")
    return Tokenizer(directory)
